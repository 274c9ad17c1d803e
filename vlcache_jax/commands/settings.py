"""Commands whose options are the fields of a dataclass, so that each option is spelled once."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

from typer.models import ParameterInfo

from vlcache_jax.commands.options import SameModel, one_model
from vlcache_jax.common.option_types import Parsed
from vlcache_jax.common.progress import say_errors


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the fields of its first parameter, a dataclass with a field `model`, as options.

    A field is an option if its annotation has a `typer.Option` or `typer.Argument`. Other fields have their defaults.
    Errors of the dataclass and of the command end it with one line.
    """
    first, *rest = inspect.signature(command, eval_str=True).parameters.values()
    kind: type[Any] = first.annotation
    hints = typing.get_type_hints(kind, include_extras=True)
    options = [own for own in dataclasses.fields(kind) if _annotations(hints[own.name], ParameterInfo)]

    def run(same_model: str | None, **given: Any) -> None:
        with say_errors():
            values = {own.name: _value(own.name, hints[own.name], given.pop(own.name)) for own in options}
            command(kind(**values | {"model": one_model(values["model"], same_model)}), **given)

    parameters = [_parameter(own.name, hints[own.name], own.default) for own in options]
    parameters.insert(1, _parameter("same_model", SameModel, None))
    parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in rest]
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _annotations(hint: Any, kind: type[Any]) -> list[Any]:
    """Return the annotations of a type that are instances of a class."""
    return [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, kind)]


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Return the parameter of an option; the default of a parsed one is text."""
    if _annotations(hint, Parsed):
        [info] = _annotations(hint, ParameterInfo)
        if default is not None:
            default = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        hint = typing.cast(Any, Annotated)[str | None if default is None else str, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _value(name: str, hint: Any, given: Any) -> Any:
    """Return the value of a field for the value of its option."""
    for parsed in _annotations(hint, Parsed):
        return None if given is None else parsed.parse(given, name)
    return given
