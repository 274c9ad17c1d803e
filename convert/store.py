"""Weights in Orbax's format: written with few tensors in memory at a time.

Orbax's own handlers take a tree of arrays, so all of it is in memory. Here Orbax gets a tree of leaves that become
arrays only when they are written. The result is an ordinary checkpoint of numpy arrays, which any Orbax restores (keys
of dicts are strings there, as always). Nothing is compressed: weights hardly shrink, and raw chunks are written
straight from the array, without a copy.
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

# Large tensors are stored in chunks of about this size: other readers hold a buffer for each chunk beside the result.
# Small tensors are written together up to this size: every write makes files.
_CHUNK_BYTES = 32 << 20


class Leaf(Protocol):
    """A parameter that can be read when it is needed."""

    @property
    def path(self) -> Sequence[str | int]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self) -> np.ndarray: ...


def save_weights[L: Leaf](directory: pathlib.Path, leaves: Iterable[L], written: Callable[[L], None]) -> None:
    """Writes leaves one after the other; `written` hears of each when it is on the disk, in another thread."""
    stop = threading.Event()
    tree = _nest((leaf.path, _Slot(leaf)) for leaf in leaves)
    save_args = jax.tree.map(lambda slot: ocp.SaveArgs(chunk_byte_size=_chunk_bytes(slot.leaf)), tree)
    registry = type_handlers.create_type_handler_registry(
        (_Slot, _TensorStream(written, stop)),
        (jax.Array, type_handlers.ArrayHandler()),  # unused; Orbax warns where it is missing
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    # Orbax writes in threads, which an interrupt of this one would leave running, in a directory that is then removed.
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
    """Keeps Orbax's threads from logging tracebacks of errors that it also raises."""
    logger = logging.getLogger("absl")

    def is_news(record: logging.LogRecord) -> bool:
        return "_SignalingThread.run() raised an exception" not in str(record.msg)

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


class _Slot:
    """What the tree holds in place of an array, with what Orbax asks of one before it is written."""

    def __init__(self, leaf: Leaf):
        self.leaf = leaf
        self.shape = leaf.shape
        self.dtype = leaf.dtype
        self.size = math.prod(leaf.shape)
        self.nbytes = self.size * leaf.dtype.itemsize


class _TensorStream(type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, given few at a time."""

    def __init__(self, written: Callable[[Any], None], stop: threading.Event):
        super().__init__()
        self._written, self._stop = written, stop
        self._errors: list[Exception] = []

    async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
        # One error would end the loop of all writes of a part: it would be logged with a traceback, and so would each
        # of the other writes when it finds the loop closed. So it is kept until they are done.
        try:
            await super()._open_and_write(value, tspec, ts_context)
        except Exception as error:
            self._errors.append(error)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        parts = list(_parts([slot.nbytes for slot in values]))
        with ThreadPoolExecutor(1, "vlcache-read") as pool:
            # Writing waits for the disk; the next tensors are read meanwhile. That makes two parts in memory, not more,
            # as long as nothing here holds one longer than its turn.
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
    """An array that nobody will change: Orbax makes a deep copy of what it writes, to be safe from that."""

    def __deepcopy__(self, memo: object) -> _Final:
        return self


def _read(slots: Sequence[_Slot]) -> list[np.ndarray]:
    return [slot.leaf.read().view(_Final) for slot in slots]


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of tensors of at most `_CHUNK_BYTES` together; a larger tensor is on its own."""
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
    """Orbax cuts axes into equal parts: a prime axis would fall into single rows, and is better left whole.

    It cuts the longest first: of the matrices of experts, or of layers in one, chunks would lie apart in memory, and
    be copied all at once.
    """
    if len(leaf.shape) > 2:
        return None
    axis = max(leaf.shape, default=1)
    other = math.prod(leaf.shape) * leaf.dtype.itemsize // axis
    parts = (n for n in range(1, axis + 1) if axis % n == 0 and axis // n * other <= _CHUNK_BYTES)
    return _CHUNK_BYTES if axis // next(parts, axis) * other >= _CHUNK_BYTES // 16 else None
