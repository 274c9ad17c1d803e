"""Pages of compressed answers, and the layers that share a work list; nothing is computed."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_jax.device.programs.window import LISTS
from vlcache_jax.device.runner import alike_layers, compressed_work
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

    def needs(leases, more):
        wanted = [min(tokens[one] + more, most[one]) for one in leases]
        return sum(sum(one.missing(count)) for one, count in zip(leases, wanted, strict=True))

    for command in data.draw(st.lists(st.sampled_from(["take", "grow", "aside", "back", "end"]), max_size=40)):
        free = COUNT - pages.in_use
        if command == "take":
            counts, more = (
                data.draw(st.lists(st.integers(1, 500), min_size=3, max_size=3)),
                data.draw(st.integers(0, 600)),
            )
            if pages.needed(counts, more) > COUNT:
                continue
            lease = pages.take(counts, more)
            if lease is None:
                assert running  # alone, everybody fits
                assert pages.in_use == COUNT - free
                continue
            assert [len(table) for table in lease.tables] == [-(-count // PAGE) for count in counts]
            assert (lease.kept.tolist(), lease.most) == (counts, pages.needed(counts, more))
            running.append(lease)
            tokens[lease], most[lease] = 0, more
        elif command == "grow" and running:
            some = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
            wanted = [min(tokens[one] + data.draw(st.integers(0, 200)), most[one]) for one in some]
            missing = sum(sum(one.missing(count)) for one, count in zip(some, wanted, strict=True))
            assert pages.grow(some, wanted) == (missing <= free)
            assert pages.in_use == COUNT - free + missing * (missing <= free)
            if missing <= free:
                tokens.update(zip(some, wanted, strict=True))
        elif command == "aside" and running:
            lease = running.pop(data.draw(st.integers(0, len(running) - 1)))
            pages.put_aside(lease, [HELD])
            aside.append(lease)
        elif command == "back" and aside:
            lease, had = aside[0], list(map(len, aside[0].tables))
            held = pages.bring_back(lease)
            assert list(map(len, lease.tables)) == had
            assert held is not None or running
            if held is not None:
                assert (held, lease.aside) == ([HELD], None)
                running.append(aside.pop(0))
        elif command == "end" and (running or aside):
            pages.end((running or aside).pop(0))
        if command in ("take", "back"):
            assert needs(running, PAGE) <= COUNT - pages.in_use or COUNT - pages.in_use == free
        mine = [page for one in running for page in one.pages]
        assert len(set(mine)) == len(mine) == pages.in_use
        assert set(mine) <= set(range(1, COUNT + 1))
        assert pages.aside_bytes == len(aside) * HELD.nbytes
    pages.reset()
    for lease in [*running, *aside]:
        pages.end(lease)  # of before: nothing comes twice
    assert (pages.in_use, pages.aside_bytes, sorted(pages._free)) == (0, 0, list(range(1, COUNT + 1)))


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
