"""Small modules of all families."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.helper import drawn
from vlcache_jax.models import layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_takes_many_rows_through_an_mlp_chunk_by_chunk(monkeypatch, dtype):
    """To the last bit; other devices, and what does not fill chunks, all at once."""
    mlp = drawn(lambda: layers.GatedMLP(64, 160, bias=True, dtype=dtype, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(1).standard_normal((96, 64)).astype(jnp.dtype(dtype))
    whole = jax.jit(lambda x: mlp(x))(x)
    monkeypatch.setattr(layers, "CHUNK", 32)
    chunked = jax.jit(lambda x: mlp(x))
    np.testing.assert_array_equal(np.asarray(chunked(x), np.float32), np.asarray(whole, np.float32))

    def loops(rows, platform):
        traced = chunked.trace(jax.ShapeDtypeStruct((rows, 64), dtype))
        return "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()

    assert loops(96, "cpu")
    assert not loops(96, "cuda")
    assert not loops(97, "cpu")
