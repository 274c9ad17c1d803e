"""Processes that measure one case after the other, and that can be killed when a case hangs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

_STARTING = threading.Lock()

Measures = Mapping[str, Callable[[], dict[str, Any]]]


class GpuWorker:
    """A process that is restarted if a case crashed it (a context manager).

    Args:
      measures: Returns the function of each case, by name; pickled into the process.
      environment: Variables of the process, in addition to those of this one.
    """

    def __init__(self, measures: Callable[[], Measures], environment: Mapping[str, str] | None = None):
        self._measures, self._environment = measures, dict(environment or {})
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._connection: Connection[Any, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, name: str, limit: float) -> dict[str, Any]:
        """Measure a case.

        Args:
          name: Name of the case.
          limit: Seconds; a process that has not answered by then is killed.

        Raises:
          RuntimeError: The case raised, crashed its process, or did not end; the message states which.
        """
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(name)
            if not self._connection.poll(limit):
                self._end()
                raise RuntimeError(f"it did not end within {limit:.0f} s, and its process was killed")
            row, error = self._connection.recv()
        except (EOFError, OSError):
            process = self._process
            process.join(10)
            status = process.exitcode
            self._end()
            raise RuntimeError(f"it crashed its process, which ended with status {status}") from None
        if error is not None:
            raise RuntimeError(error)
        return dict(row)

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        # Not a daemon, because a daemon could have no child processes.
        self._process = self._context.Process(target=_serve, args=(self._measures, theirs))
        with changed_environment(self._environment):
            self._process.start()
        theirs.close()

    def _end(self) -> None:
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        if self._process.pid is not None:  # it was started
            self._process.kill()
            self._process.join(10)


@contextlib.contextmanager
def changed_environment(changed: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that one thread at a time starts within; this process has them, too."""
    with _STARTING:
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _serve(measures: Callable[[], Measures], connection: Connection[Any, Any]) -> None:
    found: Measures | None = None
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        answer: tuple[dict[str, Any] | None, str | None]
        try:
            if found is None:
                found = measures()
            answer = found[name](), None
        except Exception as error:  # any error is the case's result
            answer = None, _words(error)
        connection.send(answer)


def _words(error: BaseException) -> str:
    """Return an error's message and its cause, because libraries with late imports give the reason only there."""
    said = f"{type(error).__name__}: {str(error)[:2000]}"
    cause = error.__cause__ or error.__context__
    return said if cause is None else f"{said}; from {_words(cause)}"
