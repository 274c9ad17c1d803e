"""From the parameters of a model to the tensors of a checkpoint.

Modules bear the library's names, so the mapping is a rule, not a table: a parameter's path is its tensor's name, except
for the last part, for what its family says (`TensorNames`), and for layers that are one product here: the matrix of
`qkv_proj` is [M, K, G + 2, D], of each KV head the queries, the key, the value; that of `gate_up_proj` [M, 2, F].

Matrices in 8 bits stay as they are stored, [out, in]: those of `qkv_proj` are [K, G + 2, D, M], of `gate_up_proj`
[2, F, M]. Beside each stand its factors, of which there is one for each output and group of inputs.
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

from vlcache_jax.models.config import FLOAT8, SCALE, ModelConfig, Quantization
from vlcache_jax.models.family import TensorNames
from vlcache_jax.models.model import abstract_model
from vlcache_jax.models.registry import FAMILIES

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """What the factors of matrices in 8 bits are stored as.

    Attributes:
      quantization: how.
      inputs: of the matrices.
    """

    quantization: Quantization
    inputs: int

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """That of factors which are [..., outputs, groups] in memory."""
        return *shape[:-2], *self.quantization.stored_shape(shape[-2], self.inputs)

    def spread(self, stored: np.ndarray, outputs: int) -> np.ndarray:
        """Factors as they lie in memory, float32 [..., outputs, groups]."""
        return self.quantization.spread(stored, outputs, self.inputs)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one tensor of a checkpoint is of a parameter: all of it, or some of the axis of its layers.

    Attributes:
      path: that the parameter would have if it were this part alone, as in the library's modules.
      shape: likewise.
      tensor: library name of the tensor it is made from.
      tensor_shape: as stored; kernels are stored [out, in] and become [in, out].
      place: first and last + 1 on the parameter's axis of layers, the one before that of their outputs; None: it is all
        of the parameter.
      is_turned: the matrices of experts are stored [E, out, in], as the library saves them, and not [E, in, out], as
        they are published.
      kept: the dtype that it has in a model of any dtype; None: it has the model's.
      factors: of matrices in 8 bits, how they are stored; None: it is something else.
      mixed: of matrices that are not in 8 bits here, but may be stored so: how their factors are; None: they may not.
    """

    path: Path
    shape: tuple[int, ...]
    tensor: str
    tensor_shape: tuple[int, ...]
    place: tuple[int, int] | None = None
    is_turned: bool = False
    kept: np.dtype | None = None
    factors: Factors | None = None
    mixed: Factors | None = None

    @property
    def is_stack(self) -> bool:
        """Whether it holds a matrix of each expert."""
        return self.path[-1] in _ALL_STACKS

    @property
    def is_kernel(self) -> bool:
        return self.path[-1] == "kernel"

    @property
    def in_8_bits(self) -> bool:
        return self.kept == FLOAT8

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Its dtype in a model of a dtype."""
        return self.kept or dtype

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """Where it is in the parameter's array, a view."""
        if self.place is None:
            return parameter
        if self.path[-1] in IN_8_BITS:
            return parameter[..., slice(*self.place), :, :]
        return parameter[..., slice(*self.place), :]

    def turned(self) -> Part:
        """The same, stored in the library's layout."""
        count, rows, columns = self.shape
        return dataclasses.replace(self, tensor_shape=(count, columns, rows), is_turned=True)

    @property
    def singles(self) -> list[dict[str, tuple[int, ...]]]:
        """Of a stack: the tensors of each expert where these are stored one by one, with their shapes, [out, in].

        An expert's matrix holds them one above the other.
        """
        folder, _, name = self.tensor.rpartition(".")
        suffix = self.factors.quantization.suffix if self.factors else ""
        names = _JOINED.get(name := name.removesuffix(suffix), (name,))
        count, rows, columns = self.shape if self.kept else (self.shape[0], *self.shape[:0:-1])
        shape: tuple[int, ...] = (rows // len(names), columns)
        if self.factors:
            shape = self.factors.stored_shape(shape)
        return [{f"{folder}.{i}.{name}.weight{suffix}": shape for name in names} for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, and what it is made of.

    Attributes:
      path: keys in the nested dict of parameters.
      shape: of the parameter.
      parts: one, or those of the library's layers that are one here.
    """

    path: Path
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def is_kernel(self) -> bool:
        return self.path[-1] == "kernel"

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Its dtype in a model of a dtype."""
        return self.parts[0].dtype_in(dtype)

    def nbytes(self, dtype: np.dtype) -> int:
        """Its bytes in a model of a dtype."""
        return math.prod(self.shape) * self.dtype_in(dtype).itemsize

    def turned(self) -> Parameter:
        """The same, stored in the library's layout."""
        return dataclasses.replace(self, parts=tuple(part.turned() for part in self.parts))


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter of a model, in the order of its tree."""
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
    """The nested dict of parameters with `jax.ShapeDtypeStruct` leaves."""
    return nnx.to_pure_dict(nnx.split(abstract_model(config, dtype))[1])


def library_name(name: str) -> str:
    """The library's name of a tensor of a checkpoint, which an older release, of any family, may have named."""
    return name if name.startswith(("model.visual.", "model.language_model.")) else _rename(name, _BEGINNINGS)


def published_name(config: ModelConfig, name: str) -> str:
    """The name under which the library saves a tensor; the inverse of `library_name`."""
    return _rename(name, {library: published for published, library in _names(config).published.items()})


_BEGINNINGS = {
    "visual.": "model.visual.",
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
    "model.": "model.language_model.",
}
_STACKS = ("gate_up_proj", "down_proj")  # a matrix of each expert
_FACTORS = {"weight": "weight_scale", **{name: f"{name}_scale" for name in _STACKS}}
_ALL_STACKS = *_STACKS, *(_FACTORS[name] for name in _STACKS)
IN_8_BITS = "weight", _FACTORS["weight"]  # leaves of layers that are stored [out, in]
# Of the library's layers, which are one here, on the axis before the last: all but the first are one there.
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias", "weight": "weight"}


def _parts(config: ModelConfig, path: Path, shape: tuple[int, ...]) -> Iterator[Part]:
    *folders, module, leaf = path
    if module not in _JOINED:
        yield Part(path, shape, _tensor_name(config, path), _tensor_shape(config, path, shape))
        return
    names = _JOINED[str(module)]
    begin, end = int(leaf == "kernel"), len(shape) - (leaf in IN_8_BITS)  # without the axis of inputs
    before, (*heads, count, width), behind = shape[:begin], shape[begin:end], shape[end:]
    first = 0
    for name, last in zip(names, range(count - len(names) + 1, count + 1), strict=True):
        own = *folders, name, leaf
        flat = *before, math.prod(heads) * (last - first) * width, *behind
        yield Part(own, flat, _tensor_name(config, own), _tensor_shape(config, own, flat), (first, last))
        first = last


def _with_kind(config: ModelConfig, path: Path, part: Part, dtype: Any) -> Part:
    """The part of a parameter as one of matrices in 8 bits, of their factors, or of such as are left out, if it is."""
    if (quantization := config.text.quantization) is None:
        return part
    if path[:2] == ("language_model", "layers") and (path[2], path[-2]) in quantization.left_out:
        is_matrix = part.is_kernel or part.is_stack
        return dataclasses.replace(part, mixed=Factors(quantization, _inputs(config, part))) if is_matrix else part
    if dtype == FLOAT8:
        return dataclasses.replace(part, kept=FLOAT8)
    if part.path[-1] not in _FACTORS.values():
        return part
    factors = Factors(quantization, _inputs(config, part))
    return dataclasses.replace(part, tensor_shape=factors.stored_shape(part.tensor_shape), kept=SCALE, factors=factors)


def _inputs(config: ModelConfig, part: Part) -> int:
    """Of the matrices that factors belong to."""
    text = config.text
    match part.path[-2:]:
        case ("o_proj", _):
            return text.num_heads * text.head_dim
        case ("down_proj", _):
            return text.intermediate_size
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
