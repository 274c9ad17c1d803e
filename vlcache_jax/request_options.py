"""Options of a request in addition to its prompt and its sampling parameters.

`LLM` and `AsyncLLM` collect their keywords in one `RequestOptions`; batch files and the server fill one from a line or
a body. Code passes it on whole, so a new option needs only a field here, a keyword there, and the code that uses it.

This module imports no JAX, like `config`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vlcache_jax.cache.keys import Salt, TenantSalt

if TYPE_CHECKING:
    from vlcache_jax.compress.policies import Compressor
    from vlcache_jax.reuse.policies import Policy
    from vlcache_jax.reuse.schedule import Schedule

type Reuse = str | float | os.PathLike[str] | Schedule | Policy
type Compress = str | Compressor


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request, or of all requests of a call.

    Methods accept them as keywords, or together as `options=`::

        options = RequestOptions(reuse="off", cache_salt="alice")
        llm.chat(conversation, options=options)

    The method that receives a wrong value raises a ValueError before anything runs.

    Attributes:
      reuse: reuse mode, see `EngineConfig`; unknown ones are errors. Default None: the engine's.
      compress: policy that compresses the prompt's KV after the first token, see `LLM.chat`. It needs an engine with
        `compressed_kv_bytes` and a method that generates text. Default None: no compression.
      cache_salt: a string; requests with different salts share nothing in the cache. Default None, which is a salt,
        too.
      priority: an integer; requests with lower values run first, those with equal values in the order of arrival.
        Default 0.
      donors: contexts from which approximate reuse links images, see `CacheConfig`; it may only allow less than the
        engine's. Default None: the engine's.
      caller: name of the user or program that sends the request, a string; `donors="own"` links contexts of this
        caller. Default None: the engine's own program.
      mm_processor_kwargs: settings of a conversation's images and videos, see `EngineConfig`; `fps` may also be a list
        with one value per video. Prompts without messages have them in their dict. Default None: the engine's.
    """

    reuse: Reuse | None = None
    compress: Compress | None = None
    cache_salt: Salt = None
    priority: int = 0
    donors: str | None = None
    caller: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, options: RequestOptions | None = None, **keywords: Any) -> RequestOptions:
        """Return the options of a method, given whole or as keywords.

        Raises:
          ValueError: `options` has another type, or an option is set both there and by its keyword.
        """
        if options is None:
            return cls(**keywords)
        if not isinstance(options, RequestOptions):
            raise ValueError(f"options must be RequestOptions or None, got {type(options).__name__}")
        given = {name: value for name, value in keywords.items() if value is not getattr(cls, name)}
        for name in given:
            if getattr(options, name) is not getattr(cls, name):
                raise ValueError(f"{name} must be set in options or as a keyword, got both")
        return dataclasses.replace(options, **given) if given else options

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Return the options among the fields of a body or a line; null is an option's default."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: given[name] for name in names if given.get(name) is not None})

    @property
    def tenant(self) -> str | None:
        """Name of the server's tenant that sent the request, found by its salt; None if there is none."""
        return self.cache_salt.tenant if isinstance(self.cache_salt, TenantSalt) else None


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(RequestOptions):
    """Request options with parsed `reuse` and `compress`, and the rule of `donors`; see `Service.call`."""

    reuse: Policy
    compress: Compressor | None = None
    donors: str = "any"
