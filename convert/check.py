"""Whether a converted checkpoint is what was written: its sizes always, its contents when that is asked for."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vlcache_jax.convert.manifest import (
    MANIFEST_FILE,
    WEIGHTS_DIRECTORY,
    Manifest,
    expected,
    parameter_name,
    read_manifest,
    weight_files,
)
from vlcache_jax.convert.memory import PeakMemory
from vlcache_jax.convert.plan import as_dtype, sha256
from vlcache_jax.convert.progress import ConvertMeter, ConvertProgress
from vlcache_jax.convert.restore import StoredWeights
from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.params import parameters


def check_sizes(directory: pathlib.Path, manifest: Manifest, config: ModelConfig) -> None:
    """Finds a directory that was copied in part or edited, without reading a weight.

    Raises:
      ValueError: files under `weights` are not those of the manifest, or its parameters not those of the model.
    """
    if not manifest.files:
        raise ValueError(f"{directory} must name its files in its manifest, got none")
    if wrong := _wrong_files(directory, manifest):
        raise ValueError(
            f"{directory} must hold all files of the converted checkpoint, but {wrong[0]} "
            f"({len(wrong)} of {len(manifest.files)} files are wrong): copy or convert it again"
        )
    wanted = manifest.stored(parameters(config))
    dtype = as_dtype(manifest.dtype)
    model = {parameter_name(one.path): expected(one.shape, one.dtype_in(dtype)) for one in wanted}
    stored = {name: {key: entry[key] for key in ("shape", "dtype")} for name, entry in manifest.parameters.items()}
    if model != stored:
        wrong = sorted(name for name in model.keys() | stored.keys() if model.get(name) != stored.get(name))
        raise ValueError(
            f"parameters of {directory} must be those of its config.json, but {len(wrong)} are not; "
            f"{wrong[0]} must be {model.get(wrong[0])}, got {stored.get(wrong[0])}"
        )


def check_contents(
    directory: str | pathlib.Path, *, progress: Callable[[ConvertProgress], None] | None = None
) -> Manifest:
    """Reads a converted checkpoint and compares every weight with its hash in the manifest.

    A few parameters are in memory at a time.

    Args:
      progress: is called after each parameter.

    Returns:
      The manifest.

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: the directory holds no hashes, or files or parameters are damaged; the message names all of them.
    """
    directory = pathlib.Path(directory).expanduser()
    if not directory.is_dir():
        raise FileNotFoundError(f"what is checked must be a directory, but there is no {directory}")
    if not (directory / MANIFEST_FILE).exists():
        raise ValueError(
            f"{directory} must be a converted checkpoint, which has hashes of its weights in {MANIFEST_FILE}; "
            f"a Hugging Face directory has none"
        )
    manifest = read_manifest(directory)
    if any("sha256" not in entry for entry in manifest.parameters.values()):
        raise ValueError(f"{directory} was converted before weights were hashed: convert it again to check it")
    weights = StoredWeights(directory / WEIGHTS_DIRECTORY)
    nbytes = {name: _nbytes(entry) for name, entry in manifest.parameters.items()}

    def is_intact(name: str) -> bool:
        entry = manifest.parameters[name]
        try:
            return sha256(weights.read(name.split("/"), entry=entry)) == entry["sha256"]
        except ValueError:
            return False

    damaged = _wrong_files(directory, manifest)
    threads = min(4, os.cpu_count() or 1)
    with PeakMemory() as memory, ThreadPoolExecutor(threads, "vlcache-sha256") as pool:
        meter = ConvertMeter("check", len(nbytes), sum(nbytes.values()), memory, progress)
        try:
            for name, intact in zip(nbytes, pool.map(is_intact, nbytes), strict=True):
                if not intact:
                    damaged.append(f"{name} differs")
                meter.count(nbytes[name])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if damaged:
        lines = "\n  ".join(damaged)
        raise ValueError(f"{directory} must hold what was converted, but is damaged:\n  {lines}")
    return manifest


def _wrong_files(directory: pathlib.Path, manifest: Manifest) -> list[str]:
    found = weight_files(directory)
    return [
        f"misses {WEIGHTS_DIRECTORY}/{name}" if name not in found else f"has another size of {WEIGHTS_DIRECTORY}/{name}"
        for name, size in manifest.files.items()
        if found.get(name) != size
    ]


def _nbytes(entry: dict[str, Any]) -> int:
    return math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
