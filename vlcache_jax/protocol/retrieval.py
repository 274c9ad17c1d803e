"""What a client asks to embed or to rank, and the answers, in the shapes of OpenAI, Jina and vLLM."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vlcache_jax.embedding import EmbeddingOutput, RerankOutput
from vlcache_jax.protocol.answers import Counts
from vlcache_jax.protocol.fields import CHAT, MOST_MESSAGES, TEXT_OR_NULL, check_fields, told
from vlcache_jax.protocol.values import ApiError, Schema

MOST_INPUTS = 2048
_PART: Schema = {"type": ["string", "object", "array"]}
_BOTH: Mapping[str, Schema] = {
    "model": CHAT["model"],
    "instruction": told(TEXT_OR_NULL, "What vectors or scores are for; absent: the model's own words."),
    **{name: CHAT[name] for name in ("mm_processor_kwargs", "priority", "cache_salt", "reuse", "user", "metadata")},
}
EMBEDDINGS: Mapping[str, Schema] = {
    "input": {
        "type": ["string", "array", "object"],
        "description": "A text, a part of a message, or a list of these; of the list, each may be a list of parts. "
        "Token ids, or a list of lists of them, are taken as they are.",
        "examples": ["a red shoe"],
    },
    "messages": told(
        {"type": ["array", "null"], "minItems": 1, "maxItems": MOST_MESSAGES}, "A conversation, in place of `input`."
    ),
    "encoding_format": {"enum": ["float", "base64", None]},
    "dimensions": told({"type": ["integer", "null"], "minimum": 1}, "Of the vectors: the first of these."),
    **_BOTH,
}
ABSENT_IN_EMBEDDINGS: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None, True),
    "normalize": (None, True),
    "embed_dtype": (None, "float32"),
}
RERANK: Mapping[str, Schema] = {
    "query": {**_PART, "description": "A text, a part of a message, or a list of parts.", "examples": ["red shoes"]},
    "documents": {
        "type": ["array", "object"],
        "minItems": 1,
        "description": "Texts, parts of messages, or lists of parts; an object with `text`, or with `content`.",
        "examples": [["a shoe", "a hat"]],
    },
    "top_n": told({"type": ["integer", "null"], "minimum": 1}, "How many are told of; absent: all."),
    "return_documents": told({"type": ["boolean", "null"]}, "true: with the texts of documents."),
    **_BOTH,
}
ABSENT_IN_RERANK: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    "max_tokens_per_doc": (None,),
    "softmax_normalize": (None, True),
}


@dataclass(frozen=True)
class Asked:
    """What of a request stands beside its inputs.

    Attributes:
      model: as the client calls it; None: it does not.
      settings: of the engine's method.
      cache_salt: of the request.
      reuse: what it asks for.
    """

    model: str | None
    settings: Mapping[str, Any]
    cache_salt: str | None
    reuse: str | float | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Of checked fields."""
        settings = {name: given[name] for name in ("instruction", "mm_processor_kwargs") if name in given}
        settings["priority"] = given.get("priority") or 0
        return cls(given.get("model"), settings, given.get("cache_salt"), given.get("reuse"))


@dataclass(frozen=True)
class EmbeddingRequest:
    """Vectors are asked for.

    Attributes:
      inputs: what `AsyncLLM.embed` takes, each.
      field: of the body, that holds them.
      dimensions: of the vectors; None: all.
      is_base64: how they are told.
      asked: the rest.
    """

    inputs: Sequence[Any]
    field: str
    dimensions: int | None
    is_base64: bool
    asked: Asked

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises an ApiError if a field is wrong, unknown or not supported."""
        given = check_fields(body, EMBEDDINGS, ABSENT_IN_EMBEDDINGS, ())
        if ("input" in given) == ("messages" in given):
            raise ApiError("body must hold either input or messages", "input")
        field = "input" if "input" in given else "messages"
        inputs = [given["messages"]] if field == "messages" else _inputs(given["input"])
        is_base64 = given.get("encoding_format") == "base64"
        return cls(inputs, field, given.get("dimensions"), is_base64, Asked.of(given))

    def answer(self, model: str, outputs: Sequence[EmbeddingOutput]) -> dict[str, Any]:
        """The body of the answer."""
        vectors = [output.outputs.embedding.astype("<f4") for output in outputs]
        data = [
            {"object": "embedding", "index": i, "embedding": _base64(one) if self.is_base64 else one.tolist()}
            for i, one in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": model, "usage": _usage(outputs)}


@dataclass(frozen=True)
class RerankRequest:
    """An order of documents is asked for.

    Attributes:
      query, documents: what `AsyncLLM.rerank` takes.
      given: the documents as they came.
      top_n: how many are told of; None: all.
      returns_documents: with their texts.
      asked: the rest.
    """

    query: Any
    documents: Sequence[Any]
    given: Sequence[Any]
    top_n: int | None
    returns_documents: bool
    asked: Asked

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises an ApiError if a field is wrong, unknown or not supported."""
        given = check_fields(body, RERANK, ABSENT_IN_RERANK, ())
        for name in ("query", "documents"):
            if name not in given:
                raise ApiError(f"{name} must be there, got none", name)
        listed = given["documents"]
        has_parts = isinstance(listed, Mapping) and isinstance(listed.get("content"), list)  # as vLLM has them
        listed = listed["content"] if has_parts else listed
        if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_INPUTS:
            raise ApiError(f"documents must be a list of 1 to {MOST_INPUTS}", "documents")
        listed = [[part] for part in listed] if has_parts else listed
        documents = [_document(one) for one in listed]
        returns = bool(given.get("return_documents", False))
        return cls(_document(given["query"]), documents, listed, given.get("top_n"), returns, Asked.of(given))

    def answer(self, name: str, model: str, outputs: Sequence[RerankOutput]) -> dict[str, Any]:
        """The body of the answer."""
        results: list[dict[str, Any]] = []
        for one in outputs[: self.top_n]:
            results.append({"index": one.index, "relevance_score": one.score})
            if self.returns_documents:
                results[-1]["document"] = _told(self.given[one.index])
        return {"id": name, "model": model, "usage": _usage(outputs), "results": results}


def _inputs(given: Any) -> list[Any]:
    """Each input, as the engine takes it."""
    if not isinstance(given, list):
        return [given]
    if _are_ids(given):
        return [{"prompt_token_ids": given}]
    if not 1 <= len(given) <= MOST_INPUTS:
        raise ApiError(f"input must hold 1 to {MOST_INPUTS} inputs, got {len(given)}", "input")
    return [{"prompt_token_ids": one} for one in given] if all(map(_are_ids, given)) else given


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _document(given: Any) -> Any:
    """A document or a query, as the engine takes it."""
    if isinstance(given, Mapping) and isinstance(given.get("content"), list):
        return given["content"]
    if isinstance(given, Mapping) and "type" not in given and isinstance(given.get("text"), str):
        return given["text"]
    return given


def _told(document: Any) -> Any:
    """What is told of a document: its text, or what it came as."""
    return {"text": document} if isinstance(document, str) else document


def counts_of(output: EmbeddingOutput | RerankOutput) -> Counts:
    """Tokens of an input, and how many of them were reused."""
    if isinstance(output, EmbeddingOutput):
        return Counts.of_prompt(output.prompt_token_ids, output.num_cached_tokens, output.cache)
    return Counts(output.num_tokens, output.num_cached_tokens + output.cache.approximate_tokens)


def _usage(outputs: Sequence[EmbeddingOutput | RerankOutput]) -> dict[str, Any]:
    counts = list(map(counts_of, outputs))
    prompt, cached = sum(one.prompt for one in counts), sum(one.cached for one in counts)
    return {"prompt_tokens": prompt, "total_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}


def _base64(vector: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(vector).tobytes()).decode()
