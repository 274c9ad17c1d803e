"""What options of commands do, as the shell has them; each of them stands in a test."""

from __future__ import annotations

import http
import itertools
import json
import pathlib
import re
import threading
import urllib.error
import urllib.request
from dataclasses import fields

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from research import analyze, budgets, mpic, policies
from tests.commands.test_cli import commands
from tests.helper import WORDS
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands.cli import app
from vlcache_jax.config import EngineConfig
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.study.search import LayerScores, find_schedule

TESTS = pathlib.Path(__file__).parents[1]


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def handed(run, monkeypatch):
    """(what is replaced, words of a command) -> what it is called with."""

    def handed(name, *words):
        calls = []
        monkeypatch.setattr(name, lambda *given, **options: calls.append((given, options)))
        result = run(*words)
        assert result.exit_code == 0, result.output
        [call] = calls
        return call

    return handed


def test_every_option_stands_in_a_test():
    """By its spelling; those of `serve` are fields of its configurations, which tests may name as such."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py")))
    spelled, words = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text)), set(re.findall(r"\w+", text))
    of_serve = {field.name for owner in (ServerConfig, EngineConfig, CacheConfig) for field in fields(owner)}
    found, untested = 0, []
    of_research = [((module.__name__,), typer.main.get_command(module.app)) for module in (budgets, mpic, policies)]
    groups = map(typer.main.get_command, (app, analyze.app))
    for path, command in [*itertools.chain(*map(commands, groups)), *of_research]:
        for parameter in command.get_params(typer.Context(command, info_name=path[-1])):
            if parameter.param_type_name != "option" or parameter.name == "help":
                continue
            found += 1
            is_field = path == ("serve",) and parameter.name in of_serve and parameter.name in words
            if not (is_field or spelled & set(parameter.opts)):
                untested.append(" ".join([*path, *parameter.opts]))
    assert found > 200
    assert not untested


def test_only_pictures_of_a_folder_are_read(run, checkpoints, tmp_path, textured_image, few_buckets):
    """`--images-from`: by whichever path they are named."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        Image.fromarray(textured_image(60, 90)).save(folder / "a.png")
    (inside / "link.png").symlink_to(outside / "a.png")
    names = {
        "own": inside / "a.png",
        "other": outside / "a.png",
        "up": inside / ".." / "outside" / "a.png",
        "link": inside / "link.png",
        "beside": f"{inside}-2/a.png",
    }
    rows = [json.dumps({"id": name, "image": str(path), "question": "?"}) for name, path in names.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    words = ("-m", checkpoints("qwen3_vl"), *WORDS, "--max-tokens", 1, "--temperature", 0, "--max-pixels", 8000)
    for out, options, read in (("some", ("--images-from", inside), {"own"}), ("all", (), {*names} - {"beside"})):
        result = run("run", tmp_path / "in.jsonl", tmp_path / out, *words, *options)
        assert result.exit_code == 0, result.output
        answers = {row["id"]: row for row in map(json.loads, (tmp_path / out).read_text().splitlines())}
        assert {name for name, row in answers.items() if not row.get("error")} == read
        if out == "some":
            for name in {*names} - read:
                assert "allowed_local_media_path" in answers[name]["error"], name


@pytest.mark.parametrize("command", ["calibrate", "run", "ask"])
def test_devices_that_there_are_not(run, tmp_path, command, checkpoints):
    (tmp_path / "in.jsonl").write_text('{"question": "?"}\n')
    model = checkpoints("qwen3_vl")
    words = {
        "calibrate": (model,),
        "run": (tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-m", model),
        "ask": ("-m", model, "What?"),
    }[command]
    result = run(command, *words, "--tensor-parallel-size", 2)
    assert result.exit_code == 1
    assert re.search(r"(?m)^error: tensor_parallel_size must be .*, got 2", result.stderr), result.stderr


def test_sizes_of_a_run(handed, run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "?"}\n')
    words = ("run", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    sizes = ("--states-bytes", "1GB", "--device-bytes", "3MB", "--disk", tmp_path / "disk", "--disk-bytes", "5GB")
    [recipe, _], _ = handed("vlcache_jax.commands.run.run", *words, *sizes)
    cache = recipe.options["cache"]
    assert (cache.states_bytes, cache.device_bytes, cache.disk_bytes) == (10**9, 3_000_000, 5_000_000_000)
    for option in ("--states-bytes", "--device-bytes", "--disk-bytes"):
        assert f"error: {option[2:].replace('-', '_')} must be" in run(*words, option, "many").stderr


def test_a_revision_to_convert(run, tmp_path, monkeypatch):
    asked = []

    def convert(*_, revision, **__):
        asked.append(revision)
        raise ValueError("no such model")

    monkeypatch.setattr("vlcache_jax.convert.stream.convert", convert)
    for words in (("--revision", "v2"), ()):
        assert run("convert", "someone/model", tmp_path / "out", *words).stderr.endswith("error: no such model\n")
    assert asked == ["v2", None]
    refused = run("convert", tmp_path, "--check", "--revision", "v2")
    assert "--check takes a converted directory as SOURCE and no other argument" in refused.stderr


def test_sizes_of_measurements(handed):
    apart = "vlcache_jax.commands.bench.run_apart"
    (_, setup), _ = handed(apart, "bench", "ttft", "--layers", 3, "--device-bytes", "2MB")
    assert (setup.layers, setup.device_bytes, setup.sizes) == (3, 2_000_000, ((4, 1024),))
    (_, setup), _ = handed(apart, "bench", "ttft", "-m", "a", "--image-tokens", "64,192", "--tokens", 64)
    assert (setup.model, setup.sizes, setup.codecs) == ("a", ((1, 64), (3, 64)), ("auto",))
    compression = ("bench", "compression", "--layers", 3, "--answers", "2,5", "--steps", 7)
    (_, setup), _ = handed(apart, *compression)
    assert (setup.layers, setup.answers, setup.steps) == (3, (2, 5), 7)
    throughput = ("bench", "throughput", "--max-answer", 9, "--floor")
    (_, load), options = handed("vlcache_jax.benchmarks.throughput.measure", *throughput)
    assert (load.max_answer, options["floor"]) == (9, True)
    serve = ("bench", "serve", "--window", 3, "--turns", 5, "--slo-ttft", 0.5, "--slo-per-token", 0.02)
    (_, _, load), options = handed("vlcache_jax.benchmarks.serving.measure", *serve)
    assert (load.window, load.turns) == (3, 5)
    assert (options["goal"].ttft, options["goal"].per_token) == (0.5, 0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ttft a -m b", "MODEL and --model are mutually exclusive, got a and --model b"),
        ("ttft a --layers 2", "layers must be None if model is set, got 2 and model 'a'"),
        ("ttft --images 2 --image-tokens 64,128", "images and image_tokens are mutually exclusive, got 2 and 64,128"),
        ("ttft --image-tokens 64,x", "image_tokens must be positive integers"),
        ("ttft --device-bytes many", "device_bytes must be a non-negative number of bytes"),
        ("ttft --codec int9", "codec must be"),
        ("compression --lengths 128,64", "lengths must have at least one number, in ascending order, got (128, 64)"),
        ("compression --answers 0", "answers must be positive integers"),
    ],
)
def test_settings_of_measurements_are_checked_before_jax_is_imported(run, words, message):
    result = run("bench", *words.split())
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}")


def test_the_query_that_fills_the_cache(run, monkeypatch):
    """`--auxiliary`."""
    asked = []

    def protocols_of(*_, auxiliary):
        asked.append(auxiliary)
        raise ValueError("enough")

    with monkeypatch.context() as patched:
        patched.setattr("vlcache_jax.study.accuracy.protocols_of", protocols_of)
        for words in (("--auxiliary", "neutral"), ()):
            assert run("bench", "accuracy", *words).stderr == "error: enough\n"
    assert asked == ["neutral", "related"]
    assert "error: auxiliary must be" in run("bench", "accuracy", "--auxiliary", "other").stderr


def test_how_a_schedule_is_searched(run, tmp_path):
    """`--distinct`, `--free-first` and `--noisy`."""
    level = np.arange(151)
    falling = np.stack([(2 + 3 * i) * np.exp(-level / (4 + 12 * i)) for i in range(6)])
    falling[1:] *= 1 + 0.6 * np.cos(0.7 * level)
    falling[:, 0] = falling[0] = 3
    # The first layer is good at level 10 alone, the others from 25 on.
    dip = np.stack([np.where(level == 10, 0.5, 3), *[np.where(level < 25, 3.0, 2.0)] * 2])
    dip[:, 0] = 3

    def solved(values, *words, **options):
        LayerScores(values, "qwen3_vl", "ab", 4).save(tmp_path / "scores.npz")
        words = ("--mean", 0.05 if values is dip else 0.02, "--out", tmp_path / "out.json", *words)
        result = run("schedule", "solve", tmp_path / "scores.npz", *words)
        assert result.exit_code == 0, result.output
        levels = Schedule.load(tmp_path / "out.json").levels
        assert levels == find_schedule(LayerScores.load(tmp_path / "scores.npz"), words[1], **options).levels
        return levels

    usual = solved(falling)
    assert len({*solved(falling, "--distinct", 2, max_distinct=2)}) == 2 < len({*usual})
    free = solved(falling, "--free-first", count_layer0=False)
    assert sum(free[1:]) > sum(usual[1:])
    assert free[0] == free[1]
    smoothed = solved(dip, "--distinct", 1, max_distinct=1)
    assert solved(dip, "--distinct", 1, "--noisy", max_distinct=1, isotonic=False) != smoothed


def test_a_token_for_records(run, tmp_path, monkeypatch):
    """`cache serve --token`: without it clients are refused."""
    from vlcache_jax.cache.tiers.disk import FOLDER
    from vlcache_jax.cache.tiers.peer_server import PeerServer

    (tmp_path / "records" / FOLDER).mkdir(parents=True)
    found, serve = {}, PeerServer.serve_forever

    def asked(server):
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        for token in (None, "other", "secret"):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            host, port = server.address[:2]
            try:
                with urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/", headers=headers)) as got:
                    found[token] = got.status
            except urllib.error.HTTPError as error:
                with error:
                    found[token] = error.code
        server.close()
        thread.join()

    monkeypatch.setattr(PeerServer, "serve_forever", asked)
    result = run("cache", "serve", tmp_path / "records", "--port", 0, "--token", "secret")
    assert result.exit_code == 0, result.output
    assert found[None] == found["other"] == http.HTTPStatus.UNAUTHORIZED != found["secret"]
