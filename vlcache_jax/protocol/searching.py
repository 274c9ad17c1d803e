"""OpenAI's tool `file_search`: an answer that may search a library."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from vlcache_jax.checks import is_a, short
from vlcache_jax.protocol.fields import is_same
from vlcache_jax.protocol.values import ApiError

TYPE = "file_search"
_MOST, _USUAL = 50, 3  # pictures of a search
_DEEPEST = 8  # filters within filters
_WIDEST = 1024  # filters beside each other, and values of one
_FIELDS = ("type", "vector_store_ids", "max_num_results", "filters", "ranking_options")
_RANKING = ("ranker", "score_threshold", "hybrid_search")
_ORDER = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}

type Passes = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class FileSearch:
    """An answer may search a library.

    Attributes:
      library: one of the operator's, or "files": what the client has uploaded.
      k: pictures that a search brings at most.
      least: score that they have at least; None: any.
      passes: of an item's metadata; None: all pass.
      where: it stands in the request.
    """

    library: str
    k: int = _USUAL
    least: float | None = None
    passes: Passes | None = None
    where: str = "tools[0]"

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str) -> Self:
        """Reads an element of `tools`; `where` is what errors call it.

        Raises:
          ApiError: a field is wrong or unknown.
        """
        if unknown := [name for name in given if name not in _FIELDS]:
            raise _wrong(where, f"must hold only {', '.join(_FIELDS)}", unknown[0])
        match given.get("vector_store_ids"):
            case [str(library)] if library:
                pass
            case other:
                raise _wrong(f"{where}.vector_store_ids", "must name one library", other)
        k = _USUAL if given.get("max_num_results") is None else given["max_num_results"]
        if not is_a(k, int) or not 1 <= k <= _MOST:
            raise _wrong(f"{where}.max_num_results", f"must be from 1 to {_MOST}", k)
        ranking = {} if given.get("ranking_options") is None else given["ranking_options"]
        if not isinstance(ranking, Mapping) or not set(ranking) <= set(_RANKING):
            raise _wrong(f"{where}.ranking_options", f"must hold only {', '.join(_RANKING)}", ranking)
        ranker, hybrid = ranking.get("ranker"), ranking.get("hybrid_search")
        if ranker not in (None, "auto") and not str(ranker).startswith("default-"):
            raise _wrong(
                f"{where}.ranking_options.ranker", "must be auto, as the library has a ranker of its own", ranker
            )
        if hybrid is not None and (not isinstance(hybrid, Mapping) or hybrid.get("text_weight") != 0):
            wanted = "must be left out or have text_weight 0, as images are found by their embeddings"
            raise _wrong(f"{where}.ranking_options.hybrid_search", wanted, hybrid)
        least = ranking.get("score_threshold")
        if least is not None and not is_a(least, int | float):
            raise _wrong(f"{where}.ranking_options.score_threshold", "must be a number", least)
        filters = given.get("filters")
        return cls(library, k, least, None if filters is None else _passes(filters, f"{where}.filters", 0), where)


def _wrong(where: str, needed: str, got: Any) -> ApiError:
    return ApiError(f"{where} {needed}, got {short(got)}", where)


def _passes(given: Any, where: str, depth: int) -> Passes:
    """A filter of OpenAI's: a comparison, or several of them. An item without the key passes `ne` and `nin` alone."""
    if not isinstance(given, Mapping):
        raise _wrong(where, "must be an object", given)
    kind, key, value = (given.get(name) for name in ("type", "key", "value"))
    known = ("type", "filters") if kind in ("and", "or") else ("type", "key", "value")
    if unknown := [name for name in given if name not in known]:
        raise _wrong(where, f"must hold only {', '.join(known)}", unknown[0])
    if kind in ("and", "or"):
        parts = given.get("filters")
        if not isinstance(parts, list) or not 0 < len(parts) <= _WIDEST or depth == _DEEPEST:
            told = f"must be a list of 1 to {_WIDEST} filters, at most {_DEEPEST} deep"
            raise _wrong(f"{where}.filters", told, parts)
        inner = [_passes(part, f"{where}.filters[{i}]", depth + 1) for i, part in enumerate(parts)]
        joined = all if kind == "and" else any
        return lambda metadata: joined(passes(metadata) for passes in inner)
    if not isinstance(key, str):
        raise _wrong(f"{where}.key", "must be a string", key)
    if "value" not in given:
        raise _wrong(where, "must hold value", list(given))
    match kind:
        case "eq" | "ne":
            return lambda metadata: (key in metadata and is_same(metadata[key], value)) == (kind == "eq")
        case "in" | "nin":
            if not isinstance(value, list) or len(value) > _WIDEST:
                raise _wrong(f"{where}.value", f"must be a list of at most {_WIDEST} values", value)
            return lambda metadata: (
                (key in metadata and any(is_same(metadata[key], one) for one in value)) == (kind == "in")
            )
        case "gt" | "gte" | "lt" | "lte":
            if not is_a(value, int | float | str):
                raise _wrong(f"{where}.value", "must be a number or a string", value)
            compare, like = _ORDER[kind], str if isinstance(value, str) else int | float
            return lambda metadata: is_a(metadata.get(key), like) and compare(metadata[key], value)
    raise _wrong(f"{where}.type", f"must be eq, ne, in, nin, {', '.join(_ORDER)}, and, or", kind)
