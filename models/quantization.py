"""The storage of FP8 weights: the content of `quantization_config`, checked.

Two layouts of FP8 weights are published. Qwen's own has a scale `weight_scale_inv` for each block of 128 x 128 values.
compressed-tensors has a `weight_scale` for each block or for each output. In both, a weight is its 8-bit value (e4m3)
times its scale, whatever the name says. Embeddings, norms, the output head, routers and the vision tower are not in
FP8, nor are matrices of the decoder that the file excludes by name or pattern. Queries, keys and values are one product
here, as are gate and up, and the experts of a layer. Matrices of a product that differ become products of their own.
Experts stay together: if one is excluded, none is in FP8.
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

from vlcache_jax.common.checks import short
from vlcache_jax.common.json_files import OBJECT, TEXT, Kind, check_fields, listed, optional, whole

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = np.dtype(np.float32)
GROUP = 128  # inputs of an output that share a scale in memory

_EXPERTS = "experts"
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    "in_proj_qk": ("linear_attn.in_proj_qkv",),
    "in_proj_vz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "out_proj": ("linear_attn.out_proj",),
    "shared_gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down_proj": ("mlp.shared_expert.down_proj",),
    _EXPERTS: ("mlp.experts",),
}
"""The products of a layer, and the matrices of each one by their names in the library.

`in_proj_ba` is small and never in FP8 in memory, whatever the file has.
"""

_FUSED = "linear_attn.in_proj_ba"  # published files list this name for both matrices, in addition to their own
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Prefixes of layers in the library's modules and in older releases.
_FOLDERS = ("model.language_model", "language_model.model", "model", "language_model")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
_CLASSES = ("Linear", "Module")  # classes of the matrices

_KEY = "quantization_config"
_NAMES = optional(listed(TEXT, 1 << 16))
_SIZE = whole(1, 1 << 16)
_BLOCK = Kind(
    "a list of two integers from 1 to 65536", lambda value: listed(_SIZE, 2).accepts(value) and len(value) == 2
)
ADVICE = "use the published bfloat16 or FP8 checkpoint of this model"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The storage of a checkpoint's FP8 matrices.

    Attributes:
      suffix: suffix of a scale's name after the name of its matrix.
      outputs, inputs: size of a block that shares a scale. inputs None: all inputs.
      plain: matrices that are not in FP8, each as its layer and a name in `PRODUCTS`.
    """

    suffix: str
    outputs: int
    inputs: int | None
    plain: frozenset[tuple[int, str]] = frozenset()

    @property
    def left_out(self) -> frozenset[tuple[int, str]]:
        """Products with a matrix that is not in FP8, each as its layer and one of `PRODUCTS`."""
        return frozenset((i, product) for i, one in self.plain for product, own in PRODUCTS.items() if one in own)

    def group(self, inputs: int) -> int:
        """Return how many inputs share a scale in memory: the greatest common divisor of the block's and `inputs`."""
        return math.gcd(self.inputs or GROUP, inputs)

    def stored_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the stored shape of a matrix's scales. Blocks at the ends may be smaller."""
        return -(-outputs // self.outputs), -(-inputs // (self.inputs or inputs))

    def spread(self, factors: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
        """Expand stored scales to one for each output and group of inputs.

        Args:
          factors: stored scales, [..., blocks of outputs, blocks of inputs].

        Returns:
          Scales in memory, float32 [..., outputs, inputs / group].
        """
        group = self.group(inputs)
        by_output = np.repeat(factors.astype(SCALE), self.outputs, axis=-2)[..., :outputs, :]
        by_input = np.repeat(by_output, (self.inputs or inputs) // group, axis=-1)[..., : inputs // group]
        return np.ascontiguousarray(by_input)  # a block may be wider than the matrix


def read_quantization(
    raw: Mapping[str, Any], path: str | os.PathLike[str], layers: int = 0, experts: int = 0
) -> Quantization | None:
    """Read the storage of quantized weights from the content of a `config.json`, or None if it has no quantization.

    Args:
      layers: number of decoder layers.
      experts: number of experts of a layer.

    Raises:
      ValueError: the format is not supported. The message names it and the file.
    """
    found = [part[_KEY] for part in (raw, raw.get("text_config") or {}) if part.get(_KEY) is not None]
    if not found:
        return None
    config = found[0]
    check_fields({_KEY: config}, {_KEY: OBJECT}, path)
    method = config.get("quant_method")
    if method == "fp8":
        kept, takes = _fine_grained(config, path), _fine_grained_names(config, path)
        modules = PRODUCTS[_EXPERTS]  # the library treats all experts of a layer as one
    elif method == "compressed-tensors":
        kept, takes = _compressed(config, path), _compressed_names(config, path)
        modules = tuple(f"mlp.experts.{i}.{name}" for i in range(experts) for name in _OF_EXPERTS)
    else:
        raise _unsupported(path, f"quant_method {short(method)}")
    named = {matrix: (matrix,) for own in PRODUCTS.values() for matrix in own} | {PRODUCTS[_EXPERTS][0]: modules}
    plain = {
        (layer, matrix)
        for layer in range(layers)
        for matrix, own in named.items()
        if not all(takes(_names_of(layer, module)) for module in own)
    }
    return dataclasses.replace(kept, plain=frozenset(plain))


def _names_of(layer: int, module: str) -> tuple[str, ...]:
    """Return the names that a file may have for a matrix."""
    modules = (module, _FUSED) if module in PRODUCTS["in_proj_ba"] else (module,)
    return tuple(f"{folder}.layers.{layer}.{one}" for folder in _FOLDERS for one in modules)


def _fine_grained_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """Return a function: names of a matrix -> True if it is in FP8, by `should_convert_module` of transformers."""
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
    check_fields(config, {key: _NAMES}, path, section=f"{_KEY}.")
    ends = tuple(config.get(key) or ())
    begins = [_pattern(f"(?:{one}){_BOUNDARY}", one, f"{key} of {os.fspath(path)}") for one in ends]
    return lambda names: not any(name.endswith(ends) or any(one.match(name) for one in begins) for name in names)


def _compressed_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """Return a function: names of a matrix -> True if it is in FP8, by the rules of compressed-tensors.

    `targets` and `ignore` contain names, patterns that begin with `re:`, or classes.
    """
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


def _matches(entries: list[str], where: str) -> Callable[[str], bool]:
    names = frozenset(entries)
    patterns = [_pattern(one[3:], one, where) for one in entries if one.startswith("re:")]
    if not names.isdisjoint(_CLASSES):
        return lambda name: True
    return lambda name: name in names or any(one.match(name) for one in patterns)


def _pattern(text: str, written: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{_KEY}.{where} must be names or patterns, got {short(written)}: {error}") from error


def _fine_grained(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Read the storage of Qwen's own FP8."""
    check_fields(config, {"weight_block_size": _BLOCK}, path, section=f"{_KEY}.", required=True)
    for key, wanted in {"fmt": "e4m3", "expert_dtype": "fp8"}.items():
        if config.get(key, wanted) != wanted:
            raise _unsupported(path, f"{key} {short(config[key])}")
    outputs, inputs = config["weight_block_size"]
    return Quantization("_scale_inv", outputs, inputs)


def _compressed(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Read the storage of compressed-tensors."""
    check_fields(config, {"config_groups": OBJECT, "format": optional(TEXT)}, path, section=f"{_KEY}.", required=True)
    groups = config["config_groups"]
    check_fields(groups, dict.fromkeys(groups, OBJECT), path, section=f"{_KEY}.config_groups.")
    if config.get("kv_cache_scheme") is not None:
        raise _unsupported(path, "a kv_cache_scheme")
    found = {_scheme(group, config.get("format"), path) for group in groups.values()}
    if len(found) != 1:
        raise _unsupported(path, f"{len(found)} config_groups that differ")
    return found.pop()


def _scheme(group: Mapping[str, Any], default: str | None, path: str | os.PathLike[str]) -> Quantization:
    check_fields(group, {"weights": OBJECT}, path, section=f"{_KEY}.config_groups.", required=True)
    weights: dict[str, Any] = group["weights"]
    form = group.get("format") or default
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) != ("float", 8) or form not in (None, "float-quantized", "naive-quantized"):
        raise _unsupported(path, f"weights of {short(bits)} bits, type {short(kind)}, format {short(form)}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic") not in (None, False):
        raise _unsupported(path, "weights that are not symmetric and static")
    match weights.get("strategy"):
        case "channel":
            return Quantization("_scale", 1, None)
        case "block":
            section = f"{_KEY}.config_groups.weights."
            check_fields(weights, {"block_structure": _BLOCK}, path, section=section, required=True)
            outputs, inputs = weights["block_structure"]
            return Quantization("_scale", outputs, inputs)
        case strategy:
            raise _unsupported(path, f"strategy {short(strategy)}")


def _unsupported(path: str | os.PathLike[str], what: str) -> ValueError:
    return ValueError(
        f"{_KEY} of {os.fspath(path)} must be FP8 in Qwen's format, or in compressed-tensors by channel or block, "
        f"got {what}: {ADVICE}"
    )
