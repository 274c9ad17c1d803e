"""What the device keeps of each answer that runs, from the host's side."""

from __future__ import annotations

from collections import abc

import numpy as np
import numpy.typing as npt

from vlcache_jax.device.programs.window import ANSWER
from vlcache_jax.device.runner import Runner
from vlcache_jax.device.sampler import Choosing
from vlcache_jax.engine.opening import bias_row, marks_row, recent_tokens, words_array
from vlcache_jax.engine.request import Generation


class LaneKeeper:
    """Opens lanes. Most answers need nothing in theirs but the end tokens that the one before had, too.

    Args:
      runner: has the lanes.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._ends: dict[int, frozenset[int]] = {}  # of lanes that hold nothing else
        self._rows: dict[int, npt.NDArray[np.int32]] = {}

    def reset(self) -> None:
        """The lanes are gone."""
        self._ends = {}

    def open(self, answers: abc.Sequence[Generation]) -> npt.NDArray[np.int32]:
        """Lets the answers' lanes hold what they need; returns how each chooses, int32 [n, C]."""
        for answer in answers:
            lane, params = answer.lane, answer.params
            is_plain = answer.matcher is None and not (
                params.has_penalty or params.logit_bias or params.allowed_token_ids or params.bad_words
            )
            if not is_plain or self._ends.get(lane) != answer.end_tokens:
                self._open(answer)
                self._ends.pop(lane, None)
            if is_plain:
                self._ends[lane] = answer.end_tokens
            choosing = Choosing.row(params, lane=lane, seed=answer.seed, most=answer.new_slots)
            self._rows[lane] = np.concatenate([[len(answer.layout), answer.layout.delta], choosing]).astype(np.int32)
        self.hold(answers)
        return self.rows(answers)[:, ANSWER:]

    def hold(self, answers: abc.Sequence[Generation]) -> None:
        """Lets those of the answers that are held to something choose what may come next, and nothing else."""
        held = {one.lane: (one.allowed, one.params.logit_bias or ()) for one in answers if one.matcher is not None}
        if held:
            self._runner.hold(held)

    def rows(self, answers: abc.Sequence[Generation]) -> npt.NDArray[np.int32]:
        """Of each open lane what a window needs; see `vlcache_jax.device.programs.window`."""
        return np.stack([self._rows[answer.lane] for answer in answers])

    def _open(self, answer: Generation) -> None:
        size = self._runner.config.text.vocab_size
        counted = answer.params.has_penalty
        prompt, tokens = (answer.layout.token_ids, answer.token_ids) if counted else ((), ())
        bias = bias_row(answer.params, size)
        self._runner.open_lane(
            answer.lane,
            marks_row(prompt, tokens, answer.end_tokens, size),
            np.zeros(size, np.float32) if bias is None else bias,
            words_array(answer.bad_words, size),
            recent_tokens(answer.token_ids),
        )
