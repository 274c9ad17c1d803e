"""What a wait is for: a bar on a terminal; in a pipe or a file, plain lines now and then. Both on stderr.

`interruptible` sees to it that Ctrl-C ends it.
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

SECONDS = 3.0  # from one line to the next, unless work of another kind begins
_MOST_SECONDS, _PART = 30.0, 0.1  # of a long wait: a tenth of the time so far, but no more
_AGAIN = 0.01  # seconds until an interrupt that was swallowed comes again


class Progress:
    """Says what is done and how far it is (a context manager). Within another one it shows beside it.

    Args:
      doing: such as "answering"; its first word is the kind of work.
      total: of what `update` counts; None: nothing is counted.
      show: False is silent, and so is what is within.

    Attributes:
      done: so many, so far.
      note: stands after the numbers.
    """

    def __init__(self, doing: str, total: int | None = None, *, show: bool = True):
        self.doing, self.total, self.done = doing, total, 0
        self._tokens = 0
        self.note = ""
        self._begin = time.monotonic()
        self._show = show
        self._chain: tuple[Progress, ...] = (self,)  # those that it is within, and it
        self._screen: _Bar | _Lines | None = None

    def update(self, count: int = 1, *, tokens: int = 0) -> None:
        """So many more are done, and so many tokens with them."""
        self.done += count
        self._tokens += tokens
        self._say()

    def reach(self, done: int, note: str = "") -> None:
        """Set how many are done, and the note."""
        self.note = note
        self.update(done - self.done)

    def __str__(self) -> str:
        if self.total == 0 or not (self.done or self.note):
            return self.doing
        counted = f"{self.doing} {self.done}{f' of {self.total}' if self.total else ''}{self.rate}"
        return f"{counted} {self.note}".rstrip()

    @property
    def rate(self) -> str:
        """Tokens a second so far, if there are any. Of one request it would tell how long the first token took."""
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
        """Begins to show it, beside the one that is active."""
        if (outer := _innermost.get()) is not None:
            self._chain = (*outer._chain, self)
        if self._show:
            self._screen = _open_screen(self) if outer is None else outer._screen
        self._say()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """What is shown within shows beside it; for work that goes on now and then."""
        before = _innermost.set(self)
        try:
            yield
        finally:
            _innermost.reset(before)

    def close(self) -> None:
        """Shows it no more."""
        if self._screen is not None and len(self._chain) == 1:
            self._screen.close()
        elif self._screen is not None:
            self._screen.ended(self._chain[:-1])

    def _say(self) -> None:
        if self._screen is not None:
            self._screen.show(self._chain)


_innermost: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("progress", default=None)


def shown_waiting(doing: str) -> contextlib.AbstractContextManager[Any]:
    """Shows what a request waits for. Loading takes a moment: it is shown beside what is shown already, not alone."""
    is_alone = _innermost.get() is None
    return contextlib.nullcontext() if is_alone and doing.startswith("loading") else Progress(doing)


def say(line: str) -> None:
    """A line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def say_errors() -> Iterator[None]:
    """Turns errors of users into a line on stderr and exit code 1."""
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
        if kind not in self._kinds or now - self._last >= min(max(SECONDS, _PART * (now - self._begin)), _MOST_SECONDS):
            self._kinds.add(kind)
            self._last = now
            say(": ".join(map(str, chain)))

    def ended(self, chain: Sequence[Progress]) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C through that arrives while jax attends to the garbage collector, where Python drops every exception.

    The same signal is sent again a moment later. Only the main thread is ever interrupted; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, before = threading.get_ident(), sys.unraisablehook

    def hook(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            # A real one: `_thread.interrupt_main` does not wake a thread that waits.
            threading.Timer(_AGAIN, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
