"""The manifest of a converted checkpoint, and the fingerprint of weights.

A converted checkpoint is a directory:

    vlcache.json    this manifest, written last
    weights/        the parameters, in Orbax's format
    config.json, tokenizer, chat template, processor and generation settings, as they were in the source

A *fingerprint* stands for weights in cache keys, so different weights must never share it. It digests the bytes of the
source's tensors, each under its library name with its dtype and shape, and then the dtypes they were cast to since.
So a directory of the hub and its conversion have one fingerprint, whatever the shards, the layout of names or the order
in the files. A conversion knows its own without reading the weights; only a directory opened as it is has to be hashed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

FORMAT = "vlcache-checkpoint/1"
MANIFEST_FILE = "vlcache.json"
WEIGHTS_DIRECTORY = "weights"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted checkpoint says of itself.

    Attributes:
      source: the directory or hub id it was made from.
      revision: commit of the source, if it is known.
      dtype: of the weights.
      source_digest: of the tensors it was made from (`convert.plan.source_digest`).
      casts: dtypes that the source's tensors were cast to, on the way to these weights.
      parameters: shape, dtype and SHA-256 of the source's bytes by parameter, in the order of the tree.
      files: size of every file under `weights`, by its path there.
      versions: of the packages that wrote it.
    """

    source: str
    revision: str | None
    dtype: str
    source_digest: str
    casts: tuple[str, ...]
    parameters: dict[str, dict[str, Any]]
    files: dict[str, int]
    versions: dict[str, str]

    def write(self, directory: pathlib.Path) -> None:
        content = {"format": FORMAT, **dataclasses.asdict(self), "fingerprint": self.fingerprint(self.dtype)}
        (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def fingerprint(self, dtype: str) -> str:
        """Of the weights as they are used, in `dtype`."""
        return fingerprint(self.source_digest, [*self.casts, dtype])


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Raises ValueError if the manifest is damaged or of another format."""
    path = directory / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (got := content.pop("format", None)) != FORMAT:
            raise ValueError(f"format of {path} must be {FORMAT!r}, got {got!r}: convert the checkpoint again")
        del content["fingerprint"]
        manifest = Manifest(**{**content, "casts": tuple(content["casts"])})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a manifest of a converted checkpoint: {error!r}") from error
    return manifest


def fingerprint(source_digest: str, casts: Sequence[str]) -> str:
    """Of tensors after some casts; a cast to the dtype that a tensor has changes nothing and does not count twice."""
    changes = [cast for i, cast in enumerate(casts) if i == 0 or casts[i - 1] != cast]
    return hashlib.sha256(json.dumps(["vlcache-fingerprint/1", source_digest, changes]).encode()).hexdigest()


def weight_files(directory: pathlib.Path) -> dict[str, int]:
    """The size of every file under `weights`, by its path there."""
    weights = directory / WEIGHTS_DIRECTORY
    paths = sorted(path for path in weights.rglob("*") if path.is_file())
    return {path.relative_to(weights).as_posix(): path.stat().st_size for path in paths}


def parameter_name(path: Sequence[str | int]) -> str:
    return "/".join(map(str, path))


def expected(shape: Sequence[int], dtype: np.dtype) -> dict[str, Any]:
    """The part of a parameter's entry that its model decides."""
    return {"shape": list(shape), "dtype": dtype.name}
