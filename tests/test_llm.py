"""The engine as a user has it, against transformers and against itself."""

from __future__ import annotations

import collections
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import numpy as np
import pytest

from tests.helper import (
    ALONE,
    FEW,
    SIZES,
    Oracle,
    compilations,
    each_decoder,
    each_family,
    give_pages,
    one_copy,
    user,
)
from vlcache_jax import LLM, BucketSizes, SamplingParams, service
from vlcache_jax.device import checkpoint
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.programs.base import Demand
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.device.programs.memory import CopyPages, EmptyDecodeState, EmptyEncoderRows, EmptyPool
from vlcache_jax.models import load_config
from vlcache_jax.pallas_kernels import PAGE

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

pytestmark = pytest.mark.slow_for("qwen2_5_vl-flat-tied")  # in short, one family but for the library's answers


def open_llm(directory, **changes):
    return LLM(directory, **SIZES | {"buckets": ALONE, "reuse": "off"} | changes)


def page_bytes(directory):
    return PAGE * KVShape.of(load_config(directory), np.float32).slot_bytes


@pytest.fixture(scope="module")
def conversations(textured_image):
    """Different lengths, images before, between and after text, and none."""
    a, b, c = textured_image(90, 130, 1), textured_image(150, 70, 2), textured_image(64, 260, 3)
    return [
        user("What is in ", a, " and in ", b, "? Say it."),
        user("Only text: tell me about it, and be brief."),
        user(c, "?"),
        [
            {"role": "system", "content": "Be terse."},
            *user(b, c, a),
            {"role": "assistant", "content": "Yes."},
            *user("!"),
        ],
    ]


@pytest.fixture(scope="module")
def llm(family_checkpoint):
    with open_llm(family_checkpoint) as engine:
        yield engine


@pytest.mark.slow_for("qwen2_vl", "qwen2_5_vl", "qwen3_vl-tied", "qwen3_vl_moe", "qwen3_5")
@pytest.mark.thorough_for("qwen2_vl-flat-tied", "qwen2_vl-library-names", "qwen2_5_vl-library-names")
@pytest.mark.thorough_for("qwen3_vl-", "qwen3_vl_moe-sharded", "qwen3_vl_moe-every", "qwen2_5_vl-flat-tied")
def test_greedy_answers_are_the_librarys(checkpoint, load_oracle, conversations):
    """Prefill in steps, packed, decoded together: the tokens of transformers, which runs each alone from the start."""
    shared = checkpoint.name in ("qwen3_vl", "qwen3_vl-tied")  # by other tests
    with open_llm(checkpoint, buckets=ALONE if shared else FEW) as llm:
        outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
        # The library's linear attention is 3e-5 from itself in float64 on some processors, and ours 1e-5.
        oracle = Oracle(load_oracle(checkpoint, "float64" if "qwen3_5" in checkpoint.name else "float32"), llm)
        answers = [oracle.answer(conversation, GREEDY.max_tokens) for conversation in conversations]
        assert [output.outputs[0].token_ids for output in outputs] == [tokens for tokens, _ in answers]
        scores = llm.score(conversations, [tokens for tokens, _ in answers], keep_logits=True, use_tqdm=False)
        for (_, expected), score in zip(answers, scores, strict=True):
            np.testing.assert_allclose(score.logits, expected, atol=2e-5 * np.abs(expected).max() / 4, rtol=0)
            assert score.greedy.all()


@pytest.mark.thorough_for("qwen2_vl-flat-tied", "qwen2_5_vl-flat-tied", "qwen3_vl_moe-tied")
@each_family
@pytest.mark.parametrize(
    ("rows", "sequences"),
    [
        (ALONE.rows, ALONE.sequences),
        pytest.param((32, 96, 256), (2, 8), marks=pytest.mark.slow),
        pytest.param((48,), (3,), marks=pytest.mark.thorough),
    ],
)
def test_alone_packed_and_in_steps_of_any_size(llm, family_checkpoint, conversations, rows, sequences):
    continuation = "the quick brown fox"

    def logits(engine, group):
        return [s.logits for s in engine.score(group, [continuation] * len(group), keep_logits=True, use_tqdm=False)]

    alone = [logits(llm, [conversation])[0] for conversation in conversations]
    eight = conversations * 2
    buckets = BucketSizes(rows=rows, patches=ALONE.patches, sequences=sequences)
    with open_llm(family_checkpoint, buckets=buckets) as engine:
        for got, expected in zip(logits(engine, eight), alone * 2, strict=True):
            # 1e-5 at a scale of 4; these logits reach 9.
            np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max() / 4, rtol=0)


def test_the_pool_may_be_too_small_for_all_at_once(llm, family_checkpoint, conversations):
    """Several waves: the same answers, in the same order."""
    expected = [o.outputs[0].token_ids for o in llm.chat(conversations, GREEDY, use_tqdm=False)]
    with open_llm(family_checkpoint) as engine:
        give_pages(engine, 3)
        outputs = engine.chat(conversations, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    waves = [o.metrics.wave for o in outputs]
    assert waves == sorted(waves)
    assert waves[-1] > 0


def test_executed_rows_are_the_plans(llm, conversations, monkeypatch):
    """What the programs were called with, not what a report says."""
    written = collections.Counter()
    run = llm.service.device.runner.run

    def spy(program, *args):
        if program.name == "layer":
            layers = llm.service.device.runner.text["layers"]
            number = next(i for i in layers if layers[i] is args[0])
            slots = np.asarray(args[3][0])[: args[4][0]]
            assert (slots < llm.service.device.runner.num_slots).all()
            written.update((number, int(slot)) for slot in slots)
        return run(program, *args)

    monkeypatch.setattr(llm.service.device.runner, "run", spy)
    outputs = llm.chat(conversations, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    expected, base = set(), PAGE
    for output in outputs:
        count = len(output.prompt_token_ids)
        assert output.cache.rows == (count,) * llm.service.checkpoint.config.text.num_layers
        for layer, rows in enumerate(output.cache.rows):
            expected |= {(layer, base + slot) for slot in range(rows)}
        base += -(-(count + 1) // PAGE) * PAGE
    assert set(written) == expected
    assert set(written.values()) == {1}


@pytest.mark.slow
@pytest.mark.thorough_for("qwen2_5_vl-flat-tied", "qwen3_vl-tied")
@each_decoder
def test_nothing_is_left_to_do_after_warmup(family_checkpoint, textured_image, monkeypatch, capsys):
    """Requests of random lengths and images, seen and new, every way of sampling: not one compilation, eager ones
    included; and no weights are hashed, and no pool is made."""
    rng = np.random.default_rng(0)
    buckets = BucketSizes(rows=(64, 256), patches=(64, 256), sequences=(8,))
    with open_llm(family_checkpoint, buckets=buckets, reuse="approximate") as llm:
        decoders = mock.Mock(wraps=service.import_decoders)
        monkeypatch.setattr(service, "import_decoders", decoders)
        count, _ = llm.warmup()
        told = capsys.readouterr().err
        assert "warming up: allocating 0.02 GB for the KV pool\n" in told
        assert "fingerprinting the weights\n" in told
        decoders.assert_called_once_with()
        most = 60 + 20 * len(set(llm.service.device.runner.shapes.like))  # kinds of layers
        assert count == llm.service.device.runner.programs.num_programs <= most
        with open_llm(family_checkpoint, buckets=None, max_rows=8192, max_model_len=None) as default:
            programs = default.service.device.runner.programs
            # a CPU's own bucket sizes has buckets of few rows, and three of sequences and of last hidden states more
            more = 22
            assert len(programs.family(Demand(programs.shapes.buckets))) <= most + more
        monkeypatch.setattr(checkpoint, "tensor_digests", lambda plan: pytest.fail("weights were hashed"))
        ran, run = set(), llm.service.device.runner.run
        monkeypatch.setattr(llm.service.device.runner, "run", lambda one, *args: ran.add(one) or run(one, *args))
        requests, params = [], []
        for i in range(50):
            parts = []
            for _ in range(rng.integers(0, 4)):
                parts.append("x" * int(rng.integers(1, 40)))
                parts.append(textured_image(*rng.integers(30, 180, 2), seed=i))
            requests.append(user(*parts, "y" * int(rng.integers(1, 60))))
            params.append(
                SamplingParams(
                    max_tokens=int(rng.integers(1, 6)),
                    temperature=float(rng.integers(0, 2)),
                    repetition_penalty=1.0 + float(rng.integers(0, 2)),
                    logprobs=[None, 3][rng.integers(0, 2)],
                )
            )
        a, b = textured_image(90, 130, 1), textured_image(150, 70, 2)
        film = {"type": "video", "video": [textured_image(56, 84, i) for i in range(4)], "video_metadata": {"fps": 2}}
        prefix = [{"role": "system", "content": "Be terse."}]
        with compilations() as compiled:
            for request in (
                user(a, "What?"), user(a, "What?"), user(a, "Where, then?"), prefix + user(a, "What?"),
                user("See ", b, " and ", a, " and ", textured_image(64, 64, 3)),
                [{"role": "user", "content": [film, {"type": "text", "text": "What?"}]}],
            ):  # fmt: skip
                for reuse in ("approximate", "exact", "full", "off"):
                    llm.chat(request, GREEDY, reuse=reuse, use_tqdm=False)
            llm.chat(requests[:25], params[:25], use_tqdm=False)
            for request, own in zip(requests[25:], params[25:], strict=True):
                llm.chat(request, own, use_tqdm=False)
            llm.score(requests[:5], ["abc"] * 5, use_tqdm=False)
            llm.chat([requests[0]] * 5, params[0], use_tqdm=False)
        assert not compiled
        assert {"encode", "link", "stage", "window"} <= {program.name for program in ran}
        assert not ran & {EmptyPool(), EmptyDecodeState(), EmptyEncoderRows()}
        assert llm.service.device.runner.programs.num_programs == count
    with compilations() as compiled:
        jax.jit(lambda x: x + len(compiled))(np.arange(1237))
    assert compiled  # it does listen


@one_copy
def test_nearly_equal_pools_have_the_same_programs(family_checkpoint):
    """So that what was compiled for one, and is kept on disk, serves the other."""
    texts = []
    for pages in (40, 41, 42):
        with open_llm(family_checkpoint, kv_cache_bytes=pages * page_bytes(family_checkpoint)) as llm:
            programs = llm.service.device.runner.programs
            assert llm.stats().pages == pages // 2 * 2
            assert llm.stats().kv_cache_bytes == pages // 2 * 2 * page_bytes(family_checkpoint)
            family = programs.family(Demand(programs.shapes.buckets))
            layer = next(program for program in family if isinstance(program, Layer))
            lowered = [
                one.jitted(programs.shapes).lower(*one.arguments(programs.shapes))
                for one in (EmptyPool(), CopyPages(1), layer)
            ]
            texts.append([one.as_text() for one in lowered])
    assert texts[0] == texts[1]
    assert all(one != other for one, other in zip(texts[1], texts[2], strict=True))


@pytest.mark.slow
@pytest.mark.thorough_for("qwen2_5_vl-flat-tied")
def test_bf16(llm, family_checkpoint, conversations):
    """Any tokens are as likely as float32 says, but for bfloat16's rounding (test_bfloat16.py has the numerics)."""
    params = SamplingParams(temperature=5, seed=0, max_tokens=4, ignore_eos=True, logprobs=1)
    with open_llm(family_checkpoint, dtype="bfloat16", buckets=FEW) as narrow:
        outputs = narrow.chat(conversations, params, use_tqdm=False)
        assert narrow.service.device.runner.pool.arrays[0][0].dtype == "bfloat16"
    answers = [output.outputs[0] for output in outputs]
    scores = llm.score(conversations, [answer.token_ids for answer in answers], use_tqdm=False)
    logprobs = np.array([[logprob.chosen for logprob in answer.logprobs] for answer in answers])
    error = np.sqrt(np.mean((logprobs - [score.logprobs for score in scores]) ** 2))
    assert 1e-3 < error < 0.15


@pytest.mark.slow
@pytest.mark.thorough_for("qwen2_5_vl-flat-tied")
@pytest.mark.parametrize("family_checkpoint", ["qwen2_5_vl-flat-tied", "qwen3_vl-tied"], indirect=True, scope="session")
def test_bfloat16_alone_together_and_repeated(family_checkpoint, conversations):
    """Programs round alike, whatever the number of their rows: XLA's own choice would differ by 0.006.

    In tiny models of the other families, sizes of some sums lie on both sides of a bound of XLA's
    (docs/research/cpu_notes.md).
    """
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    with open_llm(family_checkpoint, dtype="bfloat16", enable_prefix_caching=False, reuse="exact") as llm:
        alone = [llm.chat(one, params, use_tqdm=False)[0] for one in conversations]
        llm.cache.flush()
        repeated = [llm.chat(one, params, use_tqdm=False)[0] for one in conversations]
        llm.reset_mm_cache()
        together = llm.chat(conversations, params, use_tqdm=False)
    assert "exact" in {image.match for output in repeated for image in output.cache.images}
    for others in (repeated, together):
        for one, other in zip(alone, others, strict=True):
            one, other = one.outputs[0], other.outputs[0]
            assert one.token_ids == other.token_ids
            found = [[logprob.chosen for logprob in answer.logprobs] for answer in (one, other)]
            np.testing.assert_allclose(*found, atol=2e-6)


def test_sampling_is_repeatable_whatever_else_is_in_the_batch(llm, conversations):
    params = SamplingParams(temperature=2.0, top_p=0.95, seed=7, max_tokens=8, n=3, ignore_eos=True, logprobs=2)
    [alone] = llm.chat([conversations[0]], params, use_tqdm=False)
    together = llm.chat(conversations, [params, *[GREEDY] * 3], use_tqdm=False)[0]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in together.outputs]
    assert [o.index for o in alone.outputs] == [0, 1, 2]
    assert len({o.token_ids for o in alone.outputs}) > 1
    answer = alone.outputs[1]
    score = llm.score([conversations[0]], [answer.token_ids], use_tqdm=False)[0]
    np.testing.assert_allclose(score.logprobs, [p.chosen for p in answer.logprobs], atol=1e-5)
    assert all(len(p.top) == 2 for p in alone.outputs[1].logprobs)


def test_where_answers_end(llm, conversations):
    for seed in range(100):  # random weights repeat themselves, often in bytes that are no text
        settings = {"temperature": 1.5, "seed": seed, "max_tokens": 32}
        [full] = llm.chat(conversations[0], SamplingParams(**settings, ignore_eos=True), use_tqdm=False)
        if any(character.isascii() for character in full.outputs[0].text[4:]):
            break
    tokens = full.outputs[0].token_ids
    assert (len(tokens), full.outputs[0].finish_reason) == (32, "length")

    def ask(**changes):
        [output] = llm.chat(conversations[0], SamplingParams(**settings | changes), use_tqdm=False)
        return output.outputs[0]

    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    cut = tokens.index(stop) + 1
    stopped = ask(stop_token_ids=[stop], ignore_eos=True)
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[:cut], "stop")
    late = ask(stop_token_ids=[stop], ignore_eos=True, min_tokens=cut)
    assert stop not in late.token_ids[:cut]
    text = full.outputs[0].text
    end = next(character for character in text[4:] if character.isascii())
    by_string = ask(stop=[end, "never there"], ignore_eos=True)
    assert by_string.finish_reason == "stop"
    assert by_string.text == text[: text.index(end)]
    # One that came before min_tokens does not count, neither as an end nor in the text.
    too_early = ask(stop=[end], ignore_eos=True, min_tokens=32)
    assert len(too_early.token_ids) == 32
    assert too_early.token_ids == tokens
    assert len(too_early.text) > text.index(end)


def test_generate_takes_prompts_as_they_are(llm, textured_image):
    image = textured_image(160, 240)
    text = "<|vision_start|><|image_pad|><|vision_end|>abc"
    request = {"prompt": text, "multi_modal_data": {"image": [image]}}
    small = request | {"mm_processor_kwargs": {"max_pixels": 64 * 64}}
    outputs = llm.generate([request, "abc", small], SamplingParams(max_tokens=2), use_tqdm=False)
    assert [len(o.cache.images) for o in outputs] == [1, 0, 1]
    assert outputs[2].cache.images[0].tokens < outputs[0].cache.images[0].tokens
    assert outputs[2].cache.images[0].key != outputs[0].cache.images[0].key
    assert outputs[1].prompt_token_ids.tolist() == list(b"abc")
    assert [len(llm.generate("abc", use_tqdm=False)), len(llm.generate([], use_tqdm=False))] == [1, 0]


def test_reports(llm, conversations):
    outputs = llm.chat(conversations, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert [len(o.cache.images) for o in outputs] == [2, 0, 1, 3]
    first, third = outputs[0].cache.images, outputs[3].cache.images
    assert first[1].key == third[0].key  # the same picture
    assert len({image.key for image in first + third}) == 3
    assert [output.metrics.decode_image > 0 for output in outputs] == [True, False, True, False]  # each picture once
    for output in outputs:
        metrics = output.metrics
        assert 0 < metrics.prefill + metrics.first_token <= metrics.ttft
        assert metrics.decode > 0
        assert output.num_cached_tokens == 0
        for image in output.cache.images:
            assert (image.encoder, image.kv, image.match, image.why.value) == ("computed", "none", "miss", "reuse_off")


BAD_REQUESTS = {
    "corrupt": (lambda good: user(b"\x89PNG\r\n\x1a\n nonsense"), "images"),
    "empty file": (lambda good: user(b""), "images"),
    "video": (lambda good: [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "video"),
    "no messages": (lambda good: [], "at least one message"),
    "unknown role": (lambda good: [{"role": "robot", "content": "x"}], "role"),
    "unknown key": (lambda good: [{"role": "user", "content": "x", "tool_calls": [1]}], "tool_calls"),
    "too long": (lambda good: user("x" * 1200), "max_model_len = 1024"),
    "placeholder in the text": (lambda good: user("<|image_pad|>"), "the placeholder of an image"),
    "long and thin": (lambda good: user(np.zeros((2, 500, 3), np.uint8)), "200"),
    "float image": (lambda good: user(np.zeros((20, 20, 3))), "uint8"),
    "remote image": (
        lambda good: [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.invalid/a.png"}}]}
        ],
        "remote",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_run_nothing_and_break_nothing(llm, conversations, case, monkeypatch):
    make, message = BAD_REQUESTS[case]
    before = llm.chat(conversations[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with monkeypatch.context() as context:
        context.setattr(llm.service.device.runner, "run", lambda *_: pytest.fail("something ran"))
        with pytest.raises(ValueError, match=message):
            llm.chat([conversations[0], make(None)], GREEDY, use_tqdm=False)
    assert llm.chat(conversations[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before


def test_other_bad_arguments(llm, conversations, textured_image):
    image = textured_image(60, 80)
    chat, score = llm.chat, llm.score
    with pytest.raises(ValueError, match="placeholders"):
        llm.generate({"prompt": "<|image_pad|> <|image_pad|>", "multi_modal_data": {"image": image}})
    with pytest.raises(ValueError, match="one for each of 2 requests, got 3"):
        chat(conversations[:2], [GREEDY] * 3)
    with pytest.raises(ValueError, match=r"sampling_params\[0\] must be SamplingParams, got dict"):
        chat(conversations[:1], [{}])
    with pytest.raises(ValueError, match="messages must be"):
        chat("hello")
    with pytest.raises(ValueError, match='reuse must be "off"'):
        chat(conversations[0], reuse="most")
    with pytest.raises(ValueError, match="verify must be a bool, got 'yes'"):
        chat(conversations[0], verify="yes")
    with pytest.raises(ValueError, match="use_tqdm must be a bool, got 0"):
        llm.generate("Hello", use_tqdm=0)
    with pytest.raises(ValueError, match="keep_logits must be a bool, got 1"):
        score(conversations[:1], ["a"], keep_logits=1)
    with pytest.raises(ValueError, match="verbose must be a bool, got 'no'"):
        llm.warmup(verbose="no")
    with pytest.raises(ValueError, match="max_pixel"):
        chat(conversations[0], mm_processor_kwargs={"max_pixel": 1})
    with pytest.raises(ValueError, match=r"continuations\[0\] must have at least one token"):
        score(conversations[:1], [""])
    with pytest.raises(ValueError, match="token ids below"):
        score(conversations[:1], [[10**6]])
    with pytest.raises(ValueError, match="one entry for each of 2"):
        score(conversations[:2], ["a"])
    with pytest.raises(ValueError, match=r"prompts must be .* got int"):
        llm.generate(3)
    with pytest.raises(ValueError, match="token ids below"):
        score(conversations[:1], [None])
    for token in (10**6, 10**5000):
        with pytest.raises(ValueError, match="the size of the vocabulary"):
            chat(conversations[0], SamplingParams(stop_token_ids=[token]))
    for params, message in (
        (SamplingParams(logit_bias={10**6: 1.0}), "logit_bias must be token ids below"),
        (SamplingParams(allowed_token_ids=[10**6]), "allowed_token_ids must be token ids below"),
        (SamplingParams(bad_words=["abcdefghijklmnopqrstuvwxyz" * 9]), "bad_words must have 1 to 8 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            chat(conversations[0], params)


@one_copy
def test_a_pool_too_small_names_the_figures(family_checkpoint):
    size = page_bytes(family_checkpoint)
    with (
        open_llm(family_checkpoint, kv_cache_bytes=size, max_model_len=None) as engine,
        pytest.raises(ValueError, match="max_model_len = 128"),  # a page
    ):
        engine.chat([{"role": "user", "content": "long " * 40}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="max_model_len must be at most 128"):
        open_llm(family_checkpoint, kv_cache_bytes=size, max_model_len=200)


def test_what_does_not_fit_is_not_loaded(family_checkpoint, monkeypatch):
    from vlcache_jax.device import checkpoint, memory_plan

    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 2**20)
    opened = checkpoint.open_checkpoint(family_checkpoint)
    monkeypatch.setattr(type(opened), "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(MemoryError, match=r"0\.00 GiB free .* got weights .*, activations .*, KV pool"):
        open_llm(family_checkpoint)


def test_a_fault_in_the_middle_leaves_the_engine_usable(llm, conversations, monkeypatch):
    expected = [o.outputs[0].token_ids for o in llm.chat(conversations, GREEDY, use_tqdm=False)]
    run = llm.service.device.runner.run
    faults = (("window", 2, KeyboardInterrupt), ("layer", 2, RuntimeError), ("stage", 1, KeyboardInterrupt))
    for name, count, error in faults:
        calls = []

        def failing(program, *args, name=name, count=count, error=error, calls=calls):
            result = run(program, *args)  # the donated arrays are gone by now
            calls.append(program.name)
            if calls.count(name) == count and program.name == name:
                raise error
            return result

        with monkeypatch.context() as context:
            context.setattr(llm.service.device.runner, "run", failing)
            with pytest.raises(error):
                llm.chat(conversations, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in llm.chat(conversations, GREEDY, use_tqdm=False)] == expected


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c(llm, conversations):
    """A real signal at a random moment."""
    expected = llm.chat(conversations[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    done = threading.Event()

    def interrupt():
        for seconds in (0.3, 5, 5):  # jax swallows one that comes in its callback of the garbage collector
            if not done.wait(seconds):
                signal.raise_signal(signal.SIGINT)
        done.set()

    def serve_on():
        try:
            while not done.is_set():
                llm.chat(conversations, GREEDY, use_tqdm=False)
        finally:
            done.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        serve_on()
    thread.join()
    assert llm.chat(conversations[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_threads_are_served_one_after_the_other(llm, conversations):
    expected = [llm.chat(c, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for c in conversations]
    got = {}

    def serve(i):
        for _ in range(3):
            got[i] = llm.chat(conversations[i], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=serve, args=[i]) for i in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(conversations))] == expected


def test_pictures_are_identified_though_all_threads_are_busy(llm, textured_image):
    """Whoever waits for pictures does what no thread has begun."""
    prompt = llm.service.renderer.from_conversation(user(*(textured_image(40, 56, seed) for seed in range(4))))
    expected = [image.key for image in llm.service.preparation.identifier.identify([prompt])[0].images]
    is_over = threading.Event()
    for threads in (llm.service.preparation.threads, llm.service.preparation.quick_threads):
        for _ in range(threads._max_workers):
            threads.submit(is_over.wait)
    with ThreadPoolExecutor(1) as caller:
        identified = caller.submit(llm.service.preparation.identifier.identify, [prompt], lookup=False)
        try:
            [request] = identified.result(timeout=60)  # or it would wait for ever
        finally:
            is_over.set()
    assert [image.key for image in request.images] == expected


def test_a_closed_engine_says_so(family_checkpoint, conversations):
    llm = open_llm(family_checkpoint)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.chat(conversations[0])
    with pytest.raises(RuntimeError, match="closed"):
        LLM(llm.service)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("kv_cache_bytes", -1, "kv_cache_bytes must be a non-negative number of bytes"),
        ("kv_cache_bytes", "4 gigs", "kv_cache_bytes must be a non-negative number of bytes"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization must be a number above 0 and at most 1, got 1.5"),
        ("max_num_seqs", 0, "max_num_seqs must be a positive integer"),
        ("limit_mm_per_prompt", 4, "limit_mm_per_prompt must be a dict such as"),
        ("limit_mm_per_prompt", {"img": 1}, "unknown field 'img' in limit_mm_per_prompt; expected one of image, vid"),
        (
            "limit_mm_per_prompt",
            {"video": {"cnt": 1}},
            r"unknown field 'cnt' in limit_mm_per_prompt\['video'\]",
        ),
        ("limit_mm_per_prompt", {"video": {"count": 1, "cnt": 1}}, "unknown field 'cnt' in"),
        ("limit_mm_per_prompt", {"image": -1}, "limit_mm_per_prompt must be integers of at least 0, got -1 for image"),
        ("verify_weights", 1, "verify_weights must be a bool, got 1"),
        ("use_tqdm", None, "use_tqdm must be a bool, got None"),
        ("max_rows", 1.5, "max_rows must be a positive integer"),
        ("max_model_len", True, "max_model_len must be a positive integer"),
        ("reuse", "most", 'reuse must be "off"'),
        ("dtype", "int8", "dtype must be"),
        ("mm_processor_kwargs", {"size": 3}, "size"),
        ("implementation", "cuda", "implementation must be"),
        ("allow_remote_images", "no", "allow_remote_images must be a bool, got 'no'"),
        ("allowed_media_domains", "a.example", "allowed_media_domains must be a list of host names"),
        ("allowed_local_media_path", True, "allowed_local_media_path must be a folder or None"),
        ("max_image_bytes", "many", "max_image_bytes must be a non-negative number of bytes"),
        ("model", None, "model must be a checkpoint directory or a Hub ID, got None"),
        ("buckets", 5, "buckets must be a BucketSizes or None, got 5"),
        ("revision", 3, "revision must be a string or None, got 3"),
        ("cache", "4GiB", "cache must be a CacheConfig, got '4GiB'"),
        ("seed", -1, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_bad_engine_arguments_are_found_before_anything_else(family_checkpoint, argument, value, message, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("the device was asked for"))
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": family_checkpoint, argument: value})


def test_images_are_read_as_the_arguments_say(family_checkpoint, tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture")
    settings = {
        "allow_remote_images": True,
        "allowed_media_domains": ["pictures.example"],
        "allowed_local_media_path": tmp_path / "..",
        "max_image_bytes": "5B",
    }
    with open_llm(family_checkpoint, **settings) as llm:
        for image, message in [
            ("http://other.example/a.png", "allowed_media_domains"),
            ("/etc/passwd", "allowed_local_media_path"),
            (tmp_path / "a.png", "at most 5 bytes"),
        ]:
            with pytest.raises(ValueError, match=rf"messages images\[0\] must .*{message}"):
                llm.chat([{"role": "user", "content": [{"type": "image", "image": image}]}])


@pytest.mark.slow
def test_the_core_needs_little(checkpoints):
    """Machines with a GPU may lack the rest. Neither templates nor images need torch."""
    code = f"""
import sys
for name in ("torch", "torchvision", "orbax", "typer", "matplotlib", "psutil"):
    sys.modules[name] = None
import numpy as np
from vlcache_jax import LLM, BucketSizes, SamplingParams
with LLM({str(checkpoints("qwen3_vl-tied"))!r}, **{SIZES}) as llm:
    image = np.zeros((64, 96, 3), np.uint8)
    content = [{{"type": "image", "image": image}}, {{"type": "text", "text": "Hi"}}]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    [output] = llm.chat([{{"role": "user", "content": content}}], params, use_tqdm=False)
    print(len(output.outputs[0].token_ids), output.cache.images[0].tokens)
    processor = llm.service.preparation.processor
    print(processor.pixel_values(processor.patches(image)).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 6\n(24, 1536)\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("preprocessor_config.json", '"patch_size": ', '"patch_size": 1', "patch_size of the image processor"),
        ("config.json", '"image_token_id": ', '"image_token_id": 1', "image placeholder of the tokenizer"),
        ("generation_config.json", "{", "", "generation_config.json must have valid"),
        ("generation_config.json", "{", '{"top_p": 2, ', "generation_config.json must have valid .* top_p must be"),
        ("generation_config.json", "{", '{"temperature": NaN, ', "generation_config.json .* temperature must be"),
        (
            "generation_config.json",
            '"do_sample": ',
            '"do_sample": "yes", "a": ',
            "generation_config.json .* do_sample must",
        ),
        ("generation_config.json", "{", '{"a": ' + "[" * 100_000, "generation_config.json must be a JSON file"),
    ],
)
def test_a_checkpoint_that_contradicts_itself(family_checkpoint, tmp_path, file, old, new, message):
    directory = shutil.copytree(family_checkpoint, tmp_path / "copy")
    text = (directory / file).read_text()
    assert old in text
    (directory / file).write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        open_llm(directory)
