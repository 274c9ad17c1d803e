"""How tokens are chosen: the user's parameters, and the sampler on the device."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vlcache_jax.checks import short

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 4096
MAX_BANNED = 32  # stop tokens that `min_tokens` holds back, end-of-text tokens included


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to answer. None means what the checkpoint's `generation_config.json` says, or else the value named here.

    Attributes:
      n: answers to each prompt.
      temperature: 0 is greedy; None: greedy unless the checkpoint says `do_sample`.
      top_p: smallest set of tokens whose probability reaches it; None: 1 (all).
      top_k: only the k most likely tokens; 0: all; None: all.
      seed: makes an answer repeatable whatever else is in the batch; None: drawn from the engine's seed.
      max_tokens: tokens to generate at most; the context's length bounds it too.
      min_tokens: no end token and no stop token before that many, and stop strings that come earlier do not count.
      stop: strings that end the answer, up to 64 of up to 1024 characters; they are not part of its text.
      stop_token_ids: tokens that end the answer, besides the checkpoint's end tokens; up to 4096.
      ignore_eos: go on after the checkpoint's end tokens.
      repetition_penalty: above 1 discourages tokens that the prompt or the answer already holds; None: 1.
      logprobs: log-probabilities of the chosen and of this many most likely tokens, before all of the above; up to 20.

    Raises:
      ValueError: a value of another kind, or out of range.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, kind, low, high in (
            ("n", numbers.Integral, 1, 1024),
            ("temperature", numbers.Real, 0, 1e9),
            ("top_p", numbers.Real, 1e-9, 1),
            ("top_k", numbers.Integral, 0, 2**31 - 1),
            ("seed", numbers.Integral, 0, 2**32 - 1),
            ("max_tokens", numbers.Integral, 1, 2**31 - 1),
            ("min_tokens", numbers.Integral, 0, 2**31 - 1),
            ("repetition_penalty", numbers.Real, 1e-9, 1e9),
            ("logprobs", numbers.Integral, 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            optional = name not in ("n", "max_tokens", "min_tokens")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or not _is_between(low, value, high):
                what = "an integer" if kind is numbers.Integral else "a number"
                raise ValueError(f"{name} must be {what} from {low} to {high}, got {short(value)}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {short(self.ignore_eos)}")
        for name, item_type, most in (("stop", str, MAX_STOPS), ("stop_token_ids", numbers.Integral, MAX_STOP_TOKENS)):
            given = getattr(self, name)
            items = [given] if isinstance(given, str) else () if given is None else given
            try:
                items = tuple(itertools.islice(items, most + 1))
            except TypeError as error:
                raise ValueError(f"{name} must be a list, got {short(given)}") from error
            if len(items) > most:
                raise ValueError(f"{name} must be a list of at most {most}, got {short(given)}")
            if not all(isinstance(item, item_type) and not isinstance(item, bool) for item in items):
                raise ValueError(f"{name} must be {'strings' if item_type is str else 'token ids'}, got {short(given)}")
            object.__setattr__(self, name, items)
        if not all(0 < len(text) <= MAX_STOP_LENGTH for text in self.stop or ()):
            raise ValueError(f"stop must be strings of 1 to {MAX_STOP_LENGTH} characters, got {short(self.stop)}")
        if any(token < 0 for token in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids must be at least 0, got {short(self.stop_token_ids)}")

    def resolve(self, defaults: dict[str, Any]) -> SamplingParams:
        """These parameters with nothing left open; `defaults` is the content of `generation_config.json`."""
        fallback = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        known = fallback | {name: defaults[name] for name in fallback if defaults.get(name) is not None}
        if not defaults.get("do_sample"):
            known["temperature"] = 0.0
        return dataclasses.replace(self, **{name: v for name, v in known.items() if getattr(self, name) is None})

    @property
    def is_plain_greedy(self) -> bool:
        """The most likely token, and nothing else asked."""
        return self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None and self.min_tokens == 0


def _is_between(low: float, value: Any, high: float) -> bool:
    try:
        return low <= float(value) <= high
    except OverflowError:  # an integer or a fraction beyond all floats
        return False


class SamplerInputs(NamedTuple):
    """One row a sequence (arrays of length B)."""

    temperature: Any  # float32; 0 = greedy
    top_k: Any  # int32; 0 = all
    top_p: Any  # float32
    penalty: Any  # float32
    seed: Any  # uint32
    step: Any  # int32, tokens generated so far
    banned: Any  # int32 [B, MAX_BANNED], tokens that must not come yet; out of range = none
    sequence: Any  # int32, the row of `seen` that belongs to the sequence; out of range = none
    logprobs: Any  # bool, whether top log-probabilities are wanted


class Sampled(NamedTuple):
    token: Any  # int32 [B]; -1 where logits are not finite
    logprob: Any  # float32 [B], of the token, before temperature, penalty and truncation
    top_logprob: Any  # float32 [B, MAX_LOGPROBS]
    top_token: Any  # int32 [B, MAX_LOGPROBS]


def sample(logits: jax.Array, seen: jax.Array, inputs: SamplerInputs) -> tuple[Sampled, jax.Array]:
    """Chooses a token for each row; a row's choice depends on that row alone.

    Args:
      logits: float32 [B, V].
      seen: bool [sequences, V], the tokens each sequence holds already.
      inputs: parameters of each row.

    Returns:
      The choice, and `seen` with the chosen tokens added.
    """
    logprobs = jax.nn.log_softmax(logits)
    count = min(MAX_LOGPROBS, logits.shape[1])
    top_logprob, top_token = jax.lax.cond(
        inputs.logprobs.any(),
        lambda x: tuple(jax.lax.top_k(x, count)),
        lambda x: (jnp.zeros((len(x), count), x.dtype), jnp.zeros((len(x), count), jnp.int32)),
        logprobs,
    )
    x = jnp.where(
        seen.at[inputs.sequence].get(mode="fill", fill_value=False),
        jnp.where(logits > 0, logits / inputs.penalty[:, None], logits * inputs.penalty[:, None]),
        logits,
    )
    rows = jnp.arange(len(x))
    x = x.at[rows[:, None], inputs.banned].set(-jnp.inf, mode="drop")
    greedy = jnp.argmax(x, axis=-1)
    drawn = jax.lax.cond((inputs.temperature > 0).any(), _draw, lambda x, _: jnp.argmax(x, axis=-1), x, inputs)
    token = jnp.where(inputs.temperature > 0, drawn, greedy).astype(jnp.int32)
    seen = seen.at[inputs.sequence, token].set(True, mode="drop")
    return Sampled(_or_none(token, logits), logprobs[rows, token], top_logprob, top_token.astype(jnp.int32)), seen


def most_likely(logits: jax.Array) -> jax.Array:
    """The most likely token of each row of logits [B, V], int32 [B]; -1 where they are not finite."""
    return _or_none(jnp.argmax(logits, axis=-1).astype(jnp.int32), logits)


def _or_none(token: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(logits).all(axis=-1), token, -1)


def _draw(x: jax.Array, inputs: SamplerInputs) -> jax.Array:
    """Draws from the truncated distribution: temperature, then top-k, then top-p, as in the library."""
    x = x / jnp.maximum(inputs.temperature, 1e-6)[:, None]
    order = jnp.argsort(x, axis=-1, descending=True, stable=True)
    x = jnp.take_along_axis(x, order, axis=-1)
    rank = jnp.arange(x.shape[1])
    k = jnp.where(inputs.top_k > 0, inputs.top_k, x.shape[1])[:, None]
    x = jnp.where(rank < k, x, -jnp.inf)
    p = jax.nn.softmax(x, axis=-1)
    # A token stays while those before it have not reached top_p; the first one always stays.
    # With top_p = 1 rounding must not cut the tail.
    kept = (jnp.cumsum(p, axis=-1) - p < inputs.top_p[:, None]) | (inputs.top_p[:, None] >= 1)
    x = jnp.where(kept, x, -jnp.inf)
    keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(inputs.seed, inputs.step)
    choice = jax.vmap(jax.random.categorical)(keys, x)
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]


def mark_seen(seen: jax.Array, sequence: jax.Array, token: jax.Array) -> jax.Array:
    """Adds (sequence, token) pairs to `seen`; pairs out of range are padding."""
    return seen.at[sequence, token].set(True, mode="drop")


def score(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each row's target token, float32 [B], and whether it is the most likely one, bool [B]."""
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=-1)[:, 0]
    return logprob, jnp.argmax(logits, axis=-1) == target
