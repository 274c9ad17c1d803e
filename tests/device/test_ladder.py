import numpy as np
import pytest

from vlcache_jax.device.ladder import Ladder, cover, round_up, split_rows


def test_steps_hold_the_rows_with_little_padding():
 docs/measured.md  rungs = Ladder().rows
 docs/measured.md  rng = np.random.default_rng(0)
 docs/measured.md  sizes = [*range(1, 300), *rng.integers(300, 30000, 500).tolist(), *rungs]
 docs/measured.md  waste = []
 docs/measured.md  for size in sizes:
 docs/measured.md      steps = split_rows(size, rungs)
 docs/measured.md      assert set(steps) <= set(rungs)
 docs/measured.md      assert steps == sorted(steps, reverse=True)
 docs/measured.md      assert sum(steps) - size < steps[-1]
 docs/measured.md      if size > 1000:
 docs/measured.md          waste.append(sum(steps) / size)
 docs/measured.md  assert np.mean(waste) < 1.025  # docs/measured.md
 docs/measured.md  assert max(waste) < 4 / 3


def test_a_step_too_many_is_not_taken():
 docs/measured.md  assert split_rows(5000, (64, 1024, 4096, 8192)) == [4096, 1024]
 docs/measured.md  assert split_rows(1900, (64, 128, 256, 512, 1024, 2048)) == [2048]
 docs/measured.md  assert split_rows(20000, (64, 4096)) == [4096] * 5
 docs/measured.md  assert split_rows(40, (64, 4096)) == [64]


def test_round_up():
 docs/measured.md  assert [round_up(n, (4, 16)) for n in (1, 4, 5, 16)] == [4, 4, 16, 16]
 docs/measured.md  with pytest.raises(ValueError, match="at most 16, the last rung, got 17"):
 docs/measured.md      round_up(17, (4, 16))


def test_steps_until_fewer_rows_will_do():
 docs/measured.md  ladder = Ladder(sequences=(1, 4, 8))
 docs/measured.md  assert [ladder.until_fewer(left) for left in ([5], [3, 9], [2, 7, 4, 4], [9, 1, 8, 3, 7])] == [5, 3, 4, 1]


@pytest.mark.parametrize("rungs", [(), (4, 4), (8, 4), (0, 4), (1.5,), (-1, 2)])
def test_bad_rungs(rungs):
 docs/measured.md  with pytest.raises(ValueError, match=r"ladder\.rows must be ascending positive integers"):
 docs/measured.md      Ladder(rows=rungs)


def test_what_is_copied_together_is_covered_by_rungs():
 docs/measured.md  assert [cover(size, (1, 4, 8)) for size in (0, 1, 2, 8, 9, 21)] == [[], [1], [4], [8], [8, 1], [8, 8, 8]]
