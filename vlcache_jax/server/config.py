"""Server options, checked. Options of the engine are in `vlcache_jax.config`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.common.checks import check_flags, check_text, check_whole, is_a, parse_bytes, short
from vlcache_jax.inputs.prompt import template_text
from vlcache_jax.protocol import xml_tools
from vlcache_jax.server.tenants import Tenants


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the server.

    Attributes:
      host: address to listen on.
      port: port to listen on; 0: a free port.
      uds: Unix socket to listen on, in place of host and port.
      api_key: key that clients must send; may be repeated, and each key is valid; without one, authentication is off.
      api_keys: TOML file with the keys of tenants, in place of `api_key`; read again on SIGHUP; tenants share no cache
        entries.
      admin_key: key of the routes that show and change the cache; without it these routes are disabled.
      served_model_name: names that clients use for the model; by default the name that it was opened with; may be
        repeated.
      any_model_name: accept every model name in requests, and repeat it in the answers.
      allowed_origins: origins of web pages that browsers may call the server from (CORS); "*": all; may be repeated.
      allowed_hosts: host names that a server without keys accepts, in addition to `host`, localhost and IP addresses;
        "*": all; may be repeated.
      ssl_certfile: certificate for HTTPS; needs `ssl_keyfile`.
      ssl_keyfile: private key of the certificate.
      root_path: path under which a proxy publishes the server, such as `/v`.
      max_body_bytes: maximum size of a request body.
      max_file_bytes: maximum size of an uploaded image.
      max_files: maximum number of uploaded files per tenant; without tenants, of all clients together.
      body_timeout: seconds to receive a request body in.
      max_waiting: maximum number of requests in flight; further requests are refused; as many bodies may be arriving,
        and a further one closes the slowest connection.
      max_waiting_bytes: maximum size of all these bodies together, counted as they arrive; at least `max_body_bytes`.
      shutdown_timeout: seconds that running requests have to finish at shutdown.
      allow_reuse: reuse modes that requests may choose, in addition to the server's own; may be repeated.
      allow_compress: compression methods that requests may choose, such as `vl-cache-0.1`; may be repeated.
      max_n: maximum number of outputs per request.
      tool_call_parser: form of tool calls, which are returned as such if the request has tools: "hermes" (JSON in
        `<tool_call>` tags), "qwen3_coder" or "qwen3_xml" (XML in these tags), "auto" (the form in the chat template),
        "none" (calls stay text).
      reasoning_parser: "auto": return the model's reasoning as `reasoning`, if the chat template supports it; "none":
        leave it as text.
      chat_template: Jinja template, a file with it, or a prompt form such as `qwen3.6`, in place of the checkpoint's
        template.
      metrics_prefix: prefix of the metrics that vLLM has, too: "vlcache", "vllm" for dashboards of vLLM, or "both".
      log_traffic: print a line about requests, tokens and caches every ten seconds while there is traffic.
      embedder: model that finds images for `file_search`, such as `Qwen/Qwen3-VL-Embedding-2B`; by default the served
        model.
      warmup: compile all programs before `/ready` reports success.

    Raises:
      ValueError: an option is wrong.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: Sequence[str] = field(default=(), repr=False)
    api_keys: str | None = None
    admin_key: str | None = field(default=None, repr=False)
    served_model_name: Sequence[str] = ()
    any_model_name: bool = False
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""
    max_body_bytes: int | str = "64MiB"
    max_file_bytes: int | str = "32MiB"
    max_files: int = 1000
    body_timeout: float = 300.0
    max_waiting: int = 1024
    max_waiting_bytes: int | str = "4GiB"
    shutdown_timeout: float = 30.0
    allow_reuse: Sequence[str] = ()
    allow_compress: Sequence[str] = ()
    max_n: int = 128
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    metrics_prefix: str = "vlcache"
    log_traffic: bool = True
    embedder: str | None = None
    warmup: bool = True

    def __post_init__(self) -> None:
        from vlcache_jax.compress.parse import parse_compressor
        from vlcache_jax.reuse.selection import parse_policy

        for name in ("host", "root_path"):
            check_text(getattr(self, name), name)
        for name in ("uds", "api_keys", "admin_key", "ssl_certfile", "ssl_keyfile", "chat_template", "embedder"):
            if (text := getattr(self, name)) is not None:
                check_text(text or None, name, "a non-empty string or None")
        lists = "api_key", "served_model_name", "allowed_origins", "allowed_hosts", "allow_reuse", "allow_compress"
        for name in lists:
            given: Any = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Sequence) or not all(given):
                raise ValueError(f"{name} must be a list of non-empty strings, got {short(given)}")
            for one in given:
                check_text(one, name)
            object.__setattr__(self, name, tuple(given))
        for one in self.allowed_hosts:
            if set(one) & set(":/"):
                raise ValueError(f"allowed_hosts must be host names without scheme and port, got {short(one)}")
        for one in self.allow_reuse:
            check_allowed("allow_reuse", parse_policy, one)
        for one in self.allow_compress:
            check_allowed("allow_compress", parse_compressor, one)
        if self.chat_template is not None:
            _check_template(self.chat_template)
        if self.admin_key is not None and self.admin_key in self.api_key:
            raise ValueError("admin_key must differ from every api_key: choose another key")
        if self.api_keys is not None:
            if self.api_key:
                raise ValueError("api_key and api_keys are mutually exclusive, got both: put the key into the file")
            Tenants.load(self.api_keys, self.admin_key)  # before a model is opened
        parsers = ("auto", "hermes", *xml_tools.FORMS, "none")
        for name, known in (
            ("tool_call_parser", parsers), ("reasoning_parser", ("auto", "none")),
            ("metrics_prefix", ("vlcache", "vllm", "both")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {short(getattr(self, name))}")
        check_whole("port", self.port, 0, 65535)
        check_whole("max_waiting", self.max_waiting, 1)
        check_whole("max_n", self.max_n, 1)
        check_whole("max_files", self.max_files, 0)
        check_flags(warmup=self.warmup, log_traffic=self.log_traffic, any_model_name=self.any_model_name)
        for name in ("max_body_bytes", "max_file_bytes", "max_waiting_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        if int(self.max_waiting_bytes) < int(self.max_body_bytes):
            raise ValueError(
                f"max_waiting_bytes must be at least max_body_bytes {self.max_body_bytes}, got {self.max_waiting_bytes}"
            )
        for name in ("body_timeout", "shutdown_timeout"):
            seconds: Any = getattr(self, name)
            if not (is_a(seconds, int | float) and 0 <= seconds < math.inf):
                raise ValueError(f"{name} must be a non-negative number of seconds, got {short(seconds)}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile must be set together, got one of them")
        for name in ("ssl_certfile", "ssl_keyfile"):
            if (path := getattr(self, name)) is not None and not os.path.isfile(path):
                raise ValueError(f"{name} must be the path of an existing file, got {path}")
        if (self.root_path and not self.root_path.startswith("/")) or self.root_path.endswith("/"):
            raise ValueError(f"root_path must begin with a slash and end without one, got {self.root_path!r}")

    @property
    def has_keys(self) -> bool:
        """True if clients must send a key."""
        return bool(self.api_key) or self.api_keys is not None


def served_cache(cache: CacheConfig, server: ServerConfig) -> CacheConfig:
    """Return the options of the image cache of a server, whose default of `donors` is "neutral".

    Raises:
      ValueError: `donors` is "own", but callers have no names.
    """
    if cache.donors == "own" and server.api_keys is None:
        raise ValueError("donors must not be 'own' without api_keys, whose names tell callers apart")
    return cache if cache.donors is not None else replace(cache, donors="neutral")


def _check_template(given: str) -> None:
    """Before a model is opened."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = template_text(given)
    try:
        render_jinja_template([], chat_template=text)
    except Exception as error:  # as Jinja calls it
        raise ValueError(f"chat_template must be a valid Jinja template: {error}") from error


def check_allowed(name: str, parse: Callable[[str], object], text: str) -> None:
    """Errors of a parser, told of the option."""
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(re.sub(r"^\w+", name, str(error), count=1)) from error
