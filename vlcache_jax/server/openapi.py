"""OpenAPI document of the server, made from the schemas of the parsers, and its HTML page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlcache_jax import __version__
from vlcache_jax.protocol.anthropic_requests import ABSENT_IN_MESSAGES, COUNT_TOKENS, MESSAGES
from vlcache_jax.protocol.responses import ABSENT_IN_RESPONSES, RESPONSES
from vlcache_jax.protocol.retrieval import (
    ABSENT_IN_EMBEDDINGS,
    ABSENT_IN_RERANK,
    ABSENT_IN_SCORE,
    EMBEDDINGS,
    RERANK,
    SCORE,
    SIDES,
)
from vlcache_jax.protocol.schema import ABSENT_IN_CHAT, ABSENT_IN_TEXT, CHAT, DETOKENIZE, TEXT, TOKENIZE
from vlcache_jax.server.admin import VERBS
from vlcache_jax.server.admission import ADMIN, OPEN
from vlcache_jax.server.http_layer import MESSAGES_PATH

_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_COUNTS = {"type": "array", "items": _COUNT}


def _object(properties: Mapping[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(fields: Mapping[str, Any], *required: str, absent: Mapping[str, tuple[Any, ...]] | None = None) -> Any:
    """Return the schema of a body: its fields, and the allowed values of fields that are not supported."""
    nothing = {name: {"enum": list(values), "description": "Not supported."} for name, values in (absent or {}).items()}
    return {
        "type": "object",
        "properties": {**fields, **nothing},
        "required": list(required),
        "additionalProperties": False,
    }


_REASON = {"enum": ["stop", "length", "tool_calls", None]}
_TOKEN = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": _or_null(_COUNTS)}
_CHAT_LOGPROBS = _or_null(_object({"content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))}))}))
_TEXT_LOGPROBS = _or_null(
    _object({
        "tokens": _list(_TEXT), "token_logprobs": _NUMBERS, "top_logprobs": _list({"type": "object"}),
        "text_offset": _COUNTS,
    })
)  # fmt: skip
_ENDS = {"finish_reason": _REASON, "stop_reason": {"type": ["string", "integer"]}, "token_ids": _COUNTS}
_BESIDE = {
    "id": _TEXT, "created": _COUNT, "model": _TEXT, "prompt_logprobs": {"type": "array"}, "prompt_token_ids": _COUNTS,
    "cache": _ref("Cache"),
}  # fmt: skip
_OPTIONAL = ("prompt_logprobs", "prompt_token_ids", "cache", "stop_reason", "token_ids", "usage")
_THOUGHT = {"reasoning": _TEXT, "reasoning_content": _TEXT}
_CALL = {"id": _TEXT, "type": {"enum": ["function"]}}
_MESSAGE = _object(
    {
        "role": {"enum": ["assistant"]},
        "content": _or_null(_TEXT),
        "tool_calls": _list(_object({**_CALL, "function": _object({"name": _TEXT, "arguments": _TEXT})})),
        **_THOUGHT,
    },
    "tool_calls",
    *_THOUGHT,
)
_PIECE = _object({"name": _TEXT, "arguments": _TEXT}, "name")
_DELTA = _object(
    {
        "role": {"enum": ["assistant"]},
        "content": _TEXT,
        "tool_calls": _list(_object({"index": _COUNT, **_CALL, "function": _PIECE}, *_CALL)),
        **_THOUGHT,
    },
    "role",
    "content",
    "tool_calls",
    *_THOUGHT,
)


def _answer(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    choices = _list(_object({"index": _COUNT, **choice, **_ENDS}, *_OPTIONAL))
    return _object({**_BESIDE, "object": {"enum": [kind]}, "choices": choices, "usage": _ref("Usage")}, *_OPTIONAL)


def _request(verb: str) -> str:
    """Return the schema name of a cache operation's body."""
    return f"{verb.title().replace('_', '')}Request"


_IMAGE = {
    "index": _COUNT, "key": _TEXT, "match": {"enum": ["exact", "approximate", "miss"]}, "kv": _TEXT, "encoder": _TEXT,
    "tokens": _COUNT, "rows": _COUNTS, "bytes_moved": _COUNT, "why": {"type": ["string", "null"]},
    "donor": {"type": ["string", "null"]}, "video": _or_null(_COUNT),
    "chunk": _or_null(_COUNT),
}  # fmt: skip
_SCHEMAS: Mapping[str, Any] = {
    "Error": _object({
        "error": _object({
            "message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}
        })
    }),
    "Usage": _object({
        "prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT, "image_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    }),
    "Cache": _object({
        "exact": {"type": "boolean"}, "policy": _TEXT, "approximate_tokens": _COUNT, "rows": _COUNTS,
        "matched_tokens": _COUNT, "request_key": _or_null(_TEXT), "request_known": {"type": "boolean"},
        "images": _list(_object(_IMAGE)),
    }),
    "Model": _object({
        "id": _TEXT, "object": {"enum": ["model"]}, "created": _COUNT, "owned_by": _TEXT, "root": _TEXT,
        "parent": {"type": "null"}, "max_model_len": _COUNT,
        "reuse": {**_list(_TEXT), "description": "Reuse modes for requests with this key; the first is the default."},
    }),
    "ChatCompletion": _answer("chat.completion", {"message": _MESSAGE, "logprobs": _CHAT_LOGPROBS}),
    "ChatCompletionChunk": _answer("chat.completion.chunk", {"delta": _DELTA, "logprobs": _CHAT_LOGPROBS}),
    "Completion": _answer("text_completion", {"text": _TEXT, "logprobs": _TEXT_LOGPROBS}),
    "ChatRequest": _body(CHAT, "messages", absent=ABSENT_IN_CHAT),
    "ResponseRequest": _body(RESPONSES, "input", absent=ABSENT_IN_RESPONSES),
    "Response": {
        "type": "object",
        "required": ["id", "object", "created_at", "status", "model", "output", "usage", "tools", "tool_choice"],
        "properties": {
            "id": _TEXT, "object": {"enum": ["response"]}, "created_at": _COUNT, "model": _TEXT,
            "status": {"enum": ["completed", "incomplete"]}, "output": _list({"type": "object"}),
            "usage": {"type": "object"}, "cache": _ref("Cache"),
        },
    },
    "MessageRequest": _body(MESSAGES, "messages", "max_tokens", absent=ABSENT_IN_MESSAGES),
    "CountTokensRequest": _body(COUNT_TOKENS, "messages", absent=ABSENT_IN_MESSAGES),
    "MessageUsage": _object({
        "input_tokens": _COUNT, "cache_creation_input_tokens": _COUNT, "cache_read_input_tokens": _COUNT,
        "output_tokens": _COUNT, "output_tokens_details": _object({"thinking_tokens": _COUNT}),
    }),
    "Message": _object({
        "id": _TEXT, "type": {"enum": ["message"]}, "role": {"enum": ["assistant"]}, "model": _TEXT,
        "content": _list({"anyOf": [
            _object({"type": {"enum": ["thinking"]}, "thinking": _TEXT, "signature": _TEXT}),
            _object({"type": {"enum": ["text"]}, "text": _TEXT}),
            _object({"type": {"enum": ["tool_use"]}, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}}),
        ]}),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": _or_null(_TEXT), "usage": _ref("MessageUsage"), "cache": _ref("Cache"),
    }, "cache"),
    "MessageError": _object({
        "type": {"enum": ["error"]}, "error": _object({"type": _TEXT, "message": _TEXT}), "request_id": _TEXT
    }),
    "CompletionRequest": _body(TEXT, "prompt", absent=ABSENT_IN_TEXT),
    "EmbeddingRequest": {
        **_body(EMBEDDINGS, absent=ABSENT_IN_EMBEDDINGS), "oneOf": [{"required": ["input"]}, {"required": ["messages"]}]
    },
    "RerankRequest": _body(RERANK, "query", "documents", absent=ABSENT_IN_RERANK),
    "ScoreRequest": {
        **_body(SCORE, absent=ABSENT_IN_SCORE), "anyOf": [{"required": list(names)} for names in SIDES]
    },
    "TokenizeRequest": {**_body(TOKENIZE), "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]},
    "DetokenizeRequest": _body(DETOKENIZE, "tokens"),
    **{_request(verb): _body(fields, next(iter(fields))) for verb, fields in VERBS.items()},
}  # fmt: skip


_EVENT = _object({"type": _TEXT})
_HTML = {"content": {"text/html": {"schema": _TEXT}}}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


_KEY: list[dict[str, list[str]]] = [{"key": []}, {"x_api_key": []}]


def _operation(
    about: str, path: str, answer: Mapping[str, Any] | None, body: str | None = None, **more: Any
) -> dict[str, Any]:
    """Return an OpenAPI operation.

    Args:
      about: its summary.
      path: its path, which determines the key it needs.
      answer: content of the answer with status 200; None if it is empty.
      body: schema name of the body; None if it has none.
      more: other fields of the operation.
    """
    is_open, is_admin = path in OPEN, path.startswith(ADMIN)
    answers: dict[str, Any] = {"200": {"description": "Success.", **(answer or {})}}
    form = "MessageError" if path.startswith(MESSAGES_PATH) else "Error"
    error = {"description": "Error; see `error.message`.", **_json(_ref(form))}
    statuses = ["400", "404", "408", "413", "415", "429", "503"] if body else ["503"] if path not in OPEN else []
    for status in [*statuses, "403"] + ([] if is_open else ["401"]):
        answers[status] = error
    if is_open:
        answers["503"] = {"description": "Not healthy or not ready."}
    found: dict[str, Any] = {"summary": about, "responses": answers, **more}
    if body:
        found["requestBody"] = {"required": True, **_json(_ref(body))}
    found["security"] = [] if is_open else [{"admin": []}] if is_admin else _KEY
    return found


def _paths() -> dict[str, Any]:
    def get(path: str, about: str, answer: Mapping[str, Any] | None) -> None:
        paths[path] = {"get": _operation(about, path, answer)}

    def post(path: str, about: str, body: str, answer: Mapping[str, Any]) -> None:
        paths[path] = {"post": _operation(about, path, answer, body)}

    def streamed(whole: str, piece: Mapping[str, Any], *, last: str = "[DONE]") -> dict[str, Any]:
        content = {"anyOf": [piece, _ref("Error")]}
        data = {**_TEXT, "contentMediaType": "application/json", "contentSchema": content}
        event = _object({"event": _TEXT, "data": {"anyOf": [{"const": "[DONE]"}, data]}}, "event")
        events = {"schema": {**event, "description": f"One event. The last one is {last}."}}
        return {"content": {**_json(_ref(whole))["content"], "text/event-stream": events}}

    paths: dict[str, Any] = {}
    post("/v1/chat/completions", "Create a chat completion.", "ChatRequest",
         streamed("ChatCompletion", _ref("ChatCompletionChunk")))  # fmt: skip
    post("/v1/completions", "Create a completion.", "CompletionRequest", streamed("Completion", _ref("Completion")))
    post("/v1/responses", "Create a response and store it.", "ResponseRequest", streamed("Response", _EVENT))
    post(MESSAGES_PATH, "Create a message, in the form of Anthropic's API.", "MessageRequest",
         streamed("Message", _EVENT, last="message_stop"))  # fmt: skip
    post(f"{MESSAGES_PATH}/count_tokens", "Count the tokens of a message's prompt.", "CountTokensRequest",
         _json(_object({"input_tokens": _COUNT})))  # fmt: skip
    where = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    show = _operation("Get a stored response.", "/v1/responses/{name}", _json(_ref("Response")), parameters=where)
    delete = _operation("Delete a response.", "/v1/responses/{name}", _json({"type": "object"}), parameters=where)
    for operation in (show, delete):
        operation["responses"]["404"] = operation["responses"]["401"]
    paths["/v1/responses/{name}"] = {"get": show, "delete": delete}
    models = _object({"object": {"enum": ["list"]}, "data": _list(_ref("Model"))})
    get("/v1/models", "List the models.", _json(models))
    parameter = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    model = _operation("Get a model.", "/v1/models/{name}", _json(_ref("Model")), parameters=[parameter])
    model["responses"]["404"] = model["responses"]["401"]
    paths["/v1/models/{name}"] = {"get": model}
    tokens = _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _COUNTS, "token_strs": _list(_TEXT)},
                     "token_strs")  # fmt: skip
    usage = _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT,
                     "prompt_tokens_details": _object({"cached_tokens": _COUNT})})  # fmt: skip
    vector = _object({"object": {"enum": ["embedding"]}, "index": _COUNT, "embedding": {"anyOf": [_NUMBERS, _TEXT]}})
    vectors = {"object": {"enum": ["list"]}, "data": _list(vector), "model": _TEXT, "usage": usage}
    post("/v1/embeddings", "Compute embeddings.", "EmbeddingRequest", _json(_object(vectors)))
    ranked = _object({"index": _COUNT, "relevance_score": {"type": "number"}, "document": {}}, "document")
    order = {"id": _TEXT, "model": _TEXT, "usage": usage, "results": _list(ranked)}
    for path in ("/v1/rerank", "/rerank"):
        post(path, "Rank documents by their relevance to a query.", "RerankRequest", _json(_object(order)))
    tokens_read = _object({"input_tokens": _COUNT, "output_tokens": _COUNT})
    meta = _object({"api_version": _object({"version": _TEXT}), "tokens": tokens_read})
    post("/v2/rerank", "Rank documents; the answer has Cohere's fields.", "RerankRequest",
         _json(_object({**order, "meta": meta})))  # fmt: skip
    score = _object({"index": _COUNT, "object": {"enum": ["score"]}, "score": {"type": "number"}})
    scores = {"id": _TEXT, "object": {"enum": ["list"]}, "created": _COUNT, "model": _TEXT, "data": _list(score),
              "usage": usage}  # fmt: skip
    for path in ("/score", "/v1/score"):
        post(path, "Score pairs of queries and documents.", "ScoreRequest", _json(_object(scores)))
    _add_files(paths)
    post("/tokenize", "Tokenize a prompt, with images expanded to their tokens.", "TokenizeRequest", _json(tokens))
    post("/detokenize", "Convert tokens to text.", "DetokenizeRequest", _json(_object({"prompt": _TEXT})))
    get("/", "Show the page that answers questions about images and shows their reuse.", _HTML)
    get("/health", "Check that the engine works.", None)
    get("/ready", "Check that the server accepts requests and warm-up has finished.", None)
    get("/version", "Get the version of VLCache-JAX.", _json(_object({"version": _TEXT})))
    get("/load", "Get the number of requests in flight.", _json(_object({"server_load": _COUNT})))
    get("/metrics", "Get the metrics in Prometheus' text format.", {"content": {"text/plain": {"schema": _TEXT}}})
    get("/openapi.json", "Get this document.", _json({"type": "object"}))
    get("/docs", "Show this document as a page.", _HTML)
    get("/cache", "Get the statistics of the image cache.", _json({"type": "object"}))
    found = {"precompute": {"keys": _list(_TEXT)}, "release_uuid": {"released": {"type": "boolean"}}}
    for verb in VERBS:
        answer = _json(_object(found.get(verb, {"records": _COUNT})))
        post(f"/cache/{verb}", f"See ImageCache.{verb}.", _request(verb), answer)
    for name in ("reset_mm_cache", "reset_prefix_cache"):
        paths[f"/{name}"] = {"post": _operation(f"See LLM.{name}.", f"/{name}", None)}
    return paths


def _add_files(paths: dict[str, Any]) -> None:
    """Add the paths of uploaded files and of the operator's libraries."""
    seconds = {"type": "string", "description": "Lifetime in seconds."}
    upload = {"file": {**_TEXT, "format": "binary"}}
    file = {**upload, "purpose": {"enum": ["vision"]}, "expires_after[anchor]": {"enum": ["created_at"]},
            "expires_after[seconds]": seconds}  # fmt: skip
    item = {**upload, "id": _TEXT, "metadata": {**_TEXT, "description": "A JSON object."}, "expires": seconds}
    any_object = _json({"type": "object"})

    def at(path: str, method: str, about: str, answer: Mapping[str, Any] | None, form: Any = None) -> None:
        names = re.findall(r"\{(\w+)\}", path)
        where = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
        made = _operation(about, path, answer, parameters=where)
        statuses = ["400", "404"] + (["408", "413", "415", "429"] if form else [])
        made["responses"] |= dict.fromkeys(statuses, made["responses"]["403"])
        if form:
            made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
        paths.setdefault(path, {})[method] = made

    at("/v1/files", "get", "List the files of this key's tenant.", any_object)
    at("/v1/files", "post", "Upload an image.", any_object, _object(file, *list(file)[2:]))
    at("/v1/files/{name}", "get", "Get a file's metadata.", any_object)
    at("/v1/files/{name}", "delete", "Delete a file.", any_object)
    at("/v1/files/{name}/content", "get", "Get a file's bytes.", {"content": {"application/octet-stream": {}}})
    at("/libraries", "get", "List the operator's libraries.", any_object)
    at("/libraries/{library}", "get", "List the items of a library.", any_object)
    at("/libraries/{library}", "post", "Add an image.", any_object, _object(item, "metadata", "expires"))
    at("/libraries/{library}", "put", "Replace an image.", any_object, _object(item, "metadata", "expires"))
    at("/libraries/{library}/{name}", "get", "Get an item's metadata.", any_object)
    at("/libraries/{library}/{name}", "delete", "Remove an item.", any_object)


def document(models: Sequence[str] | None, *, root_path: str = "", has_keys: bool = True) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
      models: names of the model that requests may use; None for every name.
      root_path: path prefix of the server at its proxy; default: none.
      has_keys: True if clients need an API key.
    """
    paths = _paths()
    for operation in (one for operations in paths.values() for one in operations.values()):
        if not has_keys and operation["security"] == _KEY:
            operation["security"] = []
            del operation["responses"]["401"]
    schemas = {name: _with_models(schema, models) for name, schema in _SCHEMAS.items()}
    keys: dict[str, Any] = {name: {"type": "http", "scheme": "bearer"} for name in ("key", "admin")}
    keys["x_api_key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "VLCache-JAX", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }


def _with_models(schema: Mapping[str, Any], models: Sequence[str] | None) -> Mapping[str, Any]:
    """Return the schema of a body with `models` as the values of `model`; other schemas are returned unchanged."""
    if models is None or "model" not in schema.get("properties", {}) or schema.get("additionalProperties") is not False:
        return schema
    model = {**schema["properties"]["model"], "enum": [*models, None]}
    return {**schema, "properties": {**schema["properties"], "model": model}}


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.2rem .5rem;text-align:left;
vertical-align:top}pre{overflow:auto;background:#f5f5f5;padding:.5rem}summary{cursor:pointer}"""


def page(document: Mapping[str, Any]) -> str:
    """Return the OpenAPI document as an HTML page without scripts."""
    schemas = document["components"]["schemas"]
    parts = [f"<h1>{document['info']['title']} {document['info']['version']}</h1>"]
    parts.append('<p>Machine-readable: <a href="openapi.json">openapi.json</a>.</p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_table(schemas[name]))
    parts.append("<h2>Schemas</h2>")
    for name, schema in schemas.items():
        shown = html.escape(json.dumps(schema, indent=2))
        parts.append(f"<details><summary>{name}</summary><pre>{shown}</pre></details>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>API</title><style>{_STYLE}'
    return f'<!doctype html><html lang="en"><head>{head}</style></head><body>{"".join(parts)}</body></html>'


def _table(schema: Mapping[str, Any]) -> str:
    rows = []
    for name, one in schema["properties"].items():
        kind = {key: value for key, value in one.items() if key in ("type", "enum", "minimum", "maximum", "maxItems")}
        shown = html.escape(json.dumps(kind)) if kind else "any"
        bold = f"<b>{name}</b>" if name in schema["required"] else name
        rows.append(f"<tr><td>{bold}<td><code>{shown}</code><td>{html.escape(one.get('description', ''))}</tr>")
    return f"<table><tr><th>field<th>type<th>description</tr>{''.join(rows)}</table>"
