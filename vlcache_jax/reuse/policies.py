"""Reuse policies: which tokens of reused images are recomputed, and in how many layers (host, per request).

A policy receives the layout of one request, in which every image has a state. A "miss" has no cached KV and is
computed. The KV of an "exact" image was computed in the same context, that of an "approximate" image in another one.
Text and misses are always computed, and exact images never. A policy decides about approximate images only. It returns
a `Plan`, the number of layers in which each token is computed.
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
    """Tokens of a request that are computed, and their KV slots. n is the number of tokens.

    Attributes:
      depth: int16 [n], the number of layers that compute a token's KV. num_layers + 1 also computes its logits.
      slot: int32 [n], the index of a token's KV among the request's KV slots. None (default): the order of the prompt.
        A computed token attends to the slots up to its own.
      shift: True if the other tokens of approximate images get the mean change of the computed tokens' KV
        (`vlcache_jax.reuse.shift`).
    """

    depth: npt.NDArray[np.int16]
    slot: npt.NDArray[np.int32] | None = None
    shift: bool = False

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """KV slot of each token, int32 [n]; the order of the prompt if `slot` is None."""
        return np.arange(len(self.depth), dtype=np.int32) if self.slot is None else self.slot

    def wanting(self, tokens: Sequence[int], num_layers: int) -> Plan:
        """Return the plan with the logits of `tokens` only."""
        depth = np.minimum(self.depth, num_layers).astype(np.int16)
        depth[list(tokens)] = num_layers + 1
        return dataclasses.replace(self, depth=depth)

    def extended(self, count: int, num_layers: int) -> Plan:
        """Return the plan of a prompt with `count` more tokens at its end, which every layer computes."""
        size = len(self.depth)
        more = np.arange(size, size + count, dtype=np.int32)
        slot = None if self.slot is None else np.concatenate([self.slot, more])
        return Plan(np.concatenate([self.depth, np.full(count, num_layers, np.int16)]), slot, self.shift)

    def computing(self, tokens: slice, num_layers: int) -> Plan:
        """Return the plan in which every layer computes `tokens`, with KV slots in the order of the prompt."""
        depth = self.depth.copy()
        depth[tokens] = np.maximum(depth[tokens], num_layers)
        return Plan(depth, shift=self.shift)

    def after(self, count: int) -> Plan:
        """Return the plan in which no layer computes the first `count` tokens."""
        depth = self.depth.copy()
        depth[:count] = 0
        return dataclasses.replace(self, depth=depth)

    def rows(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of computed tokens in each layer."""
        return active_rows(self.depth, num_layers)


def active_rows(depth: npt.NDArray[np.int16], num_layers: int) -> tuple[int, ...]:
    """Return the number of tokens that each layer computes, [num_layers], from the depth of each token."""
    done = np.cumsum(np.bincount(depth, minlength=num_layers))[:num_layers]
    return tuple((len(depth) - done).tolist())


def full_prefill(layout: Layout, num_layers: int, wanted: Sequence[int] | None = None) -> Plan:
    """Return the plan that computes every token in every layer, and the logits of `wanted` (default: the last)."""
    depth = np.full(len(layout), num_layers, np.int16)
    depth[[-1] if wanted is None else list(wanted)] = num_layers + 1
    return Plan(depth)


_GOLDEN = 1.618033988749895  # the root of x^2 = x + 1
_PLASTIC = 1.324717957244746  # the root of x^3 = x + 1


@runtime_checkable
class Policy(Protocol):
    """Rule that selects the tokens of reused images to recompute.

    `plan(layout, num_layers)` returns the plan of a request.

    Attributes:
      name: name in reports. `selection.parse_policy` reads it if the policy has a name there.
      links: True if cache entries are used and stored.
      approximates: True if KV that was computed in another context may be linked.
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
    """Policy without reuse: every image is computed, and nothing is stored."""

    name: str = "off"
    links: bool = False
    approximates: bool = False

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return full_prefill(layout, num_layers)


@dataclass(frozen=True)
class Exact:
    """Policy that links images in the same context only. Outputs are those of a run without reuse."""

    name: str = "exact"
    links: bool = True
    approximates: bool = False

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return first_tokens(layout, num_layers, lambda tokens: [tokens] * num_layers)


@dataclass(frozen=True)
class StaticRatio:
    """Policy that computes the first floor(ratio x T) of T image tokens in every layer (VLCache, static r).

    Ratio 0 is full reuse.

    Attributes:
      ratio: the ratio.
      shift: True if the other tokens are corrected, see `Spread`.
    """

    ratio: Fraction
    links: bool = True
    approximates: bool = True
    shift: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    @property
    def name(self) -> str:
        if self.shift:
            return f"shift-first-{float(self.ratio):g}"
        return f"{float(self.ratio):g}" if self.ratio else "full"

    def edges(self, tokens: int) -> tuple[int, int]:
        """Return the numbers of first and of last tokens of an image that are computed."""
        return max(int(self.ratio * tokens), int(self.shift)), 0

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return edge_tokens(layout, num_layers, self.edges, shift=self.shift)


@dataclass(frozen=True)
class TwoPass:
    """Full reuse of Prompt Cache and of the baselines of MPIC and CacheBlend: text does not attend to images.

    Text tokens attend to earlier text only, at their positions in the prompt. The last token attends to everything.
    The papers run two passes. Here it is one, with the images' KV slots between those of the text and of the last
    token. If an image is a miss, or every image is exact, the plan is that of "full".
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
    """Policy that computes the first `k` tokens of an image in every layer (MPIC-k)."""

    k: int = 32
    links: bool = True
    approximates: bool = True

    def __post_init__(self) -> None:
        check_whole("k", self.k, 0)

    @property
    def name(self) -> str:
        return f"mpic-{self.k}"

    def edges(self, tokens: int) -> tuple[int, int]:
        """Return the numbers of first and of last tokens of an image that are computed."""
        return self.k, 0

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return edge_tokens(layout, num_layers, self.edges)


@dataclass(frozen=True)
class EPIC:
    """Policy that computes `k` tokens of every image in a new context in every layer (EPIC, LegoLink-k).

    EPIC caches each image by itself, with nothing before it. Fill the cache by `llm.generate` with prompts that contain
    only the tokens of one image.

    Attributes:
      k: number of tokens.
      ends: "first" (default): the first k tokens; "last": the last k; "both": k at each end.
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

    def edges(self, tokens: int) -> tuple[int, int]:
        """Return the numbers of first and of last tokens of an image that are computed."""
        return self.k * (self.ends != "last"), self.k * (self.ends != "first")

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return edge_tokens(layout, num_layers, self.edges)


@dataclass(frozen=True)
class Ends:
    """Policy that computes floor(ratio x T) of T image tokens in every layer: half at each end. Not from a paper.

    If the number is odd, the beginning has one token more.

    Attributes:
      ratio: the ratio.
      shift: True if the other tokens are corrected, see `Spread`.
    """

    ratio: Fraction
    links: bool = True
    approximates: bool = True
    shift: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    @property
    def name(self) -> str:
        return f"{'shift-' * self.shift}ends-{float(self.ratio):g}"

    def edges(self, tokens: int) -> tuple[int, int]:
        """Return the numbers of first and of last tokens of an image that are computed."""
        count = max(int(self.ratio * tokens), int(self.shift))
        return count - count // 2, count // 2

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return edge_tokens(layout, num_layers, self.edges, shift=self.shift)


@dataclass(frozen=True)
class Spread:
    """Policy that computes tokens spread over an image in every layer, and can correct the others. Not from a paper.

    It computes floor(ratio x T) of T tokens, spread evenly over rows and columns. `shift` adds the mean change of their
    KV to the tokens that are not computed (`vlcache_jax.reuse.shift`). With `shift` and a ratio above 0, at least one
    token is computed.

    Attributes:
      ratio: ratio of an image's tokens that are computed; not used with a schedule.
      shift: True if the other tokens are corrected.
      schedule: ratios of the layers, in place of `ratio`.
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
            min_count = int(self.shift)  # the correction needs one computed token
            if self.schedule is None:
                return [max(int(self.ratio * tokens), min_count * (self.ratio > 0))] * num_layers
            return _scheduled_counts(self.schedule, tokens, num_layers, min_count)

        plan = first_tokens(layout, num_layers, counts, spread_ranks)
        return dataclasses.replace(plan, shift=self.shift and (self.ratio > 0 or self.schedule is not None))


@dataclass(frozen=True)
class Scheduled:
    """Policy that computes the first tokens of an image, as many as a schedule has for the layer (VLCache, dynamic).

    KV of the first layer does not depend on the context, so linked KV is exact there. The first layer computes only the
    tokens that the second layer needs (algorithm property P7).
    """

    schedule: Schedule
    links: bool = True
    approximates: bool = True

    @property
    def name(self) -> str:
        return f"schedule {self.schedule.mean_text}"

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        return first_tokens(layout, num_layers, lambda tokens: _scheduled_counts(self.schedule, tokens, num_layers))


def _scheduled_counts(schedule: Schedule, tokens: int, num_layers: int, min_count: int = 0) -> list[int]:
    """Return the number of tokens that each layer computes, [num_layers]; the first layer has that of the second.

    Layers with a level above 0 compute at least `min_count`.
    """
    count = [max(schedule.count(tokens, i), min_count * (schedule.levels[i] > 0)) for i in range(num_layers)]
    return count[1:2] + count[1:] if num_layers > 1 else count


def make_plan(policy: Policy, layout: Layout, num_layers: int) -> Plan:
    """Return the plan of a policy after a check that every token is either computed or cached.

    Raises:
      ValueError: the plan has a wrong shape, depths out of range, or omits tokens that no cache entry has.
    """
    plan = policy.plan(layout, num_layers)
    depth, name, max_depth = plan.depth, policy.name, num_layers + 1
    if depth.shape != (len(layout),) or not np.issubdtype(depth.dtype, np.integer):
        raise ValueError(f"plan of {name} must be integers of shape {(len(layout),)}, got {depth.dtype} {depth.shape}")
    if depth.min() < 0 or depth.max() > max_depth or depth[-1] != max_depth:
        raise ValueError(
            f"plan of {name} must have depths from 0 to {max_depth}, and {max_depth} at the last token, "
            f"got {depth.min()} to {depth.max()}, and {depth[-1]}"
        )
    min_depths = np.minimum.reduceat(depth, [span.start for span in layout.spans]).tolist()
    for span, min_depth in zip(layout.spans, min_depths, strict=True):
        if span.state in ("text", "miss") and min_depth < num_layers:
            raise ValueError(
                f"plan of {name} must compute tokens {span.start} to {span.stop - 1} in every layer, "
                f"because no cache entry has them, got a depth of {min_depth}"
            )
    return plan


def first_tokens(
    layout: Layout,
    num_layers: int,
    counts: Callable[[int], Sequence[int]],
    ranks: Callable[[int, int], npt.NDArray[np.integer]] | None = None,
) -> Plan:
    """Return the plan that computes the first tokens of each approximate image.

    Args:
      counts: returns the number of computed tokens in each layer, non-increasing [num_layers], for a number of image
        tokens.
      ranks: returns the rank of each token for the rows and columns of an image; tokens of low rank are computed first.
        None (default): the order of the prompt.
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
    depth[-1] = num_layers + 1  # the first output token is sampled from its logits
    return Plan(depth)


@functools.lru_cache(maxsize=256)
def spread_ranks(rows: int, columns: int) -> npt.NDArray[np.integer]:
    """Return the rank of each token, [rows x columns], in an order whose prefixes are spread evenly over the image.

    The order is that in which the points of the R2 sequence reach the cells (Roberts, 2018: steps of 1/g and 1/g^2 for
    the plastic number g). A single row or column uses the R1 sequence, whose g is the golden ratio. The tokens of a
    layer that computes fewer are therefore a subset of those of the layer before.
    """
    tokens = rows * columns
    ratio = _GOLDEN if 1 in (rows, columns) else _PLASTIC
    point = np.arange(8 * tokens)
    row = ((0.5 + point / ratio) % 1 * rows).astype(np.int64)
    column = ((0.5 + point / ratio**2) % 1 * columns).astype(np.int64)
    met, first = np.unique(row * columns + column, return_index=True)
    when = np.full(tokens, len(point))  # cells that no point reaches come last
    when[met] = first
    ranks = np.empty(tokens, np.int64)
    ranks[np.argsort(when, kind="stable")] = np.arange(tokens)
    ranks.setflags(write=False)
    return ranks


def edge_tokens(
    layout: Layout, num_layers: int, counts: Callable[[int], tuple[int, int]], *, shift: bool = False
) -> Plan:
    """Return the plan that computes the first and the last tokens of each approximate image in every layer.

    Args:
      counts: returns the numbers of first and of last tokens for a number of image tokens.
      shift: see `Plan`.
    """
    plan = first_tokens(layout, num_layers, lambda tokens: [min(counts(tokens)[0], tokens)] * num_layers)
    for span in layout.images:
        if span.state == "approximate":
            plan.depth[span.stop - min(counts(span.length)[1], span.length) : span.stop] = num_layers
    plan.depth[-1] = num_layers + 1
    return dataclasses.replace(plan, shift=shift)


def check_ratio(ratio: Fraction) -> None:
    """Check that `ratio` is a rational number from 0 to 1.

    Raises:
      ValueError: it is not.
    """
    if not isinstance(ratio, numbers.Rational) or not 0 <= ratio <= 1:
        raise ValueError(f"reuse must be a ratio from 0 to 1, as a Fraction, got {short(ratio)}")
