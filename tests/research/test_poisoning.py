"""`research.poisoning`: the search, the attacker's prompts, and what the rule for donors keeps out."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from research import poisoning
from research.donors import ARRANGEMENTS, NEUTRAL, Linked, load_decoys
from research.poisoning import ALL, BEST, NATURAL, REFUSED, Victims, best_of
from vlcache_jax import BucketSizes
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.study.report import WorkLog

DECOYS = 40
BUCKETS = BucketSizes(rows=(256,), patches=(1024,), sequences=(4,))  # few programs


def score(prefix):
    return len(prefix) + sum(kind == "image" for kind, _ in prefix) / 10


def test_the_search_never_gets_worse_and_changes_one_piece(tmp_path):
    tried = poisoning.search(score, DECOYS, WorkLog(None, ""), randoms=20, greedy=40)
    best = [best_of(tried[: k + 1]) for k in range(len(tried))]
    assert all(one.score <= other.score for one, other in itertools.pairwise(best))
    assert best[-1].score > best[19].score
    for parent, one in zip(best[19:-1], tried[20:], strict=True):
        shared = max(
            sum(a == b for a, b in zip(x, y, strict=False))
            for x in _with_gap(parent.prefix) for y in _with_gap(one.prefix)
        )  # fmt: skip
        assert shared >= len(parent.prefix) - 1
        assert 1 <= len(one.prefix) <= poisoning.MOST_PIECES
    assert poisoning.progress_of(tried, 20)[-1]["best KL"] == best[-1].score


def _with_gap(prefix):
    return [prefix, *((*prefix[:k], None, *prefix[k:]) for k in range(len(prefix)))]


def test_a_resumed_search_equals_one_in_one_go(tmp_path):
    work, asked = tmp_path / "search.work", []

    def counted(prefix):
        asked.append(prefix)
        return score(prefix)

    once = poisoning.search(score, DECOYS, WorkLog(None, ""), randoms=6, greedy=8)
    poisoning.search(score, DECOYS, WorkLog(work, ""), randoms=6, greedy=3)
    assert poisoning.search(counted, DECOYS, WorkLog(work, ""), randoms=6, greedy=8) == once
    assert asked == [one.prefix for one in once[9:]]


def test_the_image_ends_the_attackers_prompt():
    decoys = load_decoys(5)
    prefix = (("image", 3), ("turn", 1), ("system", "A"), ("text", "Look."), ("system", "B"))
    system, asked, answered, last = poisoning.attack(prefix, b"x", decoys)
    assert system == {"role": "system", "content": "A\nB"}
    assert asked["content"] == [
        {"type": "image", "image": decoys[1].images[1]}, {"type": "text", "text": decoys[1].question}
    ]  # fmt: skip
    assert answered == {"role": "assistant", "content": decoys[1].answers[0]}
    assert last["content"] == [{"type": "text", "text": "Look.\n"}, {"type": "image", "image": b"x"}]
    rng = np.random.default_rng(0)
    for _ in range(50):
        last = poisoning.attack(poisoning.draw_prefix(rng, 5), b"x", decoys)[-1]
        assert last["content"][-1] == {"type": "image", "image": b"x"}


def test_the_rule_keeps_the_attacker_out(tmp_path):
    """Also one whose prefix is a system message only, after which the image begins a user's message."""
    decoys = load_decoys(5)
    own, one, several = (
        Victims(name, load_samples([], questions=1, split=split, images=count)[-1:], decoys)
        for name, split, count in (("search", "search", 1), ("one", "test", 1), ("several", "test", 2))
    )
    of = {"randoms": 2, "greedy": 1, "buckets": BUCKETS, "max_model_len": 2048}
    victims = {"one": one, "several": several}
    work = tmp_path / "poisoning.work"
    rows, tried = poisoning.run(victims, own, ["full"], "full", lambda llm: WorkLog(work, llm.fingerprint), **of)
    assert len(tried) == 3
    kl = {tuple(row[name] for name in ("images", "context", "donors")): row["mean KL"] for row in rows}
    assert len(kl) == len(rows) == 2 * 2 * 5
    for images, order in itertools.product(victims, ARRANGEMENTS):
        assert kl[images, order, REFUSED] == pytest.approx(kl[images, order, NEUTRAL], abs=1e-4)
        assert kl[images, order, BEST] != pytest.approx(kl[images, order, NEUTRAL], rel=1e-2)
    assert kl["one", "image_first", NEUTRAL] < 1e-10 < kl["one", "image_first", NATURAL]
    assert kl["one", "text_first", ALL] != kl["several", "text_first", ALL]  # one log, and two sets of questions
    again, _ = poisoning.run(victims, own, ["full"], "full", lambda llm: WorkLog(work, llm.fingerprint), **of)
    assert again == rows


def test_an_attacker_who_comes_through_is_an_error():
    found = Linked(0, 1.0, False, 0.0, 1e-3, "yes")
    results = {(NEUTRAL, "text_first", "full"): [found], (REFUSED, "text_first", "full"): [found]}
    poisoning.check_refused(results)
    for wrong in ({"text": "no"}, {"kl": 2e-3}):
        results[REFUSED, "text_first", "full"] = [dataclasses.replace(found, **wrong)]
        with pytest.raises(ValueError, match="question 0 under full must have the same answer and KL"):
            poisoning.check_refused(results)
