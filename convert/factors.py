"""The factors of matrices in 8 bits: as they are stored, and as the model takes them."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from vlcache_jax.models.config import SCALE
from vlcache_jax.models.params import Factors


class FileTensor(Protocol):
    """A tensor as it lies in a file."""

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
class _Made:
    """A float32 tensor that is made of a stored one.

    Attributes:
      tensor: the stored one.
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
        """All of it, in memory of its own."""
        raise NotImplementedError

    def sha256(self) -> str:
        """The digest of what is made: the same values may be stored in other dtypes and blocks."""
        return hashlib.sha256(self.view().view(np.uint8)).hexdigest()


@dataclasses.dataclass(frozen=True)
class StoredFactors(_Made):
    """Stored factors as if they were a tensor of what the model takes: one for each output and group of inputs.

    Attributes:
      tensor: as they are stored.
      factors: how.
      outputs: of a matrix that they belong to.
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
        """All of them, in memory of their own."""
        return self.factors.spread(self.tensor.view(), self.outputs)

    def matrices(self) -> Iterator[np.ndarray]:
        """Of one matrix of a stack after the other."""
        return (self.factors.spread(one, self.outputs) for one in self.tensor.view())

    def release(self) -> None:
        self.tensor.release()

    @property
    def flaw(self) -> str | None:
        """What is wrong with their values; None: nothing."""
        values = self.tensor.view().astype(SCALE)
        wrong = values[~(np.isfinite(values) & (values > 0))]
        self.tensor.release()
        return None if not wrong.size else f"{self.name}: {wrong.size} of {values.size}, such as {wrong[0]:g}"


@dataclasses.dataclass(frozen=True)
class Dequantized(_Made):
    """A stored matrix in 8 bits, or a stack of them, as if it were a tensor of what it stands for.

    Attributes:
      tensor: the matrix, [..., out, in].
      factors: its own.
    """

    factors: StoredFactors

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes + self.factors.nbytes

    def view(self) -> np.ndarray:
        """All of it, float32, in memory of its own."""
        return _product(self.tensor.view(), self.factors.view())

    def matrices(self) -> Iterator[np.ndarray]:
        """One matrix of a stack after the other."""
        return map(_product, self.tensor.view(), self.factors.matrices())

    def release(self) -> None:
        self.tensor.release()
        self.factors.release()

    @property
    def flaw(self) -> str | None:
        """See `StoredFactors.flaw`."""
        return self.factors.flaw


def _product(matrix: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Each value of [..., out, in] times the factor of its group."""
    grouped = matrix.astype(SCALE).reshape(*factors.shape, -1)
    grouped *= factors[..., None]
    return grouped.reshape(matrix.shape)
