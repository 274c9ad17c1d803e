"""Linear attention with a state: the gated delta rule of Qwen3.5 (Gated DeltaNet), as XLA programs.

Each value head of a sequence has a state S [dk, dv], in float32 whatever the model's dtype. A token with key k, value
v, query q, decay exp(g) and rate beta changes it to

    S <- exp(g) S,    S <- S + k (beta (v - S^T k))^T,    and its output is S^T q.

A prompt is computed in blocks of up to 64 tokens. Within a block, the changes of its tokens are the solution of a
triangular system, so that a block takes a few products of matrices instead of one update per token. A block of one
token uses the rule above, as decoding does. See Yang, Kautz, Hatamizadeh: Gated Delta Networks (2025).

Letters: N rows, C tokens of a block, HK key heads, G value heads of a key head, dk and dv widths of keys and values.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.layer_kinds import (
    BLOCK,
    BlockKind,
    LayerKind,
    LinearAttentionConfig,
    Runs,
    StateArray,
    TokenStates,
)
from vlcache_jax.models.layers import joined, leading_back, times
from vlcache_jax.pallas_kernels import rms_norm, split

NAME = "linear_attention"
EPSILON = 1e-6  # added to the sum of squares of queries and keys, inside the root
FLOAT32 = np.dtype(np.float32)

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def layer_kind(config: LinearAttentionConfig) -> LayerKind:
    """Return the kind of a layer with linear attention: the last inputs of its convolution, and the states S."""
    width = 2 * config.key_width + config.group * config.value_width
    return LayerKind(
        NAME,
        (
            StateArray("conv", (config.key_heads, config.taps - 1, width)),
            StateArray("rule", (config.key_heads, config.group, config.key_width, config.value_width), FLOAT32, True),
        ),
    )


class GatedDeltaNet(nnx.Module):
    """A layer's linear attention: projections, a convolution over tokens, the gated delta rule and a gated norm."""

    def __init__(self, config: TextConfig, layer: int = 0, *, dtype: Any, rngs: nnx.Rngs):
        sizes = config.linear_attention
        assert sizes is not None
        heads, group, width = sizes.key_heads, sizes.group, config.hidden_size
        self.config, self.eps = sizes, config.rms_norm_eps
        kept = functools.partial(config.quantizations_of, layer)
        # The outputs of each key head are together: a cut over key heads is one of the matrices' columns.
        project = functools.partial(joined, width=width, spread=0, bias=False, dtype=dtype)
        self.in_proj_qk = project("in_proj_qk", shape=(heads, 2, sizes.key_width), kept=kept("in_proj_qk"))
        self.in_proj_vz = project("in_proj_vz", shape=(heads, 2 * group, sizes.value_width), kept=kept("in_proj_vz"))
        self.in_proj_ba = project("in_proj_ba", shape=(heads, 2, group), kept=(None, None))
        channels = 2 * sizes.key_width + group * sizes.value_width
        self.conv1d = Convolution((heads, channels, sizes.taps), dtype=dtype)
        self.A_log = nnx.Param(jnp.zeros((heads, group), jnp.float32))
        self.dt_bias = nnx.Param(jnp.zeros((heads, group), jnp.float32))
        self.norm = HeadNorm(sizes.value_width, dtype=dtype)
        inputs = sizes.value_heads * sizes.value_width
        self.out_proj = leading_back(inputs, width, *kept("out_proj"), bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        y: jax.Array,
        memory: list[jax.Array],
        runs: Runs | TokenStates,
        *,
        keep: int,
        implementation: str | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Apply linear attention to normed rows [N, M].

        Args:
          memory: the layer's states, [slots, *shape] each, see `layer_kind`.
          runs: order of the rows and slots of their states.
          keep: number of first rows whose output is needed.
          implementation: implementation of products with FP8 matrices.

        Returns:
          (output [keep, M], memory).
        """
        sizes, dtype = self.config, y.dtype
        qk = times(self.in_proj_qk, y, implementation)
        vz = times(self.in_proj_vz, y, implementation)
        ba = times(self.in_proj_ba, y, implementation)
        flat = len(y), sizes.key_heads, -1
        mixed = jnp.concatenate([qk.reshape(flat), vz[:, :, : sizes.group].reshape(flat)], -1)
        beta = jax.nn.sigmoid(ba[:, :, 0]).astype(jnp.float32)
        decay = jax.nn.softplus(ba[:, :, 1].astype(jnp.float32) + self.dt_bias[...])
        decay = -jnp.exp(self.A_log[...]) * decay
        rule = functools.partial(_by_token if isinstance(runs, TokenStates) else _by_block, sizes)
        takes = split.SECOND, split.SECOND, split.SECOND, split.FIRST, (split.SECOND, split.SECOND), split.WHOLE
        spread = split.spread(rule, takes, (split.SECOND, (split.SECOND, split.SECOND)))
        out, after = spread(mixed, beta, decay, self.conv1d.taps[...], tuple(memory), runs)
        z = vz[:keep, :, sizes.group :]
        out = self.norm(out[:keep].astype(dtype), z, self.eps)
        return times(self.out_proj, out.reshape(keep, -1), implementation), list(after)

    def all_products(self, y: jax.Array, implementation: str) -> tuple[list[jax.Array], jax.Array]:
        """Return the products of normed rows [N, M], and that of an output of zeros [N, M], to check the kernels."""
        heads = jnp.zeros((len(y), self.config.value_heads * self.config.value_width), y.dtype)
        taken = [times(one, y, implementation) for one in (self.in_proj_qk, self.in_proj_vz, self.in_proj_ba)]
        return taken, times(self.out_proj, heads, implementation)


class Convolution(nnx.Module):
    """The weights of a causal convolution for each channel, [HK, channels, taps], the oldest tap first."""

    def __init__(self, shape: tuple[int, ...], *, dtype: Any):
        self.taps = nnx.Param(jnp.zeros(shape, dtype))


class HeadNorm(nnx.Module):
    """An RMS norm of each value head, multiplied by its weight and by silu(z)."""

    def __init__(self, width: int, *, dtype: Any):
        self.scale = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, out: jax.Array, z: jax.Array, eps: float) -> jax.Array:
        normed = rms_norm(out, self.scale[...], eps)
        return (normed * jax.nn.silu(z.astype(jnp.float32))).astype(out.dtype)


def convolve(inputs: jax.Array, weight: jax.Array, count: int) -> jax.Array:
    """Apply the convolution and silu to the last `count` of the inputs.

    Args:
      inputs: inputs of the tokens, after those of the tokens before them, [..., taps - 1 + count, channels].
      weight: [channels, taps], with the leading axes of `inputs` that are not 1.

    Returns:
      [..., count, channels] in the dtype of the inputs.
    """
    wide, taps = inputs.astype(jnp.float32), weight.astype(jnp.float32)
    added = sum(wide[..., i : i + count, :] * taps[..., None, :, i] for i in range(weight.shape[-1]))
    return jax.nn.silu(jnp.asarray(added).astype(inputs.dtype).astype(jnp.float32)).astype(inputs.dtype)


def _heads(sizes: LinearAttentionConfig, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries and keys [..., dk] of length 1, and values [..., G, dv], in float32, of mixed [..., channels]."""
    mixed = mixed.astype(jnp.float32)
    q, k, v = jnp.split(mixed, [sizes.key_width, 2 * sizes.key_width], -1)
    q, k = (x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + EPSILON) for x in (q, k))
    return q * sizes.key_width**-0.5, k, v.reshape(*v.shape[:-1], -1, sizes.value_width)


def update(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to one token.

    Args:
      q, k: [..., HK, dk].
      v: [..., HK, G, dv].
      beta, decay: [..., HK, G].
      state: [..., HK, G, dk, dv].

    Returns:
      (output [..., HK, G, dv], state).
    """
    q, k = q[..., None, :, None], k[..., None, :, None]
    state = state * jnp.exp(decay)[..., None, None]
    delta = (v - (state * k).sum(-2)) * beta[..., None]
    state = state + k * delta[..., None, :]
    return (state * q).sum(-2), state


def update_block(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to a block of C tokens. Tokens with rate and decay 0 change nothing.

    Args:
      q, k: [HK, C, dk].
      v: [HK, G, C, dv].
      beta, decay: [HK, G, C].
      state: [HK, G, dk, dv].

    Returns:
      (outputs [HK, G, C, dv], state).
    """
    size = q.shape[1]
    # The decay from each token to each later one is summed on its own. As a difference of sums since the begin, which
    # reach -20 000, it would lose the digits of tokens that forget little.
    is_before = np.tri(size, dtype=bool)
    apart = _matmul(is_before.astype(np.float32), jnp.where(is_before.T, 0, decay[..., :, None]))
    between = jnp.exp(jnp.where(is_before, apart, -jnp.inf))
    since_begin = jnp.exp(jnp.cumsum(decay, -1))[..., None]
    k, q = k[:, None], q[:, None]
    # What each token adds, minus what earlier tokens of the block have added along its key. What the state before the
    # block holds along the keys goes first: subtracted from the solution, it would cancel digits.
    system = _matmul(k, k.swapaxes(-1, -2)) * between * beta[..., None]
    given = (v - _matmul(k * since_begin, state)) * beta[..., None]
    added = _matmul(unit_inverse(system), given)
    out = _matmul(q * since_begin, state) + _matmul(_matmul(q, k.swapaxes(-1, -2)) * between, added)
    until_end = between[..., -1, :, None]
    state = state * since_begin[..., -1:, :] + _matmul((k * until_end).swapaxes(-1, -2), added)
    return out, state


def unit_inverse(system: jax.Array) -> jax.Array:
    """Return the inverse of the unit lower triangular matrices that have these entries below the diagonal.

    The inverses X of blocks on the diagonal become those of blocks of twice the size: X - X S X, where S has the
    entries between the two halves of each larger block. Products of matrices are fast on every device. (LAPACK's solver
    is a call that a program loaded from disk does not find. The product (I - L) (I + L^2) (I + L^4)... needs fewer
    products, but its powers reach 1e17 and cancel.)
    """
    size = system.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=system.dtype), system.shape)
    row, column = np.indices((size, size))
    half = 1
    while half < size:
        is_between = (row // (2 * half) == column // (2 * half)) & (row // half > column // half)
        inverse = inverse - _matmul(inverse, _matmul(jnp.where(is_between, system, 0), inverse))
        half *= 2
    return inverse


def _identity(state: jax.Array) -> jax.Array:
    """Return the state of the form of `state` that changes no state which it is multiplied by."""
    return jnp.broadcast_to(jnp.eye(state.shape[-2], state.shape[-1], dtype=state.dtype), state.shape)


def _by_token(
    sizes: LinearAttentionConfig,
    mixed: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
    weight: jax.Array,
    memory: tuple[jax.Array, jax.Array],
    runs: TokenStates,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the outputs [N, HK, G, dv] of rows of different sequences, and the states after them."""
    tails, states = memory
    inputs = jnp.concatenate([tails[runs.source], mixed[:, :, None]], 2)
    q, k, v = _heads(sizes, convolve(inputs, weight, 1)[:, :, 0])
    out, after = update(q, k, v, beta, decay, states[runs.source])
    write: dict[str, Any] = {"mode": "drop", "unique_indices": True}
    return out, (tails.at[runs.target].set(inputs[:, :, 1:], **write), states.at[runs.target].set(after, **write))


def _by_block(
    sizes: LinearAttentionConfig,
    mixed: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
    weight: jax.Array,
    memory: tuple[jax.Array, jax.Array],
    runs: Runs,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the outputs [N, HK, G, dv] of rows in any order, and the states after their blocks."""
    count = len(mixed)
    order = jnp.zeros(count, jnp.int32).at[runs.place].set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)

    def in_order(x: jax.Array) -> jax.Array:
        return jnp.pad(x[order], ((0, BLOCK), *[(0, 0)] * (x.ndim - 1)))

    mixed, beta, decay = map(in_order, (mixed, beta, decay))
    inside = jnp.arange(BLOCK, dtype=jnp.int32)

    def one(i: jax.Array, carry: Any) -> Any:
        out, (tails, states) = carry
        start, length, source, target = (field[i] for field in (runs.start, runs.length, runs.source, runs.target))
        kind = None if runs.kind is None else runs.kind[i]
        tail = source if runs.tail is None else runs.tail[i]
        is_token = inside < length

        def rows(x: jax.Array) -> jax.Array:
            """Return the block's rows of x, [C, HK, ...] -> [HK, ..., C], zero after the block."""
            own = lax.dynamic_slice_in_dim(x, start, BLOCK)
            return jnp.moveaxis(jnp.where(is_token.reshape(-1, *[1] * (x.ndim - 1)), own, 0), 0, -1)

        own = rows(mixed).swapaxes(-1, -2)
        inputs = jnp.concatenate([tails[tail], own], 1)
        q, k, v = _heads(sizes, convolve(inputs, weight, BLOCK))
        q, k = (jnp.where(is_token[:, None], x, 0) for x in (q, k))
        v, rate, decayed, before = v.swapaxes(1, 2), rows(beta), rows(decay), states[source]
        if kind is not None:
            is_factor = kind == BlockKind.PASSED  # no values are added, and no tokens pass everything
            v, before = jnp.where(is_factor, 0, v), jnp.where(is_factor & (source == 0), _identity(before), before)

        def alone() -> tuple[jax.Array, jax.Array]:
            made, after = update(q[:, 0], k[:, 0], v[:, :, 0], rate[..., 0], decayed[..., 0], before)
            return jnp.pad(made[:, :, None], ((0, 0), (0, 0), (0, BLOCK - 1), (0, 0))), after

        made, after = lax.cond(length == 1, alone, lambda: update_block(q, k, v, rate, decayed, before))
        if kind is not None:
            is_token &= kind == BlockKind.COMPUTE
            after = lax.cond(
                kind == BlockKind.LINK, lambda: _matmul(states[runs.factor[i]], before) + states[tail], lambda: after
            )
        ending = lax.dynamic_slice_in_dim(inputs, length, sizes.taps - 1, 1)
        # A block without tokens starts where others have outputs.
        earlier = lax.dynamic_slice_in_dim(out, start, BLOCK)
        made = jnp.where(is_token[:, None, None, None], jnp.moveaxis(made, 2, 0), earlier)
        out = lax.dynamic_update_slice_in_dim(out, made, start, 0)
        return out, (tails.at[target].set(ending), states.at[target].set(after))

    heads, group = beta.shape[1:]
    begin = jnp.zeros((count + BLOCK, heads, group, sizes.value_width), jnp.float32)
    out, memory = lax.fori_loop(0, runs.count, one, (begin, memory))
    return out[runs.place], memory
