"""The conversion itself: from a plan, tensor by tensor, into a directory that appears when it is complete."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vlcache_jax.convert.manifest import (
    WEIGHTS_DIRECTORY,
    Manifest,
    expected,
    parameter_name,
    read_manifest,
    weight_files,
)
from vlcache_jax.convert.memory import PeakMemory
from vlcache_jax.convert.plan import Source, as_dtype, make_plan, source_digest, stored_dtype
from vlcache_jax.convert.restore import StoredWeights
from vlcache_jax.convert.source import SIDE_FILES, locate
from vlcache_jax.files import check_free
from vlcache_jax.models.params import Path
from vlcache_jax.models.registry import load_config

_PACKAGES = ("vlcache-jax", "jax", "orbax-checkpoint", "tensorstore")
_COMPARED_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Attributes:
      step: "convert" or "verify".
      tensors, total_tensors: done, and in all.
      nbytes, total_nbytes: done, and in all, as they are written.
      seconds: since the step began.
      peak_memory: the most anonymous memory of the process seen so far, in bytes; None where the system does not say.
    """

    step: str
    tensors: int
    total_tensors: int
    nbytes: int
    total_nbytes: int
    seconds: float
    peak_memory: int | None

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True)
class Report:
    """A finished conversion; `seconds` counts everything, flushing to disk and verifying too."""

    directory: pathlib.Path
    tensors: int
    nbytes: int
    dtype: str
    fingerprint: str
    seconds: float
    peak_memory: int | None
    verified: bool


def convert(
    source: str | pathlib.Path,
    destination: str | pathlib.Path,
    *,
    dtype: Any = None,
    revision: str | None = None,
    verify: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Converts a Hugging Face checkpoint.

    The destination appears only when it is complete: everything is written into a hidden directory beside it, which is
    renamed last. What a killed run has left there never opens as a checkpoint, and the next run removes it.

    Args:
      source: a local directory with safetensors files, or the id of a model on the hub, which is fetched.
      destination: a directory that does not exist or is empty.
      dtype: of the converted weights; None keeps the one that is stored (that of `config.json` where tensors differ).
      revision: branch, tag or commit on the hub.
      verify: read the converted weights back and compare them with the source, before the destination appears.
      progress: is called after each tensor, from another thread.

    Raises:
      FileExistsError: the destination holds something, or another process is converting into it.
      FileNotFoundError: the source is nowhere, or files are missing.
      ValueError: the source is damaged, not supported, or its tensors are not those of its model.
      OSError: there is not enough room on the disk.
    """
    begin = time.perf_counter()
    wanted = None if dtype is None else as_dtype(dtype)
    destination = pathlib.Path(destination).expanduser().absolute()
    check_free("destination", destination)
    located = locate(source, revision)
    config = load_config(located.directory)
    plan = make_plan(located.directory, config)
    target = wanted or stored_dtype(plan, config)
    leaves = [_Leaf(item, target) for item in plan]

    from vlcache_jax.convert.store import save_weights  # Orbax takes seconds to import

    nbytes = sum(leaf.nbytes for leaf in leaves)
    with PeakMemory() as memory, _appearing(destination, nbytes) as directory:
        # Hashing needs one core and no memory, so it runs beside the copying and writing.
        with ThreadPoolExecutor(1, "vlcache-sha256") as pool:
            hashed = {item.parameter.tensor: pool.submit(item.tensor.sha256) for item in plan}
            try:
                meter = _Meter("convert", leaves, memory, progress)
                save_weights(directory / WEIGHTS_DIRECTORY, leaves, meter.count)
                digests = {tensor: future.result() for tensor, future in hashed.items()}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if verify:
            _compare(directory, leaves, _Meter("verify", leaves, memory, progress))
        _copy_side_files(located.directory, directory)
        manifest = Manifest(
            source=str(source),
            revision=located.revision,
            dtype=target.name,
            source_digest=source_digest(plan, digests),
            casts=() if all(item.tensor.dtype == target for item in plan) else (target.name,),
            parameters={
                parameter_name(item.parameter.path): {
                    **expected(item.parameter.shape, target),
                    "source_sha256": digests[item.parameter.tensor],
                }
                for item in plan
            },
            files=weight_files(directory),
            versions={name: importlib.metadata.version(name) for name in _PACKAGES},
        )
        manifest.write(directory)
    return Report(
        directory=destination,
        tensors=len(plan),
        nbytes=nbytes,
        dtype=target.name,
        fingerprint=manifest.fingerprint(target.name),
        seconds=time.perf_counter() - begin,
        peak_memory=memory.peak,
        verified=verify,
    )


def verify_weights(
    source: str | pathlib.Path,
    directory: str | pathlib.Path,
    *,
    revision: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Compares a converted checkpoint with its source, byte by byte, two tensors in memory at a time.

    Raises:
      ValueError: parameters differ; the message lists them.
    """
    located = locate(source, revision)
    dtype = as_dtype(read_manifest(pathlib.Path(directory)).dtype)
    leaves = [_Leaf(item, dtype) for item in make_plan(located.directory, load_config(located.directory))]
    with PeakMemory() as memory:
        _compare(pathlib.Path(directory), leaves, _Meter("verify", leaves, memory, progress))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter of the source, read in the dtype that is written."""

    source: Source
    dtype: np.dtype

    @property
    def path(self) -> Path:
        return self.source.parameter.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.parameter.shape

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        return self.source.read(self.dtype)


class _Meter:
    """Counts tensors and bytes, and tells the caller."""

    def __init__(self, step: str, leaves: list[_Leaf], memory: PeakMemory, progress: Callable[[Progress], None] | None):
        self.total_nbytes = sum(leaf.nbytes for leaf in leaves)
        self._step, self._memory, self._progress = step, memory, progress
        self._tensors, self._total, self._nbytes = 0, len(leaves), 0
        self._begin = time.perf_counter()

    def count(self, leaf: _Leaf) -> None:
        self._tensors += 1
        self._nbytes += leaf.nbytes
        if self._progress is not None:
            seconds = time.perf_counter() - self._begin
            counts = self._tensors, self._total, self._nbytes, self.total_nbytes
            self._progress(Progress(self._step, *counts, seconds, self._memory.peak))


def _compare(directory: pathlib.Path, leaves: list[_Leaf], meter: _Meter) -> None:
    weights = StoredWeights(directory / WEIGHTS_DIRECTORY)
    different = []
    for leaf in leaves:
        if not _equal_bytes(weights.read(leaf.path), leaf.read()):
            different.append(parameter_name(leaf.path))
        meter.count(leaf)
    if different:
        some = ", ".join(different[:20]) + (f" and {len(different) - 20} more" if len(different) > 20 else "")
        raise ValueError(f"converted weights must equal the source's, but {len(different)} differ: {some}")


def _equal_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    # Bytes, since not-a-numbers never equal themselves; in pieces, since a comparison makes an array of its own.
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    steps = range(0, len(a), _COMPARED_BYTES)
    return all(np.array_equal(a[i : i + _COMPARED_BYTES], b[i : i + _COMPARED_BYTES]) for i in steps)


@contextlib.contextmanager
def _appearing(destination: pathlib.Path, nbytes: int) -> Iterator[pathlib.Path]:
    """A directory to write into, which becomes the destination if all goes well and disappears if not."""
    partial = destination.parent / f".{destination.name}.converting"
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        try:
            _clear(partial)  # a run that was killed leaves its files
            free = shutil.disk_usage(partial).free
            if free < nbytes:
                raise OSError(f"destination must have room for {nbytes / 1e9:.2f} GB, got {free / 1e9:.2f} GB free")
            yield partial
            _flush(partial)
            check_free("destination", destination)
            partial.rename(destination)
            _flush_one(destination.parent)
        except BaseException:
            _remove(partial)
            raise


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Keeps out a second conversion into one destination; the lock goes with the process, however that ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise FileNotFoundError  # the other one finished in between, and what is locked is its destination
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        raise FileExistsError(f"another process is converting into {directory}") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _remove(directory: pathlib.Path) -> None:
    """Tries for some seconds, since Orbax may be closing a file in a thread of its own."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


def _clear(directory: pathlib.Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _copy_side_files(source: pathlib.Path, directory: pathlib.Path) -> None:
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", directory / "additional_chat_templates")


def _flush(directory: pathlib.Path) -> None:
    """To the disk, so that no power cut leaves a renamed directory of empty files."""
    for folder, _, files in os.walk(directory):
        for path in [*(os.path.join(folder, name) for name in files), folder]:
            _flush_one(path)


def _flush_one(path: str | pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
