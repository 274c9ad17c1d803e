"""What a program is: its sizes, what it takes, and what it computes.

Every shape follows from its fields and from `Shapes`, and from nothing else. Plain nested dicts cross into programs,
never modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import numpy as np

from vlcache_jax.device.ladder import Ladder
from vlcache_jax.device.programs.shapes import Shapes
from vlcache_jax.device.sampler import FIXED
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.pallas_kernels import split
from vlcache_jax.pallas_kernels.split import WHOLE
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import SelectingPolicy

Key = tuple[Any, ...]  # a program's name and its sizes

# Programs on users' disks are found by these names, too.
_ON_DISK = {
    "pool": "<lambda>", "encoder_rows": "<lambda>", "lanes": "empty_lanes", "copy": "_copy", "slice": "<lambda>",
    "layers": "block", "window": "<unnamed function>", "score_rows": "score", "choose": "chosen", "narrow": "narrowed",
    "take": "<lambda>", "keep_rows": "keep",
}  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """What requests can call for, besides what all do: prefill, decoding, sampling and scoring.

    Attributes:
      ladder: rungs that batches have.
      linking: images are linked.
      shrinking: layers that fewer rows leave than enter, besides the last one. Any number may leave: a step that ends
        inside an image may hold nothing but rows that drop out early.
      selecting: rows are chosen on the device.
      shifting: linked K, V are moved.
    """

    ladder: Ladder
    linking: bool = False
    shrinking: Collection[int] = ()
    selecting: SelectingPolicy | None = None
    shifting: bool = False

    @classmethod
    def of(cls, policy: Policy, shapes: Shapes) -> Demand:
        """That of requests under a policy."""
        layers = shapes.config.text.num_layers
        image = ImageRef("", (1, 200, 200), 10_000, _no_patches)
        layout = make_layout(np.zeros(10_001, np.int32), [0], [image], 2, ["approximate"])
        plan = policy.plan(layout, layers)
        rows = list(plan.rows(layers))
        selecting = policy if isinstance(policy, SelectingPolicy) else None
        if selecting is not None:
            for layer, kept in enumerate(selecting.keep(layout, layers), selecting.check_layer + 1):
                rows[layer] += kept
        shrinking = {layer for layer in range(layers - 1) if rows[layer + 1] < rows[layer]}
        return cls(shapes.ladder, policy.links, shrinking, selecting, plan.shift)


@dataclass(frozen=True)
class Repeat:
    """What requests call for when they come again, and may not have called for before.

    Attributes:
      demand: rows of their steps, and how many of these have logits.
      linked: tokens that images are padded to, and how many of them are linked together.
      recalled: tokens that are linked together from the device tier.
      copied: pages that are copied together.
    """

    demand: Demand
    linked: Collection[tuple[int, int]]
    recalled: Collection[int]
    copied: Collection[int]


def _no_patches() -> Patches:
    raise AssertionError("this image has no pixels")


@dataclass(frozen=True)
class Program[R](ABC):
    """A program that returns R, and the key of what is compiled of it.

    Attributes:
      name: as users are told of it.
      follows_rows: whether its sizes depend on how many rows a step has: a repeat, whose images are known, has fewer.
    """

    name: ClassVar[str]
    follows_rows: ClassVar[bool] = False

    @property
    def donates(self) -> tuple[int, ...]:
        """Numbers of the arguments that are updated in place."""
        return ()

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        """Those of this kind that requests can call for; what has no sizes, they always do."""
        return [cls()]

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        """Those of this kind that a repeat can call for; what depends on nothing that changes has been used."""
        return cls.family(shapes, repeat.demand) if cls.follows_rows else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        """What it takes: trees of abstract arrays."""
        return ()

    @abstractmethod
    def compute(self, shapes: Shapes, *arguments: Any, **_: Any) -> R:
        """What is traced."""

    @property
    def gives(self) -> Any:
        """How results lie on several devices: a tree that begins as theirs does."""
        return WHOLE

    def function(self, shapes: Shapes) -> Callable[..., R]:
        """`compute` as it is compiled."""
        function = functools.partial(self.compute, shapes)
        vars(function)["__name__"] = _ON_DISK.get(self.name, self.name)
        return function

    def jitted(self, shapes: Shapes) -> jax.stages.Wrapped:
        """What is lowered for `arguments`."""
        devices = shapes.devices
        how = {} if devices.mesh is None else {"out_shardings": devices.shardings(self.gives)}
        return jax.jit(self.function(shapes), donate_argnums=self.donates, **how)

    def lowered(self, shapes: Shapes) -> jax.stages.Lowered:
        """The program for `arguments`; those of which nothing else is said are whole on each of several devices."""
        with split.over(shapes.devices.mesh):
            return self.jitted(shapes).lower(*shapes.devices.placed(self.arguments(shapes)))

    @property
    def key(self) -> Key:
        """Name and sizes, as users are told of them."""
        return self.name, *(getattr(self, field.name) for field in dataclasses.fields(self))

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.key[1:] if type(size) is int or size in FIXED)
        return f"{self.name}({sizes})" if sizes else self.name
