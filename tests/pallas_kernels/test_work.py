"""The work list: what the kernels rely on, for every way to cut."""

from __future__ import annotations

import numpy as np
import pytest

from vlcache_jax.pallas_kernels import PAGE, Shared, WorkConfig, make_work
from vlcache_jax.pallas_kernels.attention.packing import ITEM, MASK, ItemTiles, Pieces, share_out
from vlcache_jax.pallas_kernels.attention.work import (
    BOX0,
    BOXES,
    DIRECT,
    FROM,
    HEAD,
    INNER_FROM,
    INNER_TO,
    PARTIAL,
    TABLE,
    TO,
    Work,
)
from vlcache_jax.pallas_kernels.paged_cases import CASES, PagedRows, tables

# As the kernels cut: one after the other on XLA, and for many programs on a GPU.
WAYS = {
    "XLA": {"tile": 8, "small": 4},
    "XLA, many rows": {"tile": 32, "small": 4},
    "XLA, decoding": {"box": 1, "tile": 64, "small": 1},
    "GPU, groups of 4": {"group": 4, "heads": 8, "programs": 132, "pieces": 19},
    "GPU, groups of 7": {"group": 7, "heads": 4, "programs": 132, "pieces": 36},
    "GPU, one warpgroup": {"group": 8, "heads": 2, "tile": 8, "small": 8, "programs": 9, "pieces": 8},
    "GPU, few partials of many programs": {"group": 8, "heads": 2, "programs": 132, "pieces": 6},
    "GPU, few partials": {"group": 1, "heads": 3, "programs": 5, "pieces": 4},
}


def config(way: str, rows: int = 304, requests: int = 20, pages: int = 40) -> WorkConfig:
    return WorkConfig(rows, requests, pages, shared=True, **WAYS[way])


def walk(work: Work):
    """(program, item) of all items."""
    parts = work.parts()
    assert parts.ctas[0] == 0
    for program in range(work.config.programs):
        for index in range(parts.ctas[program], parts.ctas[program + 1]):
            yield program, parts.items[index]


def loads(work: Work) -> np.ndarray:
    """What each program spends, in blocks."""
    spent = np.zeros(work.config.programs)
    for program, item in walk(work):
        masked_end = item[TO] - np.clip(item[INNER_TO], item[FROM], item[TO])
        masked_start = np.clip(item[INNER_FROM], item[FROM], item[TO]) - item[FROM]
        spent[program] += ITEM * (1 + (item[PARTIAL] >= 0)) + item[TO] - item[FROM]
        spent[program] += MASK * (masked_start + masked_end)
    return spent


def check(work: Work, rows: PagedRows, least: np.ndarray | None = None) -> None:
    config, parts = work.config, work.parts()
    count, box, group = len(rows.table), config.box, config.group
    least = rows.end if least is None else least
    visited = [[] for _ in range(count * config.heads)]  # (first slot, last, partial row or None) of a row and head
    partial_boxes = np.zeros(config.partial_boxes, int)
    in_place = set()  # rows whose results some item writes to their place
    for _, item in walk(work):
        assert item[FROM] < item[TO]
        assert item[BOX0] % group == item[BOXES] % group == 0
        assert 0 < item[BOXES] <= config.tile
        octet, size = item[BOX0] // group, item[BOXES] // group
        members = parts.rows[octet * box :][: size * box]
        real = members[members < config.rows]
        if config.programs > 1 and item[DIRECT] >= 0:
            assert item[PARTIAL] < 0
            assert item[DIRECT] % box == 0
            assert members.tolist() == list(range(item[DIRECT], item[DIRECT] + len(members)))
            in_place.update(members.tolist())
        assert len(real)
        if item[FROM] < item[INNER_FROM] or item[INNER_TO] < item[TO]:
            assert set(rows.table[real]) == {item[TABLE]}
        else:  # a shared prefix: all see the same pages
            pages = [np.asarray(rows.tables[t])[item[FROM] : item[TO]].tolist() for t in set(rows.table[real])]
            assert pages == [parts.tables[item[TABLE], item[FROM] : item[TO]].tolist()] * len(pages)
        if item[PARTIAL] >= 0:
            assert config.programs > 1
            partial_boxes[item[PARTIAL] : item[PARTIAL] + -(-item[BOXES] // 8) * 8] += 1
        whole = max(item[FROM], item[INNER_FROM]), min(item[TO], item[INNER_TO])
        for place, row in enumerate(members):
            if row == config.rows:
                continue
            if whole[0] < whole[1]:
                assert rows.start[row] <= whole[0] * PAGE
                assert least[row] >= whole[1] * PAGE
            first, last = max(item[FROM] * PAGE, rows.start[row]), min(item[TO] * PAGE, rows.end[row])
            at = None if item[PARTIAL] < 0 else (item[PARTIAL] + place // box * group) * box + place % box
            visited[row * config.heads + item[HEAD]].append((first, last, at))
    assert partial_boxes.max(initial=0) <= 1
    for unit, spans in enumerate(visited):
        row = unit // config.heads
        seen = [s for first, last, _ in spans for s in range(first, last)]
        assert sorted(seen) == list(range(rows.start[row], rows.end[row]))  # each once
        if config.programs == 1:
            continue
        merged = parts.merge[parts.merge_first[unit] : parts.merge_first[unit + 1]].tolist()
        assert sorted(merged) == sorted(at for _, _, at in spans if at is not None)
        assert len(merged) <= config.pieces
        if spans and not merged:
            assert len(spans) == 1
            assert row in in_place if parts.unpack[row] < 0 else parts.rows[parts.unpack[row]] == row
    if config.programs > 1:
        empty = np.setdiff1d(np.arange(config.rows), np.flatnonzero(rows.start < rows.end))
        assert (parts.unpack[empty] == config.octets * box).all()
    assert (parts.end[:count] == rows.end).all()
    assert not parts.end[count:].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_row_visits_every_slot_that_it_sees_once(case, way):
    rows = case(np.random.default_rng(0))
    work = rows.work(config(way))
    check(work, rows)
    if work.config.programs > 1 and "few" not in way:
        spent = loads(work)
        assert spent.max() <= max(1.015 * spent.mean(), spent.mean() + 2, 3.5)  # a block and what comes with it


def test_random_cases():
    rng = np.random.default_rng(5)
    for _ in range(30):
        count, requests = int(rng.integers(1, 200)), int(rng.integers(1, 12))
        lengths = rng.integers(1, 30, requests)
        table = rng.integers(0, requests, count)
        end = rng.integers(0, lengths[table] * PAGE + 1)
        start = np.where(rng.random(count) < 0.2, rng.integers(0, lengths[table] * PAGE), 0)
        rows = PagedRows(table, start, end, tables(rng, *lengths))
        check(rows.work(config(list(WAYS)[rng.integers(len(WAYS))], pages=30)), rows)


def test_thousands_of_rows_are_shared_out_evenly():
    count = 4096
    pages = tables(np.random.default_rng(0), 64)
    rows = PagedRows(np.zeros(count, int), np.zeros(count, int), np.arange(count) + 4097, pages)
    spent = loads(rows.work(config("GPU, groups of 4", count, pages=64)))
    assert spent.max() <= 1.015 * spent.mean()


def test_tiles_are_cut_only_where_that_costs_less():
    """With partials and masked pages counted, as `loads` does."""
    rng = np.random.default_rng(0)

    def most(tiles: ItemTiles, pieces: Pieces) -> float:
        tile, first, last = pieces.tile, pieces.first, pieces.last
        masked = (
            np.clip(tiles.inner_from[tile], first, last) - first + last - np.clip(tiles.inner_to[tile], first, last)
        )
        spent = ITEM * (1 + (tiles.partial[tile] | pieces.is_cut)) + last - first + MASK * masked
        return float(np.bincount(pieces.program, spent).max())

    kinds = set()
    for _ in range(300):
        count, programs = rng.integers(1, 40), int(rng.integers(2, 20))
        first = rng.integers(0, 4, count)
        last = first + rng.integers(1, 12, count)
        inner = np.sort(rng.integers(first, last + 1, (2, count)), axis=0)
        one = np.ones(count, int)
        tiles = ItemTiles(np.arange(count), one, 0 * one, first, last, *inner, rng.random(count) < 0.2)
        ways = WorkConfig(64, 1, 16, shared=True, programs=programs, pieces=programs + 3)
        dealt, whole = (share_out(tiles, ways, limit) for limit in (programs, 0))
        assert not whole.is_cut.any()
        assert most(tiles, dealt) <= most(tiles, whole) + 1e-9
        kinds.add(bool(dealt.is_cut.any()))
    assert kinds == {False, True}


@pytest.mark.parametrize(("tile", "per_head"), [(16, 2), (8, 4)])
def test_many_questions_over_one_document_read_it_together(tile, per_head):
    """64 requests behind a prefix of 16 K: the rows of eight are an octet, so two items a head hold all of them."""
    count, prefix = 64, 128
    both = [np.concatenate([np.arange(1, prefix + 1), [200 + i]]) for i in range(count)]
    end = np.full(count, prefix * PAGE + 50)
    one = WorkConfig(
        count, count, prefix + 1, group=4, heads=8, tile=tile, small=tile, shared=True, programs=132, pieces=19
    )
    apart = make_work(np.arange(count), np.zeros(count), end, both, one)
    together = make_work(np.arange(count), np.zeros(count), end, both, one, shared=[Shared(range(count), prefix)])
    blocks = [sum(item[TO] - item[FROM] for _, item in walk(work)) for work in (apart, together)]
    assert blocks == [8 * 64 * 129, 8 * (per_head * 128 + 64)]
    [boxes] = {item[BOXES] for _, item in walk(together) if item[TABLE] == 0 and item[FROM] < prefix}
    assert boxes == tile


def test_a_prefix_too_short_to_be_worth_it_is_read_apart():
    rows = PagedRows(np.arange(2), np.zeros(2, int), np.array([200, 210]), [np.array([1, 2]), np.array([1, 3])])
    with_shared = make_work(rows.table, rows.start, rows.end, rows.tables, config("XLA"), shared=[Shared((0, 1), 1)])
    np.testing.assert_array_equal(with_shared.buffer, rows.work(config("XLA")).buffer)


def test_ends_that_the_device_decides_are_masked():
    end, least = np.full(20, 5 * PAGE), np.full(20, PAGE + 3)
    rows = PagedRows(np.zeros(20, int), np.zeros(20, int), end, [np.arange(1, 6)])
    work = rows.work(config("XLA"), least=least)
    check(work, rows, least)
    assert {(item[TO], item[INNER_TO]) for _, item in walk(work)} == {(5, 1)}


def test_lengths_follow_from_the_configuration_alone():
    one = config("GPU, groups of 4")
    for case in CASES:
        work = case(np.random.default_rng(0)).work(one)
        assert work.buffer.shape == one.abstract().buffer.shape == (one.size,)
        assert work.buffer.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": np.zeros(305, int)}, r"table must be \[n\] with n at most 304"),
        ({"end": np.ones(4, int)}, r"end must have the shape of table, \(3,\), got \(4,\)"),
        ({"table": np.array([0, 1, 2])}, "table must be indices below 2, the number of tables, got 0 to 2"),
        ({"end": np.array([5, 257, 5])}, "start and end must be within the 2 pages of the block table, got 0 and 257"),
        ({"start": np.array([-1, 0, 0])}, "start and end must be within .* got -1 and 5 for row 0"),
        (
            {"tables": [np.arange(41)] * 2},
            "tables must be at most 20 block tables of at most 40 pages, got 2 of up to 41",
        ),
        ({"shared": [Shared((0, 1), 2)]}, "shared must list nested groups of tables with the same first 2 pages"),
        ({"shared": [Shared((0, 2), 1)]}, "shared must list indices below 2"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    right = {
        "table": np.array([0, 1, 1]),
        "start": np.zeros(3, int),
        "end": np.full(3, 5),
        "tables": [np.array([1, 2]), np.array([3, 4])],
        "config": config("XLA"),
    }
    make_work(**right)
    with pytest.raises(ValueError, match=message):
        make_work(**right | change)


@pytest.mark.parametrize("wrong", [{"box": 0}, {"small": 2, "group": 4}, {"small": 32}, {"programs": 2, "pieces": 3}])
def test_ways_to_cut_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="config"):
        WorkConfig(8, 1, 1, **wrong)
