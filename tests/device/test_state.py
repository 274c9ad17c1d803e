"""Programs that change the pool aside."""

import jax
import numpy as np

from vlcache_jax.device.programs.memory import CopyPages
from vlcache_jax.pallas_kernels import PAGE

PAGES = 40


def test_pages_are_copied_in_place():
    """Of the pool nothing is copied but these pages."""
    rng = np.random.default_rng(0)
    pool = [[rng.normal(size=(PAGES * PAGE, 2, 16)).astype(np.float32) for _ in range(2)] for _ in range(3)]
    program = CopyPages(4)
    for pairs in ((), ((7, 39),), ((3, 5), (3, 39), (0, 1), (6, 2))):
        source, target = np.zeros(4, np.int32), np.full(4, PAGES, np.int32)
        for i, (one, other) in enumerate(pairs):
            source[i], target[i] = one, other
        compiled = jax.jit(lambda *args: program.compute(None, *args), donate_argnums=0).lower(pool, source, target)
        compiled = compiled.compile()
        assert compiled.memory_analysis().temp_size_in_bytes < pool[0][0].nbytes / 4
        found = compiled(jax.tree.map(jax.numpy.array, pool), source, target)
        order = np.arange(PAGES)
        for one, other in pairs:
            order[other] = one
        for half, before in zip(jax.tree.leaves(found), jax.tree.leaves(pool), strict=True):
            np.testing.assert_array_equal(half, before.reshape(PAGES, -1)[order].reshape(before.shape))
