"""Requests during a warm-up: none waits for a program while others that are compiled give the same tokens."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import types

import numpy as np
import pytest

from tests.helper import ALONE, SIZES, WITHIN, planned, user
from vlcache_jax import LLM, AsyncLLM, SamplingParams
from vlcache_jax.cache.record import Meta, Record
from vlcache_jax.device.programs.memory import HoldDecodeSlots
from vlcache_jax.engine.engine import Engine
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.prefilling import Prefiller, usable_buckets
from vlcache_jax.engine.readiness import PATIENCE
from vlcache_jax.engine.request import Generation, ImageUse
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.reuse.policies import full_prefill

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
CHOICE = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"choice": ["a rather long answer"]})


@pytest.fixture(scope="module")
def engine(checkpoints):
    """Answers have a window of one row, and of eight."""
    with LLM(checkpoints("qwen3_vl"), use_tqdm=False, reuse="off", **SIZES | {"buckets": ALONE}) as llm:
        yield AsyncLLM(llm.service)


@pytest.fixture
def prompts(textured_image):
    """By name: a conversation and how it is answered."""
    return {
        "stream": (user("Hello"), LONG),
        "other": (user("What?"), SHORT),
        "long": (user("word " * 40), SHORT),
        "picture": (user("See:", textured_image(64, 64, 1)), SHORT),
        "held": (user("Hello"), CHOICE),
    }


async def answer(engine, asked, begun=None):
    """Token ids of an answer; `begun` is set at its third token."""
    conversation, params = asked
    async for output in engine.generate(conversation, params):
        if begun is not None and len(output.outputs[0].token_ids) > 2:
            begun.set()
    return output.outputs[0].token_ids


class Held:
    """Programs of some names, which are gone, and whose compilation waits until they are released.

    Attributes:
      begun: those whose compilation has begun.
      fails: the warm-up is to fail.
    """

    def __init__(self, engine, names, monkeypatch):
        self.programs, self.names, self.begun = engine.service.device.runner.programs, names, []
        self.fails = False
        self._go, found = threading.Event(), self.programs._found
        for program in [one for one in self.programs._compiled if self._is_held(one)]:
            del self.programs._compiled[program]

        def wait(program, shows):
            if self._is_held(program):
                self.begun.append(program)
                assert self._go.wait(WITHIN)
            return found(program, shows)

        monkeypatch.setattr(self.programs, "_found", wait)

    def _is_held(self, program):
        return str(program).startswith(self.names)

    @contextlib.asynccontextmanager
    async def warming(self, engine):
        """A warm-up that waits for a program, until the end or `release`; yields its task."""
        warming = asyncio.create_task(engine.warmup(verbose=False))
        try:
            while not self.begun:
                await asyncio.sleep(0.01)
            yield warming
            assert self._go.is_set() or not warming.done()
        finally:
            self.release()
            [error] = await asyncio.gather(warming, return_exceptions=True)
            if not self.fails and isinstance(error, Exception):
                raise error

    def release(self):
        self._go.set()


class Busy(concurrent.futures.Executor):
    """Begins nothing of what it is given."""

    def submit(self, *_):
        return concurrent.futures.Future()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WITHIN))


async def together(engine, prompts, name):
    """The answers of a stream, and of another request that comes when it has begun."""
    begun = asyncio.Event()
    stream = asyncio.create_task(answer(engine, prompts["stream"], begun))
    await begun.wait()
    return stream, asyncio.create_task(answer(engine, prompts[name]))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("other", ("window(8)",)),  # each has a window of its own
        ("held", ("window(8)", "hold(1)")),
        ("other", ("window(1)",)),  # one has a window of eight rows
        ("long", ("embed(512)", "layer(512")),  # its steps are smaller
        ("long", ("embed(16)", "embed(64)", "layer(16", "layer(64")),  # or larger
        ("picture", ("encode(64)", "stage(16)")),  # it is padded to more patches
        ("other", ("head(8, 1)", "sample(1)")),
    ],
)
def test_while_a_program_is_compiled_others_serve(engine, prompts, name, names, monkeypatch):
    async def ask():
        stream, other = await together(engine, prompts, name)
        return await stream, await other

    run(engine.warmup(verbose=False))
    expected = run(ask())
    # A program for answers that begin together also serves one.
    engine.service.device.runner.programs.program(HoldDecodeSlots(8))
    held = Held(engine, names, monkeypatch)

    async def ask_meanwhile():
        async with held.warming(engine):
            return await ask()

    assert run(ask_meanwhile()) == expected
    assert len(held.begun) == len(set(held.begun))  # each is compiled once


def test_a_stream_goes_on_while_the_programs_of_another_request_are_compiled(engine, prompts, monkeypatch):
    run(engine.warmup(verbose=False))
    expected = {name: run(answer(engine, prompts[name])) for name in ("stream", "other", "picture")}
    held = Held(engine, "encode(", monkeypatch)

    async def ask():
        async with held.warming(engine):
            stream, picture = await together(engine, prompts, "picture")
            assert await stream == expected["stream"]
            assert await answer(engine, prompts["other"]) == expected["other"]  # it overtakes the picture's
            assert not picture.done()
            held.release()
            assert await picture == expected["picture"]

    run(ask())


def linking(layers):
    """A prefill whose prompt begins with an image of 16 tokens, which it links."""
    grid = (1, 8, 8)
    record = Record(Meta("image", "", "context", True, grid, 16, "float32", (layers, 2, 16, 1, 8)))
    layout = make_layout(np.arange(40, dtype=np.int32), [0], [ImageRef("image", grid, 16, None)], 2, ["exact"])
    answer = Generation(
        planned(layout, full_prefill(layout, layers)), 4, params=SHORT.resolve({}), seed=0, end_tokens=frozenset(),
        bad_words=(), detokenizer=None,
    )  # fmt: skip
    scheduler = Scheduler(Pages(2), 1, 512, layers)
    scheduler.add(answer)
    answer.progress.images = [ImageUse(layout.images[0], linked=record)]
    scheduler.admit()
    return scheduler.next_group([answer])


@pytest.mark.parametrize("name", ["link", "open_decode_slot", "embed", "head", "sample"])
def test_a_prefill_waits_for_each_program_that_it_needs(engine, monkeypatch, name):
    runner, coming = engine.service.device.runner, set()

    def missing(programs):
        return [program for program in programs if program.name in coming]

    monkeypatch.setattr(runner.programs, "missing", missing)
    monkeypatch.setattr(runner.programs, "_warming", 1)
    monkeypatch.setattr(runner.programs, "_hastened", {})
    monkeypatch.setattr(runner.programs, "_hastening", Busy())
    prefills = linking(runner.shapes.kv.layers)
    assert usable_buckets(runner, prefills, runner.buckets.patches, ()) is runner.buckets
    coming.add(name)
    assert usable_buckets(runner, prefills, runner.buckets.patches, ()) is None


def test_prefills_whose_programs_are_there_overtake_the_others():
    """Each of several prefills forms a group of its own if the programs of their common group are being compiled."""
    asked, there = [], {"b"}

    def usable(group):
        asked.append(group)
        return "sizes" if there.issuperset(group) else None

    prefiller, scheduler = types.SimpleNamespace(_usable_buckets=usable), types.SimpleNamespace(next_group=list)
    assert Prefiller.next_group(prefiller, scheduler, ["a", "b"]) == (["b"], "sizes")
    assert asked == [["a", "b"], ["a"], ["b"]]
    asked.clear()
    assert Prefiller.next_group(prefiller, scheduler, ["a"]) is None
    assert asked == [["a"]]


def test_a_request_whose_program_cannot_be_compiled_during_a_warm_up_has_its_error(engine, prompts, monkeypatch):
    run(engine.warmup(verbose=False))
    expected = run(answer(engine, prompts["other"]))
    held = Held(engine, "window", monkeypatch)
    held.fails = True
    programs, found = held.programs, held.programs._found

    def fail(program, shows):
        if str(program).startswith("encode("):
            raise MemoryError("no maps are left")
        return found(program, shows)

    monkeypatch.setattr(programs, "_found", fail)
    for program in [one for one in programs._compiled if str(one).startswith("encode(")]:
        del programs._compiled[program]

    async def ask():
        async with held.warming(engine) as warming:
            with pytest.raises(RuntimeError, match="no maps are left"):
                await answer(engine, prompts["picture"])
            held.release()
            with pytest.raises(MemoryError, match="no maps are left"):
                await warming
        assert await answer(engine, prompts["other"]) == expected

    run(ask())


def test_a_warm_up_compiles_first_what_requests_wait_for(engine, monkeypatch):
    programs = engine.service.device.runner.programs
    first, *others, last = programs.family_of(engine.service.policy)
    monkeypatch.setattr(programs, "_compiled", {})
    monkeypatch.setattr(programs, "_hastening", Busy())
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    order = []

    def find(program, shows):
        order.append(program)
        if program == first:
            assert programs.are_coming([last])
        return program

    monkeypatch.setattr(programs, "_found", find)
    programs.compile([first, *others, last])
    assert order == [first, last, *others]


def test_what_is_compiled_is_logged_where_nothing_is_shown(engine, caplog):
    programs = engine.service.device.runner.programs
    compiled = programs.num_compiled
    programs._compiled.clear()
    with caplog.at_level(logging.INFO, "vlcache_jax"):
        count, _ = run(engine.warmup(verbose=False))
    told = [record.getMessage() for record in caplog.records]
    assert count == programs.num_compiled - compiled > 20
    for word in ("compiling window(8)", "compiled window(8) in ", f"compiled {count} and loaded 0 programs in "):
        assert any(line.startswith(word) for line in told)


def test_a_warm_up_shows_how_far_it_is(engine, capsys):
    programs = engine.service.device.runner.programs
    programs._compiled.clear()
    shown = []
    count, _ = programs.compile(programs.family_of(engine.service.policy), lambda *far: shown.append(far))
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)
    assert (shown[-1][0], programs.in_flight) == (count, [])
    programs._compiled.clear()
    run(engine.warmup())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compiling"
    assert any(line.startswith(f"compiled {count} programs in ") for line in lines)


def test_a_pass_that_only_passes_over_waits_for_programs():
    """It would look again and again otherwise, beside what compiles."""
    engine, waited = object.__new__(Engine), []
    programs = types.SimpleNamespace(first_launched=None, wait_for_some=waited.append)
    engine.runner, engine._group, engine._is_held_up = types.SimpleNamespace(programs=programs), None, False
    engine.scheduler = types.SimpleNamespace(prefilling=["a prompt"])
    engine._is_ready = lambda sequence: True
    engine._prefiller = types.SimpleNamespace(next_group=lambda scheduler, ready: None)
    assert engine._prefill() is False
    engine._wait()
    assert waited == [PATIENCE]
