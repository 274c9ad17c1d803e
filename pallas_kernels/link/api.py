"""The public link function: its contract, and the check of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.link import xla


def link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_raw: jax.Array,
    v: jax.Array,
    slot: jax.Array | npt.NDArray[np.int32],
    cos: jax.Array,
    sin: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes stored K and V into the pool, at any slots and positions.

    Keys are stored as they are before rotation, so one rotation by the new absolute position is all that moving
    an image takes, whatever the layout of M-RoPE. The result equals what computing the same keys at these positions
    writes, up to how often a compiler rounds on the way (the GPU kernel: once, from float32).

    The pool's values are finite, which `vlcache_jax.pallas_kernels.attention` relies on: where a stored value is NaN or
    infinite, 0 is written, and NaN to the same place of the key (`vlcache_jax.pallas_kernels.carry_flaws`). So what is
    damaged reaches exactly the rows that see it. Keys may hold anything.

    Letters: `T` tokens, `S` slots, `K` key-value heads, `D` head width.

    Args:
      k_pool: Keys of a layer `[S, K, D]`; updated in place where it is donated.
      v_pool: Values of a layer `[S, K, D]`.
      k_raw: Keys before rotation `[T, K, D]`.
      v: Values `[T, K, D]`.
      slot: Where each token goes, int32 `[T]`, none negative and all below `S` distinct; tokens at slots from `S` on,
        of which there may be any number, write nothing. A numpy array is checked; one of jax is not, because it may
        have to be waited for (`vlcache_jax.pallas_kernels.link.check_slots`).
      cos: Of each token's angles, `[T, 1, D / 2]`, in the dtype of the keys.
      sin: Likewise.
      implementation: As in `vlcache_jax.pallas_kernels.attention`; the kernel moves bfloat16 and float16.

    Returns:
      (k_pool, v_pool)

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The implementation asked for does not do this case.
    """
    if k_pool.ndim != 3 or v_pool.shape != k_pool.shape:
        raise ValueError(f"k_pool, v_pool must have one shape [S, K, D], got {k_pool.shape} and {v_pool.shape}")
    if v_pool.dtype != k_pool.dtype:
        raise ValueError(f"v_pool must have the dtype of k_pool, {k_pool.dtype}, got {v_pool.dtype}")
    tokens = (slot.shape[0], *k_pool.shape[1:])
    for name, array in (("k_raw", k_raw), ("v", v)):
        if array.shape != tokens or array.dtype != k_pool.dtype:
            raise ValueError(
                f"{name} must be {k_pool.dtype} of shape {list(tokens)}, got {array.dtype} {list(array.shape)}"
            )
    if slot.ndim != 1 or slot.dtype != jnp.int32:
        raise ValueError(f"slot must be int32 of shape [T], got {slot.dtype} {list(slot.shape)}")
    if isinstance(slot, np.ndarray):
        check_slots(slot, len(k_pool))
        slot = jnp.asarray(slot)
    angles = (tokens[0], 1, tokens[2] // 2)
    for name, array in (("cos", cos), ("sin", sin)):
        if array.shape != angles or array.dtype != k_pool.dtype:
            raise ValueError(
                f"{name} must be {k_pool.dtype} of shape {list(angles)}, got {array.dtype} {list(array.shape)}"
            )

    def check() -> None:
        from vlcache_jax.pallas_kernels.link import mosaic_gpu

        dispatch.check_array(implementation, k_pool)
        mosaic_gpu.check(k_pool)

    case = f"k_raw {k_raw.dtype} {list(k_raw.shape)}"
    choice = dispatch.choose("link", case, implementation, check)
    if choice.implementation == "xla":
        return xla.link(k_pool, v_pool, k_raw, v, slot, cos, sin)
    from vlcache_jax.pallas_kernels.link import mosaic_gpu

    interpret = dispatch.interpreter(choice)
    return mosaic_gpu.link(k_pool, v_pool, k_raw, v, slot, cos, sin, interpret=interpret)


def check_slots(slot: npt.NDArray[np.int32], slots: int) -> None:
    """Sees that of a pool's `slots` none is written twice: two writers of one slot race, and K and V may differ in who
    wins.

    Raises:
      ValueError: a slot is negative, or comes again.
    """
    if len(slot) and slot.min() < 0:
        raise ValueError(f"slot must not be negative, got {slot.min()}")
    taken = np.sort(slot[slot < slots])
    again = taken[1:][taken[1:] == taken[:-1]]
    if len(again):
        raise ValueError(f"slot must be distinct below {slots}, got {again[0]} more than once")
