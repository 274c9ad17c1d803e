"""Order, decode slots and pages of sequences. Nothing is computed."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helper import planned
from vlcache_jax.cache.record import Meta, Record
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.engine.batching import prefill_steps
from vlcache_jax.engine.completions import Logprob
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.request import Generation, ImageUse, Sequence
from vlcache_jax.engine.scheduler import _LEAST_RUN, Scheduler, note_begun, order
from vlcache_jax.engine.scoring import ScoredSequence
from vlcache_jax.engine.snapshots import StateSlots
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.policies import full_prefill
from vlcache_jax.reuse.selection import CacheBlend, make_choice
from vlcache_jax.sampling import SamplingParams

LAYERS, SIZE = 3, 8  # tokens of a page
GRID = (1, 4, 4)  # of an image of four tokens


class Answer(Sequence):
    """A sequence that generates. Its `name` is for failures that can be read."""

    name: str
    tokens: tuple[int, ...] = ()

    @property
    def generated(self):
        return self.tokens

    def __repr__(self):
        return self.name


def answer(name, length, new_slots=1, *, images=(), first=0, **more):
    """`images`: state of each; they begin the prompt."""
    refs = [ImageRef(f"{name}{i}", GRID, 4, lambda: Patches(None, GRID)) for i in range(len(images))]
    ids = np.arange(first, first + length, dtype=np.int32)
    layout = make_layout(ids, [4 * i for i in range(len(images))], refs, 2, list(images) or None)
    one = Answer(planned(layout, full_prefill(layout, LAYERS), **more), new_slots)
    one.name = name
    return one


def again(sequence, name):
    """Another answer to the same request."""
    options = dataclasses.replace(sequence.planned.options, priority=0)
    one = Answer(dataclasses.replace(sequence.planned, options=options), sequence.new_slots)
    one.name = name
    return one


def fills(record, name, **options):
    """Its image is computed, and kept."""
    one = answer(name, 5, images=["miss"], **options)
    one.progress.images = [ImageUse(span, saved=record) for span in one.layout.images]
    return one


def links(record, name, **options):
    one = answer(name, 5, images=["exact"], **options)
    one.progress.images = [ImageUse(span, linked=record) for span in one.layout.images]
    return one


def tenant_of(sequence):
    return sequence.planned.options.tenant


def record_of(name):
    return Record(Meta(name, "", "c", True, GRID, 4, "float32", (LAYERS, 2, 4, 1, 8)))


def scheduler_of(pages=40, decode_slots=4, rows=1000):
    return Scheduler(Pages(pages, size=SIZE), decode_slots, rows, LAYERS)


def test_the_first_page_for_compressed_prompts_is_nobodys():
    counts = {0: 0, PAGE: 0, 2 * PAGE: 1, 9 * PAGE: 8}  # by slots
    assert {
        slots: Scheduler(Pages(4), 1, 8, LAYERS, compressed_slots=slots).compressed.count for slots in counts
    } == counts
    assert scheduler_of().compressed.count == 0


def add(scheduler, *sequences):
    for one in sequences:
        scheduler.add(one)
    return sequences


def launch(scheduler, *sequences):
    """All that these compute."""
    while group := scheduler.next_group(sequences):
        scheduler.launched(group)


def nothing_is_left(scheduler, decode_slots=4):
    assert not scheduler.waiting + scheduler.running
    assert scheduler.pages.stats().in_use == 0
    assert sorted(scheduler._decode_slots) == list(range(decode_slots))
    assert not scheduler._fillers


def finish(scheduler, *sequences, failed=False):
    for one in sequences:
        scheduler.finish(one, failed=failed)


def test_the_order_is_that_of_priority_then_of_arrival():
    scheduler = scheduler_of(decode_slots=2)
    a, b, c, d, e = add(scheduler, *(answer(n, 5, priority=p) for n, p in zip("abcde", (1, 0, 1, -1, 0), strict=True)))
    assert scheduler.waiting == [d, b, e, a, c]
    assert scheduler.admit() == scheduler.prefilling == [d, b]
    assert scheduler.admit() == []  # no decode slot
    finish(scheduler, b)
    [f] = add(scheduler, answer("f", 5, priority=-2))
    assert scheduler.admit() == [f]  # it came last, and overtook
    finish(scheduler, d, f)
    assert scheduler.admit() == [e, a]
    finish(scheduler, c)  # before it ran
    finish(scheduler, e, a)
    nothing_is_left(scheduler, 2)


def named(tenant, count, **options):
    """So many requests of one tenant, "a0", "a1", ... of "alice"."""
    return [answer(f"{(tenant or '-')[0]}{i}", 5, tenant=tenant, **options) for i in range(count)]


def admitted_in_turn(scheduler, ends=()):
    """Names of those that have decode slots, one after the other; each time that there is none, the next of `ends`
    ends."""
    names, ends = [], list(ends)
    while True:
        names += map(repr, scheduler.admit())
        if not ends:
            return names
        wanted = ends.pop(0)
        finish(scheduler, next(one for one in scheduler.running if one.name == wanted))


def test_tenants_take_turns():
    scheduler = scheduler_of(decode_slots=3)
    add(scheduler, *named("alice", 6), *named("bob", 3), *named("carl", 2))
    assert admitted_in_turn(scheduler) == ["a0", "b0", "c0"]
    # The tenant without a decode slot comes first, of equals the one whose last decode slot was given longest ago.
    assert admitted_in_turn(scheduler, ["a0", "a1", "c0", "b0", "c1"]) == ["a1", "a2", "c1", "b1", "a3"]
    assert admitted_in_turn(scheduler, ["b1", "b2", "a3", "a2"]) == ["b2", "a4", "a5"]
    add(scheduler, *named("bob", 1), *named("dora", 2))
    assert admitted_in_turn(scheduler, ["a4", "d0"]) == ["d0", "b0", "d1"]
    finish(scheduler, *scheduler.running, *scheduler.waiting)
    nothing_is_left(scheduler, 3)


def test_a_tenant_that_floods_does_not_hold_up_another():
    scheduler = scheduler_of(pages=60, decode_slots=8)
    add(scheduler, *named("alice", 100, priority=-(2**62)))
    assert admitted_in_turn(scheduler) == [f"a{i}" for i in range(8)]
    add(scheduler, *named("bob", 1))
    assert admitted_in_turn(scheduler, ["a3"]) == ["b0"]
    finish(scheduler, *scheduler.running, *scheduler.waiting)
    nothing_is_left(scheduler, 8)


def test_without_tenants_the_order_is_that_of_arrival():
    scheduler = scheduler_of(decode_slots=2)
    add(scheduler, *named(None, 5))
    assert admitted_in_turn(scheduler, ["-1", "-0", "-2"]) == ["-0", "-1", "-2", "-3", "-4"]
    finish(scheduler, *scheduler.running)
    nothing_is_left(scheduler, 2)


PRIORITIES = {  # tenants whose priorities count beside those of others -> who has decode slots, one after the other
    (): ["-1", "a2", "b0", "a1", "b1", "a0", "-0"],
    ("alice",): ["a2", "-1", "a1", "b0", "b1", "a0", "-0"],
    ("alice", "bob"): ["a2", "-1", "a1", "b0", "b1", "a0", "-0"],
}


@pytest.mark.parametrize("ranked", PRIORITIES)
def test_priority_orders_the_requests_of_one_tenant(ranked):
    """Those of others only where it may; callers without a tenant may."""
    scheduler = scheduler_of(decode_slots=1)
    scheduler.tenant_order.rank(ranked)
    for tenant, priorities in (("alice", (7, -2, -9)), ("bob", (0, 5)), (None, (9, -3))):
        for one, priority in zip(named(tenant, len(priorities)), priorities, strict=True):
            one.progress.priority = priority
            add(scheduler, one)
    names = []
    while scheduler.waiting:
        names += map(repr, scheduler.admit())
        finish(scheduler, *scheduler.running)
    assert names == PRIORITIES[ranked]
    nothing_is_left(scheduler, 1)


def test_what_an_operator_keeps_for_all_is_filled_first():
    """Also where it is the turn of the tenant that links it; else all decode slots may wait for it."""
    scheduler, record = scheduler_of(decode_slots=1), record_of("shared")
    [running] = add(scheduler, answer("running", 5))
    scheduler.admit()
    _, other = add(scheduler, fills(record, "filler"), answer("other", 5))
    _, last = add(scheduler, links(record, "linker", tenant="alice"), answer("last", 5, tenant="alice"))
    finish(scheduler, running)
    assert admitted_in_turn(scheduler, ["filler", "linker"]) == ["filler", "linker", "other"]
    finish(scheduler, other, last)
    nothing_is_left(scheduler, 1)


def test_the_tenant_that_has_most_is_preempted():
    scheduler = scheduler_of(decode_slots=6)
    scheduler.tenant_order.rank(["carl"])
    urgent = answer("urgent", 5, tenant="alice", priority=-(2**62))
    record = record_of("shared")
    everyone = add(scheduler, *named("bob", 2), fills(record, "filler"), urgent, *named("alice", 1))
    scheduler.admit()
    b0, b1, filler, _, a0 = everyone
    assert scheduler.preempt([])
    assert scheduler.waiting == [a0]  # as many of each are before it, but it came last
    assert scheduler.preempt([])
    assert scheduler.waiting == [b1, a0]
    [linker] = add(scheduler, links(record, "linker", tenant="bob", priority=-1))
    finish(scheduler, a0, b1)
    scheduler.admit()
    filler.progress.priority = 1  # which counts beside others' where there is no tenant
    assert scheduler.preempt([b0, urgent])
    assert scheduler.waiting == [linker]  # not what it waits for
    [late] = add(scheduler, answer("late", 5, tenant="carl", priority=1))
    scheduler.admit()
    assert scheduler.preempt([])
    assert late in scheduler.waiting
    finish(scheduler, *scheduler.running, *scheduler.waiting)
    nothing_is_left(scheduler, 6)


def test_who_is_put_back_keeps_its_place():
    scheduler = scheduler_of(decode_slots=2)
    a, b, c = add(scheduler, answer("a", 5), answer("b", 5), answer("c", 5))
    scheduler.admit()
    launch(scheduler, a, b)
    assert (b.progress.prefilled, b.progress.scheduled, b.progress.attempt) == (1, 6, 0)
    scheduler.requeue(b)
    assert (b.progress.prefilled, b.progress.scheduled, b.progress.attempt, b.progress.block_table) == (0, 0, 1, None)
    assert scheduler.waiting == [b, c]
    scheduler.requeue(a, failed=True)
    assert scheduler.waiting == [a, b, c]
    assert scheduler.pages.stats().preemptions == 0  # not for want of pages
    finish(scheduler, a, b, c)
    nothing_is_left(scheduler, 2)


def test_who_is_put_back_is_scored_from_its_beginning():
    """The scores of the first attempt are forgotten, also those of a prompt whose answer has not begun."""
    scheduler, whole = scheduler_of(), answer("whole", 5)
    scored = ScoredSequence(whole.planned, 0, keep_logits=True)
    generation = Generation(
        whole.planned, 4, params=SamplingParams(), seed=0, end_tokens=frozenset(), bad_words=(), detokenizer=None
    )
    add(scheduler, scored, generation)
    scheduler.admit()
    scored.append(np.float32(-1), np.bool_(True), np.zeros(3, np.float32))
    generation.prompt_logprobs.append(Logprob(-1.0, {}, 7, 1))
    for one in (scored, generation):
        scheduler.requeue(one)
    assert [len(one) for one in (scored.logprobs, scored.greedy, scored.logits, generation.prompt_logprobs)] == [0] * 4
    finish(scheduler, scored, generation)
    nothing_is_left(scheduler)


def test_nobody_overtakes_who_lacks_pages():
    scheduler = scheduler_of(pages=5)
    a, b, c = add(scheduler, answer("a", 17, 0), answer("b", 24, 0), answer("c", 5, 0))
    assert scheduler.admit() == [a]
    assert scheduler.waiting == [b, c]
    finish(scheduler, a)
    assert scheduler.admit() == [b, c]
    finish(scheduler, b, c)
    nothing_is_left(scheduler)


def test_a_page_is_left_to_each_that_may_grow():
    scheduler = scheduler_of(pages=4)
    a, b, c = add(scheduler, answer("a", 8, 8), answer("b", 4, 4), answer("c", 8, 0))
    assert scheduler.admit() == [a, b, c]
    finish(scheduler, c)
    [d] = add(scheduler, answer("d", 16, 0))
    assert scheduler.admit() == []  # the last but one is for the first
    assert scheduler.pages.grow([a.progress.block_table], [16])
    finish(scheduler, b)
    assert scheduler.admit() == [d]
    finish(scheduler, a, d)
    nothing_is_left(scheduler)


def test_what_fits_nowhere_is_said():
    scheduler = scheduler_of(pages=3)
    [a] = add(scheduler, answer("a", 25))
    with pytest.raises(RuntimeError, match="the KV pool is too small for a prompt of 25 tokens"):
        scheduler.admit()
    assert scheduler.waiting == [a]
    finish(scheduler, a)
    nothing_is_left(scheduler)


def test_a_filler_inherits_the_priority_of_who_links_its_record():
    """And whoever fills what the filler links."""
    scheduler = scheduler_of()
    one, two, other = record_of("one"), record_of("two"), record_of("other")
    x, first = add(scheduler, answer("x", 5, priority=1), fills(one, "first", priority=3))
    second = links(one, "second", priority=3)
    second.progress.images = [*second.progress.images, *fills(two, "also second").progress.images]
    _, y, z = add(scheduler, second, fills(other, "y", priority=2), answer("z", 5, priority=3))
    assert scheduler.waiting == [x, y, first, second, z]
    [urgent] = add(scheduler, links(two, "urgent", priority=0))
    assert [one.progress.priority for one in (first, second, y)] == [0, 0, 2]
    assert scheduler.waiting == [first, second, urgent, x, y, z]
    add(scheduler, late := links(other, "late", priority=5))
    assert (y.progress.priority, late.progress.priority) == (2, 5)  # nobody is hurried by who can wait
    assert scheduler.waiting == [first, second, urgent, x, y, z, late]
    finish(scheduler, *scheduler.waiting)
    nothing_is_left(scheduler)


def test_a_filler_that_ended_is_hurried_no_more():
    scheduler = scheduler_of()
    record = record_of("one")
    [first] = add(scheduler, fills(record, "first", priority=3))
    finish(scheduler, first, failed=True)
    [urgent] = add(scheduler, links(record, "urgent", priority=0))
    assert (scheduler.waiting, first.progress.priority) == ([urgent], 3)
    finish(scheduler, urgent)
    nothing_is_left(scheduler)


def test_lanes_are_distinct_and_come_back():
    scheduler = scheduler_of(decode_slots=3)
    a, b, c, d, e = add(scheduler, *(answer(name, 5) for name in "abcde"))
    assert [one.progress.decode_slot for one in scheduler.admit()] == [0, 1, 2]
    finish(scheduler, b)
    finish(scheduler, b)  # gives back nothing that it has not
    assert scheduler.admit() == [d]
    assert d.progress.decode_slot == 1
    scheduler.requeue(c)
    finish(scheduler, a)
    assert scheduler.admit() == [c, e]
    assert {one.progress.decode_slot for one in scheduler.running} == {0, 1, 2}
    finish(scheduler, c, d, e)
    nothing_is_left(scheduler, 3)


def test_answers_to_one_request_fork_the_first():
    scheduler = scheduler_of()
    a, other = answer("a", 20, owner="me"), answer("other", 20, owner="me", first=50)
    b, c = again(a, "b"), again(a, "c")
    add(scheduler, a, b, other, c)
    assert scheduler.admit() == [a, b, other, c]
    assert [one.progress.block_table.is_fork for one in (a, b, other, c)] == [False, True, False, True]
    assert [one.progress.block_table.sources for one in (a, b, other, c)] == [
        [],
        [a.progress.block_table],
        [],
        [a.progress.block_table],
    ]
    assert [prefill.sequence for prefill in scheduler.next_group([a, b, other, c])] == [a, other]
    launch(scheduler, a)
    [fork] = scheduler.prefills(b)
    assert np.flatnonzero(fork.plan.depth).tolist() == [19]
    assert [prefill.sequence for prefill in scheduler.next_group([a, b, other, c])] == [b, other, c]
    scheduler.pages.proven(a.progress.block_table)
    launch(scheduler, b)
    late = again(a, "late")
    finish(scheduler, other)
    add(scheduler, late)
    assert scheduler.admit() == [late]  # of one that runs already
    assert (late.progress.block_table.is_fork, late.progress.block_table.sources) == (True, [])
    finish(scheduler, a, b, c, late)
    nothing_is_left(scheduler)


def test_a_turn_takes_those_that_are_ready_up_to_the_rows_of_a_step():
    scheduler = scheduler_of(rows=20)
    a, b, c, d = add(scheduler, *(answer(name, 9, 0, first=20 * i) for i, name in enumerate("abcd")))
    scheduler.admit()

    def group(*ready):
        return [prefill.sequence for prefill in scheduler.next_group(ready)]

    assert group(a, b, c, d) == [a, b, c]
    assert group(d, b) == [b, d]  # others go first, in their order
    assert group() == []
    scheduler.launched(scheduler.next_group([b]))
    assert (scheduler.prefilling, scheduler.decoding) == ([a, c, d], [b])
    assert b.progress.block_table.is_computed
    assert not b.progress.block_table.is_proven
    assert group(a, b, c, d) == [a, c, d]
    finish(scheduler, a, b, c, d)
    nothing_is_left(scheduler)


def test_who_counts_on_pages_waits_for_them():
    scheduler = scheduler_of()
    a, b, c = add(
        scheduler, answer("a", 20, owner="me"), answer("b", 25, owner="me"), answer("c", 20, owner="me", first=50)
    )
    scheduler.admit()
    assert b.progress.block_table.sources == [a.progress.block_table]
    assert [prefill.sequence for prefill in scheduler.next_group([a, b, c])] == [a, c]
    launch(scheduler, a)
    assert [prefill.sequence for prefill in scheduler.next_group([b, c])] == [b, c]
    finish(scheduler, a)  # unread
    assert b.progress.block_table.is_lost
    scheduler.requeue(b, failed=True)
    assert scheduler.admit() == [b]
    assert (b.progress.block_table.cached, b.progress.block_table.sources, b.progress.attempt) == (0, [], 1)
    finish(scheduler, b, c)
    nothing_is_left(scheduler)


def test_who_chooses_rows_has_a_turn_of_its_own():
    scheduler = scheduler_of()
    layout, policy = answer("chooser", 12, images=["approximate"]).layout, CacheBlend(Fraction(1, 2), "proto")
    chooser = Answer(planned(layout, policy.plan(layout, LAYERS), choice=make_choice(policy, layout, LAYERS)), 4)
    chooser.name = "chooser"
    assert chooser.planned.choice is not None
    a, _, b = add(scheduler, answer("a", 9), chooser, answer("b", 9, first=30))
    scheduler.admit()

    def group():
        return [prefill.sequence for prefill in scheduler.next_group([a, b, chooser])]

    assert group() == [a]
    launch(scheduler, a)
    assert group() == [chooser]
    # Put back with an answer, it computes that after its prompt, on its own as before.
    scheduler.requeue(chooser)
    chooser.tokens = (1, 2)
    scheduler.admit()
    assert group() == [b]
    launch(scheduler, b)
    [first] = scheduler.next_group([chooser])
    scheduler.launched([first])
    assert first.choice is chooser.planned.choice
    assert (chooser.progress.prefilled, chooser.progress.block_table.is_computed) == (1, False)
    assert chooser in scheduler.prefilling
    [second] = scheduler.next_group([chooser])
    scheduler.launched([second])
    assert (second.choice, second.links, np.flatnonzero(second.plan.depth).tolist()) == (None, False, [12, 13])
    assert chooser.progress.block_table.is_computed
    assert chooser in scheduler.decoding
    finish(scheduler, a, b, chooser)
    nothing_is_left(scheduler)


def test_an_answer_grows_by_fewer_tokens_where_pages_are_short():
    scheduler = scheduler_of(pages=4)
    a, b = add(scheduler, answer("a", 6, 26), answer("b", 7, 17))
    scheduler.admit()
    launch(scheduler, a, b)
    assert (a.progress.scheduled, b.progress.scheduled) == (7, 8)
    # The last token of a window needs no slot in it.
    assert scheduler.grow([a, b], 2) == 2
    assert [len(one.progress.block_table.table) for one in (a, b)] == [1, 2]
    for one in (a, b):
        one.progress.scheduled += 2
    for tokens in (4, 2, 1):
        assert scheduler.grow([a, b], 32) == tokens
        assert scheduler.pages.stats().in_use == 4
        for one in (a, b):
            one.progress.scheduled += tokens
    assert (a.progress.scheduled, b.progress.scheduled) == (16, 17)
    assert scheduler.grow([a], 8) == 1
    assert scheduler.grow([b], 8) == 0
    assert scheduler.grow([a, b], 8) == 0
    assert scheduler.pages.stats().in_use == 4
    finish(scheduler, a)
    assert scheduler.grow([b], 8) == 8
    assert scheduler.grow([], 8) == 8
    finish(scheduler, b)
    nothing_is_left(scheduler)


@pytest.mark.parametrize(
    ("pages", "count", "computed"),
    [
        (40, _LEAST_RUN - 1, 0),
        (40, _LEAST_RUN, _LEAST_RUN),
        (2, 4 * _LEAST_RUN - 4, 0),  # The pages hold a quarter of the tokens.
        (2, 4 * _LEAST_RUN, _LEAST_RUN),
    ],
)
def test_forced_tokens_are_computed_together_if_they_are_enough(pages, count, computed):
    scheduler = scheduler_of(pages=pages)
    [a] = add(scheduler, answer("a", 11, 30))
    scheduler.admit()
    launch(scheduler, a)  # The first forced token is launched, and not read.
    a.forced = tuple(range(20, 20 + count))
    runs = scheduler.runs([a])
    assert [run.layout.token_ids[len(a.layout) :].tolist() for run in runs] == [list(a.forced[:computed])] * len(runs)
    assert len(runs) == bool(computed)
    assert a.progress.scheduled == 12 + computed
    finish(scheduler, a)
    nothing_is_left(scheduler)


def test_an_answer_grows_no_further_than_it_may():
    scheduler = scheduler_of(pages=2)
    [a] = add(scheduler, answer("a", 6, 11))  # the last of 17 tokens has no slot
    scheduler.admit()
    launch(scheduler, a)
    assert scheduler.grow([a], 100) == 100
    assert scheduler.pages.stats().in_use == 2
    finish(scheduler, a)
    nothing_is_left(scheduler)


def test_the_last_in_order_is_preempted():
    scheduler = scheduler_of()
    a, b, c, d = add(scheduler, *(answer(n, 5, priority=p) for n, p in zip("abcd", (2, 0, 2, 1), strict=True)))
    scheduler.admit()
    launch(scheduler, a, b)
    for expected in (c, a, d):  # whether it decodes already, or not
        assert scheduler.preempt([])
        assert expected in scheduler.waiting
        assert expected not in scheduler.running
        assert (expected.progress.block_table, expected.progress.attempt, expected.progress.scheduled) == (None, 1, 0)
    with pytest.raises(RuntimeError, match="too small for 5 tokens"):
        scheduler.preempt([])
    assert scheduler.running == [b]
    assert scheduler.waiting == [d, a, c]
    assert scheduler.pages.stats().preemptions == 3
    finish(scheduler, a, b, c, d)
    nothing_is_left(scheduler)


def test_who_is_busy_is_not_preempted():
    scheduler = scheduler_of()
    a, b, c = add(scheduler, *(answer(name, 5) for name in "abc"))
    scheduler.admit()
    launch(scheduler, a)
    assert scheduler.preempt([c])
    assert scheduler.waiting == [b]
    assert scheduler.preempt([c])
    assert scheduler.waiting == [a, b]
    with pytest.raises(RuntimeError):  # the only one
        scheduler.preempt([c])
    scheduler.admit()
    assert not scheduler.preempt([a, b, c])
    assert {*scheduler.running} == {a, b, c}
    assert scheduler.pages.stats().preemptions == 2
    finish(scheduler, a, b, c)
    nothing_is_left(scheduler)


def test_what_an_answer_leaves_is_found_if_it_was_proven():
    for is_proven in (False, True):
        scheduler = scheduler_of()
        [a] = add(scheduler, answer("a", 20, 9, owner="me"))
        scheduler.admit()
        launch(scheduler, a)
        if is_proven:
            scheduler.pages.proven(a.progress.block_table)
        assert scheduler.grow([a], 4) == 4
        a.tokens = (20, 21, 22, 23)
        scheduler.requeue(a)
        [b] = add(scheduler, answer("b", 26, owner="me"))
        assert scheduler.admit() == [a, b]
        assert a.progress.block_table.cached == (23 if is_proven else 0)  # of the last token there is nothing yet
        finish(scheduler, a, failed=True)
        finish(scheduler, b)
        nothing_is_left(scheduler)


def test_the_last_token_of_an_answer_is_not_found():
    scheduler = scheduler_of()
    [a] = add(scheduler, answer("a", 20, 4, owner="me"))
    scheduler.admit()
    launch(scheduler, a)
    scheduler.pages.proven(a.progress.block_table)
    assert scheduler.grow([a], 4) == 4
    a.tokens = (20, 21, 22, 23)
    finish(scheduler, a)
    [b] = add(scheduler, answer("b", 30, owner="me"))
    scheduler.admit()
    assert b.progress.block_table.cached == 23  # its K, V were never computed
    finish(scheduler, b)
    nothing_is_left(scheduler)


def test_a_fork_of_a_resumed_answer_receives_its_states():
    """The first answer was preempted after two tokens; the second one of its request begins with it."""
    scheduler = Scheduler(Pages(40, states=StateSlots(2, 4)), 2, 1000, LAYERS)
    a = answer("a", 10, new_slots=8)
    b = again(a, "b")
    a.tokens = (5, 6)
    add(scheduler, a, b)
    assert scheduler.admit() == [a, b]
    assert b.progress.block_table.is_fork
    buckets = BucketSizes(rows=(64,), patches=(64,), sequences=(2,))
    [step] = prefill_steps(scheduler.next_group([a]), buckets, 50 * PAGE, LAYERS, has_states=True)
    own, fork = (one.progress.state_slot for one in (a, b))
    runs = step.runs
    blocks = list(zip(*(field.tolist() for field in runs[1:5]), strict=True))
    assert blocks == [(0, 9, 0, own), (9, 0, own, fork), (9, 1, own, own), (10, 1, own, own), (11, 1, own, own)]


def test_an_answer_that_comes_after_its_request_has_begun_computes_the_prompt():
    scheduler = Scheduler(Pages(40, states=StateSlots(2, 4)), 2, 1000, LAYERS)
    a = answer("a", 10, new_slots=8)
    b = again(a, "b")
    add(scheduler, a)
    assert scheduler.admit() == [a]
    note_begun(scheduler.next_group([a]))
    add(scheduler, b)
    assert scheduler.admit() == [b]
    assert (b.progress.block_table.is_fork, b.progress.block_table.cached) == (False, 0)


def test_an_answer_whose_sibling_goes_on_behind_the_prompt_is_no_fork_of_it():
    """The sibling was preempted, and goes on from its own states behind tokens that this answer does not have."""
    scheduler = Scheduler(Pages(40, size=SIZE, states=StateSlots(2, 4)), 1, 1000, LAYERS)
    a = answer("a", 10, new_slots=8, owner="me")
    b = again(a, "b")
    add(scheduler, a)
    assert scheduler.admit() == [a]
    launch(scheduler, a)
    scheduler.pages.proven(a.progress.block_table)
    assert scheduler.grow([a], 3) == 3
    scheduler.decoded([a], 3)
    a.tokens = (5, 6, 7, 8)
    scheduler.requeue(a)
    add(scheduler, b)
    scheduler._decode_slots.append(1)
    assert scheduler.admit() == [a, b]
    assert [one.progress.block_table.cached for one in (a, b)] == [13, 9]
    assert not b.progress.block_table.is_fork
    assert b.progress.block_table.resumed.place == 9


@pytest.mark.parametrize("is_proven", [False, True])
def test_what_a_fork_leaves_is_found_if_it_was_proven(is_proven):
    scheduler = scheduler_of()
    a = answer("a", 20, 9, owner="me")
    b = again(a, "b")
    add(scheduler, a, b)
    scheduler.admit()
    for one in (a, b):
        launch(scheduler, one)
    scheduler.pages.proven(a.progress.block_table)
    if is_proven:
        scheduler.pages.proven(b.progress.block_table)
    assert scheduler.grow([b], 9) == 9
    b.tokens = tuple(range(20, 29))
    finish(scheduler, b)
    [c] = add(scheduler, answer("c", 30, owner="me"))
    scheduler.admit()
    assert c.progress.block_table.cached == (28 if is_proven else 20)
    finish(scheduler, a, c)
    nothing_is_left(scheduler)


COMMANDS = ("add", "admit", "launch", "read", "grow", "preempt", "finish", "fail", "sweep")


@pytest.mark.parametrize("tenants", [(None,), (None, "alice", "bob")])
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_nothing_leaks_whatever_happens(tenants, data):
    decode_slots = 3
    scheduler = scheduler_of(pages=8, decode_slots=decode_slots)
    scheduler.tenant_order.rank(["bob"])
    count = 0
    everyone = []
    for command in data.draw(st.lists(st.sampled_from(COMMANDS), min_size=20, max_size=60)):
        running = scheduler.running
        if command == "add":
            length, first, priority = (data.draw(st.integers(*limits)) for limits in ((1, 24), (0, 1), (-1, 1)))
            count += 1
            options = {"first": first, "priority": priority, "tenant": data.draw(st.sampled_from(tenants))}
            one = answer(str(count), length, data.draw(st.integers(0, 20)), owner=options["tenant"] or "me", **options)
            same = [other for other in everyone if other.layout is not None and not other.end.is_finished]
            if same and data.draw(st.booleans()):
                one = again(data.draw(st.sampled_from(same)), str(count))
            everyone += add(scheduler, one)
        elif command == "admit":
            before = list(scheduler.waiting)
            admitted = scheduler.admit()
            for tenant in tenants:
                own, gone = ([one for one in group if tenant_of(one) == tenant] for group in (before, admitted))
                assert gone == own[: len(gone)]
        elif command == "launch":
            launch(scheduler, *(one for one in scheduler.prefilling if not one.progress.block_table.is_lost))
        elif command == "read":
            for one in scheduler.decoding:
                if not one.progress.block_table.is_lost and all(
                    source.is_proven for source in one.progress.block_table.sources
                ):
                    scheduler.pages.proven(one.progress.block_table)
        elif command == "grow" and (
            active := [one for one in scheduler.decoding if one.progress.scheduled < one.max_length]
        ):
            before = scheduler.pages.stats()
            tokens = scheduler.grow(active, data.draw(st.integers(1, 20)))
            for one in active if tokens else ():
                new = min(tokens, one.max_length - one.progress.scheduled)
                one.progress.scheduled += new
                one.tokens = (*one.tokens, *range(new))
                assert len(one.progress.block_table.table) * SIZE >= min(one.progress.scheduled - 1, one.max_length - 1)
        elif command == "preempt" and len(running) > 1:
            busy = data.draw(st.lists(st.sampled_from(running), unique=True))
            others = [one for one in running if one not in busy]
            is_last = [
                one
                for one in others
                if not any(order(one) < order(other) for other in others if tenant_of(other) == tenant_of(one))
            ]
            assert scheduler.preempt(busy) is bool(others)
            gone = [one for one in is_last if one in scheduler.waiting]
            assert len(gone) == bool(others)
            assert all(one.progress.block_table is None for one in gone)
        elif command in ("finish", "fail") and (alive := [one for one in everyone if not one.end.is_finished]):
            one = data.draw(st.sampled_from(alive))
            one.end.is_finished = True
            finish(scheduler, one, failed=command == "fail")
        elif command == "sweep":
            for one in running:
                if one.progress.block_table is not None and one.progress.block_table.is_lost:
                    scheduler.requeue(one, failed=True)
        running = scheduler.running
        assert scheduler.waiting == sorted(
            scheduler.waiting, key=lambda one: (one.progress.priority, one.progress.arrived)
        )
        assert sorted(running + scheduler.waiting, key=id) == sorted(
            (one for one in everyone if not one.end.is_finished), key=id
        )
        assert sorted([*scheduler._decode_slots, *(one.progress.decode_slot for one in running)]) == list(
            range(decode_slots)
        )
        assert all(one.progress.block_table is not None for one in running)
        assert all(one.progress.block_table is None for one in scheduler.waiting)
        # A page to be copied counts, too, until it has been.
        used = {int(page) for one in running for page in one.progress.block_table.table}
        used |= {
            one.progress.block_table.copy[0]
            for one in running
            if one.progress.block_table.copy and not one.progress.block_table.is_computed
        }
        assert scheduler.pages.stats().in_use == len(used)
    finish(scheduler, *scheduler.running, *scheduler.waiting)
    nothing_is_left(scheduler, decode_slots)
