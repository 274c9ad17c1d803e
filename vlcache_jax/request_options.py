"""Options of a request in addition to its prompt and its sampling parameters.

Both fronts make one `RequestOptions` of their keywords. Batch files and the server fill one from a row or a body. It is
passed on whole, so that a new option is a field here, a keyword of the fronts, and the code that uses it.

Imported without jax, as `config` is.
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
    """Options of one request, or of all requests of a call. Every method that takes such keywords takes them together
    as `options=`, too::

        options = RequestOptions(reuse="off", cache_salt="alice")
        llm.chat(conversation, options=options)

    A wrong value raises a ValueError in the method that it is passed to, before anything runs.

    Attributes:
      reuse: reuse mode, see `EngineConfig`; an unknown one is an error. None: the engine's.
      compress: how the prompt's KV is compressed after the first token, see `LLM.chat`. It is an error if the engine
        has no `compressed_kv_bytes`, and where no answer is generated. None: not at all.
      cache_salt: a string; requests with different salts share nothing in the cache. None is a salt of its own.
      priority: an integer; requests with lower ones run first, those with equal ones in the order of their arrival.
      mm_processor_kwargs: settings of images and videos of a conversation, see `EngineConfig`; `fps` may also be a list
        with one for each video. A prompt without messages has them in its dict. None: the engine's.
    """

    reuse: Reuse | None = None
    compress: Compress | None = None
    cache_salt: Salt = None
    priority: int = 0
    mm_processor_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, options: RequestOptions | None = None, **keywords: Any) -> RequestOptions:
        """The options that a method was given, whole or as keywords.

        Raises:
          ValueError: `options` is something else, or one option stands in both.
        """
        if options is None:
            return cls(**keywords)
        if not isinstance(options, RequestOptions):
            raise ValueError(f"options must be RequestOptions or None, got {type(options).__name__}")
        given = {name: value for name, value in keywords.items() if value is not getattr(cls, name)}
        for name in given:
            if getattr(options, name) is not getattr(cls, name):
                raise ValueError(f"{name} must be left out beside options that have it, got both")
        return dataclasses.replace(options, **given) if given else options

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The options among the fields of a body or of a row; null is an option's default."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: given[name] for name in names if given.get(name) is not None})

    @property
    def tenant(self) -> str | None:
        """The tenant of a server that the request is from, by its salt; None: there is none."""
        return self.cache_salt.tenant if isinstance(self.cache_salt, TenantSalt) else None


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(RequestOptions):
    """Request options whose `reuse` and `compress` have been read; see `Service.call`."""

    reuse: Policy
    compress: Compressor | None = None
