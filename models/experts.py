"""A mixture of experts in place of a layer's MLP: a router chooses which few of many MLPs a row passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vlcache_jax.models.config import ExpertsConfig
from vlcache_jax.models.layers import linear
from vlcache_jax.models.quantization import FLOAT8, SCALE, Quantization
from vlcache_jax.pallas_kernels import mix_experts, split


class SparseMLP(nnx.Module):
    """Sum over a row's experts e, weighted by the router: down_e(silu(gate_e x) * up_e x)."""

    def __init__(
        self,
        width: int,
        config: ExpertsConfig,
        quantization: Quantization | None = None,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.gate = linear(width, config.count, bias=False, dtype=dtype, rngs=rngs)
        self.experts: Experts | Float8Experts
        if quantization is None:
            self.experts = Experts(width, config, dtype=dtype)
        else:
            self.experts = Float8Experts(width, config, quantization)

    def __call__(self, x: jax.Array, is_needed: jax.Array, implementation: str | None = None) -> jax.Array:
        """[N, M] -> [N, M]; rows that are not needed, bool [N], pass no expert, and their result is 0."""
        weight, expert = route(self.gate(x), self.config.chosen)
        expert = jnp.where(is_needed[:, None], expert, self.config.count)
        stacks = self.experts.stacks()

        mix: Callable[..., jax.Array] = functools.partial(mix_experts, implementation=implementation)

        def share(*arrays: jax.Array) -> jax.Array:
            """What a device's own experts give, added to what those of others do."""
            first = len(arrays[-1]) * jax.lax.axis_index(split.AXIS)
            return jax.lax.psum(mix(*arrays, first=first), split.AXIS)

        takes = *[split.WHOLE] * 3, *[split.FIRST] * len(stacks)
        mixed = split.spread(share, takes, split.WHOLE) if split.is_spread() else mix
        return mixed(x, weight, expert, *stacks).astype(x.dtype)


class Experts(nnx.Module):
    """The experts' MLPs, as matrices [in, out] of all of them; gate and up are side by side."""

    def __init__(self, width: int, config: ExpertsConfig, *, dtype: Any):
        count, hidden = config.count, config.intermediate_size
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))

    def stacks(self) -> tuple[jax.Array, ...]:
        """What `mix_experts` takes."""
        return self.gate_up_proj[...], self.down_proj[...]


class Float8Experts(nnx.Module):
    """The same in 8 bits, as matrices [out, in], with a factor for each output and group of inputs."""

    def __init__(self, width: int, config: ExpertsConfig, quantization: Quantization):
        count, hidden = config.count, config.intermediate_size

        def factors(outputs: int, inputs: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones((count, outputs, inputs // quantization.group(inputs)), SCALE))

        self.gate_up_proj = nnx.Param(jnp.zeros((count, 2 * hidden, width), FLOAT8))
        self.gate_up_proj_scale = factors(2 * hidden, width)
        self.down_proj = nnx.Param(jnp.zeros((count, width, hidden), FLOAT8))
        self.down_proj_scale = factors(width, hidden)

    def stacks(self) -> tuple[jax.Array, ...]:
        """What `mix_experts` takes."""
        leaves = self.gate_up_proj, self.down_proj, self.gate_up_proj_scale, self.down_proj_scale
        return tuple(leaf[...] for leaf in leaves)


def route(logits: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    """The experts of each row, most probable first.

    Args:
      logits: [N, E].
      chosen: k, of each row.

    Returns:
      (weights [N, k] in the dtype of the logits, which sum to 1, and experts, int32 [N, k])
    """
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weight, expert = jax.lax.top_k(probability, chosen)
    return (weight / weight.sum(axis=-1, keepdims=True)).astype(logits.dtype), expert
