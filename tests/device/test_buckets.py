import numpy as np
import pytest

from vlcache_jax.device.buckets import BucketSizes, cover, round_up, split_rows


def test_steps_hold_the_rows_with_little_padding():
    sizes = BucketSizes().rows
    rng = np.random.default_rng(0)
    totals = [*range(1, 300), *rng.integers(300, 30000, 500).tolist(), *sizes]
    waste = []
    for size in totals:
        steps = split_rows(size, sizes)
        assert set(steps) <= set(sizes)
        assert steps == sorted(steps, reverse=True)
        assert sum(steps) - size < steps[-1]
        if size > 1000:
            waste.append(sum(steps) / size)
    assert np.mean(waste) < 1.025  # docs/research/cpu_notes.md
    assert max(waste) < 4 / 3


def test_a_step_too_many_is_not_taken():
    assert split_rows(5000, (64, 1024, 4096, 8192)) == [4096, 1024]
    assert split_rows(1900, (64, 128, 256, 512, 1024, 2048)) == [2048]
    assert split_rows(20000, (64, 4096)) == [4096] * 5
    assert split_rows(40, (64, 4096)) == [64]


def test_round_up():
    assert [round_up(n, (4, 16)) for n in (1, 4, 5, 16)] == [4, 4, 16, 16]
    with pytest.raises(ValueError, match="at most 16, the largest bucket, got 17"):
        round_up(17, (4, 16))


def test_steps_until_fewer_rows_will_do():
    buckets = BucketSizes(sequences=(1, 4, 8))
    assert [buckets.until_fewer(left) for left in ([5], [3, 9], [2, 7, 4, 4], [9, 1, 8, 3, 7])] == [5, 3, 4, 1]


@pytest.mark.parametrize("sizes", [(), (4, 4), (8, 4), (0, 4), (1.5,), (-1, 2)])
def test_bad_rungs(sizes):
    with pytest.raises(ValueError, match=r"buckets\.rows must be ascending positive integers"):
        BucketSizes(rows=sizes)


def test_what_is_copied_together_is_covered_by_rungs():
    assert [cover(size, (1, 4, 8)) for size in (0, 1, 2, 8, 9, 21)] == [[], [1], [4], [8], [8, 1], [8, 8, 8]]
