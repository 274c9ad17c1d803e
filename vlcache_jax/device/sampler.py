"""Chooses tokens on the device. What an answer holds so far stays there, by lane: one program can choose many tokens.

Letters: B lanes, V vocabulary, n rows of a step. A row's choice depends on its logits, its lane and its parameters
alone. The order is the library's that names the parameters: what is not allowed and what is added, then what is taken
off for repetition, then the most likely token, or temperature, min_p, top_k, top_p and a draw.

Where looking at what rows ask for costs nothing, on a CPU, programs look ("asked"). A GPU's would hold up the host,
which reads every predicate; there the host chooses among programs by what rows may ask for (`Choice`, `choice_of`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.sampling import MAX_LOGPROBS, SamplingParams

MAX_BAD_WORDS = 64  # token sequences: a bad word is one at the beginning of a text and another after a space
MAX_BAD_LENGTH = 8  # tokens of one

NO_LANE = np.iinfo(np.int32).max  # the lane of padding: beyond all, so that its writes are dropped
# Instead of a token:
NOT_FINITE = -1  # logits hold NaN or inf
NO_ANSWER = -2  # the answer had ended, or the row is padding
NOT_ALLOWED = -3  # the parameters leave no token

# What the rows of a program may ask for: "greedy", the most likely token; "drawn", a draw, too; "any", all there is.
# "asked": the device looks.
Choice = Literal["asked", "greedy", "drawn", "any"]
FIXED: tuple[Choice, ...] = ("greedy", "drawn", "any")
_PARTS: dict[str, frozenset[str]] = {
    "greedy": frozenset(), "drawn": frozenset({"draw"}), "any": frozenset({"draw", "shape", "tell"}),
}  # fmt: skip

# Bits of marks; the rest counts how often the answer holds the token.
IN_PROMPT, ENDS, ONCE = 1, 2, 4


class Lanes(NamedTuple):
    """What is known of each answer that runs."""

    token: Any  # int32 [B], chosen last
    step: Any  # int32 [B], tokens of the answer so far
    is_ended: Any  # bool [B]
    marks: Any  # int32 [B, V]: IN_PROMPT, ENDS, and ONCE for each time that the answer holds the token
    bias: Any  # float32 [B, V], added to logits; -inf: the token is not allowed
    words: Any  # int32 [B, MAX_BAD_WORDS, MAX_BAD_LENGTH], bad words at the right, -1 before them
    recent: Any  # int32 [B, MAX_BAD_LENGTH - 1], the answer's last tokens at the right, -1 before them


class Choosing(NamedTuple):
    """How the token of each row is to be chosen; the same at every step of an answer. Arrays of length n."""

    lane: Any  # int32
    temperature: Any  # float32; 0: the most likely
    top_k: Any  # int32; 0: all
    top_p: Any  # float32
    min_p: Any  # float32
    repetition: Any  # float32
    presence: Any  # float32
    frequency: Any  # float32
    seed: Any  # uint32
    least: Any  # int32, tokens before which the answer does not end
    most: Any  # int32, tokens at which it ends
    wants_logprobs: Any  # bool
    counts: Any  # bool, whether tokens that came already matter
    has_bias: Any  # bool
    has_words: Any  # bool

    @staticmethod
    def row(params: SamplingParams, *, lane: int, seed: int, most: int) -> npt.NDArray[np.int32]:
        """One row as it is packed, int32 [COLUMNS].

        Args:
          params: resolved.
          most: tokens at which the answer ends.
        """
        floats = np.array(
            [
                params.temperature, params.top_p, params.min_p,
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
            ],
            np.float32,
        )  # fmt: skip
        flags = (
            params.logprobs is not None,
            params.has_penalty,
            bool(params.logit_bias) or params.allowed_token_ids is not None or params.structured_outputs is not None,
            bool(params.bad_words),
        )
        packed = np.zeros(COLUMNS, np.int32)
        packed[:4] = lane, params.top_k or 0, params.min_tokens, most
        packed[4] = sum(flag << i for i, flag in enumerate(flags))
        packed[5] = np.uint32(seed).view(np.int32)
        packed[6:] = floats.view(np.int32)
        return packed

    @staticmethod
    def unpack(packed: jax.Array) -> Choosing:
        """Rows as `row` packs them, int32 [n, COLUMNS], on the device."""
        lane, top_k, least, most, flags = (packed[:, i] for i in range(5))
        seed = jax.lax.bitcast_convert_type(packed[:, 5], jnp.uint32)
        floats = jax.lax.bitcast_convert_type(packed[:, 6:], jnp.float32)
        temperature, top_p, min_p, repetition, presence, frequency = (floats[:, i] for i in range(6))
        wants_logprobs, counts, has_bias, has_words = ((flags >> i) & 1 > 0 for i in range(4))
        return Choosing(
            lane, temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, least, most,
            wants_logprobs, counts, has_bias, has_words,
        )  # fmt: skip


COLUMNS = 12


def choice_of(packed: npt.NDArray[np.int32]) -> Choice:
    """The smallest choice that has all that rows ask for, which are packed as `Choosing.row` does."""
    least, flags, temperature = packed[:, 2], packed[:, 4], packed[:, 6].view(np.float32)
    if (least > 0).any() or (flags > 0).any():
        return "any"
    return "drawn" if (temperature > 0).any() else "greedy"


class SampledTokens(NamedTuple):
    """Tokens of one step. The log-probabilities are of the logits as they came; 0 in rows that do not want them, and
    None where no row may ask for them."""

    token: Any  # int32 [n]; NOT_FINITE, NO_ANSWER or NOT_ALLOWED where there is none
    logprob: Any  # float32 [n], of the token
    rank: Any  # int32 [n]: 1 + the number of tokens that are more likely
    top_logprob: Any  # float32 [n, min(MAX_LOGPROBS, V)]
    top_token: Any  # int32 [n, min(MAX_LOGPROBS, V)]


def empty_lanes(count: int, vocab_size: int) -> Lanes:
    """Lanes that nobody holds: all have ended."""
    return Lanes(
        token=jnp.zeros(count, jnp.int32),
        step=jnp.zeros(count, jnp.int32),
        is_ended=jnp.ones(count, jnp.bool_),
        marks=jnp.zeros((count, vocab_size), jnp.int32),
        bias=jnp.zeros((count, vocab_size), jnp.float32),
        words=jnp.full((count, MAX_BAD_WORDS, MAX_BAD_LENGTH), -1, jnp.int32),
        recent=jnp.full((count, MAX_BAD_LENGTH - 1), -1, jnp.int32),
    )


def open_lane(
    lanes: Lanes, lane: jax.Array, marks: jax.Array, bias: jax.Array, words: jax.Array, recent: jax.Array
) -> Lanes:
    """Gives a lane to an answer.

    Args:
      lane: int32, scalar.
      marks, bias, words, recent: what the lane is to hold; see `Lanes`.
    """
    return lanes._replace(
        token=lanes.token.at[lane].set(0),
        step=lanes.step.at[lane].set(0),
        is_ended=lanes.is_ended.at[lane].set(False),
        marks=lanes.marks.at[lane].set(marks),
        bias=lanes.bias.at[lane].set(bias),
        words=lanes.words.at[lane].set(words),
        recent=lanes.recent.at[lane].set(recent),
    )


def hold_lanes(lanes: Lanes, lane: jax.Array, allowed: jax.Array, token: jax.Array, bias: jax.Array) -> Lanes:
    """Lets answers choose among some tokens until they are told others. Their rows have a bias.

    Args:
      lane: int32 [n].
      allowed: int32 [n, ceil(V / 32)]; bit i % 32 of word i // 32: token i may come.
      token, bias: what is added to the logits of tokens, int32 and float32 [n, k]; beyond the vocabulary is no token.
    """
    size = lanes.bias.shape[1]
    flags = (allowed[:, :, None] >> jnp.arange(32)) & 1 > 0
    added = jnp.zeros((len(lane), size)).at[jnp.arange(len(lane))[:, None], token].add(bias, mode="drop")
    held = jnp.where(flags.reshape(len(lane), -1)[:, :size], added, -jnp.inf)
    return lanes._replace(bias=lanes.bias.at[lane].set(held, mode="drop"))


def sample(
    logits: jax.Array, lanes: Lanes, choosing: Choosing, *, axis: int = 1, choice: Choice = "asked"
) -> tuple[SampledTokens, Lanes]:
    """Chooses a token for each row, and lets the row's lane go on with it.

    A lane ends with a token that ends answers, with as many tokens as it may have, and where there is no token to go
    on with; then its step and its token stay. Lanes that had ended and padding change nothing.

    Args:
      logits: float32 [n, V].
      choosing: of n rows, no two of them of one lane.
      axis: 0: logits are [V, n]. Where the most likely token is all there is to do, they are not turned.
      choice: has all that rows ask for (`choice_of`). It changes no token and no log-probability.
    """

    def rows() -> jax.Array:
        return logits if axis == 1 else logits.T

    lane = choosing.lane
    is_live = ~lanes.is_ended.at[lane].get(mode="fill", fill_value=True)
    step = lanes.step.at[lane].get(mode="fill", fill_value=0)
    # Lanes that ended ask for nothing: the rest of a window must not pay for them.
    ask = choosing._replace(
        temperature=jnp.where(is_live, choosing.temperature, 0),
        least=jnp.where(is_live, choosing.least, 0),
        **{name: getattr(choosing, name) & is_live for name in ("wants_logprobs", "counts", "has_bias", "has_words")},
    )
    # Where no row asks for more, the most likely token is all there is to do.
    is_special = (ask.temperature > 0) | (step < ask.least) | ask.counts | ask.has_bias | ask.has_words
    token, is_allowed = _if_asked(
        choice, {"draw", "shape"}, is_special,
        lambda: _choose(rows(), lanes, ask, step, choice),
        lambda: (_most_likely(logits, axis), jnp.ones_like(is_live)),
    )  # fmt: skip
    # Log-probabilities where they are asked for.
    told: tuple[Any, ...] = (None,) * 4
    if _may_ask(choice, {"tell"}):
        told = _if_asked(
            choice, {"tell"}, ask.wants_logprobs,
            lambda: _tell(rows(), token, wants_top=True),
            lambda: jax.tree.map(jnp.zeros_like, _untold(len(lane), logits.shape[axis])),
        )  # fmt: skip
        told = tuple(jnp.where(ask.wants_logprobs.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in told)

    # Who goes on, who ends, and what the host is told.
    is_finite = jnp.isfinite(logits).all(axis)
    goes_on = is_live & is_finite & is_allowed
    mark = lanes.marks.at[lane, token].get(mode="fill", fill_value=0)
    ends = (mark & ENDS > 0) & (step + 1 >= ask.least)
    given = jnp.where(is_finite, jnp.where(is_allowed, token, NOT_ALLOWED), NOT_FINITE)
    sampled = SampledTokens(jnp.where(is_live, given, NO_ANSWER), *told)

    # Each part of a lane's state is written for the rows that it changes for.
    live, growing, counting, recalling = (
        jnp.where(where, lane, NO_LANE) for where in (is_live, goes_on, goes_on & ask.counts, goes_on & ask.has_words)
    )
    lanes = lanes._replace(
        token=lanes.token.at[growing].set(token, mode="drop"),
        step=lanes.step.at[growing].set(step + 1, mode="drop"),
        is_ended=lanes.is_ended.at[live].set(~goes_on | ends | (step + 1 >= choosing.most), mode="drop"),
    )
    if not _may_ask(choice, {"shape"}):
        return sampled, lanes
    recent = lanes.recent.at[lane].get(mode="fill", fill_value=-1)
    return sampled, lanes._replace(
        # Set to what was read, not added: so the compiler knows that the read comes first, and copies nothing.
        marks=lanes.marks.at[counting, token].set(mark + ONCE, mode="drop"),
        recent=lanes.recent.at[recalling].set(jnp.column_stack([recent[:, 1:], token]), mode="drop"),
    )


def _may_ask(choice: Choice, parts: set[str]) -> bool:
    return choice == "asked" or bool(parts & _PARTS[choice])


def _if_asked(
    choice: Choice, parts: set[str], is_asked: jax.Array, do: Callable[..., Any], otherwise: Callable[..., Any], *x: Any
) -> Any:
    """Does what rows ask for. The device looks whether any does, or the choice says whether any may."""
    if choice == "asked":
        return jax.lax.cond(is_asked.any(), do, otherwise, *x)
    return (do if _may_ask(choice, parts) else otherwise)(*x)


def score(
    logits: jax.Array, target: jax.Array, wants_top: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """What the logits say of given tokens.

    Args:
      logits: float32 [n, V].
      target: int32 [n].
      wants_top: bool, scalar; False: the most likely tokens are left 0.

    Returns:
      Log-probability of each row's target, float32 [n]; whether it is the most likely token, bool [n]; its rank, int32
      [n]; log-probabilities, float32, and ids, int32, of the most likely tokens, [n, min(MAX_LOGPROBS, V)].
    """
    logprob, rank, top_logprob, top_token = _tell(logits, target, wants_top)
    return logprob, _most_likely(logits) == target, rank, top_logprob, top_token


def _most_likely(logits: jax.Array, axis: int = 1) -> jax.Array:
    """Of equals the first."""

    def in_two_passes(x: jax.Array) -> jax.Array:  # which a CPU does in a sixth to a ninth of the time
        index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(x == x.max(axis, keepdims=True), index, x.shape[axis]).min(axis)

    token: jax.Array = jax.lax.platform_dependent(
        logits, cpu=in_two_passes, default=lambda x: jnp.argmax(x, axis).astype(jnp.int32)
    )
    return token


def _untold(count: int, vocab_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of what `_tell` gives of `count` rows."""
    top = count, min(MAX_LOGPROBS, vocab_size)
    shapes = ((count,), jnp.float32), ((count,), jnp.int32), (top, jnp.float32), (top, jnp.int32)
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def _tell(logits: jax.Array, token: jax.Array, wants_top: jax.Array | bool) -> tuple[jax.Array, ...]:
    """Log-probability and rank of a token of each row, and the most likely tokens with theirs."""
    logprobs = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(logprobs, token[:, None], axis=-1)
    rank = 1 + (logprobs > logprob).sum(axis=-1, dtype=jnp.int32)
    count = min(MAX_LOGPROBS, logits.shape[1])

    def top() -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.platform_dependent(
                logprobs, cpu=lambda x: tuple(jax.lax.top_k(x, count)), default=lambda x: _top_by_turns(x, count)
            )
        )

    if wants_top is True:
        top_logprob, top_token = top()
    else:
        top_logprob, top_token = jax.lax.cond(
            wants_top, top, lambda: tuple(jax.tree.map(jnp.zeros_like, _untold(*logits.shape)[2:]))
        )
    return logprob[:, 0], rank, top_logprob, top_token


def _top_by_turns(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k`, one after the other: a GPU's sorts all of V for more than a few, and compiles slowly."""
    index, place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), jnp.arange(count)

    def turn(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value, token, values, tokens = state
        is_left = (x < value) | ((x == value) & (index > token))
        value = jnp.where(is_left, x, -jnp.inf).max(1, keepdims=True)
        token = jnp.where(is_left & (x == value), index, x.shape[1] - 1).min(1, keepdims=True)  # of NaN, the last one
        return value, token, jnp.where(place == i, value, values), jnp.where(place == i, token, tokens)

    begin = jnp.full((len(x), 1), jnp.inf), jnp.full((len(x), 1), -1, jnp.int32)
    nothing = jnp.zeros((len(x), count)), jnp.zeros((len(x), count), jnp.int32)
    *_, values, tokens = jax.lax.fori_loop(0, count, turn, (*begin, *nothing))
    return values, tokens


def _choose(
    logits: jax.Array, lanes: Lanes, ask: Choosing, step: jax.Array, choice: Choice
) -> tuple[jax.Array, jax.Array]:
    """A token for each row, int32 [n], and whether any was allowed, bool [n]."""
    is_early = step < ask.least
    x = logits
    for is_asked, change in (
        (ask.has_bias, lambda x: _with_bias(x, lanes, ask)),
        (ask.has_words, lambda x: _without_words(x, lanes, ask)),
        (is_early, lambda x: jnp.where((_marks(lanes, ask) & ENDS > 0) & is_early[:, None], -jnp.inf, x)),
        (ask.counts, lambda x: _with_penalties(x, lanes, ask)),
    ):
        x = _if_asked(choice, {"shape"}, is_asked, change, lambda x: x, x)
    greedy = _most_likely(x)
    is_drawn = ask.temperature > 0
    drawn = _if_asked(choice, {"draw"}, is_drawn, _draw, lambda x, *_: _most_likely(x), x, ask, step)
    token = jnp.where(is_drawn, drawn, greedy)
    # The best that is left is banned only if everything is.
    return token, jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0] > -jnp.inf


def _marks(lanes: Lanes, ask: Choosing) -> jax.Array:
    return lanes.marks.at[ask.lane].get(mode="fill", fill_value=0)


def _with_bias(x: jax.Array, lanes: Lanes, ask: Choosing) -> jax.Array:
    # Lanes without a bias hold what was there before.
    return jnp.where(ask.has_bias[:, None], x + lanes.bias.at[ask.lane].get(mode="fill", fill_value=0), x)


def _without_words(x: jax.Array, lanes: Lanes, ask: Choosing) -> jax.Array:
    """Bans what would complete a bad word."""
    word = lanes.words.at[ask.lane].get(mode="fill", fill_value=-1)
    before = lanes.recent.at[ask.lane].get(mode="fill", fill_value=-1)
    begun = word[:, :, :-1]
    is_next = ((begun < 0) | (begun == before[:, None])).all(axis=-1) & (word[:, :, -1] >= 0) & ask.has_words[:, None]
    token = jnp.where(is_next, word[:, :, -1], x.shape[1])
    return x.at[jnp.arange(len(x))[:, None], token].set(-jnp.inf, mode="drop")


def _with_penalties(x: jax.Array, lanes: Lanes, ask: Choosing) -> jax.Array:
    mark = _marks(lanes, ask)
    count = mark >> 2
    repetition, presence, frequency = (column[:, None] for column in (ask.repetition, ask.presence, ask.frequency))
    repeated = jnp.where(x > 0, x / repetition, x * repetition)
    y = jnp.where((mark & IN_PROMPT > 0) | (count > 0), repeated, x)
    y = y - frequency * count - jnp.where(count > 0, presence, 0)
    return jnp.where(ask.counts[:, None], y, x)


def _draw(x: jax.Array, ask: Choosing, step: jax.Array) -> jax.Array:
    """Draws from the truncated distribution, int32 [n]."""
    # A GPU reads a row once for 15 numbers that it is compared with; a CPU for each.
    drawn: jax.Array = jax.lax.platform_dependent(
        x, ask, step, cpu=functools.partial(_draw_by, width=1), default=functools.partial(_draw_by, width=4)
    )
    return drawn


def _draw_by(x: jax.Array, ask: Choosing, step: jax.Array, *, width: int) -> jax.Array:
    x = x / jnp.maximum(ask.temperature, 1e-6)[:, None]
    x = jnp.where(x < x.max(axis=-1, keepdims=True) + jnp.log(ask.min_p)[:, None], -jnp.inf, x)
    k = jnp.where(ask.top_k > 0, ask.top_k, x.shape[1]).astype(jnp.float32)
    x = jnp.where(_leading(x, jnp.ones_like(x), k, width), x, -jnp.inf)
    # A token stays while those before it have not reached top_p; the first one always stays.
    # With top_p = 1 rounding must not cut the tail.
    kept = _leading(x, jax.nn.softmax(x, axis=-1), ask.top_p, width) | (ask.top_p[:, None] >= 1)
    keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(ask.seed, step)
    # Noise is of a token, not of its rank: where an answer is computed again, tokens that are almost equally likely may
    # change places.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, x.shape[1:]))(keys)
    return _most_likely(jnp.where(kept, x, -jnp.inf) + noise)


def _leading(x: jax.Array, weight: jax.Array, budget: jax.Array, width: int) -> jax.Array:
    """The first of each row's tokens, as many as it takes for their weights to reach the budget; bool [n, V].

    They are in the order of `x`, the largest first, and of equals the first. Nothing is sorted: a GPU's sort of a
    vocabulary takes minutes to compile.

    Args:
      x: float32 [n, V], without NaN.
      weight: float32 [n, V], not negative; tokens of the same `x` have the same.
      budget: float32 [n], above 0.
      width: see `_search`.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # of two zeros
    key = jax.lax.bitcast_convert_type(bits ^ (bits >> 31 & 0x7FFFFFFF), jnp.uint32) ^ jnp.uint32(1 << 31)
    index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, 1)

    def beyond(number: jax.Array) -> jax.Array:
        return jnp.where(key > number[:, None], weight, 0)

    least = _search(len(x), 32, width, beyond, lambda total: total >= budget)
    is_last = key == least[:, None]
    # Of those that are equal to the last one, as many as the budget leaves room for.
    room = (budget - beyond(least).sum(axis=1)) / jnp.where(is_last, weight, 0).max(axis=1)

    def until(number: jax.Array) -> jax.Array:
        return (is_last & (index <= number[:, None])).astype(jnp.float32)

    end = _search(len(x), x.shape[1].bit_length(), width, until, lambda total: total < jnp.ceil(room))
    return (key > least[:, None]) | (is_last & (index <= end[:, None]))


def _search(
    count: int,
    bits: int,
    width: int,
    terms: Callable[[jax.Array], jax.Array],
    is_short: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The smallest numbers that are not short, of at least so many bits, uint32 [count]; the largest if all are.

    Args:
      width: bits that a turn finds, by as many sums as a digit has values but one.
      terms: of numbers what is to be summed, float32 [count, V].
      is_short: of these sums [count]; where a number's is, that of all smaller ones is.
    """
    turns, digits = -(-bits // width), range(2**width - 1)

    def add(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x + y for x, y in zip(one, other, strict=True))

    def turn(i: jax.Array, found: jax.Array) -> jax.Array:
        shift = (width * (turns - 1 - i)).astype(jnp.uint32)
        rest = (jnp.uint32(1) << shift) - 1
        given = [terms(found | (jnp.uint32(digit) << shift) | rest) for digit in digits]
        # One reduction of many operands, so that a GPU reads what they are made of once.
        totals = jax.lax.reduce(given, [np.float32(0)] * len(digits), add, (1,))
        return found | (sum(is_short(total).astype(jnp.uint32) for total in totals) << shift)

    return jax.lax.fori_loop(0, turns, turn, jnp.zeros(count, jnp.uint32))
