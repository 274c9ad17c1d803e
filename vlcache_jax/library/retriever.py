"""Finding pictures of a library by vectors of what they show."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.cache.items import Item
from vlcache_jax.common.checks import check_text, check_whole, short
from vlcache_jax.embedding import EmbeddingOutput, RerankOutput
from vlcache_jax.library.libraries import Library
from vlcache_jax.library.searches import Hit, Searches
from vlcache_jax.outputs import RequestOutput

EXACT = 100_000
"""Items up to which every vector is compared; beyond, `usearch` looks among neighbours."""
_TOGETHER = 64  # pictures that are embedded together
_WIDER = 4  # times as many neighbours are asked for as are wanted, where a filter or a reranker chooses among them

type Vectors = npt.NDArray[np.float32]


class EmbeddingModel(Protocol):
    """An `LLM` that embeds."""

    def embed(
        self, inputs: Any, *, instruction: str | None = None, cache_salt: str | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """See `LLM.embed`."""


class Reranks(Protocol):
    """An `LLM` that scores documents."""

    def rerank(
        self, query: Any, documents: Any, *, cache_salt: str | None = None, use_tqdm: bool = True
    ) -> list[RerankOutput]:
        """See `LLM.rerank`."""


@dataclass(frozen=True)
class _Index:
    """Vectors of items.

    Attributes:
      state: of the library then.
      all: items of the library then.
      items: that have vectors, in their order.
      vectors: float32 [N, D], each as long as 1.
      neighbours: an index of usearch; None: every vector is compared.
    """

    state: Any
    all: Sequence[Item]
    items: Sequence[Item]
    vectors: Vectors
    neighbours: Any = None


class Retriever:
    """Finds items of a library::

        retriever = Retriever(products, embedder=LLM("Qwen/Qwen3-VL-Embedding-2B"))
        [best] = retriever.search("a red shoe", k=1)
        question = {"type": "text", "text": "Describe it."}
        [answer] = llm.chat([{"role": "user", "content": [products.part(best.id), question]}])

    As long as there is a retriever of this `Library`, what is added is embedded at once; what was there before, when a
    search first meets it, for which its bytes must have been kept unless the embedder is the library's own model.
    Vectors are kept beside the library. Searches see the library as it is. Every method may be called from any thread.

    Args:
      library: whose items are found.
      embedder: an `LLM`, such as Qwen3-VL-Embedding; or a function that makes of a list of inputs (strings, parts of
        messages, lists of parts) a list of vectors of one length.
      reranker: an `LLM`, such as Qwen3-VL-Reranker, that puts what was found in a better order; None: there is none.
        One that is not the library's own model needs the bytes of pictures.
      name: of the embedder, under which vectors are kept; None: the fingerprint of its weights, or of a plain function
        its module and name. Other functions (a lambda, one within another, a `partial`, an object that is called) need
        one. What makes other vectors needs another one.
      exact: items up to which every vector is compared; beyond that the package `usearch` finds neighbours, some of
        them not.

    Attributes:
      missing: by id, why items cannot be found, as of the last search.

    Raises:
      ValueError: an argument is wrong.
    """

    def __init__(
        self,
        library: Library,
        embedder: EmbeddingModel | Callable[[Sequence[Any]], Any],
        *,
        reranker: Reranks | None = None,
        name: str | None = None,
        exact: int = EXACT,
    ):
        if not isinstance(library, Library):
            raise ValueError(f"library must be a Library, got {type(library).__name__}")
        if not (callable(getattr(embedder, "embed", None)) or callable(embedder)):
            raise ValueError(f"embedder must be an LLM or a function of inputs, got {type(embedder).__name__}")
        for what, engine in (("embedder", embedder), ("reranker", reranker)):
            if isinstance(engine, AsyncLLM):
                raise ValueError(f"{what} must be an LLM, got an AsyncLLM: LLM(engine.service) is one")
        if reranker is not None and not callable(getattr(reranker, "rerank", None)):
            raise ValueError(f"reranker must be an LLM or None, got {type(reranker).__name__}")
        check_whole("exact", exact, 0)
        self.library, self._embedder, self._reranker, self._exact = library, embedder, reranker, exact
        self.missing: Mapping[str, str] = {}
        if name is not None:
            check_text(name, "name", "a string or None")
        self._name = name or name_of(embedder)
        self._is_own = getattr(embedder, "service", None) is library.service
        self._whose = {"cache_salt": library.owner} if self._is_own and library.owner is not None else {}
        self._index: _Index | None = None
        self._lock = threading.Lock()
        library.watch(self)

    @property
    def embedder_name(self) -> str:
        """Under which vectors are kept."""
        return self._name

    def vectors(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> Vectors:
        """Of pictures that are being added, float32 [N, D].

        Raises:
          ValueError: the embedder makes none.
        """
        return self._embedded([{"type": "image", "image": rgb} for rgb in pictures])

    def prepare(self) -> int:
        """Embeds what was not embedded yet; returns how many items can be found. `missing` tells of the others.

        Raises:
          ValueError: the embedder makes no vectors.
        """
        return len(self._now().items)

    def search(
        self,
        query: Any,
        k: int = 10,
        *,
        filter: Callable[[Mapping[str, Any]], bool] | Mapping[str, Any] | None = None,
        instruction: str | None = None,
    ) -> list[Hit]:
        """The items that are most like a query, the best first.

        Args:
          query: what `LLM.embed` takes: a string, a part of a message, a list of parts.
          k: how many at most.
          filter: a function of an item's metadata, or values that some of it must have; None: all items.
          instruction: for the embedder; None adds nothing to what was embedded with pictures.

        Raises:
          ValueError: an argument is wrong.
        """
        check_whole("k", k, 1)
        if not (filter is None or callable(filter) or isinstance(filter, Mapping)):
            raise ValueError(f"filter must be a function, a dict or None, got {short(filter)}")
        index = self._now()
        if not index.items:
            return []
        [vector] = self._embedded([query], instruction)
        if vector.shape != index.vectors.shape[1:]:
            raise ValueError(f"embedder must make vectors of one length, got {len(vector)} of a query beside "
                             f"{index.vectors.shape[1]} of pictures")  # fmt: skip
        wanted = k if self._reranker is None else max(k, min(_WIDER * k, len(index.items)))
        hits = [Hit(item.id, score, item.metadata) for item, score in _nearest(index, vector, wanted, _passes(filter))]
        return hits if self._reranker is None or not hits else self._reranked(query, hits)[:k]

    def answered(self, *given: Any) -> list[RequestOutput]:
        """Answers that may search with it; see `Searches`."""
        return Searches(self).answered(*given)

    def _reranked(self, query: Any, hits: Sequence[Hit]) -> list[Hit]:
        assert self._reranker is not None
        own = getattr(self._reranker, "service", None) is self.library.service
        shown = self.library.part if own else lambda name: {"type": "image", "image": self.library.image(name)}
        try:
            documents = [shown(hit.id) for hit in hits]
        except ValueError as error:
            raise ValueError(f"reranker must be the library's own model where bytes were not kept: {error}") from error
        whose: Any = {"cache_salt": self.library.owner} if own and self.library.owner is not None else {}
        ranked = self._reranker.rerank(query, documents, use_tqdm=False, **whose)
        return [Hit(hits[one.index].id, one.score, hits[one.index].metadata) for one in ranked]

    def _now(self) -> _Index:
        """Vectors of all items, as they are now."""
        with self._lock:
            state, before = self.library.state(), self._index
            if before is not None and state == before.state:
                return before
            items = self.library.items()
            if before is None or [one.version for one in before.all] != [one.version for one in items]:
                self._index = self._made(items, state)
            elif any(one.metadata != other.metadata for one, other in zip(before.all, items, strict=True)):
                now = {one.version: one for one in items}
                own = [now[one.version] for one in before.items]
                self._index = dataclasses.replace(before, state=state, all=items, items=own)
            else:
                self._index = dataclasses.replace(before, state=state)
            assert self._index is not None
            return self._index

    def _made(self, items: Sequence[Item], state: Any) -> _Index:
        library = self.library
        known = library.vectors(self._name)
        lacking = [one for one in items if known.get(one.id, ("",))[0] != one.version]
        gone: dict[str, str] = {}
        for some in itertools.batched(lacking, _TOGETHER):
            shown: dict[str, Any] = {}
            for item in some:
                try:
                    shown[item.id] = self._shown(item)
                except ValueError as error:
                    gone[item.id] = str(error)
            made = dict(zip(shown, self._each(list(shown.values())), strict=True))
            gone |= {name: str(one) for name, one in made.items() if isinstance(one, ValueError)}
            found = {name: one for name, one in made.items() if not isinstance(one, ValueError)}
            new = {one.id: (one.version, found[one.id]) for one in some if one.id in found}
            library.put_vectors(self._name, new)
            known |= new
        self.missing = gone
        known_items = [one for one in items if one.id not in gone]
        if not known_items:
            return _Index(state, items, (), np.zeros((0, 0), np.float32))
        sizes = {len(known[one.id][1]) for one in known_items}
        if len(sizes) > 1:
            raise ValueError(
                f"embedder must make vectors of one length, got {sorted(sizes)}: another embedder needs another name"
            )
        vectors = np.stack([known[one.id][1] for one in known_items])
        neighbours = _neighbours(vectors) if len(known_items) > self._exact else None
        return _Index(state, items, known_items, vectors, neighbours)

    def _shown(self, item: Item) -> Any:
        """A picture as the embedder gets it: by its name, where that is of the library's own model, else its bytes."""
        library = self.library
        return library.part(item.id) if self._is_own else {"type": "image", "image": library.image(item.id)}

    def _each(self, inputs: Sequence[Any]) -> list[Vectors | ValueError]:
        """Of each input its vector, or what is wrong with it."""
        try:
            return list(self._embedded(inputs)) if inputs else []
        except ValueError as error:
            if len(inputs) == 1:
                return [error]
        return [one for given in inputs for one in self._each([given])]

    def _embedded(self, inputs: Sequence[Any], instruction: str | None = None) -> Vectors:
        """float32 [N, D], each as long as 1."""
        embedder = self._embedder
        if callable(embed := getattr(embedder, "embed", None)):
            outputs = embed(list(inputs), instruction=instruction, use_tqdm=False, **self._whose)
            return np.stack([output.outputs.embedding for output in outputs])
        assert callable(embedder)
        if instruction is not None:
            raise ValueError(f"instruction must be None where embedder is a function, got {short(instruction)}")
        vectors = np.asarray(embedder(list(inputs)), np.float32)
        if vectors.ndim != 2 or len(vectors) != len(inputs) or not np.isfinite(vectors).all():
            raise ValueError(f"embedder must make a finite vector of each input, got {vectors.shape} of {len(inputs)}")
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def name_of(embedder: Any) -> str:
    """What tells embedders apart that make other vectors.

    Raises:
      ValueError: nothing of it does, so that it would get the vectors of another one.
    """
    if (fingerprint := getattr(embedder, "fingerprint", None)) is not None:
        return str(fingerprint)
    if not isinstance(embedder, FunctionType) or "<" in embedder.__qualname__:  # such as <lambda>, or a closure
        raise ValueError(f"name must be given with an embedder that has none of its own, got {short(embedder)}")
    return f"{embedder.__module__}.{embedder.__qualname__}"


def _passes(filter: Callable[[Mapping[str, Any]], bool] | Mapping[str, Any] | None) -> Callable[[Item], bool] | None:
    if filter is None:
        return None
    if isinstance(filter, Mapping):
        wanted = dict(filter)
        return lambda item: all(key in item.metadata and item.metadata[key] == wanted[key] for key in wanted)
    function = filter
    return lambda item: bool(function(item.metadata))


def _nearest(index: _Index, vector: Vectors, k: int, passes: Callable[[Item], bool] | None) -> list[tuple[Item, float]]:
    """Items and their cosines, the best first; equal ones by their ids."""
    if index.neighbours is not None:
        return _among_neighbours(index, vector, k, passes)
    scores = index.vectors @ vector
    rows = np.arange(len(scores)) if passes is None else np.flatnonzero([passes(item) for item in index.items])
    if len(rows) > k:  # several may be as near as the last one that is wanted
        rows = rows[scores[rows] >= np.partition(scores[rows], -k)[-k]]
    rows = rows[np.lexsort((rows, -scores[rows]))][:k]
    return [(index.items[row], float(scores[row])) for row in rows.tolist()]


def _among_neighbours(
    index: _Index, vector: Vectors, k: int, passes: Callable[[Item], bool] | None
) -> list[tuple[Item, float]]:
    """The same, of what usearch finds: the more, the fewer a filter lets pass."""
    count = k if passes is None else _WIDER * k
    while True:
        count = min(count, len(index.items))
        found = index.neighbours.search(vector, count)
        rows = [int(row) for row in found.keys if passes is None or passes(index.items[int(row)])]
        if len(rows) >= k or count == len(index.items):
            scores = index.vectors[rows] @ vector
            best = sorted(zip(-scores, rows, strict=True))[:k]
            return [(index.items[row], float(-score)) for score, row in best]
        count *= _WIDER


def _neighbours(vectors: Vectors) -> Any:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise ValueError(
            f"a library of {len(vectors)} items needs the package usearch (`uv add vlcache-jax[library]`), "
            "or a larger `exact`"
        ) from error
    index = Index(ndim=vectors.shape[1], metric="ip", dtype="f32", expansion_search=128)  # twice as wide as by default
    index.add(np.arange(len(vectors)), vectors)
    return index
