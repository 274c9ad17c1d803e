"""Slots of states: which snapshots stay, where they are taken, and that each holds what it is found by."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.engine.test_scheduler import LAYERS, SIZE, Answer, add
from tests.helper import planned
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.snapshots import HostSnapshots
from vlcache_jax.cache.store import Store
from vlcache_jax.device import kv_shape
from vlcache_jax.engine import snapshots
from vlcache_jax.engine.page_tree import Chain
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.runs import block_ends
from vlcache_jax.engine.scheduler import Scheduler, note_begun
from vlcache_jax.engine.snapshots import Places, Snapshot, StateSlots
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.reuse.policies import full_prefill

BLOCK = 4  # largest number of tokens of a block, the number of rows of a step


def add_new(states, saved, maker=None, **options):
    """A new snapshot; None if it got no slot."""
    made = Snapshot(saved, saved, maker=maker)
    return made if states.add(made, **options) else None


def host(count):
    """Host memory for `count` snapshots."""
    return HostSnapshots(Store(CacheConfig(host_bytes=4 * count, states_bytes=4 * count)), 1, 1)


def move(states):
    """Launch the copies, and let those to the host arrive."""
    moves = states.take_moves()
    for one in moves:
        if not one.is_load:
            one.record.complete()
    return moves


def test_the_snapshot_that_saves_fewest_tokens_leaves_first():
    states = StateSlots(1, 3)
    long, short, medium = (add_new(states, saved) for saved in (90, 10, 40))
    assert {one.slot for one in (long, short, medium)} == {1, 2, 3}
    freed = short.slot
    new = add_new(states, 20)
    assert (short.is_lost, new.slot, len(states), states.evictions) == (True, freed, 3, 1)
    assert add_new(states, 5) is None  # worth least itself: 10 of the one that left, and 5
    assert not any(one.is_lost for one in (long, medium, new))


def test_a_snapshot_that_is_not_used_loses_worth_and_a_used_one_regains_it():
    states = StateSlots(0, 2)
    used, unused = add_new(states, 50), add_new(states, 51)
    count = 0
    while not unused.is_lost and count < 40:
        states.use(used)
        states.leave(used)
        add_new(states, 5)
        count += 1
    assert 5 < count < 40
    assert not used.is_lost


def test_what_is_being_read_or_written_keeps_its_slot():
    states = StateSlots(0, 1)
    one = add_new(states, 4, object())
    slot = one.slot
    assert add_new(states, 1000) is None  # its maker has not written it
    states.drop(one)
    assert add_new(states, 1000) is None
    states.leave(one)
    other = add_new(states, 1000)
    assert other.slot == slot
    states.use(other)
    assert add_new(states, 10**6) is None
    states.leave(other)
    assert add_new(states, 10**6).slot == slot


def test_the_slot_of_a_sequence_becomes_a_snapshot_and_stays_its_own_otherwise():
    states = StateSlots(2, 1)
    first, second = states.take(), states.take()
    made = add_new(states, 9, slot=first)
    assert made.slot == first
    assert add_new(states, 1, slot=second) is None
    states.release(second)
    assert {states.take(), states.take()} == {second, 3}


def test_an_evicted_snapshot_returns_from_host_memory():
    states = StateSlots(0, 1, host(2))
    first = add_new(states, 300)
    second = add_new(states, 400)
    assert (first.slot, second.slot, len(states)) == (0, 1, 1)
    assert not states.can_use(first)  # its copy has not arrived
    assert [one.is_load for one in move(states)] == [False]
    assert states.can_use(first)
    states.use(first)  # replaces the second one
    assert (first.slot, second.slot, states.returns) == (1, 0, 1)
    assert [(one.record, one.is_load) for one in move(states)] == [(second.record, False), (first.record, True)]
    assert not states.can_use(second)  # the only slot is in use
    states.leave(first)
    states.use(second)
    assert [one.record for one in move(states)] == [second.record]  # host memory still holds the first one
    assert (states.has(first), states.has(second), states.evictions) == (True, True, 3)


def test_what_saves_little_or_is_not_proven_does_not_move_to_host_memory():
    states = StateSlots(0, 1, host(2))
    short = add_new(states, kv_shape.STATED_TOKENS - 1)
    unproven = add_new(states, 1000, object())
    states.leave(unproven)
    add_new(states, 2000)
    assert (short.is_lost, unproven.is_lost, move(states)) == (True, True, [])


def test_a_snapshot_that_host_memory_evicts_is_lost():
    memory = host(1)
    states = StateSlots(0, 1, memory)
    first, second, third = (add_new(states, saved) for saved in (300, 400, 500))
    assert (states.has(first), states.has(second), states.has(third)) == (False, True, True)
    move(states)
    states.drop(second)
    assert not memory.holds(second.record)
    assert memory.take("me") is not None
    nothing = host(0)
    states = StateSlots(0, 1, nothing)
    first, _ = add_new(states, 300), add_new(states, 400)
    assert (first.is_lost, move(states)) == (True, [])


def layout_of(length, images=(), turns=()):
    """`images`: index and number of tokens of each."""
    grids = [(1, 2, 2 * count) for _, count in images]
    refs = [
        ImageRef(f"i{start}", grid, count, lambda: Patches(None, (1, 2, 2)))
        for (start, count), grid in zip(images, grids, strict=True)
    ]
    layout = make_layout(np.arange(length, dtype=np.int32), [start for start, _ in images], refs, 2, None)
    return dataclasses.replace(layout, turns=turns)


def chosen(layout, cached=0, matched=0):
    return Places(layout, len(layout), block_ends(layout, len(layout))).chosen(cached, matched)


@pytest.mark.parametrize(
    ("layout", "cached", "matched", "expected"),
    [
        (layout_of(100), 0, 0, [99]),
        (layout_of(100, turns=(0, 40, 90)), 0, 0, [90, 99]),
        (layout_of(100, turns=(0, 40, 90)), 95, 95, [99]),
        (layout_of(5000), 0, 0, [2048, 4096, 4999]),
        (layout_of(5000), 3000, 3000, [4999]),  # 1096 behind the last one is too near
        (layout_of(3000, [(10, 490)]), 0, 0, [2048, 2999]),  # the image ends too early
        (layout_of(3000, [(10, 502)]), 0, 0, [512, 2999]),
        (layout_of(3000, [(10, 502), (520, 500), (1100, 100)]), 0, 0, [512, 1200, 2999]),
        (layout_of(3000, [(2000, 100)]), 0, 0, [2100, 2999]),  # none within an image
        (layout_of(1000), 0, 500, [448, 999]),  # the last end of a block that another prompt shares
        (layout_of(1000), 448, 500, [999]),
    ],
)
def test_snapshots_are_taken_where_prompts_may_part(layout, cached, matched, expected):
    assert chosen(layout, cached, matched) == expected


def test_long_prompts_have_few():
    places = chosen(layout_of(200_000))
    assert len(places) <= snapshots.MAX_IN_PROMPT + 1
    assert set(places) >= {16384, 32768, 199_999}


def test_a_prompt_goes_on_where_its_own_blocks_begin_or_behind_decoded_tokens():
    layout = layout_of(300, [(100, 50)])
    places = Places(layout, 300, block_ends(layout, 300))
    assert [place for place in range(1, 300) if places.allows(place, False)] == [64, 128, 150, 192, 256, 299]
    assert places.allows(70, True)


# Of each command, how often it is chosen.
COMMANDS = {
    "add": 40, "admit": 40, "launch": 40, "arrive": 20, "evict": 3, "read": 40, "grow": 30, "preempt": 8, "finish": 40,
    "fail": 3, "drop": 1, "sweep": 10,
}  # fmt: skip


class Device:
    """A device that remembers, for every slot of states and every copy on the host, the tokens that it has seen."""

    def __init__(self):
        self.holds = {0: b""}
        self.copies = {}

    def move(self, moves):
        for one in moves:
            if one.is_load:
                self.holds[one.slot] = self.copies[one.record]
            else:
                self.copies[one.record] = self.holds[one.slot]

    def moved(self, moves):
        """A copy of this device after these moves."""
        other = Device()
        other.holds, other.copies = dict(self.holds), dict(self.copies)
        other.move(moves)
        return other

    def launch(self, prefill):
        slot, first, source, copies, *_ = prefill.states
        ids = prefill.layout.token_ids.tobytes()
        assert self.holds[source] == ids[: 4 * first]
        assert first == prefill.cached
        for place, targets in copies.items():
            assert first <= place <= len(prefill.layout)
            for target in targets:
                self.holds[target] = ids[: 4 * place]
        self.holds[slot] = ids


def test_each_snapshot_holds_what_it_is_found_by(monkeypatch):
    """Requests at random: admitted, launched, read, preempted, finished or failed. The device works in this order."""
    resumed = returned = 0
    for seed in range(250):
        rng = random.Random(seed)
        monkeypatch.setattr(kv_shape, "STATED_TOKENS", rng.choice([1, 1, 4]))
        monkeypatch.setattr(snapshots, "TEXT_SPACING", rng.choice([4, 8, 2048]))
        states, uses = run_at_random(rng)
        resumed, returned = resumed + uses, returned + states.returns
    assert resumed > 500
    assert returned > 30


def run_at_random(rng):
    """Run commands at random; return the slots, and how often a prompt continued from a snapshot."""
    sequences, count = 3, rng.choice([0, 1, 2, 2, 3, 5])
    memory = host(rng.choice([0, 2, 6, 12]))
    states = StateSlots(sequences, count, memory)
    scheduler = Scheduler(Pages(rng.choice([9, 24]), size=SIZE, states=states), sequences, BLOCK, LAYERS)
    pages, device, everyone, uses = scheduler.pages, Device(), [], 0
    for command in rng.choices([*COMMANDS], [*COMMANDS.values()], k=200):
        alive = [one for one in everyone if not one.end.is_finished]
        if command == "add":
            begin = rng.choice([0, 0, 0, 50])
            rest = rng.choices([0, 1], k=rng.randint(0, 9))
            length = rng.choice([1, 5, 9, 12, 15, 18])
            ids = np.array([*range(begin, begin + length), *(90 + one for one in rest)], np.int32)
            old = [one for one in alive if one.tokens]
            if old and rng.random() < 0.5:  # the next turn of a dialogue
                one = rng.choice(old)
                ids = np.concatenate([one.layout.token_ids, one.tokens, ids[:3]]).astype(np.int32)[:30]
            layout = make_layout(ids, [], [], 2, None)
            one = Answer(planned(layout, full_prefill(layout, LAYERS), owner="me"), rng.randint(1, 8))
            if alive and rng.random() < 0.25:  # another output of the same request
                one = Answer(rng.choice(alive).planned, one.new_slots)
            one.name = str(len(everyone))
            everyone += add(scheduler, one)
        elif command == "admit":
            uses += sum(one.progress.block_table.resumed is not None for one in scheduler.admit())
        elif command == "launch":
            ready = [one for one in scheduler.prefilling if not one.progress.block_table.is_lost]
            ready = ready[: rng.randint(0, 3)]
            while group := scheduler.next_group(ready):
                note_begun(group)
                device.move(states.take_moves())
                for prefill in group:
                    device.launch(prefill)
                scheduler.launched(group)
        elif command == "arrive":
            for record in device.copies:
                if rng.random() < 0.5:
                    record.complete(())
        elif command == "evict":
            for record in [one for one in device.copies if memory.holds(one)][:1]:
                memory.drop(record)
        elif command == "read":
            for one in scheduler.decoding:
                table = one.progress.block_table
                if not table.is_lost and all(source.is_proven for source in table.sources):
                    pages.proven(table)
        elif command == "grow":
            for one in scheduler.decoding:
                if one.progress.block_table.is_proven and one.progress.scheduled < one.max_length:
                    new = scheduler.grow([one], rng.randint(1, 3))
                    new = min(new, one.max_length - one.progress.scheduled)
                    if not new:
                        continue
                    if not one.tokens:
                        one.tokens = (70,)
                    scheduler.decoded([one], new)
                    one.tokens = (*one.tokens, *range(70 + len(one.tokens), 70 + len(one.tokens) + new))
                    seen = np.concatenate([one.layout.token_ids, one.tokens[:-1]]).astype(np.int32)
                    device.holds[one.progress.state_slot] = seen.tobytes()
                    if rng.random() < 0.5:  # the answer ends before what was launched
                        one.tokens = one.tokens[:-1]
                        one.end.is_aborted = True
        elif command == "preempt" and len(scheduler.running) > 1:
            going = [one for one in scheduler.running if one.end.is_aborted]
            scheduler.preempt(going)
        elif command in ("finish", "fail") and alive:
            one = rng.choice(alive)
            one.end.is_finished = True
            scheduler.finish(one, failed=command == "fail")
        elif command == "drop":
            pages.clear()
        elif command == "sweep":
            for one in scheduler.running:
                if one.progress.block_table.is_lost:
                    scheduler.requeue(one, failed=True)
        check(pages, states, scheduler, device, sequences, count)
    for one in [*scheduler.running, *scheduler.waiting]:
        scheduler.finish(one, failed=False)
    pages.clear()
    assert len(states) == 0
    assert sorted(states._free) == [*range(1, 1 + sequences + count)]
    return states, uses


def check(pages, states, scheduler, device, sequences, count):
    """Each slot has one owner, and what can be found and is proven holds the tokens of its path."""
    device = device.moved(states._moves)
    own = [one.progress.state_slot for one in scheduler.running]
    held = [one.slot for one in states._snapshots]
    assert sorted([*states._free, *own, *held]) == [*range(1, 1 + sequences + count)]
    assert len(held) <= count
    running = [one.progress.block_table for one in scheduler.running]
    assert all(one.maker is None or one.maker in running for one in states._snapshots if not one.is_lost)
    nodes = [(b"", root) for root in pages._tree._roots.values()]
    reachable = set()
    for before, node in nodes:
        nodes += [(before + page.piece.ids, page) for page in node.children]
        for piece, snapshot in node.snapshots:
            if not states.has(snapshot):
                continue
            if snapshot.slot:
                reachable.add(snapshot)
            ids = np.frombuffer(before + piece.ids, ">u8").astype(np.int32).tobytes()
            assert len(ids) == 4 * snapshot.place
            if snapshot.record is not None:
                assert device.copies[snapshot.record] == ids
            if snapshot.maker is None and snapshot.slot:
                assert device.holds[snapshot.slot] == ids
    assert {one for one in states._snapshots if not one.is_lost} == reachable
    assert all(one.users for one in states._snapshots if one.is_lost)


def test_a_snapshot_is_found_by_its_own_tokens():
    """Two prompts part within a page, and each has a snapshot after that; a third one continues the second."""
    pages = Pages(9, size=SIZE, states=StateSlots(3, 4))
    tables, resumed = [], []
    for ids in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9, 6, 7], [1, 2, 3, 4, 9, 6, 7, 8]):
        chain, count = Chain.of("me", np.array(ids, np.int32)), len(ids)
        layout = make_layout(np.array(ids, np.int32), [], [], 2, None)
        places = Places(layout, count, np.ones(count, bool))
        table = pages.take(count, chain, max_cached=count - 1, keep=count, places=places)
        resumed.append(table.resumed)
        pages.computed(table)
        pages.proven(table)
        tables.append(table)
    assert [table.cached for table in tables] == [0, 0, 6]
    [second] = [one for one in tables[1].states.snapshots if one.place == 6]
    assert resumed == [None, None, second]


def test_who_continues_from_a_snapshot_waits_for_its_maker():
    """The pages are proven, but the second prompt, which is to write the snapshot in them, has not begun."""
    pages = Pages(9, size=SIZE, states=StateSlots(3, 4))
    tables = []
    for ids in ([*range(12)], [*range(9), 70, 71, 72], [*range(9), 20, 21, 22]):
        chain, count = Chain.of("me", np.array(ids, np.int32)), len(ids)
        layout = make_layout(np.array(ids, np.int32), [], [], 2, None)
        is_end = np.isin(np.arange(count), (8, count - 2, count - 1))
        table = pages.take(count, chain, max_cached=count - 1, keep=count, places=Places(layout, count, is_end))
        if not tables:
            pages.computed(table)
            pages.proven(table)
        tables.append(table)
    assert [table.cached for table in tables] == [0, 0, 9]
    assert tables[1] in tables[2].sources
    assert not tables[2].is_ready
