"""Tensors that the library does not load, in a safetensors file next to converted weights.

Qwen3.5, 3.6 and 3.8 publish `mtp.*`: a layer that predicts several tokens at once. A conversion copies these tensors as
they are, so that a version that uses them needs no new download. They keep their names, dtypes and FP8 scales.

No load reads the file, and the fingerprint of the weights does not depend on it.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vlcache_jax.convert.plan import STORED_DTYPES, StoredTensor

KEPT_FILE = "mtp.safetensors"

_PIECE_BYTES = 16 << 20
_ALIGNMENT = 8


def write_kept(directory: pathlib.Path, tensors: Sequence[StoredTensor]) -> dict[str, Any] | None:
    """Write tensors to `KEPT_FILE` of a directory, at most 16 MiB at a time.

    Returns:
      The file's entry of the manifest, or None if there are no tensors and so no file.
    """
    if not tensors:
        return None
    with (directory / KEPT_FILE).open("xb") as file:
        return _entry(_content(tensors), file.write)


def kept_entry(tensors: Sequence[StoredTensor]) -> dict[str, Any] | None:
    """Return what `write_kept` returns for the tensors, and write nothing."""
    return _entry(_content(tensors), len) if tensors else None


def describe_damage(directory: pathlib.Path, kept: dict[str, Any] | None) -> list[str]:
    """Return a line if `KEPT_FILE` does not match its entry of the manifest, for the list of an error.

    Args:
      kept: the entry. None: the conversion wrote no such file, so any file is ignored.
    """
    if kept is None:
        return []
    path = directory / KEPT_FILE
    if not path.is_file():
        return [f"misses {KEPT_FILE}"]
    if path.stat().st_size != kept["size"]:
        return [f"has another size of {KEPT_FILE}"]
    with path.open("rb") as file:
        is_intact = hashlib.file_digest(file, "sha256").hexdigest() == kept["sha256"]
    return [] if is_intact else [f"{KEPT_FILE} differs"]


def _entry(content: Iterable[bytes | memoryview], write: Callable[[bytes | memoryview], int]) -> dict[str, Any]:
    """Return the size in bytes and the SHA-256 of a content. `write` returns how many bytes it has written."""
    digest, size = hashlib.sha256(), 0
    for piece in content:
        digest.update(piece)
        size += write(piece)
    return {"size": size, "sha256": digest.hexdigest()}


def _content(tensors: Sequence[StoredTensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, which depend neither on the shards of the source nor on their order."""
    # Wide types come first, so that every tensor is aligned.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    names = {dtype: name for name, dtype in STORED_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in ordered:
        end = begin + tensor.nbytes
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[tensor.name], begin = entry, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in ordered:
        values = tensor.view().reshape(-1).view(np.uint8)
        for i in range(0, len(values), _PIECE_BYTES):
            yield values[i : i + _PIECE_BYTES].data
        tensor.release()
