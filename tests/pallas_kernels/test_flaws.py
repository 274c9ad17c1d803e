"""What is not finite in V goes to K."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.pallas_kernels import carry_flaws


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("flaw", [np.nan, np.inf, -np.inf])
def test_keys_carry_the_flaws_of_values(dtype, flaw):
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(7, 3, 8)), dtype) for _ in "kv")
    k = k.at[2, 1, 3].set(jnp.nan).at[4].set(jnp.inf)
    v = v.at[0, 0].set(jnp.finfo(dtype).max).at[1, 0].set(-0.0)
    for ours, given in zip(jax.jit(carry_flaws)(k, v), (k, v), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(given).tobytes()
    broken = v.at[5, 2, 6].set(flaw).at[6, :, 0].set(flaw)
    new_k, new_v = jax.jit(carry_flaws)(k, broken)
    assert (new_k.dtype, new_v.dtype) == (k.dtype, v.dtype)
    want_k, want_v = (np.array(x, np.float32) for x in (k, v))
    for place in ((5, 2, 6), (6, slice(None), 0)):
        want_k[place], want_v[place] = np.nan, 0
    np.testing.assert_array_equal(np.asarray(new_k, np.float32), want_k)
    np.testing.assert_array_equal(np.asarray(new_v, np.float32), want_v)
