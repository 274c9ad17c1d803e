"""Memory that the process has freed, and that its C library keeps."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return freed memory to the system. Other C libraries than glibc do so themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
