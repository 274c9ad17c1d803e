"""Parts of results, and the outputs that continue. Nothing is computed."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from tests.engine.test_decode_slots import held as answer
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.results import _steps, _within, free, held


@pytest.mark.parametrize(
    ("rows", "together"),
    [
        ([], []),
        ([3], [[3]]),
        ([0, 3, 7], [[0, 3, 7]]),
        ([0, 8], [[0], [8]]),
        ([0, 3, 9, 16, 17], [[0, 3], [9, 16], [17]]),
        ([5, 12, 13, 30], [[5, 12], [13], [30]]),
    ],
)
def test_rows_are_read_together_as_far_as_a_slice_reaches(rows, together):
    given = [(row, f"request {row}") for row in rows]
    assert [[row for row, _ in some] for some in _within(8, given)] == together
    assert [one for some in _within(8, given) for one in some] == given


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_programs_chose_is_in_the_order_of_the_programs(count):
    parts = [np.arange(6).reshape(2, 3) + 10 * i for i in range(count)]
    assert _steps(parts).tolist() == [row for part in parts for row in part.tolist()]


class Matcher:
    """Knows after some time what may come next, or does not."""

    def __init__(self, bits):
        self.bits, self.waited = bits, []

    def wait(self, patience):
        self.waited.append(patience)
        return True

    def mask(self, count):
        return self.bits if count == 0 else None


def running(scheduled, matcher=None):
    one = dataclasses.replace(answer(0), matcher=matcher)
    one.progress.scheduled = scheduled
    return one


def test_answers_go_on_by_what_they_are_held_to():
    plain, begun = running(3), running(0)
    known, unknown, waits = (running(length, Matcher("bits")) for length in (3, 4, 0))
    pooled = Sequence(plain.planned, 1)
    everybody = [pooled, begun, plain, unknown, known, waits]
    assert free(everybody) == [plain]
    assert held(everybody) == [known]  # of the other one a token is launched, and nobody knows which one it will be
    assert max(known.matcher.waited + unknown.matcher.waited) <= 0  # without a time nobody waits
    assert held([known], until=time.perf_counter() + 1000) == [known]
    assert 0 < known.matcher.waited[1] <= 1000
    assert waits.matcher.waited == []
