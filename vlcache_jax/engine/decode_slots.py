"""Device state of running outputs, seen from the host."""

from __future__ import annotations

from collections import abc
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.common.checks import check_text, short
from vlcache_jax.device.programs.window import ANSWER
from vlcache_jax.device.runner import Runner
from vlcache_jax.device.sampler import ENDS, IN_PROMPT, MAX_BAD_LENGTH, MAX_BAD_WORDS, ONCE, Choosing, hold_row
from vlcache_jax.engine.request import Generation
from vlcache_jax.sampling import SamplingParams


class DecodeSlots:
    """Writer of decode slots.

    Most outputs need only the end tokens. If the previous output in the slot had the same ones, nothing is written.

    Args:
      runner: runner that has the decode slots.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._ends: dict[int, frozenset[int]] = {}  # of decode slots that hold only end tokens
        self._rows: dict[int, npt.NDArray[np.int32]] = {}

    def reset(self) -> None:
        """Forget the decode slots after the device state was lost."""
        self._ends = {}

    def open(self, answers: abc.Sequence[Generation]) -> npt.NDArray[np.int32]:
        """Write what the outputs need into their decode slots; return their sampling parameters, int32 [n, C]."""
        for answer in answers:
            decode_slot, params = answer.progress.decode_slot, answer.params
            is_plain = (
                answer.matcher is None
                and answer.thinking is None
                and not (params.has_penalty or params.logit_bias or params.allowed_token_ids or params.bad_words)
            )
            if not is_plain or self._ends.get(decode_slot) != answer.end_tokens:
                self._open(answer, answer.token_ids)
                self._ends.pop(decode_slot, None)
            if is_plain:
                self._ends[decode_slot] = answer.end_tokens
            choosing = Choosing.row(params, decode_slot=decode_slot, seed=answer.seed, max_tokens=answer.new_slots)
            self._rows[decode_slot] = np.concatenate(
                [[len(answer.layout), answer.layout.delta, answer.progress.state_slot], choosing]
            ).astype(np.int32)
        self.hold(answers, [answer.length for answer in answers])
        return self.rows(answers)[:, ANSWER:]

    def go_on(
        self, answers: abc.Sequence[Generation], tokens: abc.Sequence[abc.Sequence[int]]
    ) -> npt.NDArray[np.int32]:
        """Prepare decode slots of outputs with forced tokens to sample one more token.

        Args:
          answers: the outputs.
          tokens: all generated tokens of each output.

        Returns:
          Their sampling parameters, int32 [n, C].
        """
        for answer, own in zip(answers, tokens, strict=True):
            if answer.params.has_penalty:
                self._open(answer, own)
        self.hold(answers, [len(answer.layout) + len(own) for answer, own in zip(answers, tokens, strict=True)])
        return self.rows(answers)[:, ANSWER:]

    def hold(self, answers: abc.Sequence[Generation], counts: abc.Sequence[int]) -> None:
        """Write the tokens allowed after `counts` tokens into the decode slots of those outputs that are held."""
        held = {
            one.progress.decode_slot: (one.allowed(count), one.params.logit_bias or ())
            for one, count in zip(answers, counts, strict=True)
            if one.is_held
        }
        if held:
            self._runner.hold(held)

    def rows(self, answers: abc.Sequence[Generation]) -> npt.NDArray[np.int32]:
        """Return what a decode program needs for each open decode slot; see `vlcache_jax.device.programs.window`."""
        rows = np.stack([self._rows[answer.progress.decode_slot] for answer in answers])
        for row, answer in zip(rows, answers, strict=True):
            if answer.thinking is not None and answer.is_held:
                hold_row(row[ANSWER:], is_forced=bool(answer.thinking.closing))
        return rows

    def _open(self, answer: Generation, tokens: abc.Sequence[int]) -> None:
        size = self._runner.config.text.vocab_size
        prompt, counted = (answer.layout.token_ids, tokens) if answer.params.has_penalty else ((), ())
        bias = bias_row(answer.params, size)
        self._runner.open_decode_slot(
            answer.progress.decode_slot,
            marks_row(prompt, counted, answer.end_tokens, size),
            np.zeros(size, np.float32) if bias is None else bias,
            words_array(answer.bad_words, size),
            recent_tokens(tokens),
        )


def marks_row(
    prompt: npt.ArrayLike, answer: npt.ArrayLike, ends: abc.Collection[int], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Return the sampler's state of each vocabulary entry, int32 [V]: flags, and the count in the output.

    Args:
      prompt, answer: token ids of the prompt and of the output so far.
      ends: tokens that end the output.
      vocab_size: size of the vocabulary, V.

    Raises:
      ValueError: a token id is beyond the vocabulary.
    """
    marks = np.zeros(vocab_size, np.int32)
    np.add.at(marks, _ids(answer, "token_ids of the output", vocab_size), ONCE)
    marks[_ids(prompt, "the prompt's tokens", vocab_size)] |= IN_PROMPT
    marks[_ids(list(ends), "end tokens", vocab_size)] |= ENDS
    return marks


def bias_row(params: SamplingParams, vocab_size: int) -> npt.NDArray[np.float32] | None:
    """Return what is added to the logits, float32 [V]; None if nothing is.

    Raises:
      ValueError: a token id is beyond the vocabulary.
    """
    pairs: Any = params.logit_bias or ()
    if not pairs and params.allowed_token_ids is None:
        return None
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[_ids(params.allowed_token_ids, "allowed_token_ids", vocab_size)] = 0
    if pairs:
        bias[_ids([token for token, _ in pairs], "logit_bias", vocab_size)] += np.array([b for _, b in pairs])
    return bias


def bad_word_tokens(tokenizer: Any, words: abc.Sequence[str]) -> list[list[int]]:
    """Return the tokens of bad words at the beginning of a text, and after a space if that has as many tokens.

    Raises:
      ValueError: a word has no tokens, or more than the sampler compares.
    """
    found = []
    for word in words:
        check_text(word, "bad_words")
        first, spaced = (
            list(tokenizer(space + word.lstrip(), add_special_tokens=False)["input_ids"]) for space in ("", " ")
        )
        if not 0 < len(first) <= MAX_BAD_LENGTH:
            raise ValueError(f"bad_words must have 1 to {MAX_BAD_LENGTH} tokens, got {len(first)} for {short(word)}")
        found.append(first)
        # If the space is a token of its own, the word after it is banned already.
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found.append(spaced)
    return found


def words_array(words: abc.Sequence[abc.Sequence[int]], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return bad words in the format of decode slots, int32 [MAX_BAD_WORDS, MAX_BAD_LENGTH].

    Args:
      words: token ids of each word.
      vocab_size: size of the vocabulary.

    Raises:
      ValueError: there are too many words, one is empty or too long, or a token id is beyond the vocabulary.
    """
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words must be at most {MAX_BAD_WORDS} token sequences, got {len(words)}")
    array = np.full((MAX_BAD_WORDS, MAX_BAD_LENGTH), -1, np.int32)
    for i, word in enumerate(words):
        if not 0 < len(word) <= MAX_BAD_LENGTH:
            raise ValueError(f"bad_words must have 1 to {MAX_BAD_LENGTH} tokens, got {len(word)}: {short(word)}")
        array[i, -len(word) :] = _ids(word, "bad_words", vocab_size)
    return array


def recent_tokens(answer: abc.Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the last tokens of an output in the format of decode slots, int32 [MAX_BAD_LENGTH - 1]."""
    last = [-1] * (MAX_BAD_LENGTH - 1) + list(answer[-(MAX_BAD_LENGTH - 1) :])
    return np.array(last[-(MAX_BAD_LENGTH - 1) :], np.int32)


def _ids(given: npt.ArrayLike, name: str, vocab_size: int) -> npt.NDArray[np.int64]:
    try:
        ids = np.asarray(given, np.int64)
    except OverflowError as error:  # an integer beyond 64 bits
        raise ValueError(f"{name} must be token ids below {vocab_size}, got {short(given)}") from error
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"{name} must be token ids below {vocab_size}, got {short(given)}")
    return ids
