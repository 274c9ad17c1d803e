"""Paired statistics and the tables made of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vlcache_jax.study.accuracy import AccuracyResult, Protocol
from vlcache_jax.study.pairs import cases_of, interval, mean_of, paired, printed, summarize
from vlcache_jax.study.questions import Sample


def test_paired_statistics():
    cold = [True] * 90 + [False] * 10
    other = [True] * 78 + [False] * 12 + [True] * 2 + [False] * 8
    found = paired(cold, other)
    assert found["difference"] == pytest.approx(-10)
    assert found["p"] == pytest.approx(2 * sum([1, 14, 91]) / 2**14)  # 2 of 14 or fewer, both tails
    # Agresti and Min: 12.5 lost and 2.5 won of 102.
    width = 1.96 * np.sqrt(15 - 10**2 / 102) / 102
    assert [found["low"], found["high"]] == pytest.approx([100 * (-10 / 102 - width), 100 * (-10 / 102 + width)], 1e-4)
    # A second auxiliary prompt that changes nothing halves the difference, and no question counts twice.
    twice = paired([cold, cold], [cold, other])
    assert twice["difference"] == pytest.approx(found["difference"] / 2)
    assert twice["p"] == pytest.approx(2 * stats.norm.sf(10 / 14**0.5))
    assert paired([cold, cold], [other, other]) == found
    # Scores may be fractions.
    less = paired([1, 0.75, 0.5, 0], [0.5, 0.75, 0.75, 0])
    assert less["difference"] == pytest.approx(-6.25)
    assert less["p"] == pytest.approx(2 * stats.norm.sf(0.25 / (0.5**2 + 0.25**2) ** 0.5))


def test_where_nothing_differs_the_interval_says_how_many_were_asked():
    few, many = paired([True] * 10, [True] * 10), paired([True] * 1000, [True] * 1000)
    assert (few["difference"], few["p"]) == (0, 1)
    assert -few["low"] == few["high"] == pytest.approx(100 * 1.96 / 12, 1e-4)
    assert many["high"] == pytest.approx(0.196, rel=0.01)
    assert interval(few) == "+0.0 [-16.3, +16.3]"


def test_an_interval_holds_its_own_difference():
    """Few questions draw its middle to 0."""
    few = paired([1, 1, 1, 1, 1], [0, 0, 0, 0, 0])
    assert (few["difference"], few["low"]) == (-100, -100)
    tasks = [few, few, few, paired([1], [1]), paired([1, 1], [1, 1])]
    mean = mean_of(tasks)
    assert mean["low"] <= mean["difference"] == -60
    halves = paired([1], [0.5])
    assert halves["low"] <= halves["difference"] == -50


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Questions of uneven difficulty, of which 4 % are lost and 1 % won; five auxiliary prompts each."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        hard = rng.beta(0.2, 1.8, 100)  # 10 % are wrong in the mean
        change = np.where(rng.random(100) < 0.4 * hard, -1, np.where(rng.random(100) < 0.1 * hard, 1, 0))
        found = paired(np.where(change < 0, 1, 0), np.where(change > 0, 1, 0))
        truth = 100 * (-0.4 * 0.1 + 0.1 * (0.1 - 0.4 * np.mean(0.2 * 1.2 / (2 * 3))))
        held += found["low"] <= truth <= found["high"]
    assert 0.93 <= held / 400 <= 0.99


def test_the_mean_of_tasks_has_the_interval_of_independent_ones():
    found = mean_of([{"difference": -2.0, "low": -5.0, "high": 1.0}, {"difference": 0.0, "low": -4.0, "high": 4.0}])
    assert found == pytest.approx({"difference": -1.0, "low": -1 - 2.5, "high": -1 + 2.5})


def sample(index, task, images=1, **fields):
    return Sample(str(index), task, (b"x",) * images, "Q", ("A",), **fields)


def result(number, score, agree=2):
    return AccuracyResult(number, "", score, 0.5, agree, 2, 10, [2, 0], 5.0, 3_000_000, 0.25)


def test_a_question_of_several_rows_counts_once():
    rows = [sample(i, "t", question_id=name) for i, name in enumerate(["a", "", "a", ""])]
    cold = [result(i, score) for i, score in enumerate([1.0, 1.0, 1.0, 0.5])]
    reused = [result(i, score) for i, score in enumerate([1.0, 1.0, 0.0, 0.5])]
    [case] = cases_of(rows, {Protocol("text_first"): {"off": cold, "full": reused}})
    assert case.scores("full", "t") == [[0, 1, 0.5]]
    details, _ = summarize([case])
    assert [row["questions"] for row in details] == [3, 3]
    assert [row["accuracy"] for row in details] == pytest.approx([250 / 3, 50])
    assert details[1]["difference"] == pytest.approx(-100 / 3)


def test_questions_about_one_image_and_about_several_are_apart():
    rows = [sample(0, "a"), sample(1, "a", 2), sample(2, "b", 3)]
    cold = [result(i, 1.0) for i in range(3)]
    cases = cases_of(
        rows, {Protocol("text_first"): {"off": cold}, Protocol("text_first", donors="apart"): {"off": cold[1:]}}
    )
    assert [(case.images, case.tasks) for case in cases] == [
        ("one", ["a"]),
        ("several", ["a", "b"]),
        ("several", ["a", "b"]),
    ]
    assert [case.title for case in cases] == [
        "new text, one image",
        "new text, several images, cached together",
        "new text, several images, cached separately",
    ]
    assert [row["questions"] for row in summarize(cases)[0]] == [1] * 5


def test_summary_counts_tasks_alike_and_names_the_worst():
    samples = [sample(i, "big" if i < 3 else "small") for i in range(4)]
    protocol = Protocol("text_first")
    cold = [result(i, True) for i in range(4)]
    reused = [result(0, True), result(1, True), result(2, False, 1), result(3, False, 0)]
    details, totals = summarize(cases_of(samples, {protocol: {"off": cold, "full": reused}}))
    assert [row["accuracy"] for row in details] == pytest.approx([100, 100, 100 * 2 / 3, 0])
    assert totals[1]["mean"] == pytest.approx((200 / 3 + 0) / 2)
    assert totals[1]["difference"] == pytest.approx(-100 * 2 / 3)
    assert (totals[1]["worst task"], totals[1]["worst difference"]) == ("small", -100)
    shown = printed(totals[1], ["arrangement", "donors", "images", "big"])
    assert list(shown)[:6] == ["reuse", "small", "questions", "mean", "difference", "worst task"]
    assert shown["difference"] == interval(totals[1])
    assert shown["worst"] == interval(details[3])
    assert shown["logit MSE"] == "0.5"
    assert not {name for name in shown if name.endswith(("low", "high"))}
    assert totals[1]["at most"] == pytest.approx(-details[3]["low"])
    assert totals[1]["agreement"] == pytest.approx((100 * 5 / 6 + 0) / 2)
    assert totals[1]["rows %"] == pytest.approx(20)
    assert totals[1]["rows x layers %"] == pytest.approx(10)
    assert details[2]["image rows by layer"] == pytest.approx([0.2, 0])
    assert (totals[1]["MB read"], totals[1]["ms"]) == pytest.approx((3, 250))
    again = {"off": cold, "full": [result(0, False), *reused[1:]]}
    both = {protocol: {"off": cold, "full": reused}, Protocol("text_first", seed=1): again}
    pooled, _ = summarize(cases_of(samples, both))
    assert [(row["task"], row["auxiliary prompts"]) for row in pooled] == [("big", 2), ("small", 2)] * 2
    assert pooled[2]["difference"] == pytest.approx(-100 * (0.5 + 0 + 1) / 3)


def test_a_task_may_be_called_like_a_column():
    samples = [sample(0, "mean"), sample(1, "questions")]
    cold = [result(0, True), result(1, False)]
    [total] = summarize(cases_of(samples, {Protocol("text_first"): {"off": cold}}))[1]
    assert (total["task mean"], total["task questions"]) == (100, 0)
    assert (total["mean"], total["questions"]) == (50, 2)
