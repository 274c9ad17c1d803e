"""Reading of single weights from Orbax's format, directly into their final memory.

Orbax writes each parameter as a zarr array in one OCDBT store, under the keys of its path joined by dots. Orbax could
restore the tree, but it needs a second copy of each array, and seconds to import. This module copies chunks from the
mapped file to the result, in any dtype.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlcache_jax.convert.manifest import expected
from vlcache_jax.convert.plan import aligned_empty


class StoredWeights:
    """The weights of a converted checkpoint. Several threads may use it."""

    def __init__(self, directory: pathlib.Path):
        import tensorstore  # comes with Orbax; not needed for Hugging Face directories

        self._tensorstore = tensorstore
        self._base = f"file://{directory.absolute()}/"
        self._context = tensorstore.Context({"file_io_mode": {"mode": "memmap"}})

    def read(
        self, path: Sequence[str | int], dtype: np.dtype | None = None, *, entry: Mapping[str, Any] | None = None
    ) -> np.ndarray:
        """Read a parameter in `dtype`, by default the stored dtype.

        Args:
          entry: the parameter's entry in the manifest, to check shape and dtype.

        Raises:
          ValueError: the parameter is missing or damaged.
        """
        key = ".".join(map(str, path))
        spec: dict[str, Any] = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._base, "path": key}}
        stored = self._tensorstore.open(spec, open=True, read=True, context=self._context).result()
        got = expected(stored.shape, stored.dtype.numpy_dtype)
        if entry is not None and any(entry[name] != value for name, value in got.items()):
            known = {name: entry[name] for name in got}
            raise ValueError(f"{key} must have the shape and dtype of the manifest, {known}, got {got}")
        out = aligned_empty(stored.shape, dtype or stored.dtype.numpy_dtype)
        self._tensorstore.array(out).write(self._tensorstore.cast(stored, out.dtype)).result()
        return out
