"""What is not finite in V goes to K."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.pallas_kernels import propagate_nonfinite


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("flaw", [np.nan, np.inf, -np.inf])
def test_keys_carry_the_flaws_of_values(dtype, flaw):
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(7, 3, 8)).astype(jnp.dtype(dtype)) for _ in "kv")
    k[2, 1, 3], k[4] = np.nan, np.inf
    v[0, 0], v[1, 0] = jnp.finfo(dtype).max, -0.0
    for ours, given in zip(jax.jit(propagate_nonfinite)(k, v), (k, v), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(given).tobytes()
    broken = v.copy()
    broken[5, 2, 6] = broken[6, :, 0] = flaw
    new_k, new_v = jax.jit(propagate_nonfinite)(k, broken)
    assert (new_k.dtype, new_v.dtype) == (k.dtype, v.dtype)
    want_k, want_v = (np.array(x, np.float32) for x in (k, v))
    for place in ((5, 2, 6), (6, slice(None), 0)):
        want_k[place], want_v[place] = np.nan, 0
    np.testing.assert_array_equal(np.asarray(new_k, np.float32), want_k)
    np.testing.assert_array_equal(np.asarray(new_v, np.float32), want_v)
