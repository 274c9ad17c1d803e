"""Pages of compressed answers, and the layers that share a work list; nothing is computed."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlcache_jax.device.compressed_work import alike_layers, compressed_work
from vlcache_jax.device.programs.window import LISTS
from vlcache_jax.engine.compressed import CompressedPages
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.attention.work import FROM, TO, WorkConfig


@given(st.lists(st.tuples(st.lists(st.integers(1, 500), min_size=3, max_size=3), st.integers(0, 300), st.booleans())))
def test_pages_are_of_one_lease_at_a_time(asked):
    pages, held = CompressedPages(20), []
    for counts, more, ends in asked:
        lease = pages.take(counts, more)
        need = sum(-(-(count + more) // PAGE) for count in counts)
        assert need == pages.needed(counts, more)
        used = [page for one in held for table in one.tables for page in table]
        assert (lease is None) == (need > 20 - len(used))
        if lease is not None:
            assert [len(table) for table in lease.tables] == [-(-(count + more) // PAGE) for count in counts]
            assert lease.kept.tolist() == counts
            held.append(lease)
        if ends and held:
            pages.end(held.pop(0))
        mine = [page for one in held for table in one.tables for page in table]
        assert len(set(mine)) == len(mine) == pages.in_use
        assert set(mine) <= set(range(1, 21))
    pages.reset()
    for lease in held:
        pages.end(lease)  # of before: nothing comes twice
    assert (pages.in_use, sorted(pages._free)) == (0, list(range(1, 21)))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(1, 3))
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
