"""`research.donors`: from which KV images are linked, the figures, and the table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from research import donors
from vlcache_jax import LLM, BucketSizes, CacheConfig
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.study.accuracy import COLD, Protocol
from vlcache_jax.study.report import WorkLog

BUCKETS = BucketSizes(rows=(256,), patches=(1024,), sequences=(4,))  # few programs


@pytest.fixture(scope="module")
def llm():
    cache = CacheConfig(load="kv")
    with LLM(TINY_VQA, cache=cache, enable_prefix_caching=False, buckets=BUCKETS, max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def samples():
    """A question about one image, and one about two."""
    return [load_samples([], questions=1, images=count)[0] for count in (1, 2)]


@pytest.fixture(scope="module")
def decoys():
    return donors.load_decoys(5)


FULL = donors.policies_of(["full"])


def test_every_kind_has_its_own_donors_and_a_resumed_run_equals_one_in_one_go(llm, samples, decoys, tmp_path):
    work = tmp_path / "donors.work"
    once = donors.measure(llm, samples, decoys, FULL, WorkLog(work, "one"))
    kinds = {(order, kind) for order, kind, _ in once}
    assert kinds == {(order, kind) for order in donors.ARRANGEMENTS for kind in (COLD, *donors.KINDS)}
    assert [one.sample for one in once["text_first", donors.NUMBERED, "full"]] == [1]
    # Where the image stands in the same context, its KV is exact; everywhere else it is not.
    [same, _] = once["image_first", donors.NEUTRAL, "full"]
    [new, _] = once["text_first", donors.NEUTRAL, "full"]
    assert same.kl < 1e-10 < new.kl
    numbered, neutral = (once["text_first", kind, "full"][-1] for kind in (donors.NUMBERED, donors.NEUTRAL))
    assert numbered.squared_error < neutral.squared_error / 2
    [single, _] = once["image_first", donors.MISNUMBERED, "full"]
    assert single.kl > 10 * new.kl  # the model looks for a second image
    lines = work.read_text().splitlines(keepends=True)
    work.write_text("".join(lines[: len(lines) // 2]) + '["one", "cut')
    again = donors.measure(llm, samples, decoys, FULL, WorkLog(work, "one"))
    for case, found in once.items():
        for one, other in zip(found, again[case], strict=True):
            assert (one.sample, one.score, one.changed, one.text) == (
                other.sample,
                other.score,
                other.changed,
                other.text,
            )
            assert (one.squared_error, one.kl) == pytest.approx((other.squared_error, other.kl), rel=1e-3, abs=1e-9)
    rows = donors.table(samples, once)
    assert [row["donors"] for row in rows] == 2 * [*donors.KINDS[:4], donors.MISNUMBERED, *donors.KINDS]
    assert all(row["KL over neutral"] == 0 for row in rows if row["donors"] == donors.NEUTRAL)
    assert donors.printed(rows[-1])["donors"] == donors.MISNUMBERED


def test_the_newest_of_three_contexts_is_linked(llm, samples, decoys):
    protocol = Protocol("text_first")
    prompts = donors.DonorPrompts(donors.NEWEST, protocol, decoys)
    rounds = prompts.rounds(samples, 1)
    assert [len(prompts) for prompts in rounds] == [2, 2, 2]
    cold = donors.ask_cold(llm, samples, protocol, [1])
    expected = {2: prompts.expected(2)}

    def kl(*rounds):
        donors.cache(llm, rounds)
        [found] = donors.link(llm, samples, protocol, [1], cold, FULL["full"], expected)
        return found.kl

    newest, last, first = kl(*rounds), kl(rounds[-1]), kl(rounds[0])
    assert newest == pytest.approx(last, rel=1e-4)
    assert newest != pytest.approx(first, rel=1e-2)
    neutral = dataclasses.replace(prompts, kind=donors.NEUTRAL)
    donors.cache(llm, [*rounds, *neutral.rounds(samples, 1)])  # a neutral donor is linked before others
    with pytest.raises(ValueError, match=r"images of question 0 must be linked as \[\('approximate', 'own'\), "):
        donors.link(llm, samples, protocol, [1], cold, FULL["full"], expected)


def test_numbers_are_those_of_the_prompt_or_others(samples):
    def contents(kind, i):
        [found] = donors.DonorPrompts(kind, Protocol("text_first"), ()).rounds(samples, i)
        return [content for [one] in found for content in one["content"]]

    [part] = Protocol("image_first").formal(samples, 1)
    assert contents(donors.NUMBERED, 1) == part["content"][:4]
    one, first, two, second = part["content"][:4]
    assert contents(donors.MISNUMBERED, 1) == [two, first, one, second]
    assert contents(donors.MISNUMBERED, 0) == [one, {"type": "image", "image": samples[0].images[0]}]
    with pytest.raises(ValueError, match="images of question 0 must be numbered"):
        contents(donors.NUMBERED, 0)


def test_intervals():
    assert donors.mean_interval([2.0] * 5, "KL") == {"KL": 2, "KL low": 2, "KL high": 2}
    found = donors.mean_interval(np.arange(100), "KL")
    assert found["KL low"] == pytest.approx(49.5 - 5.7, abs=0.5)
    assert found["KL high"] == pytest.approx(49.5 + 5.7, abs=0.5)
