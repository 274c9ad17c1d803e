"""Records as buffers."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from vlcache_jax.cache.record import Meta, Record
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.pallas_kernels import CODECS, link


@pytest.mark.slow_for("int4", "32")
@pytest.mark.parametrize(("codec", "tokens"), [("int8", 32), ("int8", 5), ("int4", 4), ("int4", 3), ("auto", 5)])
def test_saved_kv_is_linked_like_its_buffers(codec, tokens):
    kv, rng = KVShape(2, 2, 128, np.dtype(np.float32), CODECS.get(codec)), np.random.default_rng(tokens)
    pairs = [rng.normal(size=kv.half(tokens).shape).astype(np.float32) for _ in range(2 * kv.layers)]
    coded = [[x] if kv.codec is None else jax.jit(kv.codec.encode)(x) for x in pairs]
    specs = kv.stored(kv.layers, 2, tokens)
    buffers = [np.stack(own).reshape(spec.shape) for own, spec in zip(zip(*coded, strict=True), specs, strict=True)]
    assert [buffer.dtype for buffer in buffers] == [spec.dtype for spec in specs]
    # A record is filled by what has all buffers in one array.
    data = kv.record(tokens)
    meta = Meta("", "", "", True, (1, 2, 2), tokens, data.dtype.name, data.shape, kv.code_bytes)
    assert (meta.padded, meta.nbytes) == (tokens, tokens * kv.stored_bytes)
    record, order = Record(meta), rng.permutation(tokens)
    for number, rows in enumerate(coded):
        joined = np.concatenate(rows, -1)
        if kv.codec is not None:
            assert joined.shape == kv.joined(tokens).shape[1:]
        for own, buffer in zip(jax.jit(kv.split)(joined), rows, strict=True):
            np.testing.assert_array_equal(own, buffer)
        record.put(*divmod(number, 2), order, joined[order])
    filled = [own.reshape(buffer.shape) for own, buffer in zip(record.buffers, buffers, strict=True)]
    for own, buffer in zip(filled, buffers, strict=True):
        assert own.flags.c_contiguous
        np.testing.assert_array_equal(own, buffer)
    # The same is linked.
    pool, angle = np.zeros(kv.half(40).shape, np.float32), np.full((tokens, 1, kv.width // 2), 0.6, np.float32)
    write = jax.jit(functools.partial(link, layer=1, codec=kv.codec_name))
    slot = np.arange(tokens, dtype=np.int32)
    for got, want in zip(*(write(pool, pool, [image], slot, angle, angle) for image in (filled, buffers)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.asarray(got).any((1, 2)).sum() == tokens
