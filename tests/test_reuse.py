"""Reuse through the public engine. The reference is a cold run of the same engine, which test_llm.py checks."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import logging
import threading
import time
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vlcache_jax.cache.records
import vlcache_jax.engine.batching
import vlcache_jax.engine.prefilling
import vlcache_jax.inputs.images
import vlcache_jax.inputs.processor
from tests.helper import SIZES, compilations, one_copy, one_device, user
from vlcache_jax import LLM, BucketSizes, CacheConfig, SamplingParams, Schedule
from vlcache_jax.models import Rows, bind, decoder, rope
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.policies import MPIC, Plan, Scheduled, Spread, StaticRatio

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FORCED = "the quick brown fox"


def open_llm(directory, **changes):
    return LLM(directory, **SIZES | changes)


def png(array, **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG", **options)
    return file.getvalue()


def chat(llm, *conversations, reuse=None, **options):
    return llm.chat(list(conversations), options.pop("params", GREEDY), reuse=reuse, use_tqdm=False, **options)


def logits(llm, *conversations, reuse=None, **options):
    scores = llm.score(
        list(conversations),
        [FORCED] * len(conversations),
        reuse=reuse,
        keep_logits=True,
        use_tqdm=False,
        **options,
    )
    return np.stack([score.logits for score in scores])


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max() / 4))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def pool(llm, length):
    """K and V of the slots of the request that ended last: [L, 2, length, K, D]."""
    place = np.arange(length)
    slots = llm.last_table[place // PAGE] * PAGE + place % PAGE
    return np.stack(
        [np.stack([np.asarray(half)[slots] for half in layer]) for layer in llm.service.device.runner.pool.arrays]
    )


def kv_records(llm):
    llm.cache.flush()
    return [record for record in llm.service.cache.store.tier.records() if record.meta.context is not None]


@pytest.fixture(scope="module", params=[pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
def directory(request, checkpoints):
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory) as llm:
        end = llm.service.cache.pages.end

        def noted(block_table, *args, **options):
            llm.last_table = block_table.table
            end(block_table, *args, **options)

        llm.service.cache.pages.end = noted
        yield llm


@pytest.fixture
def llm(engine):
    """An engine whose cache is empty."""
    engine.reset_mm_cache()
    yield engine
    assert engine.stats().in_use == 0


@pytest.fixture
def from_records(llm, monkeypatch):
    """What comes again is linked, though its pages may be there."""
    monkeypatch.setattr(llm.service.preparation.planner, "_keeps_pages", False)


@pytest.fixture
def one_step(monkeypatch):
    """Prompts are one step, whose launches and rows can be told, however much of it is padding."""
    split = vlcache_jax.engine.batching.split_rows
    monkeypatch.setattr(vlcache_jax.engine.batching, "split_rows", functools.partial(split, overhead=512))


@pytest.fixture(scope="module")
def a(textured_image):
    return textured_image(150, 210, 1)


@pytest.fixture(scope="module")
def b(textured_image):
    return textured_image(190, 120, 2)


@pytest.fixture
def target(a, b):
    """Text before, between and after two images."""
    return user("Look at the first one ", a, " and then ", b, " and compare.")


@pytest.fixture
def donors(llm, a, b):
    """The images were computed elsewhere: in another order, behind other text."""
    chat(llm, user("Something else entirely, longer than the other: ", b, a, "?"))


@dataclasses.dataclass(frozen=True)
class Depths:
    """A policy that gives the k-th approximate image's token t a depth of its own."""

    depth: object
    name: str = "test"
    links: bool = True
    approximates: bool = True

    def plan(self, layout, num_layers):
        depth = np.full(len(layout), num_layers, np.int16)
        for k, span in enumerate(layout.images):
            if span.state == "approximate":
                depth[span.tokens] = [self.depth(k, t, span.length) for t in range(span.length)]
        depth[-1] = num_layers + 1
        return Plan(depth)


def falling(llm, *levels):
    layers = llm.service.checkpoint.config.text.num_layers
    levels = [*levels, *[levels[-1]] * layers][:layers]
    return Schedule(tuple(levels), "any", "any", allow_other_model=True)


# P1-P7 of the algorithms' specification, for every family; in short, of one.
IN_SLOW = "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe-sharded"
each_family = pytest.mark.parametrize(
    "directory",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in IN_SLOW), "qwen3_vl"],
    indirect=True,
    scope="module",
)


@each_family
@pytest.mark.parametrize("everything", [1, "shift-1"])
def test_p1_everything_computed_equals_a_cold_run_even_over_nan(llm, target, donors, everything):
    cold = logits(llm, target, reuse="off")
    length = len(chat(llm, target, reuse="off")[0].prompt_token_ids)
    cold_pool = pool(llm, length)
    for record in kv_records(llm):
        record.data[:] = np.nan
    [output] = chat(llm, target, reuse=everything)
    assert [image.match for image in output.cache.images] == ["approximate"] * 2
    assert output.cache.rows == (length - output.num_cached_tokens,) * len(cold_pool)  # but for text in front
    warm_pool = pool(llm, length)
    assert np.isfinite(warm_pool).all()
    for layer in range(1, 4):
        assert_close(warm_pool[layer], cold_pool[layer])
    assert_close(logits(llm, target, reuse=everything), cold)
    assert output.cache.exact  # nothing approximate was left


@pytest.mark.thorough_for("qwen3_vl_moe-sharded")
@each_family
@pytest.mark.parametrize("ratio", [0, "0.1", 0.5, "shift-0.1"])
def test_p2_right_records_give_right_answers_at_any_place(llm, a, b, target, ratio):
    """The records hold what is right at the target, but were made elsewhere, at other positions."""
    cold = logits(llm, target, reuse="off")
    chat(llm, user("Elsewhere: ", b, a), reuse="exact")
    elsewhere = kv_records(llm)
    chat(llm, target, reuse="exact")
    length = len(chat(llm, target, reuse="off")[0].prompt_token_ids)
    cold_pool = pool(llm, length)
    for record in kv_records(llm):
        if record not in elsewhere:
            [twin] = [other for other in elsewhere if other.meta.entry == record.meta.entry]
            twin.data[:] = record.data
            llm.service.cache.store.remove(record)
    [output] = chat(llm, target, reuse=ratio)
    assert [image.match for image in output.cache.images] == ["approximate"] * 2
    assert max(output.cache.rows) < length
    warm_pool = pool(llm, length)
    for layer in range(1, 4):
        assert_close(warm_pool[layer], cold_pool[layer])
    assert_close(logits(llm, target, reuse=ratio), cold)


@each_family
@pytest.mark.usefixtures("from_records")
def test_p2_the_same_context_is_exact_whatever_the_policy(llm, target, a, b):
    first = chat(llm, target)
    cold = logits(llm, target, reuse="off")
    other = user("Look at the first one ", a, " and then ", b, ". Which is larger?")
    for reuse in ("exact", "full", 0.3, "mpic-4", "shift-0.1", falling(llm, 100, 10)):
        [output] = chat(llm, target, reuse=reuse)
        assert output.cache.exact
        assert [image.match for image in output.cache.images] == ["exact"] * 2
        images = sum(image.tokens for image in output.cache.images)
        assert output.num_cached_tokens == images
        assert set(output.cache.rows) == {len(output.prompt_token_ids) - images}
        assert tokens([output]) == tokens(first)
        assert_close(logits(llm, target, reuse=reuse), cold)
        assert_close(logits(llm, other, reuse=reuse), logits(llm, other, reuse="off"))


@each_family
@pytest.mark.parametrize("make", [Scheduled, lambda schedule: Spread(schedule=schedule, shift=True)])
def test_p3_shrinking_early_changes_nothing(llm, target, donors, monkeypatch, make):
    policy = make(falling(llm, 400, 300, 100, 20))
    early = logits(llm, target, reuse=policy)
    prefill_steps = vlcache_jax.engine.prefilling.prefill_steps

    def late(*args):
        return [
            dataclasses.replace(step, bounds=(step.bounds[0],) * (len(step.bounds) - 1) + step.bounds[-1:])
            for step in prefill_steps(*args)
        ]

    monkeypatch.setattr(vlcache_jax.engine.prefilling, "prefill_steps", late)
    assert_close(logits(llm, target, reuse=policy), early)


@each_family
def test_p4_the_first_layer_knows_no_context(llm, target, donors, a, b):
    chat(llm, target, reuse="exact")
    by_image = {}
    for record in kv_records(llm):
        by_image.setdefault(record.meta.entry, []).append(record.data[:, :, : record.meta.tokens])
    assert sorted(map(len, by_image.values())) == [2, 2]
    for one, other in by_image.values():
        assert_close(one[0], other[0])
        assert np.abs(one[1:] - other[1:]).max() > 1e-2
    other = user("A third context ", a, b)
    fresh_in_the_first = logits(llm, other, reuse=Depths(lambda k, t, length: 1))
    assert_close(fresh_in_the_first, logits(llm, other, reuse="full"))


@pytest.mark.thorough_for("qwen3_vl_moe-sharded")
@each_family
def test_p5_neighbours_and_padding_change_nothing(llm, target, donors, a, b):
    requests = [target, user("Only ", b), user("no image"), user("First ", a, " second ", b, a)]
    for reuse in (0.3, falling(llm, 300, 200, 50), "shift-0.3"):
        chat(llm, *requests, reuse=reuse)  # what is stored does not change any more
        alone = [logits(llm, request, reuse=reuse)[0] for request in requests]
        order = [2, 0, 3, 1]
        packed = logits(llm, *(requests[i] for i in order), reuse=reuse)
        assert_close(packed, np.stack([alone[i] for i in order]))


@pytest.mark.thorough
@each_family
def test_p5_in_steps_of_other_sizes(llm, directory, target, donors, a, b):
    buckets = BucketSizes(rows=(40, 100), patches=(2000,), sequences=(3,))
    with open_llm(directory, buckets=buckets, max_rows=100) as other:
        chat(other, user("unrelated ", a[::-1].copy()))
        chat(other, user("Something else entirely, longer than the other: ", b, a, "?"))
        for reuse in (0.3, "shift-0.3"):
            assert_close(logits(other, target, reuse=reuse), logits(llm, target, reuse=reuse))


@pytest.mark.slow
@one_copy
@each_family
@pytest.mark.parametrize("make", [lambda k, t, n: (t * 7 + k) % 5, lambda k, t, n: 4 * (t % 3 == 1)])
def test_p6_any_rows_at_any_depth_equal_the_dense_computation(llm, target, donors, make):
    """Scattered rows that drop out at random layers, against all rows in all layers with K, V overridden."""
    layers = llm.service.checkpoint.config.text.num_layers
    check_against_dense(llm, target, Depths(lambda k, t, n: min(make(k, t, n), layers)))


@one_copy
@each_family
@pytest.mark.parametrize("levels", [(50,), (300, 300, 40, 0)])
def test_p6_moved_keys_and_values_equal_the_dense_computation(llm, target, donors, levels):
    policy = Spread(schedule=falling(llm, *levels), shift=True)
    check_against_dense(llm, target, policy)
    differs = logits(llm, target, reuse=policy) - logits(llm, target, reuse=dataclasses.replace(policy, shift=False))
    assert np.abs(differs).max() > 1e-3


def check_against_dense(llm, target, policy):
    layers = llm.service.checkpoint.config.text.num_layers
    [output] = chat(llm, target, reuse=policy)
    length = len(output.prompt_token_ids)
    actual = pool(llm, length)
    expected = dense_reference(llm, target, policy)
    for layer in range(layers):
        assert_close(actual[layer], expected[layer])


@functools.partial(jax.jit, static_argnums=0)
def rotated(text, keys, positions):
    cos, sin = rope.text_rotation(positions, text.rope_theta, text.mrope_section, text.mrope_interleaved, jnp.float32)
    return rope.rotate(keys, cos, sin)


@functools.partial(jax.jit, static_argnums=0)
def embedded(shapes, table, features, source):
    return decoder.embed(bind(shapes.table_graph, table), features, source)


@functools.partial(jax.jit, static_argnums=0)
def projected(shapes, params, x, rows):
    """Keys before rotation, and values."""
    module = shapes.bind_layer(params)
    return module.self_attn.project(module.input_layernorm(x), rows, keep=len(x))[2:]


@functools.partial(jax.jit, static_argnums=0)
def through_layer(shapes, params, x, k, v, rows, added):
    x, (k, v), _ = shapes.bind_layer(params)(x, [k, v], rows, added, keep=len(x))
    return x, k, v


def dense_reference(llm, conversation, policy):
    """K, V of a plan: every row goes through every layer, and only those that the plan names write."""
    runner, planner = llm.service.device.runner, llm.service.preparation.planner
    config = runner.config.text
    prompt = llm.service.renderer.from_conversation(conversation)
    [request] = llm.service.preparation.identifier.identify([prompt])
    planned = planner.plan(request, ResolvedOptions(reuse=policy))
    with contextlib.ExitStack() as stack:
        stack.callback(planned.reservation.leave)
        layout, plan = planned.layout, planned.plan
        n = len(layout)
        source = layout.token_ids.copy()
        features, k_pool, v_pool = [], [], []
        for layer in range(config.num_layers):
            k, v = (np.zeros((n, config.num_kv_heads, config.head_dim), np.float32) for _ in "kv")
            for use in planned.uses:
                raw, v[use.span.tokens] = use.linked.data[layer, :, : use.span.length]
                k[use.span.tokens] = rotated(config, raw, layout.positions[:, use.span.tokens])
            k_pool.append(k)
            v_pool.append(v)
        stored = [(use.span, use.linked.data[:, :, : use.span.length].copy()) for use in planned.uses]
        first = 0
        for use in planned.uses:
            features.append(use.encoder.data[:, : use.span.length])
            source[use.span.tokens] = -1 - first - np.arange(use.span.length)
            first += use.span.length
    shapes, features = runner.shapes, np.concatenate(features, axis=1)
    x, deepstack = map(np.asarray, embedded(shapes, runner.text["embed_tokens"], features, source))
    slots = np.arange(n, dtype=np.int32)
    result = []
    for layer in range(config.num_layers):
        writes = np.where(plan.depth > layer, slots, n + slots)
        rows = Rows(writes, layout.positions, np.zeros_like(slots), slots + 1, source)
        params = runner.text["layers"][layer]
        added = deepstack[layer] if layer < len(deepstack) else None
        if plan.shift:
            own = [np.asarray(part) for part in projected(shapes, params, x, rows)]
            for span, old in stored:
                fresh = plan.depth[span.tokens] > layer
                if fresh.any():
                    new = np.stack([part[span.tokens] for part in own])
                    raw_k, v_pool[layer][span.tokens] = old[layer] + (new - old[layer])[:, fresh].mean(1)[:, None]
                    scale, bias = 1, 0
                    if config.qk_norm:
                        scale = np.asarray(params["self_attn"]["k_norm"]["scale"])
                    else:
                        bias = np.asarray(params["self_attn"]["qkv_proj"]["bias"])[:, -2]
                    had, has = (
                        np.square((keys - bias) / scale).mean(-1, keepdims=True) for keys in (old[layer, 0], raw_k)
                    )
                    if config.qk_norm:  # before the weight, each head of a key has a mean square of 1
                        np.testing.assert_allclose(had, 1, atol=1e-3)
                    raw_k = bias + (raw_k - bias) * np.sqrt(had / has)
                    k_pool[layer][span.tokens] = rotated(config, raw_k, layout.positions[:, span.tokens])
        x, k, v = through_layer(shapes, params, x, k_pool[layer], v_pool[layer], rows, added)
        result.append(np.stack([k, v]))
    return np.stack(result)


@each_family
def test_p7_the_first_layer_needs_no_rows_of_its_own(llm, target, donors):
    layers = llm.service.checkpoint.config.text.num_layers
    counts = [0.9, 0.5, 0.25, 0.1]
    all_rows = Depths(lambda k, t, n: sum(t < int(share * n) for share in counts[:layers]))
    fewer = Depths(lambda k, t, n: d if (d := all_rows.depth(k, t, n)) != 1 else 0)
    assert_close(logits(llm, target, reuse=fewer), logits(llm, target, reuse=all_rows))
    [output] = chat(llm, target, reuse=falling(llm, 450, 250, 125, 50))
    images = [image.tokens for image in output.cache.images]
    text = len(output.prompt_token_ids) - sum(images) - output.num_cached_tokens
    per_layer = [sum(n * level // 500 for n in images) for level in (250, 250, 125, *[50] * layers)]
    assert output.cache.rows == tuple(text + n for n in per_layer[:layers])


# What really happens.


def test_a_repeat_opens_decodes_and_encodes_nothing(llm, a, b, tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(png(a))
    first = chat(llm, user("What is ", str(path), " and ", png(b), "?"))
    cold = chat(llm, user("Now what is ", png(b), "?"), reuse="off")
    llm.cache.flush()

    def forbidden(*_, **__):
        raise AssertionError("this was to be skipped")

    monkeypatch.setattr(vlcache_jax.inputs.images, "_open", forbidden)
    monkeypatch.setattr(vlcache_jax.inputs.images.ImageSource, "decode", forbidden)
    monkeypatch.setattr(vlcache_jax.inputs.processor.ImageProcessor, "patches", forbidden)
    monkeypatch.setattr(llm.service.device.runner, "encode", forbidden)
    repeat = chat(llm, user("What is ", str(path), " and ", png(b), "?"))
    assert tokens(repeat) == tokens(first)
    assert repeat[0].cache.exact
    [elsewhere] = chat(llm, user("Now what is ", png(b), "?"), reuse=0.2)
    assert elsewhere.cache.images[0].encoder == "host"
    assert not elsewhere.cache.exact
    # Encoder rows are right anywhere: with nothing but them kept, the answer is that of a cold run.
    [encoder_only] = chat(llm, user("Now what is ", png(b), "?"), reuse="exact")
    assert tokens([encoder_only]) == tokens(cold)
    assert encoder_only.cache.images[0].kv == "none"
    monkeypatch.setattr(llm.service.engine._prefiller.copies, "link", forbidden)
    chat(llm, user("What is ", str(path), " and ", png(b), "?"))  # it is still in pages
    llm.reset_prefix_cache()
    with pytest.raises(AssertionError, match="to be skipped"):
        chat(llm, user("What is ", str(path), " and ", png(b), "?"))


@pytest.mark.usefixtures("one_step")
def test_kept_encoder_rows_give_the_same_bits(llm, b, monkeypatch):
    request = user("Now what is ", b, "?")
    cold = logits(llm, request, reuse="off")
    chat(llm, user("Elsewhere ", b))
    llm.cache.flush()
    monkeypatch.setattr(llm.service.device.runner, "encode", lambda *_: pytest.fail("encoded"))
    [score] = llm.score([request], [FORCED], reuse="exact", keep_logits=True, use_tqdm=False)
    assert [(image.encoder, image.kv) for image in score.cache.images] == [("host", "none")]
    np.testing.assert_array_equal(score.logits, cold[0])


@one_device
@pytest.mark.usefixtures("one_step")
@pytest.mark.parametrize("reuse", [0, 0.3, "shift-0.3", MPIC(5), "full-two-pass"])
def test_what_is_linked_and_what_is_computed_run_in_one_launch(llm, target, donors, monkeypatch, reuse):
    launched = []
    run = llm.service.device.runner.run
    monkeypatch.setattr(
        llm.service.device.runner, "run", lambda one, *args: (launched.append(one.name), run(one, *args))[1]
    )
    [output] = chat(llm, target, reuse=reuse, params=SamplingParams(max_tokens=1, temperature=0))
    assert [image.match for image in output.cache.images] == ["approximate"] * 2
    layers = llm.service.checkpoint.config.text.num_layers
    counts = collections.Counter(launched)
    links = 2 * len(llm.service.device.runner.shapes.link_groups)
    assert [counts[name] for name in ("link", "embed", "layer", "head")] == [links, 1, layers, 1]
    assert not {"encode", "window"} & counts.keys()
    # What is there is linked before anything is computed.
    assert [name for name in launched if name != "copy"][:links] == ["link"] * links


@pytest.mark.usefixtures("from_records")
@pytest.mark.parametrize("reuse", ["exact", 0, 0.3, "shift-0.3", MPIC(5)])
def test_bytes_moved_are_those_of_the_records(llm, target, donors, monkeypatch, reuse):
    moved = []
    put, stage = llm.service.device.runner.put, llm.service.device.runner.stage

    def noted_put(buffers):
        moved.append(sum(buffer.nbytes for buffer in buffers))
        return put(buffers)

    monkeypatch.setattr(llm.service.device.runner, "put", noted_put)

    def staged(rows, place):
        if isinstance(rows, np.ndarray):  # and not what was encoded on the device
            moved.append(rows[:, place < llm.service.device.runner.buckets.max_rows].nbytes)
        return stage(rows, place)

    monkeypatch.setattr(llm.service.device.runner, "stage", staged)

    def ask(reuse):
        moved.clear()
        [output] = chat(llm, target, reuse=reuse)
        assert sum(image.bytes_moved for image in output.cache.images) == sum(moved)
        return output.cache.images

    records = {True: {}, False: {}}
    llm.cache.flush()
    for record in llm.service.cache.store.tier.records():
        records[record.meta.context is None][record.meta.entry] = record.data.nbytes
    for image in ask(reuse):
        kv = records[False][image.key] if image.kv == "host" else 0
        assert kv <= image.bytes_moved <= kv + records[True][image.key]
        assert (image.bytes_moved > kv) == (image.encoder == "host") == any(image.recomputed)
    assert {image.bytes_moved for image in ask("off")} == {0}
    llm.reset_mm_cache()
    assert {image.bytes_moved for image in ask(reuse)} == {0}  # a miss
    for image in ask("exact"):
        assert image.bytes_moved == records[False][image.key]


def test_the_answer_reads_what_is_linked_and_nothing_else(llm, target, donors):
    before = {ratio: logits(llm, target, reuse=ratio) for ratio in (0, 0.3)}
    records = kv_records(llm)
    saved = [record.data.copy() for record in records]
    for record in records:  # the rows that the plan computes again
        record.data[:, :, : int(Fraction("0.3") * record.meta.tokens)] = np.nan
        record.data[:, :, record.meta.tokens :] = np.nan  # padding
    assert_close(logits(llm, target, reuse=0.3), before[0.3])
    for record, data in zip(records, saved, strict=True):
        record.data[:] = data
    assert_close(logits(llm, target, reuse=0), before[0])
    rng = np.random.default_rng(0)
    for record in records:
        v = record.data[:, 1, : record.meta.tokens]
        v += rng.normal(0, 1, v.shape).astype(np.float32)
    assert np.abs(logits(llm, target, reuse=0) - before[0]).max() > 1e-2
    assert len(llm.cache.verify()) == len(records)  # and the checksums know
    [output] = chat(llm, target, reuse=0)
    assert [image.why.value for image in output.cache.images] == ["corrupt"] * 2
    assert tokens([output]) == tokens(chat(llm, target, reuse="off"))


@pytest.mark.usefixtures("one_step")
def test_executed_rows_are_the_plans(llm, target, donors, monkeypatch):
    """Read from the arguments of the executed programs."""
    run = llm.service.device.runner.run
    layers = llm.service.device.runner.text["layers"]
    for reuse in ("off", 0, 0.3, "shift-0.3", falling(llm, 400, 300, 100, 20), MPIC(5)):
        rows = [0] * len(layers)

        def spy(program, *args, rows=rows):
            assert program.name != "narrow"  # A plan's rows are sorted, and a warm-up compiles no program for fewer.
            if program.name == "layer":
                layer = next(i for i in layers if layers[i] is args[0])
                slots, (writing, needed) = np.asarray(args[3][0])[: program.size], args[4]
                assert (slots[:writing] < llm.service.device.runner.num_slots).all()
                assert 0 < needed <= writing
                rows[layer] += int(writing)
                assert program.size == len(slots) == len(args[1])
            return run(program, *args)

        with monkeypatch.context() as context:
            context.setattr(llm.service.device.runner, "run", spy)
            [output] = chat(llm, target, reuse=reuse)
        assert output.cache.rows == tuple(rows)
        images = output.cache.images
        text = len(output.prompt_token_ids) - sum(image.tokens for image in images) - output.num_cached_tokens
        assert [text + sum(n) for n in zip(*(image.recomputed for image in images), strict=True)] == rows
    assert output.cache.images[0].recomputed == (5,) * len(layers)


def settled(report):
    """A report without what may differ where records had to leave."""
    images = tuple(dataclasses.replace(image, encoder="", bytes_moved=0) for image in report.images)
    return dataclasses.replace(report, images=images)


@pytest.mark.slow_for("100000")
@pytest.mark.parametrize(
    "reuse", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("exact", "0.2")), "shift-0.2"]
)
@pytest.mark.parametrize(("host_bytes", "variants"), [("1GiB", 2), (100_000, None)])
def test_a_call_means_its_requests_one_by_one(llm, directory, textured_image, monkeypatch, reuse, host_bytes, variants):
    images = [png(textured_image(60 + 30 * i, 150 - 20 * i, i)) for i in range(4)]
    requests = [user("x" * (i % 3), images[i * i % 4 if i % 5 else i % 4], f"Question {i}?") for i in range(24)]
    requests[7] = user("both ", images[2], images[1])
    requests[15] = user(images[3], "twice", images[3])
    encoded = []
    with open_llm(directory, cache=CacheConfig(host_bytes=host_bytes, max_contexts_per_image=variants)) as other:
        one_by_one = [chat(other, request, reuse=reuse)[0] for request in requests]
        other.reset_mm_cache()
        encode = other.service.device.runner.encode
        monkeypatch.setattr(
            other.service.device.runner, "encode", lambda p, grids: (encoded.extend(grids), encode(p, grids))[1]
        )
        together = chat(other, *requests, reuse=reuse)
        num_encoded = len(encoded)
        cold = chat(other, *requests, reuse="off")
        assert other.cache.stats().pinned == 0
    assert tokens(together) == tokens(one_by_one)
    if reuse == "exact":
        assert tokens(together) == tokens(cold)
    for i, (one, other_one) in enumerate(zip(one_by_one, together, strict=True)):
        if host_bytes == "1GiB":
            assert one.cache == other_one.cache, i
        else:  # whether encoder rows that are to leave are still there depends on how soon they were written
            assert settled(one.cache) == settled(other_one.cache), i
        assert one.num_cached_tokens == other_one.num_cached_tokens
    if host_bytes == "1GiB":
        assert num_encoded == 4


def test_second_turn_of_a_chat(llm, a, b):
    first = user("See ", a, " and ", b)
    [answer] = chat(llm, first)
    second = [*first, {"role": "assistant", "content": answer.outputs[0].text}, *user("And ", b[::2, ::2].copy(), "?")]
    [output] = chat(llm, second)
    assert [image.match for image in output.cache.images] == ["exact", "exact", "miss"]
    assert output.cache.images[2].why.value == "unknown_image"
    assert_close(logits(llm, second), logits(llm, second, reuse="off"))


# Identity.


def test_the_same_pixels_are_the_same_image(llm, directory, a):
    def match(image, **options):
        [output] = chat(llm, user(image, "?"), **options)
        return output.cache.images[0].match

    assert match(png(a)) == "miss"
    bmp = io.BytesIO()
    Image.fromarray(a).save(bmp, "BMP")
    for same in (png(a), bmp.getvalue(), png(a, compress_level=0), a, Image.fromarray(a)):
        assert match(same) == "exact"
    pixel = a.copy()
    pixel[3, 4, 1] ^= 1
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert match(pixel) == "miss"
    assert match(png(a, exif=exif)) == "miss"
    assert match(a, mm_processor_kwargs={"max_pixels": 20_000}) == "miss"
    assert match(a, cache_salt="tenant") == "miss"
    assert match(a, cache_salt="tenant") == "exact"
    assert match(a, cache_salt="other") == "miss"
    assert match(a, cache_salt="") == "miss"
    with open_llm(directory, dtype="bfloat16") as narrow:
        assert narrow.cache.key(a) != llm.cache.key(a)


def test_an_earlier_image_is_context_too(llm, a, b):
    """Behind another picture under the same token ids, K, V are others."""
    other = 255 - a
    first, exchanged = user("Compare ", a, " with ", b), user("Compare ", other, " with ", b)
    [one] = chat(llm, first)
    [two] = chat(llm, exchanged)
    np.testing.assert_array_equal(one.prompt_token_ids, two.prompt_token_ids)
    assert [image.match for image in two.cache.images] == ["miss", "miss"]
    assert [image.why.value for image in two.cache.images] == ["unknown_image", "other_context"]
    assert two.cache.images[1].key == one.cache.images[1].key
    placeholder = llm.service.renderer.image_token_id
    assert two.num_cached_tokens <= two.prompt_token_ids.tolist().index(placeholder)
    assert tokens([two]) == tokens(chat(llm, exchanged, reuse="off"))
    for request in (first, exchanged):
        [again] = chat(llm, request)
        assert [image.match for image in again.cache.images] == ["exact", "exact"]
        assert_close(logits(llm, request), logits(llm, request, reuse="off"))
    chat(llm, user(third := a[::-1].copy()))
    [mixed] = chat(llm, user("Compare ", third, " with ", b), reuse="full")
    assert [image.match for image in mixed.cache.images] == ["approximate", "approximate"]


def test_other_weights_are_another_image(llm, checkpoints, a):
    with open_llm(checkpoints("qwen3_vl-tied")) as other:
        assert other.cache.key(a) != llm.cache.key(a)


def test_clashing_keys_are_told_apart(directory, textured_image, monkeypatch):
    """Records have 256 places here, so that images meet; whole keys decide."""
    monkeypatch.setattr(vlcache_jax.cache.records, "_place", lambda name: name[:5])
    images = [textured_image(40, 40 + 30 * (i % 2), 100 + i) for i in range(60)]
    requests = [user(image, "?") for image in images]
    with open_llm(directory) as llm:
        cold = tokens(chat(llm, *requests, reuse="off"))
        for reuse in ("exact", "full"):
            for _ in range(2):
                assert tokens(chat(llm, *requests, reuse=reuse)) == cold
        stats = llm.cache.stats()
    assert stats.clashes > 0
    assert stats.hits_exact > 60


def test_a_grid_that_differs_is_another_image(llm, a):
    chat(llm, user(a))
    for record in llm.service.cache.store.tier.records():
        record.meta = dataclasses.replace(record.meta, grid=(1, 2, 2))
    [output] = chat(llm, user(a))
    assert output.cache.images[0].match == "miss"
    assert tokens([output]) == tokens(chat(llm, user(a), reuse="off"))


def test_uuids(llm, directory, a, b, monkeypatch):
    def generate(engine, image, uuid):
        prompt = {
            "prompt": "<|image_pad|>?",
            "multi_modal_data": {"image": image},
            "multi_modal_uuids": {"image": uuid},
        }
        return engine.generate(prompt, GREEDY, use_tqdm=False)[0].cache.images[0]

    assert generate(llm, a, "one").match == "miss"
    assert generate(llm, a, "one").match == "exact"
    stored = llm.cache.stats()
    with pytest.raises(ValueError, match=r"uuid of prompts images\[0\] must identify one image, but 'one'"):
        generate(llm, b, "one")
    assert llm.cache.stats() == stored
    assert not llm.cache.release_uuid("one", cache_salt="tenant")
    with pytest.raises(ValueError, match=r"release it with cache\.release_uuid"):
        generate(llm, b, "one")
    assert llm.cache.release_uuid("one")
    assert not llm.cache.release_uuid("one")
    assert generate(llm, b, "one").match == "miss"
    assert generate(llm, b, "one").match == "exact"
    assert generate(llm, a, "two").match == "exact"
    with open_llm(directory, cache=CacheConfig(trust_uuids=True)) as trusting:
        assert generate(trusting, a, "one").match == "miss"
        trusting.cache.flush()
        with monkeypatch.context() as context:
            context.setattr(vlcache_jax.inputs.images.ImageSource, "decode", lambda *_: pytest.fail("decoded"))
            assert generate(trusting, b, "one").match == "exact"  # nobody looked
        # Once pixels are needed, they must be those: under the first picture's key others would mislead everyone.
        trusting.cache.evict(a)
        for other in (b, a[:40], a[::-1].copy()):
            with pytest.raises(ValueError, match="must identify one image"):
                generate(trusting, other, "one")
        assert generate(trusting, a, "one").match == "miss"
        assert generate(trusting, a, "one").match == "exact"
        assert trusting.cache.release_uuid("one")
        assert generate(trusting, b, "one").match == "miss"


def test_entry_keys_act_under_their_salt_only(llm, a):
    [output] = chat(llm, user(a, "?"), cache_salt="tenant")
    key = output.cache.images[0].key

    def look(key, **salt):
        with llm.cache.lookup(key, **salt) as handle:
            return handle.encoder, handle.kv, handle.why and handle.why.value

    def verbs(key, **salt):
        counts = [verb(key, **salt) for verb in (llm.cache.pin, llm.cache.unpin, llm.cache.evict)]
        return counts, look(key, **salt), llm.cache.request(output.cache.request_key, **salt)

    nobody = [0, 0, 0], (None, None, "unknown_image"), None
    for salt in ({}, {"cache_salt": ""}, {"cache_salt": "other"}):
        assert verbs(key, **salt) == verbs("0" * 64, **salt) == nobody
    own = {"cache_salt": "tenant"}
    assert look(key, **own)[1].meta.entry == key
    assert verbs(key, **own) == ([2, 2, 2], (None, None, "evicted"), (key,))
    assert verbs(key) == nobody  # no hint either that it was there
    with pytest.raises(ValueError, match="cache_salt must be a string or None, got 3"):
        llm.cache.evict(key, cache_salt=3)


def test_request_keys(llm, a, b):
    [one] = chat(llm, user(a, b))
    assert not one.cache.request_known
    assert llm.cache.request(one.cache.request_key) == tuple(image.key for image in one.cache.images)
    [same] = chat(llm, user("Other text ", a, b))
    assert same.cache.request_known
    assert same.cache.request_key == one.cache.request_key
    [turned] = chat(llm, user(b, a))
    assert not turned.cache.request_known
    assert [image.encoder for image in turned.cache.images] == ["host", "host"]


# Kinds of records.


def test_what_is_computed_behind_approximate_reuse_is_never_exact(llm, a, b, textured_image):
    new = textured_image(80, 80, 9)
    chat(llm, user("one ", a))
    behind = user("other ", a, new)
    [output] = chat(llm, behind, reuse="full")
    assert [image.match for image in output.cache.images] == ["approximate", "miss"]
    key = output.cache.images[1].key
    llm.cache.flush()
    assert [record.meta.canonical for record in llm.service.cache.store.records(key) if record.meta.context] == [False]
    [again] = chat(llm, behind, reuse="full")
    assert again.cache.images[1].match == "approximate"  # the same context, and yet
    [exact] = chat(llm, behind, reuse="exact")
    assert [image.match for image in exact.cache.images] == ["miss", "miss"]
    assert tokens([exact]) == tokens(chat(llm, behind, reuse="off"))
    llm.cache.flush()
    assert [record.meta.canonical for record in llm.service.cache.store.records(key) if record.meta.context] == [True]
    [now] = chat(llm, behind, reuse="full")
    assert [image.match for image in now.cache.images] == ["exact", "exact"]


def test_blended_rows_are_never_stored(llm, target, donors):
    llm.cache.flush()
    before = {id(record): record.meta.checksums for record in llm.service.cache.store.tier.records()}
    chat(llm, target, reuse=0.3)
    llm.cache.flush()
    assert {id(record): record.checksums() for record in llm.service.cache.store.tier.records()} == before


@pytest.mark.usefixtures("from_records")
@pytest.mark.parametrize("variants", [None, 2])
def test_an_image_shown_in_three_contexts_in_turn(llm, a, monkeypatch, variants):
    monkeypatch.setattr(llm.service.cache.store, "config", CacheConfig(max_contexts_per_image=variants))
    turns = [user(text, a) for text in ("one ", "two ", "three ")]
    images = [output.cache.images[0] for turn in turns * 2 for output in chat(llm, turn)]
    assert [image.why.value for image in images[:3]] == ["unknown_image", "other_context", "other_context"]
    if variants is None:
        assert [image.match for image in images[3:]] == ["exact"] * 3
        assert [image.bytes_moved for image in images[3:]] == [record.data.nbytes for record in kv_records(llm)]
    else:
        assert [image.why.value for image in images[3:]] == ["displaced"] * 3
    assert len(kv_records(llm)) == (variants or 3)
    llm.reset_mm_cache()
    chat(llm, user("one ", a, "two ", a, "three ", a))  # also in one request
    assert len(kv_records(llm)) == (variants or 3)


def test_an_earlier_image_is_part_of_the_context(llm, a, b):
    chat(llm, user("See ", a, " and ", b))
    other = a.copy()
    other[0, 0, 0] ^= 1  # the text, and where everything lies, stay the same
    [output] = chat(llm, user("See ", other, " and ", b))
    assert [image.why.value for image in output.cache.images] == ["unknown_image", "other_context"]
    [output] = chat(llm, user("See ", a, " and ", b))
    assert [image.match for image in output.cache.images] == ["exact", "exact"]


# Budgets, faults, and what a user can do.


@pytest.mark.slow
def test_small_budgets(directory, textured_image):
    rng = np.random.default_rng(0)
    images = [textured_image(*rng.integers(40, 200, 2), seed=i) for i in range(12)]
    with open_llm(directory, cache=CacheConfig(host_bytes=400_000)) as llm:
        chat(llm, user(images[0], "keep this"))
        assert llm.cache.pin(images[0]) == 2
        for _ in range(12):
            group = [user("x" * int(rng.integers(3)), images[rng.integers(12)], "?") for _ in range(3)]
            reuse = ["exact", 0.3][rng.integers(2)]
            outputs = chat(llm, *group, reuse=reuse)
            if reuse == "exact":
                assert tokens(outputs) == tokens(chat(llm, *group, reuse="off"))
            stats = llm.cache.stats()
            assert stats.bytes <= stats.capacity == 400_000
            assert stats.bytes == sum(record.data.nbytes for record in llm.service.cache.store.tier.records())
        assert stats.evicted > 0
        assert llm.service.cache.store.stats().pinned == 2
        assert chat(llm, user(images[0], "keep this"))[0].cache.images[0].match == "exact"
        assert llm.cache.unpin(images[0]) == 2
        assert llm.cache.evict(images[0]) >= 2
        [output] = chat(llm, user(images[0], "keep this"))
        assert output.cache.images[0].why.value == "evicted"
    for budget in (0, 3000):
        with open_llm(directory, cache=CacheConfig(host_bytes=budget), enable_prefix_caching=False) as llm:
            for _ in range(2):
                outputs = chat(llm, user(images[1], "?"), user(images[1], "?"))
                assert [output.cache.images[0].why.value for output in outputs] == ["too_large"] * 2
            assert tokens(outputs) == tokens(chat(llm, user(images[1], "?"), user(images[1], "?"), reuse="off"))
            assert llm.cache.stats().bytes == 0


@pytest.mark.usefixtures("from_records")
@pytest.mark.parametrize("reuse", ["exact", 0.2])
def test_a_record_that_fails_is_computed_instead(llm, a, b, monkeypatch, caplog, reuse):
    requests = [user(a, "one"), user(a, "two", b), user("three", b, a)]
    cold = tokens(chat(llm, *requests, reuse="off"))

    def failing(*_):
        raise MemoryError("injected")

    with monkeypatch.context() as context, caplog.at_level(logging.CRITICAL):
        context.setattr(vlcache_jax.cache.record.Record, "checksums", failing)
        outputs = chat(llm, *requests, reuse=reuse)
        llm.cache.flush()
    assert tokens(outputs) == cold
    assert outputs[1].cache.images[0].why.value == "load_failed"
    assert all(image.match == "miss" for output in outputs for image in output.cache.images)
    stats = llm.cache.stats()
    assert (stats.bytes, stats.kv_records, stats.encoder_records) == (0, 0, 0)
    assert stats.failed >= 4
    assert tokens(chat(llm, *requests)) == cold


def test_memory_that_cannot_be_had_is_no_error(llm, a, b, monkeypatch, caplog):
    requests = [user(a, "one", b), user(b, "two", a)]
    cold = tokens(chat(llm, *requests, reuse="off"))
    allocate = vlcache_jax.cache.record._aligned
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) % 2:
            raise MemoryError("injected")
        return allocate(*arguments)

    with monkeypatch.context() as context, caplog.at_level(logging.CRITICAL):
        context.setattr(vlcache_jax.cache.record, "_aligned", failing)
        for _ in range(3):
            assert tokens(chat(llm, *requests)) == cold
            llm.cache.flush()
    assert llm.cache.stats().failed > 2
    llm.reset_mm_cache()
    assert llm.cache.stats().bytes == 0
    for _ in range(2):
        assert tokens(chat(llm, *requests)) == cold


def test_verification_saves_nothing(llm, a, monkeypatch):
    saved = []
    kv = llm.service.cache.writer.kv
    monkeypatch.setattr(llm.service.cache.writer, "kv", lambda parts, *rest: (saved.extend(parts), kv(parts, *rest))[1])
    publish = llm.service.cache.store.publish
    monkeypatch.setattr(llm.service.cache.store, "publish", lambda record: (time.sleep(0.3), publish(record))[1])
    chat(llm, user("x", a), verify=True)
    assert len({id(part.record) for part in saved}) == 1
    assert sum(len(part.tokens) for part in saved) == saved[0].record.meta.tokens
    assert not llm.cache.verify()


@pytest.mark.usefixtures("one_step")  # a second one would wait for the first's copy
def test_flush_waits_in_every_thread(llm, a, monkeypatch):
    go, waiting, found = threading.Event(), threading.Semaphore(0), []
    publish, result = llm.service.cache.store.publish, concurrent.futures.Future.result
    monkeypatch.setattr(llm.service.cache.store, "publish", lambda record: (go.wait(), publish(record))[1])
    chat(llm, user("x", a))
    monkeypatch.setattr(concurrent.futures.Future, "result", lambda job: (waiting.release(), result(job))[1])

    def flush():
        llm.cache.flush()
        found.append(llm.cache.stats().kv_records)

    threads = [threading.Thread(target=flush) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert all(waiting.acquire(timeout=10) for _ in threads)  # each waits for the copy itself
    finally:
        go.set()
        for thread in threads:
            thread.join()
    assert found == [1, 1, 1]


def test_pins_end_with_what_they_pin(llm, a, monkeypatch):
    chat(llm, user(a))
    assert llm.cache.pin(a) == 2
    assert llm.cache.pin(a) == 0
    llm.reset_mm_cache()
    assert llm.cache.stats().pinned == 0
    assert llm.cache.unpin(a) == 0
    [output] = chat(llm, user(a))
    assert llm.cache.pin(a) == 2
    assert llm.cache.stats().pinned_bytes == llm.cache.stats().bytes
    assert llm.cache.unpin(a) == 2
    monkeypatch.setattr(llm.service.cache.store, "config", CacheConfig(pinned_share=0))
    key = output.cache.images[0].key
    with pytest.raises(ValueError, match=rf"image must fit in the 0 bytes left for pinned entries, got \d+ .* {key}"):
        llm.cache.pin(a)
    assert llm.cache.stats().pinned == 0


def test_an_exact_hit_needs_no_encoder_record(llm, a, monkeypatch):
    first = chat(llm, user(png(a), "?"))
    llm.cache.flush()
    llm.service.cache.store.remove(llm.service.cache.store.tier.get(f"enc/{first[0].cache.images[0].key}"))
    with monkeypatch.context() as context:
        context.setattr(vlcache_jax.inputs.images.ImageSource, "decode", lambda *_: pytest.fail("decoded"))
        again = chat(llm, user(png(a), "?"))
    assert tokens(again) == tokens(first)
    assert again[0].cache.images[0].encoder == "none"
    # And where its rows are needed, it is decoded after all.
    elsewhere = user("Other ", png(a), "?")
    assert tokens(chat(llm, elsewhere)) == tokens(chat(llm, elsewhere, reuse="off"))


def test_a_closed_engine_says_so(directory, a):
    with open_llm(directory) as llm:
        pass
    for ask in (lambda: llm.cache.key(a), lambda: llm.cache.pin(a), llm.cache.flush, llm.reset_mm_cache):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            ask()


@pytest.mark.usefixtures("from_records")
def test_an_interrupted_call_leaves_nothing_half_stored(llm, a, b, monkeypatch):
    requests = [user(a, "one"), user(a, "two", b), user("three", b, a)]
    cold = tokens(chat(llm, *requests, reuse="off"))
    run = llm.service.device.runner.run
    for fatal in ("encode", "link", "layer", "window"):
        with monkeypatch.context() as context:

            def failing(program, *args, fatal=fatal):
                if program.name == fatal:
                    raise KeyboardInterrupt
                return run(program, *args)

            context.setattr(llm.service.device.runner, "run", failing)
            with pytest.raises(KeyboardInterrupt):
                chat(llm, *requests)
        llm.cache.flush()
        assert not llm.service.cache.store.requests._known  # a call that failed has served nothing
        stats = llm.cache.stats()
        assert stats.pinned == 0
        assert all(record.is_ready for record in llm.service.cache.store.tier.records())
        assert not llm.cache.verify()
        if fatal != "window":
            llm.reset_mm_cache()
    assert tokens(chat(llm, *requests)) == cold


def test_verification(llm, target, donors):
    [exact] = chat(llm, target, reuse="exact", verify=True)
    assert exact.verification.tokens_agree == exact.verification.tokens == 6
    assert exact.verification.max_logit_difference < 1e-4
    llm.reset_mm_cache()
    chat(llm, user("Something else entirely ", target[0]["content"][1]["image"], target[0]["content"][3]["image"]))
    [full] = chat(llm, target, reuse="full", verify=True)
    assert full.verification.max_logit_difference > 1e-2
    assert full.verification.tokens_agree <= full.verification.tokens


def test_precompute_makes_image_first_prompts_exact(llm, a, b):
    keys = llm.cache.precompute([a, b], system="Be brief.")
    for image, key in zip((a, b), keys, strict=True):
        [output] = chat(llm, [{"role": "system", "content": "Be brief."}, *user(image, "What is it?")])
        assert (output.cache.images[0].match, output.cache.images[0].key) == ("exact", key)
    [other] = chat(llm, user(a, "What is it?"))
    assert other.cache.images[0].why.value == "other_context"
    with llm.cache.lookup(a) as handle:
        assert handle.encoder.meta.tokens == handle.kv.meta.tokens == other.cache.images[0].tokens
        assert not handle.exact
        assert llm.cache.evict(a) < 3  # what is held stays
        context = handle.kv.meta.context
    with llm.cache.lookup(a, context) as handle:
        assert handle.exact
    assert llm.cache.stats().pinned == 0


def test_several_answers_and_scores_reuse_too(llm, a):
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5, ignore_eos=True)
    [cold] = chat(llm, user("x", a, "?"), params=params, reuse="off")
    for _ in range(2):
        [output] = chat(llm, user("x", a, "?"), params=params)
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in cold.outputs]
    assert output.cache.images[0].match == "exact"
    [score] = llm.score([user("x", a, "?")], [FORCED], use_tqdm=False)
    assert score.cache.images[0].match == "exact"
    llm.reset_mm_cache()
    llm.score([user("y", a)], [FORCED], use_tqdm=False)
    assert chat(llm, user("y", a))[0].cache.images[0].match == "exact"


@pytest.mark.slow  # test_llm.py has it in short
@pytest.mark.thorough_for("qwen2_5_vl")
def test_nothing_compiles_after_warmup(directory, textured_image):
    """Images of random sizes stored and linked, in every way."""
    approximate = []
    rng = np.random.default_rng(0)
    images = [png(textured_image(*rng.integers(30, 300, 2), seed=i)) for i in range(20)]
    buckets = BucketSizes(rows=(16, 64), patches=(1024,), sequences=(8,))  # steps end inside images
    with open_llm(directory, buckets=buckets) as llm:
        schedule = falling(llm, 500, 500, 100, 20)
        assert llm.warmup(reuse=schedule, verbose=False)[0] == llm.service.device.runner.programs.num_programs
        moving = Spread(schedule=schedule, shift=True)
        assert llm.warmup(reuse=moving, verbose=False)[0] > 0
        count = llm.service.device.runner.programs.num_programs
        with compilations() as compiled:
            for reuse in ("exact", schedule, moving, 0.1, "full", "shift-0.2", StaticRatio(Fraction(1, 2)), "off"):
                requests = []
                for _ in range(8):
                    chosen = [images[i] for i in rng.integers(0, 20, rng.integers(0, 4))]
                    parts = [part for image in chosen for part in ("x" * int(rng.integers(1, 30)), image)]
                    requests.append(user(*parts, "y" * int(rng.integers(1, 60))))
                for output in chat(llm, *requests[:5], reuse=reuse, verify=True):
                    found = output.verification
                    assert found.tokens == GREEDY.max_tokens
                    if output.cache.exact:
                        assert found.tokens_agree == found.tokens
                        assert found.max_logit_difference < 1e-3
                    else:
                        approximate.append(found.max_logit_difference)
                for request in requests[5:]:
                    chat(llm, request, reuse=reuse)
                    logits(llm, request, reuse=reuse)
        assert not compiled
        assert llm.service.device.runner.programs.num_programs == count
    assert max(approximate) > 1e-2


def test_bad_arguments(llm, a, directory):
    for value, message in (
        ("most", "reuse must be"),
        (1.5, "reuse must be a ratio from 0 to 1 of at most 30 digits, got 1.5"),
        (-0.1, "reuse must be a ratio from 0 to 1"),
        (float("nan"), "reuse must be a ratio from 0 to 1"),
        (True, "reuse must be"),
        (None.__class__, "reuse must be"),
        ("mpic-x", "reuse must be"),
        (Schedule((0,) * 99, "any", "any", allow_other_model=True), "reuse must be a schedule of 4 layers"),
        (Schedule((0,) * 4, "qwen3_vl", "0" * 64), "reuse must be a schedule made for this model"),
    ):
        with pytest.raises(ValueError, match=message):
            chat(llm, user(a), reuse=value)
    for ask in (chat, lambda llm, _, **options: llm.cache.key(a, **options)):
        with pytest.raises(ValueError, match="cache_salt must be a string or None, got 3"):
            ask(llm, user(a), cache_salt=3)
    with pytest.raises(ValueError, match="context must be a string"):
        llm.cache.lookup(a, 3)
    for uuid in ("", None, 3):
        with pytest.raises(ValueError, match="uuid must be a non-empty string, got"):
            llm.cache.release_uuid(uuid)
    for changes, message in (
        ({"host_bytes": -1}, "host_bytes must be a non-negative number of bytes"),
        ({"host_bytes": "4 potatoes"}, "host_bytes must be a non-negative number of bytes"),
        ({"max_contexts_per_image": 0}, "max_contexts_per_image must be a positive integer or None, got 0"),
        ({"max_contexts_per_image": True}, "max_contexts_per_image must be a positive integer or None, got True"),
        ({"pinned_share": 1.1}, "pinned_share must be a number from 0 to 1, got 1.1"),
        ({"pinned_share": float("nan")}, "pinned_share must be a number from 0 to 1, got nan"),
        ({"pinned_share": True}, "pinned_share must be a number from 0 to 1, got True"),
        ({"pinned_share": "0.5"}, "pinned_share must be a number from 0 to 1, got '0.5'"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheConfig(**changes)
    with pytest.raises(ValueError, match="cache must be a CacheConfig"):
        open_llm(directory, cache="4GiB")
    stats = llm.cache.stats()
    assert (stats.bytes, stats.encoder_records, stats.kv_records) == (0, 0, 0)
    own = Schedule((500, 300, 10, 0), llm.service.checkpoint.config.model_type, llm.fingerprint)
    assert chat(llm, user("x", a), reuse=own)[0].cache.policy == "schedule 0.4050"
