"""Instructions that the kernels take in each turn of their loops, compiled for an H200."""

from __future__ import annotations

import pytest

from research import sass
from vlcache_jax.pallas_kernels.attention.mosaic_gpu import SPLITS_REGISTERS
from vlcache_jax.pallas_kernels.shapes import ATTENTION, STATISTICS

pytestmark = pytest.mark.cuda_gate

# Of one warpgroup that computes a block of slots: instructions, and products of queries and keys, and of weights and
# values.
BLOCKS = {128: (520, 16), 64: (360, 12)}


def warnings(kernel: sass.Kernel) -> list[str]:
    """C75xx: that matrix products wait for each other. C7504 is why jax 0.12 takes blocks of 64 slots."""
    return [line for line in kernel.warnings if SPLITS_REGISTERS or "C7504" not in line]


@pytest.mark.parametrize(  # of two warpgroups that compute, and of one
    ("name", "block"), [("cold 4096", 128 if SPLITS_REGISTERS else 64), ("decode 8 x 20480", 128)]
)
def test_masks_are_cheap_and_the_loader_only_loads(name: str, block: int) -> None:
    kernel = sass.compile_paged(next(shape for shape in ATTENTION["Qwen3-VL-8B"] if shape.name == name))
    assert kernel.spills == 0
    assert not warnings(kernel)
    [compute], [load] = kernel.compute, kernel.load
    most, products = BLOCKS[block]
    selects = block // 2  # of a thread, that mask one side of 64 rows x the block
    assert list(compute) == [0, selects, 2 * selects]
    assert compute[selects].instructions <= compute[0].instructions + 2 * selects + 2
    assert compute[2 * selects].instructions <= compute[0].instructions + 2 * (2 * selects + 2)
    assert compute[0].instructions <= most
    assert compute[0].names["HGMMA"] == products
    assert list(load) == [0]  # accesses to shared memory: V is copied, never looked at
    assert load[0].names["UTMALDG"] == 2
    assert load[0].instructions <= 80


def test_statistics_multiply_64_rows_and_a_page_a_turn() -> None:
    columns, rows = sass.compile_statistics(STATISTICS["Qwen3-VL-8B"][0])
    for kernel, products, most in ((rows, 8, 490), (columns, 16, 800 if SPLITS_REGISTERS else 860)):
        assert kernel.spills == 0
        assert not warnings(kernel)
        [loop] = kernel.compute
        [turn] = loop.values()  # there is one way through it: all is masked
        assert turn.names["HGMMA"] == products
        assert turn.instructions <= most
