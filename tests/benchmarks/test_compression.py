"""`vlcache bench compression`: its tables, and what must not pass for a measurement."""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest
from PIL import Image

from tests.helper import SIZES
from vlcache_jax import LLM
from vlcache_jax.benchmarks import compression, compression_filled
from vlcache_jax.benchmarks.compression import check_request, drawn_counts, first_rows
from vlcache_jax.benchmarks.settings import CompressionSetup
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.device.programs.window import alike_layers
from vlcache_jax.pallas_kernels import PAGE

SETTINGS = SIZES | {"compressed_kv_bytes": 2**22, "max_num_seqs": 8, "use_tqdm": False}
SETUP = CompressionSetup(lengths=(64, 144), answers=(1, 3), budget=0.2, steps=9, max_tokens=12, repeats=2)
WAYS = ["full", "vl-cache-0.2", "postvision-0.2"]
LAYERS = 3

ONE = pytest.mark.parametrize("family_checkpoint", ["qwen3_vl-tied"], indirect=True, scope="session")


@pytest.mark.slow
@ONE
def test_the_tables(family_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compression, "TURNS", 3)
    out, picture = tmp_path / "compression.json", tmp_path / "compression.png"
    setup = dataclasses.replace(SETUP, model=str(family_checkpoint))
    compression.measure(setup, out=out, picture=picture, **SETTINGS)
    found = json.loads(out.read_text())
    # Prompts are images, their marks, and text that is longer where there are fewer of these.
    cells = [(tokens + 80, answers) for tokens in SETUP.lengths for answers in SETUP.answers]
    rows = {(row["prompt"], row["answers"], row["K, V"]): row for row in found["rows"]}
    assert list(rows) == [(*cell, way) for cell in cells for way in WAYS]
    requests = {(row["prompt"], row["K, V"]): row for row in found["requests"]}
    assert list(requests) == [(tokens + 80, way) for tokens in SETUP.lengths for way in WAYS]
    for (prompt, answers, way), row in rows.items():
        assert row["prompts"] == "filled"
        assert row["tokens/s"] == pytest.approx(np.median(answers * SETUP.steps / np.array(row["runs"])))
        assert row["times full"] == pytest.approx(row["tokens/s"] / rows[prompt, answers, "full"]["tokens/s"])
        request = requests[prompt, way]
        before = request["first token s"] + request["observe + compact s"]
        assert row["end to end s"] == pytest.approx(answers * (before + 11 / row["tokens/s"]))
        # Memory is taken in pages of 128 tokens: of all layers, or of one.
        page = rows[cells[0][0], 1, "full"]["K, V MB"] / -(-(cells[0][0] + SETUP.steps) // PAGE)
        pages = answers * -(-(prompt + SETUP.steps) // PAGE)
        memory = (pages * page, 0) if way == "full" else (0, answers * page)
        assert (row["K, V MB"], row["compressed MB"]) == pytest.approx(memory)
        assert row["work lists"] == (LAYERS if way.startswith("vl-cache") else 1)
    for (_, way), request in requests.items():
        assert (request["observe + compact s"] > 0) == (way != "full")
        assert request["of prefill %"] == pytest.approx(100 * request["observe + compact s"] / request["prefill s"])
        assert request["kept %"] == pytest.approx(100 if way == "full" else 20, abs=1)
        assert request["end to end s"] > request["first token s"]
    assert len(found["first tokens"]) == 3
    assert np.ptp(np.asarray(Image.open(picture).convert("L"))) > 0
    assert "filled" in capsys.readouterr().out


@pytest.fixture(scope="module")
def filled(family_checkpoint):
    with LLM(family_checkpoint, **SETTINGS) as llm:
        llm.service.ahead.stop()
        compression_filled.fill(llm.service.device.runner)
        yield compression_filled.FilledAnswers(llm, 300, 3, 4)


@pytest.mark.slow
@ONE
def test_what_is_decoded_is_what_is_kept(filled):
    kept = filled.compress((30, 60, 200))
    filled.check(kept)
    filled.check(None)
    assert (filled.run(kept).tokens == filled.run(kept).tokens).all()
    wrong = dataclasses.replace(kept, tokens=[(own + 1) % 300 for own in kept.tokens])
    with pytest.raises(ValueError, match=r"^log-probabilities of 3 answers after 300 tokens must be within"):
        filled.check(wrong)
    filled.give_back(kept)
    with pytest.raises(ValueError, match=r"^compressed_kv_bytes must hold the KV of 3 outputs, got room for"):
        filled.compress((4000, 4000, 4000))


def test_budgets_that_are_drawn_take_four_lists():
    for word, lists in (("vl-cache", 4), ("postvision", 1)):
        counts = drawn_counts(parse_compressor(f"{word}-0.1"), 8192, 12)
        assert len(alike_layers(np.array(counts)[:, None])) == lists
        assert sum(counts) == pytest.approx(12 * 819, abs=12)


def answer(tokens, compression=None):
    outputs = [types.SimpleNamespace(token_ids=tuple(tokens))]
    return types.SimpleNamespace(
        outputs=outputs, num_cached_tokens=7, prompt_token_ids=range(8), compression=compression
    )  # fmt: skip


def test_what_is_no_answer_is_not_measured():
    told = types.SimpleNamespace(bytes=10, bytes_full=100)
    cold, tenth = answer([1]), parse_compressor("vl-cache-0.1")
    check_request([answer([1, 2, 3])], cold, None, 3)
    check_request([answer([1, 2], told), answer([1, 2, 3], told)], cold, tenth, 3)
    for outputs, compressor, message in (
        ([answer([1, 2])], None, "output with the full prompt must have 3 tokens and 7 cached prompt tokens, got 2"),
        ([answer([2, 2, 3])], None, "outputs with the full prompt must begin with the same tokens in every run, got"),
        (
            [answer([1, 2, 4], told), answer([1, 2, 3], told)],
            tenth,
            "outputs with vl-cache-0.1 must begin with the same tokens",
        ),
        ([answer([1, 2, 3])], tenth, "compression report of an output with vl-cache-0.1 must be present, got None"),
        (
            [answer([1, 2, 3], types.SimpleNamespace(bytes=12, bytes_full=100))],
            tenth,
            "vl-cache-0.1 must keep at most a fraction of 0.1 of",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            check_request(outputs, cold, compressor, 3)


def test_first_tokens_are_compared_in_pairs():
    plain, other = first_rows({"plain": [1.0, 2.0, 4.0], "other": [1.001, 2.001, 3.0]})
    assert plain == {"requests": "plain", "TTFT ms": 2000, "least ms": 1000, "in pairs ms": 0, "spread %": 150}
    assert other["in pairs ms"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": (8192, 4096)}, r"lengths must have at least one number, in ascending order, got \(8192, 4096\)"),
        ({"lengths": (2500,)}, "image_tokens must be divisible by"),
        ({"answers": ()}, "answers must have at least one number"),
        ({"budget": 1.0}, "budget must be above 0 and below 1, got 1.0"),
        ({"max_tokens": 8}, "max_tokens must be at least 9, got 8"),
    ],
)
def test_what_is_wrong_is_said(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        CompressionSetup(**wrong)
