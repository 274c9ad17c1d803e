"""Retrieval of library images by the vectors of an embedder."""

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
from vlcache_jax.library.searches import Hit, SearchOptions
from vlcache_jax.outputs import RequestOutput

EXACT = 100_000
"""Number of items up to which every vector is compared; larger libraries use an approximate index of `usearch`."""
_BATCH = 64  # images that are embedded together
_WIDER = 4  # factor on the number of candidates if a filter or a reranker selects among them

type Vectors = npt.NDArray[np.float32]


class EmbeddingModel(Protocol):
    """An `LLM` with an embedding model."""

    def embed(
        self, inputs: Any, *, instruction: str | None = None, cache_salt: str | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of inputs; see `LLM.embed`."""


class RerankModel(Protocol):
    """An `LLM` with a reranking model."""

    def rerank(
        self, query: Any, documents: Any, *, cache_salt: str | None = None, use_tqdm: bool = True
    ) -> list[RerankOutput]:
        """Return the scored documents; see `LLM.rerank`."""


@dataclass(frozen=True)
class _Index:
    """Vectors of a library's items.

    Attributes:
      state: state of the library when the index was made.
      all: all items of the library at that time.
      items: items with vectors, in the order of `vectors`.
      vectors: normalized vectors, float32 [N, D].
      neighbors: index of usearch; None: every vector is compared.
    """

    state: Any
    all: Sequence[Item]
    items: Sequence[Item]
    vectors: Vectors
    neighbors: Any = None


class Retriever:
    """Search over the images of a library::

        retriever = Retriever(products, embedder=LLM("Qwen/Qwen3-VL-Embedding-2B"))
        [best] = retriever.search("a red shoe", k=1)
        question = {"type": "text", "text": "Describe it."}
        [answer] = llm.chat([{"role": "user", "content": [products.part(best.id), question]}])

    While the retriever exists, images added to this `Library` are embedded at once. Earlier images are embedded by the
    first search. For that their bytes must be stored, unless the embedder is the library's own model. Vectors are
    stored with the library. Searches always see its current items. Methods may be called from any thread.

    Args:
      library: library to search.
      embedder: an `LLM`, such as Qwen3-VL-Embedding; or a function that maps a list of inputs (strings, message parts,
        lists of parts) to a list of vectors of one length.
      reranker: an `LLM`, such as Qwen3-VL-Reranker, that reorders the results; None: no reranking. Unless it is the
        library's own model, image bytes must be stored.
      name: name of the embedder, under which its vectors are stored. None: fingerprint of its weights, or the module
        and name of a plain function. Lambdas, nested functions, partials and callable objects need a name. Embedders
        with different vectors need different names.
      exact: number of items up to which every vector is compared. Larger libraries use an approximate index of the
        package `usearch`, which may miss some items.

    Attributes:
      missing: reason by id why items cannot be found, as of the last search.

    Raises:
      ValueError: an argument is invalid.
    """

    def __init__(
        self,
        library: Library,
        embedder: EmbeddingModel | Callable[[Sequence[Any]], Any],
        *,
        reranker: RerankModel | None = None,
        name: str | None = None,
        exact: int = EXACT,
    ):
        if not isinstance(library, Library):
            raise ValueError(f"library must be a Library, got {type(library).__name__}")
        if not (callable(getattr(embedder, "embed", None)) or callable(embedder)):
            raise ValueError(f"embedder must be an LLM or a function of inputs, got {type(embedder).__name__}")
        for what, engine in (("embedder", embedder), ("reranker", reranker)):
            if isinstance(engine, AsyncLLM):
                raise ValueError(f"{what} must be an LLM, got an AsyncLLM: pass LLM(engine.service)")
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
        """Name under which the embedder's vectors are stored."""
        return self._name

    def vectors(self, images: Sequence[npt.NDArray[np.uint8]]) -> Vectors:
        """Return the vectors float32 [N, D] of images that are being added, uint8 [H, W, 3].

        Raises:
          ValueError: the embedder cannot embed them.
        """
        return self._embedded([{"type": "image", "image": rgb} for rgb in images])

    def prepare(self) -> int:
        """Embed the items that have no vectors yet. `missing` names those that cannot be embedded.

        Returns:
          Number of items that can be found.

        Raises:
          ValueError: the embedder fails.
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
        """Return the items that are most similar to a query, best first.

        Args:
          query: input of `LLM.embed`: a string, a message part or a list of parts.
          k: maximum number of results.
          filter: predicate on an item's metadata, or metadata values that must be equal; None: all items.
          instruction: instruction for the embedder; None: no instruction, as for the images.

        Raises:
          ValueError: an argument is invalid, or the embedder or reranker fails.
        """
        check_whole("k", k, 1)
        if not (filter is None or callable(filter) or isinstance(filter, Mapping)):
            raise ValueError(f"filter must be a function, a dict or None, got {short(filter)}")
        index = self._now()
        if not index.items:
            return []
        [vector] = self._embedded([query], instruction)
        if vector.shape != index.vectors.shape[1:]:
            raise ValueError(f"embedder must return vectors of the same length, got {len(vector)} for a query and "
                             f"{index.vectors.shape[1]} for images")  # fmt: skip
        wanted = k if self._reranker is None else max(k, min(_WIDER * k, len(index.items)))
        hits = [Hit(item.id, score, item.metadata) for item, score in _nearest(index, vector, wanted, _passes(filter))]
        return hits if self._reranker is None or not hits else self._reranked(query, hits)[:k]

    def answered(self, *given: Any) -> list[RequestOutput]:
        """Return outputs of conversations that may search the library with default options; see `SearchOptions`."""
        return SearchOptions(self).answered(*given)

    def _reranked(self, query: Any, hits: Sequence[Hit]) -> list[Hit]:
        assert self._reranker is not None
        own = getattr(self._reranker, "service", None) is self.library.service
        shown = self.library.part if own else lambda name: {"type": "image", "image": self.library.image(name)}
        try:
            documents = [shown(hit.id) for hit in hits]
        except ValueError as error:
            raise ValueError(f"reranker must be the library's model if image bytes are not stored: {error}") from error
        whose: Any = {"cache_salt": self.library.owner} if own and self.library.owner is not None else {}
        ranked = self._reranker.rerank(query, documents, use_tqdm=False, **whose)
        return [Hit(hits[one.index].id, one.score, hits[one.index].metadata) for one in ranked]

    def _now(self) -> _Index:
        """Return the index of the library's current items."""
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
        for some in itertools.batched(lacking, _BATCH):
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
                "embedder must return vectors of the same length, "
                f"got {sorted(sizes)}: set another name for a changed embedder"
            )
        vectors = np.stack([known[one.id][1] for one in known_items])
        neighbors = _neighbor_index(vectors) if len(known_items) > self._exact else None
        return _Index(state, items, known_items, vectors, neighbors)

    def _shown(self, item: Item) -> Any:
        """Return an item as input of the embedder: by name for the library's own model, otherwise with its bytes."""
        library = self.library
        return library.part(item.id) if self._is_own else {"type": "image", "image": library.image(item.id)}

    def _each(self, inputs: Sequence[Any]) -> list[Vectors | ValueError]:
        """Return the vector or the error of each input."""
        try:
            return list(self._embedded(inputs)) if inputs else []
        except ValueError as error:
            if len(inputs) == 1:
                return [error]
        return [one for given in inputs for one in self._each([given])]

    def _embedded(self, inputs: Sequence[Any], instruction: str | None = None) -> Vectors:
        """Return normalized vectors, float32 [N, D]."""
        embedder = self._embedder
        if callable(embed := getattr(embedder, "embed", None)):
            outputs = embed(list(inputs), instruction=instruction, use_tqdm=False, **self._whose)
            return np.stack([output.outputs.embedding for output in outputs])
        assert callable(embedder)
        if instruction is not None:
            raise ValueError(f"instruction must be None if embedder is a function, got {short(instruction)}")
        vectors = np.asarray(embedder(list(inputs)), np.float32)
        if vectors.ndim != 2 or len(vectors) != len(inputs) or not np.isfinite(vectors).all():
            raise ValueError(
                f"embedder must return a finite vector per input, got shape {vectors.shape} for {len(inputs)} inputs"
            )
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def name_of(embedder: Any) -> str:
    """Return a name that identifies an embedder: its fingerprint, or the module and name of a function.

    Raises:
      ValueError: it has neither, so that its vectors could be confused with those of another embedder.
    """
    if (fingerprint := getattr(embedder, "fingerprint", None)) is not None:
        return str(fingerprint)
    if not isinstance(embedder, FunctionType) or "<" in embedder.__qualname__:  # such as <lambda>, or a closure
        raise ValueError(
            f"name is required for an embedder without a fingerprint or qualified name, got {short(embedder)}"
        )
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
    """Return items and their cosine similarities, best first, ties ordered by id."""
    if index.neighbors is not None:
        return _nearest_approximately(index, vector, k, passes)
    scores = index.vectors @ vector
    rows = np.arange(len(scores)) if passes is None else np.flatnonzero([passes(item) for item in index.items])
    if len(rows) > k:  # keep all items that tie with the last one
        rows = rows[scores[rows] >= np.partition(scores[rows], -k)[-k]]
    rows = rows[np.lexsort((rows, -scores[rows]))][:k]
    return [(index.items[row], float(scores[row])) for row in rows.tolist()]


def _nearest_approximately(
    index: _Index, vector: Vectors, k: int, passes: Callable[[Item], bool] | None
) -> list[tuple[Item, float]]:
    """Return the nearest items that usearch finds. The search widens until enough items pass the filter."""
    count = k if passes is None else _WIDER * k
    while True:
        count = min(count, len(index.items))
        found = index.neighbors.search(vector, count)
        rows = [int(row) for row in found.keys if passes is None or passes(index.items[int(row)])]
        if len(rows) >= k or count == len(index.items):
            scores = index.vectors[rows] @ vector
            best = sorted(zip(-scores, rows, strict=True))[:k]
            return [(index.items[row], float(-score)) for score, row in best]
        count *= _WIDER


def _neighbor_index(vectors: Vectors) -> Any:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise ValueError(
            f"a library of {len(vectors)} items needs the package usearch (`uv add vlcache-jax[library]`), "
            "or a larger `exact`"
        ) from error
    index = Index(ndim=vectors.shape[1], metric="ip", dtype="f32", expansion_search=128)  # twice the default
    index.add(np.arange(len(vectors)), vectors)
    return index
