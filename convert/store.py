"""Writing of weights in Orbax's format, with few tensors in memory at a time.

Orbax's own handlers take a tree of arrays, all in memory. This module passes a tree of leaves that become arrays only
when they are written. The result is an ordinary checkpoint of numpy arrays, which Orbax restores (keys of dicts are
strings, as always). Weights are not compressed: they hardly shrink, and raw chunks are written from the array without a
copy.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

# Large tensors are stored in chunks of about this size, because other readers need a buffer per chunk. Small tensors
# are written together up to this size, because every write creates files.
_CHUNK_BYTES = 32 << 20


class Leaf(Protocol):
    """A parameter that is read when it is written."""

    @property
    def path(self) -> Sequence[str | int]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self) -> np.ndarray: ...


def save_weights[L: Leaf](directory: pathlib.Path, leaves: Iterable[L], written: Callable[[L], None]) -> None:
    """Write leaves one after the other.

    Args:
      written: called in another thread with each leaf that is on the disk.

    Raises:
      InterruptedError: the conversion was interrupted.
    """
    stop = threading.Event()
    tree = _nest((leaf.path, _Slot(leaf)) for leaf in leaves)
    save_args = jax.tree.map(lambda slot: ocp.SaveArgs(chunk_byte_size=_chunk_bytes(slot.leaf)), tree)
    registry = type_handlers.create_type_handler_registry(
        (_Slot, _TensorStream(written, stop)),
        (jax.Array, type_handlers.ArrayHandler()),  # unused; Orbax warns if it is missing
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    # Orbax writes in threads. After an interrupt of this thread, they would continue in a directory that is removed.
    with _unlogged(), ocp.Checkpointer(handler) as checkpointer, ThreadPoolExecutor(1, "vlcache-save") as pool:
        arguments = ocp.args.PyTreeSave(tree, save_args=save_args)
        saving = pool.submit(checkpointer.save, directory.absolute(), args=arguments)
        try:
            saving.result()
        except BaseException:
            stop.set()
            raise


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Suppress tracebacks that Orbax's threads log for errors that it also raises."""
    logger = logging.getLogger("absl")

    def is_news(record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised an exception" not in str(record.msg)

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


class _Slot:
    """A placeholder of an array in the tree, with the attributes that Orbax reads before it writes."""

    def __init__(self, leaf: Leaf):
        self.leaf = leaf
        self.shape = leaf.shape
        self.dtype = leaf.dtype
        self.size = math.prod(leaf.shape)
        self.nbytes = self.size * leaf.dtype.itemsize


class _TensorStream(type_handlers.NumpyHandler):
    """A handler of Orbax for numpy arrays that writes a few at a time."""

    def __init__(self, written: Callable[[Any], None], stop: threading.Event):
        super().__init__()
        self._written, self._stop = written, stop
        self._errors: list[Exception] = []

    async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
        # An error would end the event loop of all writes of a part. Orbax would log it with a traceback, and another
        # one for each write that finds the loop closed. So the error is stored until all writes are done.
        try:
            await super()._open_and_write(value, tspec, ts_context)
        except Exception as error:
            self._errors.append(error)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        parts = list(_parts([slot.nbytes for slot in values]))
        with ThreadPoolExecutor(1, "vlcache-read") as pool:
            # The next part is read while this one is written. At most two parts are in memory, if no reference to
            # written arrays remains.
            reading = pool.submit(_read, values[parts[0]])
            for part, following in itertools.zip_longest(parts, parts[1:]):
                if self._stop.is_set():
                    raise InterruptedError("the conversion was interrupted")
                arrays = reading.result()
                reading = pool.submit(_read, values[following] if following else [])
                commits = list(await super().serialize(arrays, infos[part], args[part]))
                del arrays
                while commits:
                    commits.pop().result()
                if self._errors:
                    raise self._errors[0]
                for slot in values[part]:
                    self._written(slot.leaf)
        return []


class _Final(np.ndarray):
    """An array that never changes. Orbax makes a deep copy of other arrays to protect its writes from changes."""

    def __deepcopy__(self, memo: object) -> _Final:
        return self


def _read(slots: Sequence[_Slot]) -> list[np.ndarray]:
    return [slot.leaf.read().view(_Final) for slot in slots]


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of consecutive tensors of at most `_CHUNK_BYTES` together. A larger tensor has its own slice."""
    begin, total = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > _CHUNK_BYTES:
            yield slice(begin, i)
            begin, total = i, 0
        total += size
    if begin < len(sizes):
        yield slice(begin, len(sizes))


def _nest(leaves: Iterable[tuple[Sequence[str | int], Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = leaf
    return tree


def _chunk_bytes(leaf: Leaf) -> int | None:
    """Return the chunk size in bytes for Orbax, or None for a single chunk.

    Orbax cuts axes into equal parts, so a prime axis would give single rows. It cuts the longest axis first. For
    stacked matrices, of experts or of a product's layers, chunks would not be contiguous in memory, and all would be
    copied at once.
    """
    if len(leaf.shape) > 2:
        return None
    axis = max(leaf.shape, default=1)
    other = math.prod(leaf.shape) * leaf.dtype.itemsize // axis
    parts = (n for n in range(1, axis + 1) if axis % n == 0 and axis // n * other <= _CHUNK_BYTES)
    return _CHUNK_BYTES if axis // next(parts, axis) * other >= _CHUNK_BYTES // 16 else None
