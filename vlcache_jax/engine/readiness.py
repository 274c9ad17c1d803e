"""Whether prompts can be computed: what they link is there, and the pixels that they need (host)."""

from __future__ import annotations

from collections import abc
from concurrent.futures import Executor, Future, wait
from dataclasses import replace
from typing import NamedTuple

from vlcache_jax.cache.record import Lost, Record, State
from vlcache_jax.engine.pages import Lease
from vlcache_jax.engine.request import ImageUse, Sequence
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.reuse.plan import Plan

PATIENCE = 0.1  # seconds


class Ready(NamedTuple):
    """What a sequence computes, and what it takes from where; see `Progress`."""

    plan: Plan
    images: abc.Sequence[ImageUse]


class Readiness:
    """Decides for admitted sequences what is linked and what is computed, and has pictures decoded.

    Args:
      num_layers: of the decoder.
      first_layers: that a record must have where it comes layer by layer. With none, it would keep others waiting.
      threads: decode pictures.
    """

    def __init__(self, num_layers: int, first_layers: int, threads: Executor):
        self._num_layers, self._first_layers = num_layers, first_layers
        self._threads = threads
        self._decoding: dict[ImageRef, Future[object]] = {}

    def look(self, sequence: Sequence, encoded: abc.Container[ImageRef] = ()) -> Ready | None:
        """What a sequence computes, if it has all that it links, shares, or computes from; None: not yet.

        Args:
          encoded: images that were encoded ahead for it.

        A record that was not filled after all is no error: its image is computed. A picture that cannot be decoded is
        one, and ends the sequence.
        """
        lease = sequence.progress.lease
        if lease is None or sequence.end.error is not None or not lease.is_ready or lease.is_lost:
            return None
        before = Ready(sequence.progress.plan, sequence.progress.images)
        if self._missing(sequence, lease, before, encoded) or not sequence.may_go_on():
            return None
        found = self._found(sequence, lease)
        if found.images is not before.images and self._missing(sequence, lease, found, encoded):
            return None  # what computes more may need more
        decoded = self._decoded(sequence, lease, found)
        return found if decoded is not None and all(decoded.values()) else None

    def encodable(self, sequence: Sequence) -> abc.Sequence[ImageUse]:
        """Of a sequence that cannot be computed yet, the images that it will have to encode, whose pixels are there."""
        lease = sequence.progress.lease
        if lease is None or sequence.end.error is not None or not lease.is_ready or lease.is_lost:
            return ()
        found = self._found(sequence, lease)
        decoded = self._decoded(sequence, lease, found) or {}
        mine = (use for use in found.images if use.encoder is None or use.encoder.state is not State.filling)
        return [use for use in mine if decoded.get(use.span.image)]

    def _decoded(self, sequence: Sequence, lease: Lease, found: Ready) -> dict[ImageRef, bool] | None:
        """Of the images of which some rows are computed, those whose encoder rows nobody has, and whether their pixels
        are there; None: they cannot be, which ends the sequence."""
        depth = found.plan.behind(lease.cached).depth
        kept = {use.span.image for use in found.images if use.encoder is not None and use.encoder.is_ready}
        spans = [span for span in sequence.layout.images if span.image not in kept and depth[span.tokens].any()]
        try:
            return {span.image: self._is_decoded(span.image) for span in spans}  # asked for side by side
        except ValueError as error:
            sequence.fail(str(error))
            return None

    def wait(self, sequence: Sequence) -> bool:
        """Waits for something that a sequence lacks and that other threads work at, but not for long: others may arrive
        meanwhile. False: there is nothing."""
        lease = sequence.progress.lease
        assert lease is not None
        for record in self._missing(sequence, lease, self._found(sequence, lease)):
            if record.state is not State.reserved:
                comes_by_layers = record.source is not None and record.meta.context is not None
                record.wait_for(self._first_layers if comes_by_layers else len(record.meta.parts) + 1, PATIENCE)
                return True
        if not sequence.may_go_on(PATIENCE):
            return True
        for picture in self._decoding.values():
            if not picture.done():
                wait([picture], PATIENCE)
                return True
        return False

    def _found(self, sequence: Sequence, lease: Lease) -> Ready:
        """What a sequence computes: as before, and the images whose records did not come."""
        plan, images = sequence.progress.plan, sequence.progress.images
        for i, use in _uncached(sequence, lease, images):
            if use.linked is not None and isinstance(use.linked.state, Lost):
                lost = replace(use, why=use.linked.state.why, linked=None)
                images = [*images[:i], lost, *images[i + 1 :]]
                plan = plan.computing(use.span.tokens, self._num_layers)
        return Ready(plan, images)

    def _missing(
        self, sequence: Sequence, lease: Lease, found: Ready, ahead: abc.Container[ImageRef] = ()
    ) -> list[Record]:
        """The records that it has to wait for. What comes layer by layer is waited for where it is linked."""
        linked = [
            use.linked
            for _, use in _uncached(sequence, lease, found.images)
            if use.linked is not None
            and not use.linked.is_settled
            and not (use.linked.source is not None and use.linked.has_arrived(self._first_layers))
        ]
        depth = found.plan.behind(lease.cached).depth
        # Rows that another one is encoding; those that nobody is, it encodes itself.
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
        """Raises a ValueError if it cannot be."""
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


def _uncached(sequence: Sequence, lease: Lease, images: abc.Sequence[ImageUse]) -> list[tuple[int, ImageUse]]:
    """Its images that are not in pages as a whole, and their numbers."""
    cached = len(sequence.layout) if lease.is_fork else lease.cached
    return [(i, use) for i, use in enumerate(images) if not use.span.within(cached)]
