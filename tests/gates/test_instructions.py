"""Instructions that the kernels take in each turn of their loops, compiled for an H200."""

from __future__ import annotations

import pytest

from research import sass
from vlcache_jax.pallas_kernels.shapes import ATTENTION, STATISTICS

pytestmark = pytest.mark.cuda_gate

SELECTS = 64  # of a thread, that mask one side of 64 rows x 128 slots


@pytest.mark.parametrize("name", ["cold 4096", "decode 8 x 20480"])  # of two warpgroups that compute, and of one
def test_masks_are_cheap_and_the_loader_only_loads(name: str) -> None:
    kernel = sass.compile_paged(next(shape for shape in ATTENTION["Qwen3-VL-8B"] if shape.name == name))
    assert kernel.spills == 0
    assert not kernel.warnings  # C75xx: that matrix products wait for each other
    [compute], [load] = kernel.compute, kernel.load
    assert list(compute) == [0, SELECTS, 2 * SELECTS]
    assert compute[SELECTS].instructions <= compute[0].instructions + 130
    assert compute[2 * SELECTS].instructions <= compute[0].instructions + 260
    assert compute[0].instructions <= 520
    assert compute[0].names["HGMMA"] == 16  # of queries and keys, and of weights and values
    assert list(load) == [0]  # accesses to shared memory: V is copied, never looked at
    assert load[0].names["UTMALDG"] == 2
    assert load[0].instructions <= 80


def test_statistics_multiply_64_rows_and_a_page_a_turn() -> None:
    columns, rows = sass.compile_statistics(STATISTICS["Qwen3-VL-8B"][0])
    for kernel, products, most in ((rows, 8, 490), (columns, 16, 800)):
        assert kernel.spills == 0
        assert not kernel.warnings
        [loop] = kernel.compute
        [turn] = loop.values()  # there is one way through it: all is masked
        assert turn.names["HGMMA"] == products
        assert turn.instructions <= most
