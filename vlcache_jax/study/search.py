"""Search for a schedule: the ratio of each layer, from the sensitivities of the layers.

The paper minimizes the sum of the layers' sensitivities under a budget, with ratios that do not increase from layer to
layer (VLCache, eq. 6-9), by a "greedy" search. The layers do not interact in that sum, so a dynamic program solves it
exactly. It is the default. The greedy search is available for comparison.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import pathlib
import zipfile
import zlib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from vlcache_jax.common.files import write_whole
from vlcache_jax.reuse.schedule import UNITS, Schedule

MAX_LEVEL = 150  # 0.3, the largest ratio of the paper's grid
_FORMAT = "vlcache-scores/1"
_LATENCY_STEPS = 2000
_DIGITS = 30
_TIMES = ("rows", "microseconds")


@dataclass(frozen=True, eq=False)
class LayerScores:
    """Sensitivity of each layer: the error of the logits if only that layer recomputes (VLCache, eq. 5).

    Attributes:
      values: S_i(r), float64 [L, levels + 1]; column n has the ratio n / 500.
      model_type: model type of the model.
      fingerprint: digest of the model's source weights.
      samples: number of samples that were averaged.

    Raises:
      ValueError: values are not finite, are negative, or have the wrong shape.
    """

    values: npt.NDArray[np.float64]
    model_type: str
    fingerprint: str
    samples: int

    def __post_init__(self) -> None:
        values = self.values
        if values.ndim != 2 or not values.shape[0] or not 1 < values.shape[1] <= UNITS + 1:
            raise ValueError(f"scores must have the shape [layers, 2 to {UNITS + 1} levels], got {values.shape}")
        if not np.isfinite(values).all() or values.min() < 0:
            bad = np.argwhere(~np.isfinite(values) | (values < 0))[0]
            raise ValueError(
                f"scores must be finite and non-negative, got {values[tuple(bad)]} for layer {bad[0]}, level {bad[1]}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.values)

    @property
    def max_level(self) -> int:
        return self.values.shape[1] - 1

    @property
    def digest(self) -> str:
        """SHA-256 of the values in hexadecimal."""
        return hashlib.sha256(np.ascontiguousarray(self.values, "<f8").tobytes()).hexdigest()

    def isotonic(self) -> LayerScores:
        """Return the running minimum over ratios, which removes noise: no value is above one at a smaller ratio."""
        lowest = np.minimum.accumulate(self.values, axis=1)
        return LayerScores(lowest, self.model_type, self.fingerprint, self.samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of NumPy arrays (npz). The file appears when it is complete."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            format=np.array(_FORMAT),
            values=self.values,
            model_type=np.array(self.model_type),
            fingerprint=np.array(self.fingerprint),
            samples=np.array(self.samples),
        )
        write_whole(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerScores:
        """Read a file that `save` wrote.

        Raises:
          ValueError: it is another kind of file, or its values are invalid.
        """
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                content = {name: file[name] for name in file.files}
        except OSError as error:
            raise ValueError(
                f"scores must be a file written by `vlcache schedule profile`, got {path}: {error}"
            ) from error
        except (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(  # NumPy's message is about pickles
                f"scores must be a file written by `vlcache schedule profile`, got {path}, "
                "which is another kind of file or damaged"
            ) from error
        wanted = {"format", "values", "model_type", "fingerprint", "samples"}
        if set(content) != wanted or str(content["format"]) != _FORMAT:
            raise ValueError(
                f"scores must be a file written by `vlcache schedule profile`, got {path} with {sorted(content)}"
            )
        try:
            return cls(
                content["values"].astype(np.float64),
                str(content["model_type"]),
                str(content["fingerprint"]),
                int(content["samples"]),
            )
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"scores must be a file written by `vlcache schedule profile`, got {path}: {error}"
            ) from error


@dataclass(frozen=True)
class Solution:
    """Levels of a schedule.

    Attributes:
      levels: level of each layer, in units of 1/500.
      value: predicted sum of scores.
      cost: used part of the budget.
    """

    levels: tuple[int, ...]
    value: float
    cost: int


def solve(
    scores: npt.NDArray[np.float64],
    budget: int,
    *,
    costs: npt.NDArray[np.int64] | None = None,
    max_distinct: int | None = None,
    count_layer0: bool = True,
) -> Solution:
    """Return the levels with the smallest sum of scores, which is exact.

    Levels do not increase from layer to layer. Of several optimal choices, the levels are the smallest.

    Args:
      scores: S_i(n) of layer i at level n, [L, N + 1].
      budget: maximum sum of costs.
      costs: cost of layer i at level n, integers [L, N + 1], non-decreasing in n; default: n.
      max_distinct: maximum number of different levels, each of which is a shape to compile; None (default): no limit.
      count_layer0: False if the first layer costs nothing. It computes the tokens that the second layer needs (property
        P7), so the second layer's level has no cost there.

    Raises:
      ValueError: no schedule fits the budget, or an argument is invalid.
    """
    scores, costs = _checked(scores, budget, costs, count_layer0)
    layers, levels = scores.shape
    counters = min(layers, levels) if max_distinct is None else max_distinct
    if counters < 1:
        raise ValueError(f"max_distinct must be at least 1, got {max_distinct}")
    # best[c, n, b]: smallest sum over the layers from here on, with up to c + 1 different levels, first level n, and a
    # cost up to b. Without any layer all are 0, and the first level neither costs nor counts.
    best = np.zeros((counters, levels, budget + 1))
    following: list[npt.NDArray[np.int16]] = []  # per layer: the next layer's level
    for layer in reversed(range(layers)):
        last = layer == layers - 1
        # The next layer has the same level, or a lower one with one more difference; ties take the lower level.
        if last:
            tail, choice = best, np.zeros(best.shape, np.int16)
        else:
            tail, choice = _next_levels(best)
        best = np.full((counters, levels, budget + 1), np.inf)
        for n in range(levels):
            cost = int(costs[layer, n])
            if cost <= budget:
                best[:, n, cost:] = scores[layer, n] + tail[:, n, : budget + 1 - cost]
        following.append(choice)
    following.reverse()
    first = best[counters - 1, :, budget]
    n = int(np.argmin(first))
    value = float(first[n])
    if not np.isfinite(value):
        raise ValueError(
            f"budget must be at least {costs[:, 0].sum()}, the cost of the lowest level in every layer, got {budget}"
        )
    found, left, counter = [n], budget, counters - 1
    for layer in range(layers - 1):
        left -= int(costs[layer, n])
        lower = int(following[layer][counter, n, left])
        counter -= lower != n
        n = lower
        found.append(n)
    return Solution(tuple(found), value, int(costs[np.arange(layers), found].sum()))


def _next_levels(best: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int16]]:
    """Return, for each level n, the best sum of the next layers and the next layer's level.

    That level is n, or a lower one, which leaves one difference less.
    """
    counters, levels, _ = best.shape
    tail, choice = best.copy(), np.empty(best.shape, np.int16)
    choice[:] = np.arange(levels, dtype=np.int16)[:, None]
    lowest = best[:, 0].copy()  # running minimum over the levels below n, and where it is
    where = np.zeros(lowest.shape, np.int16)
    for n in range(1, levels):
        better = lowest[: counters - 1] <= tail[1:, n]
        tail[1:, n] = np.where(better, lowest[: counters - 1], tail[1:, n])
        choice[1:, n] = np.where(better, where[: counters - 1], choice[1:, n])
        lower = best[:, n] < lowest
        lowest = np.where(lower, best[:, n], lowest)
        where = np.where(lower, np.int16(n), where)
    return tail, choice


def solve_greedily(
    scores: npt.NDArray[np.float64],
    budget: int,
    *,
    costs: npt.NDArray[np.int64] | None = None,
    count_layer0: bool = True,
) -> Solution:
    """Return the levels of the paper's "simple greedy" search, which is never better than `solve`.

    A move raises a layer and all layers before it. Each step takes the move with the largest gain per cost that fits
    the budget.

    Args:
      scores, budget, costs, count_layer0: see `solve`.

    Raises:
      ValueError: no schedule fits the budget, or an argument is invalid.
    """
    scores, costs = _checked(scores, budget, costs, count_layer0)
    layers, levels = scores.shape
    found = np.zeros(layers, np.int64)
    each = np.arange(layers)
    left = budget - int(costs[:, 0].sum())
    if left < 0:
        raise ValueError(
            f"budget must be at least {costs[:, 0].sum()}, the cost of the lowest level in every layer, got {budget}"
        )
    while True:
        best: tuple[float, int, int, int] | None = None
        for layer in range(layers):
            for level in range(int(found[layer]) + 1, levels):
                lifted = np.where(each <= layer, np.maximum(found, level), found)
                cost = int((costs[each, lifted] - costs[each, found]).sum())
                gain = float((scores[each, found] - scores[each, lifted]).sum())
                if gain > 0 and cost <= left:
                    move = (-gain / cost if cost else -np.inf, cost, layer, level)
                    best = move if best is None else min(best, move)
        if best is None:
            break
        _, cost, layer, level = best
        found = np.where(each <= layer, np.maximum(found, level), found)
        left -= cost
    return Solution(tuple(found.tolist()), float(scores[each, found].sum()), budget - left)


def _checked(
    scores: npt.NDArray[np.float64], budget: int, costs: npt.NDArray[np.int64] | None, count_layer0: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    if scores.ndim != 2 or 0 in scores.shape or not np.isfinite(scores).all():
        raise ValueError(f"scores must be finite values of shape [layers, levels], got shape {scores.shape}")
    if budget < 0:
        raise ValueError(f"budget must be at least 0, got {budget}")
    if costs is None:
        costs = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    costs = np.array(costs, np.int64)
    if costs.shape != scores.shape or costs.min() < 0 or (np.diff(costs, axis=1) < 0).any():
        raise ValueError(
            f"costs must be non-negative integers of shape {scores.shape} that do not decrease from level to level, "
            f"got shape {costs.shape}"
        )
    if not count_layer0:
        costs[0] = 0
    return scores.astype(np.float64), costs


def find_schedule(
    scores: LayerScores,
    mean: str | float | Fraction,
    *,
    method: str = "dp",
    max_distinct: int | None = 6,
    count_layer0: bool = True,
    isotonic: bool = True,
) -> Schedule:
    """Return the schedule with the smallest predicted error for a mean ratio over the layers.

    Args:
      scores: sensitivities of the model.
      mean: maximum mean ratio of all layers; a decimal is used exactly.
      method: "dp" (default, exact) or "greedy" (the paper's).
      max_distinct: maximum number of different ratios; "greedy" ignores it; None: no limit.
      count_layer0: see `solve`.
      isotonic: True (default) smooths the scores first (`LayerScores.isotonic`).

    Raises:
      ValueError: `mean` is negative or above the largest ratio of the scores, or another argument is invalid.
    """
    try:
        number = mean if isinstance(mean, Fraction) else Decimal(str(mean))
    except InvalidOperation as error:
        raise ValueError(f"mean must be a number, got {mean!r}") from error
    if isinstance(number, Decimal) and not (number.is_finite() and -_DIGITS <= number.adjusted() <= _DIGITS):
        raise ValueError(f"mean must be a number of at most {_DIGITS} digits, got {mean}")
    ratio = Fraction(number)
    max_ratio = Fraction(scores.max_level, UNITS)
    if not 0 <= ratio <= max_ratio:
        raise ValueError(f"mean must be from 0 to {float(max_ratio):g}, the largest ratio of the scores, got {mean}")
    if method not in ("dp", "greedy"):
        raise ValueError(f"method must be 'dp' or 'greedy', got {method!r}")
    budget = int(ratio * UNITS * scores.num_layers)
    values = (scores.isotonic() if isotonic else scores).values
    if method == "dp":
        solution = solve(values, budget, max_distinct=max_distinct, count_layer0=count_layer0)
    else:
        solution = solve_greedily(values, budget, count_layer0=count_layer0)
    made_by = {
        "method": method,
        "scores_sha256": scores.digest,
        "predicted_mse": solution.value,
        "samples": scores.samples,
    }
    return Schedule(solution.levels, scores.model_type, scores.fingerprint, made_by=made_by)


@dataclass(frozen=True)
class LayerTimes:
    """Time of a layer at each size that it is compiled for.

    Attributes:
      rows: numbers of tokens, ascending.
      microseconds: time of a layer for each number of tokens, non-decreasing.

    Raises:
      ValueError: sizes or times are not ascending integers, or there are none.
    """

    rows: tuple[int, ...]
    microseconds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.microseconds):
            raise ValueError(
                f"rows and microseconds must be non-empty lists of the same length, "
                f"got {self.rows} and {self.microseconds}"
            )
        for name, values, min_value in (("rows", self.rows, 1), ("microseconds", self.microseconds, 0)):
            numbers = all(type(value) is int and value >= min_value for value in values)
            if not numbers or not all(a <= b for a, b in itertools.pairwise(values)):
                raise ValueError(f"{name} must be ascending integers of at least {min_value}, got {values}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerTimes:
        """Read a file of `vlcache schedule times`.

        Raises:
          ValueError: it is another kind of file, or its values are invalid.
        """
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or not all(isinstance(content.get(name), list) for name in _TIMES):
                raise ValueError(f"it must have the lists {' and '.join(_TIMES)}")
            return cls(tuple(content["rows"]), tuple(content["microseconds"]))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"times must be a file written by `vlcache schedule times`, got {path}: {error}"
            ) from error

    def costs(self, num_layers: int, max_level: int, *, image_tokens: int, text_rows: int) -> npt.NDArray[np.int64]:
        """Return the microseconds of each layer at each level, [L, max_level + 1], for a prompt with one image.

        Args:
          num_layers: number of layers.
          max_level: largest level, in units of 1/500.
          image_tokens: number of image tokens in the prompt.
          text_rows: number of text tokens in the prompt.

        Raises:
          ValueError: the largest level needs more tokens than the largest measured size.
        """
        level = np.arange(max_level + 1)
        rows = text_rows + level * image_tokens // UNITS
        if rows[-1] > self.rows[-1]:
            raise ValueError(
                f"times must cover {rows[-1]} tokens, got up to {self.rows[-1]}; run `vlcache schedule times` again"
            )
        times = np.array(self.microseconds)[np.searchsorted(self.rows, rows)]
        return np.broadcast_to(times, (num_layers, max_level + 1)).astype(np.int64)


def find_schedule_within(
    scores: LayerScores,
    microseconds: int,
    times: LayerTimes,
    *,
    image_tokens: int,
    text_rows: int,
    max_distinct: int | None = 6,
    isotonic: bool = True,
) -> Schedule:
    """Return the schedule with the smallest predicted error for a time of all layers (resolution: 1/2000 of it).

    Args:
      scores: sensitivities of the model.
      microseconds: maximum time of all layers.
      times: measured time of a layer.
      image_tokens: number of image tokens in the prompt that the schedule is made for.
      text_rows: number of text tokens in that prompt.
      max_distinct, isotonic: see `find_schedule`.

    Raises:
      ValueError: `microseconds` is below the time of full reuse, or another argument is invalid.
    """
    costs = times.costs(scores.num_layers, scores.max_level, image_tokens=image_tokens, text_rows=text_rows)
    if microseconds < (min_cost := int(costs[:, 0].sum())):
        raise ValueError(f"microseconds must be at least {min_cost}, the time of full reuse, got {microseconds}")
    unit = max(1, microseconds // _LATENCY_STEPS)
    values = (scores.isotonic() if isotonic else scores).values
    # The first layer computes the tokens that the second layer needs, so it has the second layer's level.
    solution = solve(values, microseconds // unit, costs=-(-costs // unit), max_distinct=max_distinct)
    made_by = {
        "method": "dp",
        "scores_sha256": scores.digest,
        "predicted_mse": solution.value,
        "samples": scores.samples,
    }
    return Schedule(solution.levels, scores.model_type, scores.fingerprint, made_by=made_by)
