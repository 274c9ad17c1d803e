"""The manifest of a converted checkpoint, and the fingerprint of weights.

A converted checkpoint is a directory:

    vlcache.json    this manifest, written last
    weights/        the parameters, in Orbax's format
    mtp.safetensors tensors that are not loaded, as they were in the source, if it has any (`kept.py`)
    config.json, tokenizer, chat template, processor and generation settings, as they were in the source

A *fingerprint* identifies weights in cache keys, so different weights must never have the same one. It is a digest of
the bytes of the source's tensors, each under its library name with its dtype and shape, and of the dtypes that they
were cast to. So a Hugging Face directory and its conversion have the same fingerprint, for any shards, layout of names
or order in the files. A converted checkpoint stores its fingerprint. Only a Hugging Face directory has to be hashed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vlcache_jax.common.json_files import OBJECT, TEXT, Kind, check_fields, listed, one_of, optional, read_object, whole
from vlcache_jax.convert.plan import DTYPES
from vlcache_jax.models.params import Parameter, Part
from vlcache_jax.models.quantization import FLOAT8

FORMAT = "vlcache-checkpoint/2"
APART = "vlcache-checkpoint/1"  # older format that stores the layers of a product separately; reading joins them
MANIFEST_FILE = "vlcache.json"
WEIGHTS_DIRECTORY = "weights"

_DTYPE = one_of(*(dtype.name for dtype in DTYPES.values()))
_DIGEST = Kind(
    "64 hexadecimal digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value))
)
_SIZE = whole(0, 1 << 62)
_FIELDS = {
    "source": TEXT,
    "revision": optional(TEXT),
    "dtype": _DTYPE,
    "source_digest": _DIGEST,
    "casts": listed(_DTYPE, 16),
    "parameters": OBJECT,
    "files": OBJECT,
    "versions": OBJECT,
    "fingerprint": _DIGEST,
    "kept": optional(OBJECT),
}
_ENTRY = {
    "shape": listed(whole(1, 1 << 40), 8),
    "dtype": one_of(*(dtype.name for dtype in DTYPES.values()), FLOAT8.name),
}
_KEPT = {"size": _SIZE, "sha256": _DIGEST}
_SOURCES = {FORMAT: {"sources": OBJECT}, APART: {"source_sha256": _DIGEST}}  # field of a parameter's entry


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a converted checkpoint.

    Attributes:
      source: directory or Hub ID of the source.
      revision: commit of the source, or None if it is unknown.
      dtype: name of the dtype of the weights.
      source_digest: digest of the source's tensors (`convert.plan.source_digest`).
      casts: names of the dtypes that the source's tensors were cast to.
      parameters: by parameter, in the order of the tree: shape, dtype, SHA-256 of the source's tensors by library name,
        and SHA-256 of the stored parameter, which the first conversions did not record.
      files: size in bytes of every file under `weights`, by its path there.
      versions: versions of the packages that wrote the checkpoint.
      kept: size in bytes and SHA-256 of `kept.KEPT_FILE`. None: the conversion wrote no file, as older versions do.
      format: `FORMAT` or `APART`.
    """

    source: str
    revision: str | None
    dtype: str
    source_digest: str
    casts: tuple[str, ...]
    parameters: dict[str, dict[str, Any]]
    files: dict[str, int]
    versions: dict[str, str]
    kept: dict[str, Any] | None = None
    format: str = FORMAT

    def write(self, directory: pathlib.Path) -> None:
        content = {"format": self.format, **dataclasses.asdict(self), "fingerprint": self.fingerprint(self.dtype)}
        (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def fingerprint(self, dtype: str) -> str:
        """Return the fingerprint of the weights, loaded in `dtype`."""
        return fingerprint(self.source_digest, [*self.casts, dtype])

    def stored(self, wanted: Iterable[Parameter]) -> Iterator[Parameter | Part]:
        """Return the parameters, or parts of parameters, that are stored under `weights`."""
        return (part for one in wanted for part in ((one,) if self.format == FORMAT else one.parts))


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Read the manifest of a converted checkpoint.

    Raises:
      ValueError: it is damaged or has another format.
    """
    path = directory / MANIFEST_FILE
    content = read_object(path)
    if (got := content.get("format")) not in (FORMAT, APART):
        raise ValueError(f"format of {path} must be {FORMAT!r}, got {reprlib.repr(got)}: convert the checkpoint again")
    check_fields(content, _FIELDS, path, required=True)
    files, entries = content["files"], content["parameters"]
    check_fields(files, dict.fromkeys(files, _SIZE), path, section="files ")
    check_fields(entries, dict.fromkeys(entries, OBJECT), path, section="parameters ")
    for name, entry in entries.items():
        check_fields(entry, _ENTRY | _SOURCES[got], path, section=f"parameters {name} ", required=True)
        check_fields(entry, {"sha256": _DIGEST}, path, section=f"parameters {name} ")
        sources = entry["sources"] if got == FORMAT else {}
        check_fields(sources, dict.fromkeys(sources, _DIGEST), path, section=f"parameters {name} sources ")
    if (kept := content.setdefault("kept", None)) is not None:
        check_fields(kept, _KEPT, path, section="kept ", required=True)
    members = {field.name: content[field.name] for field in dataclasses.fields(Manifest)}
    manifest = Manifest(**members | {"casts": tuple(members["casts"])})
    if content["fingerprint"] != manifest.fingerprint(manifest.dtype):
        raise ValueError(
            f"fingerprint of {path} must match its source_digest and casts, but the file has been changed: "
            "convert the checkpoint again"
        )
    return manifest


def fingerprint(source_digest: str, casts: Sequence[str]) -> str:
    """Return the fingerprint of tensors after some casts. Repeated casts to the same dtype count once."""
    changes = [cast for i, cast in enumerate(casts) if i == 0 or casts[i - 1] != cast]
    return hashlib.sha256(json.dumps(["vlcache-fingerprint/1", source_digest, changes]).encode()).hexdigest()


def weight_files(directory: pathlib.Path) -> dict[str, int]:
    """Return the size in bytes of every file under `weights`, by its path there."""
    weights = directory / WEIGHTS_DIRECTORY
    paths = sorted(path for path in weights.rglob("*") if path.is_file())
    return {path.relative_to(weights).as_posix(): path.stat().st_size for path in paths}


def parameter_name(path: Sequence[str | int]) -> str:
    return "/".join(map(str, path))


def expected(shape: Sequence[int], dtype: np.dtype) -> dict[str, Any]:
    """Return the fields of a parameter's entry that follow from the model."""
    return {"shape": list(shape), "dtype": dtype.name}
