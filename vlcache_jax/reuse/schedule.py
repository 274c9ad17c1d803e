"""Schedules: how much of each reused image every layer recomputes, and the files that hold them."""

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
MAX_BYTES = 2**20  # of a file; a thousand layers take 10 kB

_PATH = 1000  # characters of a path in messages
_METHODS = ("dp", "greedy", "static")
_MODEL = {"model_type": str, "num_layers": int, "fingerprint": str}


@dataclass(frozen=True)
class Schedule:
    """Ratios of recomputed image tokens, layer by layer (VLCache, eq. 6-9).

    Attributes:
      levels: of each layer, in 1/500, non-increasing: the hidden state of a token exists in a layer only if it was
        carried through all before.
      model_type, fingerprint: of the model it was made for; the fingerprint is that of the source's weights.
      rounding: how many of T tokens a level n means: "floor" of n T / 500 (the paper), or "ceil".
      made_by: how it was found.
      allow_other_model: use it for other weights too; the number of layers must agree in any case.

    Raises:
      ValueError: levels that are not such, or an unknown rounding.
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
            raise ValueError(f"levels must be integers from 0 to {UNITS}, one a layer, got {short(self.levels)}")
        if any(a < b for a, b in zip(self.levels, self.levels[1:], strict=False)):
            raise ValueError(f"levels must not increase from layer to layer, got {short(self.levels)}")
        if self.rounding not in ("floor", "ceil"):
            raise ValueError(f"rounding must be 'floor' or 'ceil', got {short(self.rounding)}")
        if not isinstance(self.made_by, Mapping) or self.made_by.get("method") not in _METHODS:
            raise ValueError(f"made_by must name a method of {', '.join(_METHODS)}, got {short(self.made_by)}")
        _check_keys(self.made_by, {"method"}, "made_by", optional={"scores_sha256", "predicted_mse", "samples"})

    @property
    def mean(self) -> Fraction:
        """Mean ratio over the layers."""
        return Fraction(sum(self.levels), UNITS * len(self.levels))

    def count(self, tokens: int, layer: int) -> int:
        """How many of an image's tokens a layer recomputes; exact integer arithmetic."""
        whole, rest = divmod(self.levels[layer] * tokens, UNITS)
        return whole + (self.rounding == "ceil" and rest > 0)

    @classmethod
    def load(cls, path: str | PathLike[str], *, allow_other_model: bool = False) -> Schedule:
        """Reads a schedule file.

        Raises:
          ValueError: not a schedule file of at most `MAX_BYTES`, unknown or missing keys, or values that contradict
            each other.
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
                f"mean of {name} must be that of its levels, {schedule.mean_text!r}, got {short(content['mean'])}"
            )
        return schedule

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a schedule file; it appears only when it is complete."""
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
        """The mean with four digits, as files hold it."""
        return f"{float(self.mean):.4f}"

    def check_model(self, model_type: str, num_layers: int, fingerprint: str) -> None:
        """Raises ValueError if the schedule was made for another model."""
        if len(self.levels) != num_layers:
            raise ValueError(f"reuse must be a schedule of {num_layers} layers for this model, got {len(self.levels)}")
        if not self.allow_other_model and (self.model_type, self.fingerprint) != (model_type, fingerprint):
            raise ValueError(
                f"reuse must be a schedule made for this model ({model_type}, weights {fingerprint[:12]}), got one for "
                f"{self.model_type}, weights {self.fingerprint[:12]}; Schedule.load(path, allow_other_model=True) "
                "takes it all the same"
            )


def _read(path: str | PathLike[str]) -> Any:
    """What a JSON file holds. A pipe, which may never end, is not opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is a folder, a pipe or a device")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        name = short(os.fspath(path), _PATH)
        raise ValueError(f"schedule must be a readable JSON file, got {name}: {reason}") from error


def _check_keys(content: Any, required: Set[str], name: str, optional: Set[str] = frozenset()) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} must be an object, got {short(content)}")
    if missing := sorted(required - content.keys()):
        raise ValueError(f"{name} must hold {', '.join(missing)}, got only {shorten(', '.join(content)) or 'nothing'}")
    if unknown := sorted(content.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise ValueError(f"{name} must hold only {known}, got {shorten(', '.join(unknown))}")
