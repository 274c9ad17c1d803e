"""Builder of the sequences that run for planned requests."""

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
from vlcache_jax.engine.grammars import Grammars, Matcher, bits
from vlcache_jax.engine.request import Generation, ImageUse, Planned
from vlcache_jax.engine.scoring import PooledSequence, ScoredSequence
from vlcache_jax.engine.thinking import Thinking, ThinkingTags
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
    """Builder of sequences that checks whether they can run.

    Args:
      config: configuration of the model.
      memory: sizes that fit in the device's memory.
      tokenizer: tokenizer of the checkpoint.
      generation: sampling parameters of the checkpoint.
      end_tokens: end tokens of the checkpoint.
      seed: seed of outputs whose sampling parameters set none.
      structured: the engine's options of structured outputs, which take precedence over the checkpoint's.

    Attributes:
      grammars: compiled formats of structured outputs.
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
        self._thinking_tags = ThinkingTags.of(tokenizer)
        self.grammars = Grammars(tokenizer, end_tokens, config.text.vocab_size)

    def continuations(self, given: abc.Sequence[str | abc.Sequence[int]], count: int) -> list[list[int] | ValueError]:
        """Return the token IDs of each request's continuation, or its error."""
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
            raise ValueError(f"{name} must have at least one token, got none")
        return [int(token) for token in tokens]

    def sampling_params(
        self, given: SamplingParams | abc.Sequence[SamplingParams] | None, count: int, first: int = 0
    ) -> list[SamplingParams | ValueError]:
        """Return the resolved sampling parameters of each of `count` requests, or their error.

        Args:
          given: parameters of all requests, a list with one per request, or None: the checkpoint's.
          count: number of requests.
          first: number of the first request.

        Raises:
          ValueError: `given` is none of these, or the parameters of all requests are wrong.
        """
        if given is None or isinstance(given, SamplingParams):
            return [self._resolved(given or SamplingParams(), "sampling_params")] * count
        if not isinstance(given, abc.Sequence):
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {type(given).__name__}")
        if len(given) != count:
            raise ValueError(
                f"sampling_params must be SamplingParams or a list with one for each of {count} requests, "
                f"got {len(given)}"
            )
        return [or_error(self._resolved, params, f"sampling_params[{i}]") for i, params in enumerate(given, first)]

    def default_params(self) -> SamplingParams:
        """Return the checkpoint's sampling parameters."""
        return SamplingParams().resolve(self._generation)

    def _resolved(self, params: SamplingParams, name: str) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} must be SamplingParams, got {type(params).__name__}")
        try:
            resolved = params.resolve(self._generation)  # a copy: the caller may change its object during the call
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        if (held := resolved.structured_outputs) is not None:
            resolved.structured_outputs = held.within(self._structured)
        ends, vocab_size = self._ends(resolved), self._config.text.vocab_size
        if any(end >= vocab_size for end in ends):
            raise ValueError(
                f"{name} stop_token_ids must be below {vocab_size}, the size of the vocabulary, "
                f"got {short(sorted(ends))}"
            )
        if len(resolved.allowed_token_ids or ()) > vocab_size:
            count = len(resolved.allowed_token_ids or ())
            raise ValueError(
                f"{name} allowed_token_ids must have at most {vocab_size} ids, the size of the vocabulary, got {count}"
            )
        if resolved.thinking_token_budget is not None:
            if self._thinking_tags is None:
                raise ValueError(
                    f"{name} thinking_token_budget must be None for a tokenizer without the tokens <think> and "
                    f"</think>, got {resolved.thinking_token_budget}"
                )
            if resolved.structured_outputs is not None and resolved.structured_outputs.enable_in_reasoning:
                raise ValueError(
                    f"{name} thinking_token_budget must be None if structured_outputs.enable_in_reasoning is true, "
                    f"got {resolved.thinking_token_budget}"
                )
        try:
            bias_row(resolved, vocab_size)
            self._bad_words(resolved)
            if held is not None:
                self.grammars.check(resolved)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        return resolved

    def held(self, params: SamplingParams, prompt: Prompt) -> ValueError | None:
        """Compile the format of a prompt's output; return an error, or None."""
        if params.structured_outputs is not None:
            try:
                self.grammars.check(params, opens_thought=prompt.opens_thought)
            except ValueError as error:
                return ValueError(f"sampling_params {error}")
        return None

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._end_tokens)

    def new_slots(self, length: int, params: SamplingParams) -> int:
        """Return the KV slots of the longest output that fits after a prompt of `length` tokens."""
        room = max(1, self._memory.max_model_len - length)
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def answers(self, planned: Planned, params: SamplingParams) -> list[Generation]:
        """Return the sequences that answer a request; the first saves its images and has the prompt's logprobs."""
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
                thinking=self._thinking(params, planned),
            )
            for i in range(params.n)
        ]

    def _matcher(self, params: SamplingParams, planned: Planned) -> Matcher | None:
        return self.grammars.matcher(params, opens_thought=planned.request.prompt.opens_thought)

    def _thinking(self, params: SamplingParams, planned: Planned) -> Thinking | None:
        budget, tags, is_opened = (
            params.thinking_token_budget,
            self._thinking_tags,
            planned.request.prompt.opens_thought,
        )
        # A grammar allows thinking only if the prompt opens it.
        if budget is None or tags is None or (params.structured_outputs is not None and not is_opened):
            return None
        vocab_size = self._config.text.vocab_size
        everything = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
        window = self._memory.buckets.window
        return Thinking(tags, budget, window, is_opened=is_opened, everything=bits(everything, vocab_size))

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """Return a detokenizer for an output with these parameters."""
        return Detokenizer(
            self._tokenizer,
            params.stop or (),
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token spells."""
        return token_bytes(self._tokenizer, token)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        words = bad_word_tokens(self._tokenizer, params.bad_words or ())
        words_array(words, self._config.text.vocab_size)  # raises if they are wrong
        return words

    def scored(self, planned: Planned, tokens: abc.Sequence[int], *, keep_logits: bool, save: bool) -> ScoredSequence:
        """Return the sequence that scores a continuation."""
        length, layers = len(planned.layout), self._config.text.num_layers
        planned, error = self._fitting(planned, len(tokens))
        wanted = range(length - 1, length + len(tokens) - 1)
        own = dataclasses.replace(
            planned,
            layout=planned.layout.extended(tokens),
            plan=planned.plan.extended(len(tokens), layers).wanting(wanted, layers),
            uses=planned.uses if save else _shared(planned.uses),
            reservation=planned.reservation if save else None,
        )
        return ScoredSequence(own, new_slots=0, error=error, keep_logits=keep_logits)

    def pooled(self, planned: Planned) -> PooledSequence:
        """Return the sequence that ends with a prompt's last token."""
        planned, error = self._fitting(planned, 1)
        return PooledSequence(planned, new_slots=0, error=error)

    def _fitting(self, planned: Planned, outputs: int) -> tuple[Planned, str | None]:
        """Return the request, and an error if it selects tokens but all of them do not fit in one prefill chunk."""
        if planned.choice is not None:
            rows = planned.plan.rows(1)[0] + (outputs - 1)
            buckets = self._memory.buckets
            if rows > buckets.max_rows or outputs > buckets.max_sequences:
                return dataclasses.replace(planned, choice=None), (
                    f"reuse {planned.options.reuse.name} must compute a prompt in one prefill chunk, with at most "
                    f"buckets.max_rows = {buckets.max_rows} tokens and buckets.max_sequences = {buckets.max_sequences} "
                    f"scored tokens, got {rows} and {outputs}; shorten the prompt, increase them or change reuse"
                )
        return planned, None

    def check_length(self, name: str, length: int, new_slots: int) -> None:
        """Raise a ValueError if a prompt of `length` tokens and `new_slots` more do not fit."""
        if length + new_slots > self._memory.max_model_len:
            raise ValueError(
                f"{name}: prompt and output must fit in max_model_len = {self._memory.max_model_len} tokens (the KV "
                f"pool has {self._memory.num_slots} slots), got a prompt of {length} and an output of at least "
                f"{new_slots}; shorten the prompt, reduce max_tokens or increase max_model_len"
            )


def or_error[**P, T](function: abc.Callable[P, T], *args: P.args, **named: P.kwargs) -> T | ValueError:
    """Return the result of a function, or the ValueError that it raises."""
    try:
        return function(*args, **named)
    except ValueError as error:
        return error


def _shared(uses: abc.Sequence[ImageUse]) -> tuple[ImageUse, ...]:
    """Return the images of a sequence that does not save them, because another one does."""
    return tuple(dataclasses.replace(use, saved=None) for use in uses)


def _as_uint32(seed: int) -> int:
    """Return a seed of 32 bits: the seed itself if it fits, otherwise a mixture of its 64 bits."""
    return seed if 0 <= seed < 2**32 else int(np.random.SeedSequence(int(seed) % 2**64).generate_state(1)[0])


def read_generation_config(
    directory: pathlib.Path, tokenizer: Any, vocab_size: int
) -> tuple[dict[str, Any], frozenset[int]]:
    """Return a checkpoint's defaults for sampling, and its end tokens.

    `generation_config.json` has both. Without that file, `config.json` has them, at the top level or in `text_config`;
    its end tokens also apply if the other file has none. The tokenizer's end token is always included.

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
    """Return the sampling parameters and end tokens of a file; in `config.json`, the top level takes precedence."""
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
        raise ValueError(f"{path} must have valid sampling parameters: {error}") from error
    return found


def _end_tokens(generation: abc.Mapping[str, Any]) -> list[Any] | None:
    """Return the end tokens that a file names, or None."""
    named = generation.get(_ENDS)
    return named if named is None or isinstance(named, list) else [named]
