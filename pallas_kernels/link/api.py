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
    """Writes stored K and V of a layer into the pool, at any slots and positions.

    Keys are stored as they are before rotation, so one rotation by the new absolute position is all that moving
    an image takes, whatever the layout of M-RoPE. The result equals what computing the same keys at these positions
    writes, up to how often a compiler rounds on the way (the GPU kernel: once, from float32), and up to the codec's
    error. What has been coded is decoded on the way, rounded to the pool's dtype, and from then on handled alike.

    The pool's values are finite, which `vlcache_jax.pallas_kernels.attention` relies on: where a stored value is NaN or
    infinite, 0 is written, and NaN to the same place of the key (`vlcache_jax.pallas_kernels.carry_flaws`). So what is
    damaged reaches exactly the rows that see it. Keys may hold anything.

    Letters: `G` layers that are stored together, `T` tokens, of all images, `C` tokens that an image has room for,
    `S` slots, `K` key-value heads, `D` head width.

    Args:
      k_pool: Keys of a layer `[S, K, D]`; updated in place where it is donated.
      v_pool: Values of a layer `[S, K, D]`.
      images: What is stored, of each image its planes, whole: a slice that the caller makes may be copied. That is one,
        keys before rotation and values `[G, 2, C, K, D]` in the pool's dtype, or, coded, two, the codes and the scales,
        uint8 `[G, 2, C, K, bytes]` each (`Codec.encode`). All images have as many tokens, the first of their `C`, and
        those of an image follow those of the one before it.
      slot: Where each token goes, int32 `[T]`, none negative and all below `S` distinct; tokens at slots from `S` on,
        of which there may be any number, write nothing. A numpy array is checked; one of jax is not, because it may
        have to be waited for (`vlcache_jax.pallas_kernels.link.check_slots`).
      cos: Of each token's angles, `[T, 1, D / 2]`, in the dtype of the keys.
      sin: Likewise.
      source: Which of the `C` of a single image each token is, int32 `[T]`. Of every eight tokens, counted from the
        first, the source of the first is a multiple of eight, and those of the others follow it. None: the first `T`.
      layer: Which of the stored layers.
      codec: Of what is stored: a name in `vlcache_jax.pallas_kernels.CODECS`; None if it is not coded.
      bias: Of the coded keys, `[K, D]`, as it was given to `Codec.encode`.
      weight: Of the coded keys, `[D]`, likewise.
      implementation: As in `vlcache_jax.pallas_kernels.attention`; the kernel moves bfloat16 and float16.

    Returns:
      (k_pool, v_pool)

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The implementation asked for does not do this case.
    """
    _check_places(k_pool, v_pool, slot, cos, sin)
    heads, coded = k_pool.shape[1:], None if codec is None else find(codec)
    size = len(slot) // max(len(images), 1)
    if size * len(images) != len(slot):
        raise ValueError(f"slot must be of {len(images)} images of one size, got {len(slot)} tokens")
    if source is not None and (len(images) != 1 or source.shape != slot.shape or source.dtype != jnp.int32):
        raise ValueError(
            f"source must be int32 of shape {list(slot.shape)}, of one image, "
            f"got {source.dtype} {list(source.shape)} of {len(images)}"
        )
    for planes in images:
        _check_planes(planes, heads, k_pool.dtype, coded, size if source is None else 0)
        if not 0 <= layer < len(planes[0]):
            raise ValueError(f"layer must be at least 0 and below {len(planes[0])}, got {layer}")
    _check_constants(bias, weight, heads, coded)
    if isinstance(slot, np.ndarray):
        check_slots(slot, len(k_pool))
        slot = jnp.asarray(slot)

    def check() -> None:
        from vlcache_jax.pallas_kernels.link import mosaic_gpu

        dispatch.check_array(implementation, k_pool)
        mosaic_gpu.check(k_pool, None if source is None else images[0][0].shape[2])

    kept = "" if source is None else ", kept on the device"
    case = f"{codec or 'data'} of {k_pool.dtype} {[size, *heads]}{kept}"
    # Coded linking has a verdict of its own: a chip that does it wrong still links what is not coded.
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
        raise ValueError(f"k_pool, v_pool must have one shape [S, K, D], got {k_pool.shape} and {v_pool.shape}")
    if v_pool.dtype != k_pool.dtype:
        raise ValueError(f"v_pool must have the dtype of k_pool, {k_pool.dtype}, got {v_pool.dtype}")
    if slot.ndim != 1 or slot.dtype != jnp.int32:
        raise ValueError(f"slot must be int32 of shape [T], got {slot.dtype} {list(slot.shape)}")
    angles = (slot.shape[0], 1, k_pool.shape[2] // 2)
    for name, array in (("cos", cos), ("sin", sin)):
        if array.shape != angles or array.dtype != k_pool.dtype:
            raise ValueError(
                f"{name} must be {k_pool.dtype} of shape {list(angles)}, got {array.dtype} {list(array.shape)}"
            )


def _check_planes(
    planes: Sequence[jax.Array], heads: tuple[int, ...], dtype: jnp.dtype, codec: Codec | None, tokens: int
) -> None:
    widths = heads[1:]
    if codec is not None:
        widths, dtype = tuple(size // heads[0] for size in codec.planes(*heads)), jnp.dtype(jnp.uint8)
    ends = [(2, heads[0], width, dtype) for width in widths]
    if [(*plane.shape[1:2], *plane.shape[3:], plane.dtype) for plane in planes] != ends:
        shapes = " and ".join(f"[G, 2, C, {heads[0]}, {width}]" for width in widths)
        got = ", ".join(f"{plane.dtype} {list(plane.shape)}" for plane in planes)
        raise ValueError(f"planes must be {dtype} of shape {shapes}, got {got or 'none'}")
    if (least := min(plane.shape[2] for plane in planes)) < tokens:
        raise ValueError(f"planes must have room for {tokens} tokens, got {least}")


def _check_constants(
    bias: jax.Array | None, weight: jax.Array | None, heads: tuple[int, ...], codec: Codec | None
) -> None:
    if codec is None and not (bias is None and weight is None):
        raise ValueError("bias and weight go with a codec: keys that are not coded have them")
    for name, array, shape in (("bias", bias, heads), ("weight", weight, heads[1:])):
        if array is not None and (array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating)):
            raise ValueError(f"{name} must be of floats, of shape {list(shape)}, got {array.dtype} {list(array.shape)}")


def check_slots(slot: npt.NDArray[np.int32], slots: int) -> None:
    """Sees that of a pool's `slots` none is written twice: two writers of one slot race, and K and V may differ in who
    wins.

    Raises:
      ValueError: a slot is negative, or comes again.
    """
    if len(slot) and slot.min() < 0:
        raise ValueError(f"slot must not be negative, got {slot.min()}")
    written = slot[slot < slots]  # never something as large as the pool
    if (written[1:] > written[:-1]).all():
        return  # most are in order, and sorting takes a hundred times as long
    written = np.sort(written)
    if (twice := written[1:] == written[:-1]).any():
        raise ValueError(f"slot must be distinct below {slots}, got {written[1:][np.argmax(twice)]} more than once")
