"""Codecs of stored keys and values: 8 or 4 bits a value, of which the model's own constants have been taken out.

Keys are stored as they are before rotation. There the bias of `k_proj` (Qwen2, Qwen2.5) and the weight of `k_norm`
(Qwen3) are constants of the weights, and they make the outliers that ruin coarse codes. Both are taken out exactly
before rounding and put back by `link`. A code is approximate: what has been coded equals a computed key or value never.

The values of a token and head share a scale and a zero in float16 (`int8`), or every 32 of them do (`int4`):
value = zero + code x scale. The zero is rounded down and the scale up, so that no value is clipped and the error is
half a scale at most, however far from 0 a group is.

What is coded is two planes, codes and scales, each contiguous, for copies in bulk. Outside memory the codes of a
layer's keys come first, then their scales; then those of its values.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.common.checks import SIZES


@dataclasses.dataclass(frozen=True)
class Codec:
    """A way to store keys and values.

    Letters: `T` tokens, `K` key-value heads, `D` head width.

    Attributes:
      name: of the codec.
      bits: of a code.
      shares: values that share a scale; None: those of a head. Of a narrower head, all.
    """

    name: str
    bits: int
    shares: int | None = None

    def group(self, width: int) -> int:
        """Values of a head of `width` that share a scale.

        Raises:
          ValueError: the codec does not do the width.
        """
        group = min(self.shares or width, width)
        if width < 2 or width % 2 or width % group:
            also = f" up to {self.shares}, or multiples of it" if self.shares else ""
            raise ValueError(f"head width must be even for codec {self.name!r}{also}, got {width}")
        return group

    def planes(self, kv_heads: int, width: int) -> tuple[int, int]:
        """Bytes that a token's keys, or its values, take: (codes, scales).

        Raises:
          ValueError: the codec does not do the width.
        """
        groups = width // self.group(width)
        return kv_heads * width * self.bits // 8, kv_heads * groups * 4

    def encode(
        self, x: jax.Array, bias: jax.Array | None = None, weight: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Codes keys before rotation, with the model's constants, or values, without.

        What is NaN or infinite, below the least float16, or in a group that spans more than float16 scales do, makes
        its group decode to what is not finite.

        Args:
          x: `[T, K, D]`, of any float dtype.
          bias: that was added last, `[K, D]`.
          weight: of each channel, `[D]`. Where it is 0, 0 is stored.

        Returns:
          Codes and scales of each head, uint8 `[T, K, bytes]` each. Of `int4`, byte j of a head has the code of channel
          j in its low half and that of channel j + D / 2 in its high half: rotation pairs these two.

        Raises:
          ValueError: the codec does not do the width.
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
        # Minima and maxima of XLA may pass NaN by.
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
        """What `encode` gave, as float32 `[T, K, D]`."""
        if self.bits == 4:
            codes = jnp.concatenate([codes & 15, codes >> 4], -1)
        pairs = self.pairs(scales).astype(jnp.float32)
        scale, zero = (jnp.repeat(pairs[..., i], self.group(codes.shape[-1]), -1) for i in range(2))
        x = codes.astype(jnp.float32) * scale + zero
        if weight is not None:
            x = x * weight.astype(jnp.float32)
        return x if bias is None else x + bias.astype(jnp.float32)

    def pairs(self, scales: jax.Array) -> jax.Array:
        """A plane of scales, `[..., bytes]`, as float16 `[..., groups, 2]`: scale and zero."""
        low, high = (scales.reshape(-1, 2)[:, i].astype(jnp.uint16) for i in range(2))  # so XLA fuses it
        return jax.lax.bitcast_convert_type(low | high << 8, jnp.float16).reshape(*scales.shape[:-1], -1, 2)


def _rounded(x: jax.Array, *, up: bool) -> jax.Array:
    """To the next float16 that is not below (above) it; NaN and, on that side, what is beyond stay not finite."""
    near = x.astype(jnp.float16)
    wrong = _wide(near) < x if up else _wide(near) > x
    end = jnp.asarray(jnp.inf if up else -jnp.inf, jnp.float16)
    return jnp.where(wrong, jnp.nextafter(near, end), near)


def _wide(x: jax.Array) -> jax.Array:
    """Float16 as float32. XLA may drop a conversion there and back, and with it the rounding that is looked for."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    exponent, fraction = bits >> 10 & 31, bits & 1023
    units = jnp.asarray([2.0 ** max(e - 25, -24) if e < 31 else jnp.inf for e in range(32)], jnp.float32)
    size = (fraction + jnp.where(exponent > 0, 1024, 0)).astype(jnp.float32) * units[exponent]
    size = jnp.where((exponent == 31) & (fraction > 0), jnp.nan, size)
    return jnp.where(bits >> 15 == 1, -size, size)


def overflow(dtype: Any) -> float:
    """The least size that a dtype rounds to infinity."""
    limits = jnp.finfo(dtype)
    return math.inf if limits.bits == 32 else float(limits.max) + 2.0 ** (limits.maxexp - limits.nmant - 2)


CODECS: dict[str, Codec] = {name: Codec(name, bits, shares) for name, (bits, shares) in SIZES.items()}


def find(name: str) -> Codec:
    """The codec of a name.

    Raises:
      ValueError: there is none.
    """
    if name not in CODECS:
        raise ValueError(f"codec must be one of {tuple(CODECS)}, got {name!r}")
    return CODECS[name]
