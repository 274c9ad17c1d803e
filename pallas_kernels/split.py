"""Kernels on several devices: each device computes its own heads, or experts, of a call.

A compiler that partitions programs by the shardings of their arguments cannot partition a kernel. It gathers the
operands of XLA's own attention. So within `over(mesh)` each kernel stands in a `shard_map` of its own, and sees on
every device an ordinary call with fewer heads.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

AXIS = "tensor"
WHOLE = PartitionSpec()  # replicated on each device
# Sharded along one axis.
FIRST, SECOND, THIRD, FOURTH = (PartitionSpec(*[None] * axis, AXIS) for axis in range(4))

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh of the kernels", default=None)


@contextlib.contextmanager
def over(mesh: Mesh | None) -> Iterator[None]:
    """Distribute the kernels that are traced within over the devices of a mesh with the axis `AXIS`."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def spread[R](function: Callable[..., R], takes: Any, gives: Any) -> Callable[..., R]:
    """Return a function that each device runs on its own part of the arguments; `function` itself if there is no mesh.

    Args:
      takes, gives: Shardings of arguments and results, as in `jax.shard_map`.
    """
    mesh = _mesh.get()
    if mesh is None:
        return function

    def alone(*arguments: Any) -> R:
        with over(None):
            return function(*arguments)

    mapped: Callable[..., R] = jax.shard_map(alone, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
    return mapped


def spreads[**P, R](gives: Any, **takes: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a kernel's function.

    Args:
      gives: Sharding of its results.
      takes: Its arrays and the sharding of each; its other arguments are numbers and names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def spreading(*args: P.args, **kwargs: P.kwargs) -> R:
            if _mesh.get() is None:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            arrays = {name: given.pop(name) for name in takes if name in given}
            named = list(arrays)

            def of(*values: Any) -> R:
                return function(**given, **dict(zip(named, values, strict=True)))  # type: ignore[call-arg]

            return spread(of, tuple(takes[name] for name in named), gives)(*arrays.values())

        return spreading

    return decorate


def is_spread() -> bool:
    """Return whether kernels that are traced here are distributed over devices."""
    return _mesh.get() is not None
