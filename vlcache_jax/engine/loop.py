"""The thread that drives the device, and what other threads say to it."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections import abc

from vlcache_jax.engine.engine import Engine
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.results import note_arrival

CLOSED = "this LLM is closed"


class Loop:
    """Runs an engine's passes in a thread of its own, as long as there is something to do.

    Args:
      engine: is driven by nobody else; gone when the loop is closed.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._changed = threading.Condition()
        self._arriving: list[Sequence] = []
        self._has_begun = False  # whether these may run although nothing does
        self._thread: threading.Thread | None = None
        self._passes = 0
        self._is_closed = self._has_died = False

    def prepare(self) -> None:
        """Takes the memory that the first request would wait for. What runs has taken it; what is submitted waits.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._changed:
            self.check_open()
            if self._thread is None:
                self.engine.prepare()

    def submit(self, sequences: abc.Iterable[Sequence], called_at: float | None = None) -> None:
        """These run when there is room, in this order, behind all that were submitted before.

        Where nothing runs, nothing does before `begin`, so that what is submitted together begins together.

        Args:
          called_at: when the call came that brings them.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._changed:
            self.check_open()
            for sequence in sequences:
                note_arrival(sequence, called_at)
                self._arriving.append(sequence)

    def begin(self) -> None:
        """What has been submitted runs."""
        with self._changed:
            self._has_begun = bool(self._arriving)
            if self._thread is None and self._arriving:
                # Progress is shown as whoever asks first wants it.
                run = contextvars.copy_context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name="vlcache-engine", daemon=True)
                self._thread.start()

    def run(self, sequences: abc.Sequence[Sequence]) -> None:
        """Runs these and returns when all have ended.

        Raises:
          RuntimeError: the loop is closed. Other errors of the engine are raised as they are.
        """
        ended: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        for sequence in sequences:
            sequence.listen(lambda sequence: ended.put(sequence) if sequence.end.is_finished else None)
        self.submit(sequences)
        self.begin()
        try:
            for _ in sequences:
                if (fault := ended.get().end.fault) is not None:
                    raise fault
        finally:
            self.abort(sequence for sequence in sequences if not sequence.end.is_finished)

    def abort(self, sequences: abc.Iterable[Sequence]) -> None:
        """Nobody wants these any more; returns when none of them has pages, unless others count on what it computes."""
        for sequence in sequences:
            sequence.abort()
        self.begin()
        with self._changed:
            passes = self._passes
            self._changed.wait_for(lambda: self._thread is None or self._passes > passes + 1)

    def wait(self) -> None:
        """Returns when nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """Ends everything that runs or waits, with an error; nothing can be submitted any more."""
        with self._changed:
            self._is_closed = True
        self.begin()  # what has been submitted, and nobody has begun, ends too
        self.wait()
        engine = vars(self).pop("engine", None)  # who is closed needs no weights
        if engine is not None:
            engine.close()

    def check_open(self) -> None:
        """Raises a RuntimeError if the loop is closed."""
        if self._is_closed:
            raise RuntimeError(CLOSED)

    def check_alive(self) -> None:
        """Raises a RuntimeError if nothing that is submitted will run: it is closed, or its thread has died."""
        self.check_open()
        # The thread tells: it also begins and ends in good order, and the lock is held by `prepare` for long.
        if self._has_died:
            raise RuntimeError("the engine's thread has died")

    def _run(self) -> None:
        try:
            self._pass_on()
        except BaseException:
            self._has_died = True
            raise

    def _pass_on(self) -> None:
        """Pass after pass, as long as there is something to do."""
        engine = self.engine
        while True:
            with self._changed:
                self._passes += 1
                arriving: list[Sequence] = []
                if self._has_begun or engine.has_requests:
                    arriving, self._arriving, self._has_begun = self._arriving, [], False
                if not arriving and engine.is_idle:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._changed.notify_all()
            for sequence in arriving:
                engine.scheduler.add(sequence)
            try:
                if self._is_closed:
                    raise RuntimeError(CLOSED)
                engine.step()
            except BaseException as error:  # whoever waits for what it ended is told
                engine.fail(error)
