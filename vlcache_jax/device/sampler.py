"""Sampling of tokens on the device. The state of each sequence stays there, so one program can choose many tokens.

Letters: B decode slots, V vocabulary, n rows of a step. A row's token depends only on its logits, its decode slot and
its parameters. The order is that of vLLM: allowed tokens, bias and bad words, then penalties. The most likely token
follows, or temperature, min_p, top_k, top_p and a draw.

On a CPU, programs test at no cost what their rows request ("dynamic"). On a GPU, the host would have to read every
predicate and wait. There it chooses a program by what rows may request (`Choice`, `choice_of`).
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

MAX_BAD_WORDS = 64  # token sequences; a bad word has one for the beginning of a text and one for after a space
MAX_BAD_LENGTH = 8  # tokens of a bad word

NO_DECODE_SLOT = np.iinfo(np.int32).max  # the decode slot of padding: out of range, so that its writes are dropped
# Results instead of a token:
NOT_FINITE = -1  # logits contain NaN or inf
NO_ANSWER = -2  # the sequence had ended, or the row is padding
NOT_ALLOWED = -3  # the parameters allow no token

# Requests that a program can serve: "greedy", only the most likely token; "drawn", also a draw; "any", everything.
# "dynamic": the device tests what rows request.
Choice = Literal["dynamic", "greedy", "drawn", "any"]
FIXED: tuple[Choice, ...] = ("greedy", "drawn", "any")
_PARTS: dict[str, frozenset[str]] = {
    "greedy": frozenset(), "drawn": frozenset({"draw"}), "any": frozenset({"draw", "shape", "logprobs"}),
}  # fmt: skip

# Bits of marks. The higher bits count how often the output contains the token.
IN_PROMPT, ENDS, ONCE = 1, 2, 4


class DecodeState(NamedTuple):
    """The state of running sequences, by decode slot."""

    token: Any  # int32 [B], chosen last
    step: Any  # int32 [B], tokens generated so far
    is_ended: Any  # bool [B]
    marks: Any  # int32 [B, V]: IN_PROMPT, ENDS, and ONCE for each occurrence of the token in the output
    bias: Any  # float32 [B, V], added to logits; -inf: the token is not allowed
    words: Any  # int32 [B, MAX_BAD_WORDS, MAX_BAD_LENGTH], bad words at the right, -1 before them
    recent: Any  # int32 [B, MAX_BAD_LENGTH - 1], the output's last tokens at the right, -1 before them


class Choosing(NamedTuple):
    """Sampling parameters of rows, arrays of length n. They do not change while a sequence runs."""

    decode_slot: Any  # int32
    temperature: Any  # float32; 0: the most likely token
    top_k: Any  # int32; 0: all tokens
    top_p: Any  # float32
    min_p: Any  # float32
    repetition: Any  # float32
    presence: Any  # float32
    frequency: Any  # float32
    seed: Any  # uint32
    min_tokens: Any  # int32, smallest number of generated tokens
    max_tokens: Any  # int32, largest number of generated tokens
    wants_logprobs: Any  # bool
    counts: Any  # bool, True if a penalty depends on earlier tokens
    has_bias: Any  # bool
    has_words: Any  # bool

    @staticmethod
    def row(params: SamplingParams, *, decode_slot: int, seed: int, max_tokens: int) -> npt.NDArray[np.int32]:
        """Pack the parameters of one row, int32 [COLUMNS].

        Args:
          params: resolved sampling parameters.
          max_tokens: number of generated tokens at which the sequence ends.
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
        packed[:4] = decode_slot, params.top_k or 0, params.min_tokens, max_tokens
        packed[4] = sum(flag << i for i, flag in enumerate(flags))
        packed[5] = np.uint32(seed).view(np.int32)
        packed[6:] = floats.view(np.int32)
        return packed

    @staticmethod
    def unpack(packed: jax.Array) -> Choosing:
        """Unpack rows of `row`, int32 [n, COLUMNS], on the device."""
        decode_slot, top_k, min_tokens, max_tokens, flags = (packed[:, i] for i in range(5))
        seed = jax.lax.bitcast_convert_type(packed[:, 5], jnp.uint32)
        floats = jax.lax.bitcast_convert_type(packed[:, 6:], jnp.float32)
        temperature, top_p, min_p, repetition, presence, frequency = (floats[:, i] for i in range(6))
        wants_logprobs, counts, has_bias, has_words = ((flags >> i) & 1 > 0 for i in range(4))
        return Choosing(
            decode_slot, temperature, top_k, top_p, min_p, repetition, presence, frequency, seed,
            min_tokens, max_tokens, wants_logprobs, counts, has_bias, has_words,
        )  # fmt: skip


COLUMNS = 12
_HAS_BIAS, _HAS_WORDS = 1 << 2, 1 << 3  # flags of packed rows


def hold_row(packed: npt.NDArray[np.int32], *, is_forced: bool) -> None:
    """Set a packed row's flags so that `hold_decode_slots` applies. A forced token may be part of a bad word."""
    packed[4] |= _HAS_BIAS
    if is_forced:
        packed[4] &= ~_HAS_WORDS


def choice_of(packed: npt.NDArray[np.int32]) -> Choice:
    """Return the smallest choice that serves all rows, int32 [n, COLUMNS] of `Choosing.row`."""
    min_tokens, flags, temperature = packed[:, 2], packed[:, 4], packed[:, 6].view(np.float32)
    if (min_tokens > 0).any() or (flags > 0).any():
        return "any"
    return "drawn" if (temperature > 0).any() else "greedy"


class SampledTokens(NamedTuple):
    """Tokens of one step.

    Log-probabilities belong to the unmodified logits. They are 0 in rows that do not request them, and None if the
    program cannot return them.
    """

    token: Any  # int32 [n]; NOT_FINITE, NO_ANSWER or NOT_ALLOWED if there is no token
    logprob: Any  # float32 [n], of the token
    rank: Any  # int32 [n]: 1 + the number of tokens that are more likely
    top_logprob: Any  # float32 [n, min(MAX_LOGPROBS, V)]
    top_token: Any  # int32 [n, min(MAX_LOGPROBS, V)]


def empty_decode_state(count: int, vocab_size: int) -> DecodeState:
    """Return decode slots without sequences: all have ended."""
    return DecodeState(
        token=jnp.zeros(count, jnp.int32),
        step=jnp.zeros(count, jnp.int32),
        is_ended=jnp.ones(count, jnp.bool_),
        marks=jnp.zeros((count, vocab_size), jnp.int32),
        bias=jnp.zeros((count, vocab_size), jnp.float32),
        words=jnp.full((count, MAX_BAD_WORDS, MAX_BAD_LENGTH), -1, jnp.int32),
        recent=jnp.full((count, MAX_BAD_LENGTH - 1), -1, jnp.int32),
    )


def open_decode_slot(
    decode_slots: DecodeState,
    decode_slot: jax.Array,
    marks: jax.Array,
    bias: jax.Array,
    words: jax.Array,
    recent: jax.Array,
) -> DecodeState:
    """Assign a decode slot to a sequence.

    Args:
      decode_slot: int32, scalar.
      marks, bias, words, recent: initial state of the decode slot, without the dimension B; see `DecodeState`.
    """
    return decode_slots._replace(
        token=decode_slots.token.at[decode_slot].set(0),
        step=decode_slots.step.at[decode_slot].set(0),
        is_ended=decode_slots.is_ended.at[decode_slot].set(False),
        marks=decode_slots.marks.at[decode_slot].set(marks),
        bias=decode_slots.bias.at[decode_slot].set(bias),
        words=decode_slots.words.at[decode_slot].set(words),
        recent=decode_slots.recent.at[decode_slot].set(recent),
    )


def hold_decode_slots(
    decode_slots: DecodeState, decode_slot: jax.Array, allowed: jax.Array, token: jax.Array, bias: jax.Array
) -> DecodeState:
    """Restrict sequences to some tokens until the next call. Their rows must have `has_bias` set.

    Args:
      decode_slot: int32 [n].
      allowed: int32 [n, ceil(V / 32)]. Bit i % 32 of word i // 32 allows token i.
      token, bias: logit bias of tokens, int32 and float32 [n, k]. Tokens beyond the vocabulary are padding.
    """
    size = decode_slots.bias.shape[1]
    flags = (allowed[:, :, None] >> jnp.arange(32)) & 1 > 0
    added = jnp.zeros((len(decode_slot), size)).at[jnp.arange(len(decode_slot))[:, None], token].add(bias, mode="drop")
    held = jnp.where(flags.reshape(len(decode_slot), -1)[:, :size], added, -jnp.inf)
    return decode_slots._replace(bias=decode_slots.bias.at[decode_slot].set(held, mode="drop"))


def sample(
    logits: jax.Array, decode_slots: DecodeState, choosing: Choosing, *, axis: int = 1, choice: Choice = "dynamic"
) -> tuple[SampledTokens, DecodeState]:
    """Choose a token for each row and write it to the row's decode slot.

    A sequence ends with an end token, at its largest number of tokens, or if no token can be chosen. In the last case
    its step and token do not change. Ended decode slots and padding change nothing.

    Args:
      logits: float32 [n, V].
      choosing: parameters of n rows with different decode slots.
      axis: axis of the vocabulary. 0: logits are [V, n], and are only transposed if a row requests more than the most
        likely token.
      choice: a choice that serves all rows (`choice_of`). It changes no token and no log-probability.

    Returns:
      The tokens, and the updated decode slots.
    """

    def rows() -> jax.Array:
        return logits if axis == 1 else logits.T

    decode_slot = choosing.decode_slot
    is_live = ~decode_slots.is_ended.at[decode_slot].get(mode="fill", fill_value=True)
    step = decode_slots.step.at[decode_slot].get(mode="fill", fill_value=0)
    # Ended decode slots request nothing, so that the remaining steps do not compute their requests.
    requested = choosing._replace(
        temperature=jnp.where(is_live, choosing.temperature, 0),
        min_tokens=jnp.where(is_live, choosing.min_tokens, 0),
        **{name: getattr(choosing, name) & is_live for name in ("wants_logprobs", "counts", "has_bias", "has_words")},
    )
    # If no row requests more, the most likely token is the result.
    is_special = (
        (requested.temperature > 0)
        | (step < requested.min_tokens)
        | requested.counts
        | requested.has_bias
        | requested.has_words
    )
    token, is_allowed = _if_requested(
        choice, {"draw", "shape"}, is_special,
        lambda: _choose(rows(), decode_slots, requested, step, choice),
        lambda: (_most_likely(logits, axis), jnp.ones_like(is_live)),
    )  # fmt: skip
    # Log-probabilities of the rows that request them.
    logprobs: tuple[Any, ...] = (None,) * 4
    if _can_serve(choice, {"logprobs"}):
        logprobs = _if_requested(
            choice, {"logprobs"}, requested.wants_logprobs,
            lambda: _logprobs(rows(), token, wants_top=True),
            lambda: jax.tree.map(jnp.zeros_like, _logprob_shapes(len(decode_slot), logits.shape[axis])),
        )  # fmt: skip
        logprobs = tuple(jnp.where(requested.wants_logprobs.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in logprobs)

    # Sequences that continue or end, and the results for the host.
    is_finite = jnp.isfinite(logits).all(axis)
    continues = is_live & is_finite & is_allowed
    mark = decode_slots.marks.at[decode_slot, token].get(mode="fill", fill_value=0)
    ends = (mark & ENDS > 0) & (step + 1 >= requested.min_tokens)
    result = jnp.where(is_finite, jnp.where(is_allowed, token, NOT_ALLOWED), NOT_FINITE)
    sampled = SampledTokens(jnp.where(is_live, result, NO_ANSWER), *logprobs)

    # Each part of the state is written only for the rows that change it.
    live, growing, counting, recalling = (
        jnp.where(where, decode_slot, NO_DECODE_SLOT)
        for where in (is_live, continues, continues & requested.counts, continues & requested.has_words)
    )
    decode_slots = decode_slots._replace(
        token=decode_slots.token.at[growing].set(token, mode="drop"),
        step=decode_slots.step.at[growing].set(step + 1, mode="drop"),
        is_ended=decode_slots.is_ended.at[live].set(~continues | ends | (step + 1 >= choosing.max_tokens), mode="drop"),
    )
    if not _can_serve(choice, {"shape"}):
        return sampled, decode_slots
    recent = decode_slots.recent.at[decode_slot].get(mode="fill", fill_value=-1)
    return sampled, decode_slots._replace(
        # The new value is set, not added: so the compiler knows that the read comes first, and makes no copy.
        marks=decode_slots.marks.at[counting, token].set(mark + ONCE, mode="drop"),
        recent=decode_slots.recent.at[recalling].set(jnp.column_stack([recent[:, 1:], token]), mode="drop"),
    )


def _can_serve(choice: Choice, parts: set[str]) -> bool:
    return choice == "dynamic" or bool(parts & _PARTS[choice])


def _if_requested(
    choice: Choice,
    parts: set[str],
    is_requested: jax.Array,
    do: Callable[..., Any],
    otherwise: Callable[..., Any],
    *x: Any,
) -> Any:
    """Call `do` if rows may request one of the parts. With "dynamic", the device tests `is_requested`."""
    if choice == "dynamic":
        return jax.lax.cond(is_requested.any(), do, otherwise, *x)
    return (do if _can_serve(choice, parts) else otherwise)(*x)


def score(
    logits: jax.Array, target: jax.Array, wants_top: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute log-probabilities and ranks of target tokens.

    Args:
      logits: float32 [n, V].
      target: int32 [n].
      wants_top: bool, scalar. False: the results for the most likely tokens are 0.

    Returns:
      Log-probability of each row's target, float32 [n]; True if it is the most likely token, bool [n]; its rank, int32
      [n]; log-probabilities, float32, and ids, int32, of the most likely tokens, [n, min(MAX_LOGPROBS, V)].
    """
    logprob, rank, top_logprob, top_token = _logprobs(logits, target, wants_top)
    return logprob, _most_likely(logits) == target, rank, top_logprob, top_token


def _most_likely(logits: jax.Array, axis: int = 1) -> jax.Array:
    """Return the most likely token of each row, int32 [n], the first among equals."""

    def in_two_passes(x: jax.Array) -> jax.Array:  # 6 to 9 times faster than argmax on a CPU
        index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(x == x.max(axis, keepdims=True), index, x.shape[axis]).min(axis)

    token: jax.Array = jax.lax.platform_dependent(
        logits, cpu=in_two_passes, default=lambda x: jnp.argmax(x, axis).astype(jnp.int32)
    )
    return token


def _logprob_shapes(count: int, vocab_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the abstract results of `_logprobs` for `count` rows."""
    top = count, min(MAX_LOGPROBS, vocab_size)
    shapes = ((count,), jnp.float32), ((count,), jnp.int32), (top, jnp.float32), (top, jnp.int32)
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def _logprobs(logits: jax.Array, token: jax.Array, wants_top: jax.Array | bool) -> tuple[jax.Array, ...]:
    """Return log-probability and rank of each row's token, and log-probabilities and ids of the most likely tokens."""
    logprobs = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(logprobs, token[:, None], axis=-1)
    rank = 1 + (logprobs > logprob).sum(axis=-1, dtype=jnp.int32)
    count = min(MAX_LOGPROBS, logits.shape[1])

    def top() -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.platform_dependent(
                logprobs, cpu=lambda x: tuple(jax.lax.top_k(x, count)), default=lambda x: _top_one_by_one(x, count)
            )
        )

    if wants_top is True:
        top_logprob, top_token = top()
    else:
        top_logprob, top_token = jax.lax.cond(
            wants_top, top, lambda: tuple(jax.tree.map(jnp.zeros_like, _logprob_shapes(*logits.shape)[2:]))
        )
    return logprob[:, 0], rank, top_logprob, top_token


def _top_one_by_one(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Compute `jax.lax.top_k` one value after the other: on a GPU it sorts all of V and compiles slowly."""
    index, place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), jnp.arange(count)

    def find_next(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value, token, values, tokens = state
        is_left = (x < value) | ((x == value) & (index > token))
        value = jnp.where(is_left, x, -jnp.inf).max(1, keepdims=True)
        token = jnp.where(is_left & (x == value), index, x.shape[1] - 1).min(1, keepdims=True)  # with NaN, the last one
        return value, token, jnp.where(place == i, value, values), jnp.where(place == i, token, tokens)

    begin = jnp.full((len(x), 1), jnp.inf), jnp.full((len(x), 1), -1, jnp.int32)
    nothing = jnp.zeros((len(x), count)), jnp.zeros((len(x), count), jnp.int32)
    *_, values, tokens = jax.lax.fori_loop(0, count, find_next, (*begin, *nothing))
    return values, tokens


def _choose(
    logits: jax.Array, decode_slots: DecodeState, requested: Choosing, step: jax.Array, choice: Choice
) -> tuple[jax.Array, jax.Array]:
    """Return a token for each row, int32 [n], and True if any token was allowed, bool [n]."""
    is_early = step < requested.min_tokens
    x = logits
    for is_requested, change in (
        (requested.has_bias, lambda x: _with_bias(x, decode_slots, requested)),
        (requested.has_words, lambda x: _without_words(x, decode_slots, requested)),
        (is_early, lambda x: jnp.where((_marks(decode_slots, requested) & ENDS > 0) & is_early[:, None], -jnp.inf, x)),
        (requested.counts, lambda x: _with_penalties(x, decode_slots, requested)),
    ):
        x = _if_requested(choice, {"shape"}, is_requested, change, lambda x: x, x)
    greedy = _most_likely(x)
    is_drawn = requested.temperature > 0
    drawn = _if_requested(choice, {"draw"}, is_drawn, _draw, lambda x, *_: _most_likely(x), x, requested, step)
    token = jnp.where(is_drawn, drawn, greedy)
    # The best remaining token has -inf only if all tokens have.
    return token, jnp.take_along_axis(x, token[:, None], axis=-1)[:, 0] > -jnp.inf


def _marks(decode_slots: DecodeState, requested: Choosing) -> jax.Array:
    return decode_slots.marks.at[requested.decode_slot].get(mode="fill", fill_value=0)


def _with_bias(x: jax.Array, decode_slots: DecodeState, requested: Choosing) -> jax.Array:
    # Decode slots without a bias contain values of an earlier sequence.
    bias = decode_slots.bias.at[requested.decode_slot].get(mode="fill", fill_value=0)
    return jnp.where(requested.has_bias[:, None], x + bias, x)


def _without_words(x: jax.Array, decode_slots: DecodeState, requested: Choosing) -> jax.Array:
    """Ban tokens that would complete a bad word."""
    word = decode_slots.words.at[requested.decode_slot].get(mode="fill", fill_value=-1)
    before = decode_slots.recent.at[requested.decode_slot].get(mode="fill", fill_value=-1)
    begun = word[:, :, :-1]
    is_begun = ((begun < 0) | (begun == before[:, None])).all(axis=-1)
    is_next = is_begun & (word[:, :, -1] >= 0) & requested.has_words[:, None]
    token = jnp.where(is_next, word[:, :, -1], x.shape[1])
    return x.at[jnp.arange(len(x))[:, None], token].set(-jnp.inf, mode="drop")


def _with_penalties(x: jax.Array, decode_slots: DecodeState, requested: Choosing) -> jax.Array:
    mark = _marks(decode_slots, requested)
    count = mark >> 2
    penalties = requested.repetition, requested.presence, requested.frequency
    repetition, presence, frequency = (column[:, None] for column in penalties)
    repeated = jnp.where(x > 0, x / repetition, x * repetition)
    y = jnp.where((mark & IN_PROMPT > 0) | (count > 0), repeated, x)
    y = y - frequency * count - jnp.where(count > 0, presence, 0)
    return jnp.where(requested.counts[:, None], y, x)


def _draw(x: jax.Array, requested: Choosing, step: jax.Array) -> jax.Array:
    """Draw tokens from the truncated distribution, int32 [n]."""
    # A GPU reads a row once to compare it with 15 numbers. A CPU reads it for each number.
    drawn: jax.Array = jax.lax.platform_dependent(
        x, requested, step, cpu=functools.partial(_draw_by, width=1), default=functools.partial(_draw_by, width=4)
    )
    return drawn


def _draw_by(x: jax.Array, requested: Choosing, step: jax.Array, *, width: int) -> jax.Array:
    x = x / jnp.maximum(requested.temperature, 1e-6)[:, None]
    x = jnp.where(x < x.max(axis=-1, keepdims=True) + jnp.log(requested.min_p)[:, None], -jnp.inf, x)
    k = jnp.where(requested.top_k > 0, requested.top_k, x.shape[1]).astype(jnp.float32)
    x = jnp.where(_leading(x, jnp.ones_like(x), k, width), x, -jnp.inf)
    # A token stays while the sum of those before it is below top_p. The first token always stays.
    # With top_p = 1 rounding must not cut the tail.
    kept = _leading(x, jax.nn.softmax(x, axis=-1), requested.top_p, width) | (requested.top_p[:, None] >= 1)
    keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(requested.seed, step)
    # Noise belongs to a token, not to its rank: if an output is recomputed, tokens of almost equal probability may
    # change ranks.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, x.shape[1:]))(keys)
    return _most_likely(jnp.where(kept, x, -jnp.inf) + noise)


def _leading(x: jax.Array, weight: jax.Array, budget: jax.Array, width: int) -> jax.Array:
    """Return the leading tokens of each row, as many as their weights need to reach the budget, bool [n, V].

    The order is that of `x`, the largest first, and the first among equals. The search needs no sort, because a GPU's
    sort of a vocabulary takes minutes to compile.

    Args:
      x: float32 [n, V], without NaN.
      weight: float32 [n, V], not negative. Tokens of equal `x` have equal weights.
      budget: float32 [n], above 0.
      width: see `_search`.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0 becomes 0
    key = jax.lax.bitcast_convert_type(bits ^ (bits >> 31 & 0x7FFFFFFF), jnp.uint32) ^ jnp.uint32(1 << 31)
    index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, 1)

    def beyond(number: jax.Array) -> jax.Array:
        return jnp.where(key > number[:, None], weight, 0)

    last = _search(len(x), 32, width, beyond, lambda total: total >= budget)
    is_last = key == last[:, None]
    # Number of tokens equal to the last one that the remaining budget needs.
    room = (budget - beyond(last).sum(axis=1)) / jnp.where(is_last, weight, 0).max(axis=1)

    def until(number: jax.Array) -> jax.Array:
        return (is_last & (index <= number[:, None])).astype(jnp.float32)

    end = _search(len(x), x.shape[1].bit_length(), width, until, lambda total: total < jnp.ceil(room))
    return (key > last[:, None]) | (is_last & (index <= end[:, None]))


def _search(
    count: int,
    bits: int,
    width: int,
    terms: Callable[[jax.Array], jax.Array],
    is_short: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Return the smallest numbers whose sums are not short, uint32 [count], or the largest number if all are short.

    Args:
      bits: smallest number of bits of the numbers.
      width: bits found per round, with 2**width - 1 sums.
      terms: returns the terms to sum for numbers, float32 [count, V].
      is_short: returns True for sums [count] that are short. Then the sums of all smaller numbers are short too.
    """
    rounds, digits = -(-bits // width), range(2**width - 1)

    def add(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x + y for x, y in zip(one, other, strict=True))

    def find_digit(i: jax.Array, found: jax.Array) -> jax.Array:
        shift = (width * (rounds - 1 - i)).astype(jnp.uint32)
        rest = (jnp.uint32(1) << shift) - 1
        operands = [terms(found | (jnp.uint32(digit) << shift) | rest) for digit in digits]
        # One reduction of many operands, so that a GPU reads their inputs once.
        totals = jax.lax.reduce(operands, [np.float32(0)] * len(digits), add, (1,))
        return found | (sum(is_short(total).astype(jnp.uint32) for total in totals) << shift)

    return jax.lax.fori_loop(0, rounds, find_digit, jnp.zeros(count, jnp.uint32))
