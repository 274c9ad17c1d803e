"""Selecting policies, which choose tokens on the device, and the parser of `reuse`.

A selecting policy computes all tokens in the first layers, and only those that deviate most in later layers. The number
of tokens is known before the run, so that shapes are static. The compiled programs choose the tokens by the difference
between the linked and the computed KV.
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
from vlcache_jax.common.renamed import warn_renamed
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

_BLOCK = 128  # tokens whose attention is in memory at once


@dataclass(frozen=True, eq=False)
class Projected:
    """Queries, keys and values of a layer's N tokens before attention, and their linked KV.

    Attributes:
      q: rotated queries, [N, H, D].
      k, v: rotated keys and values of the tokens, [N, K, D].
      linked_k, linked_v: KV at the tokens' KV slots before the layer runs, [N, K, D].
      window: keys of the whole request, with the computed keys of all N tokens, and with the linked keys of image
        tokens, each [W, K, D].
      place: index of each token in the window, outside of it for padding, [N].
      end: number of window entries that a token attends to, [N].
      asks: True for tokens of the prompt after its last image, [N].
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
    """Policy that chooses among the tokens of approximate images on the device.

    Layers up to `check_layer` compute the KV of all tokens. Only the tokens of the highest scores attend in that layer
    and continue. `keep` returns the number of tokens in each later layer, which must not increase. `score` returns the
    score of each token in a layer, [N].

    Attributes:
      check_layer: index of the last layer that computes all tokens.
      scored_layers: layers whose scores are added, none after the check layer.
    """

    @property
    def check_layer(self) -> int: ...

    @property
    def scored_layers(self) -> tuple[int, ...]: ...

    def keep(self, layout: Layout, num_layers: int) -> tuple[int, ...]: ...

    def score(self, rows: Projected) -> jax.Array: ...


class _Selecting:
    """Base class of the selecting policies."""

    links = True
    approximates = True
    ratio: Fraction
    check_layer: int

    def keep(self, layout: Layout, num_layers: int) -> tuple[int, ...]:
        """Return floor(ratio x E), E tokens of approximate images, for every layer after the check layer."""
        return (int(self.ratio * _reused(layout)),) * (num_layers - 1 - self.check_layer)

    def plan(self, layout: Layout, num_layers: int) -> Plan:
        """Return the plan in which tokens of approximate images end at the check layer, as if none were chosen."""
        if num_layers < self.check_layer + 2:
            raise ValueError(
                f"reuse must have a check_layer of at most {num_layers - 2} for a model with {num_layers} layers, "
                f"got {self.check_layer}"
            )
        depth = full_prefill(layout, num_layers).depth
        for span in layout.images:
            if span.state == "exact":
                depth[span.tokens] = 0
            elif span.state == "approximate":
                depth[span.tokens] = self.check_layer + 1
        depth[-1] = num_layers + 1
        return Plan(depth)


def _reused(layout: Layout) -> int:
    """Return the number of tokens of approximate images."""
    return sum(span.length for span in layout.images if span.state == "approximate")


@dataclass(frozen=True)
class CacheBlend(_Selecting):
    """Policy that recomputes the tokens whose KV deviates most (CacheBlend). Deviations are squared L2 distances.

    Attributes:
      ratio: ratio of the reused tokens that are computed after the check layer.
      variant: "vlcache_baseline" (default): keys and values of layers 0 to 2 (the baseline of the VLCache paper,
        Table 5); "lmcache": keys of layer 1; "proto": values of layer 1 (the reference prototype).
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
    """Policy that recomputes the tokens whose deviation receives most attention (KVShare).

    Attributes:
      ratio: ratio of the reused tokens that are computed after layer 1.
      selector: "dhd" (default, the paper's): attention received, times the L1 distance of values; "attn_dist": change
        of the attention that a token receives due to the keys (the VLCache paper's description of its baseline).
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
    """Policy that recomputes the tokens that the question attends to and whose KV deviates. Not from a paper.

    The score is the attention from the tokens after the last image, times the L2 distance of keys and values, in one
    layer. The number of tokens is a ratio, or follows the levels of a schedule.

    Attributes:
      ratio: ratio of the reused tokens that are computed after the check layer; not used with a schedule.
      check_layer: index of the layer that is scored, at least 1.
      schedule: ratios of the layers, in place of `ratio`.
    """

    ratio: Fraction = Fraction(0)
    check_layer: int = 1
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not is_a(self.check_layer, int) or self.check_layer < 1:
            raise ValueError(
                f"check_layer must be an integer of at least 1 (reused KV does not deviate in layer 0), "
                f"got {self.check_layer!r}"
            )

    @property
    def name(self) -> str:
        size = f"{float(self.ratio):g}" if self.schedule is None else f"schedule {self.schedule.mean_text}"
        return f"question-{size}" + (f" from layer {self.check_layer}" if self.check_layer > 1 else "")

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


# Names of selecting policies in `reuse`, before a dash and the ratio.
NAMED: dict[str, Callable[[Fraction], SelectingPolicy]] = {
    "cacheblend": CacheBlend,
    "cacheblend-lmcache": functools.partial(CacheBlend, variant="lmcache"),
    "cacheblend-proto": functools.partial(CacheBlend, variant="proto"),
    "question": QuestionScores,
    "kvshare": KVShare,
    "kvshare-attn": functools.partial(KVShare, selector="attn_dist"),
}


def _squared_distance(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return the squared L2 distance of each token, float32 [N], of two arrays [N, K, D]."""
    return jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)).sum((1, 2))


def _attention(q: jax.Array, k: jax.Array, see: jax.Array) -> jax.Array:
    """Return softmax attention weights, float32 [B, H, W], of q [B, H, D] and k [W, K, D] under the mask see [B, W]."""
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
    """Return the weights that each token's key receives from its own and all later tokens, [N, H], block by block."""
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
    """Return how a request chooses tokens, or None if the policy does not choose or no image is approximate.

    Raises:
      ValueError: `policy.keep` returns numbers that increase, or of the wrong count.
    """
    if not isinstance(policy, SelectingPolicy) or not (reused := _reused(layout)):
        return None
    keep = policy.keep(layout, num_layers)
    falling = all(a >= b for a, b in itertools.pairwise((reused, *keep, 0)))
    if len(keep) != num_layers - 1 - policy.check_layer or not falling:
        raise ValueError(
            f"keep of {policy.name} must be non-increasing numbers of tokens from {reused} to 0, one for each layer "
            f"after layer {policy.check_layer}, got {keep}"
        )
    last = layout.images[-1]
    return RowChoice(policy, keep, len(layout), last.stop)


def decide(policy: Policy, layout: Layout, num_layers: int) -> tuple[Plan, RowChoice | None]:
    """Return the plan of a request, and how the device chooses more tokens, if it does.

    Raises:
      ValueError: see `make_plan` and `make_choice`.
    """
    return make_plan(policy, layout, num_layers), make_choice(policy, layout, num_layers)


def computing(
    spans: Collection[ImageSpan], layout: Layout, plan: Plan, choice: RowChoice | None, num_layers: int
) -> tuple[Layout, Plan, RowChoice | None]:
    """Return layout, plan and choice with the images `spans` as misses. The other images keep their plan."""
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
    """Return queries, keys and values of a layer's tokens, and their linked KV.

    Args:
      layer: the decoder layer.
      x: hidden states that enter it, [N, M].
      k, v: its KV pool before it runs, [S, K, D].
      rows: the tokens of the prefill chunk.
      is_image: True for tokens that can be chosen, [N].
      request: length of the prompt, and index of the first token after its last image, [2].
      table: block table of the request, [W / 128].
    """
    q, new_k, _, new_v = layer.self_attn.project(layer.input_layernorm(x), rows, keep=len(x))
    slots, size = len(k), len(table) * PAGE
    length, question = request
    is_row = rows.k_end > 0
    place = jnp.where(is_row, rows.k_end - 1, size + jnp.arange(len(x)))  # a token attends to the slots up to its own
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
    """Return the order of the tokens after the choice, so that later layers compute a slice.

    The first `must` tokens stay first. The next `among` tokens are sorted by descending score; the earlier token comes
    first if scores are equal. All others come last.

    Args:
      score: score of each token [N].
      must: number of tokens that later layers compute in any case.
      among: number of tokens to choose from.

    Returns:
      Previous index of each token [N].
    """
    index = jnp.arange(len(score))
    is_candidate = (index >= must) & (index < must + among)
    ranked = jnp.argsort(jnp.where(is_candidate, -score, jnp.inf), stable=True)
    rank = jnp.zeros(len(score), jnp.int32).at[ranked].set(jnp.arange(len(score), dtype=jnp.int32))
    return jnp.argsort(jnp.where(index < must, index, jnp.where(is_candidate, must + rank, len(score) + index)))


def narrow(rows: Rows, active: jax.Array, *, size: int, slots: int) -> Rows:
    """Return the first `active` tokens, padded to `size`; padding has KV slots from `slots` on."""
    real = jnp.arange(size) < active
    first = Rows(*(jnp.where(real, field[..., :size], 0) for field in rows))
    return first._replace(slot=jnp.where(real, first.slot, slots + jnp.arange(size, dtype=jnp.int32)))


@dataclass(frozen=True)
class RowChoice:
    """Choice of tokens of a request.

    Attributes:
      policy: policy that scores the tokens.
      keep: number of chosen tokens in each layer after the check layer.
      length: number of prompt tokens; only these count for the scores.
      question: index of the first prompt token after the last image.
    """

    policy: SelectingPolicy
    keep: tuple[int, ...]
    length: int
    question: int


@dataclass(frozen=True, eq=False)
class Selection:
    """Choice of tokens in a prefill chunk.

    Attributes:
      policy: policy that scores the tokens.
      must, among: see `choose`.
      keep: number of chosen tokens in each layer after the check layer.
      table: block table of the request.
      length: number of prompt tokens; tokens after the prompt, of a continuation, do not count for the scores.
      question: index of the first prompt token after the last image.
      tokens: index in the prompt of each token of the chunk, [must + among].
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
_WITH_RATIO: dict[str, Callable[[Fraction], Policy]] = {
    "ends": Ends,
    **_WITH_SCHEDULE,
    "shift-first": functools.partial(StaticRatio, shift=True),
    "shift-ends": functools.partial(Ends, shift=True),
}
# Policy of "approximate": the most accurate one that computes at most 3 % of tokens x layers
# (docs/research/reuse_study.md).
APPROXIMATE = "shift-0.03"
# The same for models with linear attention: the most accurate one of docs/research/hybrid_links.md.
APPROXIMATE_WITH_STATES = "shift-ends-0.2"
_NAMED: dict[str, Policy] = {
    "off": Off(),
    "exact": Exact(),
    "full": StaticRatio(Fraction(0)),
    "full-two-pass": TwoPass(),
}


def parse_policy(reuse: Any) -> Policy:
    """Return the policy of a value of `reuse`.

    Args:
      reuse: "off", "exact", "approximate" (`APPROXIMATE`), "full" (ratio 0), "full-two-pass", a ratio from 0
        to 1 as a number or a decimal string, "mpic-K", "epic-K", "ends-R", "spread-R", "shift-R", "shift-first-R",
        "shift-ends-R", "cacheblend-R" and others of `selection.NAMED`, the path of a schedule file, by itself or after
        "spread-", "shift-" or "question-", a `Schedule` or a `Policy`. "asked-" is the deprecated name of "question-".

    Raises:
      ValueError: `reuse` is anything else.
    """
    # Policies and schedules are used directly, and a number is a ratio.
    if isinstance(reuse, Schedule):
        return Scheduled(reuse)
    if isinstance(reuse, Policy) and not isinstance(reuse, type):
        return reuse
    if is_a(reuse, (numbers.Real, Decimal)):
        number = Decimal(reuse) if isinstance(reuse, int) else reuse  # converts integers of any length to text
        return StaticRatio(number if isinstance(number, Fraction) else _fraction(str(number)))
    if isinstance(reuse, str):
        if reuse.startswith("asked-") and not os.path.isfile(reuse):
            warn_renamed(f"reuse={shorten(reuse)!r}", '"question-..."')
            reuse = f"question-{reuse.removeprefix('asked-')}"
        # Names without a parameter.
        if reuse == "approximate":
            reuse = APPROXIMATE
        if reuse in _NAMED:
            return _NAMED[reuse]
        scheduled = {**_WITH_SCHEDULE, "question": QuestionScores}
        # Names with a count, with the path of a schedule, or with a ratio. A ratio needs no name.
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
    # Other values can be the path of a schedule.
    if isinstance(reuse, PathLike) or (isinstance(reuse, str) and (reuse.endswith(".json") or os.path.isfile(reuse))):
        return Scheduled(Schedule.load(reuse))
    close = difflib.get_close_matches(reuse, ["approximate", *_NAMED], 1) if isinstance(reuse, str) else []
    raise ValueError(
        'reuse must be "off", "exact", "approximate", "full", a ratio from 0 to 1, the path of a schedule file, a '
        'Schedule, a Policy, or the name of another policy such as "mpic-32" or "shift-0.1", '
        f"got {short(reuse)}{f'; did you mean {close[0]!r}?' if close else ''}"
    )


def _fraction(text: str, prefix: str = "") -> Fraction:
    """Return the exact value of a decimal: 0.29 of 100 tokens is 29; in floating point it would be 28."""
    try:
        decimal = Decimal(text)
    except InvalidOperation:  # an exponent of many digits
        decimal = Decimal("nan")
    exponent = decimal.as_tuple().exponent  # a letter if the value is not finite
    if not (isinstance(exponent, int) and exponent >= -_DIGITS and 0 <= decimal <= 1):
        wanted = f"{prefix}R with a ratio R" if prefix else "a ratio"
        raise ValueError(f"reuse must be {wanted} from 0 to 1 of at most {_DIGITS} digits, got {prefix}{shorten(text)}")
    return Fraction(decimal)
