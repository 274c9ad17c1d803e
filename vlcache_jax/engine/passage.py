"""A step on its way through the layers, launched as far as what they read is there."""

from __future__ import annotations

from collections import abc

import jax
import numpy as np

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.device.ladder import round_up
from vlcache_jax.device.packed import pack
from vlcache_jax.device.programs.choose import Choose, Narrow, ScoreRows, Take
from vlcache_jax.device.programs.layers import BLOCK, BLOCK_ROWS, Block, Embed, Layer, Slice
from vlcache_jax.device.runner import Runner
from vlcache_jax.engine.batching import Step
from vlcache_jax.pallas_kernels import Work
from vlcache_jax.reuse.selection import Selection
from vlcache_jax.reuse.shift import Moves


class Passage:
    """Runs a step's rows through the layers. Between layers other programs may use the pool.

    Args:
      runner: computes.
      step: its encoder rows have been staged.

    Attributes:
      layer: the first that is not launched yet.
      x: hidden states of the rows that have left the one before; in the end, of those that leave the last layer.
      captured: keys before rotation and values of each layer's rows so far, where some are wanted.
      chosen: if rows are chosen on the device, their order then (`choose`).
    """

    def __init__(self, runner: Runner, step: Step):
        self.runner, self.step = runner, step
        self.layer = 0
        self.captured: list[tuple[jax.Array, jax.Array]] = []
        self.chosen: jax.Array | None = None
        self._score: jax.Array | None = None
        self._held = first = step.bounds[0]
        self._leaving = step.leaving
        most, shift = runner.ladder.max_rows, step.shift
        self._works: dict[tuple[int, bool], Work] = {}
        shifted = None if shift is None else shift.pack(most, runner.shapes.moved)
        self._rows, self._shifted = runner.devices.put((pack(step.rows, most), shifted))
        embeddings = runner.text["embed_tokens"]
        self.x, self._deepstack = runner.run(Embed(first), embeddings, runner.encoder_rows(), self._rows)

    @property
    def is_done(self) -> bool:
        """Whether all layers are launched."""
        return self.layer == len(self.step.active)

    def advance(self, stop: int) -> None:
        """Launches the layers before `stop`, but no part of what is one program.

        So which programs run does not depend on when records arrive, and neither does the last digit of an answer.
        """
        with self.runner.pool.taken() as pool:
            while self.layer < stop:
                if is_block(self.step.bounds, self.layer, len(self._deepstack), self.step.selection is not None):
                    if self.layer + BLOCK > stop:
                        break
                    self._run_block(pool, slice(self.layer, self.layer + BLOCK))
                    self.layer += BLOCK
                else:
                    self._run_layer(pool[self.layer], self.layer)
                    self.layer += 1

    def _run_block(self, pool: list[list[jax.Array]], layers: slice) -> None:
        size, weights = len(self.x), [self.runner.text["layers"][i] for i in range(layers.start, layers.stop)]
        active = np.array([self._active(i) for i in range(layers.start, layers.stop)], np.int32)
        moves = self._moves(layers)
        block = Block(size, moves is not None, self.runner.shapes.like[layers])
        work = self._work(size, False)
        self.x, pool[layers], captured = self.runner.run(
            block, weights, self.x, pool[layers], self._rows, active, work, moves
        )
        if self.step.captured:
            self.captured += captured

    def _moves(self, layers: slice) -> Moves | None:
        """What these layers move."""
        if (shift := self.step.shift) is None:
            return None
        numbers, (row_image, tokens) = range(layers.start, layers.stop), self._shifted
        count = [shift.count(layer, self.step.active[layer]) for layer in numbers]
        return Moves(row_image, tokens, np.array(numbers, np.int32), np.array(count, np.int32))

    def _run_layer(self, pool: list[jax.Array], layer: int) -> None:
        step, run, selection = self.step, self.runner.run, self.step.selection
        size = step.bounds[layer]
        check = len(step.active) if selection is None else selection.policy.check_layer
        weights, like = self.runner.text["layers"][layer], self.runner.shapes.like[layer : layer + 1]
        if layer > check and step.active[layer] < step.active[layer - 1]:
            self._rows = run(Narrow(self._held, size), self._rows, np.int32(step.active[layer]))
            self._held = size
        if selection is not None and layer in selection.policy.scored_layers:
            self._score = self._score_rows(selection, layer, pool)
        if selection is not None and layer == check:
            counts = np.array([selection.must, selection.among], np.int32)
            self.x, self._rows, self.chosen = run(Choose(size), self.x, self._rows, self._score, counts)
        added = self._deepstack[layer] if layer < len(self._deepstack) else None
        if added is not None and self.chosen is not None:
            added = run(Take(len(added), size), added, self.chosen)
        elif added is not None and len(added) != size:
            added = run(Slice(len(added), size), added)
        leaving, _, is_chosen = self._leaving[layer]
        moves = self._moves(slice(layer, layer + 1))
        self.x, *pool[:], values = run(
            Layer(size, leaving, added is not None, moves is not None, like),
            weights, self.x, *pool, self._rows, np.array(self._active(layer), np.int32),
            self._work(leaving, is_chosen), added, moves,
        )  # fmt: skip
        if self.step.captured:
            self.captured.append(values)

    def _work(self, bound: int, is_chosen: bool) -> Work:
        """The work list of layers with this bound; made when the first of them comes: the device computes meanwhile."""
        if (bound, is_chosen) not in self._works:
            config = self.runner.shapes.work_config(bound)
            self._works[bound, is_chosen] = self.runner.devices.put(self.step.work(bound, is_chosen, config))
        return self._works[bound, is_chosen]

    def _active(self, layer: int) -> tuple[int, int]:
        """Rows that a layer computes, and those of them that the next one needs."""
        return self.step.active[layer], self._leaving[layer][1]

    def _score_rows(self, selection: Selection, layer: int, pool: list[jax.Array]) -> jax.Array:
        """Adds a layer's scores to those of the layers before."""
        window = round_up(-(-selection.length // kernels.PAGE), self.runner.shapes.windows)
        table = np.zeros(window, np.int32)
        pages = selection.table[:window]
        table[: len(pages)] = pages
        is_image = np.zeros(len(self.x), bool)
        is_image[selection.must : selection.must + selection.among] = True
        before = np.zeros(len(self.x), np.float32) if self._score is None else self._score
        request = np.array([selection.length, selection.question], np.int32)
        like = self.runner.shapes.like[layer : layer + 1]
        program = ScoreRows(len(self.x), window, selection.policy, like)
        weights = self.runner.text["layers"][layer]
        return self.runner.run(program, weights, self.x, *pool, self._rows, is_image, request, table, before)


def is_block(bounds: abc.Sequence[int], first: int, num_deepstack: int, selects: bool) -> bool:
    """Whether the layers from `first` on of a step with these bounds are one program."""
    size, stop = bounds[first], first + BLOCK
    if size > BLOCK_ROWS or selects or first < num_deepstack or stop >= len(bounds):
        return False
    return all(bounds[layer + 1] == size for layer in range(first, stop))
