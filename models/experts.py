"""A mixture of experts in place of a layer's MLP: a router chooses which few of many MLPs a row passes.

Rows are sorted by expert, so that each expert's rows are multiplied together, and nothing else is computed: neither
other experts, nor rows that nobody needs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vlcache_jax.models.config import ExpertsConfig
from vlcache_jax.models.layers import linear
from vlcache_jax.pallas_kernels import grouped_matmul


class SparseMLP(nnx.Module):
    """Sum over a row's experts e, weighted by the router: down_e(silu(gate_e x) * up_e x)."""

    def __init__(self, width: int, config: ExpertsConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.gate = linear(width, config.count, bias=False, dtype=dtype, rngs=rngs)
        self.experts = Experts(width, config, dtype=dtype)

    def __call__(self, x: jax.Array, is_needed: jax.Array) -> jax.Array:
        """[N, M] -> [N, M]; rows that are not needed, bool [N], pass no expert, and their result is 0."""
        weight, expert = route(self.gate(x), self.config.chosen)
        count, chosen = self.config.count, self.config.chosen
        weight = jnp.where(is_needed[:, None], weight, 0)
        # What is not needed is sorted behind all experts.
        expert = jnp.where(is_needed[:, None], expert, count).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.zeros(count, jnp.int32).at[expert].add(1, mode="drop")
        made = self.experts(x[order // chosen], sizes)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
        # As the library does: products in the model's dtype, their sum in float32.
        parts = made[place].reshape(len(x), chosen, -1) * weight[:, :, None]
        return parts.sum(axis=1, dtype=jnp.float32).astype(x.dtype)


class Experts(nnx.Module):
    """The experts' MLPs, as matrices [in, out] of all of them; gate and up are side by side."""

    def __init__(self, width: int, config: ExpertsConfig, *, dtype: Any):
        count, hidden = config.count, config.intermediate_size
        self.gate_up_proj = nnx.Param(jnp.zeros((count, width, 2 * hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, hidden, width), dtype))

    def __call__(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """Rows sorted by expert [R, M], and how many each expert has [E] -> [R, M]."""
        gate, up = jnp.split(grouped_matmul(x, self.gate_up_proj[...], sizes), 2, axis=1)
        return grouped_matmul(jax.nn.silu(gate) * up, self.down_proj[...], sizes)


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
