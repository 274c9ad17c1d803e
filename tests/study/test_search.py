"""The search for schedules: the specification's example, brute force, and what is refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.search import LayerScores, LayerTimes, find_schedule, find_schedule_within, solve, solve_greedily

EXAMPLE = np.array([[10, 10, 10, 10], [10, 7, 6, 5.5], [10, 9.5, 5, 4.8]])


@pytest.mark.parametrize(
    ("budget", "value", "levels"),
    [
        (2, 27.0, (1, 1, 0)),
        (3, 26.5, (1, 1, 1)),
        (4, 26.0, (2, 2, 0)),
        (5, 25.5, (2, 2, 1)),
        (6, 21.0, (2, 2, 2)),
        (9, 20.3, (3, 3, 3)),
    ],
)
def test_the_worked_example(budget, value, levels):
    found = solve(EXAMPLE, budget)
    assert (found.levels, found.cost) == (levels, sum(levels))
    assert found.value == pytest.approx(value)
    greedy = solve_greedily(EXAMPLE, budget)
    value, levels = (26.5, (1, 1, 1)) if budget == 4 else (value, levels)  # where it is not the best
    assert (greedy.levels, greedy.cost) == (levels, sum(levels))
    assert greedy.value == pytest.approx(value)


def brute_force(scores, budget, costs, max_distinct):
    layers, levels = scores.shape
    best = np.inf
    for found in itertools.combinations_with_replacement(range(levels - 1, -1, -1), layers):
        within = sum(costs[i, n] for i, n in enumerate(found)) <= budget
        if within and (max_distinct is None or len(set(found)) <= max_distinct):
            best = min(best, sum(scores[i, n] for i, n in enumerate(found)))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_programme_is_exact_and_greedy_is_never_better(seed):
    rng = np.random.default_rng(seed)
    layers, levels = rng.integers(1, 6), rng.integers(2, 6)
    scores = rng.random((layers, levels)) * rng.choice([1, 1e-6, 1e6])
    if seed % 3 == 0:
        scores = np.round(scores, 1)  # ties
    costs = np.broadcast_to(np.arange(levels), scores.shape).copy()
    if seed % 2:
        costs = np.cumsum(rng.integers(0, 4, scores.shape), axis=1)
    count_layer0 = bool(seed % 5)
    charged = costs.copy()
    charged[0] *= count_layer0
    least = int(charged[:, 0].sum())
    for budget in range(least, int(charged[:, -1].sum()) + 2):
        for max_distinct in (None, 1, 2, 3):
            found = solve(scores, budget, costs=costs, max_distinct=max_distinct, count_layer0=count_layer0)
            expected = brute_force(scores, budget, charged, max_distinct)
            assert found.value == pytest.approx(expected)
            assert list(found.levels) == sorted(found.levels, reverse=True)
            assert found.cost == sum(charged[i, n] for i, n in enumerate(found.levels)) <= budget
            assert max_distinct is None or len(set(found.levels)) <= max_distinct
        greedy = solve_greedily(scores, budget, costs=costs, count_layer0=count_layer0)
        exact = solve(scores, budget, costs=costs, count_layer0=count_layer0)
        assert greedy.value >= exact.value - 1e-9 * abs(exact.value)
        assert list(greedy.levels) == sorted(greedy.levels, reverse=True)
        assert greedy.cost <= budget
    if least:
        for search in (solve, solve_greedily):
            with pytest.raises(
                ValueError, match=f"at least {least}, the cost of the lowest level in every layer, got {least - 1}"
            ):
                search(scores, least - 1, costs=costs, count_layer0=count_layer0)


def test_equal_scores_take_the_smallest_levels():
    assert solve(np.ones((4, 6)), 20).levels == (0, 0, 0, 0)
    assert solve_greedily(np.ones((4, 6)), 20).levels == (0, 0, 0, 0)


def scores(values, **other):
    return LayerScores(
        np.asarray(values, float), **{"model_type": "qwen3_vl", "fingerprint": "ab", "samples": 4, **other}
    )


def falling(layers=36):
    n = np.arange(151)
    return scores(np.stack([(2 + i % 3) * np.exp(-n / (5 + 40 * (i < layers // 2))) for i in range(layers)]))


@pytest.mark.slow
def test_a_schedule_from_scores(tmp_path):
    found = find_schedule(falling(), "0.025")
    assert found.mean <= 25 / 1000
    assert found.mean > 0.0245
    assert len(set(found.levels)) <= 6
    assert found.made_by["method"] == "dp"
    assert found.made_by["samples"] == 4
    found.save(tmp_path / "schedule.json")
    assert Schedule.load(tmp_path / "schedule.json") == found
    greedy = find_schedule(falling(), "0.025", method="greedy")
    free = find_schedule(falling(), "0.025", max_distinct=None)
    assert free.made_by["predicted_mse"] <= found.made_by["predicted_mse"]
    assert free.made_by["predicted_mse"] <= greedy.made_by["predicted_mse"] + 1e-12
    assert find_schedule(falling(), "0").levels == (0,) * 36
    assert find_schedule(falling(), "0.3").levels[1] == 150


def test_the_first_layer_may_be_free():
    counted, free = (find_schedule(falling(4), "0.05", count_layer0=flag) for flag in (True, False))
    assert free.made_by["predicted_mse"] < counted.made_by["predicted_mse"]
    assert sum(free.levels[1:]) <= 100


def test_noise_is_smoothed():
    noisy = scores([[1, 1, 1], [5, 2, 3]])
    assert noisy.isotonic().values.tolist() == [[1, 1, 1], [5, 2, 2]]
    assert find_schedule(noisy, "0.003", isotonic=False).levels == (1, 1)


def test_scores_are_saved_and_loaded(tmp_path):
    path = tmp_path / "scores.npz"
    falling(5).save(path)
    again = LayerScores.load(path)
    assert np.array_equal(again.values, falling(5).values)
    assert (again.model_type, again.fingerprint, again.samples) == ("qwen3_vl", "ab", 4)
    assert again.digest == falling(5).digest != falling(6).digest
    assert [file.name for file in tmp_path.iterdir()] == ["scores.npz"]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="scores must be a file written by `vlcache schedule profile`"):
        LayerScores.load(path)
    np.savez(path, values=np.ones(3))
    with pytest.raises(ValueError, match="scores must be a file written by `vlcache schedule profile`"):
        LayerScores.load(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, np.nan]], "finite and non-negative, got nan for layer 0, level 1"),
        ([[1, 2], [np.inf, 1]], "got inf for layer 1, level 0"),
        ([[1, -1e-9]], "finite and non-negative"),
        ([1, 2], "must have the shape"),
        (np.ones((2, 600)), "must have the shape"),
    ],
)
def test_values_that_are_no_scores(values, message):
    with pytest.raises(ValueError, match=message):
        scores(values)


@pytest.mark.parametrize("mean", ["-0.01", "0.301", "nan", "much", "1e999", float("inf")])
def test_means_off_the_grid(mean):
    with pytest.raises(ValueError, match="mean must be"):
        find_schedule(falling(3), mean)


TIMES = LayerTimes((64, 128, 512), (30, 40, 100))


def test_times_follow_the_sizes_that_are_compiled():
    costs = TIMES.costs(2, 150, image_tokens=1000, text_rows=64)
    assert costs.shape == (2, 151)
    # Levels are 2 of 1000 tokens each: 64 rows hold the text alone, 128 rows 32 levels more.
    assert costs[:, 0].tolist() == [30, 30]
    assert set(costs[0, 1:33]) == {40}
    assert set(costs[0, 33:]) == {100}
    with pytest.raises(ValueError, match="times must cover 364 tokens, got up to 128"):
        LayerTimes((64, 128), (30, 40)).costs(2, 150, image_tokens=1000, text_rows=64)


@pytest.mark.parametrize("microseconds", [180, 190, 240, 330, 600])
def test_a_schedule_within_a_time(microseconds):
    layers = falling(6)
    found = find_schedule_within(layers, microseconds, TIMES, image_tokens=1000, text_rows=64, max_distinct=None)
    took = [30 if level == 0 else 40 if level <= 32 else 100 for level in found.levels]
    assert sum(took) <= microseconds
    # Inside a size that is paid for, more rows cost nothing: only the largest of each size can be best.
    best = min(
        sum(layers.values[i, n] for i, n in enumerate(levels))
        for levels in itertools.combinations_with_replacement((150, 32, 0), 6)
        if sum({0: 30, 32: 40, 150: 100}[n] for n in levels) <= microseconds
    )
    assert found.made_by["predicted_mse"] == pytest.approx(best)


def test_a_time_too_short():
    with pytest.raises(ValueError, match="microseconds must be at least 180, the time of full reuse, got 179"):
        find_schedule_within(falling(6), 179, TIMES, image_tokens=1000, text_rows=64)


def test_times_are_read(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"rows": [64, 128, 512], "microseconds": [30, 40, 100]}))
    assert LayerTimes.load(path) == TIMES
    for content in ("{}", "[]", "no", '{"rows": [64], "microseconds": [1, 2]}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="times must be a file written by `vlcache schedule times`, got "):
            LayerTimes.load(path)


@pytest.mark.parametrize(
    ("rows", "microseconds", "message"),
    [
        ((), (), "lists of the same length"),
        ((64, 32), (1, 2), "rows must be ascending integers of at least 1"),
        ((0, 32), (1, 2), "rows must be ascending integers of at least 1"),
        ((32, 64), (2, 1), "microseconds must be ascending integers of at least 0"),
        ((32, 64), (1.5, 2), "microseconds must be ascending integers"),
    ],
)
def test_times_that_are_none(rows, microseconds, message):
    with pytest.raises(ValueError, match=message):
        LayerTimes(rows, microseconds)
