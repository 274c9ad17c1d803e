"""Progress reports on stderr: a bar on a terminal, otherwise a plain line every few seconds.

`interruptible` makes Ctrl-C reliable during long waits.
"""

from __future__ import annotations

import contextlib
import contextvars
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

SECONDS = 3.0  # shortest interval between lines; a new kind of work is shown at once
_MAX_SECONDS, _PART = 30.0, 0.1  # during long waits the interval is a tenth of the elapsed time, up to the maximum
_RESEND_SECONDS = 0.01  # until a dropped interrupt is sent again


class Progress:
    """Progress of a piece of work (a context manager). A nested one is appended to the display of the outer one.

    Args:
      doing: description such as "answering"; its first word is the kind of work.
      total: number of units that `update` counts; None: nothing is counted.
      show: False hides it and everything nested in it.

    Attributes:
      done: units done so far.
      note: text shown after the numbers.
    """

    def __init__(self, doing: str, total: int | None = None, *, show: bool = True):
        self.doing, self.total, self.done = doing, total, 0
        self._tokens = 0
        self.note = ""
        self._begin = time.monotonic()
        self._show = show
        self._chain: tuple[Progress, ...] = (self,)  # the enclosing ones, outermost first, and this one
        self._screen: _Bar | _Lines | None = None

    def update(self, count: int = 1, *, tokens: int = 0) -> None:
        """Add `count` done units and `tokens` generated tokens, and refresh the display."""
        self.done += count
        self._tokens += tokens
        self._say()

    def reach(self, done: int, note: str = "") -> None:
        """Set the number of done units and the note."""
        self.note = note
        self.update(done - self.done)

    def __str__(self) -> str:
        if self.total == 0 or not (self.done or self.note):
            return self.doing
        counted = f"{self.doing} {self.done}{f' of {self.total}' if self.total else ''}{self.rate}"
        return f"{counted} {self.note}".rstrip()

    @property
    def rate(self) -> str:
        """Tokens per second so far as text; empty without tokens, and for a single request, where it would mostly show
        TTFT.
        """
        seconds = time.monotonic() - self._begin
        return f", {self._tokens / seconds:.3g} tokens/s" if self._tokens and seconds and self.total != 1 else ""

    def __enter__(self) -> Self:
        self.open()
        self._before = _innermost.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _innermost.reset(self._before)
        self.close()

    def open(self) -> None:
        """Show it, next to the enclosing one if there is one."""
        if (outer := _innermost.get()) is not None:
            self._chain = (*outer._chain, self)
        if self._show:
            self._screen = _open_screen(self) if outer is None else outer._screen
        self._say()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which others nest in this one; for work that is done in intervals."""
        before = _innermost.set(self)
        try:
            yield
        finally:
            _innermost.reset(before)

    def close(self) -> None:
        """Remove it from the display."""
        if self._screen is not None and len(self._chain) == 1:
            self._screen.close()
        elif self._screen is not None:
            self._screen.ended(self._chain[:-1])

    def _say(self) -> None:
        if self._screen is not None:
            self._screen.show(self._chain)


_innermost: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("progress", default=None)


def shown_waiting(doing: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that shows what a request waits for.

    Loading is short: it is shown only next to something that is already displayed.
    """
    is_alone = _innermost.get() is None
    return contextlib.nullcontext() if is_alone and doing.startswith("loading") else Progress(doing)


def say(line: str) -> None:
    """Write a line to stderr and flush it."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def say_errors() -> Iterator[None]:
    """Report user errors (ValueError, OSError, MemoryError) as one line on stderr and exit with code 1."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        say(f"error: {error}")
        raise SystemExit(1) from error


def _open_screen(progress: Progress) -> _Bar | _Lines | None:
    if sys.stderr is None:  # no console at all
        return None
    return _Bar(progress) if sys.stderr.isatty() else _Lines()


class _Bar:
    def __init__(self, progress: Progress):
        from tqdm import tqdm

        uncounted = None if progress.total is not None else "{desc}[{elapsed}]"
        self._bar = tqdm(total=progress.total, desc=progress.doing, bar_format=uncounted)
        self._shown = progress.doing

    def show(self, chain: Sequence[Progress]) -> None:
        first = f"{chain[0].doing}{chain[0].rate}" if chain[0].total is not None else str(chain[0])
        if chain[0].total and chain[0].note:
            first = f"{chain[0].doing} {chain[0].note}"
        shown = ": ".join([first, *map(str, chain[1:])])
        if shown != self._shown:
            self._bar.set_description(shown)
            self._shown = shown
        self._bar.update(chain[0].done - self._bar.n)

    ended = show

    def close(self) -> None:
        self._bar.close()


class _Lines:
    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._begin = time.monotonic()
        self._last = 0.0

    def show(self, chain: Sequence[Progress]) -> None:
        kind = chain[-1].doing.split()[0]
        now = time.monotonic()
        if kind not in self._kinds or now - self._last >= min(max(SECONDS, _PART * (now - self._begin)), _MAX_SECONDS):
            self._kinds.add(kind)
            self._last = now
            say(": ".join(map(str, chain)))

    def ended(self, chain: Sequence[Progress]) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Deliver a Ctrl-C that arrives in JAX's garbage collection callback, where Python drops all exceptions.

    The signal is sent again 10 ms later. Only the main thread is interrupted; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, before = threading.get_ident(), sys.unraisablehook

    def hook(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            # Send a real signal: `_thread.interrupt_main` does not wake a waiting thread.
            threading.Timer(_RESEND_SECONDS, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
