"""Records as planes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.pallas_kernels import CODECS, link


@pytest.mark.parametrize(
    ("codec", "tokens", "room"), [("int8", 32, 33), ("int8", 5, 5), ("int4", 4, 5), ("int4", 3, 3), ("auto", 5, 5)]
)
def test_a_record_is_linked_as_its_planes_are(codec, tokens, room):
    """Also where the scales are taken for codes of more tokens, so that there is room for some."""
    kv, rng = KVShape(2, 2, 128, np.dtype(np.float32), CODECS.get(codec)), np.random.default_rng(tokens)
    pairs = [rng.normal(size=kv.half(tokens).shape).astype(np.float32) for _ in range(2 * kv.layers)]
    coded = [[x] if kv.codec is None else kv.codec.encode(jnp.asarray(x)) for x in pairs]
    specs = kv.stored(kv.layers, 2, tokens)
    planes = [np.stack(own).reshape(spec.shape) for own, spec in zip(zip(*coded, strict=True), specs, strict=True)]
    assert [plane.dtype for plane in planes] == [spec.dtype for spec in specs]
    # Behind each other they are the record.
    record = kv.record(tokens)
    data = np.concatenate([plane.reshape(kv.layers, 2, -1) for plane in planes], -1).reshape(record.shape)
    assert (data.dtype, data.nbytes) == (record.dtype, tokens * kv.stored_bytes)
    split = kv.split(jnp.asarray(data))
    assert split[0].shape[2] == room
    for own, plane in zip(split, planes, strict=True):
        np.testing.assert_array_equal(own[:, :, :tokens], plane)
    # The same is linked.
    pool, angle = jnp.zeros(kv.half(40).shape), jnp.full((tokens, 1, kv.width // 2), 0.6, jnp.float32)
    write = jax.jit(functools.partial(link, layer=1, codec=kv.codec_name))
    slot = jnp.arange(tokens, dtype=jnp.int32)
    for got, want in zip(*(write(pool, pool, [image], slot, angle, angle) for image in (split, planes)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.asarray(got).any((1, 2)).sum() == tokens
