"""`vlcache serve`: its options are those of the engine, its cache and the server, by their own names."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands import options as opt
from vlcache_jax.commands.options import SHIPPED
from vlcache_jax.common.progress import say, say_errors
from vlcache_jax.config import EngineConfig
from vlcache_jax.device.buckets import Ladder
from vlcache_jax.server.config import ServerConfig

# What others may send must not name files of the process, unless the operator says so.
_DEFAULTS: dict[str, Any] = {"allowed_local_media_path": None}
_ENVIRONMENT = {
    "api_key": "VLCACHE_API_KEY",
    "admin_key": "VLCACHE_ADMIN_KEY",
    "peer_token": "VLCACHE_PEER_TOKEN",
    "remote": "VLCACHE_REMOTE",
}
_NUMBERS: dict[str, Any] = {"int": int, "float": float, "bool": bool}


def command() -> Any:
    """The command, as typer has it."""

    def run(model: str | None, same_model: str | None, **given: Any) -> None:
        with say_errors():
            say("importing JAX")
            engine, config = configs(opt.one_model(model, same_model) or SHIPPED, given)
            from vlcache_jax.server.lifecycle import serve

            code = serve(engine, config)
        raise typer.Exit(code)

    parameters = [
        inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=opt.ModelArgument),
        inspect.Parameter("same_model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=opt.SameModel),
    ]
    for owner in (ServerConfig, EngineConfig, CacheConfig):
        told = _told(owner)
        parameters += [_parameter(own, told[own.name]) for own in _own(owner)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False)
    app.command("serve")(run)
    return typer.main.get_command(app)


def configs(model: str, given: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """What the options say.

    Raises:
      ValueError: one is wrong.
    """

    def of(owner: type) -> dict[str, Any]:
        found = {own.name: _value(own, given[own.name]) for own in _own(owner) if own.name in given}
        # Unnamed lists and options are as they are by default.
        return {name: value for name, value in found.items() if value is not None or name in _DEFAULTS}

    server = ServerConfig(**of(ServerConfig))
    engine = EngineConfig(model, cache=CacheConfig(**of(CacheConfig)), **of(EngineConfig))
    if engine.allow_remote_images and not engine.allowed_media_domains:
        raise ValueError("allowed_media_domains must name hosts where allow_remote_images is set, got none")
    return engine, server


def _own(owner: type) -> list[Field[Any]]:
    """The fields that are options."""
    return [own for own in fields(owner) if own.init and own.name not in ("model", "cache", "neighbours")]


def _told(owner: type) -> dict[str, str]:
    """What the docstring of a class says of its attributes."""
    section = inspect.getdoc(owner).partition("Attributes:\n")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    found = re.findall(r"(?m)^  ([\w, ]+): ((?:.+\n?)(?:^   +.*\n?)*)", section)
    plain = {name.strip(): " ".join(text.split()) for names, text in found for name in names.split(",")}
    return {name: text[0].upper() + text[1:] for name, text in plain.items()}


def _kind(own: Field[Any]) -> str:
    """What an option takes: "bool", "int", "float", "list", "json" or "text"."""
    kinds = str(own.type).removesuffix(" | None")
    if kinds in _NUMBERS:
        return kinds
    if kinds == "Sequence[str]":
        return "list"
    return "json" if kinds.startswith(("Mapping", "Ladder")) else "text"


def _parameter(own: Field[Any], about: str) -> inspect.Parameter:
    kind = _kind(own)
    default = _DEFAULTS.get(own.name, None if own.default is MISSING else own.default)
    flag = f"--{own.name.replace('_', '-')}"
    names = [f"{flag}/--no-{flag[2:]}"] if kind == "bool" else [flag]
    more: dict[str, Any] = {"help": about, "envvar": _ENVIRONMENT.get(own.name)}
    if kind in ("list", "json"):
        default, more["metavar"] = None, "<str>" if kind == "list" else "<json>"
    if default is None or own.name in _ENVIRONMENT:
        more["show_default"] = False
    types: dict[str, Any] = {**_NUMBERS, "list": list[str]}
    annotation: Any = types.get(kind, str)
    if default is None:
        annotation = annotation | None
    default = default if default is None or kind in types else str(default)
    return inspect.Parameter(
        own.name, inspect.Parameter.KEYWORD_ONLY, default=default,
        annotation=typing.cast(Any, Annotated)[annotation, typer.Option(*names, **more)],
    )  # fmt: skip


def _value(own: Field[Any], given: Any) -> Any:
    """As the class takes it."""
    if _kind(own) == "list":
        return list(given or ()) or None
    if given is None or _kind(own) != "json":
        return given
    try:
        found = json.loads(given)
    except ValueError as error:
        raise ValueError(f"{own.name} must be JSON, got {given}: {error}") from error
    if own.name == "ladder" and isinstance(found, dict):
        rungs: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}
        try:
            return Ladder(**rungs)
        except TypeError as error:
            raise ValueError(f"ladder must hold rows, patches, sequences and window, got {given}") from error
    return found
