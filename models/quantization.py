"""Weights in 8 bits: how the matrices of a published decoder are stored, and what their factors belong to.

Two layouts are published. Qwen's own FP8 has a factor `weight_scale_inv` for each block of 128 x 128 values;
compressed-tensors has `weight_scale`, for each block, or for each output. Either way a weight is its 8 bits (e4m3)
times its factor, whatever the name says. Embeddings, norms, the output head, routers and the vision tower are stored as
ever.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from vlcache_jax.checks import short
from vlcache_jax.fields import OBJECT, TEXT, Kind, check_fields, listed, optional, whole

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = np.dtype(np.float32)
GROUP = 128  # inputs of an output that share a factor in memory

_KEY = "quantization_config"
_SIZE = whole(1, 1 << 16)
_BLOCK = Kind(
    "a list of two integers from 1 to 65536", lambda value: listed(_SIZE, 2).accepts(value) and len(value) == 2
)
_ADVICE = "take the model as it was published in bfloat16, or its FP8"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a checkpoint's matrices are stored in 8 bits.

    Attributes:
      suffix: what a factor's name has behind that of its matrix.
      outputs, inputs: of a block that shares a factor; inputs None are all there are.
    """

    suffix: str
    outputs: int
    inputs: int | None

    def group(self, inputs: int) -> int:
        """How many inputs share a factor in memory: 128, or what divides both the block's and all `inputs`."""
        return math.gcd(self.inputs or GROUP, inputs)

    def stored_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """The shape of a matrix's factors as they are stored; blocks at the ends may be smaller."""
        return -(-outputs // self.outputs), -(-inputs // (self.inputs or inputs))

    def spread(self, factors: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
        """Stored factors [..., blocks of outputs, blocks of inputs] as they lie in memory: float32 [..., outputs,
        inputs / group], one for each output and group of inputs."""
        group = self.group(inputs)
        by_output = np.repeat(factors.astype(SCALE), self.outputs, axis=-2)[..., :outputs, :]
        by_input = np.repeat(by_output, (self.inputs or inputs) // group, axis=-1)[..., : inputs // group]
        return np.ascontiguousarray(by_input)  # a block may be wider than the matrix


def read_quantization(raw: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization | None:
    """What the content of a `config.json` says of weights in fewer bits; None: nothing.

    Raises:
      ValueError: they are in a format that is not read; the message names it and the file.
    """
    found = [part[_KEY] for part in (raw, raw.get("text_config") or {}) if part.get(_KEY) is not None]
    if not found:
        return None
    config = found[0]
    check_fields({_KEY: config}, {_KEY: OBJECT}, path)
    method = config.get("quant_method")
    if method == "fp8":
        return _fine_grained(config, path)
    if method == "compressed-tensors":
        return _compressed(config, path)
    raise _unread(path, f"quant_method {short(method)}")


def _fine_grained(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Of Qwen's own FP8."""
    check_fields(config, {"weight_block_size": _BLOCK}, path, section=f"{_KEY}.", required=True)
    for key, wanted in {"fmt": "e4m3", "expert_dtype": "fp8"}.items():
        if config.get(key, wanted) != wanted:
            raise _unread(path, f"{key} {short(config[key])}")
    outputs, inputs = config["weight_block_size"]
    return Quantization("_scale_inv", outputs, inputs)


def _compressed(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Of compressed-tensors."""
    check_fields(config, {"config_groups": OBJECT, "format": optional(TEXT)}, path, section=f"{_KEY}.", required=True)
    groups = config["config_groups"]
    check_fields(groups, dict.fromkeys(groups, OBJECT), path, section=f"{_KEY}.config_groups.")
    if config.get("kv_cache_scheme") is not None:
        raise _unread(path, "a kv_cache_scheme")
    found = {_scheme(group, config.get("format"), path) for group in groups.values()}
    if len(found) != 1:
        raise _unread(path, f"{len(found)} config_groups that differ")
    return found.pop()


def _scheme(group: Mapping[str, Any], default: str | None, path: str | os.PathLike[str]) -> Quantization:
    check_fields(group, {"weights": OBJECT}, path, section=f"{_KEY}.config_groups.", required=True)
    weights: dict[str, Any] = group["weights"]
    form = group.get("format") or default
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) != ("float", 8) or form not in (None, "float-quantized", "naive-quantized"):
        raise _unread(path, f"weights of {short(bits)} bits, type {short(kind)}, format {short(form)}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic") not in (None, False):
        raise _unread(path, "weights that are not symmetric and static")
    match weights.get("strategy"):
        case "channel":
            return Quantization("_scale", 1, None)
        case "block":
            section = f"{_KEY}.config_groups.weights."
            check_fields(weights, {"block_structure": _BLOCK}, path, section=section, required=True)
            outputs, inputs = weights["block_structure"]
            return Quantization("_scale", outputs, inputs)
        case strategy:
            raise _unread(path, f"strategy {short(strategy)}")


def _unread(path: str | os.PathLike[str], what: str) -> ValueError:
    return ValueError(
        f"{_KEY} of {os.fspath(path)} must be of weights in FP8, as Qwen publishes them or compressed-tensors by "
        f"channel or block, got {what}: {_ADVICE}"
    )
