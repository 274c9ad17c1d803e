"""Scheduling of sequences: when each runs, in which decode slot and in which KV blocks (host).

Tenants alternate. The scheduler admits the sequences of a tenant by priority, then by arrival, while decode slots and
pages for their prompts are free. A sequence waits for the KV that another sequence fills or shares, and others overtake
it. Pages are taken as outputs grow. If none is left, the last sequence is preempted: it releases its pages and is
recomputed later. A compressed sequence has pages of another pool. If none is left there, the last one is swapped out:
it keeps its decode slot, and its KV returns later.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import heapq
from collections import Counter, abc, defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listed

import numpy as np

from vlcache_jax.cache.record import Why
from vlcache_jax.cache.writer import EntrySlots
from vlcache_jax.compress.policies import make_observed
from vlcache_jax.engine.batching import Prefill
from vlcache_jax.engine.compressed_pages import CompressedPages
from vlcache_jax.engine.pages import BlockTable, Pages
from vlcache_jax.engine.request import Generation, ImageUse, Sequence
from vlcache_jax.engine.runs import NO_STATES, PromptStates, block_ends
from vlcache_jax.engine.snapshots import Places
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.policies import Plan


class TenantOrder:
    """Fair order of tenants.

    A free decode slot goes to the tenant with the fewest decode slots. Ties go to the tenant that has waited longest
    for one. `order` decides among the requests of one tenant. Requests without a tenant form one tenant. Only the
    priorities of ranked tenants compare with those of other tenants; requests of unranked tenants count as priority 0
    there.
    """

    def __init__(self) -> None:
        self._ranked: abc.Collection[str | None] = (None,)
        self._given: dict[str | None, int] = {}
        self._decode_slots = 0  # number of decode slots given so far

    def rank(self, tenants: abc.Iterable[str]) -> None:
        """Let the priorities of exactly these tenants count across tenants. Any thread may call this."""
        self._ranked = frozenset([None, *tenants])

    def give(self, sequence: Sequence) -> None:
        """Note that a sequence received a decode slot."""
        self._given[sequence.planned.options.tenant] = self._decode_slots = self._decode_slots + 1

    def first(self, waiting: abc.Iterable[Sequence], running: abc.Iterable[Sequence]) -> Sequence:
        """Return the sequence that receives the next decode slot.

        Args:
          waiting: sequences without a decode slot, sorted by `order` within each tenant; not empty.
          running: sequences with a decode slot.
        """
        heads: dict[str | None, Sequence] = {}
        for sequence in waiting:
            heads.setdefault(sequence.planned.options.tenant, sequence)
        decode_slots = Counter(sequence.planned.options.tenant for sequence in running)

        def key(head: Sequence) -> tuple[int, int, int, int]:
            tenant = head.planned.options.tenant
            return self._rank(head), decode_slots[tenant], self._given.get(tenant, 0), head.progress.arrived

        return min(heads.values(), key=key)

    def sorted[S: Sequence](self, sequences: abc.Iterable[S]) -> list[S]:
        """Return the sequences in the order in which they keep their pages.

        The first sequence of each tenant comes first, then the second of each. Sequences of one tenant are sorted by
        `order`, and ties by arrival.
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
    """Sequences that fill cache entries which other sequences link."""

    def __init__(self) -> None:
        self._found: dict[int, Sequence] = {}  # by the id of a cache entry that is not settled yet

    def __len__(self) -> int:
        return len(self._found)

    def add(self, sequence: Sequence) -> None:
        """Note the cache entries that a sequence is to fill."""
        for use in sequence.progress.images:
            if use.saved is not None:
                self._found[id(use.saved)] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
        for key in [key for key, filler in self._found.items() if filler is sequence]:
            del self._found[key]

    def of(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that are to fill the cache entries which a sequence links."""
        if not self._found:
            return []
        found = [self._found.get(id(use.linked)) for use in sequence.progress.images if use.linked is not None]
        return [one for one in found if one is not None]

    def last(self, others: abc.Sequence[Sequence], running: abc.Iterable[Sequence]) -> Sequence:
        """Return the last of `others` on which no running sequence depends, or the last one if there is none.

        Within a tenant, a filler precedes the sequences that wait for it. Across tenants, it may come last.
        """
        filling = {id(filler) for one in running for filler in self.of(one)}
        return next((one for one in reversed(others) if id(one) not in filling), others[-1])


def order(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of a tenant's requests: priority, then arrival."""
    return sequence.progress.priority, sequence.progress.arrived


_LEAST_RUN = 5  # forced tokens per prefill; fewer take as long as single decode steps


class Scheduler:
    """Admission of sequences, and their KV blocks.

    Args:
      max_sequences: number of decode slots, numbered from 0.
      max_rows: maximum tokens in one prefill chunk.
      num_layers: number of decoder layers.
      compressed_slots: KV slots of the pool for compressed prompts, as the runner has it; 0: there is no such pool.

    Attributes:
      compressed: pages of the pool for compressed prompts.
      waiting: sequences without pages, sorted by `order`.
      prefilling: sequences whose prompts are not launched yet.
      decoding: sequences whose prompts are launched.
    """

    def __init__(self, pages: Pages, max_sequences: int, max_rows: int, num_layers: int, *, compressed_slots: int = 0):
        self.pages, self.compressed = pages, CompressedPages(max(0, compressed_slots // PAGE - 1))
        self.tenant_order = TenantOrder()
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._arrived = 0
        self._decode_slots = list(range(max_sequences))
        self._max_rows = max_rows
        self._num_layers = num_layers
        self._fillers = Fillers()

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have pages or swapped-out KV."""
        return self.prefilling + self.decoding

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by priority, then arrival. Those that fill what it links become at least as urgent."""
        sequence.progress.arrived, self._arrived = self._arrived, self._arrived + 1
        self._fillers.add(sequence)
        bisect.insort(self.waiting, sequence, key=order)
        self._hurry(sequence)

    def _hurry(self, sequence: Sequence) -> None:
        """Raise the priority of the sequences that fill what a sequence links, and of those that these wait for."""
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
        """Return the waiting sequence that receives the next decode slot. Fillers of its cache entries come first."""
        sequence = self.tenant_order.first(self.waiting, self.running)
        while fillers := [one for one in self._fillers.of(sequence) if one in self.waiting]:
            sequence = min(fillers, key=order)
        return sequence

    def admit(self) -> list[Sequence]:
        """Give pages and decode slots to waiting sequences while there are any, and return the admitted sequences.

        Raises:
          RuntimeError: nothing runs, and there are not enough pages for the first sequence.
        """
        admitted: list[Sequence] = []
        spare = sum(_may_grow(sequence, self.pages.size) for sequence in self.running)
        block_tables = [(id(sequence.layout), sequence.progress.block_table) for sequence in reversed(self.running)]
        firsts = {
            layout: block_table
            for layout, block_table in block_tables
            if block_table is not None and not block_table.is_fork
        }
        while self.waiting and self._decode_slots:
            sequence = self.upcoming()
            block_table = self._take(sequence, firsts.get(id(sequence.layout)), spare)
            if block_table is None and not self.running:
                raise RuntimeError(
                    f"the KV pool is too small for a prompt of {sequence.length} tokens; increase kv_cache_bytes"
                )
            if block_table is None:
                break
            if self.pages.states is not None and not block_table.is_fork:
                self.replan(sequence, *images_with_states(sequence, self.running, block_table, self._num_layers))
            if sequence.report.ran is None:
                self.pages.count_hit(block_table)
            firsts.setdefault(id(sequence.layout), block_table)
            progress, states = sequence.progress, self.pages.states
            progress.block_table, progress.decode_slot = block_table, heapq.heappop(self._decode_slots)
            progress.state_slot = 0 if states is None else states.take()
            spare += _may_grow(sequence, self.pages.size)
            self.tenant_order.give(sequence)
            self.waiting.remove(sequence)
            self.prefilling.append(sequence)
            admitted.append(sequence)
        return admitted

    def _take(self, sequence: Sequence, first: BlockTable | None, spare: int) -> BlockTable | None:
        length = sequence.length
        # States are copied from the prefill of the first one, unless that has begun.
        keeps_states = self.pages.states is not None
        is_late = keeps_states and first is not None and (first.is_begun or first.cached >= len(sequence.layout))
        if first is not None and not sequence.generated and not is_late:
            return self.pages.fork(first, len(sequence.layout), length, spare=spare)
        chain = sequence.chain
        if chain is None:
            return self.pages.take(length, spare=spare)
        exact = sequence.exact(self._num_layers)
        # Tokens before the first one whose logits are needed may be cached.
        max_cached = int(np.argmax(sequence.progress.plan.depth > self._num_layers))
        if sequence.generated:
            max_cached = len(chain) - 1
            if exact == len(chain):
                chain = chain.extended(sequence.generated)
                exact, max_cached = len(chain), len(chain) - 1
        return self.pages.take(
            length, chain, max_cached=max_cached, keep=exact, usable=_usable(sequence, keeps_states), spare=spare,
            places=places(sequence, self._max_rows) if keeps_states else None,
        )  # fmt: skip

    def next_group(self, is_ready: Collection[Sequence]) -> list[Prefill]:
        """Return the prefills of the first sequences whose sources are computed, to be cut into chunks together.

        The sequences of `prefilling` that are in `is_ready` need nothing more from the cache.
        """
        group: list[Prefill] = []
        rows = 0
        for sequence in self.prefilling:
            block_table = sequence.progress.block_table
            if sequence not in is_ready or block_table is None or not block_table.is_ready:
                continue
            prefill = self.prefills(sequence)[sequence.progress.prefilled]
            if prefill.choice is not None:
                if not group:
                    return [prefill]
                break
            group.append(prefill)
            rows += int(np.count_nonzero(prefill.plan.depth))
            if rows >= self._max_rows:
                break
        return group

    def prefills(self, sequence: Sequence) -> list[Prefill]:
        """Return what an admitted sequence has to compute, in order."""
        block_table, layout, layers = sequence.progress.block_table, sequence.layout, self._num_layers
        assert block_table is not None
        states = NO_STATES if self.pages.states is None else states_of(sequence, self.prefilling)
        make = functools.partial(
            Prefill, sequence, table=block_table.table, shared=block_table.shared, cached=block_table.cached,
            states=states,
        )  # fmt: skip
        if block_table.is_fork:  # all KV of the prompt is there; the last token is computed for its logits only
            plan = dataclasses.replace(sequence.progress.plan, shift=False)
            return [make(layout, plan.after(block_table.cached), links=False)]
        choice, plan, tokens = sequence.planned.choice, sequence.progress.plan, sequence.generated
        if not tokens:
            return [make(layout, plan.after(block_table.cached), choice=choice)]
        if choice is None:
            resumed = continuation(sequence, tokens, block_table.cached, layers)
            return [dataclasses.replace(resumed, links=True, states=states)]
        first = make(layout, plan.wanting((), layers).after(block_table.cached), choice=choice)
        return [first, continuation(sequence, tokens, len(layout), layers)]

    def runs(self, answers: Iterable[Generation]) -> list[Prefill]:
        """Return prefills for outputs with long runs of forced tokens, and note these tokens as launched.

        Each prefill computes as many forced tokens as there are pages for. One more token is sampled after them.
        """
        prefills, room = [], self._max_rows
        for answer in answers:
            progress, forced = answer.progress, answer.forced
            ahead = progress.scheduled - answer.length  # tokens launched but not read
            count = min(len(forced) - ahead + 1, answer.max_length - progress.scheduled, room)
            if count < _LEAST_RUN or (count := self.grow([answer], count)) < _LEAST_RUN:
                continue
            tokens = [*answer.generated, *forced[: ahead + count - 1]]
            prefills.append(continuation(answer, tokens, progress.scheduled - 1, self._num_layers))
            self.decoded([answer], count)
            room -= count
        return prefills

    def replan(self, sequence: Sequence, plan: Plan, images: Listed[ImageUse]) -> None:
        """Replace what a sequence computes and where its images come from."""
        sequence.progress.plan, sequence.progress.images = plan, images

    def launched(self, group: Iterable[Prefill]) -> None:
        """Note that these prefills were launched. The last one of a sequence yields its first generated token."""
        for prefill in group:
            sequence, progress = prefill.sequence, prefill.sequence.progress
            block_table = progress.block_table
            assert block_table is not None
            progress.prefilled += 1
            # A prompt that selects rows is computed as before the preemption; a second prefill has its output.
            if progress.prefilled == (
                2 if sequence.planned.choice is not None and sequence.generated and not block_table.is_fork else 1
            ):
                progress.scheduled = len(prefill.layout) + 1
                self.pages.computed(block_table)
                self.prefilling.remove(sequence)
                self.decoding.append(sequence)

    def decoded(self, sequences: Iterable[Sequence], count: int) -> None:
        """Note that up to `count` more tokens of each sequence were launched."""
        for sequence in sequences:
            sequence.progress.scheduled = min(sequence.progress.scheduled + count, sequence.max_length)

    def grow(self, sequences: Listed[Sequence], count: int) -> int:
        """Give each sequence pages for up to `count` more tokens; return how many fit, 0 if not even one does.

        Either all of the sequences are compressed, or none is.
        """
        block_tables = [
            sequence.progress.block_table for sequence in sequences if sequence.progress.block_table is not None
        ]
        compressed = [one.progress.compressed for one in sequences if one.progress.compressed is not None]
        while count:
            # The last token of an output needs no KV slot: no token attends to it.
            lengths = [min(sequence.progress.scheduled + count - 1, sequence.max_length - 1) for sequence in sequences]
            after = [length - len(one.layout) for length, one in zip(lengths, sequences, strict=True)]
            if self.compressed.grow(compressed, after) if compressed else self.pages.grow(block_tables, lengths):
                break
            count //= 2
        return count

    def preempt(self, busy: Collection[Sequence]) -> bool:
        """Preempt the last running sequence that can be recomputed; return whether there was one.

        The prompts of the sequences in `busy` are being launched.

        Raises:
          RuntimeError: nothing else runs.
        """
        if len(self.running) == 1:
            raise RuntimeError(f"the KV pool is too small for {self.running[0].length} tokens; increase kv_cache_bytes")
        others = [one for one in self.tenant_order.sorted(self.running) if one not in busy and one.may_begin_again]
        if not others:
            return False
        self.pages.count_preemption()
        self.requeue(self._fillers.last(others, self.running))
        return True

    def requeue(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Release a sequence's decode slot and pages, see `release`, and queue it again."""
        self.release(sequence, failed=failed)
        sequence.progress.prefilled = sequence.progress.scheduled = 0
        sequence.progress.attempt += 1
        sequence.restart()
        bisect.insort(self.waiting, sequence, key=order)

    def compress(self, sequence: Sequence, counts: Listed[int]) -> bool:
        """Take pages for the kept tokens of a prompt, `counts[l]` in layer l; return False if there is no room."""
        sequence.progress.compressed = self.compressed.take(counts, sequence.new_slots - 1)
        return sequence.progress.compressed is not None

    def compacted(self, sequence: Sequence) -> None:
        """Release the full KV of a prompt, which stays after `compress` until the copy of kept tokens was launched."""
        self._release_pages(sequence, failed=False, keeps_states=False)

    def stays_whole(self, sequence: Sequence) -> None:
        """Note that a sequence decodes with its full KV, although compression was requested."""
        sequence.progress.is_whole = True

    def release(self, sequence: Sequence, *, failed: bool) -> None:
        """Release a sequence's decode slot and pages. Exact KV in them stays for other requests, unless it `failed`."""
        for group in (self.waiting, self.prefilling, self.decoding):
            if sequence in group:
                group.remove(sequence)
        progress = sequence.progress
        if progress.block_table is None and progress.compressed is None:
            return
        is_kept = self._release_pages(sequence, failed=failed)
        if self.pages.states is not None and not is_kept:
            self.pages.states.release(progress.state_slot)
        if progress.compressed is not None:
            self.compressed.end(progress.compressed)
            progress.compressed = None
        heapq.heappush(self._decode_slots, progress.decode_slot)

    def _release_pages(self, sequence: Sequence, *, failed: bool, keeps_states: bool = True) -> bool:
        """Release a sequence's pages; return whether the slot of its states became a snapshot."""
        block_table, chain, slot = sequence.progress.block_table, None, None
        if block_table is None:
            return False
        if not failed and block_table.is_proven and sequence.exact(self._num_layers) == len(sequence.layout):
            chain = sequence.chain and sequence.chain.extended(sequence.generated[:-1])
        if keeps_states and chain is not None and is_after(sequence, len(chain)):
            slot = sequence.progress.state_slot or None
        is_decoded = chain is not None and len(chain) > len(sequence.layout)
        sequence.progress.block_table = None
        return self.pages.end(block_table, chain, failed=failed, slot=slot, is_decoded=is_decoded)

    def finish(self, sequence: Sequence, *, failed: bool) -> None:
        """Release an ended sequence, see `release`, and forget what it was to fill."""
        self.release(sequence, failed=failed)
        self._fillers.remove(sequence)


def _may_grow(sequence: Sequence, page: int) -> bool:
    block_table = sequence.progress.block_table
    return block_table is not None and sequence.max_length > page * len(block_table.table)


def continuation(sequence: Sequence, tokens: Listed[int], cached: int, num_layers: int) -> Prefill:
    """Return the prefill of generated `tokens` after a prompt, beyond the first `cached` tokens."""
    progress, layout = sequence.progress, sequence.layout
    block_table, slot = progress.block_table, progress.state_slot
    assert block_table is not None
    plan = progress.plan.extended(len(tokens), num_layers).wanting([len(layout) + len(tokens) - 1], num_layers)
    return Prefill(
        sequence, layout.extended(tokens), plan.after(cached), block_table.table, block_table.shared, cached,
        links=False, states=PromptStates(slot, cached, slot),
    )  # fmt: skip


def places(sequence: Sequence, max_rows: int) -> Places:
    """Return where a sequence may continue, and takes snapshots; a block has at most `max_rows` tokens."""
    layout = sequence.layout.extended(sequence.generated) if sequence.generated else sequence.layout
    prompt, edges = len(sequence.layout), sequence.planned.edges
    observed = 0
    if (compressor := sequence.planned.options.compress) is not None and compressor.alpha < 1:
        with contextlib.suppress(ValueError):  # which ends the request when it is to be compressed
            observed = prompt - make_observed(compressor, sequence.layout)
    uses = sequence.progress.images
    linked = [use.span for use in uses if use.linked is not None]
    saved = {use.span: use.saved.meta for use in uses if use.saved is not None and not use.saved.is_settled}
    exact = [span for span in linked if span.state != "approximate"]
    stored = [span for span, meta in saved.items() if not meta.buffers]
    mapped = [*(span for span in linked if span.state == "approximate"), *saved]
    is_end = block_ends(layout, prompt, max_rows, edges)
    return Places(layout, prompt, is_end, observed, exact, stored, mapped, edges)


def images_with_states(
    sequence: Sequence, running: Iterable[Sequence], block_table: BlockTable, num_layers: int
) -> tuple[Plan, list[ImageUse]]:
    """Return what a sequence computes and where its images come from, given the slots for the states after these.

    Images without a slot are neither linked nor stored. Nor are images linked exactly of which tokens are computed,
    because there are no states within them, or by a map that stands for other tokens, nor images stored that pages
    hold. Other sequences wait for what is stored, so the cache entries of the rest are cancelled. Of several outputs of
    a request, the first one stores its images.
    """
    needs = block_table.states
    plan, images, planned = sequence.progress.plan, [*sequence.progress.images], sequence.planned
    is_first = all(other.planned.request is not planned.request for other in running)
    for i, use in enumerate(images):
        has_slot, map_slots = use.span.stop in needs.stated, needs.maps.get(use.span.stop)
        if use.linked is not None and use.span.stop > block_table.cached:
            depth = plan.depth[use.span.tokens]
            if use.span.state == "approximate":
                inner = range(0) if map_slots is None else map_slots.inner
                can_link = 0 < len(inner) == np.count_nonzero(depth == 0) and not plan.depth[inner].any()
            else:
                can_link = has_slot and not depth.any()
            if not can_link:
                images[i] = dataclasses.replace(use, linked=None, why=Why.no_state)
                plan = plan.computing(use.span.tokens, num_layers)
            continue
        if use.saved is None or use.saved.is_settled:
            continue
        has_map = map_slots is not None or planned.edges is None or not planned.edges.inner(use.span)
        is_computed = use.span.start >= block_table.cached
        has_slots = has_map and (has_slot or bool(use.saved.meta.buffers))  # coded entries have no states
        if not (is_first and is_computed and has_slots):
            images[i] = dataclasses.replace(use, saved=None)
            if is_first and planned.reservation is not None:
                planned.reservation.cancel(use.saved, None if has_slots or not is_computed else Why.no_state)
    return plan, images


def states_of(sequence: Sequence, prefilling: Iterable[Sequence]) -> PromptStates:
    """Return what the prefill of an admitted sequence reads and writes of the states.

    Its copies are its snapshots, except those that are loaded, and the states of sequences in `prefilling` that begin
    with the same prompt.
    """
    slot, block_table = sequence.progress.state_slot, sequence.progress.block_table
    assert block_table is not None
    if block_table.is_fork:
        return PromptStates(slot, block_table.cached, slot)
    needs, images = block_table.states, sequence.progress.images
    linked_ends = [use.span.stop for use in images if use.linked is not None]
    stored_ends = [use.span.stop for use in images if use.saved is not None and not use.saved.is_settled]
    loads = {end: needs.stated[end] for end in linked_ends if end in needs.stated}
    linked, made = ([needs.maps[end] for end in ends if end in needs.maps] for ends in (linked_ends, stored_ends))
    # An image of which a policy computes all tokens has no slots for a map, and no prompt reads its map.
    maps = {slots.end: (slots.added, slots.passed) for slots in made}
    stores = {end: EntrySlots(needs.stated.get(end, 0), *maps.get(end, ())) for end in stored_ends}
    copies = defaultdict(list)
    for snapshot in needs.snapshots:
        if snapshot.place not in loads:
            copies[snapshot.place].append(snapshot.slot)
    for other in prefilling:
        table = other.progress.block_table
        if table is not None and table.origin is block_table:
            copies[table.cached].append(other.progress.state_slot)
    source = 0 if block_table.resumed is None else block_table.resumed.slot
    return PromptStates(slot, block_table.cached, source, copies, loads, stores, made, linked)


def is_after(sequence: Sequence, count: int) -> bool:
    """Return whether the slot of a sequence has the states after exactly its first `count` tokens.

    The device may have decoded more tokens than the sequence kept, unless it knew that the sequence had ended.
    """
    if sequence.progress.scheduled == count + 1:
        return True
    if not isinstance(sequence, Generation) or sequence.end.finish_reason not in ("stop", "length"):
        return False
    if isinstance(sequence.end.stop_reason, str):  # a stop string, which the device does not know
        return False
    is_full = len(sequence.token_ids) == sequence.new_slots
    return is_full or (bool(sequence.token_ids) and sequence.token_ids[-1] in sequence.end_tokens)


def note_begun(group: Iterable[Prefill]) -> None:
    """Note that these prefills are being launched."""
    for prefill in group:
        if prefill.sequence.progress.block_table is not None:
            prefill.sequence.progress.block_table.is_begun = True


def is_needed(sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Return whether other sequences depend on what a prompt computes and has not finished yet."""
    block_table = sequence.progress.block_table
    if sequence.progress.compressed is not None or (block_table is not None and block_table.is_proven):
        return False
    others = (other.progress.block_table for other in running)
    is_shared = block_table is not None and any(other is not None and block_table in other.sources for other in others)
    return is_shared or any(use.saved is not None and use.saved.is_awaited for use in sequence.progress.images)


def _usable(sequence: Sequence, keeps_states: bool) -> int:
    """Return how many leading tokens of a prompt may come from pages, as far as its images allow it.

    An approximate hit is linked whatever the pages hold, so that the state of the pool never changes an output. An
    image whose KV is to be saved is computed completely, because pages hold no keys before rotation. With states it is
    not: saving it costs more, and the next prompt is likely to continue from a snapshot.
    """
    uses = () if keeps_states else sequence.progress.images
    saved = {use.span.start for use in uses if use.saved is not None and not use.saved.is_ready}
    for span in sequence.layout.images:
        if span.state == "approximate" or span.start in saved:
            return span.start
    return sequence.length
