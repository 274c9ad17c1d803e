"""Pages of compressed answers, and the layers that share a work list; nothing is computed."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_decode_slots import held
from tests.helper import BUCKETS
from vlcache_jax.compress.policies import SnapKV
from vlcache_jax.device.programs.window import LISTS, alike_layers, compressed_work
from vlcache_jax.engine.compaction import Compactor
from vlcache_jax.engine.compressed_pages import CompressedPages
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.attention.work import FROM, TO, WorkConfig

COUNT = 20  # pages
HELD = np.zeros(7)


@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_pages_are_of_one_lease_at_a_time(data):
    """Where one begins or comes back, all that run can go on by as many tokens as a page has."""
    pages, running, aside, tokens, most = CompressedPages(COUNT), [], [], {}, {}

    def needs(block_tables, more):
        wanted = [min(tokens[one] + more, most[one]) for one in block_tables]
        return sum(sum(one.missing(count)) for one, count in zip(block_tables, wanted, strict=True))

    for command in data.draw(st.lists(st.sampled_from(["take", "grow", "aside", "back", "end"]), max_size=40)):
        free = COUNT - pages.in_use
        if command == "take":
            counts, more = (
                data.draw(st.lists(st.integers(1, 500), min_size=3, max_size=3)),
                data.draw(st.integers(0, 600)),
            )
            if pages.needed(counts, more) > COUNT:
                continue
            block_table = pages.take(counts, more)
            if block_table is None:
                assert running  # alone, everybody fits
                assert pages.in_use == COUNT - free
                continue
            assert [len(table) for table in block_table.tables] == [-(-count // PAGE) for count in counts]
            assert (block_table.kept.tolist(), block_table.max_pages) == (counts, pages.needed(counts, more))
            running.append(block_table)
            tokens[block_table], most[block_table] = 0, more
        elif command == "grow" and running:
            some = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
            wanted = [min(tokens[one] + data.draw(st.integers(0, 200)), most[one]) for one in some]
            missing = sum(sum(one.missing(count)) for one, count in zip(some, wanted, strict=True))
            assert pages.grow(some, wanted) == (missing <= free)
            assert pages.in_use == COUNT - free + missing * (missing <= free)
            if missing <= free:
                tokens.update(zip(some, wanted, strict=True))
        elif command == "aside" and running:
            block_table = running.pop(data.draw(st.integers(0, len(running) - 1)))
            pages.swap_out(block_table, [HELD])
            aside.append(block_table)
        elif command == "back" and aside:
            block_table, had = aside[0], list(map(len, aside[0].tables))
            held = pages.bring_back(block_table)
            assert list(map(len, block_table.tables)) == had
            assert held is not None or running
            if held is not None:
                assert (held, block_table.swapped) == ([HELD], None)
                running.append(aside.pop(0))
        elif command == "end" and (running or aside):
            pages.end((running or aside).pop(0))
        if command in ("take", "back"):
            assert needs(running, PAGE) <= COUNT - pages.in_use or COUNT - pages.in_use == free
        mine = [page for one in running for page in one.pages]
        assert len(set(mine)) == len(mine) == pages.in_use
        assert set(mine) <= set(range(1, COUNT + 1))
        assert pages.swapped_bytes == len(aside) * HELD.nbytes
    pages.reset()
    for block_table in [*running, *aside]:
        pages.end(block_table)  # of before: nothing comes twice
    assert (pages.in_use, pages.swapped_bytes, sorted(pages._free)) == (0, 0, list(range(1, COUNT + 1)))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(1, 3))
@settings(deadline=None)
def test_layers_that_keep_as_much_share_a_list(kept, prompts):
    kept = np.array(kept)[:, None].repeat(prompts, 1)
    classes = alike_layers(kept)
    assert sorted(layer for own in classes for layer in own) == list(range(len(kept)))
    assert len(classes) <= LISTS
    for own in classes[: LISTS - 1]:
        assert min(kept[own, 0]) >= 0.6 * max(kept[own, 0])
    for before, after in itertools.pairwise(classes):
        assert min(kept[before, 0]) >= max(kept[after, 0])


def test_a_list_is_for_the_most_that_its_layers_keep():
    config = WorkConfig(2, 2, 8, box=1, tile=1, small=1)
    kept = np.array([[600, 100], [590, 120], [20, 10]], np.int32)
    lists, list_of = compressed_work(kept, np.array([[1, 5], [8, 12]], np.int32), config)
    assert list_of.tolist() == [0, 0, 1]
    first, second = (config.places[name][0] for name in ("ctas", "items"))
    for row, longest in ((0, [608, 132]), (1, [28, 22])):
        count = lists[row, first][-1]
        items = lists[row, second].reshape(-1, 16)[:count]
        assert items[:, FROM].tolist() == [0] * count
        assert sorted(items[:, TO].tolist()) == sorted(-(-end // PAGE) for end in longest)
    assert not lists[2:].any()


def compactor_of(*answers, bring_back=None):
    """One for answers that have their first tokens, and those of them whose prompts stay whole."""
    kv = SimpleNamespace(slot_bytes=64, layers=2)
    runner = SimpleNamespace(
        buckets=BUCKETS, shapes=SimpleNamespace(kv=kv, block_rows=8), config=None, devices=SimpleNamespace(copies=1)
    )
    pages, whole = SimpleNamespace(bring_back=bring_back, count=9, needed=lambda *_: 1), []
    scheduler = SimpleNamespace(
        decoding=answers, tenant_order=SimpleNamespace(sorted=list), compressed=pages, stays_whole=whole.append
    )
    return Compactor(runner, scheduler, None, None), whole


def test_nobody_overtakes_who_waits_for_pages():
    """All come back for whom there is room, and nobody behind the first one for whom there is none."""
    answers, asked = [held(decode_slot) for decode_slot in range(4)], []
    for one in answers:
        one.progress.compressed = SimpleNamespace(swapped=[], pages=np.zeros(0, np.int32), count=0)
    compactor, _ = compactor_of(
        *answers, bring_back=lambda block_table: asked.append(block_table) or ([] if len(asked) < 3 else None)
    )
    assert [*compactor.advance()] == []
    assert asked == [one.progress.compressed for one in answers[:3]]
    assert compactor._counts["swapped_in"] == 2


@pytest.mark.parametrize(("alpha", "rows"), [(1, []), (1.0, []), (0.99, [1])])
def test_who_keeps_all_is_not_observed(monkeypatch, alpha, rows):
    """No program is launched for it."""
    plain, observed = held(0), []
    options = dataclasses.replace(plain.planned.options, compress=SnapKV(alpha, rows=1))
    one = dataclasses.replace(plain, planned=dataclasses.replace(plain.planned, options=options))
    one.token_ids.append(5)
    compactor, whole = compactor_of(one)
    monkeypatch.setattr(compactor, "_observe", lambda answer, found: observed.append(found.rows))  # it lacks pixels
    results = [*compactor.advance()]
    assert observed == rows
    assert whole == [one]
    assert (len(results), compactor._counts["uncompressed"]) == (not rows, len(rows))
