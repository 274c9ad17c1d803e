"""Methods that are no policies of the engine, for comparison: what they let an answer see, computed through masks.

FastV (arXiv:2403.06764) drops image tokens while the prompt is computed; H2O as its authors run it (arXiv:2306.14048)
goes on dropping tokens while it decodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.compress.budgets import whole
from vlcache_jax.study.masked import Look, MaskedAnswers
from vlcache_jax.study.retention import Mask, stream, top

# Tokens of an answer so far [c] -> logits of the first one and of what comes behind each, [1 + c, V].
Follow = Callable[[Sequence[int]], npt.NDArray[np.float32]]
# Tokens that a head keeps, rising, and what each has received.
_State = tuple[npt.NDArray[np.integer], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class FastV:
    """Behind a layer the prompt goes on without the image tokens that its last token looks at least.

    Attributes:
      alpha: share of the image tokens that go on.
      layer: the last one that all go through.
    """

    alpha: float
    layer: int = 2

    def begin(self, masked: MaskedAnswers, look: Look) -> tuple[Follow, float]:
        """(logits of answers, share of the prompt's K, V that they see).

        Raises:
          ValueError: there is no layer behind that one.
        """
        n, layers = len(look.prompt), len(look.k)
        if self.layer >= layers - 1:
            raise ValueError(f"layer of fastv must be below {layers - 1}, got {self.layer}")
        attention = look.attention(n - 1)[self.layer].mean(0)
        rows = goes_on(attention, look.placed.is_image[:n], self.alpha)
        k, v, first = masked.behind(look, self.layer, rows)
        lengths = np.where(np.arange(layers) <= self.layer, n, len(rows))
        seen = np.arange(k.shape[1]) < lengths[:, None, None, None]

        def follow(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
            return np.concatenate([first, masked.run(look, tokens, seen, halves=(k, v))[0]])

        return follow, float(lengths.mean()) / n


def goes_on(attention: npt.NDArray[np.float64], is_image: Mask, alpha: float) -> npt.NDArray[np.int64]:
    """The prompt's tokens that FastV takes on, rising: those of text, and of the images a share.

    Args:
      attention: what the last token looks at, [n].
      is_image: [n].
      alpha: share of the image tokens that stay, at least one; of equal ones the earlier.
    """
    image = np.flatnonzero(is_image)
    stays = ~is_image
    if len(image):
        stays[image[top(attention[image], *whole([alpha * len(image)], len(image)))]] = True
    return np.flatnonzero(stays)


@dataclass(frozen=True)
class StreamingH2O:
    """The last tokens and those that received most attention, also of the answer: a budget that never grows.

    Attributes:
      alpha: tokens that are kept, those of the answer among them, over the prompt's; a tenth of them are the last ones.
      every: tokens that are decoded before some are dropped again.
    """

    alpha: float
    every: int = 8

    def begin(self, masked: MaskedAnswers, look: Look) -> tuple[Follow, float]:
        """See `FastV`. The share does without what waits to be dropped."""
        run = _H2OStream(self, masked, look)
        return run.follow, run.budget / len(look.prompt)


class _H2OStream:
    """An answer under streaming H2O.

    Args:
      method, masked, look: of what.

    Attributes:
      budget: tokens that each head keeps.
    """

    def __init__(self, method: StreamingH2O, masked: MaskedAnswers, look: Look):
        self._masked, self._look, self._every = masked, look, method.every
        n = len(look.prompt)
        [self.budget] = whole([method.alpha * n], n)
        self._recent = max(1, self.budget // 10)
        received, _ = masked.received(look, n, 0)
        layers, heads, slots = received.shape
        scores = received[:, :, :n].astype(np.float64)
        scores[:, :, n - self._recent :] = np.inf
        kept = np.nonzero(top(scores, self.budget))[2].reshape(layers * heads, self.budget)
        sums = np.take_along_axis(received.reshape(layers * heads, slots).astype(np.float64), kept, 1)
        self._tokens: list[int] = []
        self._states: list[list[_State]] = [list(zip(kept, sums, strict=True))]  # before each token, of each head
        self._prompt = np.zeros((layers, heads, masked.most, slots), bool)
        self._own = np.zeros((layers, heads, masked.most, masked.most), bool)

    def follow(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Goes on behind what the tokens, one or more, have in common with those before."""
        pairs = zip(tokens, self._tokens, strict=False)
        same = min(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)), len(tokens) - 1)
        self._tokens = list(tokens)
        del self._states[same + 1 :]
        for step in range(same, len(tokens)):
            self._see(step)
            rows = slice(step + 1)
            logits, looked = self._masked.run(
                self._look, tokens[rows], self._prompt[:, :, rows], own=self._own[:, :, rows, rows]
            )
            self._states.append(self._next(step, looked[:, :, step]))
        return np.concatenate([self._look.trace.logits[:1], logits])

    def _see(self, step: int) -> None:
        """What a token sees."""
        n, heads = len(self._look.prompt), self._prompt.shape[1]
        for number, (kept, _) in enumerate(self._states[step]):
            head = (*divmod(number, heads), step)
            self._prompt[head], self._own[head] = False, False
            self._prompt[head][kept[kept < n]] = True
            self._own[head][kept[kept >= n] - n] = True

    def _next(self, step: int, looked: npt.NDArray[np.float32]) -> list[_State]:
        """What is kept behind a token that looks so at prompt and answer, [L, K, S + c]."""
        n, slots = len(self._look.prompt), self._prompt.shape[-1]
        states = []
        for (kept, sums), row in zip(self._states[step], looked.reshape(-1, looked.shape[-1]), strict=True):
            columns = np.append(np.where(kept < n, kept, kept - n + slots), slots + step)
            states.append(stream(kept, sums, row[columns], self.budget - self._recent, self._recent, self._every))
        return states
