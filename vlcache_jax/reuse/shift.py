"""Linked K, V moved to their new context, by what the computed tokens of the same image show of it.

A new context moves the keys and values of an image's tokens mostly alike: which image of the prompt they belong to, or
what is asked, is the same for all of them. So the mean difference between what the computed tokens were linked as and
what they are now is added to the tokens that are not computed. Public work finds that what reuse loses is of low rank,
and stores a patch for it (Kamera, arXiv 2606.23581); here the patch is of rank one, and nothing is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.layout import Layout
from vlcache_jax.models import Rows, rope
from vlcache_jax.models.config import TextConfig
from vlcache_jax.pallas_kernels import carry_flaws
from vlcache_jax.reuse.plan import Plan

IMAGES = 64  # images whose differences are held at once

Index = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Shift:
    """Up to `IMAGES` images of a step that are computed in part.

    Attributes:
      row_image: which of them each row of the step belongs to, -1 for none [N].
      slot: of their tokens [T].
      position: M-RoPE triples [3, T].
      image: which of them each token belongs to [T].
      depth: in how many layers each token is computed [T]; behind these it is moved.
    """

    row_image: Index
    slot: Index
    position: Index
    image: Index
    depth: Index

    def layer_rows(self, active: int, size: int) -> Index:
        """`row_image` of the first `active` rows, padded to `size`."""
        return np.pad(self.row_image[:active], (0, size - active), constant_values=-1)

    def tokens(self, size: int) -> tuple[Index, Index, Index, Index]:
        """Slot, position, image and depth, padded to `size` tokens that are never moved."""
        missing = size - len(self.slot)
        slot, position, image, depth = (
            np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, missing)])
            for part in (self.slot, self.position, self.image, self.depth)
        )
        depth[len(self.slot) :] = np.iinfo(np.int32).max
        return slot, position, image, depth


def shifted_images(requests: Iterable[tuple[Layout, Plan]], num_layers: int) -> Index:
    """Which image each token of a wave belongs to if the image is to be moved, -1 for none [n].

    An image is if its request's plan says so and computes some of its tokens, but not all of them in all layers.
    """
    numbers = []
    count = 0
    for layout, plan in requests:
        number = np.full(len(layout), -1, np.int32)
        if plan.shift:
            for span in layout.images:
                depth = plan.depth[span.tokens]
                if span.state == "approximate" and depth.any() and depth.min() < num_layers:
                    number[span.tokens] = count
                    count += 1
        numbers.append(number)
    return np.concatenate(numbers)


def make_shifts(
    images: Index,
    new: Sequence[int],
    rows: npt.NDArray[np.int64],
    slot: Index,
    position: Index,
    depth: Index,
    most: int,
) -> Iterator[Shift]:
    """What moves in a step.

    Args:
      images: of the wave's tokens, see `shifted_images` [n].
      new: the images whose first computed tokens are in this step.
      rows: the step's tokens.
      slot, position, depth: of the wave's tokens [n], [3, n], [n].
      most: tokens that move in one call, unless one image has more.
    """
    calls: list[list[int]] = []
    used = most
    for number in new:
        size = int(np.count_nonzero(images == number))
        if used + size > most or len(calls[-1]) == IMAGES:
            calls.append([])
            used = 0
        used += size
        calls[-1].append(number)
    for call in calls:
        local = np.full(int(images.max()) + 2, -1, np.int32)  # the last stands for none
        local[call] = np.arange(len(call))
        tokens = np.flatnonzero(local[images] >= 0)
        yield Shift(
            local[images[rows]],
            slot[tokens],
            position[:, tokens],
            local[images[tokens]],
            depth[tokens].astype(np.int32),
        )


def differences(
    layer: Any, x: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, row_image: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean over each image's rows of what its keys before rotation and values are now, less what was linked.

    Args:
      layer: the decoder layer.
      x: hidden states that enter it, [N, M].
      k, v: its pool before it runs, [S, K, D].
      rows: of the step.
      row_image: see `Shift` [N].

    Returns:
      Two arrays [IMAGES, K, D], float32.
    """
    attention = layer.self_attn
    _, new_k, _, new_v = attention.project(layer.input_layernorm(x), rows, keep=len(x))
    at = jnp.minimum(rows.slot, len(k) - 1)
    is_mine = (row_image == jnp.arange(IMAGES)[:, None]).astype(jnp.float32)
    share = is_mine / jnp.maximum(is_mine.sum(1, keepdims=True), 1)

    def difference(new: jax.Array, old: jax.Array) -> jax.Array:
        apart = new.astype(jnp.float32) - old[at].astype(jnp.float32)
        return jnp.where((row_image >= 0)[:, None, None], apart, 0)

    cos, sin = _rotation(attention.config, rows.position)
    mean = functools.partial(jnp.einsum, "gn,nkd->gkd", share, precision=jax.lax.Precision.HIGHEST)
    return mean(rope.rotate(difference(new_k, k), cos, -sin)), mean(difference(new_v, v))


def move(
    config: TextConfig,
    k: jax.Array,
    v: jax.Array,
    difference: tuple[jax.Array, jax.Array],
    slot: jax.Array,
    position: jax.Array,
    image: jax.Array,
    depth: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Adds each image's difference to those of its tokens that a layer does not compute.

    Args:
      k, v: the layer's pool [S, K, D].
      difference: see `differences`.
      slot, position, image, depth: see `Shift`.
      layer: its number.
    """
    slots = len(k)
    cos, sin = _rotation(config, position)
    to = jnp.where(depth <= layer, slot, slots + jnp.arange(len(slot)))

    def add(old: jax.Array, change: jax.Array) -> jax.Array:
        return (old[slot].astype(jnp.float32) + change).astype(old.dtype)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[to].set(new, mode="drop", unique_indices=True)

    dk, dv = (part[image] for part in difference)
    new_k, new_v = carry_flaws(add(k, rope.rotate(dk, cos, sin)), add(v, dv))
    return write(k, new_k), write(v, new_v)


def _rotation(config: TextConfig, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rope.text_rotation(
        position, config.rope_theta, config.mrope_section, config.mrope_interleaved, jnp.dtype(jnp.float32)
    )
