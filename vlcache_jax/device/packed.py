"""The rows of a step as one array, so that they travel together and every layer takes its share of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.models import Rows

FIELDS = 7  # slot, the three of position, k_start, k_end, source


def pack(rows: Rows, size: int) -> npt.NDArray[np.int32]:
    """Rows as int32 [FIELDS, size]; what lies behind them is never looked at."""
    packed = np.zeros((FIELDS, size), np.int32)
    packed[:, : len(rows.slot)] = np.vstack(list(rows))
    return packed


def unpack(packed: Any, size: int) -> Rows:
    """The first `size` rows."""
    slot, x, y, z, k_start, k_end, source = (packed[i, :size] for i in range(FIELDS))
    return Rows(slot, jnp.stack([x, y, z]), k_start, k_end, source)


def repack(rows: Rows, size: int) -> jax.Array:
    """Rows of the device as `pack` makes them of the host's."""
    packed = jnp.vstack(list(rows))
    return jnp.pad(packed, ((0, 0), (0, size - packed.shape[1])))
