"""The mapping from the parameters of a model to the tensors of a checkpoint.

Modules have the library's names, so the mapping is a rule, not a table. A parameter's path is its tensor's name, except
for the last part, the family's `TensorNames`, and layers that are one product here. The matrix of `qkv_proj` is
[M, K, G + 2, D]: queries, key and value of each KV head. That of `gate_up_proj` is [M, 2, F].

FP8 matrices keep the stored layout [out, in]: [K, G + 2, D, M] for `qkv_proj`, and [2, F, M] for `gate_up_proj`. Each
has a parameter of scales, one for each output and group of inputs. If a product has fallen apart, because only some of
its matrices are in FP8, each matrix is a parameter such as `gate_up_proj/up_proj/kernel`.

Linear attention has the inputs of its rule by key head: `in_proj_qk` [M, HK, 2, dk], `in_proj_vz` [M, HK, 2 G, dv] and
`in_proj_ba` [M, HK, 2, G]. The library stores queries, keys and values of all heads in one tensor, and the taps of the
convolution alike. `pieces` says how such a tensor is divided.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.family import TensorNames
from vlcache_jax.models.layers import JOINED, layers_of
from vlcache_jax.models.model import abstract_model
from vlcache_jax.models.quantization import FLOAT8, PRODUCTS, SCALE, Quantization
from vlcache_jax.models.registry import FAMILIES

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """The storage of FP8 matrices' scales.

    Attributes:
      quantization: format of the checkpoint.
      inputs: number of inputs of the matrices.
    """

    quantization: Quantization
    inputs: int

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape of scales that are [..., outputs, groups] in memory."""
        return *shape[:-2], *self.quantization.stored_shape(shape[-2], self.inputs)

    def spread(self, stored: np.ndarray, outputs: int) -> np.ndarray:
        """Return stored scales in their layout in memory, float32 [..., outputs, groups]."""
        return self.quantization.spread(stored, outputs, self.inputs)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a parameter that one tensor of a checkpoint contains: all of it, or some layers of a product.

    Attributes:
      path: path of the parameter in the library's modules, where this part is a parameter of its own.
      shape: shape of the parameter there.
      tensor: library name of the tensor.
      tensor_shape: stored shape. Kernels are stored [out, in] and become [in, out].
      place: first and last + 1 on the parameter's axis of layers, the one before that of the outputs. None: all of the
        parameter.
      is_transposed: True if the matrices of experts are stored [E, out, in], as the library saves them, and not
        [E, in, out], as they are published.
      kept: dtype in a model of any dtype. None: the model's dtype.
      factors: storage of scales, if this part is scales of FP8 matrices, else None.
      mixed: storage of scales, if this part is a matrix that is not in FP8 here but may be stored in FP8, else None.
      is_listed: True if the checkpoint's configuration excludes a `mixed` matrix from FP8. If not, its file has FP8.
    """

    path: Path
    shape: tuple[int, ...]
    tensor: str
    tensor_shape: tuple[int, ...]
    place: tuple[int, int] | None = None
    is_transposed: bool = False
    kept: np.dtype | None = None
    factors: Factors | None = None
    mixed: Factors | None = None
    is_listed: bool = False

    @property
    def is_stack(self) -> bool:
        """True if it has a matrix for each expert."""
        return self.path[-1] in _ALL_STACKS

    @property
    def is_kernel(self) -> bool:
        return self.path[-1] == "kernel"

    @property
    def is_float8(self) -> bool:
        return self.kept == FLOAT8

    @property
    def is_stored_float8(self) -> bool:
        """True if the tensor must be in FP8."""
        return self.is_float8 or (self.mixed is not None and not self.is_listed)

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Return its dtype in a model of `dtype`."""
        return self.kept or dtype

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """Return the view of this part in the parameter's array."""
        if self.place is None:
            return parameter
        if self.path[-1] in FP8_LEAVES:
            return parameter[..., slice(*self.place), :, :]
        return parameter[..., slice(*self.place), :]

    def transposed(self) -> Part:
        """Return the part of experts' matrices as stored in the library's layout."""
        count, rows, columns = self.shape
        return dataclasses.replace(self, tensor_shape=(count, columns, rows), is_transposed=True)

    @property
    def singles(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes [out, in] of each expert's tensors, if the experts of a stack are stored one by one.

        An expert's matrix is the concatenation of its tensors along the outputs.
        """
        folder, _, name = self.tensor.rpartition(".")
        suffix = self.factors.quantization.suffix if self.factors else ""
        names = JOINED.get(name := name.removesuffix(suffix), (name,))
        count, rows, columns = self.shape if self.kept else (self.shape[0], *self.shape[:0:-1])
        shape: tuple[int, ...] = (rows // len(names), columns)
        if self.factors:
            shape = self.factors.stored_shape(shape)
        return [{f"{folder}.{i}.{name}.weight{suffix}": shape for name in names} for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a model and its parts in a checkpoint.

    Attributes:
      path: keys in the nested dict of parameters.
      shape: shape of the parameter.
      parts: one part, or one for each of the library's layers that are a single product here.
    """

    path: Path
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def is_kernel(self) -> bool:
        return self.path[-1] == "kernel"

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Return its dtype in a model of `dtype`."""
        return self.parts[0].dtype_in(dtype)

    def nbytes(self, dtype: np.dtype) -> int:
        """Return its bytes in a model of `dtype`."""
        return math.prod(self.shape) * self.dtype_in(dtype).itemsize

    def transposed(self) -> Parameter:
        """Return the parameter of experts' matrices as stored in the library's layout."""
        return dataclasses.replace(self, parts=tuple(part.transposed() for part in self.parts))


def parameters(config: ModelConfig) -> list[Parameter]:
    """Return all parameters of a model, in the order of its tree."""
    return list(_parameters(config))


@functools.cache
def _parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    # Building the abstract model takes most of a second.
    tree = abstract_params(config, np.float32)
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(key.key for key in keys)
        parts = (_with_kind(config, path, part, leaf.dtype) for part in _parts(config, path, tuple(leaf.shape)))
        found.append(Parameter(path, tuple(leaf.shape), tuple(parts)))
    return tuple(found)


def abstract_params(config: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Return the nested dict of parameters with `jax.ShapeDtypeStruct` leaves."""
    return nnx.to_pure_dict(nnx.split(abstract_model(config, dtype))[1])


def library_name(name: str) -> str:
    """Return the library's name of a checkpoint's tensor, which may have a name of an older release of any family."""
    return name if name.startswith(("model.visual.", "model.language_model.")) else _rename(name, _BEGINNINGS)


def is_ignored(config: ModelConfig, name: str) -> bool:
    """Return whether a checkpoint's tensor is not used, such as those that predict several tokens at once."""
    return name.startswith(_names(config).ignored)


def published_name(config: ModelConfig, name: str) -> str:
    """Return the name under which the library saves a tensor, the inverse of `library_name`."""
    return _rename(name, {library: published for published, library in _names(config).published.items()})


_BEGINNINGS = {
    "visual.": "model.visual.",
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
    "model.": "model.language_model.",
}
_STACKS = ("gate_up_proj", "down_proj")  # leaves with a matrix for each expert
_FACTORS = {"weight": "weight_scale", **{name: f"{name}_scale" for name in _STACKS}}
_ALL_STACKS = *_STACKS, *(_FACTORS[name] for name in _STACKS)
FP8_LEAVES = "weight", _FACTORS["weight"]  # leaves of FP8 layers, [out, in]
# The library's modules whose tensors are several here, in the order of their rows.
_PIECES = {
    "linear_attn.in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "linear_attn.conv1d": ("conv1d_q", "conv1d_k", "conv1d_v"),
}
_WHOLES = {f"linear_attn.{own}": whole for whole, names in _PIECES.items() for own in names}
_LEAVES = {
    **dict.fromkeys(("kernel", "scale", "embedding", "weight", "taps"), "weight"),
    **{name: name for name in ("bias", "A_log", "dt_bias")},
}
_MATRICES = {matrix for own in PRODUCTS.values() for matrix in own}  # matrices that files may have in FP8
_IN_FLOAT32 = ("A_log", "dt_bias")


def pieces(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Return the library's tensors that are several here: end of the module's path -> outputs of each part, by name."""
    if (sizes := config.text.linear_attention) is None:
        return {}
    keys, values = sizes.key_heads * sizes.key_width, sizes.value_heads * sizes.value_width
    return {whole: dict(zip(names, (keys, keys, values), strict=True)) for whole, names in _PIECES.items()}


def whole_name(name: str) -> str:
    """Return the name of the library's tensor that has the values of one of ours: its own, unless it is a piece."""
    *folders, folder, module, leaf = ("", "", *name.split("."))
    whole = _WHOLES.get(f"{folder}.{module}")
    return name if whole is None else ".".join([*filter(None, folders), whole, leaf])


def piece_name(name: str) -> str:
    """Return the name of a tensor of ours in errors, which names the library's tensor if ours is a piece of it."""
    return name if whole_name(name) == name else f"{whole_name(name)}, rows of {name.split('.')[-2]}"


def _parts(config: ModelConfig, path: Path, shape: tuple[int, ...]) -> Iterator[Part]:
    *folders, module, leaf = path
    begin, end = int(leaf == "kernel"), len(shape) - (leaf in FP8_LEAVES)  # without the axis of inputs
    if leaf == "taps":
        yield from _taps(config, path, shape)
        return
    if leaf in _IN_FLOAT32:
        yield Part(path, shape, _tensor_name(config, path), (math.prod(shape),), kept=SCALE)
        return
    if is_apart(path):
        own = *folders[:-1], module, leaf
        flat = *shape[:begin], math.prod(shape[begin:end]), *shape[end:]
        yield Part(own, flat, _tensor_name(config, own), _tensor_shape(config, own, flat))
        return
    if module not in JOINED:
        yield Part(path, shape, _tensor_name(config, path), _tensor_shape(config, path, shape))
        return
    before, (*heads, count, width), after = shape[:begin], shape[begin:end], shape[end:]
    for name, (first, last) in layers_of(str(module), count).items():
        own = *folders, name, leaf
        flat = *before, math.prod(heads) * (last - first) * width, *after
        yield Part(own, flat, _tensor_name(config, own), _tensor_shape(config, own, flat), (first, last))


def is_apart(path: Path) -> bool:
    """Return whether a parameter is of one layer of a product that has fallen apart, see `ApartLinear`."""
    return len(path) > 2 and path[-3] in JOINED


def _taps(config: ModelConfig, path: Path, shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield the parts of the convolution's taps [HK, channels, taps], stored as [HK * channels, 1, taps] each."""
    heads, _, taps = shape
    first = 0
    for name, outputs in pieces(config)["linear_attn.conv1d"].items():
        own, last = (*path[:-2], name, path[-1]), first + outputs // heads
        yield Part(own, (outputs, taps), _tensor_name(config, own), (outputs, 1, taps), (first, last))
        first = last


def _with_kind(config: ModelConfig, path: Path, part: Part, dtype: Any) -> Part:
    """Return the part marked as FP8 matrix, as scales, or as a matrix that is not in FP8. Others are unchanged."""
    if (quantization := config.text.quantization) is None:
        return part
    if dtype == FLOAT8:
        return dataclasses.replace(part, kept=FLOAT8)
    factors = Factors(quantization, _inputs(config, part))
    if part.path[-1] in _FACTORS.values():
        shape = factors.stored_shape(part.tensor_shape)
        return dataclasses.replace(part, tensor_shape=shape, kept=SCALE, factors=factors)
    if path[:2] != ("language_model", "layers") or not (part.is_kernel or part.is_stack):
        return part
    name = ".".join(map(str, part.path[3:-1]))
    matrix = f"linear_attn.{_WHOLES[name].rpartition('.')[2]}" if name in _WHOLES else name
    if matrix not in _MATRICES:
        return part
    return dataclasses.replace(part, mixed=factors, is_listed=(path[2], matrix) in quantization.plain)


def _inputs(config: ModelConfig, part: Part) -> int:
    """Return the number of inputs of the matrices that a part contains or scales."""
    text = config.text
    match part.path[-2:]:
        case ("o_proj", _):
            return text.num_heads * text.head_dim
        case ("out_proj", _) if text.linear_attention is not None:
            return text.linear_attention.value_heads * text.linear_attention.value_width
        case ("down_proj", _):
            is_shared = text.experts is not None and "shared_expert" in part.path
            return text.experts.shared_size if is_shared and text.experts else text.intermediate_size
        case (_, "down_proj_scale" | "down_proj") if text.experts is not None:
            return text.experts.intermediate_size
        case _:
            return text.hidden_size


def _tensor_name(config: ModelConfig, path: Path) -> str:
    *folders, leaf = map(str, path)
    suffix = ""
    if leaf in _FACTORS.values() and config.text.quantization is not None:
        leaf, suffix = leaf.removesuffix("_scale"), config.text.quantization.suffix
    name = _rename(".".join([*folders, leaf if leaf in _STACKS else _LEAVES[leaf]]), _names(config).modules) + suffix
    return name if path[0] == "lm_head" else f"model.{name}"


def _names(config: ModelConfig) -> TensorNames:
    return FAMILIES[config.model_type].names


def _rename(name: str, beginnings: Mapping[str, str]) -> str:
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _tensor_shape(config: ModelConfig, path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    if path[-1] != "kernel":
        return shape
    if path[:3] == ("visual", "patch_embed", "proj"):
        vision = config.vision
        return shape[1], vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size
    return shape[::-1]
