"""Tokens of linked images that are computed in models with states: the first ones, and some of the last.

A layer with a state takes the tokens between them as one map of its state, see `layer_kinds.BlockKind`. So they are the
same in each layer, and are known when the map is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, runtime_checkable

from vlcache_jax.inputs.layout import ImageSpan, Layout
from vlcache_jax.reuse.policies import Plan, Policy, edge_tokens


@runtime_checkable
class EdgePolicy(Policy, Protocol):
    """Policy that computes the first and the last tokens of an image, the same in each layer."""

    def edges(self, tokens: int) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Edges:
    """An edge policy in a model with states.

    Attributes:
      policy: the policy.
      least: least number of first tokens that are computed. The convolution of the next one then sees no token before
        the image.
    """

    policy: EdgePolicy
    least: int
    links: bool = True
    approximates: bool = True

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def computed(self) -> str:
        """Name of the tokens that are computed, which is the same with and without a shift of the others."""
        name, ratio = self.name.removeprefix("shift-").removeprefix("first-"), getattr(self.policy, "ratio", None)
        is_rounded = ratio is not None and Fraction(f"{float(ratio):g}") != ratio  # two ratios may have one name
        return f"{name} = {ratio}" if is_rounded else name

    def counts(self, tokens: int) -> tuple[int, int]:
        """Return the numbers of first and of last tokens of an image, together at most all of them."""
        first, last = self.policy.edges(tokens)
        first = min(max(first, self.least), tokens)
        return first, min(last, tokens - first)

    def inner(self, span: ImageSpan) -> range:
        """Return the indices of the tokens of an image that are not computed."""
        first, last = self.counts(span.length)
        return range(span.start + first, span.stop - last)

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        """Return the plan of a request."""
        return edge_tokens(layout, num_layers, self.counts, shift=getattr(self.policy, "shift", False))
