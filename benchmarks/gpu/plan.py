"""Cases of a run, their order, and their common settings."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.shapes import ATTENTION, LINK, AttentionShape, LinkShape

Row = dict[str, Any]
SHAPES = ATTENTION["Qwen3-VL-8B"] + tuple(s for s in ATTENTION["Qwen2.5-VL-7B"] if s.H != 28)
REHEARSED = ("decode 64 over one prefix of 16384",)
MODEL = "qwen3-vl-8b"  # whose shape the models have, with random weights
KERNELS = ("paged_attention", "attention", "link")  # kernels that a model runs on


class GpuCase(NamedTuple):
    """A check or a measurement.

    Attributes:
      name: Name within its section.
      measure: Returns a row, or raises.
      kernels: Kernels that it checks, or that must be right for its measurement.
    """

    name: str
    measure: Callable[[], Row]
    kernels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GpuPlan:
    """Settings of a run.

    Attributes:
      rehearse: Run small cases on a CPU.
      out: Folder of the results.
      layers: Layers of the models' decoders; None is all.
      portable: Use the portable kernels, the only ones on GPUs other than Hopper.
    """

    rehearse: bool
    out: pathlib.Path
    layers: int | None = None
    portable: bool = False

    @property
    def repeats(self) -> int:
        return 1 if self.rehearse else 5

    @property
    def implementation(self) -> str:
        family = dispatch.PORTABLE if self.portable else dispatch.HOPPERS
        return family + dispatch.INTERPRETED if self.rehearse else family

    def shapes(self) -> tuple[AttentionShape, ...]:
        return tuple(s.in_small() for s in SHAPES if s.name in REHEARSED) if self.rehearse else SHAPES

    def links(self) -> tuple[LinkShape, ...]:
        return (LinkShape(16, 40, 8, 128),) if self.rehearse else LINK["Qwen3-VL-8B"]


def kernel_of(shape: AttentionShape) -> str:
    """Return the kernel that a case of attention runs on."""
    return "paged_attention" if shape.has_pages else "attention"
