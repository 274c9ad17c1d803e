import dataclasses
import functools
import types

import numpy as np
import pytest

from tests.helper import planned
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.engine.batching import Prefill, encoder_calls, prefill_steps
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.pallas_kernels import PAGE, WorkConfig, shared_prefixes
from vlcache_jax.pallas_kernels.attention.work import BOX0, FROM, INNER_TO, TO
from vlcache_jax.reuse.policies import Plan, first_tokens, full_prefill

LAYERS, SLOTS = 3, 6 * PAGE  # of the pool
CONFIG = functools.partial(WorkConfig, requests=4, pages=5)
BUCKETS = BucketSizes(rows=(8, 16, 32), patches=(16, 64), sequences=(1, 4))


def image(h, w):
    grid = (1, 2 * h, 2 * w)
    return ImageRef("", grid, h * w, lambda: Patches(np.zeros((4 * h * w, 3, 4), np.uint8), grid))


def sequence(*parts, new_slots=5, wanted=None):
    """Numbers are text tokens, pairs the merged grid of an image."""
    images, starts, count = [], [], 0
    for part in parts:
        if isinstance(part, tuple):
            images.append(image(*part))
            starts.append(count)
        count += part[0] * part[1] if isinstance(part, tuple) else part
    layout = make_layout(np.arange(100, 100 + count, dtype=np.int32), starts, images, 2)
    return Sequence(planned(layout, full_prefill(layout, LAYERS, wanted)), new_slots)


def prefills(sequences, slots=SLOTS):
    """What sequences compute that are admitted together; every other page is in use, so that tables have gaps."""
    pages = Pages(slots // PAGE - 1)
    taken = [pages.take(PAGE) for _ in range(slots // PAGE - 1)]
    for block_table in taken[::2]:
        pages.end(block_table)
    scheduler = Scheduler(pages, len(sequences), 1 << 20, LAYERS)
    for one in sequences:
        scheduler.add(one)
    assert scheduler.admit() == sequences
    group = scheduler.next_group(sequences)
    assert [prefill.sequence for prefill in group] == sequences
    return group


def slots_of(prefill):
    return prefill.slots(prefill.plan.slots).tolist()


@pytest.fixture
def wave():
    return prefills([sequence(3, (2, 3), 4), sequence(11), sequence((1, 4), 1, (5, 6), 2), sequence(2)], 2 * SLOTS)


def test_every_row_is_computed_once_and_knows_its_place(wave):
    num_slots = 2 * SLOTS
    steps = prefill_steps(wave, BUCKETS, num_slots, LAYERS)
    assert len(steps) > 1
    expected = {}
    for number, prefill in enumerate(wave):
        layout = prefill.layout
        for i, (slot, token) in enumerate(zip(slots_of(prefill), layout.token_ids, strict=True)):
            expected[slot] = (number, i, token, tuple(layout.positions[:, i]))
    seen = []
    for step in steps:
        rows = step.rows
        size = len(rows.slot)
        assert step.bounds == (size,) * LAYERS + (min(size, 4),)
        assert step.active == (int(np.count_nonzero(rows.slot < num_slots)),) * LAYERS
        assert size in BUCKETS.rows
        sources = {
            int(row): (p.image, int(i)) for p in step.placements for row, i in zip(p.place, p.image_row, strict=True)
        }
        assert sorted(sources) == list(range(len(sources)))
        live = rows.slot < num_slots
        for i in np.flatnonzero(live):
            number, index, token, position = expected[int(rows.slot[i])]
            assert step.request[i] == number
            assert step.tables[number] is wave[number].table
            assert (rows.k_start[i], rows.k_end[i]) == (0, index + 1)
            assert tuple(rows.position[:, i]) == position
            span = next(s for s in wave[number].layout.spans if s.start <= index < s.start + s.length)
            if span.image is None:
                assert rows.source[i] == token
            else:
                assert sources[-1 - int(rows.source[i])] == (span.image, index - span.start)
            seen.append((number, index))
        dead = ~live
        assert (rows.slot[dead] == num_slots + np.flatnonzero(dead)).all()
        assert not rows.k_end[dead].any()
        assert not rows.source[dead].any()
    # Steps go in the order of prompts and tokens, so a row sees what came before.
    assert len(seen) == len(expected)
    per_step = iter(seen)
    last = (-1, -1)
    for step in steps:
        mine = [next(per_step) for _ in range(step.active[0])]
        assert min(mine) > last
        last = max(mine)


def test_wanted_rows_come_first(wave):
    wanted = []
    for step in prefill_steps(wave, BUCKETS, SLOTS, LAYERS):
        for row, (sequence, index) in enumerate(step.wanted):
            prefill = next(prefill for prefill in wave if prefill.sequence is sequence)
            assert step.rows.slot[row] == slots_of(prefill)[index]
            wanted.append(sequence)
            assert index == len(sequence.layout) - 1
    assert wanted == [prefill.sequence for prefill in wave]


@pytest.mark.parametrize(("wanted", "outputs"), [(29, (22, 7)), (12, (5, 7)), (11, (4, 7)), (4, (0, 4))])
def test_more_logits_than_the_head_holds_cut_nothing(wanted, outputs):
    """The steps are those of the rows; where the head takes slices, all rows of the last layer leave it."""
    one = sequence(40, wanted=range(39 - wanted, 39))
    steps = prefill_steps(prefills([one]), BUCKETS, SLOTS, LAYERS)
    assert [int((step.rows.slot < SLOTS).sum()) for step in steps] == [32, 8]
    assert tuple(len(step.wanted) for step in steps) == outputs
    assert [index for step in steps for _, index in step.wanted] == list(range(39 - wanted, 39))
    for step, size in zip(steps, (32, 8), strict=True):
        assert step.bounds == (size,) * LAYERS + (4 if len(step.wanted) <= 4 else size,)
        [page] = {int(slot) // PAGE for slot in step.rows.slot}
        assert [page * PAGE + index for _, index in step.wanted] == step.rows.slot[: len(step.wanted)].tolist()


def test_the_head_takes_slices_of_the_rows_that_are_left():
    """Rows that drop out before the last layer do not leave it, however many logits are wanted."""
    one = sequence(30)
    depth = np.ones(30, np.int16)
    depth[20:] = LAYERS + 1
    one.progress.plan = Plan(depth)
    [step] = prefill_steps(prefills([one]), BUCKETS, SLOTS, LAYERS)
    assert step.active == (30, 10, 10)
    assert step.bounds == (32, 16, 16, 16)
    assert [index for _, index in step.wanted] == list(range(20, 30))


def test_shared_pages_are_not_written():
    one = sequence(2 * PAGE, new_slots=5)
    prefill = Prefill(one, one.layout, one.progress.plan.after(2 * PAGE - 1), np.array([3, 5]), shared=2)
    [step] = prefill_steps([prefill], BUCKETS, SLOTS, LAYERS)
    assert step.rows.slot.tolist() == [SLOTS + i for i in range(8)]
    assert step.rows.k_end.tolist() == [2 * PAGE] + [0] * 7  # and yet it sees its own slot
    assert step.active == (1,) * LAYERS


def test_prefixes_that_tables_share():
    tables = [[1, 2, 3, 9], [1, 2, 3, 8, 7], [1, 2, 4], [5, 6], [1, 2, 3, 8, 6], [7], [6, 5]]
    found = shared_prefixes([np.array(table) for table in tables])
    assert {(tuple(members), pages) for members, pages in found} == {((0, 1, 2, 4), 2), ((0, 1, 4), 3), ((1, 4), 4)}
    assert shared_prefixes([]) == shared_prefixes([np.array([1])]) == []


def test_an_image_of_two_answers_is_encoded_once():
    first = sequence(2, (2, 2), 1)
    second = Sequence(first.planned, 5)
    both = [Prefill(one, one.layout, one.progress.plan, np.array([i])) for i, one in enumerate((first, second), 1)]
    [step] = prefill_steps(both, BUCKETS, SLOTS, LAYERS)
    [placement] = step.placements
    assert placement.image_row.tolist() == placement.place.tolist() == [0, 1, 2, 3]
    assert step.rows.source[step.rows.source < 0].tolist() == [-1, -2, -3, -4] * 2


def test_encoder_calls():
    images = [image(1, 4), image(2, 2), image(2, 4), image(9, 9), image(1, 1)]  # 16, 16, 32, 324, 4 patches
    calls = encoder_calls(images, (16, 48))
    assert [len(call) for call in calls] == [2, 1, 1, 1]
    assert [i for call in calls for i in call] == images
    images = [image(10, 12)] * 5  # 480 patches each: calls of 2048 and 512 rather than one of 4096
    assert [len(call) for call in encoder_calls(images, (256, 512, 1024, 2048, 4096))] == [4, 1]
    assert [len(call) for call in encoder_calls(images, (4096,))] == [5]


def test_layout_of_a_prompt_that_starts_and_ends_with_an_image():
    layout = sequence((2, 3), 1, (1, 2)).layout
    assert [(s.start, s.length, s.state) for s in layout.spans] == [(0, 6, "miss"), (6, 1, "text"), (7, 2, "miss")]
    assert layout.positions.tolist() == [
        [0, 0, 0, 0, 0, 0, 3, 4, 4], [0, 0, 0, 1, 1, 1, 3, 4, 4], [0, 1, 2, 0, 1, 2, 3, 4, 5]
    ]  # fmt: skip
    assert layout.delta == 6 - 9


def test_rows_that_drop_out_become_padding():
    """Random plans: every layer's slice holds its own rows, and nothing that it would write besides."""
    rng = np.random.default_rng(0)
    sequences = [sequence(3, (2, 3), 4), sequence(9), sequence((1, 4), 1, (5, 6), 2), sequence(2)]
    for one in sequences:
        depth = rng.integers(0, LAYERS + 1, len(one.layout)).astype(np.int16)
        depth[-1] = LAYERS + 1
        one.progress.plan = Plan(depth)
    wave = prefills(sequences, 2 * SLOTS)
    written = [set() for _ in range(LAYERS)]
    for step in prefill_steps(wave, BUCKETS, 2 * SLOTS, LAYERS):
        assert list(step.bounds) == sorted(step.bounds, reverse=True)
        for layer in range(LAYERS):
            slots = step.rows.slot[: step.active[layer]]
            assert step.active[layer] <= step.bounds[layer]
            assert (slots < 2 * SLOTS).all()
            assert not written[layer] & set(slots.tolist())
            written[layer] |= set(slots.tolist())
            # Of the rows that attend, each sees its own request's slots up to its own.
            parts = step.work(step.bounds[layer + 1], False, CONFIG(step.bounds[layer + 1])).parts()
            leaving = len(step.wanted) if layer + 1 == LAYERS else step.active[layer + 1]
            for row in range(leaving):
                [item] = [
                    item for item in parts.items[: parts.ctas[-1]] if row in parts.rows[item[1] * 8 :][: item[2] * 8]
                ]
                assert item[4] == parts.start[row] == 0
                slot = step.rows.slot[row]
                last = parts.end[row] - 1
                assert parts.tables[item[3], last // PAGE] * PAGE + last % PAGE == slot
                assert item[5] > last // PAGE
                owner = next(p for p in wave if slot // PAGE in p.table)
                assert parts.tables[item[3], : len(owner.table)].tolist() == owner.table.tolist()
    for layer in range(LAYERS):
        planned = {slots_of(p)[i] for p in wave for i in np.flatnonzero(p.plan.depth > layer).tolist()}
        assert written[layer] == planned


def shifted(*parts, share):
    """A request whose images are approximate, and of which the first tokens are computed in all layers but the last."""
    plain = sequence(*parts)
    images = plain.layout.images
    starts, refs = [span.start for span in images], [span.image for span in images]
    layout = make_layout(plain.layout.token_ids, starts, refs, 2, ["approximate"] * len(refs))
    plan = first_tokens(layout, LAYERS, lambda tokens: [int(share * tokens)] * (LAYERS - 1) + [0])
    return Sequence(planned(layout, dataclasses.replace(plan, shift=True)), 5)


def test_a_step_does_not_end_inside_an_image_that_moves_others():
    parts = [shifted(20, (4, 5), 3, (4, 6), 2, share=0.5), sequence(4, (4, 4)), shifted(2, (2, 2), 1, share=0.5)]
    wave = prefills(parts)
    moved = {}
    for step in prefill_steps(wave, BUCKETS, SLOTS, LAYERS):
        active = step.active[0]
        for shift in filter(None, [step.shift]):
            assert len(shift.row_image) == active
            for number in np.unique(shift.image):
                mine = shift.image == number
                first = int(shift.slot[mine].min())
                assert first not in moved
                moved[first] = step.rows.slot[:active][shift.row_image == number].tolist()
                one = next(p for p in wave if first // PAGE in p.table)
                span = next(span for span in one.layout.images if slots_of(one)[span.start] == first)
                assert shift.slot[mine].tolist() == list(range(first, first + span.length))
                np.testing.assert_array_equal(shift.position[:, mine], one.layout.positions[:, span.tokens])
                assert shift.depth[mine].tolist() == [2] * (span.length // 2) + [0] * (span.length - span.length // 2)
    first, _, third = (slots_of(one)[0] for one in wave)
    assert moved == {
        first + 20: [*range(first + 20, first + 30)],
        first + 43: [*range(first + 43, first + 55)],
        third + 2: [third + 2, third + 3],
    }


def test_an_image_with_more_rows_than_a_step_is_moved_by_its_first_step():
    wave = prefills([shifted(3, (10, 10), 2, share=0.9)])
    steps = prefill_steps(wave, BUCKETS, SLOTS, LAYERS)
    assert [step.shift and len(step.shift.slot) for step in steps] == [None, 100 // 4 * 4, 0, 0]
    assert steps[1].rows.slot.tolist() == slots_of(wave[0])[3:35]
    assert sum(step.active[0] for step in steps) == 95


def test_an_image_that_fits_in_a_step_is_in_one_whatever_comes_behind_it():
    buckets = BucketSizes(rows=(512, 1024, 2048), patches=(16, 10_000), sequences=(4,))
    for behind in (1, 6, 900, 1500):
        request = shifted(4, (48, 48), behind, share=0.5)  # 1152 of 2304; alone they would be cut in 1024 and the rest
        steps = prefill_steps(prefills([request], 80 * PAGE), buckets, 80 * PAGE, LAYERS)
        [shift] = [step.shift for step in steps if step.shift is not None]
        assert int((shift.row_image >= 0).sum()) == 1152, behind


def test_a_step_moves_no_more_than_it_can_hold(monkeypatch):
    wave = prefills([shifted(1, *[(1, 2)] * 10, 1, share=0.5) for _ in range(20)], 50 * PAGE)
    wide = BucketSizes(rows=(512,), patches=(16, 64), sequences=(100,))
    whole = [step.shift for step in prefill_steps(wave, wide, 50 * PAGE, LAYERS)]
    assert [len(np.unique(shift.image)) for shift in whole] == [64, 64, 64, 8]
    monkeypatch.setattr("vlcache_jax.engine.batching.TOKENS", 16)
    fewer = [step.shift for step in prefill_steps(wave, wide, 50 * PAGE, LAYERS)]
    assert max(len(shift.slot) for shift in fewer) == 16
    for shifts in (whole, fewer):
        assert sorted(np.concatenate([s.slot for s in shifts])) == sorted(np.concatenate([s.slot for s in whole]))


def test_what_is_not_moved():
    everything = shifted(3, (2, 3), 1, share=0.5)
    layers = np.full(len(everything.layout), LAYERS, np.int16)
    for request in (
        shifted(3, (2, 3), 1, share=0),
        Sequence(planned(everything.layout, Plan(layers, shift=True)), 5),
        Sequence(planned(everything.layout, Plan(everything.progress.plan.depth)), 5),
        sequence(3, (2, 3), 1),
    ):
        assert all(step.shift is None for step in prefill_steps(prefills([request]), BUCKETS, SLOTS, LAYERS))


def test_rows_that_the_device_chooses_may_see_the_whole_prompt():
    """Only the device will know which rows follow those that go on in any case, and what each of them sees."""
    [*_, step] = prefill_steps(prefills([sequence(3 * PAGE)]), BUCKETS, SLOTS, LAYERS)
    policy = types.SimpleNamespace(check_layer=0)
    step = dataclasses.replace(step, selection=types.SimpleNamespace(policy=policy, must=8, length=3 * PAGE))
    parts = step.work(32, True, CONFIG(32, tile=1, small=1)).parts()
    ends = step.rows.k_end.tolist()
    assert min(ends) > 2 * PAGE
    assert parts.end[:32].tolist() == ends[:8] + [3 * PAGE] * 24
    items = parts.items[: parts.ctas[-1]]
    assert items[:, [FROM, TO]].tolist() == [[0, 3]] * len(items)
    # Pages that all of them see in full need no mask; of those that are chosen no page is sure to be one.
    assert {(int(item[BOX0]), int(item[INNER_TO])) for item in items} == {(0, 2), (1, 0), (2, 0), (3, 0)}
