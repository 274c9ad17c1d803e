"""What is said of the portable kernels by architecture: the kept result, and how it is counted."""

from __future__ import annotations

import collections
import json
import pathlib

import pytest

from research.architectures import CASES, TARGETS, bounds, describe, loads_of
from research.sass import Kernel, LoopTurn

PATH = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "architectures.json"
TURN = LoopTurn(553, 1900, collections.Counter({"HMMA": 128, "LDSM": 64}))
LOADS = loads_of("attention_kernel", TURN)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_what_is_compiled_spills_nothing(architecture: str) -> None:
    kept = json.loads(PATH.read_text())[architecture]
    assert kept["chip"] == TARGETS[architecture].name
    assert "paged attention, cold 4096" in kept["cases"]
    assert list(kept["cases"]) == [case for case in CASES if case in kept["cases"]]
    for case, rows in kept["cases"].items():
        assert isinstance(rows, list), (case, rows)
        for row in rows:
            assert row["spilled bytes"] == 0
            assert row["programs on a multiprocessor"] >= 2
        if "attention" in case and architecture != "sm_90":  # whose own kernel multiplies twice as fast
            assert rows[0]["share of matrix rate at most"] >= 0.5
        if "attention" in case or "8 bits, decode" in case:
            assert rows[0]["share of bandwidth at most"] >= 0.75


def test_bounds_of_a_turn() -> None:
    """128 products of 2048 by four warps: 1024 cycles of an A100; 32 KB that four warps load, and that come once."""
    found = bounds(TARGETS["sm_80"], TURN, 2, *LOADS)
    assert found["cycles"] == {"products": 1024, "instructions": 553, "shared memory": 1280, "stalls": 950}
    assert found["limited by"] == "shared memory"
    assert found["share of matrix rate at most"] == 0.8
    assert found["share of bandwidth at most"] == 1.0  # 32 KB take 2447 cycles of one of 108 multiprocessors
    slow = bounds(TARGETS["sm_120"], TURN, 2, *LOADS)
    assert slow["limited by"] == "products"
    assert slow["share of matrix rate at most"] == 1.0
    assert bounds(TARGETS["sm_80"], TURN, 1, *LOADS)["limited by"] == "stalls"


def test_bounds_of_a_turn_in_8_bits() -> None:
    """64 outputs, of which each warp loads its 16 with 128 inputs, by 16 rows, which all load: 8 KB and 4 KB."""
    turn = LoopTurn(486, 710, collections.Counter({"HMMA": 16, "LDS": 18, "HADD2": 64}))
    alike, own, read = loads_of("float8_kernel_0", turn)
    assert (alike * 512, 4 * own * 512, read * 512) == (4096, 8192, 8192)
    found = bounds(TARGETS["sm_80"], turn, 3, alike, own, read)
    assert found["cycles"]["shared memory"] == (4 * 4096 + 8192 + 4096 + 8192) // 128  # read, and stored
    assert found["share of bandwidth at most"] == 1.0  # 8 KB take 612 cycles
    assert bounds(TARGETS["sm_100"], turn, 3, alike, own, read)["share of bandwidth at most"] == 0.58


def test_how_many_programs_a_multiprocessor_has() -> None:
    kernel = Kernel("attention_kernel", [{0: TURN}], [], 255, 0, 0, 49152, [])
    assert describe(TARGETS["sm_89"], kernel)["programs on a multiprocessor"] == 2
    large = Kernel("attention_kernel", [{0: TURN, 64: TURN}], [], 168, 8, 8, 65536, [])
    row = describe(TARGETS["sm_89"], large)
    assert row["programs on a multiprocessor"] == 1
    assert (row["spilled bytes"], row["stack bytes"]) == (0, 8)
    assert row["instructions of a masked turn"] == 553
