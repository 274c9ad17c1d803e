"""What is stored, on the device: linked into the pool, coded, and kept in the device tier."""

from __future__ import annotations

from collections import abc

import jax
import numpy as np

from vlcache_jax.cache.device import DeviceTier, Index
from vlcache_jax.device.ladder import round_up
from vlcache_jax.device.programs.keep import EmptyTier, KeepLayer, KeepRows
from vlcache_jax.device.programs.link import Code, Link, Recall
from vlcache_jax.device.programs.shapes import Stored
from vlcache_jax.device.runner import Runner
from vlcache_jax.engine.batching import Step

Array = jax.Array | np.ndarray


class DeviceCopies:
    """Runs the programs that move what is stored.

    Args:
      runner: whose device and pool it is.
      tier: says where in the device tier everything lies.
    """

    def __init__(self, runner: Runner, tier: DeviceTier):
        self.runner, self.tier = runner, tier
        self._arrays: tuple[list[list[jax.Array]], jax.Array] | None = None

    def reset(self) -> None:
        """What the device held is gone."""
        self.tier.clear()
        self._arrays = None

    def prepare(self) -> None:
        """Makes what the device tier holds; returns when it is there."""
        if self.tier.num_pages:
            jax.block_until_ready(self._now())

    def link(
        self, layers: slice, images: abc.Sequence[list[jax.Array]], places: Array, where: jax.Array | None
    ) -> jax.Array:
        """Writes stored K, V of images into some layers of the pool, and into the device tier if there is one.

        Args:
          images: of each its planes in these layers, see `Runner.put`; none: they are in the device tier.
          places: of each image where its tokens belong, see `Runner.places`; of those in the device tier of all
            together, [1, 4, n], n a rung of `recall_rungs`.
          where: of all their tokens, padded, the place in the device tier, int32: where they go, those beyond it not
            being kept, or where they come from, in the order that `kernels.link` asks of `source`.

        Returns:
          Something to wait for.
        """
        run, constants, size = self.runner.run, self.runner.constants[layers], places.shape[2]
        with self.runner.pool.taken() as pool:
            if not images:
                kept, _ = self._now()
                program = Recall(size, len(constants))
                pool[layers], done = run(program, pool[layers], kept[layers], where, places, constants)
            elif where is None:
                link = Link(size, len(images), len(constants))
                pool[layers], _, done = run(link, pool[layers], None, [*images], places, None, constants)
            else:
                link = Link(size, len(images), len(constants))
                kept, rows = self._take()
                pool[layers], kept[layers], done = run(
                    link, pool[layers], kept[layers], [*images], places, where, constants
                )
                self._arrays = kept, rows
        return done

    def capture(self, step: Step, captured: list[tuple[jax.Array, jax.Array]]) -> abc.Sequence[Stored]:
        """What a step computed of records to be filled: codes it, and keeps it in the device tier, if there is room.

        Args:
          captured: of each layer its rows' keys before rotation and values.

        Returns:
          Of each layer the same as it is stored.
        """
        layers: list[Stored] = [*captured]
        if self.runner.shapes.kv.codec is not None:
            pairs = zip(captured, self.runner.constants, strict=True)
            layers = [self.runner.run(Code(len(k)), k, v, constants) for (k, v), constants in pairs]
        if self.tier.num_pages:
            self._keep(step, layers)
        return layers

    def stage(self, source: Index, place: Index) -> None:
        """Makes encoder row `source[i]` of the device tier encoder row `place[i]` of the next step."""
        rungs = self.runner.token_rungs
        for first in range(0, len(source), rungs[-1]):
            some, to = source[first : first + rungs[-1]], place[first : first + rungs[-1]]
            missing = round_up(len(some), rungs) - len(some)
            nowhere = self.runner.ladder.max_rows + np.arange(missing, dtype=np.int32)
            _, kept = self._now()
            self.runner.restage(kept, np.pad(some, (0, missing)), np.concatenate([to, nowhere]))

    def _keep(self, step: Step, layers: abc.Sequence[Stored]) -> None:
        most = self.runner.ladder.max_rows
        nowhere = self.runner.shapes.kept_tokens + np.arange(most, dtype=np.int32)
        place, row_place = nowhere.copy(), nowhere.copy()
        placements = {placement.image.key: placement for placement in step.placements}
        for record, tokens, rows in step.captured:
            if (own := self.tier.begin(record)) is None:
                continue
            place[rows] = own[tokens]
            placement = placements.pop(record.meta.entry, None)  # once: another context of it has none
            count = 0
            if placement is not None:
                row_place[placement.place] = own[placement.image_row]
                count = len(placement.image_row)
            self.tier.fill(record, len(tokens), count)
        if (place >= self.runner.shapes.kept_tokens).all():
            return
        kept, encoder_rows = self._take()
        places, row_places = self.runner.devices.put((place, row_place))
        for layer, values in enumerate(layers):
            kept[layer] = self.runner.run(KeepLayer(step.bounds[layer]), kept[layer], values, places)
        encoder_rows = self.runner.run(KeepRows(), encoder_rows, self.runner.encoder_rows(), row_places)
        self._arrays = kept, encoder_rows

    def _now(self) -> tuple[list[list[jax.Array]], jax.Array]:
        if self._arrays is None:
            self._arrays = self.runner.run(EmptyTier())
        return self._arrays

    def _take(self) -> tuple[list[list[jax.Array]], jax.Array]:
        """For a program that takes it and returns it."""
        arrays, self._arrays = self._now(), None
        return arrays
