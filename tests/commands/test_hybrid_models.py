"""Commands with a model whose layers keep states: what they do not support ends in one line, before weights load."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vlcache_jax.benchmarks.serving import policy_names
from vlcache_jax.commands.cli import app

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
        ("bench accuracy {model}", "reuse is required for qwen3_5, which supports only exact: use --reuse exact"),
        ("bench accuracy {model} --reuse full", LINKS),
    ],
)
def test_what_a_hybrid_does_not_support_is_one_line(checkpoints, tmp_path, words, message):
    words = words.format(model=checkpoints("qwen3_5"), out=tmp_path / "out")
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 1
    *_, last = result.stderr.splitlines()
    assert last.startswith(f"error: {message}"), result.stderr
    assert "loading weights" not in result.stderr


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
