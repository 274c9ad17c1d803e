import itertools
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.engine.sampling import MAX_BANNED, SamplerInputs, SamplingParams, mark_seen, sample, score

V = 50
NUMBERS = (
    "n", "temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "repetition_penalty", "logprobs",
)  # fmt: skip


def inputs(count, **changes):
    defaults = {
        "temperature": np.zeros(count, np.float32), "top_k": np.zeros(count, np.int32),
        "top_p": np.ones(count, np.float32), "penalty": np.ones(count, np.float32),
        "seed": np.arange(count, dtype=np.uint32), "step": np.zeros(count, np.int32),
        "banned": np.full((count, MAX_BANNED), V, np.int32), "sequence": np.full(count, 99, np.int32),
        "logprobs": np.zeros(count, bool),
    }  # fmt: skip
    return SamplerInputs(**defaults | {k: np.asarray(v, defaults[k].dtype) for k, v in changes.items()})


@pytest.fixture
def logits():
    return 3 * jax.random.normal(jax.random.key(0), (4, V))


run = jax.jit(sample)
NOTHING = jnp.zeros((4, V), bool)


def test_greedy_and_logprobs(logits):
    sampled, _ = run(logits, NOTHING, inputs(4, logprobs=[True] * 4))
    assert (sampled.token == logits.argmax(1)).all()
    expected = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(sampled.logprob, expected.max(1), atol=1e-6)
    np.testing.assert_allclose(sampled.top_logprob, -np.sort(-expected, axis=1)[:, :20], atol=1e-6)
    np.testing.assert_array_equal(sampled.top_token, np.argsort(-expected, axis=1)[:, :20])


def test_truncation_is_the_librarys(logits):
    """Only tokens that transformers' warpers leave are ever drawn, and as often as their probability says."""
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import (
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    seen_ids = [3, 7, int(logits[0].argmax()), int(logits[0].argmin())]
    x = torch.tensor(np.asarray(logits[:1]))
    x = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen_ids]), x)
    for warper in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9)):
        x = warper(None, x)
    expected = torch.softmax(x, -1)[0].numpy()
    assert 2 < (expected > 0).sum() < 12

    count = 2000
    lane = np.zeros(len(seen_ids), np.int32)
    seen = mark_seen(jnp.zeros((1, V), bool), lane, np.array(seen_ids, np.int32))
    settings = inputs(
        count, temperature=[0.8] * count, top_k=[12] * count, top_p=[0.9] * count, penalty=[1.3] * count,
        sequence=[0] * count,
    )  # fmt: skip
    sampled, _ = run(jnp.repeat(logits[:1], count, axis=0), seen, settings)
    frequency = np.bincount(sampled.token, minlength=V) / count
    assert (frequency[expected == 0] == 0).all()
    np.testing.assert_allclose(frequency, expected, atol=0.04)


def test_a_row_depends_on_itself_alone(logits):
    settings = {
        "temperature": [1.0, 0, 0.7, 1.5],
        "top_p": [0.9, 1, 1, 0.5],
        "seed": [5, 6, 7, 8],
        "step": [1, 2, 3, 4],
    }
    together, _ = run(logits, NOTHING, inputs(4, **settings))
    for row in range(4):
        alone, _ = run(
            logits[row : row + 1], NOTHING, inputs(1, **{name: [value[row]] for name, value in settings.items()})
        )
        assert alone.token[0] == together.token[row]


def test_seen_tokens_are_added(logits):
    sampled, seen = run(logits, NOTHING, inputs(4, sequence=[2, 0, 99, 1]))
    assert seen[2, sampled.token[0]]
    assert seen[0, sampled.token[1]]
    assert seen.sum() == 3


def test_banned_tokens_do_not_come(logits):
    best = np.argsort(-logits, axis=1)
    banned = np.full((4, MAX_BANNED), V)
    banned[:, :2] = best[:, :2]
    sampled, _ = run(logits, NOTHING, inputs(4, banned=banned))
    np.testing.assert_array_equal(sampled.token, best[:, 2])


def test_score(logits):
    target = np.array([1, 2, int(logits[2].argmax()), 4], np.int32)
    logprob, greedy = score(logits, target)
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits)[np.arange(4), target], atol=1e-6)
    assert greedy.tolist() == [int(logits[i].argmax()) == target[i] for i in range(4)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", None), ("n", True), ("temperature", -1), ("temperature", "hot"), ("temperature", float("nan")),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5), ("seed", -1), ("seed", 2**32), ("max_tokens", 0),
        ("max_tokens", None), ("min_tokens", 257), ("min_tokens", -1), ("stop", [""]), ("stop", [3]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("ignore_eos", 1), ("repetition_penalty", 0),
        ("stop", 5), ("stop_token_ids", 5), ("n", 1025), ("logprobs", 21), ("logprobs", -1), ("logprobs", True),
        ("stop", ["a"] * 65), ("stop", ["a" * 1025]), ("stop", np.array("a")), ("stop", itertools.repeat("a")),
        ("stop_token_ids", range(4097)), ("stop_token_ids", itertools.count()), ("stop_token_ids", [-(10**5000)]),
        ("temperature", Decimal("0.5")), ("temperature", Fraction(10**400)), ("top_p", float("nan")),
        ("top_p", Fraction(1, 10**400)), ("repetition_penalty", np.float32("nan")),
        *((name, sign * 10**digits) for name in NUMBERS for sign in (-1, 1) for digits in (400, 5000)),
    ],
    ids=lambda value: repr(value)[:20] if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_bad_parameters(field, value):
    with pytest.raises(ValueError, match=f"{field} must be") as caught:
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


def test_unknown_parameters():
    with pytest.raises(TypeError, match="presence_penalty"):
        SamplingParams(presence_penalty=1.0)


def test_defaults_come_from_the_checkpoint():
    file = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    resolved = SamplingParams(top_k=3).resolve(file)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.repetition_penalty) == (0.7, 0.8, 3, 1.05)
    assert SamplingParams().resolve({"temperature": 0.7}).is_plain_greedy
    assert SamplingParams().resolve({"do_sample": True, "temperature": None, "top_k": None}).temperature == 1
    assert not SamplingParams(logprobs=0).resolve({}).is_plain_greedy
