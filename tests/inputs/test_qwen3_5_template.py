"""Our templates of Qwen3.5, 3.6 and 3.8 render conversations as the published ones do, but for fixed sentences."""

from __future__ import annotations

import json
import pathlib

import jinja2
import pytest

from vlcache_jax.inputs.prompt import PromptRenderer, is_opened, template_text
from vlcache_jax.inputs.qwen3_5_template import CALLS, FORMS, HEAD, LOW, XHIGH, qwen3_5_template

CASES = json.loads(pathlib.Path(__file__).with_name("qwen3_5_cases.json").read_text("utf-8"))["cases"]
NAMES = {"35small": "qwen3.5-small", "35": "qwen3.5", "36": "qwen3.6", "38": "qwen3.8"}
SENTENCES = {"⟦HEAD⟧": HEAD, "⟦CALLS⟧": CALLS, "⟦XHIGH⟧": XHIGH, "⟦LOW⟧": LOW}
ERRORS = {"TemplateError": jinja2.exceptions.TemplateError, "TypeError": TypeError}


@pytest.fixture(scope="module")
def renderer(checkpoints):
    return PromptRenderer.from_pretrained(checkpoints("qwen3_5"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_a_conversation_is_rendered_to_the_letter(renderer, case, name):
    def render():
        return renderer.tokenizer.apply_chat_template(
            case["messages"],
            chat_template=qwen3_5_template(NAMES[name]),
            tokenize=False,
            add_generation_prompt=not case["continue_final_message"],
            continue_final_message=case["continue_final_message"],
            tools=case["tools"],
            **case["kwargs"],
        )

    expected = case["prompts"][name]
    if "raises" in expected:
        with pytest.raises(ERRORS[expected["raises"]]):
            render()
        return
    text = expected["text"]
    for sentence, ours in SENTENCES.items():
        text = text.replace(sentence, ours)
    assert render() == text


def test_all_cases_are_there():
    assert len(CASES) == 41
    assert all(case["prompts"].keys() == NAMES.keys() for case in CASES)
    assert NAMES.keys() | FORMS == {*NAMES, *NAMES.values()}


@pytest.mark.parametrize(
    ("form", "kwargs", "opens"),
    [
        ("qwen3.5-small", {}, False),
        ("qwen3.5-small", {"enable_thinking": True}, True),
        ("qwen3.5", {}, True),
        ("qwen3.8", {"enable_thinking": False}, False),
    ],
)
def test_the_prompt_shows_whether_thinking_is_open(renderer, form, kwargs, opens):
    prompt = renderer.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], chat_template=qwen3_5_template(form), tokenize=False,
        add_generation_prompt=True, **kwargs,
    )  # fmt: skip
    assert is_opened(prompt) is opens


def test_a_form_is_a_template_by_name():
    assert template_text("qwen3.8") == qwen3_5_template("qwen3.8")


def test_an_unknown_form_is_an_error():
    with pytest.raises(ValueError, match=r"form must be one of qwen3.5-small, .*, got 'qwen4'"):
        qwen3_5_template("qwen4")
