"""Sequences that generate nothing: their continuation is scored, or their last hidden state is requested."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlcache_jax.engine.request import NOT_FINITE, Sequence


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredSequence(Sequence):
    """Prompt that ends in a continuation to be scored. Its plan requests the logits that predict the continuation.

    Attributes:
      keep_logits: whether to keep the logits.
      logprobs: log-probability of each token of the continuation.
      greedy: whether each of them is the most likely token.
      logits: logits that predict each of them, float32 [V], if kept.
    """

    keep_logits: bool
    logprobs: list[np.float32] = field(default_factory=list)
    greedy: list[np.bool_] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.logprobs) == np.count_nonzero((depth := self.progress.plan.depth) == depth.max())

    def append(self, logprob: np.float32, is_greedy: np.bool_, logits: npt.NDArray[np.float32] | None) -> None:
        """Append the score of a token."""
        self.logprobs.append(logprob)
        self.greedy.append(is_greedy)
        if logits is not None and self.keep_logits:
            self.logits.append(logits)
        if not np.isfinite(logprob):
            self.fail(NOT_FINITE)

    def restart(self) -> None:
        for scores in (self.logprobs, self.greedy, self.logits):
            scores.clear()


@dataclass(frozen=True, eq=False, kw_only=True)
class PooledSequence(Sequence):
    """Prompt whose last hidden state after the final norm is requested, float32 [M]."""

    hidden: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return bool(self.hidden)

    def append(self, hidden: npt.NDArray[np.float32]) -> None:
        """Store the hidden state of the last token."""
        self.hidden.append(hidden)
        if not np.isfinite(hidden).all():
            self.fail(NOT_FINITE)

    def restart(self) -> None:
        self.hidden.clear()
