"""Complete records that need no model."""

from __future__ import annotations

import dataclasses

import numpy as np

from vlcache_jax.cache.keys import owner_key
from vlcache_jax.cache.record import (
    DamagedError,
    EntryGoneError,
    Found,
    Line,
    Meta,
    Record,
    Tier,
    TierError,
    Why,
    blocks,
    verified,
)
from vlcache_jax.cache.store import PendingWrite

GRID = (1, 4, 6)


def key(number):
    return f"{number:064x}"


def make(
    number=1, context=None, *, tokens=6, padded=8, dtype="float32", buffers=(), states=0, maps=0, layers=3, seed=0,
    owner="me",
):  # fmt: skip
    """A complete record."""
    shape = (layers, 2, padded, 2, 8)
    if context is None:
        shape = (layers, padded, 16)
    elif buffers:
        shape, dtype = (layers, 2, padded * sum(buffers)), "uint8"
    codec = "float32 int8" if buffers else dtype
    meta = Meta(
        key(number), owner_key(owner), context, True, GRID, tokens, dtype, shape, buffers, states, maps, key(99), codec
    )
    record = Record(meta)
    rng = np.random.default_rng((seed, number))
    for buffer in record.buffers:
        buffer[:] = rng.integers(0, 50, buffer.shape) if buffers else rng.normal(size=buffer.shape).astype(dtype)
    record.complete()
    return record


CASES = {
    "encoder": make(),
    "kv": make(context=key(7)),
    "bfloat16": make(context=key(7), dtype="bfloat16"),
    "coded": make(context=key(7), buffers=(16, 4)),
    "whole": make(context=key(7), tokens=8),
    "states": make(context=key(7), dtype="bfloat16", states=10),
    "maps": make(context=key(7), dtype="bfloat16", states=10, maps=24),
    "coded maps": make(context=key(7), buffers=(16, 4), states=10, maps=24),
}


def parts(record):
    return record.parts


def write(tier, *records):
    for record in records:
        assert tier.write(record.meta, parts(record)) == "stored"


def names(tier):
    return [line.name for line in tier.lines()]


def found(tier, record):
    """What a tier says of a record, or None."""
    return next((one.meta for one in tier.find(record.meta.entry) if one.meta.name == record.meta.name), None)


def verified_read(tier, meta, room=None):
    """A record's data as a tier gives them, known to be whole."""
    meta = meta if room is None else meta.with_room(room)
    places = Record(meta).parts
    return [verified(meta, part, buffers) for part, buffers in tier.read(meta, meta.parts, places.__getitem__)]


def assert_whole(tier, record):
    """A record that was written is found and read as it was."""
    meta = found(tier, record)
    assert meta is not None
    assert meta == record.meta.with_room(record.meta.tokens)
    axis = 0 if record.meta.context is None else 1
    for buffers in zip(verified_read(tier, meta, record.meta.padded), record.parts.values(), strict=True):
        for number, (array, written) in enumerate(zip(*buffers, strict=True)):
            if number < record.meta.kv_buffers:  # padding is anybody's
                array, written = (np.take(part, range(record.meta.tokens), axis) for part in (array, written))
            np.testing.assert_array_equal(array, written)


class DictTier(Tier):
    """Keeps records in a dictionary, and lends copies of them."""

    label = "disk"
    is_local = True

    def __init__(self, *, now=lambda: 0.0):
        self.kept, self.staying, self.now = {}, set(), now

    def find(self, entry):
        return [Found(meta, written) for meta, written, _ in self.kept.values() if meta.entry == entry]

    def read(self, meta, parts, place):
        if meta.name not in self.kept:
            raise EntryGoneError(meta.name)
        for part in parts:
            data = self.kept[meta.name][2][part]
            buffers = place(part)
            for rows, ours in zip(blocks(meta, buffers), blocks(meta.with_room(meta.tokens), data), strict=True):
                rows[:] = ours
            yield part, buffers

    def write(self, meta, parts):
        if meta.name in self.kept:
            return "known"
        axis = 0 if meta.context is None else 1
        assert not meta.buffers
        data = {part: (np.take(array, range(meta.tokens), axis).copy(),) for part, (array,) in parts.items()}
        self.kept[meta.name] = meta.with_room(meta.tokens), self.now(), data
        return "stored"

    def delete(self, name):
        self.kept.pop(name, None)

    def lines(self):
        return [Line(name, meta.nbytes, written) for name, (meta, written, _) in self.kept.items()]

    def pin(self, name, is_pinned):
        (self.staying.add if is_pinned else self.staying.discard)(name)

    def pinned(self, entry):
        return {name for name in self.staying if name.split("/")[1] == entry}

    def counts(self):
        return {"records": len(self.kept)}


def load(store, tier, name):
    """A record that a store brings in from a tier; None if it does not come."""
    meta = next((one.meta for one in tier.find(name.split("/")[1]) if one.meta.name == name), None)
    [record] = [None] if meta is None else store.reserve([dataclasses.replace(meta, checksums=())], source="disk")
    if record is None:
        return None
    try:
        PendingWrite(store, tier, meta, record).read()
    except DamagedError:
        store.withdraw(record, Why.corrupt)
    except TierError:
        store.withdraw(record)
    return record if record.is_ready else None
