"""Reuse policies: which tokens of reused images are recomputed, and in how many layers (host, per request).

A policy sees the layout of one request, in which every image is marked: "miss" (nothing to link, so computed), "exact"
(its KV was computed in this very context) or "approximate" (computed in another one). Text and misses are always
computed, exact images never, whatever the policy; it decides about approximate ones alone. Its result is a `Plan`, the
number of layers in which each token is computed; in full prefill every token stays to the last layer. `Scheduled`
follows a `Schedule`.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vlcache_jax.common.checks import check_whole, short
from vlcache_jax.inputs.layout import Layout
from vlcache_jax.reuse.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Plan:
    """What is computed of a request of n tokens, and where it is put.

    Attributes:
      depth: int16 [n]: in how many layers a token's K, V are fresh; num_layers + 1 = its logits are wanted too.
      slot: int32 [n], where a token's K, V stand among the request's slots; None is in the order of the prompt. A
        computed row sees the slots before its own.
      shift: whether tokens of approximate images that are not computed are moved by what those that are computed
        differ from what was linked (`vlcache_jax.reuse.shift`).
    """

    depth: npt.NDArray[np.int16]
    slot: npt.NDArray[np.int32] | None = None
    shift: bool = False

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """`slot`, never None."""
        return np.arange(len(self.depth), dtype=np.int32) if self.slot is None else self.slot

    def wanting(self, tokens: Sequence[int], num_layers: int) -> Plan:
        """The same plan, but with the logits of `tokens`, and of no others."""
        depth = np.minimum(self.depth, num_layers).astype(np.int16)
        depth[list(tokens)] = num_layers + 1
        return dataclasses.replace(self, depth=depth)

    def extended(self, count: int, num_layers: int) -> Plan:
        """The same plan for a prompt with `count` more tokens, which are computed in every layer."""
        size = len(self.depth)
        more = np.arange(size, size + count, dtype=np.int32)
        slot = None if self.slot is None else np.concatenate([self.slot, more])
        return Plan(np.concatenate([self.depth, np.full(count, num_layers, np.int16)]), slot, self.shift)

    def computing(self, tokens: slice, num_layers: int) -> Plan:
        """The plan if `tokens` have to be computed in every layer, and so in the order of the prompt."""
        depth = self.depth.copy()
        depth[tokens] = np.maximum(depth[tokens], num_layers)
        return Plan(depth, shift=self.shift)

    def behind(self, count: int) -> Plan:
        """The same plan if the first `count` tokens need not be computed."""
        depth = self.depth.copy()
        depth[:count] = 0
        return dataclasses.replace(self, depth=depth)

    def rows(self, num_layers: int) -> tuple[int, ...]:
        """Active rows in each layer."""
        return active_rows(self.depth, num_layers)


def active_rows(depth: npt.NDArray[np.int16], num_layers: int) -> tuple[int, ...]:
    """How many of some tokens are active in each layer, by their depths; counted in one pass."""
    done = np.cumsum(np.bincount(depth, minlength=num_layers))[:num_layers]
    return tuple((len(depth) - done).tolist())


def full_prefill(layout: Layout, num_layers: int, wanted: Sequence[int] | None = None) -> Plan:
    """Every token in every layer, and logits of the tokens `wanted` (by default of the last one)."""
    depth = np.full(len(layout), num_layers, np.int16)
    depth[[-1] if wanted is None else list(wanted)] = num_layers + 1
    return Plan(depth)


_GOLDEN = 1.618033988749895  # the root of x^2 = x + 1
_PLASTIC = 1.324717957244746  # the root of x^3 = x + 1


@runtime_checkable
class Policy(Protocol):
    """How images are reused.

    Attributes:
      name: in reports; as `parse.parse_policy` takes it, where there is such a word.
      links: whether records are used and made at all.
      approximates: whether K, V may be linked that were computed behind something else.
    """

    @property
    def name(self) -> str: ...

    @property
    def links(self) -> bool: ...

    @property
    def approximates(self) -> bool: ...

    def plan(self, layout: Layout, num_layers: int) -> Plan: ...


@dataclass(frozen=True)
class Off:
    """Every image is computed, and nothing is stored."""

    name: str = "off"
    links: bool = False
    approximates: bool = False

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return full_prefill(layout, num_layers)


@dataclass(frozen=True)
class Exact:
    """Images are linked where their context is the same. Answers are those of a cold run."""

    name: str = "exact"
    links: bool = True
    approximates: bool = False

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return first_tokens(layout, num_layers, lambda tokens: [tokens] * num_layers)


@dataclass(frozen=True)
class StaticRatio:
    """The first floor(ratio x T) of T image tokens are computed in every layer (VLCache, static r; 0 is full reuse)."""

    ratio: Fraction
    links: bool = True
    approximates: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    @property
    def name(self) -> str:
        return f"{float(self.ratio):g}" if self.ratio else "full"

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return first_tokens(layout, num_layers, lambda tokens: [int(self.ratio * tokens)] * num_layers)


@dataclass(frozen=True)
class TwoPass:
    """Full reuse as Prompt Cache and the baselines of MPIC and CacheBlend do it: text does not look at images.

    Text tokens see earlier text alone, at their places in the prompt; only the last one sees everything. (What the
    papers run in two passes is one here, with the images' slots between the text's and the last token's.) Beside an
    image that has to be computed, and where every image is in its own context, this is "full".
    """

    name: str = "full-two-pass"
    links: bool = True
    approximates: bool = True

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        plan = StaticRatio(Fraction(0)).plan(layout, num_layers)
        is_image = np.zeros(len(layout), bool)
        for span in layout.images:
            is_image[span.tokens] = True
        states = {span.state for span in layout.images}
        if "approximate" not in states or "miss" in states or is_image[-1]:
            return plan
        text = np.flatnonzero(~is_image)
        slot = np.empty(len(layout), np.int32)
        slot[np.concatenate([text[:-1], np.flatnonzero(is_image), text[-1:]])] = np.arange(len(layout))
        return Plan(plan.depth, slot)


@dataclass(frozen=True)
class MPIC:
    """The first k tokens of an image are computed in every layer (MPIC-k)."""

    k: int = 32
    links: bool = True
    approximates: bool = True

    def __post_init__(self) -> None:
        check_whole("k", self.k, 0)

    @property
    def name(self) -> str:
        return f"mpic-{self.k}"

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return first_tokens(layout, num_layers, lambda tokens: [min(self.k, tokens)] * num_layers)


@dataclass(frozen=True)
class EPIC:
    """k tokens of every image behind another context are computed in every layer (EPIC, LegoLink-k).

    EPIC's records are compiled alone, each image behind nothing: fill the cache by `llm.generate` with prompts that are
    an image's tokens and nothing else.

    Attributes:
      k: tokens.
      ends: the "first" k, the "last" k, or k at "both" ends.
    """

    k: int = 16
    ends: str = "first"
    links: bool = True
    approximates: bool = True

    def __post_init__(self) -> None:
        check_whole("k", self.k, 0)
        if self.ends not in ("first", "last", "both"):
            raise ValueError(f"ends must be first, last or both, got {self.ends!r}")

    @property
    def name(self) -> str:
        return f"epic-{self.k}" if self.ends == "first" else f"epic-{self.k}-{self.ends}"

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        first, last = self.k * (self.ends != "last"), self.k * (self.ends != "first")
        return edge_tokens(layout, num_layers, lambda tokens: (first, last))


@dataclass(frozen=True)
class Ends:
    """floor(ratio x T) of T image tokens are computed in every layer, half of them first ones, half last ones: our own.

    Of an odd number the first ones are one more.
    """

    ratio: Fraction
    links: bool = True
    approximates: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    @property
    def name(self) -> str:
        return f"ends-{float(self.ratio):g}"

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        def counts(tokens: int) -> tuple[int, int]:
            count = int(self.ratio * tokens)
            return count - count // 2, count // 2

        return edge_tokens(layout, num_layers, counts)


@dataclass(frozen=True)
class Spread:
    """Tokens all over an image are computed in every layer, and may move the others: our own.

    floor(ratio x T) of T tokens, evenly over rows and columns. What they differ from what was linked, in
    the mean, is how the new context moves the image; with `shift` it is added to the tokens that are not computed
    (`vlcache_jax.reuse.shift`), and at least one token is computed where any is asked for.

    Attributes:
      ratio: of an image's tokens that are computed; not used with a schedule.
      shift: whether the others are moved.
      schedule: numbers of tokens, layer by layer.
    """

    ratio: Fraction = Fraction(0)
    shift: bool = False
    schedule: Schedule | None = None
    links: bool = True
    approximates: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not isinstance(self.schedule, Schedule | None):
            raise ValueError(f"schedule must be a Schedule or None, got {self.schedule!r}")

    @property
    def name(self) -> str:
        size = f"{float(self.ratio):g}" if self.schedule is None else f"schedule {self.schedule.mean_text}"
        return f"{'shift' if self.shift else 'spread'}-{size}"

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        def counts(tokens: int) -> list[int]:
            least = int(self.shift)  # one token tells how the others move
            if self.schedule is None:
                return [max(int(self.ratio * tokens), least * (self.ratio > 0))] * num_layers
            return _scheduled_counts(self.schedule, tokens, num_layers, least)

        plan = first_tokens(layout, num_layers, counts, spread_ranks)
        return dataclasses.replace(plan, shift=self.shift and (self.ratio > 0 or self.schedule is not None))


@dataclass(frozen=True)
class Scheduled:
    """Each layer computes the first tokens that its level in a schedule says (VLCache, dynamic).

    K, V of the first layer do not depend on context, so what is linked there is right already: the first layer computes
    only what the second one needs (algorithm property P7).
    """

    schedule: Schedule
    links: bool = True
    approximates: bool = True

    @property
    def name(self) -> str:
        return f"schedule {self.schedule.mean_text}"

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return first_tokens(layout, num_layers, lambda tokens: _scheduled_counts(self.schedule, tokens, num_layers))


def _scheduled_counts(schedule: Schedule, tokens: int, num_layers: int, least: int = 0) -> list[int]:
    """Tokens that each layer computes, `least` where its level is above 0; the first one, what the second one needs."""
    count = [max(schedule.count(tokens, i), least * (schedule.levels[i] > 0)) for i in range(num_layers)]
    return count[1:2] + count[1:] if num_layers > 1 else count


def make_plan(policy: Policy, layout: Layout, num_layers: int) -> Plan:
    """The policy's plan, checked: a policy that leaves out what nothing else provides would answer wrongly.

    Raises:
      ValueError: the plan has another length, depths out of range, or misses rows that have to be computed.
    """
    plan = policy.plan(layout, num_layers)
    depth, name, most = plan.depth, policy.name, num_layers + 1
    if depth.shape != (len(layout),) or not np.issubdtype(depth.dtype, np.integer):
        raise ValueError(f"plan of {name} must be integers of shape {(len(layout),)}, got {depth.dtype} {depth.shape}")
    if depth.min() < 0 or depth.max() > most or depth[-1] != most:
        raise ValueError(
            f"plan of {name} must have depths from 0 to {most}, and {most} at the last token, "
            f"got {depth.min()} to {depth.max()}, and {depth[-1]}"
        )
    leasts = np.minimum.reduceat(depth, [span.start for span in layout.spans]).tolist()
    for span, least in zip(layout.spans, leasts, strict=True):
        if span.state in ("text", "miss") and least < num_layers:
            raise ValueError(
                f"plan of {name} must compute tokens {span.start} to {span.stop - 1} in every layer, "
                f"as no record has them, got a depth of {least}"
            )
    return plan


def first_tokens(
    layout: Layout,
    num_layers: int,
    counts: Callable[[int], Sequence[int]],
    ranks: Callable[[int, int], npt.NDArray[np.integer]] | None = None,
) -> Plan:
    """The plan that computes the first tokens of each approximate image.

    Args:
      counts: image tokens -> how many of them are computed in each layer, non-increasing, [num_layers].
      ranks: rows and columns of an image -> the place of each token in the order in which they come first; None is the
        order of the prompt.
    """
    depth = full_prefill(layout, num_layers).depth
    for span in layout.spans:
        if span.state == "exact":
            depth[span.tokens] = 0
        elif span.state == "approximate":
            rank: npt.NDArray[np.integer] = np.arange(span.length)
            if ranks is not None:
                columns = int(np.ptp(layout.positions[2, span.tokens])) + 1
                rank = ranks(span.length // columns, columns)
            depth[span.tokens] = (rank[:, None] < np.asarray(counts(span.length))).sum(1)
    depth[-1] = num_layers + 1  # the answer begins with its logits
    return Plan(depth)


@functools.lru_cache(maxsize=256)
def spread_ranks(rows: int, columns: int) -> npt.NDArray[np.integer]:
    """Each token's place in an order whose every beginning lies evenly over the image [rows x columns].

    The cells that the points of the R2 sequence (Roberts, 2018: steps of 1/g and 1/g^2 for the plastic number g) meet,
    in their order; on a line, of the R1 sequence, whose g is the golden ratio. So the tokens of a layer that computes
    fewer are among those of the layer before.
    """
    tokens = rows * columns
    ratio = _GOLDEN if 1 in (rows, columns) else _PLASTIC
    point = np.arange(8 * tokens)
    row = ((0.5 + point / ratio) % 1 * rows).astype(np.int64)
    column = ((0.5 + point / ratio**2) % 1 * columns).astype(np.int64)
    met, first = np.unique(row * columns + column, return_index=True)
    when = np.full(tokens, len(point))  # what no point meets comes last
    when[met] = first
    ranks = np.empty(tokens, np.int64)
    ranks[np.argsort(when, kind="stable")] = np.arange(tokens)
    ranks.setflags(write=False)
    return ranks


def edge_tokens(layout: Layout, num_layers: int, counts: Callable[[int], tuple[int, int]]) -> Plan:
    """The plan that computes the first and the last tokens of each approximate image in every layer.

    Args:
      counts: image tokens -> how many first ones, and how many last ones.
    """
    plan = first_tokens(layout, num_layers, lambda tokens: [min(counts(tokens)[0], tokens)] * num_layers)
    for span in layout.images:
        if span.state == "approximate":
            plan.depth[span.stop - min(counts(span.length)[1], span.length) : span.stop] = num_layers
    plan.depth[-1] = num_layers + 1
    return plan


def check_ratio(ratio: Fraction) -> None:
    """Raises a ValueError if it is none."""
    if not isinstance(ratio, numbers.Rational) or not 0 <= ratio <= 1:
        raise ValueError(f"reuse must be a ratio from 0 to 1, as a Fraction, got {short(ratio)}")
