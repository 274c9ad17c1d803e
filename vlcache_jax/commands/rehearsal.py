"""Asking until nothing is left to compile, before times are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM

_MOST = 4  # the last one has nothing left to compile


def rehearse(llm: LLM, ask: Callable[[], object]) -> None:
    """Calls `ask` until it compiles no program any more, four times at most."""
    for _ in range(_MOST):
        known = llm.stats().programs
        ask()
        if llm.stats().programs == known:
            break
