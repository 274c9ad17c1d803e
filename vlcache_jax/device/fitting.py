"""Which sizes a batch is padded to: the smallest rung that holds it, or one whose programs are there already.

While a warm-up compiles programs, the best one may be missing, and another one gives the same tokens: one of a larger
rung, several of a smaller rung, or one token in place of a window. Only then does a size depend on time.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import Any

import numpy as np

from vlcache_jax.device.buckets import round_up
from vlcache_jax.device.programs.answer import OutputHead, SampleFirst
from vlcache_jax.device.programs.base import Program
from vlcache_jax.device.programs.encode import Encode, Stage
from vlcache_jax.device.programs.memory import HoldLanes
from vlcache_jax.device.programs.table import Programs
from vlcache_jax.device.programs.window import CompressedWindow, Window, fixed
from vlcache_jax.device.sampler import FIXED, Choice


class Fitting:
    """Chooses sizes, and says what they need."""

    def __init__(self, programs: Programs):
        self._programs, self._shapes = programs, programs.shapes
        self._ladder = programs.shapes.ladder

    def is_there(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Whether all of these are compiled."""
        return not self._programs.missing(programs)

    def is_coming(self, programs: abc.Iterable[Program[Any]]) -> bool:
        """Whether a warm-up compiles some of these; it compiles them next. See `Programs.are_coming`."""
        return self._programs.is_warming and self._programs.are_coming(programs)

    def rung(self, size: int, rungs: tuple[int, ...], needs: abc.Callable[[int], abc.Sequence[Program[Any]]]) -> int:
        """The smallest rung that holds a size, or a larger one whose programs are there while those of it are coming.

        Args:
          needs: the programs of a rung.
        """
        best = round_up(size, rungs)
        if self._programs.is_warming and self.is_coming(needs(best)):
            larger = (rung for rung in rungs if rung > best and self.is_there(needs(rung)))
            return next(larger, best)
        return best

    # Of each kind of batch its size, and the programs of a size.

    def encoder(self, patches: int) -> int:
        """Patches of an encoder call."""
        return self.rung(patches, self._ladder.patches, self.encoding)

    def encoding(self, size: int) -> list[Program[Any]]:
        """What encodes images of `size` patches, and hands them to a step."""
        return [Encode(size), Stage(size // self._shapes.config.vision.merge_size**2)]

    def head(self, rows: int, count: int) -> int:
        """Rows of the output head for `count` of the rows that leave a step."""
        if rows > self._ladder.max_sequences:
            return self._ladder.max_sequences
        rungs = tuple(dict.fromkeys(min(rung, rows) for rung in self._ladder.sequences))
        return self.rung(min(count, rows), rungs, lambda size: self.choosing(rows, size))

    def choosing(self, rows: int, size: int) -> list[Program[Any]]:
        """What chooses `size` first tokens, where `rows` rows leave a step."""
        choices: tuple[Choice, ...] = ("asked",) if self._shapes.is_host else FIXED
        return [OutputHead(rows, size), *(SampleFirst(size, choice) for choice in choices)]

    def held(self, count: int) -> int:
        """Lanes that are held to something at once."""
        return self.rung(count, self._ladder.sequences, lambda size: [HoldLanes(size)])

    def window(self, rows: np.ndarray, tokens: int, pages: int | None = None) -> int:
        """Rows of the window that decodes up to `tokens` tokens of `rows`.

        Args:
          pages: of a compressed prompt in one layer at most; None: prompts are not compressed.
        """
        return self.rung(len(rows), self._ladder.sequences, lambda size: self._windows(size, rows, tokens, pages))

    def windows[P: (Window, CompressedWindow)](self, program: P, rows: np.ndarray, tokens: int) -> list[P]:
        """The programs that decode `tokens` tokens of rows, one after the other."""
        if self._shapes.is_host:
            return [program]
        best, step = fixed(program, rows, tokens, self._ladder.window), [replace(program, choice="any", steps=1)]
        return step * tokens if self.is_coming(best) and self.is_there(step) else best

    def decodable(self, rows: np.ndarray, tokens: int, pages: int | None = None) -> int:
        """How many of these rows a window takes now: all, or fewer while the programs for all are coming; 0: none is
        there. Arguments as in `window`."""
        if not self._programs.is_warming:
            return len(rows)
        best = self.window(rows, tokens, pages)
        if not self.is_coming(self._windows(best, rows, tokens, pages)):
            return len(rows)
        smaller = (rung for rung in reversed(self._ladder.sequences) if rung < len(rows))
        return next((rung for rung in smaller if self.is_there(self._windows(rung, rows, tokens, pages))), 0)

    def _windows(self, size: int, rows: np.ndarray, tokens: int, pages: int | None) -> abc.Sequence[Program[Any]]:
        if pages is None:
            return self.windows(Window(size), rows, tokens)
        return self.windows(CompressedWindow(size, round_up(pages, self._shapes.page_rungs)), rows, tokens)
