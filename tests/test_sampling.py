import copy
import inspect
import itertools
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from vlcache_jax.sampling import SamplingParams

NUMBERS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs",
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", "two"), ("n", True), ("temperature", -1), ("temperature", "hot"), ("temperature", float("nan")),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("max_tokens", 0),
        ("seed", -(2**63) - 1), ("seed", 2**64), ("min_tokens", 257), ("min_tokens", -1), ("stop", [""]), ("stop", [3]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("ignore_eos", 1), ("repetition_penalty", 0),
        ("stop", 5), ("stop_token_ids", 5), ("n", 1025), ("logprobs", 21), ("logprobs", -1), ("logprobs", True),
        ("stop", ["a"] * 65), ("stop", ["a" * 1025]), ("stop", np.array("a")), ("stop", itertools.repeat("a")),
        ("stop_token_ids", range(4097)), ("stop_token_ids", itertools.count()), ("stop_token_ids", [-(10**5000)]),
        ("temperature", Decimal("0.5")), ("temperature", Fraction(10**400)), ("top_p", float("nan")),
        ("top_p", Fraction(1, 10**400)), ("repetition_penalty", np.float32("nan")),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", float("nan")), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("frequency_penalty", "much"),
        ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", True),
        ("include_stop_str_in_output", 1), ("skip_special_tokens", None), ("skip_special_tokens", "no"),
        ("logit_bias", 5), ("logit_bias", [5]), ("logit_bias", "ab"), ("logit_bias", {"five": 1.0}),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {True: 1.0}), ("logit_bias", {5: None}), ("logit_bias", {5: True}),
        ("logit_bias", {5: float("nan")}), ("logit_bias", {5: -float("inf")}), ("logit_bias", {5: 10**5000}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)), ("logit_bias", itertools.repeat((5, 1.0))),
        ("bad_words", "cat"), ("bad_words", [""]), ("bad_words", [3]), ("bad_words", ["a"] * 33), ("bad_words", 5),
        ("bad_words", {}),
        ("bad_words", ["a" * 1025]), ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", 5),
        ("allowed_token_ids", ["a"]), ("allowed_token_ids", "12"), ("allowed_token_ids", itertools.count()),
        *((name, sign * 10**digits) for name in NUMBERS for sign in (-1, 1) for digits in (400, 5000)),
    ],
    ids=lambda value: repr(value)[:20] if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_bad_parameters(field, value):
    with pytest.raises(ValueError, match=f"^{field} must (be|have|map)") as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


def test_as_many_stops_as_there_may_be():
    params = SamplingParams(stop=["a" * 1024] * 64, stop_token_ids=range(4096))
    assert (params.stop, params.stop_token_ids) == (("a" * 1024,) * 64, tuple(range(4096)))


def test_fractions_are_numbers():
    params = SamplingParams(temperature=Fraction(1, 2), top_p=Fraction(9, 10)).resolve({})
    assert (params.temperature, params.top_p) == (0.5, Fraction("0.9"))


def test_numbers_of_numpy_and_no_stop():
    params = SamplingParams(n=np.int64(2), top_p=np.float32(0.5), stop=None, stop_token_ids=None)
    assert (params.stop, params.stop_token_ids) == ((), ())


def test_what_lists_and_mappings_become():
    """Parameters are the same after they were resolved."""
    params = SamplingParams(
        logit_bias={7: 1000, np.int64(3): Fraction(-1, 2)}, bad_words=["a", "b"], allowed_token_ids=range(3), top_k=-1
    )
    assert params.logit_bias == ((3, -0.5), (7, 100.0))
    assert (params.bad_words, params.allowed_token_ids, params.top_k) == (("a", "b"), (0, 1, 2), 0)
    resolved = params.resolve({})
    assert resolved.resolve({}) == resolved == params.resolve({"top_k": 9})
    nothing = SamplingParams()
    assert (nothing.logit_bias, nothing.bad_words, nothing.allowed_token_ids) == ((), (), None)
    assert SamplingParams(bad_words=None, logit_bias=None) == SamplingParams(bad_words=[], logit_bias={}) == nothing


def test_an_answer_as_long_as_the_context_allows():
    assert SamplingParams(max_tokens=None, min_tokens=1000).max_tokens is None


def test_what_is_left_open_is_what_it_is_without():
    nothing = dict.fromkeys(NUMBERS)
    assert SamplingParams(**nothing) == SamplingParams.from_optional(**nothing) == SamplingParams(max_tokens=None)
    assert SamplingParams(seed=-1, logit_bias={"5": 1.0, 7: 2}) == SamplingParams(logit_bias={5: 1.0, 7: 2.0})
    assert [SamplingParams(seed=seed).seed for seed in (-(2**63), 2**64 - 1)] == [-(2**63), 2**64 - 1]


def test_attributes_can_be_set_and_are_checked():
    params = SamplingParams(stop=["a"])
    other = params.clone()
    params.max_tokens, params.stop, params.top_k, params.min_p = 64, "x", -1, None
    assert params == SamplingParams(max_tokens=64, stop=["x"], top_k=0)
    assert other == SamplingParams(stop="a")
    with pytest.raises(ValueError, match=r"^temperature must be a number from 0"):
        params.temperature = "hot"
    with pytest.raises(TypeError, match=r"^SamplingParams has no argument max_token; did you mean max_tokens\?$"):
        params.max_token = 3
    params.min_tokens = 65  # in whatever order they are set
    with pytest.raises(ValueError, match=r"^min_tokens must be at most max_tokens = 64, got 65"):
        params.resolve({})
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)


def test_unknown_parameters():
    with pytest.raises(TypeError, match=r"^SamplingParams has no argument temprature; did you mean temperature\?$"):
        SamplingParams(temprature=0)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)
    assert copy.copy(pickle.loads(pickle.dumps(SamplingParams(n=2)))) == SamplingParams(n=2)
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["n", "temperature"]


def test_defaults_come_from_the_checkpoint():
    file = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    resolved = SamplingParams(top_k=3).resolve(file)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.repetition_penalty) == (0.7, 0.8, 3, 1.05)
    assert SamplingParams().resolve({"temperature": 0.7}).temperature == 0
    assert SamplingParams().resolve({"do_sample": True, "temperature": None, "top_k": None}).temperature == 1
