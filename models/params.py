"""From the parameters of a model to the tensors of a checkpoint.

Modules bear the library's names, so the mapping is a rule, not a table: a parameter's path is its tensor's name, except
for the last part and for what its family says (`TensorNames`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.family import TensorNames
from vlcache_jax.models.model import abstract_model
from vlcache_jax.models.registry import FAMILIES

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter and where it comes from.

    Attributes:
      path: keys in the nested dict of parameters.
      shape: of the parameter.
      tensor: library name of the tensor it is made from.
      tensor_shape: as stored; kernels are stored [out, in] and become [in, out].
      is_turned: the matrices of experts are stored [E, out, in], as the library saves them, and not [E, in, out], as
        they are published.
    """

    path: Path
    shape: tuple[int, ...]
    tensor: str
    tensor_shape: tuple[int, ...]
    is_turned: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether it holds a matrix of each expert."""
        return self.path[-1] in _STACKS

    def turned(self) -> Parameter:
        """The same, stored in the library's layout."""
        count, rows, columns = self.shape
        return dataclasses.replace(self, tensor_shape=(count, columns, rows), is_turned=True)

    @property
    def singles(self) -> list[dict[str, tuple[int, int]]]:
        """Of a stack: the tensors of each expert where these are stored one by one, with their shapes, [out, in].

        An expert's matrix holds them one above the other.
        """
        folder, _, name = self.tensor.rpartition(".")
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        count, columns, rows = self.shape
        shape = rows // len(parts), columns
        return [{f"{folder}.{i}.{part}.weight": shape for part in parts} for i in range(count)]

    @property
    def is_kernel(self) -> bool:
        return self.path[-1] == "kernel"


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
        tensor = _tensor_name(config, path)
        shape = tuple(leaf.shape)
        found.append(Parameter(path, shape, tensor, _tensor_shape(config, path, shape)))
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
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def _tensor_name(config: ModelConfig, path: Path) -> str:
    *folders, leaf = map(str, path)
    name = _rename(".".join([*folders, leaf if leaf in _STACKS else _LEAVES[leaf]]), _names(config).modules)
    return name if path[0] == "lm_head" else f"model.{name}"


def _names(config: ModelConfig) -> TensorNames:
    return FAMILIES[config.model_type].NAMES


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
