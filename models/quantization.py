"""Weights in 8 bits: how the matrices of a published decoder are stored, and what their factors belong to.

Two layouts are published. Qwen's own FP8 has a factor `weight_scale_inv` for each block of 128 x 128 values;
compressed-tensors has `weight_scale`, for each block, or for each output. Either way a weight is its 8 bits (e4m3)
times its factor, whatever the name says. Embeddings, norms, the output head, routers and the vision tower are stored as
ever, and so are matrices of the decoder that the file leaves out by name or pattern. Queries, keys and values are one
product here, as are gate and up, and the experts of a layer: a product of which a matrix is left out is not in 8 bits.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from vlcache_jax.checks import short
from vlcache_jax.fields import OBJECT, TEXT, Kind, check_fields, listed, optional, whole

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = np.dtype(np.float32)
GROUP = 128  # inputs of an output that share a factor in memory

_EXPERTS = "experts"
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    _EXPERTS: ("mlp.experts",),
}
"""What a layer multiplies by: the matrices of each product, in the library's names."""

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Names of layers, as the library's modules have them and as older releases had them.
_FOLDERS = ("model.language_model", "language_model.model", "model", "language_model")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
_CLASSES = ("Linear", "Module")  # that matrices are of

_KEY = "quantization_config"
_NAMES = optional(listed(TEXT, 1 << 16))
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
      left_out: products that are not in 8 bits, each as its layer and one of `PRODUCTS`.
    """

    suffix: str
    outputs: int
    inputs: int | None
    left_out: frozenset[tuple[int, str]] = frozenset()

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


def read_quantization(
    raw: Mapping[str, Any], path: str | os.PathLike[str], layers: int = 0, experts: int = 0
) -> Quantization | None:
    """What the content of a `config.json` says of weights in fewer bits; None: nothing.

    Args:
      layers: of the decoder.
      experts: of a layer.

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
        kept, takes = _fine_grained(config, path), _fine_grained_names(config, path)
        modules = PRODUCTS[_EXPERTS]  # the library takes all experts of a layer together
    elif method == "compressed-tensors":
        kept, takes = _compressed(config, path), _compressed_names(config, path)
        modules = tuple(f"mlp.experts.{i}.{name}" for i in range(experts) for name in _OF_EXPERTS)
    else:
        raise _unread(path, f"quant_method {short(method)}")
    left_out = {
        (layer, product)
        for layer in range(layers)
        for product, own in {**PRODUCTS, _EXPERTS: modules}.items()
        for module in own
        if not takes(tuple(f"{folder}.layers.{layer}.{module}" for folder in _FOLDERS))
    }
    return dataclasses.replace(kept, left_out=frozenset(left_out))


def _fine_grained_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """Whether a matrix is in 8 bits, given its names, by `should_convert_module` of transformers."""
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
    check_fields(config, {key: _NAMES}, path, section=f"{_KEY}.")
    ends = tuple(config.get(key) or ())
    begins = [_pattern(f"(?:{one}){_BOUNDARY}", one, f"{key} of {os.fspath(path)}") for one in ends]
    return lambda names: not any(name.endswith(ends) or any(one.match(name) for one in begins) for name in names)


def _compressed_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """The same by compressed-tensors: names, patterns that begin with `re:`, or classes, to be in 8 bits and not."""
    check_fields(config, {"ignore": _NAMES}, path, section=f"{_KEY}.")
    groups = config["config_groups"].values()
    for group in groups:
        check_fields(group, {"targets": _NAMES}, path, section=f"{_KEY}.config_groups.")
    targets = [one for group in groups for one in group.get("targets") or _CLASSES]
    is_target, is_ignored = (
        _matches(given, f"{key} of {os.fspath(path)}")
        for key, given in (("targets", targets), ("ignore", config.get("ignore") or []))
    )
    return lambda names: any(map(is_target, names)) and not any(map(is_ignored, names))


def _matches(given: list[str], where: str) -> Callable[[str], bool]:
    written = frozenset(given)
    patterns = [_pattern(one[3:], one, where) for one in given if one.startswith("re:")]
    if not written.isdisjoint(_CLASSES):
        return lambda name: True
    return lambda name: name in written or any(one.match(name) for one in patterns)


def _pattern(text: str, written: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{_KEY}.{where} must hold names or patterns, got {short(written)}: {error}") from error


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
