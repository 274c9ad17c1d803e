"""Slots of states: those of running sequences, and snapshots from which later prompts continue (host).

A layer with states has no page from which a prompt could continue. So a prefill copies the states of a sequence at some
places of its prompt into slots of their own: where the last message ends, after images, before the last token. A
prompt with the same beginning continues from the last such snapshot, if its K,V in layers of full attention are in
pages. The slot of an ended output becomes a snapshot without a copy.

The order of eviction is GreedyDual (Young 1994): a snapshot is worth the tokens that it saves, and the worth of those
evicted since counts against it until it is used again. An evicted snapshot that saves enough moves to host memory, and
returns to a slot when a prompt continues from it.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Record
from vlcache_jax.cache.snapshots import HostSnapshots
from vlcache_jax.device import kv_shape
from vlcache_jax.inputs.layout import ImageSpan, Layout
from vlcache_jax.reuse.edges import Edges

IMAGE_SPACING = 512  # least number of tokens between two snapshots of which the second is at the end of an image
TEXT_SPACING = 2048  # the same for text
MAX_IN_PROMPT = 16  # longest number of spacings in a prompt; longer prompts have wider ones


@dataclass(eq=False)
class Snapshot[Maker]:
    """States of a sequence after the first tokens of a prompt.

    Attributes:
      place: number of these tokens.
      saved: number of tokens that it saves, compared with the snapshot before it.
      owner: digest of the salt of the prompt.
      is_decoded: whether decode steps computed some of the tokens. The states then differ by rounding from those of a
        prefill, which computes blocks of tokens.
      maker: block table whose prefill writes it and is not proven yet; None if it is complete.
      slot: slot of the pool of states that holds them; 0: only host memory does.
      record: copy in host memory, which may be evicted; None if there was none.
      users: number of block tables that are to read or write it, and are not launched yet.
      worth: see `StateSlots`.
      is_lost: whether no prompt can find it any more.
    """

    place: int
    saved: int
    owner: str = ""
    is_decoded: bool = False
    maker: Maker | None = None
    slot: int = 0
    record: Record | None = None
    users: int = 0
    worth: float = 0.0
    is_lost: bool = False


class StateMove(NamedTuple):
    """Copy of states between a slot and host memory, to be launched before the slot is written again.

    If `is_load`, the record is filled and is copied to the slot. Otherwise the slot is copied to the record.
    """

    slot: int
    record: Record
    is_load: bool


class StateSlots[Maker]:
    """Slots of the pool of states. Slot 0 is zero, and no sequence has it. Every method may be called from any thread.

    Args:
      sequences: maximum number of running sequences, each with a slot.
      snapshots: maximum number of snapshots in slots.
      host: host memory for evicted snapshots; None: they are forgotten.

    Attributes:
      evictions: number of snapshots evicted for others, or not taken because all others are worth more.
      returns: number of snapshots that returned from host memory.
    """

    def __init__(self, sequences: int, snapshots: int, host: HostSnapshots | None = None):
        self.max_snapshots, self.evictions, self.returns = snapshots, 0, 0
        self._host = host
        self._free = list(range(1, 1 + sequences + snapshots))
        self._snapshots: set[Snapshot[Maker]] = set()
        self._moves: list[StateMove] = []
        self._age = 0.0  # worth of the last evicted snapshot
        self._lock = threading.RLock()

    @classmethod
    def of(cls, sequences: int, snapshots: int | None, host: HostSnapshots | None = None) -> Self | None:
        """Return the slots of a model; None if it has no states, and so no number of snapshots."""
        return None if snapshots is None else cls(sequences, snapshots, host)

    def __len__(self) -> int:
        """Number of snapshots in slots."""
        return len(self._snapshots)

    def take(self) -> int:
        """Return a slot for a sequence that begins to run."""
        with self._lock:
            return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """Take back the slot of a sequence."""
        with self._lock:
            heapq.heappush(self._free, slot)

    def add(self, snapshot: Snapshot[Maker], *, slot: int | None = None, is_needed: bool = False) -> bool:
        """Give a new snapshot a slot, in which it replaces the one that is worth least.

        Args:
          snapshot: the snapshot. A maker is its first user, since its prefill writes it.
          slot: slot of a sequence that has ended, with these states; the caller keeps it if the result is False.
            None: a new slot.
          is_needed: whether it replaces another one even if it is worth less.

        Returns:
          Whether it has a slot. It has none if it is worth least itself, or if all others are being used.
        """
        with self._lock:
            snapshot.worth, snapshot.users = self._age + snapshot.saved, int(snapshot.maker is not None)
            return self._enter(snapshot, slot, is_needed)

    def has(self, snapshot: Snapshot[Maker]) -> bool:
        """Return whether a snapshot still exists, in a slot or in host memory."""
        with self._lock:
            if not (snapshot.slot or snapshot.is_lost or self._is_in_host(snapshot)):
                self.drop(snapshot)
            return not snapshot.is_lost

    def can_use(self, snapshot: Snapshot[Maker]) -> bool:
        """Return whether a snapshot has a slot, or can return to one."""
        with self._lock:
            if snapshot.slot or snapshot.is_lost:
                return not snapshot.is_lost
            has_slot = len(self) < self.max_snapshots or any(not one.users for one in self._snapshots)
            return has_slot and self._is_in_host(snapshot) and snapshot.record is not None and snapshot.record.is_ready

    def use(self, snapshot: Snapshot[Maker]) -> None:
        """Note that a block table will read a snapshot that `can_use` allows, whose slot then stays until `leave`."""
        with self._lock:
            snapshot.worth = self._age + snapshot.saved
            if not snapshot.slot:
                assert self._host is not None
                assert snapshot.record is not None
                if not self._enter(snapshot, None, True):
                    raise RuntimeError("all slots of snapshots are in use")
                self._host.touch(snapshot.record)
                self._moves.append(StateMove(snapshot.slot, snapshot.record, True))
                self.returns += 1
            snapshot.users += 1

    def leave(self, snapshot: Snapshot[Maker]) -> None:
        """Note that what reads or writes a snapshot for a block table was launched, or never will be."""
        with self._lock:
            snapshot.users -= 1
            if snapshot.is_lost and not snapshot.users:
                self._give_back(snapshot)

    def drop(self, snapshot: Snapshot[Maker]) -> None:
        """Forget a snapshot."""
        with self._lock:
            if snapshot.is_lost:
                return
            snapshot.is_lost = True
            if self._host is not None and snapshot.record is not None:
                self._host.drop(snapshot.record)
            if snapshot.slot and not snapshot.users:
                self._give_back(snapshot)

    def take_moves(self) -> list[StateMove]:
        """Return the copies to launch, in their order, before any program that writes states."""
        with self._lock:
            moves, self._moves = self._moves, []
            return moves

    def _enter(self, snapshot: Snapshot[Maker], slot: int | None, is_needed: bool) -> bool:
        if not self.max_snapshots:
            return False
        while len(self._snapshots) >= self.max_snapshots:
            others = (one for one in self._snapshots if not one.users)
            least = min(others, key=lambda one: one.worth, default=None)
            self.evictions += 1
            if least is None:
                return False
            self._age = min(snapshot.worth, least.worth)
            if least.worth > snapshot.worth and not is_needed:
                return False
            self._evict(least)
        snapshot.slot = self.take() if slot is None else slot
        self._snapshots.add(snapshot)
        return True

    def _evict(self, snapshot: Snapshot[Maker]) -> None:
        """Take the slot of a snapshot, which stays in host memory if it saves enough and there is room."""
        if self._host is None or snapshot.maker is not None or snapshot.saved < kv_shape.STATED_TOKENS:
            self.drop(snapshot)
        elif self._is_in_host(snapshot):
            self._give_back(snapshot)
        elif (record := self._host.take(snapshot.owner)) is None:
            self.drop(snapshot)
        else:
            snapshot.record = record
            self._moves.append(StateMove(snapshot.slot, record, False))
            self._give_back(snapshot)

    def _is_in_host(self, snapshot: Snapshot[Maker]) -> bool:
        return self._host is not None and snapshot.record is not None and self._host.holds(snapshot.record)

    def _give_back(self, snapshot: Snapshot[Maker]) -> None:
        self._snapshots.remove(snapshot)
        self.release(snapshot.slot)
        snapshot.slot = 0


class MapSlots(NamedTuple):
    """Slots for the map S -> A S + B of an image.

    Attributes:
      end: number of tokens up to the end of the image.
      inner: indices of the tokens that the map stands for.
      added, passed: slots of B and of A. That of B also has the last inputs of the convolution.
    """

    end: int
    inner: range
    added: int
    passed: int


@dataclass(frozen=True, eq=False)
class StateNeeds[Maker]:
    """Slots that a prefill needs besides that of its sequence.

    Attributes:
      snapshots: snapshots that it takes or loads.
      stated: by the ends of images that are linked exactly or stored, the slots for the states after them. Some may be
        missing, because no slot was free.
      alone: slots that only the prefill uses, until it was launched.
      maps: by the ends of images that are linked by their maps, or whose maps are stored, the slots of these. Some may
        be missing.
    """

    snapshots: list[Snapshot[Maker]] = field(default_factory=list)
    stated: dict[int, int] = field(default_factory=dict)
    alone: list[Snapshot[Maker]] = field(default_factory=list)
    maps: dict[int, MapSlots] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Places:
    """Places of a prompt at which a prefill may continue, and at which it takes snapshots.

    A place is a number of first tokens.

    Attributes:
      layout: layout of the prompt, with generated tokens after it if it was preempted.
      prompt: number of tokens of the prompt.
      is_end: for each token, whether it ends a block, see `vlcache_jax.engine.runs`.
      observed: index of the first token that is computed again, from the last snapshot before it, to compress the
        prompt; 0 if there is none.
      linked: images that may be linked, so that there are no states within them.
      stored: images whose cache entries are filled with the states after them, so that they may be linked exactly.
      mapped: images that are linked by their maps, or whose cache entries are filled with these.
      edges: tokens of linked images that are computed; None if there are no maps.
    """

    layout: Layout
    prompt: int
    is_end: npt.NDArray[np.bool_]
    observed: int = 0
    linked: Sequence[ImageSpan] = ()
    stored: Sequence[ImageSpan] = ()
    mapped: Sequence[ImageSpan] = ()
    edges: Edges | None = None

    def loaded(self, cached: int) -> list[int]:
        """Return where a prefill that begins with token `cached` loads states: the ends of linked images."""
        return [span.stop for span in self.linked if span.stop > cached]

    def read(self, cached: int) -> list[int]:
        """Return where such a prefill takes snapshots for cache entries: the ends of stored images."""
        return [span.stop for span in self.stored if span.start >= cached]

    def maps(self, cached: int) -> Iterator[tuple[int, range]]:
        """Yield the images whose maps such a prefill reads or writes: their ends, and the tokens of the maps."""
        if self.edges is not None:
            inner = {span: self.edges.inner(span) for span in self.mapped if span.start >= cached}
            yield from ((span.stop, tokens) for span, tokens in inner.items() if tokens)

    def allows(self, place: int, is_decoded: bool) -> bool:
        """Return whether a prefill may continue from a snapshot at a place, see `Snapshot`.

        Where a block begins, the result equals that of a prefill of the full prompt to the last bit. Behind decoded
        tokens it is equal apart from rounding.
        """
        return is_decoded or bool(self.is_end[place - 1])

    def chosen(self, cached: int, matched: int) -> list[int]:
        """Return where to take snapshots, in ascending order.

        Args:
          cached: number of tokens that are not computed.
          matched: number of tokens with K,V in pages. Another prompt has them, so that a third one may.
        """
        spacing = TEXT_SPACING
        while MAX_IN_PROMPT * spacing < self.prompt:
            spacing *= 2
        images = {span.stop: IMAGE_SPACING * spacing // TEXT_SPACING for span in self.layout.images}
        texts = dict.fromkeys(range(spacing, self.prompt, spacing), spacing)
        for span in self.layout.images:
            for place in range(-(-span.start // spacing) * spacing, span.stop, spacing):
                texts.pop(place, None)  # no other prompt continues within an image
        found, last = set(), cached
        for place, gap in sorted((texts | images).items()):
            if place - last >= gap:
                found.add(place)
                last = place
        for count in (matched, self.observed):  # after `matched` tokens another prompt has other ones
            ends = np.flatnonzero(self.is_end[: min(count, self.prompt)])
            found |= {int(end) + 1 for end in ends[-1:]}
        found |= {self.prompt - 1, *self.layout.turns[-1:]}
        for span in self.linked:
            found -= {place for place in found if span.start < place < span.stop}
        return sorted(place for place in found if cached < place < self.prompt)
