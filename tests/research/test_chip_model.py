"""The model of a chip, and the counted shapes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from research import chip_model
from vlcache_jax.pallas_kernels.shapes import ATTENTION, PAGE

SHAPES = {shape.name: shape for shape in ATTENTION["Qwen3-VL-8B"]}


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


def test_the_model_is_near_what_was_measured():
    measured = json.loads(chip_model.MEASURED.read_text())["cases"]
    cases = [shape for shape in SHAPES.values() if shape.has_pages]
    assert len(cases) == 13
    for shape in cases:
        took = 1e3 * measured[f"speed: attention, {shape.name}, D {shape.D}"]["ms"]
        assert chip_model.work_list(shape).time == pytest.approx(took, rel=0.13), shape.name


def test_shares_are_equal():
    # Requests apart are read no faster than their bytes.
    apart = chip_model.work_list(SHAPES["8 requests x 20 rows x 20480"])
    assert max(apart.programs, apart.read) < 1.05 * apart.read
    cold = chip_model.work_list(SHAPES["cold 4096"])
    assert cold.combine == chip_model.COMBINE  # items write their results to their places
    for estimate in (cold, apart):
        assert estimate.imbalance < 1.015


def test_the_model_counts_items():
    shape = SHAPES["decode 1 x 20480"]
    estimate = chip_model.work_list(shape)
    assert estimate.slots == 144 * PAGE
    assert estimate.items == estimate.partials == 8 * 17  # 132 programs share 8 heads, and begin within some
    pages = 8 * 144 / 132
    assert estimate.mean == pytest.approx(5 + 1.9 * pages + 1.5 * estimate.items / 132, rel=1e-9)
    assert estimate.combine == pytest.approx(3 + (17 * 32 * 130 * 4 + 32 * 128 * 2) / 4e6)
