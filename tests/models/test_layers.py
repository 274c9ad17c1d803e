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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [0, 1, 3, layers.FEW])
def test_partial_sums_that_a_kernel_adds_are_the_product(rows, dtype):
    layer = drawn(lambda: layers.linear(96, 128, bias=False, dtype=dtype, rngs=nnx.Rngs(0)))
    x, like = (jnp.asarray(np.random.default_rng(0).standard_normal((rows, n)), dtype) for n in (96, 128))
    made = layers.split_product(layer, x, "mosaic_gpu_interpreted", like=like)
    if rows:
        assert made.shape == (layers.SPLIT_K, max(rows, 2), 128)
        made = made[:, :rows].sum(0).astype(dtype)
    product = jnp.matmul(x, layer.kernel[...], preferred_element_type=jnp.float32)
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (made, product)), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "bias", "implementation"),
    [
        (layers.FEW + 1, 96, 128, False, "mosaic_gpu_interpreted"),
        (1, 98, 128, False, "mosaic_gpu_interpreted"),  # not to be split evenly
        (1, 96, 128, True, "mosaic_gpu_interpreted"),
        (1, 96, 16384, False, "mosaic_gpu_interpreted"),  # registers hold no partial sums of it
        (1, 96, 128, False, "xla"),
    ],
)
def test_other_products_are_whole(rows, inputs, outputs, bias, implementation):
    layer = drawn(lambda: layers.linear(inputs, outputs, bias=bias, dtype="bfloat16", rngs=nnx.Rngs(0)))
    x, like = (jnp.ones((rows, n), "bfloat16") for n in (inputs, outputs))
    made = layers.split_product(layer, x, implementation, like=like)
    np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(layer(x), np.float32))
