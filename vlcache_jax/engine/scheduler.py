"""Which sequence runs when, in which decode slot and in which pages (host).

Tenants alternate. The sequences of each are admitted in the order of their priority, then of their arrival, while there
are decode slots, and pages for their prompts. A sequence waits for what it links or shares of another one, and others
overtake it. Pages are taken as outputs grow. If none is left, the last sequence is preempted: it releases its pages and
continues later. A compressed sequence has pages of another pool. If none is left there, the last one is swapped out: it
keeps its decode slot, and its KV returns later. `Readiness` finds prompts whose cached KV and pixels are there.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
from collections import Counter, abc, defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listed
from concurrent.futures import Executor, Future, wait
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vlcache_jax.cache.record import Lost, Record, State
from vlcache_jax.engine.batching import Prefill
from vlcache_jax.engine.compressed_pages import CompressedPages
from vlcache_jax.engine.pages import Lease, Pages
from vlcache_jax.engine.request import Generation, ImageUse, Sequence
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.policies import Plan


class Turns:
    """Gives lanes to tenants in turn.

    A free lane goes to the tenant that has the fewest; of equals, to the one whose last lane was given longest ago.
    `order` decides among the requests of one tenant. All requests without a tenant are those of one, and their
    priorities count beside those of others, whose requests count as 0 there.
    """

    def __init__(self) -> None:
        self._ranked: abc.Collection[str | None] = (None,)
        self._given: dict[str | None, int] = {}
        self._lanes = 0  # given so far

    def rank(self, tenants: abc.Iterable[str]) -> None:
        """Let the priorities of these tenants count beside those of others, and of no others. From any thread."""
        self._ranked = frozenset([None, *tenants])

    def give(self, sequence: Sequence) -> None:
        """Note that a sequence has a lane."""
        self._given[sequence.planned.options.tenant] = self._lanes = self._lanes + 1

    def first(self, waiting: abc.Iterable[Sequence], running: abc.Iterable[Sequence]) -> Sequence:
        """The one that has the next lane.

        Args:
          waiting: those that want one, each tenant's in its order; not empty.
          running: those that have one.
        """
        heads: dict[str | None, Sequence] = {}
        for sequence in waiting:
            heads.setdefault(sequence.planned.options.tenant, sequence)
        lanes = Counter(sequence.planned.options.tenant for sequence in running)

        def turn(head: Sequence) -> tuple[int, int, int, int]:
            tenant = head.planned.options.tenant
            return self._rank(head), lanes[tenant], self._given.get(tenant, 0), head.progress.arrived

        return min(heads.values(), key=turn)

    def sorted[S: Sequence](self, sequences: abc.Iterable[S]) -> list[S]:
        """Sequences in the order in which they keep what they have: the first of each tenant, then the second of each.

        Of one tenant it is `order`. Equals come as they arrived.
        """
        tenants: dict[str | None, list[S]] = defaultdict(list)
        for sequence in sorted(sequences, key=order):
            tenants[sequence.planned.options.tenant].append(sequence)
        placed = [(place, one) for group in tenants.values() for place, one in enumerate(group)]
        placed.sort(key=lambda found: (self._rank(found[1]), found[0], found[1].progress.arrived))
        return [one for _, one in placed]

    def _rank(self, sequence: Sequence) -> int:
        return sequence.progress.priority if sequence.planned.options.tenant in self._ranked else 0


class Fillers:
    """Sequences that are to fill records which others link."""

    def __init__(self) -> None:
        self._found: dict[int, Sequence] = {}  # by id of a record that is not settled yet

    def __len__(self) -> int:
        return len(self._found)

    def add(self, sequence: Sequence) -> None:
        """Note the records that a sequence is to fill."""
        for use in sequence.progress.images:
            if use.captured is not None:
                self._found[id(use.captured)] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
        for use in sequence.progress.images:
            if use.captured is not None and self._found.get(id(use.captured)) is sequence:
                del self._found[id(use.captured)]

    def of(self, sequence: Sequence) -> list[Sequence]:
        """Those that are to fill what a sequence links."""
        if not self._found:
            return []
        found = [self._found.get(id(use.linked)) for use in sequence.progress.images if use.linked is not None]
        return [one for one in found if one is not None]

    def last(self, others: abc.Sequence[Sequence], running: abc.Iterable[Sequence]) -> Sequence:
        """The last of `others` on which none that runs counts, or simply the last.

        Of one tenant, a filler stands before those that wait for it; of several, it may stand last.
        """
        filling = {id(filler) for one in running for filler in self.of(one)}
        return next((one for one in reversed(others) if id(one) not in filling), others[-1])


def order(sequence: Sequence) -> tuple[int, int]:
    """The order of one tenant's requests: by priority, then by arrival."""
    return sequence.progress.priority, sequence.progress.arrived


_LEAST_RUN = 5  # tokens: fewer take as long as windows of one


class Scheduler:
    """Admits sequences and gives them pages.

    Args:
      pages: of the pool.
      max_sequences: that run together, in lanes numbered from 0.
      max_rows: of one prefill step.
      num_layers: of the decoder.
      compressed_slots: of the pool for compressed prompts, as the runner has it.

    Attributes:
      compressed: these pages.
      turns: say which tenant's turn it is.
      waiting: those that have no pages; those of one tenant in their order.
      prefilling: those whose prompts are still to be launched.
      decoding: those whose prompts have been.
    """

    def __init__(self, pages: Pages, max_sequences: int, max_rows: int, num_layers: int, compressed_slots: int = 0):
        self.pages, self.compressed = pages, CompressedPages(max(0, compressed_slots // PAGE - 1))
        self.turns = Turns()
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._arrived = 0
        self._lanes = list(range(max_sequences))
        self._max_rows = max_rows
        self._num_layers = num_layers
        self._fillers = Fillers()

    @property
    def running(self) -> list[Sequence]:
        """Those that have pages."""
        return self.prefilling + self.decoding

    def add(self, sequence: Sequence) -> None:
        """It waits from now on, by its priority and behind those that came before. Whoever is to fill what it links is
        not less urgent than it is."""
        sequence.progress.arrived, self._arrived = self._arrived, self._arrived + 1
        self._fillers.add(sequence)
        bisect.insort(self.waiting, sequence, key=order)
        self._hurry(sequence)

    def _hurry(self, sequence: Sequence) -> None:
        """Those that are to fill what it links, and what these link, come before it, also where they are put back."""
        for filler in self._fillers.of(sequence):
            if filler.progress.priority <= sequence.progress.priority:
                continue
            is_waiting = filler in self.waiting
            if is_waiting:
                self.waiting.remove(filler)
            filler.progress.priority = sequence.progress.priority
            if is_waiting:
                bisect.insort(self.waiting, filler, key=order)
            self._hurry(filler)

    def upcoming(self) -> Sequence:
        """The one that has the next lane. What is to fill what another one links comes before it."""
        sequence = self.turns.first(self.waiting, self.running)
        while fillers := [one for one in self._fillers.of(sequence) if one in self.waiting]:
            sequence = min(fillers, key=order)
        return sequence

    def admit(self) -> list[Sequence]:
        """Gives pages and lanes to those that come next, as long as there are any.

        Raises:
          RuntimeError: nothing runs, and there are not enough pages for the first.
        """
        admitted: list[Sequence] = []
        spare = sum(self._may_grow(sequence) for sequence in self.running)
        leases = [(id(sequence.layout), sequence.progress.lease) for sequence in reversed(self.running)]
        firsts = {layout: lease for layout, lease in leases if lease is not None and not lease.is_fork}
        while self.waiting and self._lanes:
            sequence = self.upcoming()
            lease = self._take(sequence, firsts.get(id(sequence.layout)), spare)
            if lease is None and not self.running:
                raise RuntimeError(f"a prompt of {sequence.length} tokens must fit in the KV pool's pages")
            if lease is None:
                break
            if sequence.told.ran is None:
                self.pages.count_hit(lease)
            firsts.setdefault(id(sequence.layout), lease)
            sequence.progress.lease, sequence.progress.lane = lease, heapq.heappop(self._lanes)
            spare += self._may_grow(sequence)
            self.turns.give(sequence)
            self.waiting.remove(sequence)
            self.prefilling.append(sequence)
            admitted.append(sequence)
        return admitted

    def _may_grow(self, sequence: Sequence) -> bool:
        lease = sequence.progress.lease
        return lease is not None and sequence.most > self.pages.size * len(lease.table)

    def _take(self, sequence: Sequence, first: Lease | None, spare: int) -> Lease | None:
        length = sequence.length
        if first is not None and not sequence.generated:
            return self.pages.fork(first, len(sequence.layout), length, spare=spare)
        chain = sequence.chain
        if chain is None:
            return self.pages.take(length, spare=spare)
        exact = sequence.exact(self._num_layers)
        # Up to the first token whose logits are wanted.
        most = int(np.argmax(sequence.progress.plan.depth > self._num_layers))
        if sequence.generated:
            most = len(chain) - 1
            if exact == len(chain):
                chain = chain.extended(sequence.generated)
                exact, most = len(chain), len(chain) - 1
        return self.pages.take(length, chain, most=most, keep=exact, usable=_usable(sequence), spare=spare)

    def next_turn(self, is_ready: Collection[Sequence]) -> list[Prefill]:
        """The prefills that are cut into steps together: of the first sequences that have what they count on.

        Args:
          is_ready: those of `prefilling` that need nothing more from the cache.
        """
        turn: list[Prefill] = []
        rows = 0
        for sequence in self.prefilling:
            lease = sequence.progress.lease
            if sequence not in is_ready or lease is None or not lease.is_ready:
                continue
            prefill = self.prefills(sequence)[sequence.progress.prefilled]
            if prefill.choice is not None:
                if not turn:
                    return [prefill]
                break
            turn.append(prefill)
            rows += int(np.count_nonzero(prefill.plan.depth))
            if rows >= self._max_rows:
                break
        return turn

    def prefills(self, sequence: Sequence) -> list[Prefill]:
        """What an admitted sequence has to compute, one after the other."""
        lease, layout, layers = sequence.progress.lease, sequence.layout, self._num_layers
        assert lease is not None
        make = functools.partial(Prefill, sequence, table=lease.table, shared=lease.shared, cached=lease.cached)
        if lease.is_fork:  # all of the prompt is there; its last row is computed for its logits alone
            plan = dataclasses.replace(sequence.progress.plan, shift=False)
            return [make(layout, plan.behind(lease.cached), links=False)]
        choice, plan, tokens = sequence.planned.choice, sequence.progress.plan, sequence.generated
        if not tokens:
            return [make(layout, plan.behind(lease.cached), choice=choice)]
        if choice is None:
            return [self._behind(sequence, tokens, lease.cached, links=True)]
        first = make(layout, plan.wanting((), layers).behind(lease.cached), choice=choice)
        return [first, self._behind(sequence, tokens, len(layout))]

    def _behind(self, sequence: Sequence, tokens: Listed[int], cached: int, *, links: bool = False) -> Prefill:
        """Of a prompt with tokens behind it what follows on those that are in pages."""
        lease, layout, plan, layers = sequence.progress.lease, sequence.layout, sequence.progress.plan, self._num_layers
        assert lease is not None
        plan = plan.extended(len(tokens), layers).wanting([len(layout) + len(tokens) - 1], layers).behind(cached)
        return Prefill(sequence, layout.extended(tokens), plan, lease.table, lease.shared, cached, links=links)

    def runs(self, answers: Iterable[Generation]) -> list[Prefill]:
        """What computes tokens that are forced, of those answers in which many are and as far as there are pages, so
        that another is chosen behind them; all these are as good as launched."""
        prefills, room = [], self._max_rows
        for answer in answers:
            progress, forced = answer.progress, answer.forced
            ahead = progress.scheduled - answer.length  # launched, but not read
            count = min(len(forced) - ahead + 1, answer.most - progress.scheduled, room)
            if count < _LEAST_RUN or (count := self.grow([answer], count)) < _LEAST_RUN:
                continue
            tokens = [*answer.generated, *forced[: ahead + count - 1]]
            prefills.append(self._behind(answer, tokens, progress.scheduled - 1))
            self.decoded([answer], count)
            room -= count
        return prefills

    def replan(self, sequence: Sequence, plan: Plan, images: Listed[ImageUse]) -> None:
        """What it computes, and what it takes from where, has turned out otherwise."""
        sequence.progress.plan, sequence.progress.images = plan, images

    def launched(self, turn: Iterable[Prefill]) -> None:
        """These prefills have been launched; behind the last one of each stands the first token of its answer."""
        for prefill in turn:
            sequence, progress = prefill.sequence, prefill.sequence.progress
            lease = progress.lease
            assert lease is not None
            progress.prefilled += 1
            # A prompt that chooses is computed as the first time, and what was generated behind it after that.
            if progress.prefilled == (
                2 if sequence.planned.choice is not None and sequence.generated and not lease.is_fork else 1
            ):
                progress.scheduled = len(prefill.layout) + 1
                self.pages.computed(lease)
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)

    def decoded(self, sequences: Iterable[Sequence], count: int) -> None:
        """For each, up to `count` more tokens have been launched."""
        for sequence in sequences:
            sequence.progress.scheduled = min(sequence.progress.scheduled + count, sequence.most)

    def is_needed(self, sequence: Sequence) -> bool:
        """Whether others count on what a prompt leaves, and it has not left it yet."""
        lease = sequence.progress.lease
        if sequence.progress.compressed is not None or (lease is not None and lease.is_proven):
            return False
        others = (other.progress.lease for other in self.running)
        is_shared = lease is not None and any(other is not None and lease in other.sources for other in others)
        return is_shared or any(
            use.captured is not None and use.captured.is_awaited for use in sequence.progress.images
        )

    def grow(self, sequences: Listed[Sequence], count: int) -> int:
        """Gives each the pages that its next `count` tokens need, or as many tokens as there are pages for; either all
        are compressed or none.

        Returns:
          For how many tokens there are, at most `count`; 0: not for one.
        """
        leases = [sequence.progress.lease for sequence in sequences if sequence.progress.lease is not None]
        compressed = [one.progress.compressed for one in sequences if one.progress.compressed is not None]
        while count:
            # The last token of an answer has no slot: nobody sees it.
            lengths = [min(sequence.progress.scheduled + count - 1, sequence.most - 1) for sequence in sequences]
            behind = [length - len(one.layout) for length, one in zip(lengths, sequences, strict=True)]
            if self.compressed.grow(compressed, behind) if compressed else self.pages.grow(leases, lengths):
                break
            count //= 2
        return count

    def preempt(self, busy: Collection[Sequence]) -> bool:
        """Puts back the last of those that run, if there is one.

        Args:
          busy: those whose prompts are being launched.

        Raises:
          RuntimeError: nothing else runs.
        """
        if len(self.running) == 1:
            raise RuntimeError(f"{self.running[0].length} tokens must fit in the KV pool's pages")
        others = [one for one in self.turns.sorted(self.running) if one not in busy and one.may_begin_again]
        if not others:
            return False
        self.pages.count_preemption()
        self.put_back(self._fillers.last(others, self.running))
        return True

    def put_back(self, sequence: Sequence, *, failed: bool = False) -> None:
        """It gives up lane and pages, and waits again.

        Args:
          failed: nothing in its pages can be used.
        """
        self.release(sequence, failed=failed)
        sequence.progress.prefilled = sequence.progress.scheduled = 0
        sequence.progress.attempt += 1
        sequence.restart()
        bisect.insort(self.waiting, sequence, key=order)

    def compress(self, sequence: Sequence, counts: Listed[int]) -> bool:
        """Takes pages for so many tokens of the prompt in each layer; False: there is no room. What it has of the
        others, it keeps until `compacted`."""
        sequence.progress.compressed = self.compressed.take(counts, sequence.new_slots - 1)
        return sequence.progress.compressed is not None

    def compacted(self, sequence: Sequence) -> None:
        """What is kept of the prompt has been launched on its way, and the prompt's own pages are given up."""
        self._give_up_pages(sequence, failed=False)

    def stays_whole(self, sequence: Sequence) -> None:
        """It was to be compressed, but nothing of it is dropped, or it could not be."""
        sequence.progress.is_whole = True

    def release(self, sequence: Sequence, *, failed: bool) -> None:
        """It gives up lane and pages; what is exact in them stays, unless it failed."""
        for group in (self.waiting, self.prefilling, self.decoding):
            if sequence in group:
                group.remove(sequence)
        progress = sequence.progress
        if progress.lease is None and progress.compressed is None:
            return
        self._give_up_pages(sequence, failed=failed)
        if progress.compressed is not None:
            self.compressed.end(progress.compressed)
            progress.compressed = None
        heapq.heappush(self._lanes, progress.lane)

    def _give_up_pages(self, sequence: Sequence, *, failed: bool) -> None:
        lease, chain = sequence.progress.lease, None
        if lease is None:
            return
        if not failed and lease.is_proven and sequence.exact(self._num_layers) == len(sequence.layout):
            chain = sequence.chain and sequence.chain.extended(sequence.generated[:-1])
        self.pages.end(lease, chain, failed=failed)
        sequence.progress.lease = None

    def finish(self, sequence: Sequence, *, failed: bool) -> None:
        """It has ended, one way or the other; see `release`."""
        self.release(sequence, failed=failed)
        self._fillers.remove(sequence)


def _usable(sequence: Sequence) -> int:
    """How many tokens may come from pages, for the images' sake.

    What links an image approximately does so whatever is in pages, so that memory never changes an answer. One that is
    to be captured is computed whole, as keys before rotation cannot be had back from pages.
    """
    captured = {u.span.start for u in sequence.progress.images if u.captured is not None and not u.captured.is_ready}
    for span in sequence.layout.images:
        if span.state == "approximate" or span.start in captured:
            return span.start
    return sequence.length


PATIENCE = 0.1  # seconds


class Ready(NamedTuple):
    """What a sequence computes, and what it takes from where; see `SequenceProgress`."""

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
    return [(i, use) for i, use in enumerate(images) if use.span.stop > cached]
