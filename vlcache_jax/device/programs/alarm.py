"""XLA's alarm about slow compilations, which users can do nothing about."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import jax

_WARNING, _FATAL = 1, 3  # levels of XLA's log; jax opens with the first


class Alarm:
    """Hides "Very slow compile?", which XLA logs as an error once a compilation takes two minutes.

    jaxlib has no option for this one message, so errors are not logged while a program compiles. Errors of a
    compilation are raised in any case. Where a user has set TF_CPP_MIN_LOG_LEVEL or `jax_logging_level`, nothing
    changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiling = 0  # several threads compile

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Compile within this context."""
        if not _is_ours():
            yield
            return
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            was, self._compiling = self._compiling, self._compiling + more
            if not (was and self._compiling):
                _set_level(_FATAL if self._compiling else _WARNING)


ALARM = Alarm()
"""The alarm of this process, which has one log level."""


def _is_ours() -> bool:
    """Return whether the log has the level that jax gives it."""
    is_default = jax.config.jax_logging_level in (None, "NOTSET")
    return is_default and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == str(_WARNING)


def _set_level(level: int) -> None:
    from jax._src.lib import utils  # no public function sets the level without a handler of jax's own log

    if (set_level := getattr(utils, "absl_set_min_log_level", None)) is not None:
        set_level(level)
