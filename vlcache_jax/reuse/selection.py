"""Policies that choose tokens on the device, and how `reuse` is read.

Such a policy computes the first layers whole and continues with the tokens that deviate most. How many continue is
known before the run, so that shapes are static. Which ones is decided inside the compiled programs, from the difference
between the KV that was linked and the KV just computed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import numbers
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from os import PathLike
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.common.checks import is_a, short, shorten
from vlcache_jax.inputs.layout import ImageSpan, Layout
from vlcache_jax.models import Rows
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.policies import (
    EPIC,
    MPIC,
    Ends,
    Exact,
    Off,
    Plan,
    Policy,
    Scheduled,
    Spread,
    StaticRatio,
    TwoPass,
    check_ratio,
    full_prefill,
    make_plan,
)
from vlcache_jax.reuse.schedule import Schedule

_BLOCK = 128  # rows whose attention is held at once


@dataclass(frozen=True, eq=False)
class Projected:
    """What a layer's rows become before attention, and what was linked for them.

    Attributes:
      q: rotated queries, [N, H, D].
      k, v: rotated keys and values of the rows, [N, K, D].
      linked_k, linked_v: those of the pool at the rows' slots, before the layer runs, [N, K, D].
      window: all keys of the request with the rows' own keys written, and with those of image rows as they were linked,
        each [W, K, D].
      place: of each row in the window, beyond it for padding, [N].
      end: a row sees the places before it, [N].
      asks: rows of the prompt behind its last image, [N].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    linked_k: jax.Array
    linked_v: jax.Array
    window: tuple[jax.Array, jax.Array]
    place: jax.Array
    end: jax.Array
    asks: jax.Array


@runtime_checkable
class SelectingPolicy(Policy, Protocol):
    """A policy that chooses among the tokens of approximate images on the device.

    All rows are computed up to layer `check_layer`, which computes K, V of all of them. Only those with the highest
    scores attend there and go on: the next layer computes the first of the numbers that `keep` returns, the layer after
    it the second, and so on; they must not increase.

    Attributes:
      check_layer: the last layer that computes all rows.
      scored_layers: whose scores are added up, none behind the check layer.
    """

    @property
    def check_layer(self) -> int: ...

    @property
    def scored_layers(self) -> tuple[int, ...]: ...

    def keep(self, layout: Layout, num_layers: int) -> tuple[int, ...]: ...

    def score(self, rows: Projected) -> jax.Array: ...


class _Selecting:
    """What the selecting policies share."""

    links = True
    approximates = True
    ratio: Fraction
    check_layer: int

    def keep(self, layout: Layout, num_layers: int) -> tuple[int, ...]:
        """floor(ratio x E) of the E tokens of approximate images, in every layer behind the check layer."""
        return (int(self.ratio * _reused(layout)),) * (num_layers - 1 - self.check_layer)

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        """The rows that are not chosen leave behind the check layer."""
        if num_layers < self.check_layer + 2:
            raise ValueError(f"reuse must leave layers behind layer {self.check_layer}, got a model of {num_layers}")
        depth = full_prefill(layout, num_layers).depth
        for span in layout.images:
            if span.state == "exact":
                depth[span.tokens] = 0
            elif span.state == "approximate":
                depth[span.tokens] = self.check_layer + 1
        depth[-1] = num_layers + 1
        return Plan(depth)


def _reused(layout: Layout) -> int:
    """Tokens of approximate images."""
    return sum(span.length for span in layout.images if span.state == "approximate")


@dataclass(frozen=True)
class CacheBlend(_Selecting):
    """The tokens whose K, V deviate most (CacheBlend).

    Attributes:
      ratio: of the reused tokens that go on behind the check layer.
      variant: "vlcache_baseline": K and V of layers 0 to 2 (the baseline of the VLCache paper, Table 5); "lmcache":
        keys of layer 1; "proto": values of layer 1 (the reference prototype). Squared L2 distances.
    """

    ratio: Fraction
    variant: str = "vlcache_baseline"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.variant not in ("vlcache_baseline", "lmcache", "proto"):
            raise ValueError(f"variant must be vlcache_baseline, lmcache or proto, got {self.variant!r}")

    @property
    def name(self) -> str:
        variant = "" if self.variant == "vlcache_baseline" else f"{self.variant}-"
        return f"cacheblend-{variant}{float(self.ratio):g}"

    @property
    def check_layer(self) -> int:  # type: ignore[override]
        return 2 if self.variant == "vlcache_baseline" else 1

    @property
    def scored_layers(self) -> tuple[int, ...]:
        return (0, 1, 2) if self.variant == "vlcache_baseline" else (1,)

    def score(self, rows: Projected) -> jax.Array:
        k, v = _squared_distance(rows.k, rows.linked_k), _squared_distance(rows.v, rows.linked_v)
        return {"vlcache_baseline": k + v, "lmcache": k, "proto": v}[self.variant]


@dataclass(frozen=True)
class KVShare(_Selecting):
    """The tokens whose deviation is looked at most (KVShare).

    Attributes:
      ratio: of the reused tokens that go on behind layer 1.
      selector: "dhd": attention received, times the L1 distance of values (the paper's own); "attn_dist": how far the
        attention that a token receives changes with the keys (as the VLCache paper words its baseline).
    """

    ratio: Fraction
    selector: str = "dhd"
    check_layer: int = 1

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.selector not in ("dhd", "attn_dist"):
            raise ValueError(f"selector must be dhd or attn_dist, got {self.selector!r}")

    @property
    def name(self) -> str:
        return f"kvshare-{'attn-' if self.selector == 'attn_dist' else ''}{float(self.ratio):g}"

    @property
    def scored_layers(self) -> tuple[int, ...]:
        return (self.check_layer,)

    def score(self, rows: Projected) -> jax.Array:
        new, old = rows.window
        if self.selector == "attn_dist":
            changed = _column_sums(rows, lambda q, see: jnp.abs(_attention(q, new, see) - _attention(q, old, see)))
            return changed.sum(1)
        received = _column_sums(rows, lambda q, see: _attention(q, new, see))
        kv_heads = rows.v.shape[1]
        per_kv_head = received.reshape(len(received), kv_heads, -1).sum(2)
        distance = jnp.abs(rows.v.astype(jnp.float32) - rows.linked_v.astype(jnp.float32)).sum(2)
        return (per_kv_head * distance).sum(1)


@dataclass(frozen=True)
class QuestionScores(_Selecting):
    """The tokens that the question looks at and whose K, V deviate: our own.

    Attention from the rows behind the last image, which are about to answer, times the L2 distance of K and V, in one
    layer. How many rows go on is a ratio, or a schedule's levels: its sizes, with members chosen from the data.

    Attributes:
      ratio: of the reused tokens that go on behind the check layer; not used with a schedule.
      check_layer: the layer that is looked at.
      schedule: numbers of rows, layer by layer.
    """

    ratio: Fraction = Fraction(0)
    check_layer: int = 1
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not is_a(self.check_layer, int) or self.check_layer < 1:
            raise ValueError(
                f"check_layer must be an integer of at least 1 (nothing deviates in layer 0), got {self.check_layer!r}"
            )

    @property
    def name(self) -> str:
        size = f"{float(self.ratio):g}" if self.schedule is None else f"schedule {self.schedule.mean_text}"
        return f"asked-{size}" + (f" from layer {self.check_layer}" if self.check_layer > 1 else "")

    @property
    def scored_layers(self) -> tuple[int, ...]:
        return (self.check_layer,)

    def keep(self, layout: Layout, num_layers: int) -> tuple[int, ...]:
        if self.schedule is None:
            return super().keep(layout, num_layers)
        return tuple(self.schedule.count(_reused(layout), layer) for layer in range(self.check_layer + 1, num_layers))

    def score(self, rows: Projected) -> jax.Array:
        asking = dataclasses.replace(rows, end=jnp.where(rows.asks, rows.end, 0))
        received = _column_sums(asking, lambda q, see: _attention(q, rows.window[0], see)).sum(1)
        return received * jnp.sqrt(_squared_distance(rows.k, rows.linked_k) + _squared_distance(rows.v, rows.linked_v))


# What `reuse` may name, before a dash and the ratio.
NAMED: dict[str, Callable[[Fraction], SelectingPolicy]] = {
    "cacheblend": CacheBlend,
    "cacheblend-lmcache": functools.partial(CacheBlend, variant="lmcache"),
    "cacheblend-proto": functools.partial(CacheBlend, variant="proto"),
    "asked": QuestionScores,
    "kvshare": KVShare,
    "kvshare-attn": functools.partial(KVShare, selector="attn_dist"),
}


def _squared_distance(new: jax.Array, old: jax.Array) -> jax.Array:
    """[N, K, D] twice -> [N] float32."""
    return jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)).sum((1, 2))


def _attention(q: jax.Array, k: jax.Array, see: jax.Array) -> jax.Array:
    """Softmax over the places a row sees: q [B, H, D], k [W, K, D], see [B, W] -> [B, H, W] float32."""
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bkgd,wkd->bkgw", grouped, k, preferred_element_type=jnp.float32) * width**-0.5
    scores = jnp.where(see[:, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0))
    total = weights.sum(-1, keepdims=True)
    return (weights / jnp.where(total > 0, total, 1)).reshape(rows, heads, -1)


def _column_sums(rows: Projected, weights: Any) -> jax.Array:
    """What each row's key receives from all rows behind it and its own: [N, H]. Rows go in blocks."""
    count, heads, _ = rows.q.shape
    size = rows.window[0].shape[0]
    place = jnp.arange(size)
    blocks = -(-count // _BLOCK)
    missing = blocks * _BLOCK - count
    q = jnp.pad(rows.q, ((0, missing), (0, 0), (0, 0))).reshape(blocks, _BLOCK, heads, -1)
    end = jnp.pad(rows.end, (0, missing)).reshape(blocks, _BLOCK, 1)

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        queries, last = block
        return total + weights(queries, place < last).sum(0), None

    total, _ = jax.lax.scan(add, jnp.zeros((heads, size), jnp.float32), (q, end))
    return total.T[jnp.minimum(rows.place, size - 1)]


def make_choice(policy: Policy, layout: Layout, num_layers: int) -> RowChoice | None:
    """How a request with this layout chooses; None if the policy does not, or there is nothing to choose from.

    Raises:
      ValueError: the numbers of rows are not such.
    """
    if not isinstance(policy, SelectingPolicy) or not (most := _reused(layout)):
        return None
    keep = policy.keep(layout, num_layers)
    falling = all(a >= b for a, b in itertools.pairwise((most, *keep, 0)))
    if len(keep) != num_layers - 1 - policy.check_layer or not falling:
        raise ValueError(
            f"{policy.name} must keep numbers of rows from {most} to 0 that do not increase, one a layer behind layer "
            f"{policy.check_layer}, got {keep}"
        )
    last = layout.images[-1]
    return RowChoice(policy, keep, len(layout), last.stop)


def decide(policy: Policy, layout: Layout, num_layers: int) -> tuple[Plan, RowChoice | None]:
    """What of a request is computed: what is known now, and what the device will choose.

    Raises:
      ValueError: see `make_plan` and `make_choice`.
    """
    return make_plan(policy, layout, num_layers), make_choice(policy, layout, num_layers)


def computing(
    spans: Collection[ImageSpan], layout: Layout, plan: Plan, choice: RowChoice | None, num_layers: int
) -> tuple[Layout, Plan, RowChoice | None]:
    """What was decided if some images have to be computed after all: of the others the plan says what it said."""
    if not spans:
        return layout, plan, choice
    layout = layout.marked(spans, "miss")
    for span in spans:
        plan = plan.computing(span.tokens, num_layers)
    return layout, plan, None if choice is None else make_choice(choice.policy, layout, num_layers)


def project(
    layer: Any,
    x: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    is_image: jax.Array,
    request: jax.Array,
    table: jax.Array,
) -> Projected:
    """What the rows of a layer step become, and what the pool holds for them.

    Args:
      layer: the decoder layer.
      x: hidden states that enter it, [N, M].
      k, v: its pool before it runs, [S, K, D].
      rows: of the step.
      is_image: rows among which is chosen, [N].
      request: the length of its prompt, and the prompt's first token behind its last image, [2].
      table: the pool's page of each of the pages that hold the prompt, [W / 128].
    """
    q, new_k, _, new_v = layer.self_attn.project(layer.input_layernorm(x), rows, keep=len(x))
    slots, size = len(k), len(table) * PAGE
    length, question = request
    is_row = rows.k_end > 0
    place = jnp.where(is_row, rows.k_end - 1, size + jnp.arange(len(x)))  # a row sees the slots up to its own
    window = k.reshape(-1, PAGE, *k.shape[1:])[table].reshape(size, *k.shape[1:])
    write = functools.partial(window.at[place].set, mode="drop", unique_indices=True)
    at = jnp.minimum(rows.slot, slots - 1)
    linked_k, linked_v = k[at], v[at]
    is_asking = is_row & (place < length)
    return Projected(
        q,
        new_k,
        new_v,
        linked_k,
        linked_v,
        (write(new_k), write(jnp.where(is_image[:, None, None], linked_k, new_k))),
        place,
        jnp.where(is_asking, rows.k_end, 0),
        is_asking & (place >= question),
    )


def choose(score: jax.Array, must: jax.Array, among: jax.Array) -> jax.Array:
    """The order in which rows go on: the first `must`, then the next `among` by their scores, highest first.

    So what later layers keep of them is a slice. Of equal scores the earlier row comes first; all others stay behind.

    Args:
      score: of the rows [N].

    Returns:
      Which row each of them was [N].
    """
    index = jnp.arange(len(score))
    is_candidate = (index >= must) & (index < must + among)
    ranked = jnp.argsort(jnp.where(is_candidate, -score, jnp.inf), stable=True)
    rank = jnp.zeros(len(score), jnp.int32).at[ranked].set(jnp.arange(len(score), dtype=jnp.int32))
    return jnp.argsort(jnp.where(index < must, index, jnp.where(is_candidate, must + rank, len(score) + index)))


def narrow(rows: Rows, active: jax.Array, *, size: int, slots: int) -> Rows:
    """The first `active` rows, padded to `size`."""
    real = jnp.arange(size) < active
    first = Rows(*(jnp.where(real, field[..., :size], 0) for field in rows))
    return first._replace(slot=jnp.where(real, first.slot, slots + jnp.arange(size, dtype=jnp.int32)))


@dataclass(frozen=True)
class RowChoice:
    """How a request chooses rows: by which policy, how many, and how long the prompt is that decides.

    Attributes:
      keep: chosen rows in each layer behind the check layer.
      question: the prompt's first token behind its last image.
    """

    policy: SelectingPolicy
    keep: tuple[int, ...]
    length: int
    question: int


@dataclass(frozen=True, eq=False)
class Selection:
    """What a prefill step chooses.

    Attributes:
      policy: chooses.
      must, among, keep: see `choose`; `keep` in each layer behind the check layer.
      table: the pool's pages of the request.
      length: of its prompt; rows behind it, of a continuation, have no say.
      question: the prompt's first token behind its last image.
      tokens: which token of the prompt each row is, [m + e].
    """

    policy: SelectingPolicy
    must: int
    among: int
    keep: tuple[int, ...]
    table: np.ndarray
    length: int
    question: int
    tokens: np.ndarray


_DIGITS = 30
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf", re.IGNORECASE)
_WITH_COUNT: dict[str, Callable[[int], Policy]] = {"mpic": MPIC, "epic": EPIC}
_WITH_SCHEDULE: dict[str, Callable[..., Policy]] = {"spread": Spread, "shift": functools.partial(Spread, shift=True)}
_WITH_RATIO: dict[str, Callable[[Fraction], Policy]] = {"ends": Ends, **_WITH_SCHEDULE}
# What "approximate" stands for: of all policies that compute at most 3 % of rows x layers the one with the best answers
# (docs/research/reuse_study.md).
APPROXIMATE = "shift-0.03"
_NAMED: dict[str, Policy] = {
    "off": Off(),
    "exact": Exact(),
    "full": StaticRatio(Fraction(0)),
    "full-two-pass": TwoPass(),
}


def parse_policy(reuse: Any) -> Policy:
    """The policy that a user's `reuse` stands for.

    Args:
      reuse: "off", "exact", "approximate" (the recommended policy), "full" (ratio 0), "full-two-pass", a ratio from 0
        to 1 as a number or a decimal string, "mpic-K", "epic-K", "ends-R", "spread-R", "shift-R", "cacheblend-R" and
        others of `selection.NAMED`, the path of a schedule file, by itself or behind "spread-", "shift-" or "asked-",
        a `Schedule` or a `Policy`.

    Raises:
      ValueError: something else.
    """
    # Objects stand for themselves, and a number is a ratio.
    if isinstance(reuse, Schedule):
        return Scheduled(reuse)
    if isinstance(reuse, Policy) and not isinstance(reuse, type):
        return reuse
    if is_a(reuse, (numbers.Real, Decimal)):
        number = Decimal(reuse) if isinstance(reuse, int) else reuse  # writes integers of any length
        return StaticRatio(number if isinstance(number, Fraction) else _fraction(str(number)))
    if isinstance(reuse, str):
        # Names by themselves.
        if reuse == "approximate":
            reuse = APPROXIMATE
        if reuse in _NAMED:
            return _NAMED[reuse]
        scheduled = {**_WITH_SCHEDULE, "asked": QuestionScores}
        # Names with a count, with the path of a schedule, and with a ratio; a ratio may stand alone.
        name, _, rest = reuse.partition("-")
        if name in _WITH_COUNT and rest.isdecimal():
            if len(rest) > _DIGITS:
                raise ValueError(f"reuse must be {name}-K with a K of at most {_DIGITS} digits, got {short(reuse)}")
            return _WITH_COUNT[name](int(rest))
        if name in scheduled and rest.endswith(".json") and not os.path.isfile(reuse):
            return scheduled[name](schedule=Schedule.load(rest))
        named: dict[str, Callable[[Fraction], Policy]] = {"": StaticRatio, **_WITH_RATIO, **NAMED}
        for name, policy in named.items():
            prefix = name and f"{name}-"
            if reuse.startswith(prefix) and _DECIMAL.fullmatch(ratio := reuse.removeprefix(prefix)):
                return policy(_fraction(ratio, prefix))
    # What is left may be the path of a schedule.
    if isinstance(reuse, PathLike) or (isinstance(reuse, str) and (reuse.endswith(".json") or os.path.isfile(reuse))):
        return Scheduled(Schedule.load(reuse))
    close = difflib.get_close_matches(reuse, ["approximate", *_NAMED], 1) if isinstance(reuse, str) else []
    raise ValueError(
        'reuse must be "off", "exact", "approximate", "full", a ratio from 0 to 1, the path of a schedule file, a '
        'Schedule, a Policy, or the name of another policy such as "mpic-32" or "shift-0.1", '
        f"got {short(reuse)}{f'; is it {close[0]!r}?' if close else ''}"
    )


def _fraction(text: str, prefix: str = "") -> Fraction:
    """The exact value of a decimal: 0.29 of 100 tokens are 29, where floating point says 28."""
    try:
        decimal = Decimal(text)
    except InvalidOperation:  # an exponent of many digits
        decimal = Decimal("nan")
    exponent = decimal.as_tuple().exponent  # a letter where the value is not finite
    if not (isinstance(exponent, int) and exponent >= -_DIGITS and 0 <= decimal <= 1):
        wanted = f"{prefix}R with a ratio R" if prefix else "a ratio"
        raise ValueError(f"reuse must be {wanted} from 0 to 1 of at most {_DIGITS} digits, got {prefix}{shorten(text)}")
    return Fraction(decimal)
