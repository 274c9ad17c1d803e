"""Policies that choose rows on the device, against choices made by hand from whole runs."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helper import FEW, SIZES, user
from vlcache_jax import LLM, BucketSizes, SamplingParams
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.models import Rows, rope
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import CacheBlend, KVShare, Projected, QuestionScores, choose, narrow, parse_policy
from vlcache_jax.study.probe import Placed, Probe
from vlcache_jax.study.questions import user_turn
from vlcache_jax.study.sensitivity import ProfileCase, prepare

POLICIES = ("cacheblend", "cacheblend-lmcache", "cacheblend-proto", "kvshare", "kvshare-attn", "asked")


@pytest.fixture(scope="module", params=[pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
def llm(request, checkpoints):
    with LLM(checkpoints(request.param), **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def case(llm, textured_image):
    images = [textured_image(150, 120), textured_image(90, 200)]
    turn = lambda text, other: [{"role": "user", "content": user_turn(images, text, "text_first", other)}]  # noqa: E731
    return ProfileCase(
        turn("How many?", "Look here:"), [turn("Please describe this image.", "It was dark.")], (5, 77, 30, 8)
    )


@pytest.fixture(scope="module")
def probe(llm):
    return Probe(llm)


@pytest.fixture(scope="module")
def runs(probe, case):
    return prepare(probe, case)


def full_attention(q, k, length):
    """Weights of each row over the rows before it and itself, [H, n, n]."""
    heads = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("qhd,khd->hqk", q, heads) / np.sqrt(q.shape[2])
    scores = np.where(np.tril(np.ones((len(q), len(q)), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True))[:, :length]


@functools.partial(jax.jit, static_argnums=0)
def rotate(text, k, position):
    cos, sin = rope.text_rotation(position, text.rope_theta, text.mrope_section, text.mrope_interleaved, jnp.float32)
    return rope.rotate(k, cos, sin)


def scores_by_hand(policy, probe, runs):
    """The specification's formulas (A.7, A.8) on the rows of a cold run, in float64."""
    placed = runs.placed
    n, is_image = len(placed.layout), placed.is_image
    total = np.zeros(n)
    for layer in policy.scored_layers:
        q, k, raw_k, v = (np.asarray(part, np.float64)[:n] for part in probe.project(placed, runs.cold, layer))
        old_raw, old_v = (np.asarray(part[layer], np.float64)[:n] for part in runs.donor)
        match policy:
            case CacheBlend(variant="proto"):
                total += ((v - old_v) ** 2).sum((1, 2))
            case CacheBlend(variant="lmcache"):
                total += ((raw_k - old_raw) ** 2).sum((1, 2))
            case CacheBlend():
                total += ((v - old_v) ** 2).sum((1, 2)) + ((raw_k - old_raw) ** 2).sum((1, 2))
            case KVShare(selector="dhd"):
                received = full_attention(q, k, placed.prompt_length).sum(1)  # [H, n]
                received = received.reshape(k.shape[1], -1, n).sum(1).T
                total += (received * np.abs(v - old_v).sum(2)).sum(1)
            case QuestionScores():
                question = placed.images[-1].start + placed.images[-1].length
                received = full_attention(q, k, placed.prompt_length)[:, question:].sum((0, 1))
                distance = ((v - old_v) ** 2).sum((1, 2)) + ((raw_k - old_raw) ** 2).sum((1, 2))
                total += received * np.sqrt(distance)
            case KVShare():
                position = np.zeros((3, len(placed.x)), np.int32)
                position[:, :n] = placed.layout.positions
                old_k = np.asarray(rotate(probe.config.text, runs.donor[0][layer], position), np.float64)[:n]
                old_k = np.where(is_image[:, None, None], old_k, k)
                one, two = (full_attention(q, keys, placed.prompt_length) for keys in (k, old_k))
                total += np.abs(one - two).sum((0, 1))
    return np.where(is_image, total, -np.inf)


def logits_by_hand(probe, runs, check, chosen):
    """All rows up to the check layer, then those chosen for each layer."""
    write = probe.text_only(runs.placed)
    write[: check + 1] = True
    for layer, rows in enumerate(chosen, check + 1):
        write[layer, rows] = True
    return probe.run(runs.placed, write, runs.donor).logits


@pytest.mark.slow_for("0.6", "kvshare", "cacheblend")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ratio", ["0.15", "0.6"])
def test_the_rows_and_the_logits_are_those_chosen_by_hand(llm, case, probe, runs, name, ratio):
    policy = parse_policy(f"{name}-{ratio}")
    layers, check = probe.num_layers, policy.check_layer
    keep = int(Fraction(ratio) * runs.placed.is_image.sum())
    chosen = np.argsort(-scores_by_hand(policy, probe, runs), kind="stable")[:keep]
    expected = logits_by_hand(probe, runs, check, [chosen] * (layers - check - 1))
    llm.reset_mm_cache()
    llm.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.reset_prefix_cache()  # the system's text would be there
    [found] = llm.score(case.formal, [case.answer], reuse=policy, keep_logits=True, use_tqdm=False)
    np.testing.assert_allclose(found.logits, expected, atol=3e-5 * np.abs(expected).max())
    text = len(runs.placed.layout) - runs.placed.is_image.sum()
    assert found.cache.rows == (len(runs.placed.layout),) * (check + 1) + (text + keep,) * (layers - check - 1)
    for image, span in zip(found.cache.images, runs.placed.images, strict=True):
        mine = np.count_nonzero((chosen >= span.start) & (chosen < span.start + span.length))
        assert image.recomputed == (span.length,) * (check + 1) + (mine,) * (layers - check - 1)
    assert not found.cache.exact
    [again] = llm.score(case.formal, [case.answer], reuse="0.1", keep_logits=True, use_tqdm=False)
    assert np.abs(found.logits - again.logits).max() > 1e-4


def test_sizes_of_a_schedule_with_chosen_members(llm, case, probe, runs):
    schedule = Schedule((400, 400, 250, 60), "any", "", allow_other_model=True)
    policy = QuestionScores(schedule=schedule)
    ranked = np.argsort(-scores_by_hand(policy, probe, runs), kind="stable")
    total = runs.placed.is_image.sum()
    counts = [total * level // 500 for level in (250, 60)]
    expected = logits_by_hand(probe, runs, 1, [ranked[:count] for count in counts])
    llm.reset_mm_cache()
    llm.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.reset_prefix_cache()  # the system's text would be there
    [found] = llm.score(case.formal, [case.answer], reuse=policy, keep_logits=True, use_tqdm=False)
    np.testing.assert_allclose(found.logits, expected, atol=3e-5 * np.abs(expected).max())
    text = len(runs.placed.layout) - total
    assert found.cache.rows == (text + total, text + total, *(text + count for count in counts))
    assert [sum(image.recomputed[i] for image in found.cache.images) for i in range(4)] == [total, total, *counts]


def test_two_passes_are_a_prompt_in_another_order(llm, case, probe, runs):
    """Text, images, last token: where each row sees what stands before it, positions as ever."""
    placed, is_image = runs.placed, runs.placed.is_image
    last = placed.prompt_length - 1
    prompt = np.arange(last)
    order = [*prompt[~is_image[:last]], *prompt[is_image[:last]], *range(last, len(placed.layout))]
    rows = np.arange(len(placed.x))
    rows[: len(order)] = order
    layout = dataclasses.replace(placed.layout, positions=placed.layout.positions[:, order])
    moved = Placed(layout, placed.prompt_length, placed.x[rows], placed.deepstack[:, rows])
    donor = tuple(part[:, rows] for part in runs.donor)
    expected = probe.run(moved, np.tile(~is_image[order], (probe.num_layers, 1)), donor).logits
    llm.reset_mm_cache()
    llm.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
    [found] = llm.score(case.formal, [case.answer], reuse="full-two-pass", keep_logits=True, use_tqdm=False)
    np.testing.assert_allclose(found.logits, expected, atol=3e-5 * np.abs(expected).max())
    [single] = llm.score(case.formal, [case.answer], reuse="full", keep_logits=True, use_tqdm=False)
    assert np.abs(found.logits - single.logits).max() > 1e-3
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    [answer] = llm.chat(case.formal, params, reuse="full-two-pass", use_tqdm=False)
    [scored] = llm.score(case.formal, [answer.outputs[0].token_ids], reuse="full-two-pass", use_tqdm=False)
    assert scored.greedy.all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvshare", "asked"])
def test_deepstack_follows_the_rows(checkpoints, case, name):
    """A model whose DeepStack reaches behind the check layer."""
    with LLM(checkpoints("qwen3_vl-tied"), **SIZES) as engine:
        policy = parse_policy(f"{name}-0.3")
        probe = Probe(engine)
        runs = prepare(probe, case)
        assert policy.check_layer < engine.service.device.runner.config.vision.num_deepstack - 1
        keep = int(Fraction("0.3") * runs.placed.is_image.sum())
        chosen = np.argsort(-scores_by_hand(policy, probe, runs), kind="stable")[:keep]
        expected = logits_by_hand(probe, runs, 1, [chosen])
        engine.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
        [found] = engine.score(case.formal, [case.answer], reuse=policy, keep_logits=True, use_tqdm=False)
        np.testing.assert_allclose(found.logits, expected, atol=3e-5 * np.abs(expected).max())


@pytest.mark.slow_for("kvshare", "cacheblend-lmcache", "cacheblend-proto")
@pytest.mark.parametrize("name", POLICIES)
def test_all_rows_are_full_prefill(llm, case, name):
    """P1, and the answers of a call are those of single requests; a mixed call works too."""
    llm.reset_mm_cache()
    llm.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    [whole] = llm.chat(case.formal, params, reuse=f"{name}-1", use_tqdm=False, verify=True)
    assert whole.verification.tokens_agree == 6
    assert whole.verification.max_logit_difference < 1e-3
    plain = [{"role": "user", "content": "Hello"}]
    together = llm.chat([case.formal, plain, case.formal], params, reuse=f"{name}-0.2", use_tqdm=False)
    alone = [llm.chat(c, params, reuse=f"{name}-0.2", use_tqdm=False)[0] for c in (case.formal, plain)]
    assert [o.outputs[0].token_ids for o in together] == [alone[k].outputs[0].token_ids for k in (0, 1, 0)]
    assert together[0].cache.rows == together[2].cache.rows == alone[0].cache.rows


def record_launches(monkeypatch, runner):
    """The keys of the programs that run from now on."""
    keys, run = [], runner.programs.run
    monkeypatch.setattr(runner, "run", lambda program, *args: keys.append(program) or run(program, *args))
    return keys


@pytest.mark.slow  # test_llm.py has it of other policies
@pytest.mark.parametrize("size", ["ratio", "schedule"])
def test_nothing_compiles_after_warm_up_and_the_check_layer_lets_chosen_rows_attend(
    checkpoints, case, size, monkeypatch
):
    schedule = Schedule((400, 400, 250, 60), "any", "", allow_other_model=True)
    policy = {"ratio": "kvshare-0.2", "schedule": QuestionScores(schedule=schedule)}[size]
    buckets = BucketSizes(rows=(96, 128), patches=(512,), sequences=(1,))
    with LLM(checkpoints("qwen3_vl"), max_model_len=128, kv_cache_bytes=1 << 20, buckets=buckets) as engine:
        engine.warmup(reuse=policy, verbose=False)
        programs = engine.service.device.runner.programs.num_programs
        for conversation in (*case.donors, case.formal):
            launched = record_launches(monkeypatch, engine.service.device.runner)
            [output] = engine.chat(conversation, SamplingParams(max_tokens=2), reuse=policy, use_tqdm=False)
        assert engine.service.device.runner.programs.num_programs == programs
        # The check layer's K, V are computed of all rows; those that are not chosen do not attend there.
        rows = [(program.size, program.keep) for program in launched if program.name == "layer"]
        assert output.cache.rows[1] > 96 >= output.cache.rows[2]
        assert rows[:2] == [(128, 128), (128, 96)]


@pytest.mark.slow
def test_a_prompt_that_needs_several_steps_is_refused(checkpoints, textured_image):
    image, one = textured_image(64, 64), SamplingParams(max_tokens=1)
    with LLM(checkpoints("qwen3_vl-tied"), **SIZES | {"buckets": FEW}) as engine:
        engine.chat(user("See ", image), one, use_tqdm=False)
        long = user("What is there to be seen, and who may have seen it? ", image, "Say it.")
        with pytest.raises(ValueError, match=r"at most buckets\.max_rows = 64"):
            engine.chat(long, one, reuse="question-0.2", use_tqdm=False)
        [after] = engine.chat(long, one, reuse="0.2", use_tqdm=False)
        assert after.cache.images[0].match == "approximate"


def projected(**fields):
    empty = dict.fromkeys(
        ("q", "k", "v", "linked_k", "linked_v", "window", "place", "end", "asks"), np.zeros((1, 1, 1), np.float32)
    )
    return Projected(**{**empty, **fields})


def test_the_worked_examples_of_the_specification():
    # A.7: the two largest deviations of six.
    deviation = np.sqrt([0, 0.1, 0.9, 0.3, 0.8, 0.2])
    v = deviation.astype(np.float32)[:, None, None]
    policy = CacheBlend(Fraction(2, 5), "proto")
    rows = projected(k=v, linked_k=v, v=v, linked_v=np.zeros_like(v))
    score = jax.jit(lambda: policy.score(rows))()
    np.testing.assert_allclose(score, [0, 0.1, 0.9, 0.3, 0.8, 0.2], rtol=1e-6)
    image = ImageRef("a", (1, 4, 6), 6, lambda: None)
    [keep] = policy.keep(make_layout(np.zeros(8, np.int32), [1], [image], 2, ["approximate"]), 3)
    assert keep == 2  # floor(0.4 x 6)
    # Two rows must go on, six are candidates, and one is padding.
    order = np.asarray(jax.jit(choose)(np.float32([9, 9, *np.asarray(score), 99]), 2, 6))
    assert order.tolist() == [0, 1, 4, 6, 5, 7, 3, 2, 8]  # S = {2, 4} of the candidates, the higher score first
    index = np.arange(9, dtype=np.int32)[order]
    wide = Rows(index, np.tile(index, (3, 1)), index, index + 1, index)
    rows = jax.jit(narrow, static_argnames=("size", "slots"))(wide, 2 + keep, size=6, slots=100)
    assert rows.slot.tolist() == [0, 1, 4, 6, 104, 105]
    assert rows.k_end.tolist() == [1, 2, 5, 7, 0, 0]
    assert jax.jit(choose)(np.ones(8, np.float32), 1, 5).tolist() == list(range(8))  # ties: the earlier row


def test_attention_times_deviation():
    """A.8: two rows look at three keys; what each key receives, or how far that changes, and how far values are."""
    new, old = [[0.2, 0.5, 0.3], [0.1, 0.6, 0.3]], [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]]
    # Queries are unit vectors, so that scores are a key's entries; a third row, of padding, sees nothing.
    q = np.float32([[1, 0], [0, 1], [1, 1]])[:, None]
    window = tuple(np.log(np.float32(weights)).T[:, None] * np.float32(2**0.5) for weights in (new, old))
    rows = projected(
        q=q,
        v=np.float32([2, -0.5, 1.5])[:, None, None],
        linked_v=np.zeros((3, 1, 1), np.float32),
        window=window,
        place=np.arange(3, dtype=np.int32),
        end=np.int32([3, 3, 0]),
    )
    scored = lambda policy: jax.jit(lambda: policy.score(rows))()  # noqa: E731
    # dhd: alpha = [.3, 1.1, .6] and distances [2, .5, 1.5].
    np.testing.assert_allclose(scored(KVShare(Fraction(1, 3))), [0.6, 0.55, 0.9], rtol=1e-5)
    np.testing.assert_allclose(scored(KVShare(Fraction(1, 3), "attn_dist")), [0.3, 0.3, 0.2], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheBlend(Fraction(3, 2)), "ratio from 0 to 1"),
        (lambda: CacheBlend(Fraction(1, 2), "best"), "variant must be"),
        (lambda: KVShare(Fraction(1, 2), "best"), "selector must be"),
        (lambda: parse_policy("cacheblend-"), "reuse must be"),
        (lambda: parse_policy("cacheblend-1.5"), "ratio R from 0 to 1"),
        (lambda: parse_policy("kvshare-best-0.1"), "reuse must be"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
