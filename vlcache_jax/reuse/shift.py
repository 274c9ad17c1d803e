"""Shift: correction of linked KV by the mean change of the recomputed tokens of the same image.

A new context changes the keys and values of an image's tokens mostly alike, because the position of the image and the
question are the same for all of them. The mean difference of recomputed and linked KV is therefore added to the tokens
that are not computed. Published work finds that the error of reuse has low rank, and stores a patch for it
(Kamera, arXiv 2606.23581). Here the patch has rank one, and nothing is stored.

The sum is mostly longer than the linked key. Corrected keys are scaled to the length of the linked key, as a key norm
would do. Models without a key norm gain less from it (docs/research/reuse_study.md). The bias of the key
projection is not scaled: it is the same for all tokens, and can be much longer than the rest.
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
from vlcache_jax.pallas_kernels import propagate_nonfinite
from vlcache_jax.reuse.policies import Plan

IMAGES = 64  # maximum images corrected in a prefill chunk
TOKENS = 32768  # maximum image tokens corrected in a prefill chunk, unless the pool is smaller
_CHUNK = 1024  # tokens corrected at once

Index = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Shift:
    """Partly computed images of a prefill chunk, up to `IMAGES`. N is the chunk's tokens, T the tokens of the images.

    Attributes:
      row_image: index of the image that each token of the chunk belongs to, -1 for none [N].
      slot: KV slot of each image token [T].
      position: M-RoPE positions [3, T].
      image: index of the image that each image token belongs to [T].
      depth: number of layers that compute each image token [T]; later layers correct it.
    """

    row_image: Index
    slot: Index
    position: Index
    image: Index
    depth: Index

    def pack(self, num_rows: int, num_tokens: int) -> tuple[Index, Index]:
        """Return `Moves.row_image` and `Moves.tokens`, padded to `num_rows` and `num_tokens`."""
        rows = np.pad(self.row_image, (0, num_rows - len(self.row_image)), constant_values=-1)
        tokens = np.zeros((6, num_tokens), np.int32)
        tokens[:, : len(self.slot)] = np.vstack([self.slot, self.position, self.image, self.depth])
        return rows, tokens

    def count(self, layer: int, active: int) -> int:
        """Return the number of tokens that a layer corrects, if it computes the first `active` tokens of the chunk."""
        is_informed = layer > 0 and (self.row_image[:active] >= 0).any()  # KV of the first layer does not change
        return len(self.slot) if is_informed else 0


class Moves(NamedTuple):
    """Arrays of a `Shift` that the layers take.

    Attributes:
      row_image: int32 [N], -1 for none.
      tokens: int32 [6, T]: KV slot, three rows of M-RoPE positions, image and depth.
      layer: index of each layer.
      count: number of tokens that each layer corrects.
    """

    row_image: Any
    tokens: Any
    layer: Any
    count: Any


def shifted_images(requests: Iterable[tuple[Layout, Plan]], num_layers: int) -> Index:
    """Return the index of the corrected image that each token of a prefill group belongs to, -1 for none [n].

    An image is corrected if its request's plan has `shift` and computes some of its tokens, but not all of them in all
    layers.
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


def shift_end(images: Index, first: int, max_tokens: int) -> int:
    """Return the image before which a prefill chunk must end if `first` is the first image that it corrects.

    Args:
      images: see `shifted_images` [n].
      max_tokens: maximum tokens that a chunk corrects, unless one image has more.
    """
    sizes = np.bincount(images[images >= first] - first)[:IMAGES]
    return first + max(1, int(np.searchsorted(np.cumsum(sizes), max_tokens, "right")))


def make_shift(
    images: Index, new: range, rows: npt.NDArray[np.int64], slot: Index, position: Index, depth: Index
) -> Shift | None:
    """Return the images that a prefill chunk corrects, or None if the chunk has no tokens of corrected images.

    An image is corrected in the chunk that has its first computed tokens, and not in later ones.

    Args:
      images: image of each token of the prefill group, see `shifted_images` [n].
      new: the images whose first computed tokens are in this chunk.
      rows: indices of the chunk's tokens in the group.
      slot: KV slot of each token of the group [n].
      position: M-RoPE positions of each token of the group [3, n].
      depth: number of layers that compute each token of the group [n].
    """
    if (images[rows] < 0).all():
        return None
    local = np.where((images >= new.start) & (images < new.stop), images - new.start, -1).astype(np.int32)
    tokens = np.flatnonzero(local >= 0)
    return Shift(local[rows], slot[tokens], position[:, tokens], local[tokens], depth[tokens].astype(np.int32))


def differences(
    layer: Any, x: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, row_image: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the mean difference of computed and linked KV over the computed tokens of each image.

    Args:
      layer: the decoder layer.
      x: hidden states that enter it, [N, M].
      k, v: its KV pool before it runs, [S, K, D].
      rows: the tokens of the chunk.
      row_image: see `Shift` [N].

    Returns:
      Differences of the keys before rotation and of the values, each float32 [IMAGES, K, D].
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
    """Add each image's difference to the KV of those tokens that the layer does not compute.

    Args:
      attention: attention of the layer.
      k, v: KV pool of the layer [S, K, D].
      difference: see `differences`.
      moves: the tokens to correct.

    Returns:
      The KV pool, two arrays [S, K, D].
    """
    tokens = moves.tokens
    chunk = min(_CHUNK, tokens.shape[1])

    def step(i: jax.Array, pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The last piece begins earlier if it would end after the array. Tokens that it reads again do not change.
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
    """Write the KV at `slot`, plus the difference of its image, to `to`. Slots outside of the pool are not written."""
    cos, sin = _rotation(attention.config, position)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[to].set(new, mode="drop", unique_indices=True)

    old_k, old_v = k[slot].astype(jnp.float32), v[slot].astype(jnp.float32)
    dk, dv = (part[image] for part in difference)
    own, bias = rope.rotate(old_k, cos, -sin), _bias(attention)
    if bias is not None:
        own -= bias
    weight = attention.k_norm.factor if attention.config.qk_norm else jnp.ones(own.shape[-1])
    factor = length_kept(own, own + dk, weight)
    new_k = (old_k + rope.rotate(dk, cos, sin)) * factor  # a difference of 0 leaves all bits: the factor is 1
    if bias is not None:
        new_k += rope.rotate(bias * (1 - factor), cos, sin)
    new_k, new_v = propagate_nonfinite(new_k.astype(k.dtype), (old_v + dv).astype(v.dtype))
    return write(k, new_k), write(v, new_v)


def _bias(attention: SelfAttention) -> jax.Array | None:
    """Return the bias of the key projection, float32 [K, D], or None if it has none."""
    return None if (bias := attention.qkv_proj.bias) is None else bias[...][:, -2].astype(jnp.float32)


def length_kept(before: jax.Array, after: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the factor that gives corrected keys the length that they had before.

    Lengths are those of keys divided by the weight of the key norm. Channels of weight 0 do not count.

    Args:
      before, after: keys without rotation and bias [T, K, D].
      weight: weight of the key norm [D]; ones if the model has none.

    Returns:
      Factor of each key, float32 [T, K, 1]; 1 for keys that are not finite.
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
