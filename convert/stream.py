"""The conversion, tensor by tensor into a directory that appears when it is complete, and its checks."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vlcache_jax.common.checks import is_finite
from vlcache_jax.common.files import check_free
from vlcache_jax.common.json_files import read_object
from vlcache_jax.convert.kept import KEPT_FILE, describe_damage, kept_entry, write_kept
from vlcache_jax.convert.manifest import (
    FORMAT,
    MANIFEST_FILE,
    WEIGHTS_DIRECTORY,
    Manifest,
    expected,
    parameter_name,
    read_manifest,
    weight_files,
)
from vlcache_jax.convert.partial import appearing
from vlcache_jax.convert.plan import (
    Source,
    as_dtype,
    ignored_tensors,
    make_plan,
    sha256,
    source_config,
    source_digest,
    stored_dtype,
)
from vlcache_jax.convert.progress import ConvertMeter, ConvertProgress, PeakMemory
from vlcache_jax.convert.restore import StoredWeights
from vlcache_jax.convert.source import SIDE_FILES, locate
from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.params import Path, parameters
from vlcache_jax.models.registry import load_config


def check_sizes(directory: pathlib.Path, manifest: Manifest, config: ModelConfig) -> None:
    """Check that a converted checkpoint is complete and unchanged, by sizes and shapes, without reading weights.

    Raises:
      ValueError: files under `weights` do not match the manifest, or its parameters do not match the model.
    """
    if not manifest.files:
        raise ValueError(
            f"manifest of {directory} must list the files of weights, got none: convert the checkpoint again"
        )
    if wrong := _wrong_files(directory, manifest):
        raise ValueError(
            f"{directory} must contain all files of the converted checkpoint, but {wrong[0]} "
            f"({len(wrong)} of {len(manifest.files)} files are wrong): copy or convert it again"
        )
    wanted = manifest.stored(parameters(config))
    dtype = as_dtype(manifest.dtype)
    model = {parameter_name(one.path): expected(one.shape, one.dtype_in(dtype)) for one in wanted}
    stored = {name: {key: entry[key] for key in ("shape", "dtype")} for name, entry in manifest.parameters.items()}
    if model != stored:
        wrong = sorted(name for name in model.keys() | stored.keys() if model.get(name) != stored.get(name))
        raise ValueError(
            f"parameters of {directory} must match its config.json, but {len(wrong)} do not; "
            f"{wrong[0]} must be {model.get(wrong[0])}, got {stored.get(wrong[0])}"
        )


def check_contents(
    directory: str | pathlib.Path, *, progress: Callable[[ConvertProgress], None] | None = None
) -> Manifest:
    """Read a converted checkpoint and compare every weight with its hash in the manifest, also those never loaded.

    At most four parameters are in memory at a time.

    Args:
      progress: called after each parameter.

    Returns:
      The manifest.

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: the directory has no hashes, or files or parameters are damaged. The message lists all of them.
    """
    directory = pathlib.Path(directory).expanduser()
    if not directory.is_dir():
        raise FileNotFoundError(f"directory must be a converted checkpoint, but {directory} does not exist")
    if not (directory / MANIFEST_FILE).exists():
        raise ValueError(
            f"{directory} must be a converted checkpoint with hashes of its weights in {MANIFEST_FILE}; "
            f"a Hugging Face directory has none"
        )
    manifest = read_manifest(directory)
    if any("sha256" not in entry for entry in manifest.parameters.values()):
        raise ValueError(
            f"{directory} has no hashes of its weights, because an old version converted it: convert it again"
        )
    weights = StoredWeights(directory / WEIGHTS_DIRECTORY)
    nbytes = {name: _nbytes(entry) for name, entry in manifest.parameters.items()}

    def is_intact(name: str) -> bool:
        entry = manifest.parameters[name]
        try:
            return sha256(weights.read(name.split("/"), entry=entry)) == entry["sha256"]
        except ValueError:
            return False

    damaged = [*_wrong_files(directory, manifest), *describe_damage(directory, manifest.kept)]
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
        raise ValueError(f"{directory} must match its manifest, but is damaged:\n  {lines}")
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


_PACKAGES = ("vlcache-jax", "jax", "orbax-checkpoint", "tensorstore")
_COMPARED_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """The report of a finished conversion.

    Attributes:
      directory: the destination.
      tensors: number of parameters written. Layers of one product count once.
      nbytes: bytes of the weights.
      dtype: name of their dtype.
      fingerprint: fingerprint of the weights.
      seconds: total time in seconds, including flushing to disk and verification.
      peak_memory: maximum anonymous memory of the process in bytes. None: the system has no figure.
      verified: True if the weights were compared with the source.
      kept_nbytes: bytes of the file of tensors that are never loaded (`convert.kept`), or 0 if there is none.
      key_bias_norms: Euclidean norm of the keys' bias by decoder layer. Empty if the model has no bias.
    """

    directory: pathlib.Path
    tensors: int
    nbytes: int
    dtype: str
    fingerprint: str
    seconds: float
    peak_memory: int | None
    verified: bool
    kept_nbytes: int = 0
    key_bias_norms: tuple[float, ...] = ()


def convert(
    source: str | pathlib.Path,
    destination: str | pathlib.Path,
    *,
    dtype: Any = None,
    revision: str | None = None,
    verify: bool = False,
    progress: Callable[[ConvertProgress], None] | None = None,
) -> ConversionReport:
    """Convert a Hugging Face checkpoint.

    The destination appears only when it is complete. Files are written to a hidden directory next to it, which is
    renamed at the end. The directory of a killed run never opens as a checkpoint, and the next run removes it.

    Args:
      source: local directory with safetensors files, or Hub ID of a model, which is downloaded.
      destination: directory that does not exist or is empty.
      dtype: dtype of the converted weights. None keeps the stored dtype, or that of `config.json` if tensors differ.
      revision: branch, tag or commit on the Hub.
      verify: read the converted weights back and compare them with the source, before the destination appears.
      progress: called after each tensor, from another thread.

    Raises:
      FileExistsError: the destination is not empty, or another process is converting into it.
      FileNotFoundError: the source does not exist, or files are missing.
      ValueError: the source is damaged, converted or not supported, its tensors are not those of its model, or they are
        not finite in `dtype`. The message lists all such tensors.
      OSError: the disk has too little space at the start or while files are written.
    """
    begin = time.perf_counter()
    wanted = None if dtype is None else as_dtype(dtype)
    destination = pathlib.Path(destination).expanduser().absolute()
    check_free("destination", destination)
    located = locate(source, revision)
    if (located.directory / MANIFEST_FILE).exists():
        raise ValueError(
            f"source must be a Hugging Face checkpoint, but {located.directory} is converted: open it as is"
        )
    config = source_config(located.directory)
    plan = make_plan(located.directory, config)
    target = wanted or stored_dtype(plan, config)
    leaves = _leaves(plan, target)
    ignored = ignored_tensors(located.directory, config)

    from vlcache_jax.convert.store import save_weights  # Orbax takes seconds to import

    nbytes = sum(leaf.nbytes for leaf in leaves)
    written = nbytes + sum(tensor.nbytes for tensor in ignored)
    with PeakMemory() as memory, appearing(destination, written) as directory:
        # Hashing needs one core and no memory, so it runs in parallel to copying and writing.
        with ThreadPoolExecutor(1, "vlcache-sha256") as pool:
            hashed = {part.tensor: pool.submit(tensor.sha256) for item in plan for part, tensor in item.parts}
            try:
                meter = _meter("convert", leaves, memory, progress)
                save_weights(directory / WEIGHTS_DIRECTORY, leaves, lambda leaf: meter.count(leaf.nbytes))
                _check_finite(leaves)
                digests = {tensor: future.result() for tensor, future in hashed.items()}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        kept = write_kept(directory, ignored)
        if verify:
            _compare(directory, leaves, FORMAT, _meter("verify", leaves, memory, progress))
            _compare_kept(directory, kept)
        _copy_side_files(located.directory, directory)
        _write_tie(directory, config)
        manifest = _describe(directory, source, located.revision, target, leaves, digests)
        manifest = dataclasses.replace(manifest, kept=kept)
        manifest.write(directory)
    return ConversionReport(
        directory=destination,
        tensors=len(plan),
        nbytes=nbytes,
        dtype=target.name,
        fingerprint=manifest.fingerprint(target.name),
        seconds=time.perf_counter() - begin,
        peak_memory=memory.peak,
        verified=verify,
        kept_nbytes=0 if kept is None else kept["size"],
        key_bias_norms=tuple(leaf.norm for leaf in leaves if leaf.is_key_bias),
    )


def _describe(
    directory: pathlib.Path,
    source: str | pathlib.Path,
    revision: str | None,
    target: np.dtype,
    leaves: list[_Leaf],
    digests: dict[str, str],
) -> Manifest:
    """Return the manifest of the weights in a directory. `digests` are those of the source's tensors, by name."""
    plan = [leaf.source for leaf in leaves]
    is_cast = any(tensor.dtype != leaf.dtype for leaf in leaves for tensor in leaf.source.tensors)
    return Manifest(
        source=str(source),
        revision=revision,
        dtype=target.name,
        source_digest=source_digest(plan, digests),
        casts=(target.name,) if is_cast else (),
        parameters={
            parameter_name(leaf.path): {
                **expected(leaf.shape, leaf.dtype),
                "sources": {part.tensor: digests[part.tensor] for part in leaf.source.parameter.parts},
                "sha256": leaf.sha256,
            }
            for leaf in leaves
        },
        files=weight_files(directory),
        versions={name: importlib.metadata.version(name) for name in _PACKAGES},
    )


def verify_weights(
    source: str | pathlib.Path,
    directory: str | pathlib.Path,
    *,
    revision: str | None = None,
    progress: Callable[[ConvertProgress], None] | None = None,
) -> None:
    """Compare a converted checkpoint with its source byte by byte, with two tensors in memory at a time.

    Tensors that are never loaded are compared by their hash, if the conversion kept them.

    Args:
      source: local directory with safetensors files, or Hub ID.
      directory: the converted checkpoint.
      revision: branch, tag or commit on the Hub.
      progress: called after each parameter.

    Raises:
      ValueError: parameters differ or are not finite. The message lists them.
    """
    located = locate(source, revision)
    manifest = read_manifest(pathlib.Path(directory))
    config = source_config(located.directory)
    leaves = _leaves(make_plan(located.directory, config), as_dtype(manifest.dtype))
    with PeakMemory() as memory:
        _compare(pathlib.Path(directory), leaves, manifest.format, _meter("verify", leaves, memory, progress))
    if manifest.kept is not None:  # conversions of older versions have no such file
        _compare_kept(pathlib.Path(directory), kept_entry(ignored_tensors(located.directory, config)))


def _leaves(plan: list[Source], dtype: np.dtype) -> list[_Leaf]:
    return [_Leaf(item, item.parameter.dtype_in(dtype)) for item in plan]


@dataclasses.dataclass
class _Leaf:
    """A parameter of the source, read in the dtype of the destination.

    Attributes:
      sha256: digest of the array that was read last.
      flaws: descriptions of source tensors that are not finite.
      norm: Euclidean norm of a keys' bias.
    """

    source: Source
    dtype: np.dtype
    sha256: str = ""
    flaws: tuple[str, ...] = ()
    norm: float = 0.0

    @property
    def path(self) -> Path:
        return self.source.parameter.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.parameter.shape

    @property
    def nbytes(self) -> int:
        return self.source.parameter.nbytes(self.dtype)

    @property
    def is_key_bias(self) -> bool:
        return self.path[-2:] in (("qkv_proj", "bias"), ("k_proj", "bias"))

    def read(self) -> np.ndarray:
        array = self.source.read(self.dtype)
        self.sha256 = sha256(array)
        if self.is_key_bias:
            self.norm = float(np.linalg.norm(array[:, -2 if self.path[-2] == "qkv_proj" else 0].astype(np.float64)))
        if not is_finite(array):
            self.flaws = tuple(self._flaws(array))
        return array

    def stored(self, array: np.ndarray, layout: str) -> Iterator[tuple[Path, np.ndarray]]:
        """Yield the paths and arrays that a format of manifests stores under `weights` for a parameter."""
        if layout == FORMAT:
            yield self.path, array
        else:
            for part, _ in self.source.parts:
                yield part.path, part.of(array).reshape(part.shape)

    def _flaws(self, array: np.ndarray) -> Iterator[str]:
        for part, stored in self.source.parts:
            if not is_finite(part.of(array)):
                why = f"too large for {self.dtype}" if is_finite(stored.view()) else f"as stored in {stored.file.name}"
                yield f"{stored.name} ({why})"


def _meter(
    step: str, leaves: list[_Leaf], memory: PeakMemory, progress: Callable[[ConvertProgress], None] | None
) -> ConvertMeter:
    return ConvertMeter(step, len(leaves), sum(leaf.nbytes for leaf in leaves), memory, progress)


def _check_finite(leaves: list[_Leaf]) -> None:
    if flaws := [flaw for leaf in leaves for flaw in leaf.flaws]:
        lines = "\n  ".join(flaws)
        raise ValueError(f"weights must be finite, but {len(flaws)} tensors are not:\n  {lines}")


def _compare(directory: pathlib.Path, leaves: list[_Leaf], layout: str, meter: ConvertMeter) -> None:
    weights = StoredWeights(directory / WEIGHTS_DIRECTORY)
    different = []
    for leaf in leaves:
        for path, wanted in leaf.stored(leaf.read(), layout):
            if not _equal_bytes(weights.read(path), wanted):
                different.append(parameter_name(path))
        meter.count(leaf.nbytes)
    _check_finite(leaves)
    if different:
        some = ", ".join(different[:20]) + (f" and {len(different) - 20} more" if len(different) > 20 else "")
        raise ValueError(f"converted weights must equal those of the source, but {len(different)} differ: {some}")


def _compare_kept(directory: pathlib.Path, kept: dict[str, Any] | None) -> None:
    """Compare the file of tensors that are never loaded with the entry of the source's tensors."""
    damage = describe_damage(directory, kept)
    if kept is None and (directory / KEPT_FILE).exists():
        damage = ["the source has no such tensors"]
    if damage:
        raise ValueError(f"{KEPT_FILE} of {directory} must equal the tensors of its source, but {damage[0]}")


def _equal_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # Bytes, because NaN never equals itself, and in pieces, because a comparison allocates an array.
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    steps = range(0, len(a), _COMPARED_BYTES)
    return all(np.array_equal(a[i : i + _COMPARED_BYTES], b[i : i + _COMPARED_BYTES]) for i in steps)


def _copy_side_files(source: pathlib.Path, directory: pathlib.Path) -> None:
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", directory / "additional_chat_templates")


def _write_tie(directory: pathlib.Path, config: ModelConfig) -> None:
    """Set `tie_word_embeddings` in the copied `config.json` if the source has no output head."""
    if config.tie_word_embeddings != load_config(directory).tie_word_embeddings:
        raw = read_object(directory / "config.json")
        raw["tie_word_embeddings"] = config.tie_word_embeddings
        (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
