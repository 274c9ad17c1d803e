"""Commands with a model whose layers keep states: what they do not support ends in one line, before weights load."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from vlcache_jax.benchmarks.serving import policy_names
from vlcache_jax.commands.cli import app
from vlcache_jax.device import kv_shape
from vlcache_jax.reuse.edges import Edges
from vlcache_jax.reuse.selection import APPROXIMATE_WITH_STATES, parse_policy
from vlcache_jax.study import accuracy

KEEPS_KV = "must keep KV in each layer, got qwen3_5: its layers with linear attention keep a state"
LINKS = "reuse must be 'exact' or 'off' for qwen3_5, got 'full'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("schedule times {model} --out {out}", f"model of `vlcache schedule` {KEEPS_KV}"),
        ("schedule profile {model} --samples 1 --out {out}", f"model of `vlcache schedule` {KEEPS_KV}"),
        ("bench throughput {model} --reuse off --reuse full", LINKS),
        ("bench serve --model {model} --policies full", LINKS),
        ("bench serve --model {model} --policies schedule", "reuse must be 'exact' or 'off' for qwen3_5, got 'sched"),
        ("bench ttft {model} --ratios 1.5", "ratios must be numbers above 0 and below 1 like \"0.1,0.2\", got '1.5'"),
        (
            "bench accuracy {model} --reuse full --reuse 0.1",
            "reuse must be one approximate mode for qwen3_5, got full, 0.1: an engine of a model with linear attention",
        ),
        (
            "bench accuracy {model} --reuse shift-0.1",
            "reuse must be 'exact', 'off', or a policy that computes the first",
        ),
        (
            "bench accuracy {model} --reuse exact",
            "reuse must be an approximate mode (approximate, full, a ratio, a sche",
        ),
    ],
)
def test_what_a_hybrid_does_not_support_is_one_line(checkpoints, tmp_path, words, message):
    words = words.format(model=checkpoints("qwen3_5"), out=tmp_path / "out")
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 1
    *_, last = result.stderr.splitlines()
    assert last.startswith(f"error: {message}"), result.stderr
    assert "loading weights" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name", "policy"),
    [("--reuse ends-0.5", "ends-0.5", "ends-0.5"), ("", "approximate", APPROXIMATE_WITH_STATES)],
)
def test_accuracy_of_a_hybrid_has_an_engine_of_its_mode(
    hybrid, questions_tsv, tmp_path, monkeypatch, words, name, policy
):
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 1)
    opened = []
    run = accuracy.run
    monkeypatch.setattr(accuracy, "run", lambda llm, *args, **options: opened.append(llm) or run(llm, *args, **options))
    out = tmp_path / "out.json"
    command = f"bench accuracy {hybrid} {words} --data {questions_tsv} --context same --context new-text --max-tokens 2"
    result = CliRunner().invoke(app, [*command.split(), "--dtype", "float32", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [llm.service.policy.name for llm in opened] == [policy]
    rows = {(row["arrangement"], row["reuse"]): row for row in json.loads(out.read_text())["totals"]}
    assert [*rows] == [(order, reuse) for order in ("image_first", "text_first") for reuse in ("off", name)]
    first, last = Edges(parse_policy(policy), 3).counts(12)  # of an image of 3 x 4 tokens
    for (order, reuse), row in rows.items():
        computed = 12 if reuse == "off" else 0 if order == "image_first" else first + last
        assert row["rows %"] == row["rows x layers %"] == pytest.approx(100 * computed / 12)
        assert (row["MB read"] == 0) == (reuse == "off")
        assert row["questions"] == 3
    assert rows["image_first", name]["logit MSE"] < 1e-9 < rows["text_first", name]["logit MSE"]


def test_accuracy_of_images_that_are_not_stored_is_an_error(hybrid, questions_tsv):
    command = f"bench accuracy {hybrid} --reuse full --data {questions_tsv} --context new-text --max-tokens 1"
    result = CliRunner().invoke(app, command.split())
    *_, last = result.stderr.splitlines()
    assert last == (
        "error: images of row 0 with reuse full must be approximate cache hits, got miss; an image of this model is "
        "stored if it has at least 256 tokens"
    )


def test_compression_of_a_hybrid_is_one_line(checkpoints):
    from vlcache_jax.benchmarks.compression import measure
    from vlcache_jax.benchmarks.settings import CompressionSetup

    with pytest.raises(ValueError, match=f"model of `vlcache bench compression` {KEEPS_KV}"):
        measure(CompressionSetup(model=str(checkpoints("qwen3_5"))))


def test_all_modes_of_a_server_are_those_of_its_model(checkpoints, capsys):
    assert policy_names("all", str(checkpoints("qwen3_5"))) == ("off", "exact")
    assert "not measured: full, cacheblend-0.15, mpic-32, schedule, approximate: qwen3_5" in capsys.readouterr().err
    assert policy_names("all", str(checkpoints("qwen3_vl"))) == policy_names("all")
    assert policy_names("exact", str(checkpoints("qwen3_5"))) == ("off", "exact")


def test_a_hybrid_is_described(checkpoints):
    result = CliRunner().invoke(app, ["info", str(checkpoints("qwen3_5"))])
    assert result.exit_code == 0, result.output
    assert "per running sequence, of 3 layers" in result.stdout


def test_requests_of_a_file_link_images_of_other_contexts(hybrid, tmp_path, monkeypatch):
    """The engine that `vlcache run` opens has the reuse mode of the requests."""
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 1)
    lines = [{"image": "p.png", "question": text} for text in ("What is it?", "And where?")]
    Image.effect_noise((96, 128), 50).convert("RGB").save(tmp_path / "p.png")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    words = ["run", str(tmp_path / "in.jsonl"), str(out), "--model", str(hybrid), "--reuse", "approximate"]
    result = CliRunner().invoke(app, [*words, "--max-tokens", "2", "--max-model-len", "256"])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["error"] for line in out.read_text().splitlines()] == [None, None]
