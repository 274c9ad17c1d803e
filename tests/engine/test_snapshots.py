"""Slots of states: which snapshots stay, where they are taken, and that each holds what it is found by."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_scheduler import LAYERS, SIZE, Answer, add
from tests.helper import planned
from vlcache_jax.engine import snapshots
from vlcache_jax.engine.page_tree import Chain
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.runs import block_ends
from vlcache_jax.engine.scheduler import Scheduler, note_begun
from vlcache_jax.engine.snapshots import Places, StateSlots
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.reuse.policies import full_prefill

BLOCK = 4  # largest number of tokens of a block, the number of rows of a step


def test_the_snapshot_that_saves_fewest_tokens_leaves_first():
    states = StateSlots(1, 3)
    long, short, medium = (states.add(100, saved) for saved in (90, 10, 40))
    assert {one.slot for one in (long, short, medium)} == {1, 2, 3}
    new = states.add(50, 20)
    assert (short.is_lost, new.slot, len(states), states.evictions) == (True, short.slot, 3, 1)
    assert states.add(5, 5) is None  # worth least itself: 10 of the one that left, and 5
    assert not any(one.is_lost for one in (long, medium, new))


def test_a_snapshot_that_is_not_used_loses_worth_and_a_used_one_regains_it():
    states = StateSlots(0, 2)
    used, unused = states.add(1, 50), states.add(1, 51)
    count = 0
    while not unused.is_lost and count < 40:
        states.use(used)
        states.leave(used)
        states.add(1, 5)
        count += 1
    assert 5 < count < 40
    assert not used.is_lost


def test_what_is_being_read_or_written_keeps_its_slot():
    states = StateSlots(0, 1)
    one = states.add(4, 4, maker=object())
    assert states.add(9, 1000) is None  # its maker has not written it
    states.drop(one)
    assert states.add(9, 1000) is None
    states.leave(one)
    other = states.add(9, 1000)
    assert other.slot == one.slot
    states.use(other)
    assert states.add(9, 10**6) is None
    states.leave(other)
    assert states.add(9, 10**6).slot == one.slot


def test_the_slot_of_a_sequence_becomes_a_snapshot_and_stays_its_own_otherwise():
    states = StateSlots(2, 1)
    first, second = states.take(), states.take()
    made = states.add(9, 9, slot=first, is_decoded=True)
    assert (made.slot, made.is_decoded) == (first, True)
    assert states.add(9, 1, slot=second) is None
    states.release(second)
    assert {states.take(), states.take()} == {second, 3}


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


COMMANDS = (
    *("add", "add", "admit", "admit", "launch", "launch"),
    *("read", "read", "grow", "grow", "preempt", "finish", "finish", "fail", "drop", "sweep"),
)


class Device:
    """What every slot of states holds: the tokens that it has seen, an object for what is bad."""

    def __init__(self):
        self.holds = {0: b""}

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


@given(data=st.data())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_each_snapshot_holds_what_it_is_found_by(data):
    """Requests at random: admitted, launched, read, preempted, finished or failed. The device works in this order."""
    sequences, count = 3, data.draw(st.integers(0, 5))
    states = StateSlots(sequences, count)
    scheduler = Scheduler(Pages(9, size=SIZE, states=states), sequences, BLOCK, LAYERS)
    pages, device, everyone = scheduler.pages, Device(), []
    for command in data.draw(st.lists(st.sampled_from(COMMANDS), min_size=60, max_size=90)):
        alive = [one for one in everyone if not one.end.is_finished]
        if command == "add":
            begin = data.draw(st.sampled_from([0, 0, 0, 50]))
            rest = data.draw(st.lists(st.integers(0, 1), max_size=9))
            length = data.draw(st.sampled_from([1, 5, 9, 12, 15, 18]))
            ids = np.array([*range(begin, begin + length), *(90 + one for one in rest)], np.int32)
            old = [one for one in alive if one.tokens]
            if old and data.draw(st.booleans()):  # the next turn of a dialogue
                one = data.draw(st.sampled_from(old))
                ids = np.concatenate([one.layout.token_ids, one.tokens, ids[:3]]).astype(np.int32)[:30]
            layout = make_layout(ids, [], [], 2, None)
            one = Answer(planned(layout, full_prefill(layout, LAYERS), owner="me"), data.draw(st.integers(1, 8)))
            if alive and data.draw(st.integers(0, 3)) == 0:  # another output of the same request
                one = Answer(data.draw(st.sampled_from(alive)).planned, one.new_slots)
            one.name = str(len(everyone))
            everyone += add(scheduler, one)
        elif command == "admit":
            scheduler.admit()
        elif command == "launch":
            ready = [one for one in scheduler.prefilling if not one.progress.block_table.is_lost]
            ready = ready[: data.draw(st.integers(0, 3))]
            while group := scheduler.next_group(ready):
                note_begun(group)
                for prefill in group:
                    device.launch(prefill)
                scheduler.launched(group)
        elif command == "read":
            for one in scheduler.decoding:
                table = one.progress.block_table
                if not table.is_lost and all(source.is_proven for source in table.sources):
                    pages.proven(table)
        elif command == "grow":
            for one in scheduler.decoding:
                if one.progress.block_table.is_proven and one.progress.scheduled < one.max_length:
                    new = scheduler.grow([one], data.draw(st.integers(1, 3)))
                    new = min(new, one.max_length - one.progress.scheduled)
                    if not new:
                        continue
                    if not one.tokens:
                        one.tokens = (70,)
                    scheduler.decoded([one], new)
                    one.tokens = (*one.tokens, *range(70 + len(one.tokens), 70 + len(one.tokens) + new))
                    seen = np.concatenate([one.layout.token_ids, one.tokens[:-1]]).astype(np.int32)
                    device.holds[one.progress.state_slot] = seen.tobytes()
                    if data.draw(st.booleans()):  # the answer ends before what was launched
                        one.tokens = one.tokens[:-1]
                        one.end.is_aborted = True
        elif command == "preempt" and len(scheduler.running) > 1:
            going = [one for one in scheduler.running if one.end.is_aborted]
            scheduler.preempt(going)
        elif command in ("finish", "fail") and alive:
            one = data.draw(st.sampled_from(alive))
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


def check(pages, states, scheduler, device, sequences, count):
    """Each slot has one owner, and what can be found and is proven holds the tokens of its path."""
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
            if snapshot.is_lost:
                continue
            reachable.add(snapshot)
            ids = np.frombuffer(before + piece.ids, ">u8").astype(np.int32).tobytes()
            assert len(ids) == 4 * snapshot.place
            if snapshot.maker is None:
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
    [second] = [one for one in tables[1].snapshots if one.place == 6]
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
