"""From planned requests to the sequences that run, and from their tokens to text."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import abc
from typing import Any

import numpy as np

from vlcache_jax.common.checks import check_text, is_a, short
from vlcache_jax.common.json_files import FLAG, check_fields, optional, read_object, real, whole
from vlcache_jax.device.memory_plan import MemoryPlan
from vlcache_jax.engine.completions import Detokenizer, token_bytes
from vlcache_jax.engine.decode_slots import bad_word_tokens, bias_row, words_array
from vlcache_jax.engine.grammars import Grammars, Matcher
from vlcache_jax.engine.request import Forced, Generation, ImageUse, Planned, PooledSequence
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.models import ModelConfig
from vlcache_jax.sampling import SamplingParams, StructuredOutputsConfig

_ENDS, _HELD = "eos_token_id", "structured_outputs_config"
_GENERATION = {
    "do_sample": optional(FLAG),
    "temperature": optional(real(0, 1e9)),
    "top_p": optional(real(0, 1)),
    "top_k": optional(whole(0, (1 << 31) - 1)),
    "repetition_penalty": optional(real(1e-9, 1e9)),
}


class SequenceBuilder:
    """Makes sequences of requests and checks that they can run.

    Args:
      config: of the model.
      memory: what fits.
      tokenizer: of the checkpoint.
      generation: the checkpoint's own sampling parameters.
      end_tokens: the checkpoint's.
      seed: of answers whose sampling parameters name none.
      structured: the engine's options of structured outputs, which come before the checkpoint's.

    Attributes:
      grammars: that answers are held to.
    """

    def __init__(
        self,
        config: ModelConfig,
        memory: MemoryPlan,
        tokenizer: Any,
        generation: dict[str, Any],
        end_tokens: frozenset[int],
        seed: int,
        structured: StructuredOutputsConfig = StructuredOutputsConfig(),  # noqa: B008 - frozen
    ):
        self._config = config
        self._memory = memory
        self._tokenizer = tokenizer
        self._generation = generation
        self._end_tokens = end_tokens
        self._random = np.random.default_rng(seed)
        self._structured = structured.over(StructuredOutputsConfig.of(generation.get(_HELD)))
        self.grammars = Grammars(tokenizer, end_tokens, config.text.vocab_size)

    def continuations(self, given: abc.Sequence[str | abc.Sequence[int]], count: int) -> list[list[int] | ValueError]:
        """The token ids of the continuations to be scored of `count` requests, or what is wrong with them."""
        if isinstance(given, str) or not isinstance(given, abc.Sequence):
            raise ValueError(f"continuations must be a list, got {type(given).__name__}")
        if len(given) != count:
            raise ValueError(f"continuations must have one entry for each of {count} conversations, got {len(given)}")
        return [or_error(self._continuation, one, f"continuations[{i}]") for i, one in enumerate(given)]

    def _continuation(self, continuation: str | abc.Sequence[int], name: str) -> list[int]:
        if isinstance(continuation, str):
            check_text(continuation, name)
            tokens = self._tokenizer(continuation, add_special_tokens=False)["input_ids"]
        else:
            tokens = list(continuation) if isinstance(continuation, abc.Sequence | np.ndarray) else [None]
            vocab_size = self._config.text.vocab_size
            if not all(
                type(token) is not bool and isinstance(token, (int, np.integer)) and 0 <= token < vocab_size
                for token in tokens
            ):
                raise ValueError(f"{name} must be a text or token ids below {vocab_size}, got {continuation!r}")
        if not tokens:
            raise ValueError(f"{name} must hold at least one token, got none")
        return [int(token) for token in tokens]

    def sampling_params(
        self, given: SamplingParams | abc.Sequence[SamplingParams] | None, count: int, first: int = 0
    ) -> list[SamplingParams | ValueError]:
        """Those of `count` requests, resolved, or what is wrong with them.

        Args:
          given: one for all, a list, or None: the checkpoint's own.
          first: number of the first request.

        Raises:
          ValueError: it is none of these, or the one for all is wrong.
        """
        if given is None or isinstance(given, SamplingParams):
            return [self._resolved(given or SamplingParams(), "sampling_params")] * count
        if not isinstance(given, abc.Sequence):
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {type(given).__name__}")
        if len(given) != count:
            raise ValueError(f"sampling_params must be one, or one for each of {count} requests, got {len(given)}")
        return [or_error(self._resolved, params, f"sampling_params[{i}]") for i, params in enumerate(given, first)]

    def default_params(self) -> SamplingParams:
        """The checkpoint's own."""
        return SamplingParams().resolve(self._generation)

    def _resolved(self, params: SamplingParams, name: str) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} must be SamplingParams, got {type(params).__name__}")
        try:
            resolved = params.resolve(self._generation)  # a copy: the caller's may be set while the call runs
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        if (held := resolved.structured_outputs) is not None:
            resolved.structured_outputs = held.within(self._structured)
        ends, vocab_size = self._ends(resolved), self._config.text.vocab_size
        if any(end >= vocab_size for end in ends):
            raise ValueError(
                f"{name} stop_token_ids must be below the vocabulary's {vocab_size}, got {short(sorted(ends))}"
            )
        if len(resolved.allowed_token_ids or ()) > vocab_size:
            count = len(resolved.allowed_token_ids or ())
            raise ValueError(f"{name} allowed_token_ids must have at most the vocabulary's {vocab_size}, got {count}")
        try:
            bias_row(resolved, vocab_size)
            self._bad_words(resolved)
            if held is not None:
                self.grammars.check(resolved)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        return resolved

    def held(self, params: SamplingParams, prompt: Prompt) -> ValueError | None:
        """Prepare what holds the answer to a prompt; what is wrong with it, or None."""
        if params.structured_outputs is not None:
            try:
                self.grammars.check(params, opens_thought=prompt.opens_thought)
            except ValueError as error:
                return ValueError(f"sampling_params {error}")
        return None

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._end_tokens)

    def new_slots(self, length: int, params: SamplingParams) -> int:
        """Slots for the longest answer that fits behind a prompt of `length` tokens."""
        room = max(1, self._memory.max_model_len - length)
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def answers(self, planned: Planned, params: SamplingParams) -> list[Generation]:
        """The sequences that answer a request; the first captures its images and tells of the prompt's tokens."""
        planned, error = self._fitting(planned, 1)
        first = other = planned
        if params.prompt_logprobs is not None:
            whole = planned.plan.wanting(range(len(planned.layout)), self._config.text.num_layers)
            first = dataclasses.replace(planned, plan=dataclasses.replace(whole, shift=False), choice=None)
        if params.n > 1:
            other = dataclasses.replace(planned, uses=_shared(planned.uses))
        seed = int(self._random.integers(2**32)) if params.seed is None else _as_uint32(params.seed)
        return [
            Generation(
                first if i == 0 else other,
                new_slots=self.new_slots(len(planned.layout), params),
                error=error,
                params=params,
                seed=seed if i == 0 else int(np.random.SeedSequence([seed, i]).generate_state(1)[0]),
                end_tokens=self._ends(params),
                bad_words=self._bad_words(params),
                detokenizer=self.detokenizer(params),
                matcher=self._matcher(params, planned) if params.structured_outputs is not None else None,
            )
            for i in range(params.n)
        ]

    def _matcher(self, params: SamplingParams, planned: Planned) -> Matcher | None:
        return self.grammars.matcher(params, opens_thought=planned.request.prompt.opens_thought)

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """One for an answer under these parameters."""
        return Detokenizer(
            self._tokenizer,
            params.stop or (),
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            least=params.min_tokens,
        )

    def token_bytes(self, token: int) -> bytes:
        """Return what one token spells."""
        return token_bytes(self._tokenizer, token)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        words = bad_word_tokens(self._tokenizer, params.bad_words or ())
        words_array(words, self._config.text.vocab_size)  # checks them
        return words

    def forced(self, planned: Planned, tokens: abc.Sequence[int], *, keep_logits: bool, capture: bool) -> Forced:
        """The sequence that scores a continuation."""
        length, layers = len(planned.layout), self._config.text.num_layers
        planned, error = self._fitting(planned, len(tokens))
        wanted = range(length - 1, length + len(tokens) - 1)
        own = dataclasses.replace(
            planned,
            layout=planned.layout.extended(tokens),
            plan=planned.plan.extended(len(tokens), layers).wanting(wanted, layers),
            uses=planned.uses if capture else _shared(planned.uses),
            hold=planned.hold if capture else None,
        )
        return Forced(own, new_slots=0, error=error, keep_logits=keep_logits)

    def pooled(self, planned: Planned) -> PooledSequence:
        """The sequence that ends with a prompt's last token."""
        planned, error = self._fitting(planned, 1)
        return PooledSequence(planned, new_slots=0, error=error)

    def _fitting(self, planned: Planned, outputs: int) -> tuple[Planned, str | None]:
        """The request, or why it cannot choose rows: one prefill step has to hold all of its rows and logits."""
        if planned.choice is not None:
            rows = planned.plan.rows(1)[0] + (outputs - 1)
            ladder = self._memory.ladder
            if rows > ladder.max_rows or outputs > ladder.max_sequences:
                return dataclasses.replace(planned, choice=None), (
                    f"reuse {planned.options.reuse.name} chooses among all rows of a prompt, so it must have at most "
                    f"max_rows = {ladder.max_rows} of them and {ladder.max_sequences} scored tokens, got {rows} and "
                    f"{outputs}"
                )
        return planned, None

    def check_length(self, name: str, length: int, new_slots: int) -> None:
        """Raises a ValueError if a prompt of `length` tokens and `new_slots` more do not fit."""
        if length + new_slots > self._memory.max_model_len:
            raise ValueError(
                f"{name}: prompt and answer must fit in max_model_len = {self._memory.max_model_len} tokens (the KV "
                f"pool has {self._memory.num_slots} slots), got a prompt of {length} and an answer of at least "
                f"{new_slots}"
            )


def or_error[**P, T](function: abc.Callable[P, T], *args: P.args, **named: P.kwargs) -> T | ValueError:
    """What a function returns, or the ValueError that it raises."""
    try:
        return function(*args, **named)
    except ValueError as error:
        return error


def _shared(uses: abc.Sequence[ImageUse]) -> tuple[ImageUse, ...]:
    """What a sequence does with its images that does not capture them, as another one does."""
    return tuple(dataclasses.replace(use, captured=None) for use in uses)


def _as_uint32(seed: int) -> int:
    """A seed as the sampler has it: itself, or else a mixture of its 64 bits."""
    return seed if 0 <= seed < 2**32 else int(np.random.SeedSequence(int(seed) % 2**64).generate_state(1)[0])


def read_generation_config(
    directory: pathlib.Path, tokenizer: Any, vocab_size: int
) -> tuple[dict[str, Any], frozenset[int]]:
    """Return a checkpoint's defaults for sampling, and its end tokens.

    `generation_config.json` has both; without that file `config.json` has them, at the top or in `text_config`. End
    tokens are those of `config.json`, too, if the other file names none. The tokenizer's own is always one of them.

    Raises:
      ValueError: a file is damaged, or names end tokens that the model does not have.
    """
    own, model = directory / "generation_config.json", directory / "config.json"
    generation = _read_generation(own) if own.exists() else _read_generation(model)
    path = own
    if (ends := _end_tokens(generation)) is None:
        path, ends = model, _end_tokens(_read_generation(model))
    for end in ends or ():
        if not is_a(end, int) or not 0 <= end < vocab_size:
            raise ValueError(f"eos_token_id of {path} must be token ids below {vocab_size}, got {short(ends)}")
    spoken = tokenizer.eos_token_id
    return generation, frozenset(ends or ()) | {end for end in (spoken,) if end is not None and end < vocab_size}


def _read_generation(path: pathlib.Path) -> dict[str, Any]:
    """The sampling parameters and end tokens of a file; of `config.json` the top level comes first."""
    if not path.exists():
        return {}
    try:
        raw = read_object(path)
        nested = raw.get("text_config")
        levels = (nested if isinstance(nested, dict) else {}, raw)
        found = {
            name: one[name] for one in levels for name in (*_GENERATION, _ENDS, _HELD) if one.get(name) is not None
        }
        check_fields(found, _GENERATION)
        SamplingParams().resolve(found)
        StructuredOutputsConfig.of(found.get(_HELD))
    except ValueError as error:
        raise ValueError(f"{path} must hold usable sampling parameters: {error}") from error
    return found


def _end_tokens(generation: abc.Mapping[str, Any]) -> list[Any] | None:
    """The end tokens that a file names; None: it names none."""
    named = generation.get(_ENDS)
    return named if named is None or isinstance(named, list) else [named]
