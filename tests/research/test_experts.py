"""How launches of a program with loops are counted."""

from __future__ import annotations

import json
import pathlib

import pytest

from research.experts import launches, turns_of
from vlcache_jax.pallas_kernels.shapes import EXPERTS

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "experts_h200_counted.json"
PROGRAM = """
%inner (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %a = s32[] fusion(%p), kind=kLoop
}

%goes_on (q: s32[]) -> pred[] {
  %q = s32[] parameter(0)
  ROOT %c = pred[] fusion(%q), kind=kLoop
}

%outer (r: s32[]) -> s32[] {
  %r = s32[] parameter(0)
  %b = s32[] fusion(%r), kind=kLoop
  ROOT %w = s32[] while(%b), condition=%goes_on, body=%inner
}

ENTRY %main (s: s32[]) -> s32[] {
  %s = s32[] parameter(0)
  %d = s32[] custom-call(%s)
  ROOT %v = s32[] while(%d), condition=%goes_on, body=%outer
}
"""


def test_loops_count_as_often_as_they_turn():
    entry = PROGRAM[PROGRAM.index("ENTRY") :]
    # The call; ten turns of a fusion, a condition, and three turns of a fusion and a condition.
    assert launches(PROGRAM, entry, (10, 3)) == 1 + 10 * (1 + 1 + 3 * (1 + 1))
    with pytest.raises(IndexError):
        launches(PROGRAM, entry, (10,))


def test_one_row_turns_as_often_as_it_has_experts():
    one, *_, many = EXPERTS["Qwen3-VL-30B-A3B"]
    assert turns_of(one) == (8, 1)
    experts, tiles = turns_of(many)
    assert experts == 128
    assert 4 <= tiles <= 5  # 512 rows of each, more or less, in tiles of 128


def test_what_was_counted_is_of_these_shapes():
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [row["rows"] for row in rows] == [shape.N for shape in EXPERTS["Qwen3-VL-30B-A3B"]]
    assert all(row["experts, kernels"] <= 14 < row["experts, XLA"] for row in rows)
