"""Kernels on several devices: each device computes its own heads, or experts, of a call.

A compiler that cuts programs by the shardings of their arguments cannot cut a kernel, nor XLA's own attention without
gathering what it multiplies. So within `over(mesh)` each kernel stands in a `shard_map` of its own, and sees on every
device an ordinary call with fewer heads.
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
WHOLE = PartitionSpec()  # on each device
# Of which axis each device has a part.
FIRST, SECOND, THIRD, FOURTH = (PartitionSpec(*[None] * axis, AXIS) for axis in range(4))

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh of the kernels", default=None)


@contextlib.contextmanager
def over(mesh: Mesh | None) -> Iterator[None]:
    """Spreads the kernels that are traced within over the devices of a mesh with the axis `AXIS`."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def spread[R](function: Callable[..., R], takes: Any, gives: Any) -> Callable[..., R]:
    """The function as each device computes it of its own part of the arguments; itself where there is no mesh.

    Args:
      takes, gives: how arguments and results lie, as `jax.shard_map` has it.
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
    """Decorates a kernel's function.

    Args:
      gives: how its results lie.
      takes: its arrays, and how each of them lies; its other arguments are numbers and names.
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
    """Whether kernels that are traced here are spread over devices."""
    return _mesh.get() is not None
