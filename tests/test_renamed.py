"""Earlier names of public arguments work for one release and warn at the line of the user."""

import warnings

import pytest

import vlcache_jax
from vlcache_jax import AsyncLLM, BucketSizes, CacheConfig, EngineConfig
from vlcache_jax.common.renamed import current
from vlcache_jax.reuse.selection import parse_policy


def warned(call):
    """What a call returns, and its warning, which must name this file."""
    with pytest.warns(FutureWarning, match="deprecated") as caught:
        found = call()
    [one] = caught
    assert one.filename == __file__
    return found, str(one.message)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("neighbours", "discovered_peers", list),
        ("salt_bytes", "max_bytes_per_salt", 5),
        ("variants", "max_contexts_per_image", 2),
    ],
)
def test_options_of_the_cache(old, new, value):
    config, message = warned(lambda: CacheConfig(**{old: value}))
    assert config == CacheConfig(**{new: value})
    assert message.startswith(f"CacheConfig({old}=) is deprecated")
    assert message.endswith(f"use {new}=")
    assert warned(lambda: getattr(config, old))[0] == value


@pytest.mark.parametrize(
    ("name", "old", "new"), [("load", "link", "kv"), ("load", "compute", "none"), ("admit", "second", "second_use")]
)
def test_values_of_options_of_the_cache(name, old, new):
    config, message = warned(lambda: CacheConfig(**{name: old}))
    assert getattr(config, name) == new
    assert message.endswith(f"use {new!r}")


@pytest.mark.parametrize("make", [EngineConfig, EngineConfig.of])
def test_bucket_sizes(make):
    sizes = BucketSizes(rows=(16, 64))
    assert warned(lambda: make("tiny-vqa", ladder=sizes))[0].buckets == sizes
    assert warned(lambda: vlcache_jax.Ladder)[0] is BucketSizes


def test_options_of_searches():
    from vlcache_jax import library

    assert warned(lambda: library.Searches)[0] is library.SearchOptions
    given = {"k": 1, "rounds": 2, "tokens": 3, "least": 0.5}
    names = {"k": "top_k", "rounds": "max_rounds", "tokens": "max_tokens", "least": "min_score"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="retriever must be"):
            library.SearchOptions(None, **given)
    assert [str(one.message).split()[-1] for one in caught] == [f"{names[name]}=" for name in given]


def test_arguments_of_methods():
    coroutine, message = warned(lambda: AsyncLLM.rerank(None, "query", [], most=2))
    assert coroutine.cr_frame.f_locals["max_in_flight"] == 2
    coroutine.close()
    assert message.startswith("rerank(most=) is deprecated")
    assert message.endswith("use max_in_flight=")
    with pytest.raises(TypeError, match="pass only max_in_flight"):
        AsyncLLM.rerank(None, "query", [], most=1, max_in_flight=1)


def test_names_of_policies():
    policy, message = warned(lambda: parse_policy("asked-0.1"))
    assert policy == parse_policy("question-0.1")
    assert message.startswith("reuse='asked-0.1' is deprecated")


def test_both_names_at_once_are_refused():
    with pytest.raises(TypeError, match="CacheConfig: variants is the deprecated name of max_contexts_per_image"):
        CacheConfig(variants=1, max_contexts_per_image=1)
    assert current("f", {"a": "b"}, {"b": 1, "c": 2}) == {"b": 1, "c": 2}


def test_current_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CacheConfig(load="kv", admit="second_use", max_contexts_per_image=1, max_bytes_per_salt=1)
        EngineConfig.of("tiny-vqa", buckets=None)
    with pytest.raises(AttributeError, match="no attribute 'Ladders'"):
        _ = vlcache_jax.Ladders
