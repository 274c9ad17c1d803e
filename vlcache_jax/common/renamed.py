"""Deprecated names of public arguments. They work for one release, and each use issues a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from vlcache_jax.common.vllm_compat import OURS


def current(owner: str, names: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments under their current names.

    Args:
      owner: name of the class or function that takes them, for messages.
      names: current name by deprecated name.
      given: keyword arguments.

    Raises:
      TypeError: an argument is given under both names.
    """
    found = {name: value for name, value in given.items() if name not in names}
    for old, new in names.items():
        if old not in given:
            continue
        if new in given:
            raise TypeError(f"{owner}: {old} is the deprecated name of {new}; pass only {new}")
        warn_renamed(f"{owner}({old}=)", f"{new}=")
        found[new] = given[old]
    return found


def renamed[T](
    names: Mapping[str, str], values: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds deprecated names and values of attributes.

    The constructor accepts the deprecated names and values, and the deprecated attributes can be read. Each use warns.

    Args:
      names: current name by deprecated name.
      values: for each attribute, current value by deprecated value.
    """

    def decorate(owner: type[T]) -> type[T]:
        init: Callable[..., None] = owner.__init__

        @functools.wraps(init)
        def take_both(self: T, *args: Any, **given: Any) -> None:
            given = current(owner.__name__, names, given)
            for name, earlier in values.items():
                if isinstance(value := given.get(name), str) and value in earlier:
                    warn_renamed(f"{owner.__name__}({name}={value!r})", repr(earlier[value]))
                    given[name] = earlier[value]
            init(self, *args, **given)

        owner.__init__ = take_both  # type: ignore[assignment, method-assign]
        for old, new in names.items():
            setattr(owner, old, property(functools.partial(_read, old=old, new=new)))
        return owner

    return decorate


def renamed_arguments[**P, T](names: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that adds deprecated names of arguments to a function. Each use warns.

    Args:
      names: current name by deprecated name.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def take_both(*args: P.args, **given: P.kwargs) -> T:
            named: Any = current(function.__name__, names, given)
            return function(*args, **named)

        return take_both

    return decorate


def warn_renamed(old: str, new: str) -> None:
    """Issue a warning, at the user's line, that `old` is deprecated in favor of `new`."""
    message = f"{old} is deprecated and will be removed in the next release; use {new}"
    warnings.warn(message, FutureWarning, skip_file_prefixes=OURS)


def _read(owner: object, *, old: str, new: str) -> Any:
    warn_renamed(f"{type(owner).__name__}.{old}", new)
    return getattr(owner, new)
