"""The model of a chip, and the counted shapes."""

from __future__ import annotations

import numpy as np
import pytest

from research import chip_model
from vlcache_jax.pallas_kernels.shapes import ATTENTION, PAGE

SHAPES = {shape.name: shape for shape in ATTENTION["Qwen3-VL-8B"]}


def test_programs_begin_where_one_ends_first():
    assert chip_model.schedule([3.0, 1.0, 1.0, 2.0], processors=2) == 4.0
    assert chip_model.schedule([1.0, 1.0, 2.0, 3.0], processors=2) == 4.0
    assert chip_model.schedule([3.0, 2.0, 1.0, 1.0], processors=2) == 4.0
    assert chip_model.schedule([5.0] * 132) == 5.0


@pytest.mark.parametrize(
    ("case", "microseconds"),
    [
        ("cold 4096", 223),
        ("cold, last chunk of 20480", 2894),
        ("stage 2048 of 20480", 664),
        ("stage 512 of 20480", 202),
        ("stage 128 of 20480", 81),
        ("8 requests x 20 rows x 20480", 279),
        ("decode 8 x 20480", 142),
        ("decode 64 x 4096", 225),
    ],
)
def test_tiles_as_the_review_of_the_kernels_had_them(case, microseconds):
    assert round(chip_model.tiles(SHAPES[case]).programs) == microseconds


@pytest.mark.parametrize(
    "case",
    ["text rows", "decode 64 beside 448 rows, 4096 to 20480", "64 x 20 rows over one prefix of 16384"],
)
def test_both_contracts_see_the_same(case):
    shape = SHAPES[case].in_small()
    q, k, v, start, end = (np.asarray(x, np.float32) for x in shape.arrays())
    paged_q, k_pages, v_pages = (np.asarray(x, np.float32) for x in shape.paged_arrays())
    case = shape.paged()
    assert (q == paged_q).all()
    assert not k_pages[:PAGE].any()
    assert 0 not in np.concatenate(case.tables)
    for row in range(shape.N):
        slots = (case.tables[case.table[row]][:, None] * PAGE + np.arange(PAGE)).ravel()
        seen = slots[case.start[row] : case.end[row]]
        plain = slice(int(start[row]), int(end[row]))
        assert (k[plain] == k_pages[seen]).all()
        assert (v[plain] == v_pages[seen]).all()


def test_what_is_shared_is_read_once():
    shape = SHAPES["decode 64 over one prefix of 16384"]
    [(tables, pages)] = shape.paged().shared
    assert (len(tables), pages) == (64, 128)
    first = {tuple(table[:pages]) for table in shape.paged().tables}
    assert len(first) == 1
    assert 64 * 16384 < shape.seen_slots(paged=False) < 64 * 16640
    assert 16384 < shape.seen_slots() < 16384 + 64 * 256


def test_what_the_work_list_saves():
    def ratio(case):
        return chip_model.work_list(SHAPES[case]).time / chip_model.tiles(SHAPES[case]).time

    assert ratio("stage 512 of 20480") < 0.75
    assert ratio("decode 64 over one prefix of 16384") < 0.1
    # Requests apart are read no faster than their bytes, which is half of what the tiles took.
    apart = chip_model.work_list(SHAPES["8 requests x 20 rows x 20480"])
    assert apart.time < 1.05 * apart.read
    cold = chip_model.work_list(SHAPES["cold 4096"])
    assert cold.combine == chip_model.COMBINE  # items write their results to their places
    assert ratio("cold 4096") < 0.9
    for estimate in (cold, apart):
        assert estimate.imbalance < 1.015


def test_the_model_counts_items():
    shape = SHAPES["decode 1 x 20480"]
    estimate = chip_model.work_list(shape)
    assert estimate.slots == 144 * PAGE
    assert estimate.items == estimate.partials == 8 * 17  # 132 programs share 8 heads, and begin within some
    pages = 8 * 144 / 132
    assert estimate.mean == pytest.approx(5 + 1.4 * pages + estimate.items / 132, rel=1e-9)
    assert estimate.combine == pytest.approx(3 + (17 * 32 * 130 * 4 + 32 * 128 * 2) / 4e6)
