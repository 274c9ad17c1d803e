"""The form of records: what the planner reserves is what a found record is compared with."""

import dataclasses

import numpy as np
import pytest

from vlcache_jax.cache.lookups import misfit
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.models import load_config
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.preparation.planner import MetaBuilder

ENTRY, OWNER, CONTEXT, GRID = "a" * 64, "b" * 64, "c" * 64, (1, 4, 6)


@pytest.fixture(params=[None, "int8"], ids=str)
def forms(request, checkpoints):
    config = load_config(checkpoints("qwen3_vl"))
    codec = request.param and CODECS[request.param]
    return MetaBuilder(config, KVShape.of(config, np.float32, codec), lambda: "d" * 64)


@pytest.fixture(params=["encoder", "kv"])
def record(request, forms):
    """What is found of a record that was reserved with room for 16 tokens."""
    if request.param == "encoder":
        return forms.encoder(ENTRY, OWNER, GRID, 16).with_room(6)
    return forms.keys_and_values(ENTRY, OWNER, CONTEXT, True, GRID, 16).with_room(6)


@pytest.mark.parametrize("grid", [None, GRID])
@pytest.mark.parametrize("owner", [None, OWNER])
def test_what_was_reserved_is_of_the_form(forms, record, grid, owner):
    assert misfit(record, forms.of, grid, owner) is None
    assert misfit(dataclasses.replace(record, checksums=(1, 2)), forms.of, grid, owner) is None


def changes(record):
    """Every field with another value, but those that only the record itself tells."""
    shape = record.shape
    yield from ({"shape": (*shape[:i], shape[i] + 1, *shape[i + 1 :])} for i in range(len(shape)))
    yield from ({"shape": shape[:-1]}, {"shape": (*shape, 1)}, {"shape": tuple(-one for one in shape)})
    yield from ({"tokens": tokens} for tokens in (-6, 0, 5, 7, 10**30))
    yield from ({"dtype": dtype} for dtype in ("bfloat16", "uint16", ""))
    yield from ({"model": ""}, {"codec": "float16"}, {"buffers": (3,)}, {"buffers": (0,)})
    yield from ({"grid": grid} for grid in ((1, 4, 8), (0, 4, 6), (1, -4, -6), (1, 3, 8), (10**12, 10**12, 10**12)))
    yield {"canonical": False} if record.context is None else {"context": "../x"}


def test_whatever_else_a_record_says_does_not_fit(forms, record):
    for change in changes(record):
        found = dataclasses.replace(record, **change)
        for grid in (None, GRID):
            assert misfit(found, forms.of, grid, None), (change, grid)
    assert misfit(record, forms.of, (1, 6, 4), None)
    assert misfit(record, forms.of, GRID, "e" * 64)


def test_a_record_that_is_not_canonical_is_one(forms):
    record = forms.keys_and_values(ENTRY, OWNER, CONTEXT, False, GRID, 6)
    assert misfit(record, forms.of, GRID, OWNER) is None
