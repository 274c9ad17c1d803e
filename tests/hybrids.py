"""Tests of models with states share these sizes, the entries of small images, and the comparison of answers."""

from __future__ import annotations

import pytest

from vlcache_jax import BucketSizes, SamplingParams
from vlcache_jax.device import kv_shape

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
BUCKETS = BucketSizes(rows=(64, 256), patches=(256,), sequences=(4,), window=4)


@pytest.fixture(scope="module", autouse=True)
def small_images_are_stored():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(kv_shape, "STATED_TOKENS", 1)
        yield


def ask(llm, *conversations, params=GREEDY, **options):
    return llm.chat([*conversations], params, use_tqdm=False, **options)


def values(outputs):
    """Tokens and their log-probabilities, which are equal to the last bit or not at all."""
    return [(one.token_ids, [x.chosen for x in one.logprobs]) for output in outputs for one in output.outputs]


def found(output):
    return [(image.match, image.kv, image.why) for image in output.cache.images]
