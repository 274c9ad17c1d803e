"""The benchmark of throughput: its requests, an engine against itself, and what it refuses."""

from __future__ import annotations

import collections
import json
import pathlib
import textwrap

import numpy as np
import pytest
from typer.testing import CliRunner

import vlcache_jax
from vlcache_jax.benchmarks import throughput
from vlcache_jax.benchmarks.floor import MODELS, decode, prefill
from vlcache_jax.benchmarks.throughput import BEFORE, IMAGE, LOAD_TEXT, SHARES, ThroughputLoad, longest
from vlcache_jax.commands.cli import app
from vlcache_jax.reuse.policies import Plan

ROOT = pathlib.Path(vlcache_jax.__file__).parent.parent
SMALL = ThroughputLoad(requests=6, images=3, mean_answer=5, max_answer=12)

# A checkout whose engine says letters of the prompt; `{wrong}` spoils what it says.
ENGINE = """
class SamplingParams:
    def __init__(self, max_tokens, ignore_eos, temperature):
        assert ignore_eos and temperature == 0
        self.max_tokens = max_tokens

class Thing:
    def __init__(self, **fields):
        vars(self).update(fields)

def answer(prompt, params):
    tokens = [ord(letter) for letter in prompt["prompt"]][: params.max_tokens]
    return tokens + [0] * (params.max_tokens - len(tokens))

def output(tokens, done=True):
    images = [Thing(match="exact", encoder="host")]
    metrics = Thing(ttft=0.5, inter_token=(0.25,) * (len(tokens) - 1))
    return Thing(outputs=[Thing(token_ids=tokens)], metrics=metrics, cache=Thing(images=images), finished=done)

class LLM:
    def __init__(self, model):
        self.steps = 0
        self._engine = Thing(trace=None)
    def reset_mm_cache(self):
        pass
    def stats(self):
        return Thing(decode_steps=self.steps, windows=self.steps, decode_rows=32 * self.steps,
                     padded_decode_rows=8 * self.steps, host_window_seconds=0.001 * self.steps)
    def generate(self, prompts, params, reuse, use_tqdm):
        outputs = [output(answer(*both)) for both in zip(prompts, params)]
        self.steps += 10
        if self._engine.trace is not None:
            self._engine.trace.append((4, 400, 10))
        {wrong}
        return outputs
    def close(self):
        pass
"""
OPEN = """
class AsyncLLM:
    def __init__(self, model):
        pass
    async def reset_mm_cache(self):
        pass
    async def generate(self, prompt, params, reuse):
        tokens = answer(prompt, params)
        for count in range(1, 1 + len(tokens)):
            yield output(tokens[:count], count == len(tokens))
    def close(self):
        pass
"""


@pytest.fixture
def checkout(tmp_path):
    """Makes a checkout with an engine that needs no model."""

    def make(name="other", wrong="", more=""):
        folder = tmp_path / name / "vlcache_jax"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(ENGINE.replace("{wrong}", textwrap.dedent(wrong) or "pass") + more)
        return folder.parent

    return make


@pytest.fixture
def as_this(monkeypatch):
    """Has a checkout measured as if it were this one."""
    return lambda root: monkeypatch.setattr(
        throughput, "vlcache_jax", type("Module", (), {"__file__": str(root / "vlcache_jax" / "__init__.py")})
    )


def test_requests_are_seeded(tmp_path):
    def make(name, **fields):
        (tmp_path / name).mkdir()
        made = ThroughputLoad(requests=20, rate=2.0, **fields).make(tmp_path / name)
        return [request | {"images": [pathlib.Path(i).read_bytes() for i in request["images"]]} for request in made]

    first = make("first")
    assert make("again") == first
    assert make("other", seed=1) != first
    longer = make("longer", mean_answer=100)  # changes nothing else
    assert [request | {"max_tokens": 0} for request in longer] == [request | {"max_tokens": 0} for request in first]


def test_requests_have_the_distributions_that_are_stated(tmp_path):
    load = ThroughputLoad(requests=2000, images=40, rate=4.0)
    made = load.make(tmp_path)
    lengths = np.array([request["max_tokens"] for request in made])
    assert lengths.min() == 1
    assert lengths.max() == load.max_answer
    assert lengths.mean() == pytest.approx(48, rel=0.05)
    counts = np.bincount([len(request["images"]) for request in made]) / len(made)
    assert counts == pytest.approx(SHARES, abs=0.03)
    used = collections.Counter(path for request in made for path in request["images"])
    assert sorted(used.values())[:20] == [1] * 20
    assert min(sorted(used.values())[20:]) > 60  # about 99 of each
    assert all(request["prompt"].count(IMAGE) == len(request["images"]) for request in made)
    for i, request in enumerate(made):
        before, *between = request["prompt"].split("user\n")[1].split("<|im_end|>")[0].split(IMAGE)
        if between:
            assert LOAD_TEXT[0] <= len(between[-1]) <= LOAD_TEXT[1]
            assert BEFORE[0] <= len(before) <= BEFORE[1] if i % 2 else not before
    assert made[-1]["arrival"] == pytest.approx(len(made) / 4, rel=0.1)
    assert {request["arrival"] for request in ThroughputLoad().make(tmp_path)} == {0.0}
    assert longest(made) % 128 == 0


def test_pictures_are_met_by_zipfs_law(tmp_path):
    load = ThroughputLoad(requests=2000, images=4, zipf=1.0)
    made = load.make(tmp_path)
    used = collections.Counter(path for request in made for path in request["images"])
    shares = [used[str(tmp_path / f"{i}.png")] / used.total() for i in range(4)]
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)
    assert "met by Zipf's law (1)" in str(load)


def test_a_small_load_is_one_too(tmp_path):
    [request] = ThroughputLoad(requests=1, images=1, max_answer=1).make(tmp_path)
    assert request["max_tokens"] == 1


@pytest.mark.thorough
def test_this_checkout_against_itself(tmp_path, capsys):
    out = tmp_path / "out.json"
    throughput.measure(
        None,
        SMALL,
        reuse=["exact"],
        against=ROOT,
        repeats=1,
        floor=True,
        out=out,
        kv_cache_bytes=2**22,
        text={"num_hidden_layers": 1, "hidden_size": 64},
        vision={"depth": 1, "deepstack_visual_indexes": []},
        max_rows=64,
    )
    written = json.loads(out.read_text())
    ours, theirs = written["rows"]
    assert (ours["engine"], theirs["engine"]) == (throughput.OURS, f"against {ROOT.name}")
    assert ours["equal answers %"] == theirs["equal answers %"] == 100
    assert ours["tokens/s"] == pytest.approx(written["returned tokens"] / ours["seconds"])
    assert ours[f"over against {ROOT.name}"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    for row in (ours, theirs):
        assert 0 < row["TTFT p50 ms"] <= row["TTFT p99 ms"]
        assert 0 < row["inter-token p50 ms"] <= row["inter-token most ms"]
        assert row["decode steps"] >= 1
        assert row["active rows"] <= SMALL.requests
        assert 0 <= row["prefill padding %"] < 100
    assert written["floor"][0]["over this checkout"] == 1
    assert {"load", "versions", "engines", "repeats"} <= written.keys()
    assert "6 prompts that come at once" in capsys.readouterr().out


def test_what_an_engine_counts_comes_from_its_stats(checkout, as_this, tmp_path):
    as_this(checkout())
    out = tmp_path / "out.json"
    throughput.measure("model", SMALL, reuse=["off", "0.1"], repeats=2, floor=True, out=out)
    off, ratio = json.loads(out.read_text())["rows"]
    assert (off["decode steps"], off["active rows"], off["decode padding %"]) == (10, 24, 25)
    assert off["host ms a window"] == pytest.approx(1)
    assert off["launches a token"] is None
    assert (off["TTFT p50 ms"], off["inter-token most ms"]) == pytest.approx((500, 250))
    assert ratio["exact"] == SMALL.requests
    assert len(ratio["runs"]) == 2
    [least, _] = json.loads(out.read_text())["floor"]
    assert (least["mean rows"], least["mean context"]) == (4, 104.5)
    assert least["floor s"] == pytest.approx(throughput.decode_seconds([(4, 400 + 4 * i, 1) for i in range(10)]))


def test_requests_come_at_a_rate(checkout, as_this, tmp_path):
    """With an engine that answers at once: a run takes until the last request has come."""
    as_this(checkout(more=OPEN))
    load, out = ThroughputLoad(requests=4, images=2, max_answer=5, rate=20.0), tmp_path / "out.json"
    throughput.measure("model", load, repeats=1, out=out)
    [row] = json.loads(out.read_text())["rows"]
    (tmp_path / "pictures").mkdir()
    assert row["seconds"] >= load.make(tmp_path / "pictures")[-1]["arrival"]
    assert 0 < row["TTFT p99 ms"] < 1000 * row["seconds"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("outputs[2].outputs[0].token_ids[0] += 1", "but those of request 2 differ at token"),
        ("outputs[1].outputs[0].token_ids.pop()", "requested lengths, got 6 of 6, first in request 1"),
        ("outputs = []", "requested lengths, got 0 of 6"),
        ("raise MemoryError('too small')", "against other: MemoryError: too small"),
        ("import os; os._exit(7)", "against other: it ended with status 7"),
    ],
)
def test_wrong_answers_fail(checkout, as_this, tmp_path, wrong, told):
    as_this(checkout("this"))
    out = tmp_path / "out.json"
    with pytest.raises(ValueError, match=told):
        throughput.measure("model", SMALL, against=checkout(wrong=wrong), repeats=1, out=out)
    assert not out.exists()


def test_a_rate_needs_an_engine_for_it(checkout, as_this):
    as_this(checkout())
    with pytest.raises(ValueError, match=r"this checkout: ValueError: rate must be None for .*, which has no AsyncLLM"):
        throughput.measure("model", ThroughputLoad(requests=1, rate=1.0), repeats=1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--requests", "0"], "requests must be at least 1, got 0"),
        (["--images", "0"], "images must be at least 1"),
        (["--mean-answer", "0.5"], "mean_answer must be a number of at least 1"),
        (["--rate", "0"], "rate must be a number above 0"),
        (["--rate", "2", "--transformers"], "rate must be None for transformers"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--reuse", "some"], "reuse must be"),
        (["--against", "."], "against must be a checkout of this project"),
        (["--out", "."], "out must be a file that can be written"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_runs(monkeypatch, tmp_path, arguments, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(throughput, "Worker", None)
    result = CliRunner().invoke(app, ["bench", "throughput", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert told in result.stderr


def test_the_floor_of_a_decode_step_is_that_of_a_prefill_of_one_row():
    config = MODELS["Qwen3-VL-8B"]
    depth = np.zeros(300, np.int16)
    depth[-1] = config.text.num_layers + 1
    alone, step = (
        {
            part: sum(np.array([one.operations, one.bytes]) for one in operators if one.part == part).tolist()
            for part in ("linear", "attention", "head")
        }
        for operators in (list(prefill(config, Plan(depth))), list(decode(config, 1, 300)))
    )
    assert step == alone
