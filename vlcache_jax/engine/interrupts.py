"""Ctrl-C that nothing swallows."""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_SECONDS = 0.01  # until what was swallowed comes again


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C through that arrives while jax attends to the garbage collector, where Python drops every exception.

    The same signal is sent again a moment later. Only the main thread is ever interrupted; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            threading.Timer(_SECONDS, _thread.interrupt_main).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
