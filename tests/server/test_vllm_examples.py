"""What vLLM's published examples send, in words of our own: taken, or refused with what to write.

Each entry has the fields of an example of vLLM 0.33 (folder `examples`) for a route that is served here. The table in
`docs/guides/from_vllm.md` has a line for each of their names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.server.helper import data_url, open_reranker
from vlcache_jax import LLM

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "from_vllm.md"
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
PICTURES = [np.random.default_rng(seed).integers(0, 256, (64, 96, 3), np.uint8) for seed in range(2)]
PICTURE, OTHER = ({"type": "image_url", "image_url": {"url": data_url(one, "JPEG")}} for one in PICTURES)
FRAMES = ",".join(part["image_url"]["url"].partition(",")[2] for part in (PICTURE, OTHER))
SENT = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{FRAMES}"}}
TURNS = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "There."},
    {"role": "user", "content": "Why?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
}
CALLED = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}],
        "reasoning": None,
    },
    {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"},
]
FORM = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=look>", "schema": FORM, "end": "</f>"}],
    "triggers": ["<f="],
}
EMPTY = {"role": "assistant", "content": [{"type": "text", "text": ""}]}


def shown(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


def chat_of(*parts: Any, last: bool = True) -> list[dict[str, Any]]:
    """A conversation as the example of Qwen3-VL-Embedding has it."""
    system = {"role": "system", "content": [{"type": "text", "text": "Represent the user's input."}]}
    return [system, {"role": "user", "content": list(parts)}, *([EMPTY] if last else [])]


class Example(NamedTuple):
    """An entry.

    Attributes:
      name: of the example, as the guide has it.
      path: of the route.
      body: with the example's fields.
      refused: how its error begins; None: it is answered.
      status: of HTTP.
    """

    name: str
    path: str
    body: dict[str, Any]
    refused: str | None = None
    status: int = 200


def chat(name: str, messages: Any, refused: str | None = None, **fields: Any) -> Example:
    few = {} if {"max_completion_tokens", "max_tokens"} & fields.keys() else {"max_tokens": 12}
    return Example(name, CHAT, {"messages": messages, **few, **fields}, refused, 200 if refused is None else 400)


def refused(name: str, path: str, body: dict[str, Any], message: str, status: int = 400) -> Example:
    return Example(name, path, body, message, status)


TEXT = {"type": "text", "text": "a dog"}
OPEN = {"encoding_format": "float", "continue_final_message": True, "add_special_tokens": True}
SHUT = {"encoding_format": "float", "continue_final_message": False, "add_special_tokens": False}
EXAMPLES = [
    # examples/basic and examples/generate
    chat("openai_chat_completion_client", TURNS, stream=False),
    chat("openai_chat_completion_client", TURNS, stream=True),
    Example(
        "openai_completion_client", "/v1/completions",
        {"prompt": "A star", "echo": False, "n": 2, "stream": False, "logprobs": 3},
    ),
    Example(
        "openai_completion_client", "/v1/completions",
        {"prompt": "A star", "echo": False, "n": 2, "stream": True, "logprobs": 3},
    ),
    chat("openai_chat_completion_client_for_multimodal", shown(), max_completion_tokens=8),
    chat("openai_chat_completion_client_for_multimodal", shown(PICTURE), max_completion_tokens=8),
    chat("openai_chat_completion_client_for_multimodal", shown(PICTURE, OTHER), max_completion_tokens=8),
    chat("video frames as one data URL", shown(SENT), max_completion_tokens=8),
    chat(
        "video frames with media_io_kwargs", shown(SENT), "media_io_kwargs is not supported, got .*: set fps",
        media_io_kwargs={"video": {"fps": 2.0, "total_num_frames": 2}},
    ),
    chat(
        "openai_chat_completion_client_for_multimodal, http(s) URLs",
        shown({"type": "image_url", "image_url": {"url": "https://example.com/a.jpg"}}),
        "messages: images.0. must be local unless allow_remote_images",
    ),
    *(
        chat(
            "openai_chat_completion_client_for_multimodal, audio", shown(part),
            r"messages\[0\] content\[1\] must be a dict of type",
        )
        for part in (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": "data:audio/ogg;base64,AAAA"}},
        )
    ),
    refused(
        "batched_chat_completions_online", f"{CHAT}/batch", {"messages": [shown(), shown()]}, "Not Found", 404
    ),
    # examples/features
    *(
        chat("structured_outputs_client", shown(), structured_outputs=held, stream=stream, max_tokens=40)
        for held in (
            {"choice": ["good", "bad"]}, {"regex": r"[a-z0-9.]{1,3}@\w{2,3}\.com\n"},
            {"grammar": 'root ::= "SELECT " column\ncolumn ::= "a " | "b "'},
        )
        for stream in (False, True)
    ),
    chat(
        "structured_outputs_client", shown(), max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "kinds", "schema": FORM}},
    ),
    chat("structured_outputs_client", shown(), response_format=TAG, max_tokens=40),
    chat(
        "prompt_embed_inference_with_openai_client",
        [{"role": "user", "content": [{"type": "prompt_embeds", "data": "AAAA"}]}],
        r"messages\[0\] content\[0\] must be a dict of type", max_tokens=6, temperature=0.0,
    ),
    refused(
        "prompt_embed_inference_with_openai_client", "/v1/completions",
        {"prompt": None, "prompt_embeds": "AAAA", "max_tokens": 6}, "unknown field 'prompt_embeds' in body",
    ),
    # examples/tool_calling and examples/reasoning
    chat("openai_chat_completion_client_with_tools", TURNS, tools=[TOOL], stream=True),
    chat("openai_chat_completion_client_with_tools", CALLED, tools=[TOOL], stream=False),
    chat(
        "openai_chat_completion_client_with_tools_required", TURNS, tools=[TOOL], tool_choice="required", max_tokens=60
    ),
    chat(
        "openai_chat_completion_tool_calls_with_reasoning", TURNS, tools=[TOOL], stream=True, max_tokens=60,
        tool_choice={"type": "function", "function": {"name": "look"}},
    ),
    chat("openai_chat_completion_with_reasoning_streaming", shown(), stream=True),
    Example("openai_responses_client", "/v1/responses", {"input": TURNS[1:2], "max_output_tokens": 8}),
    Example(
        "openai_responses_client_with_tools", "/v1/responses",
        {
            "input": [
                TURNS[1],
                {"type": "function_call", "id": "f1", "call_id": "c1", "name": "look", "arguments": '{"n": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "Nothing."},
            ],
            "tools": [{"type": "function", **TOOL["function"], "strict": True}], "tool_choice": "required",
            "max_output_tokens": 60,
        },
    ),
    # examples/pooling/embed
    *(
        Example("vision_embedding_online, Qwen3-VL-Embedding", EMBEDDINGS, {"messages": chat_of(*parts), **OPEN})
        for parts in ([TEXT], [PICTURE, {"type": "text", "text": ""}], [PICTURE, TEXT])
    ),
    refused(
        "vision_embedding_online, Qwen3-VL-Embedding, without `continue_final_message`", EMBEDDINGS,
        {"messages": chat_of(TEXT), **SHUT}, "messages must not end with an assistant's turn that is empty and closed: "
        "set continue_final_message = true",
    ),
    Example("vision_embedding_online, DSE of Qwen2-VL", EMBEDDINGS, {"messages": shown(PICTURE), **SHUT}),
    Example("openai_embedding_client", EMBEDDINGS, {"input": ["one", "two"]}),
    Example("openai_embedding_matryoshka_fy_client", EMBEDDINGS, {"input": ["one"], "dimensions": 32}),
    Example(
        "embedding_requests_base64_online", EMBEDDINGS,
        {"input": ["one"] * 2, "encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"},
    ),
    refused(
        "embedding_requests_base64_online, other types", EMBEDDINGS,
        {"input": ["one"], "encoding_format": "base64", "embed_dtype": "float16", "endianness": "native"},
        "embed_dtype is not supported, got 'float16': vectors are float32",
    ),
    refused(
        "embedding_requests_base64_online, other types", EMBEDDINGS,
        {"input": ["one"], "encoding_format": "base64", "embed_dtype": "float32", "endianness": "big"},
        "endianness is not supported, got 'big': vectors are little-endian",
    ),
    refused(
        "embedding_requests_bytes_online", EMBEDDINGS, {"input": ["one"], "encoding_format": "bytes"},
        "encoding_format must be one of float, base64, got 'bytes'",
    ),
    # examples/pooling/score
    *(
        Example("vision_rerank_api_online", "/rerank", {"query": "a dog", "documents": documents})
        for documents in (
            ["a cat"], {"content": [TEXT]}, {"content": [PICTURE]}, {"content": [SENT]}, {"content": [TEXT, PICTURE]},
            ["a cat", {"content": [TEXT]}, {"content": [PICTURE]}, {"content": [TEXT, PICTURE]}],
        )
    ),
    Example("rerank_api_online", "/v1/rerank", {"query": "a dog", "documents": ["a cat", "a dog", "a hat"]}),
    Example("cohere_rerank_client", "/v2/rerank", {"query": "a dog", "documents": ["a cat", "a dog"], "top_n": 1}),
    *(
        Example("vision_score_api_online", "/score", {"queries": "a dog", "documents": documents})
        for documents in ("a cat", {"content": [TEXT]}, {"content": [PICTURE]}, [{"content": [PICTURE]}] * 2)
    ),
    *(
        Example("score_api_online", "/score", {"queries": queries, "documents": documents})
        for queries, documents in (("one", "two"), ("one", ["two", "three"]), (["one", "two"], ["three", "four"]))
    ),
    Example("qwen3_reranker_online", "/score", {"queries": ["one", "two"], "documents": ["three", "four"]}),
    Example(
        "requests in vLLM's guide of the score API", "/v1/score",
        {"encoding_format": "float", "queries": "a", "documents": "b"},
    ),
    Example("earlier names of the score API", "/v1/score", {"text_1": "one", "text_2": ["two", "three"]}),
    Example("earlier names of the score API", "/score", {"data_1": {"content": [PICTURE]}, "data_2": ["two"]}),
    refused("classification_online, pooling_online", "/classify", {"input": "one"}, "Not Found", 404),
    refused("classification_online, pooling_online", "/pooling", {"input": "one"}, "Not Found", 404),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = open_reranker(tmp_path_factory.mktemp("examples"))
    yield engine
    engine.service.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* 2 frames per second are assumed:UserWarning")
def test_examples_are_taken_or_say_what_to_write(serve):
    served = serve()
    for example in EXAMPLES:
        status, _, found = served.ask("POST", example.path, {"model": served.server.models[0], **example.body})
        assert status == example.status, (example, found)
        if example.refused is not None:
            assert re.match(example.refused, json.loads(found)["error"]["message"]), (example, found)
        elif example.body.get("stream"):
            assert found.endswith(b"data: [DONE]\n\n"), example
            assert b'"error"' not in found, (example, found)
        else:
            _check(example, json.loads(found))


def _check(example, found):
    """As many answers as vLLM gives."""
    body = example.body
    if example.path.endswith("rerank"):
        count = len(body["documents"]) if isinstance(body["documents"], list) else 1
        assert len(found["results"]) == body.get("top_n", count)
        assert all(0 < one["relevance_score"] < 1 for one in found["results"])
    elif example.path.endswith("score"):
        documents = next(body[name] for name in ("documents", "data_2", "text_2") if name in body)
        assert [one["index"] for one in found["data"]] == list(
            range(len(documents) if isinstance(documents, list) else 1)
        )
        assert all(one["object"] == "score" and 0 < one["score"] < 1 for one in found["data"])
    elif example.path == EMBEDDINGS:
        assert len(found["data"]) == (len(body["input"]) if "input" in body else 1)
    else:
        assert len(found.get("choices", found.get("output"))) >= 1


def test_the_guide_has_every_example():
    guide = GUIDE.read_text(encoding="utf-8")
    table = guide[guide.index("## Requests of vLLM's examples") :]
    for example in EXAMPLES:
        assert f"| {example.name} |" in table, example.name


def test_an_empty_open_turn_is_the_models_own_form(serve, engine):
    """The vector of the example's body is that of the library's conversation, with which the models were published."""
    served, llm = serve(), LLM(engine.service)
    for parts in ([TEXT], [PICTURE, TEXT]):
        _, found = served.json("POST", EMBEDDINGS, {"messages": chat_of(*parts), **OPEN})
        [own] = llm.embed([chat_of(*parts, last=False)], use_tqdm=False)
        np.testing.assert_allclose(found["data"][0]["embedding"], own.outputs.embedding, atol=1e-5)
        assert found["usage"]["prompt_tokens"] == len(own.prompt_token_ids)
    # By vLLM's default, which has to be asked for here, the prompt ends before the assistant's turn, or after it.
    for messages in (chat_of(TEXT, last=False), chat_of(TEXT)):
        _, found = served.json("POST", EMBEDDINGS, {"messages": messages, "add_generation_prompt": False})
        [given] = llm.embed([{"messages": messages, "add_generation_prompt": False}], use_tqdm=False)
        np.testing.assert_allclose(found["data"][0]["embedding"], given.outputs.embedding, atol=1e-5)
        assert not np.allclose(given.outputs.embedding, llm.embed("a dog", use_tqdm=False)[0].outputs.embedding)


def test_messages_go_by_the_servers_template(serve, engine):
    own, messages = "{{ messages[-1]['content'][0]['text'] }} and no more", chat_of(TEXT, last=False)
    served, llm = serve(chat_template=own), LLM(engine.service)
    _, found = served.json("POST", EMBEDDINGS, {"messages": messages})
    [expected] = llm.embed([{"prompt": "a dog and no more"}], use_tqdm=False)
    np.testing.assert_allclose(found["data"][0]["embedding"], expected.outputs.embedding, atol=1e-5)


def test_special_tokens_are_those_of_the_tokenizer(serve, engine, monkeypatch):
    served = serve()
    for added, status in ((False, 200), (True, 400)):
        monkeypatch.setattr(engine.service.renderer, "adds_special_tokens", added)
        for body in ({"messages": shown()}, {"input": "a"}):
            assert served.json("POST", EMBEDDINGS, {**body, "add_special_tokens": True})[0] == 200
            found, answer = served.json("POST", EMBEDDINGS, {**body, "add_special_tokens": False})
            assert found == status
            assert added == ("error" in answer and answer["error"]["param"] == "add_special_tokens")


def test_frames_of_one_url_have_the_keys_of_the_list(engine):
    frames = [part["image_url"]["url"] for part in (PICTURE, OTHER)]
    cache = LLM(engine.service).cache
    sent, listed = (cache.keys({**one, "fps": 2.0}) for one in (SENT, {"type": "video", "video": frames}))
    assert sent == listed
    assert len(sent) == 1


def test_scores_are_those_of_rerank(serve, engine):
    served, llm = serve(), LLM(engine.service)
    documents = ["a hat", {"content": [PICTURE]}, {"content": [TEXT, OTHER]}]
    ranked = llm.rerank("red", ["a hat", [PICTURE], [TEXT, OTHER]], instruction="Find.", use_tqdm=False)
    expected = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    for body in (
        {"queries": "red", "documents": documents, "instruction": "Find."},
        {"queries": ["red"] * 3, "items": documents, "chat_template_kwargs": {"instruction": "Find."}},
        {"data_1": {"content": [{"type": "text", "text": "red"}]}, "data_2": documents, "instruction": "Find."},
    ):
        status, found = served.json("POST", "/score", body)
        assert status == 200, found
        np.testing.assert_allclose([one["score"] for one in found["data"]], expected, atol=1e-5)
        assert found["usage"]["prompt_tokens"] == sum(one.num_tokens for one in ranked)
    # Each of several queries goes with its own document.
    _, found = served.json("POST", "/v1/score", {"text_1": ["red", "blue"], "text_2": ["a hat", "a shoe"]})
    pairs = [llm.rerank(*one, use_tqdm=False)[0].score for one in (("red", ["a hat"]), ("blue", ["a shoe"]))]
    np.testing.assert_allclose([one["score"] for one in found["data"]], pairs, atol=1e-5)


def test_coheres_answer(serve, engine):
    served, llm = serve(), LLM(engine.service)
    status, found = served.json("POST", "/v2/rerank", {"query": "red", "documents": ["a hat", "a shoe"], "top_n": 0})
    assert status == 200
    ranked = llm.rerank("red", ["a hat", "a shoe"], use_tqdm=False)
    assert [one["index"] for one in found["results"]] == [one.index for one in ranked]
    count = sum(one.num_tokens for one in ranked)
    assert found["meta"] == {"api_version": {"version": "2"}, "tokens": {"input_tokens": count, "output_tokens": 0}}
    assert "meta" not in served.json("POST", "/v1/rerank", {"query": "red", "documents": ["a hat"]})[1]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/score", {"queries": "a"}, None, "body must have one of the pairs queries and documents; .*, got queries$"),
        ("/score", {}, None, "body must have one of the pairs .*, got none$"),
        (
            "/score", {"queries": "a", "documents": "b", "items": "c"}, None,
            "body must have one of the pairs .*, got documents, items, queries$",
        ),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 must have one element or as many"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "text_2 must have at least 1 item"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "text_2 must have 1 to 2048 elements, got 2049"),
        ("/score", {"text_1": "a", "text_2": ["b", 3]}, "text_2", r"text_2\[1\] must be a string, a part"),
        ("/score", {"text_1": 3, "text_2": "b"}, "text_1", "text_1 must be a string or an object or a list, got 3"),
        ("/score", {"text_1": ["a", 3], "text_2": ["b", "c"]}, "text_1", r"text_1\[1\] must be a string, a part"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", ".*: send"),
        (
            "/score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs",
            ".* 'x' in chat_template_kwargs; expected one of instruction",
        ),
        ("/score", {"text_1": "a", "text_2": "b", "reuse": "full"}, "reuse", "reuse must be exact on this server"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", ".*: send"),
        (EMBEDDINGS, {"input": "a", "continue_final_message": True}, "continue_final_message", "cont.* with input"),
        (
            EMBEDDINGS, {"messages": chat_of(TEXT), "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt", "add_generation_prompt and continue_final_message are mutually exclusive",
        ),
        (EMBEDDINGS, {"messages": shown(), "chat_template": "{{ x }}"}, "chat_template", ".*: start the server"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(serve, path, body, param, message):
    status, found = serve().json("POST", path, body)
    assert status == 400
    assert re.match(message, found["error"]["message"]), found
    assert found["error"]["param"] == param
