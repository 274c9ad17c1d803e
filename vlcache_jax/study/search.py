"""The search for a schedule: which layers should recompute how much, given what each layer gains from it.

The paper minimises the sum of the layers' sensitivities under a budget, with ratios that do not increase from layer to
layer (VLCache, eq. 6-9), and says "greedy". The layers do not interact in that sum, so a dynamic programme solves it
exactly; it is the default, and the greedy search is kept for comparison.
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
    """The sensitivity of each layer: the error of the logits if only that layer recomputes (VLCache, eq. 5).

    Attributes:
      values: S_i(r), float64 [L, levels + 1]; column n is the ratio n / 500.
      model_type, fingerprint: of the model; the fingerprint is that of the source's weights.
      samples: how many were averaged.

    Raises:
      ValueError: values that are not finite or negative, or of the wrong shape.
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
                f"scores must be finite and at least 0, got {values[tuple(bad)]} for layer {bad[0]}, level {bad[1]}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.values)

    @property
    def max_level(self) -> int:
        return self.values.shape[1] - 1

    @property
    def digest(self) -> str:
        """SHA-256 of the values."""
        return hashlib.sha256(np.ascontiguousarray(self.values, "<f8").tobytes()).hexdigest()

    def isotonic(self) -> LayerScores:
        """The same, but no value above one at a smaller ratio: measured scores are noisy (running minimum)."""
        lowest = np.minimum.accumulate(self.values, axis=1)
        return LayerScores(lowest, self.model_type, self.fingerprint, self.samples)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file of NumPy arrays (npz); it appears only when it is complete."""
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
        """Reads what `save` wrote.

        Raises:
          ValueError: another kind of file, or values that cannot be scores.
        """
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                content = {name: file[name] for name in file.files}
        except OSError as error:
            raise ValueError(f"scores must be a file of `vlcache schedule profile`, got {path}: {error}") from error
        except (ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(  # NumPy's own words speak of pickles
                f"scores must be a file of `vlcache schedule profile`, got {path}, which is not one, or damaged"
            ) from error
        wanted = {"format", "values", "model_type", "fingerprint", "samples"}
        if set(content) != wanted or str(content["format"]) != _FORMAT:
            raise ValueError(f"scores must be a file of `vlcache schedule profile`, got {path} with {sorted(content)}")
        try:
            return cls(
                content["values"].astype(np.float64),
                str(content["model_type"]),
                str(content["fingerprint"]),
                int(content["samples"]),
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"scores must be a file of `vlcache schedule profile`, got {path}: {error}") from error


@dataclass(frozen=True)
class Solution:
    """A schedule's levels, the predicted sum of scores and the budget that they use."""

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
    """The levels with the smallest sum of scores, exactly.

    Levels do not increase from layer to layer. Where several choices are equally good, levels are small.

    Args:
      scores: S_i(n) of layer i at level n, [L, N + 1].
      budget: what the levels may cost together.
      costs: cost of layer i at level n, integers [L, N + 1], non-decreasing in n; by default n.
      max_distinct: how many different levels a schedule may have; None is any number. Each is a shape to compile.
      count_layer0: whether the first layer costs anything. It computes what the second one needs (property P7), so that
        giving it the second one's level costs nothing.

    Raises:
      ValueError: no schedule fits the budget, or an argument is wrong.
    """
    scores, costs = _checked(scores, budget, costs, count_layer0)
    layers, levels = scores.shape
    counters = min(layers, levels) if max_distinct is None else max_distinct
    if counters < 1:
        raise ValueError(f"max_distinct must be at least 1, got {max_distinct}")
    # best[c, n, b]: layers from here on with at most c + 1 different levels, n the first, at a cost of at most b.
    # Before any layer all are 0, and "the first level" is free of cost and not yet counted.
    best = np.zeros((counters, levels, budget + 1))
    following: list[npt.NDArray[np.int16]] = []  # per layer: the next layer's level
    for layer in reversed(range(layers)):
        last = layer == layers - 1
        # Next layer on the same level, or below it with one more difference; ties take the smaller level.
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
        raise ValueError(f"budget must allow the smallest levels, which cost {costs[:, 0].sum()}, got {budget}")
    found, left, counter = [n], budget, counters - 1
    for layer in range(layers - 1):
        left -= int(costs[layer, n])
        lower = int(following[layer][counter, n, left])
        counter -= lower != n
        n = lower
        found.append(n)
    return Solution(tuple(found), value, int(costs[np.arange(layers), found].sum()))


def _next_levels(best: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int16]]:
    """For each level n of this layer: the best of the next layer at n, or at a lower level with one difference less."""
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
    """The paper's "simple greedy", with moves that lift a layer and all before it (which alone may start at layer 0).

    Each step takes the move with the largest gain per cost that still fits. Never better than `solve`.
    """
    scores, costs = _checked(scores, budget, costs, count_layer0)
    layers, levels = scores.shape
    found = np.zeros(layers, np.int64)
    each = np.arange(layers)
    left = budget - int(costs[:, 0].sum())
    if left < 0:
        raise ValueError(f"budget must allow the smallest levels, which cost {costs[:, 0].sum()}, got {budget}")
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
        raise ValueError(f"scores must be finite, of shape [layers, levels], got {scores.shape}")
    if budget < 0:
        raise ValueError(f"budget must be at least 0, got {budget}")
    if costs is None:
        costs = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    costs = np.array(costs, np.int64)
    if costs.shape != scores.shape or costs.min() < 0 or (np.diff(costs, axis=1) < 0).any():
        raise ValueError(
            f"costs must be integers of at least 0 that do not fall with the level, of shape {scores.shape}, "
            f"got {costs.shape}"
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
    """The schedule of a mean ratio (VLCache writes the budget as a sum and reports means; this is the mean).

    Args:
      scores: of the model.
      mean: of the ratios of all layers, at most; a decimal is taken exactly.
      method: "dp", exact, or "greedy", the paper's.
      max_distinct: different ratios at most; "greedy" does not bound them.
      count_layer0: see `solve`.
      isotonic: smooth the scores first (`LayerScores.isotonic`).

    Raises:
      ValueError: a mean that is negative or beyond the grid.
    """
    try:
        number = mean if isinstance(mean, Fraction) else Decimal(str(mean))
    except InvalidOperation as error:
        raise ValueError(f"mean must be a number, got {mean!r}") from error
    if isinstance(number, Decimal) and not (number.is_finite() and -_DIGITS <= number.adjusted() <= _DIGITS):
        raise ValueError(f"mean must be a number of at most {_DIGITS} digits, got {mean}")
    ratio = Fraction(number)
    most = Fraction(scores.max_level, UNITS)
    if not 0 <= ratio <= most:
        raise ValueError(f"mean must be from 0 to {float(most):g}, the largest ratio of the scores, got {mean}")
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
    """What a layer step costs, by the size it is compiled for.

    Attributes:
      rows: sizes, ascending.
      microseconds: of a layer step of each size, non-decreasing.

    Raises:
      ValueError: sizes or times that are not such.
    """

    rows: tuple[int, ...]
    microseconds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.microseconds):
            raise ValueError(
                f"rows and microseconds must be lists of one length, got {self.rows} and {self.microseconds}"
            )
        for name, values, least in (("rows", self.rows, 1), ("microseconds", self.microseconds, 0)):
            numbers = all(type(value) is int and value >= least for value in values)
            if not numbers or not all(a <= b for a, b in itertools.pairwise(values)):
                raise ValueError(f"{name} must be ascending integers of at least {least}, got {values}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerTimes:
        """Reads what `vlcache schedule times` wrote."""
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or not all(isinstance(content.get(name), list) for name in _TIMES):
                raise ValueError(f"it must hold the lists {' and '.join(_TIMES)}")
            return cls(tuple(content["rows"]), tuple(content["microseconds"]))
        except (OSError, ValueError) as error:
            raise ValueError(f"times must be a file of `vlcache schedule times`, got {path}: {error}") from error

    def costs(self, num_layers: int, max_level: int, *, image_tokens: int, text_rows: int) -> npt.NDArray[np.int64]:
        """Microseconds of each layer at each level, [L, max_level + 1], for one image among text.

        Raises:
          ValueError: more rows than the largest size measured.
        """
        level = np.arange(max_level + 1)
        rows = text_rows + level * image_tokens // UNITS
        if rows[-1] > self.rows[-1]:
            raise ValueError(f"times must reach {rows[-1]} rows, got up to {self.rows[-1]}")
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
    """The schedule whose layers together take at most so long, by measured times (exact, in 1/2000 of the budget).

    Args:
      scores: of the model.
      microseconds: that all layers may take.
      times: of layer steps.
      image_tokens, text_rows: of the prompt that the schedule is made for.
      max_distinct, isotonic: see `find_schedule`.
    """
    costs = times.costs(scores.num_layers, scores.max_level, image_tokens=image_tokens, text_rows=text_rows)
    if microseconds < (least := int(costs[:, 0].sum())):
        raise ValueError(f"microseconds must allow at least full reuse, which takes {least}, got {microseconds}")
    unit = max(1, microseconds // _LATENCY_STEPS)
    values = (scores.isotonic() if isotonic else scores).values
    # The first layer computes what the second one needs: its rows come with the second one's level.
    solution = solve(values, microseconds // unit, costs=-(-costs // unit), max_distinct=max_distinct)
    made_by = {
        "method": "dp",
        "scores_sha256": scores.digest,
        "predicted_mse": solution.value,
        "samples": scores.samples,
    }
    return Schedule(solution.levels, scores.model_type, scores.fingerprint, made_by=made_by)
