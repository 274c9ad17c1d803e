"""Reads single weights back from what Orbax wrote, straight into the memory where they stay.

Orbax writes each parameter as a zarr array in one OCDBT store, under the keys of its path joined by dots. Restoring the
tree with Orbax works too, but takes a second copy of what it has in hand, and seconds to import. Here chunks go from
the mapped file into the result, whatever its dtype.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlcache_jax.convert.manifest import expected
from vlcache_jax.convert.plan import aligned_empty


class StoredWeights:
    """The weights of a converted checkpoint. May be used from several threads."""

    def __init__(self, directory: pathlib.Path):
        import tensorstore  # it comes with Orbax; who opens a directory of the hub needs neither

        self._tensorstore = tensorstore
        self._base = f"file://{directory.absolute()}/"
        self._context = tensorstore.Context({"file_io_mode": {"mode": "memmap"}})

    def read(
        self, path: Sequence[str | int], dtype: np.dtype | None = None, *, entry: Mapping[str, Any] | None = None
    ) -> np.ndarray:
        """One parameter in `dtype`, by default as stored.

        Args:
          entry: the manifest's, whose shape and dtype it must have.

        Raises:
          ValueError: it is not there, or damaged.
        """
        key = ".".join(map(str, path))
        spec: dict[str, Any] = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._base, "path": key}}
        stored = self._tensorstore.open(spec, open=True, read=True, context=self._context).result()
        got = expected(stored.shape, stored.dtype.numpy_dtype)
        if entry is not None and any(entry[name] != value for name, value in got.items()):
            raise ValueError(f"{key} must be stored as the manifest says, got {got}")
        out = aligned_empty(stored.shape, dtype or stored.dtype.numpy_dtype)
        self._tensorstore.array(out).write(self._tensorstore.cast(stored, out.dtype)).result()
        return out
