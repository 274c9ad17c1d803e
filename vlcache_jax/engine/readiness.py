"""Readiness of admitted sequences: whether their cached KV and their pixels are available (host)."""

from __future__ import annotations

from collections import abc
from concurrent.futures import Executor, Future, wait
from dataclasses import replace
from typing import NamedTuple

from vlcache_jax.cache.record import Lost, Record, State
from vlcache_jax.engine.pages import BlockTable
from vlcache_jax.engine.request import ImageUse, Sequence
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.reuse.policies import Plan

PATIENCE = 0.1  # most seconds of one wait


class PrefillPlan(NamedTuple):
    """Resolved plan of a prefill: what it computes and where its images come from, see `SequenceProgress`."""

    plan: Plan
    images: abc.Sequence[ImageUse]


class Readiness:
    """Test of whether an admitted sequence can be computed, and background decoding of its images.

    Args:
      num_layers: number of decoder layers.
      first_layers: layers that an entry which arrives layer by layer must have; a group that waits for them blocks
        others.
      threads: threads that decode images.
    """

    def __init__(self, num_layers: int, first_layers: int, threads: Executor):
        self._num_layers, self._first_layers = num_layers, first_layers
        self._threads = threads
        self._decoding: dict[ImageRef, Future[object]] = {}

    def look(self, sequence: Sequence, encoded: abc.Container[ImageRef] = ()) -> PrefillPlan | None:
        """Return what a sequence computes if all that it links, shares or computes from is available; otherwise None.

        An entry that was not filled is no error: its image is computed. An image that cannot be decoded ends the
        sequence.

        Args:
          encoded: images that were encoded ahead for it.
        """
        block_table = sequence.progress.block_table
        if block_table is None or sequence.end.error is not None or not block_table.is_ready or block_table.is_lost:
            return None
        before = PrefillPlan(sequence.progress.plan, sequence.progress.images)
        if self._missing(sequence, block_table, before, encoded) or not sequence.may_go_on():
            return None
        found = self._found(sequence, block_table)
        if found.images is not before.images and self._missing(sequence, block_table, found, encoded):
            return None  # a plan that computes more images may need more entries
        decoded = self._decoded(sequence, block_table, found)
        return found if decoded is not None and all(decoded.values()) else None

    def encodable(self, sequence: Sequence) -> abc.Sequence[ImageUse]:
        """Return the images that a waiting sequence has to encode in any case and whose pixels are available."""
        block_table = sequence.progress.block_table
        if block_table is None or sequence.end.error is not None or not block_table.is_ready or block_table.is_lost:
            return ()
        found = self._found(sequence, block_table)
        decoded = self._decoded(sequence, block_table, found) or {}
        mine = (use for use in found.images if use.encoder is None or use.encoder.state is not State.filling)
        return [use for use in mine if decoded.get(use.span.image)]

    def _decoded(self, sequence: Sequence, block_table: BlockTable, found: PrefillPlan) -> dict[ImageRef, bool] | None:
        """Return, for each image to encode of which tokens are computed, whether its pixels are available.

        None if an image cannot be decoded, which ends the sequence.
        """
        depth = found.plan.after(block_table.cached).depth
        kept = {use.span.image for use in found.images if use.encoder is not None and use.encoder.is_ready}
        spans = [span for span in sequence.layout.images if span.image not in kept and depth[span.tokens].any()]
        try:
            return {span.image: self._is_decoded(span.image) for span in spans}  # starts all of them
        except ValueError as error:
            sequence.fail(str(error))
            return None

    def wait(self, sequence: Sequence) -> bool:
        """Wait at most `PATIENCE` seconds for something that a sequence lacks; return False if it lacks nothing.

        The wait is short because other sequences may arrive meanwhile.
        """
        block_table = sequence.progress.block_table
        assert block_table is not None
        for record in self._missing(sequence, block_table, self._found(sequence, block_table)):
            if record.state is not State.reserved:
                comes_by_layers = record.source is not None and record.meta.context is not None
                record.wait_for(self._first_layers if comes_by_layers else len(record.meta.parts) + 1, PATIENCE)
                return True
        if not sequence.may_go_on(PATIENCE):
            return True
        for future in self._decoding.values():
            if not future.done():
                wait([future], PATIENCE)
                return True
        return False

    def _found(self, sequence: Sequence, block_table: BlockTable) -> PrefillPlan:
        """Return the sequence's plan, with images computed whose cache entries were lost."""
        plan, images = sequence.progress.plan, sequence.progress.images
        for i, use in _uncached(sequence, block_table, images):
            if use.linked is not None and isinstance(use.linked.state, Lost):
                lost = replace(use, why=use.linked.state.why, linked=None)
                images = [*images[:i], lost, *images[i + 1 :]]
                plan = plan.computing(use.span.tokens, self._num_layers)
        return PrefillPlan(plan, images)

    def _missing(
        self, sequence: Sequence, block_table: BlockTable, found: PrefillPlan, ahead: abc.Container[ImageRef] = ()
    ) -> list[Record]:
        """Return the cache entries that a sequence waits for. Entries that arrive by layers are awaited at the link."""
        linked = [
            use.linked
            for _, use in _uncached(sequence, block_table, found.images)
            if use.linked is not None
            and not use.linked.is_settled
            and not (use.linked.source is not None and use.linked.has_arrived(self._first_layers))
        ]
        depth = found.plan.after(block_table.cached).depth
        # Encoder output that another sequence computes. The sequence computes the rest itself.
        encoded = [
            use.encoder
            for use in found.images
            if use.encoder is not None
            and use.encoder.state is State.filling
            and depth[use.span.tokens].any()
            and use.span.image not in ahead
        ]
        return linked + encoded

    def _is_decoded(self, image: ImageRef) -> bool:
        """Return whether an image's pixels are available; start decoding them if not.

        Raises:
          ValueError: the image cannot be decoded.
        """
        if image.is_loaded:
            return True
        if image not in self._decoding:
            self._decoding[image] = self._threads.submit(lambda: image.patches)
        if self._decoding[image].done():
            error = self._decoding.pop(image).exception()
            if isinstance(error, Exception) and not isinstance(error, ValueError):
                raise ValueError(f"image must be readable, got {type(error).__name__}: {error}") from error
            if error is not None:
                raise error
            return True
        return False


def _uncached(
    sequence: Sequence, block_table: BlockTable, images: abc.Sequence[ImageUse]
) -> list[tuple[int, ImageUse]]:
    """Return the images that pages do not hold completely, with their numbers."""
    cached = len(sequence.layout) if block_table.is_fork else block_table.cached
    return [(i, use) for i, use in enumerate(images) if use.span.stop > cached]
