"""The public function that links: its contract, and the checks of its arguments."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.chips import chip_at_hand
from vlcache_jax.pallas_kernels.link import xla
from vlcache_jax.pallas_kernels.link.codec import Codec, find
from vlcache_jax.pallas_kernels.split import FIRST, FOURTH, SECOND, WHOLE, spreads


@spreads(
    gives=SECOND, k_pool=SECOND, v_pool=SECOND, images=FOURTH, slot=WHOLE, cos=WHOLE, sin=WHOLE, source=WHOLE,
    bias=FIRST, weight=WHOLE,
)  # fmt: skip
def link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    images: Sequence[Sequence[jax.Array]],
    slot: jax.Array | npt.NDArray[np.int32],
    cos: jax.Array,
    sin: jax.Array,
    *,
    source: jax.Array | None = None,
    layer: int = 0,
    codec: str | None = None,
    bias: jax.Array | None = None,
    weight: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write the stored keys and values of a layer into the pool, at any slots and positions.

    Keys are stored before rotation, so moving an image takes one rotation by the new absolute position, whatever the
    layout of M-RoPE. The result equals keys that are computed at these positions, up to the number of roundings (the
    GPU kernel: once, from float32), and up to the codec's error. Coded data is decoded first, rounded to the pool's
    dtype, and from then on handled alike.

    The pool's values are finite; `vlcache_jax.pallas_kernels.attention` relies on it. If a stored value is NaN or
    infinite, 0 is written, and NaN to the same place of the key (`vlcache_jax.pallas_kernels.propagate_nonfinite`). So
    damaged data reaches exactly the rows that see it. Keys may hold anything.

    Letters: `G` layers that are stored together, `T` tokens of all images, `C` tokens that an image has room for,
    `S` slots, `K` key-value heads, `D` head width.

    Args:
      k_pool: Keys of a layer `[S, K, D]`; updated in place where it is donated.
      v_pool: Values of a layer `[S, K, D]`.
      images: Buffers of each image, in full (a slice that the caller makes may be copied). Without a codec, one buffer:
        keys before rotation and values `[G, 2, C, K, D]` in the pool's dtype. With a codec, two: codes and scales,
        uint8 `[G, 2, C, K, bytes]` each (`Codec.encode`). All images have equally many tokens, the first of their `C`;
        the tokens of an image follow those of the one before it.
      slot: Slot of each token, int32 `[T]`, none negative and all below `S` distinct. Tokens with a slot from `S` on
        write nothing; any number may have such a slot. A numpy array is checked
        (`vlcache_jax.pallas_kernels.link.check_slots`); a jax array is not, because this could wait for the device.
      cos: Cosines of each token's angles, `[T, 1, D / 2]`, in the dtype of the keys. If there are fewer, only the first
        values of each head rotate, twice as many as they are; the kernel does not do this.
      sin: Sines of these angles, of the same shape and dtype.
      source: Index among the `C` tokens of a single image, for each token, int32 `[T]`. In every group of eight tokens
        the first source is a multiple of eight, and the others follow it. None: the first `T`.
      layer: Index among the stored layers.
      codec: Codec of the stored data: a name in `vlcache_jax.pallas_kernels.CODECS`; None if it is not coded.
      bias: Bias of the coded keys, `[K, D]`, as passed to `Codec.encode`.
      weight: Weight of the coded keys, `[D]`, as passed to `Codec.encode`.
      implementation: As in `vlcache_jax.pallas_kernels.attention`; the kernel moves bfloat16 and float16.

    Returns:
      (k_pool, v_pool)

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The requested implementation does not support this case.
    """
    _check_places(k_pool, v_pool, slot, cos, sin)
    heads, coded = k_pool.shape[1:], None if codec is None else find(codec)
    size = len(slot) // max(len(images), 1)
    if size * len(images) != len(slot):
        raise ValueError(
            f"slot must have the same number of tokens for each of {len(images)} images, got {len(slot)} tokens"
        )
    if source is not None and (len(images) != 1 or source.shape != slot.shape or source.dtype != jnp.int32):
        raise ValueError(
            f"source must be int32 of shape {list(slot.shape)} for exactly one image, "
            f"got {source.dtype} {list(source.shape)} for {len(images)}"
        )
    for buffers in images:
        _check_buffers(buffers, heads, k_pool.dtype, coded, size if source is None else 0)
        if not 0 <= layer < len(buffers[0]):
            raise ValueError(f"layer must be at least 0 and below {len(buffers[0])}, got {layer}")
    _check_constants(bias, weight, heads, coded)
    if isinstance(slot, np.ndarray):
        check_slots(slot, len(k_pool))
        slot = jnp.asarray(slot)

    def check() -> None:
        from vlcache_jax.pallas_kernels.link import mosaic_gpu

        if (half := cos.shape[-1]) != k_pool.shape[2] // 2:
            raise NotImplementedError(
                f"mosaic_gpu rotates all {k_pool.shape[2]} values of a head, got angles for {2 * half}"
            )
        dispatch.check_array(implementation, k_pool)
        mosaic_gpu.check(k_pool, None if source is None else images[0][0].shape[2])

    kept = "" if source is None else ", kept on the device"
    case = f"{codec or 'data'} of {k_pool.dtype} {[size, *heads]}{kept}"
    # Coded linking has its own self-test result: a chip that does it wrong still links uncoded buffers.
    checks = dict.fromkeys(dispatch.FAMILIES, check)
    choice = dispatch.choose("link" if coded is None else "link_coded", case, implementation, checks)
    if choice.implementation == "xla":
        return xla.link(k_pool, v_pool, images, source, slot, cos, sin, bias, weight, layer=layer, codec=coded)
    from vlcache_jax.pallas_kernels.link import mosaic_gpu

    of_hopper = dispatch.family(choice.implementation) == dispatch.HOPPERS
    bulk = dispatch.has_bulk_copies(choice) and (of_hopper or mosaic_gpu.has_room(k_pool, coded, chip_at_hand()))
    return mosaic_gpu.link(
        k_pool, v_pool, images, source, slot, cos, sin, bias, weight,
        layer=layer, codec=coded, bulk=bulk, interpret=dispatch.interpreter(choice),
    )  # fmt: skip


def _check_places(k_pool: jax.Array, v_pool: jax.Array, slot: Any, cos: jax.Array, sin: jax.Array) -> None:
    if k_pool.ndim != 3 or v_pool.shape != k_pool.shape:
        raise ValueError(f"k_pool and v_pool must have the same shape [S, K, D], got {k_pool.shape} and {v_pool.shape}")
    if v_pool.dtype != k_pool.dtype:
        raise ValueError(f"v_pool must have the dtype of k_pool, {k_pool.dtype}, got {v_pool.dtype}")
    if slot.ndim != 1 or slot.dtype != jnp.int32:
        raise ValueError(f"slot must be int32 of shape [T], got {slot.dtype} {list(slot.shape)}")
    half = min(cos.shape[-1], k_pool.shape[2] // 2)
    angles = (slot.shape[0], 1, half)
    for name, array in (("cos", cos), ("sin", sin)):
        if array.shape != angles or array.dtype != k_pool.dtype:
            raise ValueError(
                f"{name} must be {k_pool.dtype} of shape {list(angles)}, got {array.dtype} {list(array.shape)}"
            )


def _check_buffers(
    buffers: Sequence[jax.Array], heads: tuple[int, ...], dtype: jnp.dtype, codec: Codec | None, tokens: int
) -> None:
    widths = heads[1:]
    if codec is not None:
        widths, dtype = tuple(size // heads[0] for size in codec.buffers(*heads)), jnp.dtype(jnp.uint8)
    ends = [(2, heads[0], width, dtype) for width in widths]
    if [(*buffer.shape[1:2], *buffer.shape[3:], buffer.dtype) for buffer in buffers] != ends:
        shapes = " and ".join(f"[G, 2, C, {heads[0]}, {width}]" for width in widths)
        got = ", ".join(f"{buffer.dtype} {list(buffer.shape)}" for buffer in buffers)
        raise ValueError(f"buffers of images must be {dtype} of shape {shapes}, got {got or 'none'}")
    if (least := min(buffer.shape[2] for buffer in buffers)) < tokens:
        raise ValueError(f"buffers of images must hold at least {tokens} tokens, got {least}")


def _check_constants(
    bias: jax.Array | None, weight: jax.Array | None, heads: tuple[int, ...], codec: Codec | None
) -> None:
    if codec is None and not (bias is None and weight is None):
        raise ValueError("bias and weight must be None without a codec, because such keys already include them")
    for name, array, shape in (("bias", bias, heads), ("weight", weight, heads[1:])):
        if array is not None and (array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating)):
            raise ValueError(f"{name} must be floats of shape {list(shape)}, got {array.dtype} {list(array.shape)}")


def check_slots(slot: npt.NDArray[np.int32], slots: int) -> None:
    """Check that no slot below `slots` is written twice. Two writers of one slot race, and K and V may have different
    winners.

    Raises:
      ValueError: A slot is negative, or comes more than once.
    """
    if len(slot) and slot.min() < 0:
        raise ValueError(f"slot must not be negative, got {slot.min()}")
    written = slot[slot < slots]  # never an array as large as the pool
    if (written[1:] > written[:-1]).all():
        return  # most are in order, and sorting takes a hundred times as long
    written = np.sort(written)
    if (twice := written[1:] == written[:-1]).any():
        raise ValueError(f"slot must be unique below {slots}, got {written[1:][np.argmax(twice)]} more than once")
