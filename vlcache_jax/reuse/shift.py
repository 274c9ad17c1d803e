"""Linked K, V moved to their new context, by what the computed tokens of the same image show of it.

A new context moves the keys and values of an image's tokens mostly alike: which image of the prompt they belong to, or
what is asked, is the same for all of them. So the mean difference between what the computed tokens were linked as and
what they are now is added to the tokens that are not computed. Public work finds that what reuse loses is of low rank,
and stores a patch for it (Kamera, arXiv 2606.23581); here the patch is of rank one, and nothing is stored.

The sum is mostly longer than a key is: moved keys are scaled back to the length that they had, which is what a key norm
would give them; without such a norm it helps less, but it helps (docs/research/reuse_study.md). The bias of the key
projection is not scaled: it is the same for all tokens, and may be far longer than all the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.layout import Layout
from vlcache_jax.models import Rows, rope
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.decoder import SelfAttention
from vlcache_jax.pallas_kernels import carry_flaws
from vlcache_jax.reuse.policies import Plan

IMAGES = 64  # images that a step moves at most
TOKENS = 32768  # of images that a step moves at most, unless the pool is smaller
_CHUNK = 1024  # tokens that are held at once

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

    def pack(self, num_rows: int, num_tokens: int) -> tuple[Index, Index]:
        """`Moves.row_image` and `Moves.tokens`, for steps of so many rows, and so many tokens at most."""
        rows = np.pad(self.row_image, (0, num_rows - len(self.row_image)), constant_values=-1)
        tokens = np.zeros((6, num_tokens), np.int32)
        tokens[:, : len(self.slot)] = np.vstack([self.slot, self.position, self.image, self.depth])
        return rows, tokens

    def count(self, layer: int, active: int) -> int:
        """How many tokens a layer has to look at that computes the first `active` rows."""
        is_informed = layer > 0 and (self.row_image[:active] >= 0).any()  # in the first layer nothing differs
        return len(self.slot) if is_informed else 0


class Moves(NamedTuple):
    """What layers have to know of a `Shift`.

    Attributes:
      row_image: int32 [N], -1 for none.
      tokens: int32 [6, T]: slot, the three of position, image and depth.
      layer: number of each.
      count: of the tokens in each.
    """

    row_image: Any
    tokens: Any
    layer: Any
    count: Any


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


def most_moved(images: Index, first: int, most: int) -> int:
    """The image before which a step has to end that begins to move images with number `first`.

    Args:
      images: see `shifted_images` [n].
      most: tokens that a step moves, unless one image has more.
    """
    sizes = np.bincount(images[images >= first] - first)[:IMAGES]
    return first + max(1, int(np.searchsorted(np.cumsum(sizes), most, "right")))


def make_shift(
    images: Index, new: range, rows: npt.NDArray[np.int64], slot: Index, position: Index, depth: Index
) -> Shift | None:
    """What moves in a step, which is nothing where its images have begun before; None: it has no rows of such images.

    Args:
      images: of the wave's tokens, see `shifted_images` [n].
      new: the images whose first computed tokens are in this step.
      rows: the step's tokens.
      slot, position, depth: of the wave's tokens [n], [3, n], [n].
    """
    if (images[rows] < 0).all():
        return None
    local = np.where((images >= new.start) & (images < new.stop), images - new.start, -1).astype(np.int32)
    tokens = np.flatnonzero(local >= 0)
    return Shift(local[rows], slot[tokens], position[:, tokens], local[tokens], depth[tokens].astype(np.int32))


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
    attention: SelfAttention,
    k: jax.Array,
    v: jax.Array,
    difference: tuple[jax.Array, jax.Array],
    moves: Moves,
) -> tuple[jax.Array, jax.Array]:
    """Adds each image's difference to those of its tokens that a layer does not compute.

    Args:
      attention: the layer's.
      k, v: its pool [S, K, D].
      difference: see `differences`.
      moves: which tokens these are.
    """
    tokens = moves.tokens
    chunk = min(_CHUNK, tokens.shape[1])

    def step(i: jax.Array, pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The last chunk begins earlier where it would end behind the array: what it meets again stays.
        first = jnp.minimum(i * chunk, tokens.shape[1] - chunk)
        slot, x, y, z, image, depth = jax.lax.dynamic_slice_in_dim(tokens, first, chunk, 1)
        index = first + jnp.arange(chunk)
        is_moved = (depth <= moves.layer) & (index >= i * chunk) & (index < moves.count)
        to = jnp.where(is_moved, slot, len(k) + jnp.arange(chunk))
        return _moved(attention, *pools, difference, slot, jnp.stack([x, y, z]), image, to)

    return jax.lax.fori_loop(0, -(-moves.count // chunk), step, (k, v))


def _moved(
    attention: SelfAttention,
    k: jax.Array,
    v: jax.Array,
    difference: tuple[jax.Array, jax.Array],
    slot: jax.Array,
    position: jax.Array,
    image: jax.Array,
    to: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What is at `slot`, with the difference of its image, goes to `to`, unless that is beyond the pool."""
    cos, sin = _rotation(attention.config, position)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[to].set(new, mode="drop", unique_indices=True)

    old_k, old_v = k[slot].astype(jnp.float32), v[slot].astype(jnp.float32)
    dk, dv = (part[image] for part in difference)
    own, bias = rope.rotate(old_k, cos, -sin), _bias(attention)
    if bias is not None:
        own -= bias
    weight = attention.k_norm.scale[...] if attention.config.qk_norm else jnp.ones(own.shape[-1])
    factor = length_kept(own, own + dk, weight)
    new_k = (old_k + rope.rotate(dk, cos, sin)) * factor  # where nothing changes, no bit does: the factor is 1
    if bias is not None:
        new_k += rope.rotate(bias * (1 - factor), cos, sin)
    new_k, new_v = carry_flaws(new_k.astype(k.dtype), (old_v + dv).astype(v.dtype))
    return write(k, new_k), write(v, new_v)


def _bias(attention: SelfAttention) -> jax.Array | None:
    """Of the key projection, float32 [K, D], if it has one."""
    return None if (bias := attention.qkv_proj.bias) is None else bias[...][:, -2].astype(jnp.float32)


def length_kept(before: jax.Array, after: jax.Array, weight: jax.Array) -> jax.Array:
    """What moved keys are multiplied by, so that they have the length again that they had before.

    Lengths are those of keys divided by the weight of the key norm; channels whose weight is 0 have none.

    Args:
      before, after: keys without rotation and bias [T, K, D].
      weight: of the key norm; ones where there is none [D].

    Returns:
      [T, K, 1] float32; 1 for keys that are not finite.
    """
    scale = weight.astype(jnp.float32)
    inverse = jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))
    had, has = (jnp.square(part * inverse).sum(-1, keepdims=True) for part in (before, after))
    factor = jnp.sqrt(had / has)
    return jnp.where(jnp.isfinite(factor), factor, 1)


def _rotation(config: TextConfig, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rope.text_rotation(
        position, config.rope_theta, config.mrope_section, config.mrope_interleaved, jnp.dtype(jnp.float32)
    )
