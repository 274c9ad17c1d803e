"""Scales of FP8 matrices in the model's layout, and dequantized matrices, as views of stored tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from vlcache_jax.models.params import Factors
from vlcache_jax.models.quantization import SCALE


class FileTensor(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> pathlib.Path: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def view(self) -> np.ndarray: ...
    def release(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class _DerivedTensor:
    """A float32 tensor that is computed from a stored one.

    Attributes:
      tensor: the stored tensor.
    """

    tensor: FileTensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def file(self) -> pathlib.Path:
        return self.tensor.file

    @property
    def dtype(self) -> np.dtype:
        return SCALE

    def view(self) -> np.ndarray:
        """Return the tensor, in new memory."""
        raise NotImplementedError

    def sha256(self) -> str:
        """Return the digest of the computed values, which may be stored in different dtypes and blocks."""
        return hashlib.sha256(self.view().view(np.uint8)).hexdigest()


@dataclasses.dataclass(frozen=True)
class StoredFactors(_DerivedTensor):
    """Stored scales as a tensor in the model's layout: one for each output and group of inputs.

    Attributes:
      tensor: the stored scales.
      factors: their storage.
      outputs: number of outputs of their matrix.
    """

    factors: Factors
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        inputs = self.factors.inputs
        return *self.tensor.shape[:-2], self.outputs, inputs // self.factors.quantization.group(inputs)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def view(self) -> np.ndarray:
        """Return the scales, float32 [..., outputs, groups], in new memory."""
        return self.factors.spread(self.tensor.view(), self.outputs)

    def matrices(self) -> Iterator[np.ndarray]:
        """Return an iterator over the scales of each matrix of a stack."""
        return (self.factors.spread(one, self.outputs) for one in self.tensor.view())

    def release(self) -> None:
        self.tensor.release()

    @property
    def flaw(self) -> str | None:
        """Description of values that are not finite and above 0, or None if there are none."""
        values = self.tensor.view().astype(SCALE)
        wrong = values[~(np.isfinite(values) & (values > 0))]
        self.tensor.release()
        return None if not wrong.size else f"{self.name}: {wrong.size} of {values.size}, such as {wrong[0]:g}"


@dataclasses.dataclass(frozen=True)
class Dequantized(_DerivedTensor):
    """A stored FP8 matrix, or a stack of them, as a dequantized tensor.

    Attributes:
      tensor: the matrix, [..., out, in].
      factors: its scales.
    """

    factors: StoredFactors

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes + self.factors.nbytes

    def view(self) -> np.ndarray:
        """Return the dequantized tensor, float32, in new memory."""
        return _product(self.tensor.view(), self.factors.view())

    def matrices(self) -> Iterator[np.ndarray]:
        """Return an iterator over the dequantized matrices of a stack."""
        return map(_product, self.tensor.view(), self.factors.matrices())

    def release(self) -> None:
        self.tensor.release()
        self.factors.release()

    @property
    def flaw(self) -> str | None:
        """Description of invalid scales, see `StoredFactors.flaw`."""
        return self.factors.flaw


def _product(matrix: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Multiply each value of [..., out, in] by the scale of its group."""
    grouped = matrix.astype(SCALE).reshape(*factors.shape, -1)
    grouped *= factors[..., None]
    return grouped.reshape(matrix.shape)
