"""The text decoder of all families, computed layer by layer for a set of rows.

A *row* is one active token. In each layer, the rows write K and V to their KV slots. Then the first `keep` rows attend
to the slots in their interval and continue. Full prefill, packed prefill, chunks, selective recompute and decode are
the same step with different rows. `SparseMLP` is a mixture of experts in place of a layer's MLP: a router chooses a few
of many MLPs for each row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from vlcache_jax.models import rope
from vlcache_jax.models.config import ExpertsConfig, TextConfig
from vlcache_jax.models.layer_kinds import FULL_ATTENTION, Runs, TokenStates
from vlcache_jax.models.layers import GatedMLP, RMSNorm, Table, joined, leading_back, linear, split_product, times
from vlcache_jax.models.linear_attention import NAME as LINEAR_ATTENTION
from vlcache_jax.models.linear_attention import GatedDeltaNet
from vlcache_jax.models.quantization import FLOAT8, SCALE, Quantization
from vlcache_jax.pallas_kernels import Work, attention, mix_experts, paged_attention, rotate_write, rotated, split


class SparseMLP(nnx.Module):
    """A mixture of experts: the router's weighted sum of down_e(silu(gate_e x) * up_e x) over a row's experts e.

    If the model has a shared expert, its MLP times the sigmoid of its gate is added. `shared` is the storage of the
    shared expert's two products in FP8.
    """

    def __init__(
        self,
        width: int,
        config: ExpertsConfig,
        quantization: Quantization | None = None,
        shared: tuple[Sequence[Quantization | None], Quantization | None] = ((None, None), None),
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.config = config
        if config.shared_size:
            self.shared_expert = GatedMLP(width, config.shared_size, *shared, bias=False, dtype=dtype, rngs=rngs)
            self.shared_expert_gate = linear(width, 1, bias=False, dtype=dtype, rngs=rngs)
        self.gate = linear(width, config.count, bias=False, dtype=dtype, rngs=rngs)
        self.experts: Experts | Float8Experts
        if quantization is None:
            self.experts = Experts(width, config, dtype=dtype)
        else:
            self.experts = Float8Experts(width, config, quantization)

    def __call__(self, x: jax.Array, is_needed: jax.Array, implementation: str | None = None) -> jax.Array:
        """Apply the experts, [N, M] -> [N, M]. Rows without `is_needed`, bool [N], use none that the router chooses."""
        weight, expert = route(self.gate(x), self.config.chosen)
        expert = jnp.where(is_needed[:, None], expert, self.config.count)
        stacks = self.experts.stacks()

        mix: Callable[..., jax.Array] = functools.partial(mix_experts, implementation=implementation)

        def share(*arrays: jax.Array) -> jax.Array:
            """Sum the outputs of all devices' experts."""
            first = len(arrays[-1]) * jax.lax.axis_index(split.AXIS)
            return jax.lax.psum(mix(*arrays, first=first), split.AXIS)

        takes = *[split.WHOLE] * 3, *[split.FIRST] * len(stacks)
        mixed = split.spread(share, takes, split.WHOLE) if split.is_spread() else mix
        out = mixed(x, weight, expert, *stacks).astype(x.dtype)
        if not self.config.shared_size:
            return out
        return out + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x, implementation)


class Experts(nnx.Module):
    """The MLPs of all experts, as stacked matrices [E, in, out]. Gate and up are side by side."""

    def __init__(self, width: int, config: ExpertsConfig, *, dtype: Any):
        count, hidden = config.count, config.intermediate_size
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))

    def stacks(self) -> tuple[jax.Array, ...]:
        """Return the weights for `mix_experts`."""
        return self.gate_up_proj[...], self.down_proj[...]


class Float8Experts(nnx.Module):
    """The MLPs of all experts in FP8, as matrices [E, out, in], with a scale for each output and group of inputs."""

    def __init__(self, width: int, config: ExpertsConfig, quantization: Quantization):
        count, hidden = config.count, config.intermediate_size

        def factors(outputs: int, inputs: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones((count, outputs, inputs // quantization.group(inputs)), SCALE))

        self.gate_up_proj = nnx.Param(jnp.zeros((count, 2 * hidden, width), FLOAT8))
        self.gate_up_proj_scale = factors(2 * hidden, width)
        self.down_proj = nnx.Param(jnp.zeros((count, width, hidden), FLOAT8))
        self.down_proj_scale = factors(width, hidden)

    def stacks(self) -> tuple[jax.Array, ...]:
        """Return the weights for `mix_experts`."""
        leaves = self.gate_up_proj, self.down_proj, self.gate_up_proj_scale, self.down_proj_scale
        return tuple(leaf[...] for leaf in leaves)


def route(logits: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    """Return the experts of each row, the most probable first.

    Args:
      logits: router logits [N, E].
      chosen: experts per row, k.

    Returns:
      Weights [N, k] in the dtype of the logits, which sum to 1, and experts, int32 [N, k].
    """
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weight, expert = jax.lax.top_k(probability, chosen)
    return (weight / weight.sum(axis=-1, keepdims=True)).astype(logits.dtype), expert


SURPLUS = 128  # limit of rows whose queries are computed but not used


class Rows(NamedTuple):
    """The active rows of a step (arrays of one length N, the last axis).

    Padding row i has slot S + i (out of range and distinct, so that its writes are dropped), an empty interval,
    position 0 and source 0.

    Attributes:
      slot: [N] int32, KV slot of the row.
      position: [3, N] int32, M-RoPE triple.
      k_start, k_end: [N] int32, the row attends to slots k_start <= s < k_end.
      source: [N] int32, a vocabulary id, or -1 - i for row i of the encoder rows.
    """

    slot: Any
    position: Any
    k_start: Any
    k_end: Any
    source: Any


class SelfAttention(nnx.Module):
    def __init__(self, config: TextConfig, layer: int = 0, *, dtype: Any, rngs: nnx.Rngs):
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        # The queries of each KV head, its key, its value: a cut over KV heads is one of the matrix's columns. If the
        # output has a gate, each query is followed by its gate.
        shape = kv_heads, heads // kv_heads * (1 + config.output_gate) + 2, width
        kept, back = config.quantizations_of(layer, "qkv_proj"), config.quantization_of(layer, "o_proj")
        self.qkv_proj = joined("qkv_proj", config.hidden_size, shape, kept, spread=0, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = leading_back(heads * width, config.hidden_size, back, bias=False, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(width, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype) for _ in range(2)
            )

    def __call__(
        self,
        y: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rows: Rows,
        work: Work | None = None,
        *,
        keep: int,
        return_kv: bool = False,
        split_k: bool = False,
        implementation: str | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Apply attention to normed rows [N, M].

        Args:
          split_k: the output may be partial sums, see `split_product`.

        Returns:
          (output [keep, M], k, v, (raw keys, values) [N, K, D] or None).
        """
        places = None if work is None else work.packing()
        parts, gate = self._parts(y, keep=keep, implementation=implementation)
        q, k, v, new_kv = rotate_write(
            parts, *self._angles(rows, y.dtype), rows.slot, k, v,
            **self._norms(), keep=keep, places=places, return_kv=return_kv, implementation=implementation,
        )  # fmt: skip
        start, end = rows.k_start[:keep], rows.k_end[:keep]
        if work is None:
            out = attention(q, k, v, start, end, implementation=implementation)
        else:
            packed = places is not None
            out = paged_attention(q, k, v, work, end=end - start, packed=packed, implementation=implementation)
        project = functools.partial(split_product, like=y[:keep]) if split_k else times
        return project(self.o_proj, gated(out, gate), implementation), k, v, new_kv

    def project(self, y: jax.Array, rows: Rows, *, keep: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Project normed rows [N, M] to (q [keep, H, D], rotated k, raw k, v [N, K, D])."""
        parts, _ = self._parts(y, keep=keep)
        return rotated(parts, *self._angles(rows, y.dtype), **self._norms(), keep=keep)

    def back(self, y: jax.Array, out: jax.Array) -> jax.Array:
        """Return the layer's output for attention's output [N, H, D] of normed rows y [N, M]."""
        return times(self.o_proj, gated(out, self._parts(y, keep=len(y))[1]))

    def _angles(self, rows: Rows, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return cos and sin [N, 1, D / 2] of the rows."""
        config = self.config
        return rope.text_rotation(
            rows.position, config.rope_theta, config.mrope_section, config.mrope_interleaved, dtype
        )

    def _norms(self) -> dict[str, Any]:
        """Return the arguments for the norms of heads, if the model has them."""
        if not self.config.qk_norm:
            return {}
        scales = {"q_norm": self.q_norm.scale[...], "k_norm": self.k_norm.scale[...]}
        return {**scales, "eps": self.config.rms_norm_eps, "offset": self.config.norm_offset}

    def _parts(
        self, y: jax.Array, *, keep: int, implementation: str | None = None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """Return `products` without gates, and the gates [keep, H * D], or None if the model has none."""
        first, *rest = self.products(y, keep=keep, implementation=implementation)
        if not self.config.output_gate:
            return [first, *rest], None
        gate = first[:keep, :, 1:-2:2].reshape(keep, -1)
        return [jnp.concatenate([first[:, :, :-2:2], first[:, :, -2:]], 2), *rest], gate

    def all_products(self, y: jax.Array, implementation: str) -> tuple[list[jax.Array], jax.Array]:
        """Return the products of normed rows [N, M], and that of an output of zeros [N, M], to check the kernels."""
        heads = jnp.zeros((len(y), self.config.num_heads * self.config.head_dim), y.dtype)
        taken = self.products(y, keep=len(y), implementation=implementation)
        return taken, times(self.o_proj, heads, implementation)

    def products(self, y: jax.Array, *, keep: int, implementation: str | None = None) -> list[jax.Array]:
        """Multiply normed rows [N, M] to [N, K, G + 2, D]: each KV head's queries, key and value, without rotation.

        If the output has a gate, the second axis has 2 G + 2 entries: each query is followed by its gate.

        Up to `SURPLUS` rows beyond `keep` get queries that are not used. For more rows, the result is two arrays: all
        for the first `keep` rows, and [N - keep, K, 2, D] for the others, which needs a copy of these columns.
        """
        product = functools.partial(times, self.qkv_proj, implementation=implementation)
        if len(y) - keep <= SURPLUS:
            return [product(y)]
        return [product(y[:keep]), product(y[keep:], first=-2)]


def gated(out: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Return the output of attention [N, H, D] as rows [N, H * D], multiplied by the sigmoid of `gate` if given."""
    rows = out.reshape(len(out), -1)
    return rows if gate is None else rows * jax.nn.sigmoid(gate)


MIXERS: dict[str, tuple[str, Callable[..., nnx.Module]]] = {
    FULL_ATTENTION.name: ("self_attn", SelfAttention),
    LINEAR_ATTENTION: ("linear_attn", GatedDeltaNet),
}
"""By kind of layer, the library's name and the module of the part of a layer that looks at other tokens."""


class DecoderLayer(nnx.Module):
    """A decoder layer, applied to a set of rows.

    Attributes:
      self_attn: attention of a layer with pages.
    """

    self_attn: SelfAttention

    def __init__(self, config: TextConfig, layer: int = 0, *, dtype: Any, rngs: nnx.Rngs):
        self.mlp: SparseMLP | GatedMLP
        norm = functools.partial(
            RMSNorm, config.hidden_size, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype
        )
        self.keeps_kv = config.kind_of(layer).keeps_kv
        self.mixer_name, mixer = MIXERS[config.kind_of(layer).name]
        self.input_layernorm = norm()
        setattr(self, self.mixer_name, mixer(config, layer, dtype=dtype, rngs=rngs))
        self.post_attention_layernorm = norm()
        width, kept = config.hidden_size, functools.partial(config.quantization_of, layer)
        if (experts := config.experts_of(layer)) is None:
            both = config.quantizations_of(layer, "gate_up_proj"), kept("down_proj")
            self.mlp = GatedMLP(width, config.intermediate_size, *both, bias=False, dtype=dtype, rngs=rngs)
        else:
            shared = config.quantizations_of(layer, "shared_gate_up_proj"), kept("shared_down_proj")
            self.mlp = SparseMLP(width, experts, kept("experts"), shared, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        memory: list[jax.Array],
        rows: Rows,
        deepstack: jax.Array | None = None,
        work: Work | None = None,
        runs: Runs | TokenStates | None = None,
        *,
        keep: int,
        needed: jax.Array | None = None,
        return_kv: bool = False,
        implementation: str | None = None,
    ) -> tuple[jax.Array, list[jax.Array], tuple[jax.Array, jax.Array] | None]:
        """Apply the layer: all N rows change its memory, and the first `keep` rows attend and continue.

        Args:
          x: hidden states [N, M].
          memory: what this layer keeps of tokens: K and V of the pool [S, K, D], or states [slots, ...].
          rows: the N rows.
          deepstack: [N, M], added to the layer's output (zero at text rows), or None.
          work: work list of the first `keep` rows over pages of the pool. Its tables map logical slots to KV slots.
            None: intervals of rows are KV slots.
          runs: order of the rows, for a layer with states.
          keep: number of rows that continue.
          needed: number of rows that the next layer needs, int32. The others, and rows with empty intervals, use no
            experts. None: all.
          return_kv: also return keys before rotation and values for cache entries. Reversing the rotation of bfloat16
            keys would lose digits.
          implementation: implementation of the kernels.

        Returns:
          (x [keep, M], memory, (raw keys, values) [N, K, D] or None).
        """
        _, y = self.input_layernorm.added(x, implementation=implementation)
        new_kv = None
        mixer: Any = getattr(self, self.mixer_name)
        if self.keeps_kv:
            # The kernel that adds partial sums multiplies by the weight as it is stored.
            split_k = not self.post_attention_layernorm.offset
            out, *memory, new_kv = mixer(
                y, *memory, rows, work, keep=keep, return_kv=return_kv, split_k=split_k, implementation=implementation
            )
        else:
            out, memory = mixer(y, memory, runs, keep=keep, implementation=implementation)
        is_needed = rows.k_end[:keep] > rows.k_start[:keep]
        if needed is not None:
            is_needed &= jnp.arange(keep) < needed
        x = self.transform(x[:keep], out, is_needed, implementation=implementation)
        if deepstack is not None:
            x = x + deepstack[:keep]
        return x, memory, new_kv

    def transform(
        self, x: jax.Array, out: jax.Array, is_needed: jax.Array, *, implementation: str | None = None
    ) -> jax.Array:
        """Apply the part of the layer after attention.

        Args:
          x: hidden states before attention [N, M].
          out: output of attention [N, M], or partial sums, see `split_product`.
          is_needed: bool [N]. Other rows use no experts.

        Returns:
          Hidden states [N, M].
        """
        x, y = self.post_attention_layernorm.added(x, out, implementation=implementation)
        if isinstance(self.mlp, SparseMLP):
            return x + self.mlp(y, is_needed, implementation)
        return x + self.mlp(y, implementation)


class Decoder(nnx.Module):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: TextConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.embed_tokens = Table(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset, dtype=dtype)


def embed(tokens: Table, encoder_rows: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the input of the first layer, and the DeepStack features.

    Args:
      tokens: the token embeddings.
      encoder_rows: [1 + J, E, M], the encoder's E output rows and their J DeepStack features.
      source: [N], see `Rows`.

    Returns:
      (x [N, M], deepstack [J, N, M], zero at text rows)
    """
    is_image = (source < 0)[:, None]
    features = encoder_rows[:, jnp.where(source < 0, -1 - source, 0)]
    x = jnp.where(is_image, features[0], tokens(jnp.maximum(source, 0)))
    return x, jnp.where(is_image, features[1:], 0)
