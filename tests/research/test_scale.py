"""Simulated engines behind the router that serves: what must come out whatever the figures are."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from research.scale import INDEX_BYTES, Costs, SimulatedRequest, draw, main, play, read, zipf_hits
from tests.cache.records import key, make, write
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.router.affinity import RULES, Affinity, rule_of

pytestmark = pytest.mark.slow  # a tool of the clone

ONE = Costs(request=1.0, compute=0.01, link=0.001, token_bytes=10, bandwidth=1e4, answer=5.0)


def trace(*names, gap=100.0):
    return [SimulatedRequest(gap * i, tuple((name, 100) for name in shown)) for i, shown in enumerate(names)]


def test_a_picture_is_computed_once_and_linked_then():
    played = play(trace("a", "a", "ab"), Affinity(), 1, costs=ONE)
    assert (played.images, played.here, played.elsewhere, played.moved) == (4, 2, 0, 0)
    assert played.seconds == pytest.approx([1 + 1, 1 + 0.1, 1 + 0.1 + 1])
    assert played.waits == [0, 0, 0]


def test_prompts_wait_for_each_other_and_answers_for_nobody():
    played = play(trace("a", "a", "a", gap=0.5), Affinity(), 1, costs=ONE)
    assert played.waits == pytest.approx([0, 2 - 0.5, 3.1 - 1.0])
    assert played.seconds == pytest.approx([2, 2.6, 3.2])


def test_the_oldest_leave_where_there_is_no_room():
    played = play(trace("a", "b", "a", "c", "b"), Affinity(), 1, capacity=200, costs=ONE)
    assert played.here == 1  # a; then c took b's place
    assert play(trace("a", "a"), Affinity(), 1, capacity=99, costs=ONE).here == 0


def test_who_is_passed_by_gives_its_record():
    """Where that is quicker than computing, and only where the rule knows who holds it."""
    rush = [SimulatedRequest(0.0, (("a", 100),)) for _ in range(3)]
    tight = {"engines": 2, "costs": ONE}
    played = play(rush, Affinity(slack=1), **tight)
    assert sorted(played.requests) == [1, 2]
    assert (played.here, played.elsewhere, played.moved) == (1, 1, 1000)
    assert play(rush, Affinity(slack=1), exchange=False, **tight).elsewhere == 0
    slow = Costs(request=1.0, compute=0.01, link=0.001, token_bytes=10, bandwidth=1e3)
    assert play(rush, Affinity(slack=1), engines=2, costs=slow).elsewhere == 0
    assert play(rush, rule_of("least-loaded"), **tight).elsewhere == 0


def test_affinity_finds_more_and_the_bound_spreads():
    drawn = draw(1500, 60.0, pictures=2000, zipf=1.1)
    rows = {rule: play(drawn, rule_of(rule), 8, capacity=2**18).row(8, rule) for rule in RULES}
    assert rows["hash"]["found"] > rows["bounded"]["found"] > rows["round-robin"]["found"] + 0.1
    assert rows["bounded"]["computed"] < rows["least-loaded"]["computed"]
    assert rows["bounded"]["most over mean"] < 1.4 < rows["hash"]["most over mean"]


def test_drawn_requests():
    drawn = draw(2000, 10.0, pictures=100, zipf=1.0, max_images=3, seed=1)
    assert drawn == draw(2000, 10.0, pictures=100, zipf=1.0, max_images=3, seed=1)
    assert drawn[-1].at == pytest.approx(200, rel=0.1)
    counts = [len(request.images) for request in drawn]
    assert (min(counts), max(counts)) == (1, 3)
    shown = [name for request in drawn for name, _ in request.images]
    share = shown.count("picture-0") / len(shown)
    assert share == pytest.approx(1 / np.sum(1 / np.arange(1, 101)), rel=0.1)
    assert zipf_hits(1, 100, 1.0) == pytest.approx(1 / np.sum(1 / np.arange(1, 101)))
    assert zipf_hits(100, 100, 1.0) == pytest.approx(1)


def test_a_file_is_played(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "images": {"a": 64}}\n{"at": 0.5, "images": {}}\n')
    assert read(path) == [SimulatedRequest(0, (("a", 64),)), SimulatedRequest(0.5, ())]
    app = typer.Typer()
    app.command()(main)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = [str(path), "--engines", "1,2", "--out", str(out), "--chart", str(picture)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(out.read_text())
    assert [(row["engines"], row["rule"]) for row in told["rows"]] == [(n, rule) for n in (1, 2) for rule in RULES]
    assert told["trace"] == "trace.jsonl"
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have at least one request, got none"),
        ("{}", "line 1 must be .*at.*seconds.*images.*name.*tokens.*, got"),
        ("[]", "line 1 must be .*at.*seconds.*images.*name.*tokens.*, got"),
        ('{"at": -1, "images": {}}', "line 1 must have a time `at` in seconds and token counts in `images`, got"),
        ('{"at": 1, "images": {"a": 0}}', "line 1 must have a time `at` in seconds and token counts in `images`, got"),
        ('{"at": 1, "images": {}}\n{"at": 0, "images": {}}', "line 2 must not be earlier than the line before, got 0"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engines", "two"], "error: engines must be positive integers like"),
        (["--engines", "9999999"], "error: engines x requests must be at most 5000000, got 9999999 x 2000"),
        (["nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_a_line_says_what_is_wrong(words, said):
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 1
    [line] = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert said in line


def test_an_empty_trace_is_no_result():
    with pytest.raises(ValueError, match="trace must have at least one request, got none"):
        play([], Affinity(), 2).row(2, "bounded")
    assert math.isinf(Affinity(math.inf).limit({"a": 1}))


def test_bytes_of_an_index(tmp_path):
    tier = DiskTier(tmp_path, 10**9)
    for i in range(150):
        write(tier, make(i, layers=4), make(i, context=key(7), layers=36))
    tier.close()
    [index] = tmp_path.rglob("*.sqlite")
    assert index.stat().st_size / 300 == pytest.approx(INDEX_BYTES, rel=0.1)
