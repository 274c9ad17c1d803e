"""The model and the pictures that ship with the package."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Literal

import numpy as np
import openai
import pydantic
import pytest
from PIL import Image

from tests.benchmarks.test_tiny_vqa import solve
from tests.helper import ALONE, some_cases
from vlcache_jax import LLM, AsyncLLM, SamplingParams
from vlcache_jax.assets import PICTURES, SCHEDULES, TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.pictures import render, shipped_pictures
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.benchmarks.tiny_vqa.tasks import TASKS
from vlcache_jax.commands.demo import TURNS
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import listening
from vlcache_jax.study.questions import user_turn


def test_the_model_is_a_small_directory_as_the_hub_has_them():
    files = {path.name: path.stat().st_size for path in TINY_VQA.iterdir()}
    assert sum(files.values()) <= 16 * 2**20
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(files)
    config = json.loads((TINY_VQA / "config.json").read_text())
    assert config["model_type"] == "qwen3_vl"
    assert config["text_config"]["head_dim"] == 64  # as the kernels take


@pytest.mark.slow
def test_opening_imports_no_torch_and_says_what_is_done():
    """Nor does it keep others from importing it."""
    code = f"""
import sys
from vlcache_jax import LLM, BucketSizes, SamplingParams
with LLM({str(TINY_VQA)!r}, buckets={ALONE}) as llm:
    [output] = llm.chat([{{"role": "user", "content": "Hello"}}], SamplingParams(max_tokens=2, ignore_eos=True))
    print(len(output.outputs[0].token_ids), "torch" in sys.modules)
from transformers import is_torch_available
print(is_torch_available())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 False\nTrue\n"
    lines = done.stderr.splitlines()
    assert lines[:2] == ["loading weights of tiny_vqa (0.02 GB)", "answering"]
    assert lines[2].startswith(("answering: compiling ", "answering: loading programs"))


def test_the_pictures_are_those_that_are_drawn():
    for name, picture in shipped_pictures().items():
        with Image.open(PICTURES / name) as image:
            np.testing.assert_array_equal(np.asarray(image), render(picture))


def test_the_answers_of_the_demo_are_right():
    pictures = shipped_pictures()
    for turn in TURNS:
        assert turn.answer == solve(turn.question, [pictures[name] for name in turn.images])


@pytest.mark.usefixtures("few_buckets")
@pytest.mark.parametrize("questions", some_cases(6, 20))
def test_transformers_gives_the_same_answers_and_most_are_right(questions):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # as in `load_oracle`
    from research.tiny_vqa.agreement import compare

    found = compare(load_samples([], questions=questions), "text_first")
    assert len(found) == questions * len(TASKS)
    assert all(alike for _, alike, _ in found)
    assert np.mean([right for _, _, right in found]) > 0.85


def test_the_schedules_are_the_models():
    layers = json.loads((TINY_VQA / "config.json").read_text())["text_config"]["num_hidden_layers"]
    assert SCHEDULES
    assert [len(Schedule.load(path).levels) for path in SCHEDULES] == [layers] * len(SCHEDULES)


@pytest.mark.slow
@pytest.mark.usefixtures("few_buckets")
def test_the_schedules_decide_what_is_recomputed():
    prompt = [{"role": "user", "content": user_turn([(PICTURES / "left.png").read_bytes()], "Hi", "text_first", "Ho.")}]
    with LLM(TINY_VQA) as llm:
        llm.cache.precompute([PICTURES / "left.png"])
        for path in SCHEDULES:
            [output] = llm.chat(prompt, SamplingParams(max_tokens=1), reuse=str(path), use_tqdm=False)
            [image] = output.cache.images
            levels = Schedule.load(path).levels
            assert image.match == "approximate"
            assert list(image.recomputed[1:]) == [level * image.tokens // 500 for level in levels[1:]]


@pytest.mark.servers
def test_openais_client_parses_json_of_the_shipped_model():
    """Without white space between its tokens, which the model would write until the answer is cut off."""

    class Glyph(pydantic.BaseModel):
        color: Literal["red", "green", "blue", "yellow"]
        shape: Literal["star", "circle", "square"]

    image = "data:image/png;base64," + base64.b64encode((PICTURES / "picture.png").read_bytes()).decode()
    question = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What is at C2?"}]
    given = {"model": "tiny-vqa", "messages": [{"role": "user", "content": question}], "max_completion_tokens": 60}
    engine = AsyncLLM("tiny-vqa", buckets=ALONE, use_tqdm=False, allowed_local_media_path=None)
    with listening(Server(engine, ServerConfig(port=0))) as url, openai.OpenAI(base_url=url, api_key="none") as client:
        [choice] = client.chat.completions.parse(**given, response_format=Glyph).choices
        assert isinstance(choice.message.parsed, Glyph)
        assert (choice.finish_reason, choice.message.content.split()) == ("stop", [choice.message.content])
        # A request's own value comes first.
        spaced = {"structured_outputs": {"json": Glyph.model_json_schema(), "disable_any_whitespace": False}}
        [choice] = client.chat.completions.create(**given, extra_body=spaced).choices
        assert (choice.finish_reason, choice.message.content.strip()) == ("length", "{")
    engine.service.close()
