"""Schedules: the ratio of image tokens that each layer recomputes, and their files."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from fractions import Fraction
from operator import index
from os import PathLike
from typing import Any

from vlcache_jax.common.checks import short, shorten
from vlcache_jax.common.files import write_whole

FORMAT = "vlcache-schedule/1"
UNIT = "1/500"
UNITS = 500  # levels count in steps of 0.002 (VLCache eq. 9)
MAX_BYTES = 2**20  # maximum size of a file; a thousand layers take 10 kB

_PATH = 1000  # maximum characters of a path in error messages
_METHODS = ("dp", "greedy", "static")
_MODEL = {"model_type": str, "num_layers": int, "fingerprint": str}


@dataclass(frozen=True)
class Schedule:
    """Ratio of recomputed image tokens in each layer (VLCache, eq. 6-9).

    Attributes:
      levels: ratio of each layer in units of 1/500, from 0 to 500. Levels must not increase with the layer, because a
        layer has the hidden state of a token only if all layers before computed it.
      model_type: model type of the model that it was made for.
      fingerprint: digest of the source weights of that model.
      rounding: rounding of n T / 500, the number of tokens at level n of T tokens: "floor" (default, the paper) or
        "ceil".
      made_by: the "method" ("dp", "greedy" or "static") and, if known, "scores_sha256", "predicted_mse" and "samples".
      allow_other_model: True if it may be used with other weights. The number of layers must agree in any case.

    Raises:
      ValueError: an argument is invalid.
    """

    levels: tuple[int, ...]
    model_type: str
    fingerprint: str
    rounding: str = "floor"
    made_by: Mapping[str, Any] = field(default_factory=lambda: {"method": "static"}, hash=False)
    allow_other_model: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "levels", tuple(n if isinstance(n, bool) else index(n) for n in self.levels))
        except TypeError as error:
            raise ValueError(f"levels must be integers from 0 to {UNITS}, got {short(self.levels)}") from error
        if not self.levels or not all(type(n) is int and 0 <= n <= UNITS for n in self.levels):
            raise ValueError(f"levels must be integers from 0 to {UNITS}, one per layer, got {short(self.levels)}")
        if any(a < b for a, b in zip(self.levels, self.levels[1:], strict=False)):
            raise ValueError(f"levels must not increase from layer to layer, got {short(self.levels)}")
        if self.rounding not in ("floor", "ceil"):
            raise ValueError(f"rounding must be 'floor' or 'ceil', got {short(self.rounding)}")
        if not isinstance(self.made_by, Mapping) or self.made_by.get("method") not in _METHODS:
            raise ValueError(f"made_by must have a method, one of {', '.join(_METHODS)}, got {short(self.made_by)}")
        _check_keys(self.made_by, {"method"}, "made_by", optional={"scores_sha256", "predicted_mse", "samples"})

    @property
    def mean(self) -> Fraction:
        """Mean ratio over the layers, exact."""
        return Fraction(sum(self.levels), UNITS * len(self.levels))

    def count(self, tokens: int, layer: int) -> int:
        """Return the number of tokens that `layer` recomputes of an image of `tokens` tokens, in integer arithmetic."""
        whole, rest = divmod(self.levels[layer] * tokens, UNITS)
        return whole + (self.rounding == "ceil" and rest > 0)

    @classmethod
    def load(cls, path: str | PathLike[str], *, allow_other_model: bool = False) -> Schedule:
        """Read a schedule file.

        Raises:
          ValueError: the file is not a schedule file of at most `MAX_BYTES` bytes, has unknown or missing keys, or has
            values that contradict each other.
        """
        content = _read(path)
        name = f"schedule {short(os.fspath(path), _PATH)}"
        _check_keys(content, {"format", "model", "unit", "levels", "rounding", "mean", "made_by"}, name)
        for key, value in (("format", FORMAT), ("unit", UNIT)):
            if content[key] != value:
                raise ValueError(f"{key} of {name} must be {value!r}, got {short(content[key])}")
        model, levels = content["model"], content["levels"]
        _check_keys(model, set(_MODEL), f"model of {name}")
        for key, kind in _MODEL.items():
            if type(model[key]) is not kind:
                raise ValueError(f"model {key} of {name} must be of type {kind.__name__}, got {short(model[key])}")
        if not isinstance(levels, list) or len(levels) != model["num_layers"]:
            raise ValueError(
                f"levels of {name} must be a list of num_layers = {short(model['num_layers'])}, got {short(levels)}"
            )
        try:
            schedule = cls(
                tuple(levels),
                model["model_type"],
                model["fingerprint"],
                content["rounding"],
                content["made_by"],
                allow_other_model,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if content["mean"] != schedule.mean_text:
            raise ValueError(
                f"mean of {name} must equal the mean of its levels, {schedule.mean_text!r}, "
                f"got {short(content['mean'])}"
            )
        return schedule

    def save(self, path: str | PathLike[str]) -> None:
        """Write a schedule file. The file appears when it is complete."""
        model = {"model_type": self.model_type, "num_layers": len(self.levels), "fingerprint": self.fingerprint}
        content = {
            "format": FORMAT,
            "model": model,
            "unit": UNIT,
            "levels": list(self.levels),
            "rounding": self.rounding,
            "mean": self.mean_text,
            "made_by": dict(self.made_by),
        }
        write_whole(path, json.dumps(content, indent=1) + "\n")

    @property
    def mean_text(self) -> str:
        """Mean ratio with four decimals, as in schedule files."""
        return f"{float(self.mean):.4f}"

    def check_model(self, model_type: str, num_layers: int, fingerprint: str) -> None:
        """Check that the schedule was made for a model.

        Raises:
          ValueError: the number of layers differs, or the weights differ and `allow_other_model` is False.
        """
        if len(self.levels) != num_layers:
            raise ValueError(f"reuse must be a schedule of {num_layers} layers for this model, got {len(self.levels)}")
        if not self.allow_other_model and (self.model_type, self.fingerprint) != (model_type, fingerprint):
            raise ValueError(
                f"reuse must be a schedule made for this model ({model_type}, weights {fingerprint[:12]}), got one for "
                f"{self.model_type}, weights {self.fingerprint[:12]}; Schedule.load(path, allow_other_model=True) "
                "accepts it"
            )


def _read(path: str | PathLike[str]) -> Any:
    """Return the content of a JSON file. Pipes are refused because they may never end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it must be a regular file, got a folder, a pipe or a device")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it must have at most {MAX_BYTES} bytes")
        return json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        name = short(os.fspath(path), _PATH)
        raise ValueError(f"schedule must be a readable JSON file, got {name}: {reason}") from error


def _check_keys(content: Any, required: Set[str], name: str, optional: Set[str] = frozenset()) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} must be an object, got {short(content)}")
    if missing := sorted(required - content.keys()):
        raise ValueError(
            f"{name} must have the keys {', '.join(missing)}, got only {shorten(', '.join(content)) or 'none'}"
        )
    if unknown := sorted(content.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise ValueError(f"{name} has unknown keys: {shorten(', '.join(unknown))}. Known keys: {known}")
