"""`vlcache serve`: its options are those of the engine, its cache and the server, by their own names."""

from __future__ import annotations

import inspect
import json
import pathlib
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands import options as opt
from vlcache_jax.commands.options import SHIPPED
from vlcache_jax.common.progress import say, say_errors
from vlcache_jax.config import EngineConfig
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.server.config import ServerConfig, served_cache

# What others may send must not name files of the process, unless the operator says so.
_DEFAULTS: dict[str, Any] = {"allowed_local_media_path": None}
_ENVIRONMENT = {
    "api_key": "VLCACHE_API_KEY",
    "admin_key": "VLCACHE_ADMIN_KEY",
    "peer_token": "VLCACHE_PEER_TOKEN",
    "remote": "VLCACHE_REMOTE",
}
# The headings of the help, in their order. Other options of the server and of the cache have the first and the last
# one.
_PANELS = {
    "Server": "",
    "Model": "dtype revision implementation tensor_parallel_size verify_weights seed warmup buckets use_tqdm embedder",
    "Prompts and outputs": "max_n chat_template tool_call_parser reasoning_parser structured_outputs_config",
    "Images and videos": "mm_processor_kwargs limit_mm_per_prompt max_image_bytes max_image_pixels",
    "Security": "api_key api_keys admin_key allowed_origins allowed_hosts ssl_certfile ssl_keyfile allow_reuse "
    "allow_compress allow_remote_images allowed_media_domains allowed_local_media_path trust_uuids",
    "Limits of requests": "max_body_bytes max_file_bytes max_files body_timeout max_waiting max_waiting_bytes",
    "Engine": "max_num_seqs state_snapshots max_rows max_model_len enable_prefix_caching",
    "Memory": "kv_cache_bytes compressed_kv_bytes gpu_memory_utilization",
    "Image cache": "reuse",
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
    options = {own.name: (owner, own) for owner in (EngineConfig, ServerConfig, CacheConfig) for own in _own(owner)}
    texts = {owner: _attribute_texts(owner) for owner, _ in options.values()}
    for name, (owner, own) in sorted(options.items(), key=lambda option: list(_PANELS).index(_panel(*option[1]))):
        parameters.append(_parameter(own, _in_command_terms(texts[owner][name], options), _panel(owner, own)))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False)
    app.command("serve")(run)
    return typer.main.get_command(app)


def configs(model: str, given: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Return the configurations of engine and server for the parsed options.

    Raises:
      ValueError: an option is invalid.
    """

    def of(owner: type) -> dict[str, Any]:
        found = {own.name: _value(own, given[own.name]) for own in _own(owner) if own.name in given}
        # Unnamed lists and options are as they are by default.
        return {name: value for name, value in found.items() if value is not None or name in _DEFAULTS}

    server = ServerConfig(**of(ServerConfig))
    cache = of(CacheConfig)
    if "neutral_systems" in cache:
        cache["neutral_systems"] = [_text(one) for one in cache["neutral_systems"]]
    engine = EngineConfig(model, cache=served_cache(CacheConfig(**cache), server), **of(EngineConfig))
    if engine.allow_remote_images and not engine.allowed_media_domains:
        raise ValueError(
            "allowed_media_domains must name hosts if allow_remote_images is set, got none: use --allowed-media-domains"
        )
    return engine, server


def _text(given: str) -> str:
    """Return a system message, which is in a file if it has the form "@FILE". A line end at the end is left out."""
    if not given.startswith("@"):
        return given
    try:
        return pathlib.Path(given[1:]).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"neutral_systems must have a readable text file after @, got {given}: {error}") from error


def _own(owner: type) -> list[Field[Any]]:
    """Return the fields of a configuration class that become command line options."""
    return [own for own in fields(owner) if own.init and own.name not in ("model", "cache", "discovered_peers")]


def _attribute_texts(owner: type) -> dict[str, str]:
    """Return what the docstring of a class says about each attribute."""
    section = inspect.getdoc(owner).partition("Attributes:\n")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    found = re.findall(r"(?m)^  ([\w, ]+): ((?:.+\n?)(?:^   +.*\n?)*)", section)
    return {name.strip(): " ".join(text.split()) for names, text in found for name in names.split(",")}


def _in_command_terms(text: str, options: Collection[str]) -> str:
    """Return a text about an option with other options as the command spells them, and a capital letter at the
    start."""
    text = re.sub(r"`(\w+)`", lambda match: _flag(match[1]) if match[1] in options else match[0], text)
    return text if text.startswith("-") else text[0].upper() + text[1:]


def _panel(owner: type, own: Field[Any]) -> str:
    """Return the heading under which the help shows an option."""
    rest = "Server" if owner is ServerConfig else "Image cache"
    return next((panel for panel, names in _PANELS.items() if own.name in names.split()), rest)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _kind(own: Field[Any]) -> str:
    """Return the kind of value of an option: "bool", "int", "float", "list", "json" or "text"."""
    kinds = str(own.type).removesuffix(" | None")
    if kinds in _NUMBERS:
        return kinds
    if kinds == "Sequence[str]":
        return "list"
    return "json" if kinds.startswith(("Mapping", "BucketSizes")) else "text"


def _parameter(own: Field[Any], about: str, panel: str) -> inspect.Parameter:
    kind = _kind(own)
    default = _DEFAULTS.get(own.name, None if own.default is MISSING else own.default)
    flag = _flag(own.name)
    names = [f"{flag}/--no-{flag[2:]}"] if kind == "bool" else [flag]
    more: dict[str, Any] = {"help": about, "envvar": _ENVIRONMENT.get(own.name), "rich_help_panel": panel}
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
    """Return a parsed value in the form that the configuration class takes."""
    if _kind(own) == "list":
        return list(given or ()) or None
    if given is None or _kind(own) != "json":
        return given
    try:
        found = json.loads(given)
    except ValueError as error:
        raise ValueError(f"{own.name} must be JSON, got {given}: {error}") from error
    if own.name == "buckets" and isinstance(found, dict):
        sizes: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}
        try:
            return BucketSizes(**sizes)
        except TypeError as error:
            raise ValueError(
                f"buckets must have only the keys rows, patches, sequences and window, got {given}"
            ) from error
    return found
