"""Libraries that answers search: OpenAI's tool `file_search`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.cache.keys import SHARED, TenantSalt
from vlcache_jax.checks import short
from vlcache_jax.inputs.parts import FILES
from vlcache_jax.library import Library, Retriever, Searches
from vlcache_jax.library.retriever import Embeds, name_of
from vlcache_jax.llm import LLM
from vlcache_jax.protocol.searching import FileSearch
from vlcache_jax.protocol.values import ApiError
from vlcache_jax.server.files import files_of
from vlcache_jax.server.tenants import Register, Tenant, owner_of

_MOST = 64  # retrievers that are kept; each has its library's vectors

type Embedder = Embeds | Callable[[Sequence[Any]], Any]


class Searching:
    """Finds pictures for answers, of the operator's libraries and of what clients have uploaded.

    Args:
      engine: answers.
      register: of the tenants; None: there are none.
      embedder: makes vectors; None: the engine's model.

    Raises:
      ValueError: nothing tells the embedder from another one; see `Retriever`.
    """

    def __init__(self, engine: AsyncLLM, register: Register | None, embedder: Embedder | None):
        self._engine, self._register, self._embedder = engine, register, embedder
        if embedder is not None:
            name_of(embedder)
        # The last one was used last.
        self._retrievers: OrderedDict[tuple[str, TenantSalt | None], Retriever] = OrderedDict()
        self._lock = threading.Lock()

    def searches(self, asked: FileSearch, rounds: int, tenant: Tenant | None) -> Searches:
        """What an answer may do.

        Raises:
          ApiError: there is no such library.
        """
        retriever = self._retriever(asked, tenant)
        return Searches(retriever, k=asked.k, rounds=rounds, filter=asked.passes, least=asked.least)

    def _retriever(self, asked: FileSearch, tenant: Tenant | None) -> Retriever:
        is_own = asked.library == FILES
        if not is_own and asked.library not in self._engine.service.items.libraries(SHARED):
            where = f"{asked.where}.vector_store_ids"
            raise ApiError(f"{where} must name a library of this server, got {short(asked.library)}", where, 404)
        key = asked.library, owner_of(self._register, tenant) if is_own else None
        with self._lock:
            if key not in self._retrievers:
                library = files_of(self._engine, self._register, tenant) if is_own else Library(self._engine, key[0])
                self._retrievers[key] = Retriever(library, self._embedder or LLM(self._engine.service))
            self._retrievers.move_to_end(key)
            while len(self._retrievers) > _MOST:
                self._retrievers.popitem(last=False)
            return self._retrievers[key]
