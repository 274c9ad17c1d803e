"""How a model is served: every option beside those of the engine, checked."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlcache_jax.checks import check_flags, check_text, check_whole, is_a, parse_bytes, short
from vlcache_jax.inputs.prompt import template_text
from vlcache_jax.server.tenants import Tenants


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where a server listens, who may ask it, and how much.

    Attributes:
      host: address to listen at.
      port: 0 takes a free one.
      uds: path of a Unix socket to listen at, in place of host and port.
      api_key: that clients must know; may be repeated, and any of them will do. Without one everybody is served.
      api_keys: TOML file of tenants' keys, in place of `api_key`; see `vlcache_jax.server.tenants`. It is read again on
        SIGHUP. Tenants share nothing that is kept of images.
      admin_key: of those who see and change the cache. Without one nobody does over HTTP.
      served_model_name: what clients call the model, by default as it was opened; may be repeated.
      allowed_origins: of pages that browsers let ask; may be repeated, and "*" is all.
      allowed_hosts: names beside `host`, localhost and addresses by which a server without keys may be called; may be
        repeated, and "*" is all.
      ssl_certfile: certificate, for HTTPS.
      ssl_keyfile: key of the certificate.
      root_path: where a proxy shows the server, such as /v.
      max_body_bytes: of a request.
      max_file_bytes: of a picture that is uploaded.
      max_files: that each tenant may have; without tenants, all clients together.
      body_timeout: seconds that a body may take to come.
      max_waiting: requests under way at most, those that run included; one more is refused. As many bodies may be
        coming; then the slowest is closed for one more.
      max_waiting_bytes: of all these bodies together, counted as they come.
      shutdown_timeout: seconds that requests may take to end when the server is asked to.
      allow_reuse: what of images a request may ask to reuse, beside the server's own way; may be repeated.
      allow_compress: what of prompts a request may ask to go on with, such as vl-cache-0.1; may be repeated.
      max_n: answers to one request at most.
      tool_call_parser: "hermes": what stands between `<tool_call>` tags is told as calls where a request offers tools;
        "none": it stays text.
      reasoning_parser: "auto": where the chat template says that the model thinks, that is told as `reasoning`; "none":
        it stays text.
      chat_template: Jinja, or a file of it, in place of the checkpoint's own.
      embedder: model that finds pictures for `file_search`, such as Qwen/Qwen3-VL-Embedding-2B; by default the served
        one does.
      warmup: compile everything before `/ready` says so.

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
    tool_call_parser: str = "hermes"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    embedder: str | None = None
    warmup: bool = True

    def __post_init__(self) -> None:
        from vlcache_jax.compress.parse import parse_compressor
        from vlcache_jax.reuse.parse import parse_policy

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
                raise ValueError(f"allowed_hosts must be names without scheme and port, got {short(one)}")
        for one in self.allow_reuse:
            check_allowed("allow_reuse", parse_policy, one)
        for one in self.allow_compress:
            check_allowed("allow_compress", parse_compressor, one)
        if self.chat_template is not None:
            _check_template(self.chat_template)
        if self.admin_key is not None and self.admin_key in self.api_key:
            raise ValueError("admin_key must be another one than api_key")
        if self.api_keys is not None:
            if self.api_key:
                raise ValueError("api_key must be left out where api_keys names a file")
            Tenants.load(self.api_keys, self.admin_key)  # before a model is opened
        for name, known in (("tool_call_parser", ("hermes", "none")), ("reasoning_parser", ("auto", "none"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {short(getattr(self, name))}")
        check_whole("port", self.port, 0, 65535)
        check_whole("max_waiting", self.max_waiting, 1)
        check_whole("max_n", self.max_n, 1)
        check_whole("max_files", self.max_files, 0)
        check_flags(warmup=self.warmup)
        for name in ("max_body_bytes", "max_file_bytes", "max_waiting_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        if int(self.max_waiting_bytes) < int(self.max_body_bytes):
            raise ValueError(f"max_waiting_bytes must be at least max_body_bytes, got {self.max_waiting_bytes}")
        for name in ("body_timeout", "shutdown_timeout"):
            seconds: Any = getattr(self, name)
            if not (is_a(seconds, int | float) and 0 <= seconds < math.inf):
                raise ValueError(f"{name} must be a number of seconds, got {short(seconds)}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile must be given together")
        for name in ("ssl_certfile", "ssl_keyfile"):
            if (path := getattr(self, name)) is not None and not os.path.isfile(path):
                raise ValueError(f"{name} must be a file, got {path}")
        if (self.root_path and not self.root_path.startswith("/")) or self.root_path.endswith("/"):
            raise ValueError(f"root_path must begin with a slash and end without one, got {self.root_path!r}")

    @property
    def has_keys(self) -> bool:
        """Whether clients must know a key."""
        return bool(self.api_key) or self.api_keys is not None


def _check_template(given: str) -> None:
    """Before a model is opened."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = template_text(given)
    try:
        render_jinja_template([], chat_template=text)
    except Exception as error:  # as Jinja calls it
        raise ValueError(f"chat_template must be Jinja: {error}") from error


def check_allowed(name: str, parse: Callable[[str], object], text: str) -> None:
    """Errors of a parser, told of the option."""
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(re.sub(r"^\w+", name, str(error), count=1)) from error
