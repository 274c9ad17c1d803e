"""Embedding, rerank and score requests and their answers, in the formats of OpenAI, Jina, Cohere and vLLM."""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vlcache_jax.common.checks import unknown
from vlcache_jax.embedding import EmbeddingOutput, RerankOutput
from vlcache_jax.inputs.prompt import TemplateOptions
from vlcache_jax.protocol.answers import Counts
from vlcache_jax.protocol.requests import template_options
from vlcache_jax.protocol.schema import (
    CHAT,
    FLAG,
    MAX_MESSAGES,
    OBJECT,
    TEXT_OR_NULL,
    ApiError,
    Schema,
    check_fields,
    described,
)
from vlcache_jax.request_options import RequestOptions

MAX_INPUTS = 2048
_PART: Schema = {"type": ["string", "object", "array"]}
_BOTH: Mapping[str, Schema] = {
    "model": CHAT["model"],
    "instruction": described(TEXT_OR_NULL, "Task of the vectors or scores; default: the model's instruction."),
    **{
        name: CHAT[name]
        for name in (
            "mm_processor_kwargs",
            "priority",
            "cache_salt",
            "reuse",
            "donors",
            "user",
            "metadata",
            "request_id",
        )
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
        "description": "A text, a message part, token ids, or a list of inputs. In a list, an input can also be a list "
        "of parts.",
        "examples": ["a red shoe"],
    },
    "messages": described(
        {"type": ["array", "null"], "minItems": 1, "maxItems": MAX_MESSAGES}, "A conversation, instead of `input`."
    ),
    "add_generation_prompt": described(
        FLAG,
        "End `messages` where the assistant's turn begins; default: true unless `continue_final_message` is set.",
    ),
    "continue_final_message": described(FLAG, "End `messages` within the last message."),
    "chat_template_kwargs": described(OBJECT, "Variables of the chat template for `messages`."),
    "add_special_tokens": described(FLAG, "false is allowed only if the tokenizer adds no special tokens."),
    "encoding_format": {"enum": ["float", "base64", None]},
    "dimensions": described(
        {"type": ["integer", "null"], "minimum": 1}, "Length to which the vectors are cut; default: full length."
    ),
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
    "chat_template_kwargs": described(
        {"type": ["object", "null"], "properties": {"instruction": TEXT_OR_NULL}, "additionalProperties": False},
        "`instruction` in vLLM's alternative place.",
    ),
    **_BOTH,
}
RERANK: Mapping[str, Schema] = {
    "query": {**_PART, "description": "A text, a message part, or a list of parts.", "examples": ["red shoes"]},
    "documents": {
        "type": ["array", "object", "string"],
        "minItems": 1,
        "description": "A list of texts, message parts, lists of parts, or objects with `text` or `content`; or one "
        "document.",
        "examples": [["a shoe", "a hat"]],
    },
    "top_n": described({"type": ["integer", "null"], "minimum": 0}, "Maximum number of results; default or 0: all."),
    "return_documents": described({"type": ["boolean", "null"]}, "Also return the documents."),
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
"""vLLM's names of the queries and of the documents to score, newest first."""
_SIDE: Schema = {
    "type": ["string", "object", "array", "null"],
    "minItems": 1,
    "description": "A text, an object with `content`, a list of parts, or a list of these. One query is scored with "
    "each document; several queries need as many documents.",
}
SCORE: Mapping[str, Schema] = {**{name: _SIDE for names in SIDES for name in names}, **_OF_PAIRS}
ABSENT_IN_SCORE = {**ABSENT_IN_RERANK, "encoding_format": (None, "float")}


@dataclass(frozen=True)
class RetrievalOptions:
    """Options of a request in addition to its inputs.

    Attributes:
      model: name of the model in the request; None if it has none.
      instruction: task of the vectors or scores; None for the model's instruction.
      request_options: other options for the engine, such as `reuse`.
    """

    model: str | None
    instruction: str | None
    request_options: RequestOptions

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the options of checked fields."""
        return cls(given.get("model"), given.get("instruction"), RequestOptions.read(given))


@dataclass(frozen=True)
class EmbeddingRequest:
    """Request for embeddings.

    Attributes:
      inputs: inputs of `AsyncLLM.embed`.
      field: the body's field of the inputs, "input" or "messages".
      dimensions: length of the vectors; None for full length.
      is_base64: True to return little-endian float32 as base64 instead of numbers.
      options: other options.
      template: options of the chat template for messages.
      adds_special_tokens: the request's `add_special_tokens`; None if it is not set.
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
        """Parse a body.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = check_fields(body, EMBEDDINGS, ABSENT_IN_EMBEDDINGS, ())
        if ("input" in given) == ("messages" in given):
            raise ApiError("exactly one of input and messages is required", "input")
        name, template = "input" if "input" in given else "messages", template_options(given)
        if name == "input" and (used := [key for key, value in template.items() if value]):
            raise ApiError(f"{used[0]} is not supported with input; send messages", used[0])
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
        """Return the body of the answer; `outputs` are those of the inputs, in order."""
        vectors = [output.outputs.embedding.astype("<f4") for output in outputs]
        data = [
            {"object": "embedding", "index": i, "embedding": _base64(one) if self.is_base64 else one.tolist()}
            for i, one in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": model, "usage": _usage(outputs)}


@dataclass(frozen=True)
class RerankRequest:
    """Request for a ranking of documents.

    Attributes:
      query, documents: inputs of `AsyncLLM.rerank`.
      given: the documents as the client sent them.
      top_n: maximum number of results; None for all.
      returns_documents: True to return the documents.
      options: other options.
    """

    query: Any
    documents: Sequence[Any]
    given: Sequence[Any]
    top_n: int | None
    returns_documents: bool
    options: RetrievalOptions

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse a body.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = _instructed(check_fields(body, RERANK, ABSENT_IN_RERANK, ()))
        for name in ("query", "documents"):
            if name not in given:
                raise ApiError(f"{name} is required", name)
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
        """Return the body of the answer with the id `name`; with `cohere`, also the `meta` of Cohere's `/v2/rerank`."""
        results: list[dict[str, Any]] = []
        for one in outputs[: self.top_n]:
            results.append({"index": one.index, "relevance_score": one.score})
            if self.returns_documents:
                results[-1]["document"] = _returned(self.given[one.index])
        usage = _usage(outputs)
        body = {"id": name, "model": model, "usage": usage, "results": results}
        if cohere:
            tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": 0}
            body["meta"] = {"api_version": {"version": "2"}, "tokens": tokens}
        return body


@dataclass(frozen=True)
class ScoreRequest:
    """Request for scores of pairs.

    Attributes:
      pairs: query and document of each score, inputs of `AsyncLLM.rerank`.
      places: their names in errors, such as ("queries", "documents[1]").
      options: other options.
    """

    pairs: Sequence[tuple[Any, Any]]
    places: Sequence[tuple[str, str]]
    options: RetrievalOptions

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse a body.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = _instructed(check_fields(body, SCORE, ABSENT_IN_SCORE, ()))
        present = {name for names in SIDES for name in names if name in given}
        names = next((names for names in SIDES if present == set(names)), None)
        if names is None:
            known = "; ".join(" and ".join(names) for names in SIDES)
            raise ApiError(f"body must have one of the pairs {known}, got {', '.join(sorted(present)) or 'none'}")
        queries, documents = (_listed(given[name], name) for name in names)
        if len(queries) not in (1, len(documents)):
            raise ApiError(
                f"{names[0]} must have one element or as many as {names[1]}, got {len(queries)} and {len(documents)}",
                names[0],
            )
        numbers = [(0 if len(queries) == 1 else i, i) for i in range(len(documents))]
        places = [_places(given, names, pair) for pair in numbers]
        pairs = [(_document(queries[i]), _document(documents[j])) for i, j in numbers]
        return cls(pairs, places, RetrievalOptions.of(given))

    def answer(self, name: str, model: str, outputs: Sequence[RerankOutput]) -> dict[str, Any]:
        """Return the body of the answer with the id `name`; `outputs` are those of the pairs, in order."""
        data = [{"index": i, "object": "score", "score": one.score} for i, one in enumerate(outputs)]
        head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
        return {**head, "data": data, "usage": _usage(outputs)}


def _places(given: Mapping[str, Any], names: tuple[str, str], numbers: tuple[int, int]) -> tuple[str, str]:
    """Return the client's names of the members of a pair."""
    first, second = (
        f"{name}[{number}]" if isinstance(given[name], list) else name
        for name, number in zip(names, numbers, strict=True)
    )
    return first, second


def _instructed(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the instruction of `chat_template_kwargs`, vLLM's alternative place."""
    own = given.get("chat_template_kwargs") or {}
    for name, value in own.items():
        if name != "instruction":
            raise ApiError(unknown(name, ("instruction",), where="chat_template_kwargs"), "chat_template_kwargs")
        given = given if value is None else {**given, name: value}
    return given


def _listed(given: Any, name: str) -> list[Any]:
    """Return documents or queries as a list."""
    listed = given if isinstance(given, list) else [given]
    if not 1 <= len(listed) <= MAX_INPUTS:
        raise ApiError(f"{name} must have 1 to {MAX_INPUTS} elements, got {len(listed)}", name)
    return listed


def _inputs(given: Any) -> list[Any]:
    """Return the inputs in the engine's form."""
    if not isinstance(given, list):
        return [given]
    if _are_ids(given):
        return [{"prompt_token_ids": given}]
    if not 1 <= len(given) <= MAX_INPUTS:
        raise ApiError(f"input must have 1 to {MAX_INPUTS} elements, got {len(given)}", "input")
    return [{"prompt_token_ids": one} for one in given] if all(map(_are_ids, given)) else given


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _document(given: Any) -> Any:
    """Return a document or a query in the engine's form."""
    if isinstance(given, Mapping) and "type" not in given and isinstance(given.get("content"), str | list):
        return given["content"]
    if isinstance(given, Mapping) and "type" not in given and isinstance(given.get("text"), str):
        return given["text"]
    return given


def _returned(document: Any) -> Any:
    """Return a document for the answer: a text as an object, others as the client sent them."""
    return {"text": document} if isinstance(document, str) else document


def counts_of(output: EmbeddingOutput | RerankOutput) -> Counts:
    """Return the token counts of an output's inputs."""
    if isinstance(output, EmbeddingOutput):
        return Counts.of_prompt(output.prompt_token_ids, output.num_cached_tokens, output.cache)
    return Counts(output.num_tokens, output.num_cached_tokens + output.cache.approximate_tokens)


def _usage(outputs: Sequence[EmbeddingOutput | RerankOutput]) -> dict[str, Any]:
    counts = list(map(counts_of, outputs))
    prompt, cached = sum(one.prompt for one in counts), sum(one.cached for one in counts)
    return {"prompt_tokens": prompt, "total_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}


def _base64(vector: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(vector).tobytes()).decode()
