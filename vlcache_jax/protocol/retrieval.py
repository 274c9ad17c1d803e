"""What a client asks to embed, to rank or to score, and the answers, in the shapes of OpenAI, Jina, Cohere and vLLM."""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vlcache_jax.common.checks import short
from vlcache_jax.embedding import EmbeddingOutput, RerankOutput
from vlcache_jax.inputs.prompt import TemplateOptions
from vlcache_jax.protocol.answers import Counts
from vlcache_jax.protocol.requests import template_options
from vlcache_jax.protocol.schema import (
    CHAT,
    FLAG,
    MOST_MESSAGES,
    OBJECT,
    TEXT_OR_NULL,
    ApiError,
    Schema,
    check_fields,
    told,
)
from vlcache_jax.request_options import RequestOptions

MOST_INPUTS = 2048
_PART: Schema = {"type": ["string", "object", "array"]}
_BOTH: Mapping[str, Schema] = {
    "model": CHAT["model"],
    "instruction": told(TEXT_OR_NULL, "What vectors or scores are for; absent: the model's own words."),
    **{
        name: CHAT[name]
        for name in ("mm_processor_kwargs", "priority", "cache_salt", "reuse", "user", "metadata", "request_id")
    },
}
_ABSENT_IN_BOTH: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "padding": (None, "do_not_pad"),
    "use_activation": (None, True),
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
    "add_generation_prompt": told(
        FLAG, "Of messages: end where the assistant's turn begins; absent: unless the last message is continued."
    ),
    "continue_final_message": told(FLAG, "Of messages: end within the last one."),
    "chat_template_kwargs": told(OBJECT, "Of messages: names that the chat template uses."),
    "add_special_tokens": told(FLAG, "false: refused if the tokenizer adds tokens of its own."),
    "encoding_format": {"enum": ["float", "base64", None]},
    "dimensions": told({"type": ["integer", "null"], "minimum": 1}, "Of the vectors: the first of these."),
    **_BOTH,
}
ABSENT_IN_EMBEDDINGS: Mapping[str, tuple[Any, ...]] = {
    **_ABSENT_IN_BOTH,
    "normalize": (None, True),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "chat_template": (None,),
    "media_io_kwargs": (None, {}),
}
_OF_PAIRS: Mapping[str, Schema] = {
    "chat_template_kwargs": told(
        {"type": ["object", "null"], "properties": {"instruction": TEXT_OR_NULL}, "additionalProperties": False},
        "`instruction`, in vLLM's other place.",
    ),
    **_BOTH,
}
RERANK: Mapping[str, Schema] = {
    "query": {**_PART, "description": "A text, a part of a message, or a list of parts.", "examples": ["red shoes"]},
    "documents": {
        "type": ["array", "object", "string"],
        "minItems": 1,
        "description": "A list of texts, parts of messages, lists of parts, or objects with `text` or `content`. What "
        "is no list is one document.",
        "examples": [["a shoe", "a hat"]],
    },
    "top_n": told({"type": ["integer", "null"], "minimum": 0}, "How many results are returned; absent or 0: all."),
    "return_documents": told({"type": ["boolean", "null"]}, "true: with the texts of documents."),
    **_OF_PAIRS,
}
ABSENT_IN_RERANK: Mapping[str, tuple[Any, ...]] = {
    **_ABSENT_IN_BOTH,
    "max_tokens_per_query": (None, 0),
    "max_tokens_per_doc": (None, 0),
    "softmax_normalize": (None, True),
    "activation": (None, True),
    "softmax": (None, True),
}
SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""Names of a query, or of several, and of what they are compared with: those of vLLM, the newest first."""
_SIDE: Schema = {
    "type": ["string", "object", "array", "null"],
    "minItems": 1,
    "description": "A text, an object with `content`, a list of parts, or a list of these. One query is compared with "
    "each document, several with as many.",
}
SCORE: Mapping[str, Schema] = {**{name: _SIDE for names in SIDES for name in names}, **_OF_PAIRS}
ABSENT_IN_SCORE = {**ABSENT_IN_RERANK, "encoding_format": (None, "float")}


@dataclass(frozen=True)
class RetrievalOptions:
    """What of a request stands beside its inputs.

    Attributes:
      model: as the client calls it; None: it does not.
      instruction: what vectors or scores are for; None: the model's own words.
      asked: of the engine, beside these.
    """

    model: str | None
    instruction: str | None
    asked: RequestOptions

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Of checked fields."""
        return cls(given.get("model"), given.get("instruction"), RequestOptions.read(given))


@dataclass(frozen=True)
class EmbeddingRequest:
    """Vectors are asked for.

    Attributes:
      inputs: what `AsyncLLM.embed` takes, each.
      field: of the body, that holds them.
      dimensions: of the vectors; None: all.
      is_base64: how they are told.
      options: the rest.
      template: of messages.
      adds_special_tokens: whether the tokenizer is to add tokens of its own; None: as it does.
    """

    inputs: Sequence[Any]
    field: str
    dimensions: int | None
    is_base64: bool
    options: RetrievalOptions
    template: TemplateOptions = dataclasses.field(default_factory=TemplateOptions)
    adds_special_tokens: bool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises an ApiError if a field is wrong, unknown or not supported."""
        given = check_fields(body, EMBEDDINGS, ABSENT_IN_EMBEDDINGS, ())
        if ("input" in given) == ("messages" in given):
            raise ApiError("body must hold either input or messages", "input")
        name, template = "input" if "input" in given else "messages", template_options(given)
        if name == "input" and (beside := [key for key, value in template.items() if value]):
            raise ApiError(f"{beside[0]} must be left out beside input: it is of messages", beside[0])
        inputs = [given["messages"]] if name == "messages" else _inputs(given["input"])
        is_base64 = given.get("encoding_format") == "base64"
        return cls(
            inputs,
            name,
            given.get("dimensions"),
            is_base64,
            RetrievalOptions.of(given),
            template,
            given.get("add_special_tokens"),
        )

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
      options: the rest.
    """

    query: Any
    documents: Sequence[Any]
    given: Sequence[Any]
    top_n: int | None
    returns_documents: bool
    options: RetrievalOptions

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises an ApiError if a field is wrong, unknown or not supported."""
        given = _instructed(check_fields(body, RERANK, ABSENT_IN_RERANK, ()))
        for name in ("query", "documents"):
            if name not in given:
                raise ApiError(f"{name} must be there, got none", name)
        listed = _listed(given["documents"], "documents")
        documents = [_document(one) for one in listed]
        returns = bool(given.get("return_documents", False))
        return cls(
            _document(given["query"]),
            documents,
            listed,
            given.get("top_n") or None,
            returns,
            RetrievalOptions.of(given),
        )

    def answer(self, name: str, model: str, outputs: Sequence[RerankOutput], *, cohere: bool = False) -> dict[str, Any]:
        """The body of the answer; with what Cohere's second version has beside it."""
        results: list[dict[str, Any]] = []
        for one in outputs[: self.top_n]:
            results.append({"index": one.index, "relevance_score": one.score})
            if self.returns_documents:
                results[-1]["document"] = _told(self.given[one.index])
        usage = _usage(outputs)
        body = {"id": name, "model": model, "usage": usage, "results": results}
        if cohere:
            tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": 0}
            body["meta"] = {"api_version": {"version": "2"}, "tokens": tokens}
        return body


@dataclass(frozen=True)
class ScoreRequest:
    """How well pairs go together is asked for.

    Attributes:
      pairs: of each score the query and the document, what `AsyncLLM.rerank` takes.
      places: of each what the client calls them, such as ("queries", "documents[1]").
      options: the rest.
    """

    pairs: Sequence[tuple[Any, Any]]
    places: Sequence[tuple[str, str]]
    options: RetrievalOptions

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises an ApiError if a field is wrong, unknown or not supported."""
        given = _instructed(check_fields(body, SCORE, ABSENT_IN_SCORE, ()))
        present = {name for names in SIDES for name in names if name in given}
        names = next((names for names in SIDES if present == set(names)), None)
        if names is None:
            known = "; ".join(" and ".join(names) for names in SIDES)
            raise ApiError(f"body must hold one of the pairs {known}, got {', '.join(sorted(present)) or 'none'}")
        queries, documents = (_listed(given[name], name) for name in names)
        if len(queries) not in (1, len(documents)):
            raise ApiError(
                f"{names[0]} must be one, or as many as {names[1]}, got {len(queries)} and {len(documents)}", names[0]
            )
        numbers = [(0 if len(queries) == 1 else i, i) for i in range(len(documents))]
        places = [_places(given, names, pair) for pair in numbers]
        pairs = [(_document(queries[i]), _document(documents[j])) for i, j in numbers]
        return cls(pairs, places, RetrievalOptions.of(given))

    def answer(self, name: str, model: str, outputs: Sequence[RerankOutput]) -> dict[str, Any]:
        """The body of the answer; outputs are those of the pairs, in their order."""
        data = [{"index": i, "object": "score", "score": one.score} for i, one in enumerate(outputs)]
        head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
        return {**head, "data": data, "usage": _usage(outputs)}


def _places(given: Mapping[str, Any], names: tuple[str, str], numbers: tuple[int, int]) -> tuple[str, str]:
    """What a client calls the members of a pair."""
    first, second = (
        f"{name}[{number}]" if isinstance(given[name], list) else name
        for name, number in zip(names, numbers, strict=True)
    )
    return first, second


def _instructed(given: dict[str, Any]) -> dict[str, Any]:
    """The fields with an instruction that stands in `chat_template_kwargs`, vLLM's other place of it."""
    own = given.get("chat_template_kwargs") or {}
    for name, value in own.items():
        if name != "instruction":
            raise ApiError(
                f"chat_template_kwargs must hold only instruction, got {short(name)}", "chat_template_kwargs"
            )
        given = given if value is None else {**given, name: value}
    return given


def _listed(given: Any, name: str) -> list[Any]:
    """Documents or queries; what is no list is one."""
    listed = given if isinstance(given, list) else [given]
    if not 1 <= len(listed) <= MOST_INPUTS:
        raise ApiError(f"{name} must be 1 to {MOST_INPUTS}, got {len(listed)}", name)
    return listed


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
    if isinstance(given, Mapping) and "type" not in given and isinstance(given.get("content"), str | list):
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
