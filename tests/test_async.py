"""Requests that come one by one: streams, aborts, consumers that go away, queues, errors, and closing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import random
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helper import SIZES, WITHIN, assert_nothing_left, give_decode_slots, give_pages, some_seeds, user
from vlcache_jax import LLM, AsyncLLM, QueueFullError, RequestError, SamplingParams
from vlcache_jax.calls.groups import Job
from vlcache_jax.calls.in_flight import _Admission, _AdmissionQueue
from vlcache_jax.engine.completions import Detokenizer
from vlcache_jax.engine.engine import Loop
from vlcache_jax.engine.request import Generation
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.outputs import OutputCollector, RequestDelta, RequestMetrics

DECODE_SLOTS = 2  # of every engine here
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
MEDIUM = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
# Letters alone, so that texts can be cut into stop strings.
LETTERS = {"temperature": 50, "ignore_eos": True, "max_tokens": 40, "allowed_token_ids": list(range(97, 123))}
CLOSED = r"^this LLM is closed$"


@pytest.fixture(scope="module")
def pictures(textured_image):
    return [textured_image(64, 64 + 32 * (seed % 3), seed) for seed in range(4)]


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def shared(directory, pictures):
    """An engine that all tests use, whichever comes first; what is compiled for it is used by all others, too."""
    engine = AsyncLLM(directory, use_tqdm=False, **SIZES)
    give_decode_slots(engine, DECODE_SLOTS)
    LLM(engine.service).chat(user("a", pictures[0]), SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    yield engine
    engine.service.close()


@pytest.fixture
def engine(shared):
    """It is empty at first, and nothing may be left behind in the end."""
    shared.service.reset_mm_cache()
    yield shared
    assert_clean(shared)


@pytest.fixture
def open_engine(directory, shared):
    """(options) -> another engine, which is closed in the end."""
    opened = []

    def make(*, closes=True, **options):
        engine = AsyncLLM(directory, use_tqdm=False, **SIZES | options)
        give_decode_slots(engine, DECODE_SLOTS)
        engine.service.device.runner.programs = shared.service.device.runner.programs
        engine.service.device.runner.run = shared.service.device.runner.run
        if closes:
            opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.service.close()


@pytest.fixture
def slow(engine, monkeypatch):
    """Windows take long enough for something to happen meanwhile."""
    window = engine.service.device.runner.window
    monkeypatch.setattr(engine.service.device.runner, "window", lambda *given: (time.sleep(0.01), window(*given))[1])


@pytest.fixture
def slow_decoder(monkeypatch):
    """An event that pictures wait for, and one that says that the first of them does."""
    begun, go_on = threading.Event(), threading.Event()
    decode = ImageSource.decode

    def wait(self, *given):
        begun.set()
        assert go_on.wait(WITHIN)
        return decode(self, *given)

    monkeypatch.setattr(ImageSource, "decode", wait)
    yield begun, go_on
    go_on.set()


def assert_clean(engine):
    """Nobody has a decode slot, pages, records, room or a name any more."""
    assert eventually(lambda: not engine._requests._room._used)
    assert eventually(lambda: not any(record.held for record in engine.service.cache.store.tier.records()))
    assert_nothing_left(engine)
    assert not engine._requests._admissions
    assert not engine._requests._room._waiting


def eventually(is_true):
    """Whether it becomes true soon."""
    for _ in range(500):
        if is_true():
            return True
        time.sleep(0.01)
    return False


async def becomes(is_true):
    assert await asyncio.to_thread(eventually, is_true)


def run(*coroutines):
    """All of them at once, in an event loop of their own; a hanging test is a failed one."""

    async def together():
        return await asyncio.wait_for(asyncio.gather(*coroutines), WITHIN)

    found = asyncio.run(together())
    return found[0] if len(coroutines) == 1 else found


async def stream(engine, prompt, params=GREEDY, request_id=None, **options):
    """All outputs of a request."""
    return [output async for output in engine.generate(prompt, params, request_id, **options)]


async def last(*given, **options):
    return (await stream(*given, **options))[-1]


async def first(generator):
    """The generator stays as it is."""
    return await anext(generator)


def chat(engine, conversation, params=GREEDY, **options):
    [output] = LLM(engine.service).chat([conversation], params, use_tqdm=False, **options)
    return output


def tokens(output):
    return [one.token_ids for one in output.outputs]


def comparable(output):
    """What does not depend on how it was asked for."""
    return (
        [(one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs],
        output.cache,
        output.num_cached_tokens,
        output.prompt,
        output.prompt_token_ids.tolist(),
        output.error,
    )


def assert_streams(outputs):
    """Each holds the one before, and the last one alone is whole."""
    assert outputs[-1].finished
    assert not any(output.finished for output in outputs[:-1])
    for before, after in itertools.pairwise(outputs):
        assert sum(map(len, tokens(after))) > sum(map(len, tokens(before))) or after.finished
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert new.text.startswith(old.text)
            assert old.finish_reason in (None, new.finish_reason)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "image", "two images", "n", "image and n", "logprobs"])
def test_a_stream_ends_with_what_chat_returns(engine, pictures, kind, monkeypatch):
    told_of = []
    hear = Job._hear
    monkeypatch.setattr(Job, "_hear", lambda job, sequence: (told_of.append(sequence), hear(job, sequence)))
    prompt = {
        "image": user("a", pictures[0], "b"),
        "two images": user(pictures[0], "b", pictures[1]),
        "image and n": user("a", pictures[0]),
    }.get(kind, user("some text"))
    params = SamplingParams(
        **LETTERS, seed=3, n=2 if "n" in kind.split() else 1, logprobs=1 if kind == "logprobs" else None
    )
    for _ in range(2):  # cold, and from the cache
        engine.service.reset_prefix_cache()
        told_of.clear()
        outputs = run(stream(engine, prompt, params))
        assert_streams(outputs)
        assert len(told_of) > 5  # who reads late, on busy cores, gets several of these at once, or all
        assert outputs
        assert {output.request_id for output in outputs} == {outputs[0].request_id}
        assert outputs[0].request_id
    known = comparable(outputs[-1])
    engine.service.reset_mm_cache()
    for _ in range(2):
        engine.service.reset_prefix_cache()
        expected = chat(engine, prompt, params)
    assert known == comparable(expected)
    if kind == "logprobs":
        assert [one.chosen for one in outputs[-1].outputs[0].logprobs] == pytest.approx(
            [one.chosen for one in expected.outputs[0].logprobs], abs=1e-4
        )


@pytest.mark.parametrize("prompt", ["some text", {"prompt": "some text"}, [115, 111, 109, 101]])
def test_a_prompt_is_continued_as_generate_does(engine, prompt):
    [expected] = LLM(engine.service).generate(prompt, GREEDY, use_tqdm=False)
    engine.service.reset_prefix_cache()
    assert comparable(run(last(engine, prompt))) == comparable(expected)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_spans_windows_never_shows_in_part(engine, include):
    """What a consumer has been shown it cannot take back."""
    params = SamplingParams(**LETTERS, seed=5)
    text = chat(engine, user("a"), params).outputs[0].text
    assert len(text) == 40
    for begin in (9, 10, 11, 12):
        stop = [text[begin : begin + 9], "#" * 3]
        cut = SamplingParams(**LETTERS, seed=5, stop=stop, include_stop_str_in_output=include)
        expected = chat(engine, user("a"), cut)
        assert expected.outputs[0].finish_reason == "stop"
        engine.service.reset_prefix_cache()
        outputs = run(stream(engine, user("a"), cut))
        assert tokens(outputs[-1]) == tokens(expected)
        assert outputs[-1].outputs[0].text == expected.outputs[0].text == text[: begin + 9 * include]
        assert_streams(outputs)


def test_many_at_once_are_as_one_by_one(engine, pictures):
    prompts = [user(f"{i}" * (i + 1), *pictures[i % 5 : i % 5 + 1]) for i in range(12)]
    params = [SamplingParams(**LETTERS | {"max_tokens": 5 + i}, seed=i, n=1 + i % 2) for i in range(12)]
    expected = [chat(engine, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    engine.service.reset_mm_cache()
    outputs = run(*(stream(engine, prompt, own) for prompt, own in zip(prompts, params, strict=True)))
    for got, one in zip(outputs, expected, strict=True):
        assert_streams(got)
        assert tokens(got[-1]) == tokens(one)


def test_who_is_slow_to_ask_still_gets_the_end(engine):
    expected = chat(engine, user("a"))

    async def ask():
        outputs = []
        async for output in engine.generate(user("a"), GREEDY):
            outputs.append(output)
            await becomes(lambda: engine.stats().running == 0)  # it ends before there is more of it
        return outputs

    outputs = run(ask())
    assert outputs[-1].finished
    assert tokens(outputs[-1]) == tokens(expected)


# --- deltas -----------------------------------------------------------------------------------------------------------


async def stream_deltas(engine, prompt, params, request_id=None, **options):
    """All deltas of a request."""
    return [delta async for delta in engine.deltas(prompt, params, request_id, **options)]


def joined(deltas):
    """What they come to; each says something, and nothing is told twice."""
    collector = OutputCollector()
    for delta in deltas:
        collector.add(delta)
    output = collector.output()
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert {delta.request_id for delta in deltas} == {output.request_id}
    assert [one.index for one in deltas[0].outputs] == [*range(len(output.outputs))]
    for delta in deltas[1:]:
        assert delta.finished or delta.outputs
        assert all(one.token_ids or one.finish_reason for one in delta.outputs)
    for answer in output.outputs:
        own = [one for delta in deltas for one in delta.outputs if one.index == answer.index]
        assert "".join(one.text for one in own) == answer.text
        assert sum((one.token_ids for one in own), ()) == answer.token_ids
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [answer.finish_reason]
        if answer.logprobs is None:
            assert all(one.logprobs is None for one in own)
        else:
            assert sum((one.logprobs for one in own), ()) == answer.logprobs
            assert tuple(one.token for one in answer.logprobs) == answer.token_ids
    assert deltas[-1].prompt is not None
    assert sum(delta.prompt is not None for delta in deltas[:-1]) <= len(output.outputs)
    assert sum(output.metrics.inter_token) == pytest.approx(output.metrics.decode)
    return output


@pytest.mark.parametrize("kind", ["text", "image", "n", "logprobs", "prompt_logprobs"])
def test_deltas_are_joined_to_what_chat_returns(engine, slow, pictures, kind):
    prompt = user("a", pictures[0], "b") if kind == "image" else user("some text")
    asked = {"n": {"n": 3}, "logprobs": {"logprobs": 2}, "prompt_logprobs": {"prompt_logprobs": 1}}.get(kind, {})
    params = SamplingParams(**LETTERS, seed=3, **asked)
    expected = chat(engine, prompt, params)
    engine.service.reset_mm_cache()
    deltas = run(stream_deltas(engine, prompt, params))
    assert len(deltas) > 2
    output = joined(deltas)
    assert comparable(output) == comparable(expected)
    pairs = [(output.prompt_logprobs, expected.prompt_logprobs)]
    pairs += [(mine.logprobs, its.logprobs) for mine, its in zip(output.outputs, expected.outputs, strict=True)]
    for mine, its in pairs:
        assert [one and (one.token, one.rank, one.texts) for one in mine or ()] == [
            one and (one.token, one.rank, one.texts) for one in its or ()
        ]
    assert deltas[0].to_dict()["prompt"]["token_ids"] == expected.prompt_token_ids.tolist()


@pytest.mark.slow
def test_deltas_of_random_requests(engine, pictures, monkeypatch):
    """With stop strings that span windows, several answers, aborts, and answers that are preempted for want of
    pages."""
    rng = random.Random(0)
    asked = []
    for i in range(12):
        is_free = i > 1  # the first two have two pages each, where there are three
        params = SamplingParams(
            **LETTERS | {"max_tokens": rng.choice([1, 30, 230]) if is_free else 230},
            seed=i, n=rng.choice([1, 1, 2]) if is_free else 1, logprobs=rng.choice([None, 1]),
        )  # fmt: skip
        prompt = user(f"{i}", *rng.sample(pictures, rng.choice([0, 1]) if is_free else 0))
        whole = chat(engine, prompt, params)
        if is_free and rng.random() < 0.5 and len(text := whole.outputs[0].text) > 9:
            begin = rng.randrange(len(text) - 9)
            params.stop = [text[begin : begin + rng.choice([2, 9])], "###"]
            params.include_stop_str_in_output = rng.random() < 0.5
            whole = chat(engine, prompt, params)
        asked.append((prompt, params, whole, is_free and rng.random() < 0.2))
    # All of them have arrived when the first one runs, and the order is theirs.
    loop, arrivals = engine.service.loop, sum(params.n for _, params, *_ in asked)
    loop.wait()
    begin = loop.begin
    monkeypatch.setattr(loop, "begin", lambda: begin() if loop._thread or len(loop._arriving) == arrivals else None)
    pages, before = engine.service.cache.pages.count, engine.stats().preemptions
    engine.service.reset_mm_cache()
    give_pages(engine, 3)

    async def ask(i, prompt, params, ends_early):
        deltas = []
        async for delta in engine.deltas(prompt, params, f"{i}", priority=i):
            deltas.append(delta)
            if ends_early:
                await engine.abort(f"{i}")
        return deltas

    try:
        found = run(*(ask(i, prompt, params, early) for i, (prompt, params, _, early) in enumerate(asked)))
        assert engine.stats().preemptions > before
    finally:
        give_pages(engine, pages)
    for deltas, (_, _, whole, ends_early) in zip(found, asked, strict=True):
        output = joined(deltas)
        for mine, its in zip(output.outputs, whole.outputs, strict=True):
            if ends_early and mine.finish_reason == "abort":
                assert mine.token_ids == its.token_ids[: len(mine.token_ids)]
                assert its.text.startswith(mine.text[:-8])  # at the end nothing is held back
            else:
                assert mine == dataclasses.replace(
                    its, logprobs=mine.logprobs, cumulative_logprob=mine.cumulative_logprob
                )


def test_logits_that_are_not_finite_end_deltas(engine, slow, monkeypatch):
    extend = Generation.extend
    expected = chat(engine, user("a"), MEDIUM)
    deltas = []

    async def ask():
        async for delta in engine.deltas(user("a"), MEDIUM):
            deltas.append(delta)

    with monkeypatch.context() as context:
        context.setattr(
            Generation, "extend", lambda answer, new: extend(answer, [-1] if len(answer.token_ids) > 9 else new)
        )
        with pytest.raises(RequestError, match="logits must be finite"):
            run(ask())
    new = [token for delta in deltas for one in delta.outputs for token in one.token_ids]
    assert 9 < len(new) < 40
    assert tuple(new) == tokens(expected)[0][: len(new)]
    assert not any(delta.finished for delta in deltas)


class Counted(list):
    """Token ids; counts those that are looked at many at a time."""

    touched = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.touched += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        self.touched += len(self)
        return super().__iter__()


def test_a_delta_costs_what_is_new(engine, slow, monkeypatch):
    """However long the answer is: each token and each character is handled a few times."""
    counted, characters = [], []

    def generation(*given, **named):
        counted.append(Counted())
        return Generation(*given, token_ids=counted[-1], **named)

    take = Detokenizer.take

    def taken(detokenizer):
        characters.append(sum(map(len, detokenizer._parts)))
        return take(detokenizer)

    monkeypatch.setattr("vlcache_jax.preparation.sequences.Generation", generation)
    monkeypatch.setattr(Detokenizer, "take", taken)
    params = SamplingParams(**LETTERS | {"max_tokens": 300}, seed=1, stop=["z" * 9])
    deltas = run(stream_deltas(engine, user("a"), params))
    output = joined(deltas)
    [length] = map(len, tokens(output))
    assert length == len(output.outputs[0].text) == 300
    assert len(deltas) > 10  # who reads late, on busy cores, gets several windows at once
    assert counted[0].touched <= 5 * length
    assert sum(characters) <= length + 8 * len(characters)


def test_an_output_is_made_of_deltas():
    with pytest.raises(ValueError, match="no delta was added"):
        OutputCollector().output()


def test_a_collector_is_of_one_request():
    collector, metrics = OutputCollector(), RequestMetrics()
    collector.add(RequestDelta("a", (), metrics, None, False))
    with pytest.raises(ValueError, match=r"^delta must belong to request 'a', got one of 'b'$"):
        collector.add(RequestDelta("b", (), metrics, None, False))
    with pytest.raises(ValueError, match=r"^delta must be a RequestDelta, got int$"):
        collector.add(3)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 3}, "prompt must be a string, a dict or a conversation, got int"),
        ({"prompt": None}, "prompt must be a string, a dict or a conversation, got NoneType"),
        (
            {"prompt": "a", "mm_processor_kwargs": {"max_pixels": 4096}},
            "mm_processor_kwargs must be a key of the prompt",
        ),
        ({"mm_processor_kwargs": {"max_pixel": 4096}}, "mm_processor_kwargs"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message requires a prompt with messages"),
        ({"chat_template": 3}, "chat_template must be a string, got 3"),
        ({"params": [GREEDY]}, "sampling_params must be SamplingParams or None, got list"),
        ({"params": {}}, "sampling_params must be SamplingParams or None, got dict"),
        (
            {"params": SamplingParams(stop_token_ids=[10**6])},
            "sampling_params stop_token_ids must be below",
        ),
        ({"request_id": ""}, "request_id must be a non-empty string, got ''"),
        ({"request_id": 7}, "request_id must be a non-empty string, got 7"),
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"priority": True}, "priority must be an integer, got True"),
        ({"priority": 1.0}, "priority must be an integer, got 1.0"),
        ({"cache_salt": 1}, "cache_salt must be"),
        ({"reuse": "some"}, "reuse"),
    ],
)
def test_a_bad_argument_is_named(engine, options, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        run(stream(engine, **{"prompt": user("a")} | options))
    assert not isinstance(caught.value, RequestError)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (user("w " * 600), GREEDY, r"must fit in max_model_len = 1024 tokens"),
        (user("a", b"%!PS-Adobe-3.0"), GREEDY, r"images\[0\] must be an image that Pillow can read"),
        ([], GREEDY, "^prompt must have at least one message"),
        ([{"role": "robot", "content": "x"}], GREEDY, r"^prompt messages\[0\] must have the role"),
        ("\ud800", GREEDY, "must be text"),
        (b"bytes", GREEDY, "^prompt must be a list of messages, got bytes"),
        ([user("a"), user("b")], GREEDY, r"^prompt messages\[0\] must be a dict"),
    ],
)
def test_a_wrong_request_is_told(engine, prompt, params, message):
    with pytest.raises(RequestError, match=message) as caught:
        run(stream(engine, prompt, params))
    assert caught.value.errors.keys() == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_waiting": 0}, "max_waiting must be a positive integer, got 0"),
        ({"max_waiting": True}, "max_waiting must be a positive integer, got True"),
        ({"max_waiting": 2.0}, "max_waiting must be a positive integer, got 2.0"),
        ({"when_full": "drop"}, 'when_full must be "wait" or "raise", got \'drop\''),
        ({"max_rows": 0}, "max_rows must be a positive integer, got 0"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        AsyncLLM("no/such/model", **options)


def test_a_request_id_stands_for_one_request_at_a_time(engine, slow):
    async def ask():
        mine = engine.generate(user("a"), LONG, "mine")
        await first(mine)
        with pytest.raises(ValueError, match=r"^request_id must be unique among the requests in flight, got 'mine'"):
            await last(engine, user("b"), request_id="mine")
        await engine.abort("mine")
        [*_, output] = [output async for output in mine]
        assert (output.request_id, output.outputs[0].finish_reason) == ("mine", "abort")
        # It is free again, and the abort is over.
        return await last(engine, user("b"), request_id="mine")

    output = run(ask())
    assert output.request_id == "mine"
    assert output.outputs[0].finish_reason == "length"


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_an_abort_while_it_runs(engine, slow, pictures):
    async def ask():
        outputs = []
        async for output in engine.generate(user("a", pictures[0]), LONG, "x"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort("x")
                await engine.abort("x")
        return outputs

    outputs = run(ask())
    assert_streams(outputs)
    [answer] = outputs[-1].outputs
    assert answer.finish_reason == "abort"
    assert answer.token_ids
    assert len(answer.token_ids) < 100
    assert answer.token_ids == chat(engine, user("a", pictures[0]), LONG).outputs[0].token_ids[: len(answer.token_ids)]


def test_an_abort_while_it_waits_for_a_lane(engine, slow, pictures):
    async def ask():
        others = [engine.generate(user(text), LONG) for text in "ab"]
        for other in others:
            await first(other)
        task = asyncio.create_task(last(engine, user("c", pictures[0]), LONG, "x"))
        await becomes(lambda: engine.stats().waiting == 1)
        await engine.abort("x")
        output = await task
        assert engine.stats().running == 2
        for other in others:
            await other.aclose()
        return output

    [answer] = run(ask()).outputs
    assert (answer.finish_reason, answer.token_ids, answer.text) == ("abort", (), "")
    # Nothing of it has been served.
    again = chat(engine, user("c", pictures[0]))
    assert again.cache.images[0].match == "miss"
    assert not again.cache.request_known


def test_an_abort_before_it_has_arrived(engine, pictures, slow_decoder):
    begun, go_on = slow_decoder

    async def ask():
        task = asyncio.create_task(last(engine, user("a", pictures[0]), LONG, "x"))
        assert await asyncio.to_thread(begun.wait, WITHIN)
        await engine.abort("x")
        go_on.set()
        return await task

    [answer] = run(ask()).outputs
    assert answer.finish_reason == "abort"
    assert len(answer.token_ids) < 300


def test_an_abort_while_it_waits_for_room(engine, slow, monkeypatch):
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(1, raises=False))

    async def ask():
        running = engine.generate(user("a"), LONG)
        await first(running)
        task = asyncio.create_task(last(engine, user("b"), LONG, "x"))
        await asyncio.sleep(0)
        await engine.abort("x")
        await running.aclose()
        return await task

    [answer] = run(ask()).outputs
    assert (answer.finish_reason, answer.token_ids) == ("abort", ())


def test_a_request_takes_its_parameters_when_it_comes(engine, slow, monkeypatch):
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(1, raises=False))
    params = GREEDY.clone()

    async def ask():
        running = engine.generate(user("a"), LONG)
        await first(running)
        waiting = engine.generate("b", params, tools=None, lora_request=None)
        task = asyncio.create_task(anext(waiting))
        await asyncio.sleep(0)
        params.max_tokens = 1
        await running.aclose()
        return [await task, *[output async for output in waiting]][-1]

    assert len(run(ask()).outputs[0].token_ids) == 10
    with pytest.raises(ValueError, match=r"^tools requires a prompt with messages, got a prompt without messages$"):
        run(stream(engine, "b", tools=[{}]))


def test_an_abort_of_nobody_is_none(engine):
    async def ask():
        await engine.abort("nobody")
        output = await last(engine, user("a"), request_id="nobody")
        await engine.abort("nobody")
        return output

    assert run(ask()).outputs[0].finish_reason == "length"


def test_an_abort_of_several_answers_keeps_those_that_have_ended(engine, slow):
    async def ask():
        outputs = []
        params = SamplingParams(**LETTERS | {"max_tokens": 200}, seed=3, n=2)
        async for output in engine.generate(user("a"), params, "x"):
            outputs.append(output)
            if len(outputs) == 4:
                await engine.abort("x")
        return outputs

    outputs = run(ask())
    assert_streams(outputs)
    assert [answer.finish_reason for answer in outputs[-1].outputs] == ["abort"] * 2


def test_others_link_what_an_aborted_request_computes(engine, slow, pictures):
    """They count on its record, so its prompt is computed to the end."""
    shown = user("a", pictures[0])
    [*expected] = [chat(engine, user("a", pictures[0], more)) for more in "xyz"]
    engine.service.reset_mm_cache()

    async def ask():
        busy = [engine.generate(user(text), LONG) for text in "ab"]
        for other in busy:
            await first(other)  # both decode slots are taken, so that all of these wait
        donor = asyncio.create_task(last(engine, user("a", pictures[0], "x"), request_id="donor"))
        await becomes(lambda: engine.stats().waiting == 1)
        others = []
        for count, more in enumerate("yz", 2):
            others.append(asyncio.create_task(last(engine, user("a", pictures[0], more))))
            await becomes(lambda count=count: engine.stats().waiting == count)
        await engine.abort("donor")
        for other in busy:
            await other.aclose()
        return await donor, await asyncio.gather(*others)

    donor, others = run(ask())
    assert donor.outputs[0].finish_reason == "abort"
    for output, one in zip(others, expected[1:], strict=True):
        assert tokens(output) == tokens(one)
        assert output.cache.images[0].match == "exact"
        assert output.cache.images[0].why is None
        assert output.cache.images[0].recomputed == one.cache.images[0].recomputed
    assert chat(engine, shown).cache.images[0].match == "exact"


# --- consumers that go away -------------------------------------------------------------------------------------------


def test_who_breaks_out_of_the_loop_aborts(engine, slow, pictures):
    async def ask():
        async for output in engine.generate(user("a", pictures[0]), LONG):
            assert not output.finished
            break
        await becomes(lambda: engine.stats().running == 0)
        return engine.stats().generated_tokens

    before = engine.stats().generated_tokens
    assert run(ask()) - before < 100


def test_who_returns_with_the_last_output_leaves_nothing(engine):
    async def ask():
        async for output in engine.generate(user("a"), GREEDY, "x"):
            if output.finished:
                break
        await asyncio.sleep(0.05)
        return await last(engine, user("a"), request_id="x")

    assert run(ask()).finished


def test_an_error_of_the_consumer_aborts(engine, slow):
    async def ask():
        async for _ in engine.generate(user("a"), LONG):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(ask())


def test_what_an_event_loop_leaves_running_ends_with_it(engine, slow):
    kept = []

    async def ask():
        kept.extend(engine.generate(user(text), LONG) for text in "ab")
        for one in kept:
            await first(one)

    asyncio.run(ask())


def test_a_cancelled_task_aborts(engine, slow, pictures):
    async def ask():
        tasks = [asyncio.create_task(last(engine, user(text, pictures[0]), LONG)) for text in "abcd"]
        await becomes(lambda: engine.stats().running == 2 and engine.stats().waiting == 2)
        for task in tasks[1:]:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[1]
        await becomes(lambda: engine.stats().running == 1 and engine.stats().waiting == 0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(one, asyncio.CancelledError) for one in run(ask()))


@pytest.mark.parametrize("loop_ends", [False, True])
def test_a_task_cancelled_while_its_image_is_identified(engine, pictures, slow_decoder, loop_ends):
    """It arrives all the same, though nobody waits for it, and maybe its event loop is gone."""
    begun, go_on = slow_decoder
    before = engine.stats().generated_tokens

    async def ask():
        task = asyncio.create_task(last(engine, user("a", pictures[0]), LONG))
        assert await asyncio.to_thread(begun.wait, WITHIN)
        if loop_ends:
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not engine._requests._admissions
        go_on.set()
        await becomes(lambda: not any(thread._work_queue.qsize() for thread in [engine._requests.threads]))

    arriving = threading.Event()
    arrive = engine.service.caller.arrive

    def noted(*given):
        try:
            return arrive(*given)
        finally:
            arriving.set()

    with pytest.MonkeyPatch.context() as context:
        context.setattr(engine.service.caller, "arrive", noted)
        run(ask())
        go_on.set()
        assert arriving.wait(WITHIN)
    assert_clean(engine)
    assert engine.stats().generated_tokens - before < 300


def test_an_error_after_the_caller_has_left_is_not_logged(engine, monkeypatch):
    begun, go_on, logged = threading.Event(), threading.Event(), []

    def failing(*_):
        begun.set()
        assert go_on.wait(WITHIN)
        raise RequestError({0: "prompt is wrong"})

    async def ask():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        task = asyncio.create_task(last(engine, user("a")))
        assert await asyncio.to_thread(begun.wait, WITHIN)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        go_on.set()
        await asyncio.to_thread(engine._requests.threads.submit(lambda: None).result)
        await asyncio.sleep(0)
        gc.collect()

    monkeypatch.setattr(engine._requests, "threads", ThreadPoolExecutor(1))
    monkeypatch.setattr(engine.service.caller, "arrive", failing)
    run(ask())
    engine._requests.threads.shutdown()
    gc.collect()
    assert not logged


def test_a_task_cancelled_before_a_thread_takes_it(engine, pictures, slow_decoder, monkeypatch):
    begun, go_on = slow_decoder
    monkeypatch.setattr(engine._requests, "threads", ThreadPoolExecutor(1))

    async def ask():
        slow = asyncio.create_task(last(engine, user("a", pictures[0])))
        assert await asyncio.to_thread(begun.wait, WITHIN)
        task = asyncio.create_task(last(engine, user("b")))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        return await slow

    before = engine.stats().generated_tokens
    assert run(ask()).finished
    engine._requests.threads.shutdown()
    assert engine.stats().generated_tokens - before == GREEDY.max_tokens


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_event_loop_that_is_closed_does_not_end_the_engine(engine, slow, caplog):
    events = asyncio.new_event_loop()
    gone = engine.generate(user("a"), LONG)
    events.run_until_complete(first(gone))
    events.close()  # nobody has told the engine
    assert eventually(lambda: engine.stats().running == 0)
    assert "requests aborted because their event loop was closed: 1" in caplog.text
    assert tokens(run(last(engine, user("b")))) == tokens(chat(engine, user("b")))
    run(gone.aclose())  # nobody but its owner can


# --- the queue --------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_flight(engine, monkeypatch):
    """The most requests that have been in flight together."""
    most = [0]
    arrive = engine.service.caller.arrive
    end = engine.service.caller.end
    lock, jobs = threading.Lock(), set()

    def arrived(*given):
        job = arrive(*given)
        with lock:
            jobs.add(job)
            most[0] = max(most[0], len(jobs))
        return job

    def ended(job):
        with lock:
            jobs.discard(job)
        end(job)

    monkeypatch.setattr(engine.service.caller, "arrive", arrived)
    monkeypatch.setattr(engine.service.caller, "end", ended)
    return most


def test_a_full_queue_lets_wait_in_order(engine, in_flight, monkeypatch):
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(3, raises=False))
    expected = {text: tokens(chat(engine, user(text))) for text in "abcdefghij"}
    ended = []

    async def ask(text):
        output = await last(engine, user(text))
        ended.append(text)
        return tokens(output)

    assert run(*map(ask, expected)) == [*expected.values()]
    assert in_flight == [3]
    # Three run at most; who came three places earlier has ended before.
    assert all(ended.index(a) - i < 4 for i, a in enumerate(expected))


def test_who_breaks_gives_way_only_when_its_request_has_ended(engine, in_flight, slow, monkeypatch):
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(2, raises=False))

    async def ask(text):
        async for _ in engine.generate(user(text), LONG):
            break

    run(*map(ask, "abcdefgh"))
    assert in_flight == [2]


def test_who_waits_for_room_may_leave(engine, slow, monkeypatch):
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(1, raises=False))

    async def ask():
        running = engine.generate(user("a"), LONG)
        await first(running)
        tasks = [asyncio.create_task(last(engine, user(text))) for text in "bcd"]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        await running.aclose()
        tasks[0].cancel()  # in the moment in which it is let in
        return await asyncio.gather(*tasks, return_exceptions=True)

    left, cancelled, served = run(ask())
    assert isinstance(left, asyncio.CancelledError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert served.finished


def test_who_waits_for_room_can_be_aborted(engine, slow, monkeypatch):
    room = _AdmissionQueue(1, raises=False)
    monkeypatch.setattr(engine._requests, "_room", room)

    async def ask():
        running = engine.generate(user("a"), LONG)
        await first(running)
        tasks = [asyncio.create_task(last(engine, user(text), request_id=text)) for text in "bc"]
        await asyncio.sleep(0.01)
        await engine.abort("b")
        aborted = await tasks[0]  # while the first one goes on
        assert len(room._waiting) == 1
        await running.aclose()
        return aborted, await tasks[1]

    aborted, served = run(ask())
    assert (aborted.finished, aborted.outputs[0].finish_reason) == (True, "abort")
    assert served.outputs[0].finish_reason == "length"


def test_a_full_queue_raises_if_it_is_to(engine, slow, monkeypatch):
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(2, raises=True))
    expected = tokens(chat(engine, user("d")))

    async def ask():
        running = [engine.generate(user(text), LONG) for text in "ab"]
        for one in running:
            await first(one)
        for _ in range(3):
            with pytest.raises(QueueFullError, match="max_waiting = 2 requests"):
                await last(engine, user("c"), request_id="c")
        for one in running:
            await one.aclose()
        return await last(engine, user("d"), request_id="c")

    assert tokens(run(ask())) == expected


def test_options_of_the_queue(open_engine):
    engine = open_engine(max_waiting=1, when_full="raise")

    async def ask(text):
        return await last(engine, user(text))

    async def together():
        return await asyncio.gather(ask("a"), ask("b"), return_exceptions=True)

    found = run(together())
    assert found[0].finished
    assert isinstance(found[1], QueueFullError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_room_that_nobody_takes_any_more_goes_to_the_next(engine, slow, monkeypatch):
    """One who waits for it has lost its event loop."""
    room = _AdmissionQueue(1, raises=False)
    monkeypatch.setattr(engine._requests, "_room", room)
    events = asyncio.new_event_loop()

    async def ask():
        running = engine.generate(user("a"), LONG)
        await first(running)
        lost = events.create_task(room.enter(_Admission("lost", events, end=lambda job: None)))
        await asyncio.to_thread(lambda: (events.call_later(0.02, events.stop), events.run_forever(), events.close()))
        task = asyncio.create_task(last(engine, user("b")))
        await asyncio.sleep(0.01)
        assert len(room._waiting) == 2
        await running.aclose()
        lost._log_destroy_pending = False
        return await task

    assert run(ask()).finished


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("when", ["running", "arriving"])
def test_an_event_loop_that_is_closed_keeps_no_places(engine, slow, slow_decoder, pictures, monkeypatch, caplog, when):
    """Its requests cannot give them back: two run, or are identified, and one waits for room."""
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(2, raises=False))
    begun, go_on = slow_decoder
    if when == "running":
        go_on.set()
    events = asyncio.new_event_loop()
    shown = [user(picture, "a") for picture in pictures[:2]] if when == "arriving" else [user("a"), user("b")]

    async def ask(name, conversation):
        async for _ in engine.generate(conversation, LONG, request_id=name):
            begun.set()

    lost = [events.create_task(ask(*one)) for one in zip("xyz", (*shown, user("c")), strict=True)]
    events.call_soon(lambda: stop_when(events, begun))
    events.run_forever()
    events.close()
    go_on.set()
    assert run(last(engine, user("d"))).finished
    assert [run(last(engine, user("e"), request_id=name)).finished for name in "xyz"] == [True] * 3
    assert_clean(engine)
    assert "requests aborted because their event loop was closed" in caplog.text
    assert "the output callback of a request failed" not in caplog.text
    for task in lost:
        task._log_destroy_pending = False


def stop_when(events, begun):
    if begun.is_set():
        events.stop()
    else:
        events.call_later(0.001, stop_when, events, begun)


def test_lower_numbers_come_first(engine, slow):
    order = []

    async def ask():
        busy = [engine.generate(user(text), LONG) for text in "ab"]
        for other in busy:
            await first(other)

        async def one(priority):
            output = await last(engine, user(f"p{priority}"), priority=priority)
            order.append(priority)
            return output

        tasks = []
        for count, priority in enumerate([5, 0, 3, -2, 1], 1):
            tasks.append(asyncio.create_task(one(priority)))
            await becomes(lambda count=count: engine.stats().waiting == count)
        for other in busy:
            await other.aclose()
        return await asyncio.gather(*tasks)

    by_wave = sorted(run(ask()), key=lambda output: output.metrics.wave)
    assert [output.metrics.wave for output in by_wave] == sorted(output.metrics.wave for output in by_wave)
    # Two decode slots: the last of a pair may be the first to end.
    assert [set(order[:2]), set(order[2:4]), order[4]] == [{-2, 0}, {1, 3}, 5]


# --- errors and closing -----------------------------------------------------------------------------------------------


def test_an_error_of_the_engine_ends_what_runs_and_only_that(engine, slow, pictures, monkeypatch):
    prompts = [user("a", pictures[0]), user("b"), user("c"), user("d", pictures[1])]
    expected = [tokens(chat(engine, prompt, MEDIUM)) for prompt in prompts]
    engine.service.reset_mm_cache()

    async def ask():
        running = [engine.generate(prompt, MEDIUM) for prompt in prompts[:2]]
        for one in running:
            await first(one)
        waiting = [asyncio.create_task(last(engine, prompt, MEDIUM)) for prompt in prompts[2:]]
        await becomes(lambda: engine.stats().waiting == 2)
        work, failed = engine.service.device.runner.run, []

        def broken(key, *given):
            if not failed:
                failed.append(key)
                raise OSError("the device is gone")
            return work(key, *given)

        with monkeypatch.context() as context:
            context.setattr(engine.service.device.runner, "run", broken)
            for one in running:
                with pytest.raises(RuntimeError, match=r"^the device is gone$") as caught:
                    async for _ in one:
                        pass
                assert isinstance(caught.value.__cause__, OSError)
            return [tokens(output) for output in await asyncio.gather(*waiting)]

    assert run(ask()) == expected[2:]
    assert [tokens(run(last(engine, prompt, MEDIUM))) for prompt in prompts] == expected


def test_closing_ends_everything(open_engine, pictures, slow_decoder):
    engine = open_engine(max_waiting=5)
    begun, go_on = slow_decoder
    window = engine.service.device.runner.window
    engine.service.device.runner.window = lambda *given: (time.sleep(0.01), window(*given))[1]

    async def ask():
        running = [asyncio.create_task(last(engine, user(text), LONG)) for text in "ab"]
        await becomes(lambda: engine.stats().running == 2)
        waiting = asyncio.create_task(last(engine, user("c"), LONG))
        await becomes(lambda: engine.stats().waiting == 1)
        decoding = asyncio.create_task(last(engine, user("d", pictures[0]), LONG))
        assert await asyncio.to_thread(begun.wait, WITHIN)
        no_room = [asyncio.create_task(last(engine, user(text), LONG)) for text in "efghij"]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.05)
        go_on.set()
        await closing
        await engine.close()
        return await asyncio.gather(*running, waiting, decoding, *no_room, return_exceptions=True)

    found = run(ask())
    assert [(type(one), str(one)) for one in found] == [(RuntimeError, "this LLM is closed")] * len(found)
    with pytest.raises(RuntimeError, match=CLOSED):
        run(stream(engine, user("a")))
    with pytest.raises(RuntimeError, match=CLOSED):
        engine.stats()
    assert not engine._requests._admissions
    assert not engine._requests._room._used


async def last_of(outputs):
    return [output async for output in outputs][-1]


def test_closing_twice_at_once(open_engine):
    engine = open_engine()

    async def ask():
        async with engine:
            outputs = engine.generate(user("a"), LONG)
            await anext(outputs)
            await asyncio.gather(*(engine.close() for _ in range(4)))
        with pytest.raises(RuntimeError, match=CLOSED):
            await last_of(outputs)

    run(ask())


@pytest.mark.parametrize("serves", ["stream", "chat"])
def test_closing_between_arrival_and_begin(open_engine, serves):
    """What has been submitted, and has not begun, is ended too."""
    engine = open_engine(closes=False)  # which would hang where this fails
    begin, closed = engine.service.loop.begin, []

    def close_first():
        if not closed:
            closed.append(True)
            closing = threading.Thread(target=engine.service.close)
            closing.start()
            closing.join(WITHIN)
        begin()

    engine.service.loop.begin = close_first
    found = []

    def ask():
        try:
            found.append(run(last(engine, user("a"))) if serves == "stream" else chat(engine, user("a")))
        except BaseException as error:
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(5)
    assert [str(one) for one in found] == ["this LLM is closed"]


# --- threads ----------------------------------------------------------------------------------------------------------


def test_several_event_loops(engine, pictures):
    prompts = [user(f"{i}", *pictures[i % 3 : i % 3 + i % 2]) for i in range(8)]
    expected = [tokens(chat(engine, prompt)) for prompt in prompts]
    engine.service.reset_mm_cache()
    with ThreadPoolExecutor(2) as threads:
        halves = threads.map(lambda own: run(*(last(engine, prompt) for prompt in own)), (prompts[::2], prompts[1::2]))
        found = [[tokens(output) for output in half] for half in halves]
    assert found == [expected[::2], expected[1::2]]


def test_a_full_queue_over_several_event_loops(engine, in_flight, monkeypatch):
    monkeypatch.setattr(engine._requests, "_room", _AdmissionQueue(2, raises=False))
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda name: run(*(last(engine, user(f"{name}{i}")) for i in range(4))), "abc")
        assert all(output.finished for outputs in found for output in outputs)
    assert in_flight == [2]


def test_an_id_is_aborted_from_another_event_loop(engine, slow):
    def abort():
        assert eventually(lambda: engine.stats().running == 1)
        run(engine.abort("x"))

    with ThreadPoolExecutor(1) as threads:
        aborting = threads.submit(abort)
        output = run(last(engine, user("a"), LONG, "x"))
        aborting.result()
    assert output.outputs[0].finish_reason == "abort"


def test_calls_from_many_threads_are_as_one_by_one(engine, pictures):
    calls = [[user(f"{i}"), user(f"{i}", pictures[i % 4])] for i in range(16)]
    chatting = LLM(engine.service).chat
    expected = [list(map(tokens, chatting(call, GREEDY, use_tqdm=False))) for call in calls]
    engine.service.reset_mm_cache()
    with ThreadPoolExecutor(16) as threads:
        found = [
            list(map(tokens, outputs))
            for outputs in threads.map(lambda call: chatting(call, GREEDY, use_tqdm=False), calls)
        ]
    assert found == expected


def test_answered_requests_are_not_kept(engine, textured_image, monkeypatch):
    """What is compiled ahead is found from them; a server has more of them than memory."""
    ahead = engine.service.ahead
    monkeypatch.setattr(ahead, "_stopped", False)
    monkeypatch.setattr(ahead._programs, "program", lambda key: None)  # which programs does not matter
    for seed in range(12):
        run(last(engine, user("a", textured_image(64, 64, 100 + seed))))
    ahead.wait()
    kept = sum(len(sequences) for _, sequences in ahead._answered)
    ahead._answered.clear()
    assert kept <= 2 * SIZES["buckets"].max_sequences


def test_an_output_that_says_it_is_finished_holds_everything(engine, slow, monkeypatch):
    """Also if the answer ends while an output of it is being made."""
    take = Generation.take

    def slowly(answer, index, first):
        made = take(answer, index, first)
        assert eventually(lambda: answer.end.is_finished)
        return made

    expected = chat(engine, user("a"), MEDIUM)
    with monkeypatch.context() as context:
        context.setattr(Generation, "take", slowly)
        output = run(last(engine, user("a"), MEDIUM))
    assert output.finished
    assert tokens(output) == tokens(expected)


@pytest.mark.parametrize("seed", some_seeds(buckets=range(3), thorough=range(30)))
def test_random_arrivals_and_ends(engine, slow, pictures, seed):
    """Whoever is not aborted gets what it gets alone; whoever is gets its beginning."""
    rng = random.Random(seed)
    asked = [
        (
            user(f"{seed}-{i}", *rng.sample(pictures, rng.choice([0, 1, 1, 2]))),
            SamplingParams(**LETTERS | {"max_tokens": rng.randint(1, 60)}, seed=i, n=rng.choice([1, 1, 2])),
            rng.choice(["stay", "stay", "stay", "abort", "cancel", "break"]),
            rng.random() * 0.2,
            rng.randint(-1, 1),
        )
        for i in range(14)
    ]
    expected = [chat(engine, prompt, params) for prompt, params, *_ in asked]
    engine.service.reset_mm_cache()

    async def one(i, prompt, params, end, delay, priority):
        await asyncio.sleep(delay)

        async def read():
            outputs = []
            async for output in engine.generate(prompt, params, f"{i}", priority=priority):
                outputs.append(output)
                if end == "break" and len(outputs) == 2:
                    break
            return outputs

        task = asyncio.create_task(read())
        if end in ("abort", "cancel"):
            await asyncio.sleep(delay)
            await (engine.abort(f"{i}") if end == "abort" else asyncio.sleep(0, task.cancel()))
        return await task

    async def everyone():
        return await asyncio.gather(*(one(i, *given) for i, given in enumerate(asked)), return_exceptions=True)

    for found, whole, (_, _, end, *_) in zip(run(everyone()), expected, asked, strict=True):
        if isinstance(found, asyncio.CancelledError):
            assert end == "cancel"
            continue
        for mine, its in zip(tokens(found[-1]), tokens(whole), strict=True):
            assert mine == its if end == "stay" else mine == its[: len(mine)]


def test_health(open_engine, monkeypatch):
    engine = open_engine()
    asyncio.run(engine.check_health())
    with monkeypatch.context() as context:
        # One that begins or ends is not there yet, or no more, while it is still asked for.
        thread = threading.Thread(target=int)
        context.setattr(engine.service.loop, "_thread", thread)
        asyncio.run(engine.check_health())
        thread.start()
        thread.join()
        asyncio.run(engine.check_health())
    asyncio.run(engine.close())
    with pytest.raises(RuntimeError, match=CLOSED):
        asyncio.run(engine.check_health())


def test_an_engine_that_cannot_even_fail_is_dead():
    def fail(error):
        raise error

    loop = Loop(types.SimpleNamespace(is_idle=False, has_requests=True, step=lambda: 1 / 0, fail=fail))
    with pytest.raises(ZeroDivisionError):  # as in its thread
        loop._run()
    with pytest.raises(RuntimeError, match="the engine's thread has died"):
        loop.check_alive()


class Endless:
    """An engine that has something to do until `ended` is set, or for `most` passes."""

    has_requests = True
    most = 5000

    def __init__(self):
        self.passes, self.ended = 0, threading.Event()
        self.scheduler = types.SimpleNamespace(add=lambda sequence: None)

    @property
    def is_idle(self):
        return self.ended.is_set() or self.passes == self.most

    def step(self):
        self.passes += 1
        self.ended.wait(0.001)


def test_an_abort_does_not_wait_for_other_requests():
    engine, aborted = Endless(), []
    loop = Loop(engine)
    loop.submit([types.SimpleNamespace(report=types.SimpleNamespace())])
    loop.begin()
    loop.abort([types.SimpleNamespace(abort=lambda: aborted.append(engine.passes))])
    passes = engine.passes
    engine.ended.set()
    assert aborted[0] < passes < engine.most
    loop.wait()


def test_an_abort_waits_for_a_pass_that_begins_behind_it(monkeypatch):
    """The one that runs may have looked at what is aborted before it was, so that it ends without an effect."""
    loop, ends = Loop(None), []
    loop._thread, loop._passes = threading.current_thread(), 7
    monkeypatch.setattr(loop._changed, "wait_for", ends.append)
    loop.abort([])
    [has_ended] = ends
    found = {}
    for loop._passes in range(7, 11):
        found[loop._passes] = has_ended()
    assert found == {7: False, 8: False, 9: True, 10: True}
    loop._thread, loop._passes = None, 7
    assert has_ended()


def test_tokens_are_those_of_the_prompt(engine, pictures):
    conversation = user(pictures[0], "What?", pictures[1])

    async def both():
        async for output in engine.generate(conversation, SamplingParams(max_tokens=1)):
            last = output
        return last.prompt_token_ids, await engine.tokenize(conversation), await engine.tokenize("Hello")

    whole, token_ids, text = asyncio.run(both())
    assert whole.tolist() == token_ids.tolist()
    assert text.tolist() == asyncio.run(engine.get_tokenizer())("Hello")["input_ids"]
    with pytest.raises(ValueError, match="must be"):
        asyncio.run(engine.tokenize(5))
