"""The format's version is tied to all that keys and records hold: a change of either needs another version."""

from __future__ import annotations

import dataclasses
import hashlib
import types

import numpy as np
import pytest
import safetensors.numpy

from vlcache_jax.cache import keys
from vlcache_jax.cache.items import _TABLES, COLUMNS, FOLDER
from vlcache_jax.cache.keys import FORMAT_VERSION, SHARED, TenantSalt
from vlcache_jax.cache.record import Meta, Record, blocks
from vlcache_jax.cache.tiers import disk, object_store, redis_store
from vlcache_jax.cache.tiers.record_file import file_name, make_header
from vlcache_jax.convert.manifest import fingerprint
from vlcache_jax.engine.completions import RequestMetrics
from vlcache_jax.engine.request import Request
from vlcache_jax.inputs.layout import Moment
from vlcache_jax.inputs.processor import ImageProcessor

# Lines of other versions stay: a version that was in use once must never stand for something else.
GOLDEN = {3: "19e68e343ead6518a853e89992eb382ba3ff0181383f8c89107e1eca1a9adc2d"}
STATED = "5c87ef4f6ce95da4d0649e120ac8f96f1335319978075eb032c06059cde31cbc"  # a file with states
MAPPED = "5117f23bbf996243a041650a7b645673292fd6aa557334c6e9cca068a873c2ce"  # files with maps
WHOLE = Meta(
    "a" * 64, "b" * 64, "c" * 64, False, (1, 4, 6), 6, "bfloat16", (2, 2, 8, 2, 4), model="d" * 64, codec="bfloat16"
)
LIBRARIES = {"libraries-1": "a2b1b600316c983ea28d33610e1933080ae88070ac0c54870f64b516d8e024c1"}


def digest(*parts):
    made = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        made.update(b"%d " % len(data) + data)
    return made.hexdigest()


def file_of(meta):
    """A record's whole file."""
    record = Record(meta)
    for number, buffer in enumerate(record.buffers):
        buffer[:] = (np.arange(buffer.size) % 97 + number).reshape(buffer.shape)
    record.complete()
    data = b"".join(
        rows.tobytes() for part in record.meta.parts for rows in blocks(record.meta, record.parts[part])
    )  # fmt: skip
    return make_header(record.meta) + data


def all_keys():
    """Of a picture and of what stands before it."""
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    content = keys.content_key(pixels)
    yield from (content, keys.content_key(pixels, pixels), keys.group_key([content]), keys.request_key([content]))
    processor = ImageProcessor(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=3136, max_pixels=50176, mean=(0.5, 0.4, 0.3),
        std=(0.3, 0.2, 0.1),
    )  # fmt: skip
    settings, weights = processor.settings({"max_pixels": 40000}), fingerprint("ab" * 32, ["bfloat16", "float32"])
    for salt in (None, "", "mine", SHARED, TenantSalt("tenant", "own")):
        yield keys.owner_key(salt)
        yield keys.alias_key(b"file", salt)
        yield keys.entry_key(content, settings=settings, fingerprint=weights, codec="float32 int8", salt=salt)
    images = [types.SimpleNamespace(key=letter * 64, num_tokens=2) for letter in "ab"]
    token_ids, moments = np.arange(9, dtype=np.int32), (None, Moment(0, 1, 7))
    yield from Request(None, token_ids, (2, 5), tuple(images), moments, "", RequestMetrics()).contexts


def all_records():
    """Encoder rows, K, V, and coded ones."""
    whole = WHOLE
    headers = {"buffers": "planes"}  # attributes that the header has under another name
    later = {"states", "maps"}
    yield [headers.get(field.name, field.name) for field in dataclasses.fields(Meta) if field.name not in later]
    yield file_of(whole)
    yield file_of(dataclasses.replace(whole, dtype="uint8", shape=(2, 2, 8 * 12), buffers=(8, 4), codec="float32 int8"))
    rows = dataclasses.replace(whole, context=None, canonical=True, shape=(3, 8, 16))
    yield file_of(rows)
    for meta in (whole, rows):
        yield meta.name, file_name(meta.name)


def test_keys_and_records_belong_to_the_version():
    """If this fails, keys or records have changed: raise `FORMAT_VERSION`, and add a line to `GOLDEN`."""
    assert GOLDEN.get(FORMAT_VERSION) == digest(*all_keys(), *all_records())
    assert len(set(GOLDEN.values())) == len(GOLDEN)


def test_states_came_later():
    """Files without them are as they were, so the version stayed."""
    assert digest(file_of(dataclasses.replace(WHOLE, states=5))) == STATED
    assert b"states" not in file_of(WHOLE)


def test_maps_came_later():
    mapped = dataclasses.replace(WHOLE, states=5, maps=6)
    coded = dataclasses.replace(
        mapped, dtype="uint8", shape=(2, 2, 8 * 12), buffers=(8, 4), codec="float32 int8 ends-0.5"
    )
    assert digest(file_of(mapped), file_of(coded)) == MAPPED
    assert b"maps" not in file_of(dataclasses.replace(WHOLE, states=5))
    names = safetensors.numpy.load(file_of(coded))
    assert names["maps.1"].dtype == np.int8
    assert names["states.1"].shape == (5,)


def test_places_bear_the_version():
    assert {disk.FOLDER, object_store.FOLDER} == {f"vlcache-{FORMAT_VERSION}"}
    assert redis_store._key("space", "a").startswith(b"vlcache-%d:" % FORMAT_VERSION)


def test_libraries_belong_to_their_version():
    """If this fails, what libraries keep has changed: raise `LIBRARIES_FOLDER`, unless tables alone were added."""
    assert LIBRARIES.get(FOLDER) == digest(_TABLES, COLUMNS)


@pytest.mark.parametrize("change", [{"tokens": 5}, {"canonical": True}, {"owner": "e" * 64}, {"model": ""}])
def test_a_digest_tells_records_apart(change):
    meta = dataclasses.replace(WHOLE, dtype="float32", shape=(2, 2, 6, 2, 4), codec="float32")
    assert digest(file_of(meta)) != digest(file_of(dataclasses.replace(meta, **change)))
