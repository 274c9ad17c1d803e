"""Whether prompts can be computed: what they link is there, and the pixels that they need (host)."""

from __future__ import annotations

from concurrent.futures import Executor, Future, wait

from vlcache_jax.cache.record import Record, Why
from vlcache_jax.engine.request import ImageUse, Sequence
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.reuse.plan import Plan

PATIENCE = 0.1  # seconds


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

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a sequence has all that it links, shares, or computes from.

        A record that was not filled after all is no error: its image is computed. A picture that cannot be decoded is
        one, and ends the sequence.
        """
        lease = sequence.lease
        if lease is None or sequence.error is not None or not lease.is_ready or lease.is_lost:
            return False
        if self._missing(sequence) or not sequence.may_go_on():
            return False
        for use in self._uncached(sequence):
            if use.linked is not None and use.linked.is_settled and not use.linked.is_ready:
                use.why, use.linked = use.linked.failure or Why.load_failed, None
                if not sequence.generated:
                    sequence.ran = None  # what it is told to have computed is what it computes now
                sequence.plan = sequence.plan.computing(use.span.tokens, self._num_layers)
        plan = sequence.plan.behind(lease.cached)
        try:
            decoded = [self._is_decoded(image) for image in self._pictures(sequence, plan)]  # asked for side by side
            if not all(decoded):
                return False
        except ValueError as error:
            sequence.fail(str(error))
            return False
        if self._missing(sequence):  # a plan that computes more may need more
            return False
        if sequence.ran is None:
            sequence.ran, sequence.cached = plan, lease.cached
        return True

    def wait(self, sequence: Sequence) -> bool:
        """Waits for something that a sequence lacks and that other threads work at, but not for long: others may arrive
        meanwhile. False: there is nothing."""
        for record in self._missing(sequence):
            if record.is_loading and record.meta.context is not None:
                record.wait_for(self._first_layers, PATIENCE)
            elif record.is_claimed:
                record.wait(PATIENCE)
            else:
                continue
            return True
        if not sequence.may_go_on(PATIENCE):
            return True
        for picture in self._decoding.values():
            if not picture.done():
                wait([picture], PATIENCE)
                return True
        return False

    def _uncached(self, sequence: Sequence) -> list[ImageUse]:
        """Its images that are not in pages as a whole."""
        assert sequence.lease is not None
        cached = len(sequence.layout) if sequence.lease.is_fork else sequence.lease.cached
        return [use for use in sequence.images if not use.span.within(cached)]

    def _missing(self, sequence: Sequence) -> list[Record]:
        """The records that it has to wait for. What comes layer by layer is waited for where it is linked."""
        assert sequence.lease is not None
        linked = [
            use.linked
            for use in self._uncached(sequence)
            if use.linked is not None and not (use.linked.is_loading and use.linked.has_arrived(self._first_layers))
        ]
        depth = sequence.plan.behind(sequence.lease.cached).depth
        # Rows that another one is encoding; those that nobody is, it encodes itself.
        encoded = [
            use.encoder
            for use in sequence.images
            if use.encoder is not None
            and use.encoder.is_claimed
            and not use.encoder.is_settled
            and depth[use.span.tokens].any()
        ]
        return [record for record in linked if not record.is_settled] + encoded

    def _pictures(self, sequence: Sequence, plan: Plan) -> list[ImageRef]:
        """The images of which some rows are computed, and whose encoder rows nobody has."""
        kept = {use.span.image for use in sequence.images if use.encoder is not None and use.encoder.is_ready}
        others = [span for span in sequence.layout.images if span.image not in kept]
        return [span.image for span in others if plan.depth[span.tokens].any()]

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
