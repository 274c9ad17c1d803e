"""Codecs of stored keys and values: 8 or 4 bits a value, after the model's own constants have been removed.

Keys are stored before rotation. There the bias of `k_proj` (Qwen2, Qwen2.5) and the weight of `k_norm` (Qwen3) are
constants of the weights, and they cause the outliers that ruin coarse codes. Both are removed exactly before rounding,
and `link` restores them. A code is approximate: a coded key or value never equals the computed one.

The values of a token and head share a scale and a zero in float16 (`int8`), or every 32 of them do (`int4`): value =
zero + code x scale. The zero is rounded down and the scale up, so that no value is clipped and the error is half a
scale at most, however far from 0 a group is.

Coded data is two buffers, codes and scales, each contiguous, for copies in bulk. Outside memory the codes of a layer's
keys come first, then their scales; then those of its values.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.common.checks import SIZES


@dataclasses.dataclass(frozen=True)
class Codec:
    """Method of storing keys and values.

    Letters: `T` tokens, `K` key-value heads, `D` head width.

    Attributes:
      name: Name of the codec.
      bits: Bits of a code.
      shares: Number of values that share a scale; None: those of a head. All of a narrower head.
    """

    name: str
    bits: int
    shares: int | None = None

    def group(self, width: int) -> int:
        """Return how many values of a head of `width` share a scale.

        Raises:
          ValueError: The codec does not support the width.
        """
        group = min(self.shares or width, width)
        if width < 2 or width % 2 or width % group:
            also = f" and at most {self.shares} or a multiple of {self.shares}" if self.shares else ""
            raise ValueError(f"head width must be even{also} for codec {self.name!r}, got {width}")
        return group

    def buffers(self, kv_heads: int, width: int) -> tuple[int, int]:
        """Return the bytes of a token's keys, or of its values: (codes, scales).

        Raises:
          ValueError: The codec does not support the width.
        """
        groups = width // self.group(width)
        return kv_heads * width * self.bits // 8, kv_heads * groups * 4

    def encode(
        self, x: jax.Array, bias: jax.Array | None = None, weight: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Code keys before rotation, with the model's constants, or values, without.

        Groups decode to non-finite values if they hold NaN, infinities or values below the least float16, or if they
        span more than float16 scales do.

        Args:
          x: `[T, K, D]`, of any float dtype.
          bias: Bias that was added last, `[K, D]`.
          weight: Weight of each channel, `[D]`. 0 is stored if it is 0.

        Returns:
          Codes and scales of each head, uint8 `[T, K, bytes]` each. Of `int4`, byte j of a head has the code of channel
          j in its low half and that of channel j + D / 2 in its high half: rotation pairs these two.

        Raises:
          ValueError: The codec does not support the width.
        """
        T, K, D = x.shape
        group = self.group(D)
        x = x.astype(jnp.float32)
        if bias is not None:
            x = x - bias.astype(jnp.float32)
        if weight is not None:
            w = weight.astype(jnp.float32)
            x = jnp.where(w != 0, x / jnp.where(w != 0, w, 1), jnp.where(jnp.isfinite(x), 0, x))
        x = x.reshape(T, K, D // group, group)
        steps = 2**self.bits - 1
        # Minima and maxima of XLA may ignore NaN.
        zero = _rounded(jnp.where(jnp.isfinite(x).all(-1), x.min(-1), jnp.nan), up=False)
        scale = _rounded((x.max(-1) - _wide(zero)) / steps, up=True)
        wide = _wide(scale)[..., None]
        code = (x - _wide(zero)[..., None]) / jnp.where(wide > 0, wide, 1)
        code = jnp.nan_to_num(jnp.clip(jnp.round(code), 0, steps)).astype(jnp.uint8).reshape(T, K, D)
        if self.bits == 4:
            code = code[..., : D // 2] | code[..., D // 2 :] << 4
        scales = jax.lax.bitcast_convert_type(jnp.stack([scale, zero], -1), jnp.uint8)
        return code, scales.reshape(T, K, -1)

    def decode(
        self, codes: jax.Array, scales: jax.Array, bias: jax.Array | None = None, weight: jax.Array | None = None
    ) -> jax.Array:
        """Return what `encode` coded, as float32 `[T, K, D]`."""
        if self.bits == 4:
            codes = jnp.concatenate([codes & 15, codes >> 4], -1)
        pairs = self.pairs(scales).astype(jnp.float32)
        scale, zero = (jnp.repeat(pairs[..., i], self.group(codes.shape[-1]), -1) for i in range(2))
        x = codes.astype(jnp.float32) * scale + zero
        if weight is not None:
            x = x * weight.astype(jnp.float32)
        return x if bias is None else x + bias.astype(jnp.float32)

    def pairs(self, scales: jax.Array) -> jax.Array:
        """Return a buffer of scales, `[..., bytes]`, as float16 `[..., groups, 2]`: scale and zero."""
        low, high = (scales.reshape(-1, 2)[:, i].astype(jnp.uint16) for i in range(2))  # in this form XLA fuses it
        return jax.lax.bitcast_convert_type(low | high << 8, jnp.float16).reshape(*scales.shape[:-1], -1, 2)


def _rounded(x: jax.Array, *, up: bool) -> jax.Array:
    """Round to the next float16 that is not below (`up`) or above.

    NaN stays NaN, and a value beyond the range on that side becomes infinite.
    """
    near = x.astype(jnp.float16)
    wrong = _wide(near) < x if up else _wide(near) > x
    end = jnp.asarray(jnp.inf if up else -jnp.inf, jnp.float16)
    return jnp.where(wrong, jnp.nextafter(near, end), near)


def _wide(x: jax.Array) -> jax.Array:
    """Return float16 as float32. XLA may drop a conversion there and back, and with it the rounding that is needed."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    exponent, fraction = bits >> 10 & 31, bits & 1023
    units = jnp.asarray([2.0 ** max(e - 25, -24) if e < 31 else jnp.inf for e in range(32)], jnp.float32)
    size = (fraction + jnp.where(exponent > 0, 1024, 0)).astype(jnp.float32) * units[exponent]
    size = jnp.where((exponent == 31) & (fraction > 0), jnp.nan, size)
    return jnp.where(bits >> 15 == 1, -size, size)


def overflow(dtype: Any) -> float:
    """Return the least magnitude that a dtype rounds to infinity."""
    limits = jnp.finfo(dtype)
    return math.inf if limits.bits == 32 else float(limits.max) + 2.0 ** (limits.maxexp - limits.nmant - 2)


CODECS: dict[str, Codec] = {name: Codec(name, bits, shares) for name, (bits, shares) in SIZES.items()}


def find(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
      ValueError: There is none.
    """
    if name not in CODECS:
        raise ValueError(f"codec must be one of {tuple(CODECS)}, got {name!r}")
    return CODECS[name]
