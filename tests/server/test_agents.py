"""Agents of OpenAI's client with models of both forms of tool calls: calls, results with images, thinking, turns."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.helper import SIZES, with_thinking_tags
from tests.server.helper import data_url, running
from vlcache_jax import AsyncLLM

PARAMETERS = {
    "type": "object",
    "properties": {
        "page": {"type": "integer", "minimum": 1, "maximum": 99},
        "side": {"enum": ["left", "right"]},
        "zoom": {"type": "boolean"},
    },
    "required": ["page", "side", "zoom"],
    "additionalProperties": False,
}
FUNCTION = {"name": "open_page", "description": "Shows a page.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
FORMS = {"json": ("qwen3_vl", None), "xml": ("hybrid", "qwen3.5"), "xml 3.8": ("hybrid", "qwen3.8")}


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture(scope="module")
def engine(form, checkpoints, hybrid, tmp_path_factory):
    directory = hybrid if form[0] == "hybrid" else checkpoints(form[0])
    directory = with_thinking_tags(directory, tmp_path_factory.mktemp("agent") / "model")
    engine = AsyncLLM(directory, use_tqdm=False, **SIZES | {"max_model_len": 4096, "kv_cache_bytes": 2**25})
    yield engine
    engine.service.close()


@pytest.fixture
def openai_client(engine, form, client):
    with running(engine, chat_template=form[1]) as served:
        yield client(served)


def arguments_of(call):
    """Arguments as the schema has them."""
    found = json.loads(call.arguments)
    jsonschema.validate(found, PARAMETERS)
    return found


GIVEN = {"model": "model", "temperature": 1, "seed": 3, "max_tokens": 400}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def streamed(chunks):
    """Content, reasoning, calls and finish reason of a stream."""
    content, reasoning, calls, reason = "", "", {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or ():
                name, arguments = calls.get(piece.index, ("", ""))
                calls[piece.index] = name + (piece.function.name or ""), arguments + (piece.function.arguments or "")
    return content, reasoning, [*calls.values()], reason


@pytest.mark.parametrize("thinks", [False, True])
def test_calls_come_whole_and_streamed(openai_client, form, thinks):
    """After closed thinking, or after thinking that the budget closes."""
    more = {"thinking_token_budget": 5} if thinks else OFF
    given = GIVEN | {"messages": [{"role": "user", "content": "Open it."}], "tools": [TOOL]}
    given |= {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": more}
    [choice] = openai_client.chat.completions.create(**given).choices
    [call] = choice.message.tool_calls
    assert arguments_of(call.function)
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "open_page")
    reasoning = getattr(choice.message, "reasoning", None) or ""
    assert bool(reasoning) is (thinks and form[1] is not None)
    answer = streamed(openai_client.chat.completions.create(**given, stream=True))
    assert answer == (choice.message.content or "", reasoning, [("open_page", call.function.arguments)], "tool_calls")


def test_an_agent_of_two_turns_sees_images_in_results(openai_client, textured_image):
    """Each prompt continues from the one before, and images of results are computed once."""
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Which page has the table?"}]
    images = [textured_image(64 + 32 * i, 96, i) for i in range(2)]
    prompts = []
    for turn, image in enumerate(images):
        given = GIVEN | {"messages": messages, "tools": [TOOL], "tool_choice": "required"}
        given |= {"parallel_tool_calls": False, "extra_body": OFF | {"return_cache_report": True}}
        found = openai_client.chat.completions.create(**given)
        prompts.append(found.usage)
        [call] = found.choices[0].message.tool_calls
        messages.append(found.choices[0].message.model_dump(exclude_none=True))
        content = [
            {"type": "text", "text": f"Page {turn}:"},
            {"type": "image_url", "image_url": {"url": data_url(image)}},
        ]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        assert len(found.cache["images"]) == turn
    last = openai_client.chat.completions.create(
        **GIVEN | {"messages": messages, "tools": [TOOL], "max_tokens": 8},
        extra_body=OFF | {"return_cache_report": True},
    )
    prompts.append(last.usage)
    assert last.choices[0].message.tool_calls is None
    assert len(last.cache["images"]) == 2
    assert last.cache["images"][0]["match"] == "exact"
    cached = [usage.prompt_tokens_details.cached_tokens for usage in prompts]
    assert 0.8 * prompts[0].prompt_tokens < cached[1] < cached[2]


def test_responses_have_the_same_calls(openai_client, textured_image):
    tool = {"type": "function", "strict": True, **FUNCTION}
    given = {"model": "model", "temperature": 1, "max_output_tokens": 400, "tools": [tool]}
    given |= {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": OFF | {"seed": 3}}
    found = openai_client.responses.create(input="Open it.", **given)
    [call] = [item for item in found.output if item.type == "function_call"]
    assert arguments_of(call)
    events = [*openai_client.responses.create(input="Open it.", stream=True, **given)]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments
    assert (
        "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta") == done.arguments
    )
    image = {"type": "input_image", "image_url": data_url(textured_image(64, 96, 1)), "detail": "auto"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [image]}
    after = openai_client.responses.create(
        input=[result], previous_response_id=found.id, **given | {"tool_choice": "auto", "max_output_tokens": 16}
    )
    assert after.status in ("completed", "incomplete")
    assert after.usage.input_tokens > found.usage.input_tokens
