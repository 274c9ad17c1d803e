"""Programs that several threads want, and those that a repeat will want."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.helper import BUCKETS, SIZES
from vlcache_jax import LLM, BucketSizes, SamplingParams
from vlcache_jax.device.programs import table
from vlcache_jax.device.programs.memory import EmptyDecodeState, Link

LINK = Link(16, 1, 1)  # of the images here
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(checkpoints):
    """One answer has the programs of eight: requests that were answered apart may come again together."""
    with LLM(checkpoints("qwen3_vl"), use_tqdm=False, **SIZES) as engine:
        engine.service.ahead._stopped = False
        yield engine


@pytest.fixture
def llm(engine):
    """As if nothing had been compiled or seen."""
    engine.service.ahead.wait()
    engine.reset_mm_cache()
    engine.service.device.runner.programs._compiled.clear()
    yield engine
    engine.service.ahead.wait()


@pytest.fixture
def ask(textured_image):
    """(llm, number of images, sampling, reuse) -> outputs of two requests, one of them without images."""
    images = [textured_image(90, 130, seed) for seed in range(3)]

    def ask(llm, count, params=PARAMS, **options):
        content = [part for image in images[:count] for part in (text("See:"), {"type": "image", "image": image})]
        conversations = [
            [{"role": "user", "content": [*content, text("What?")]}],
            [{"role": "user", "content": "Hello"}],
        ]
        return llm.chat(conversations, params, use_tqdm=False, **options)

    return ask


def text(words):
    return {"type": "text", "text": words}


def slow(programs, monkeypatch):
    """Compilations wait for an event; returns it, one that says that the first has begun, and the keys of all."""
    go, begun, keys, lower = threading.Event(), threading.Event(), [], programs._lower

    def wait(key):
        keys.append(key)
        begun.set()
        assert go.wait(60)
        return lower(key)

    monkeypatch.setattr(programs, "_lower", wait)
    return go, begun, keys


@pytest.mark.parametrize(
    ("count", "params", "reuse"),
    [
        (1, PARAMS, "exact"),
        (3, SamplingParams(temperature=1, max_tokens=2, n=3, ignore_eos=True), "shift-0.2"),
        (1, PARAMS, "cacheblend-0.2"),
    ],
)
def test_a_repeat_compiles_nothing(llm, ask, count, params, reuse):
    programs = llm.service.device.runner.programs
    ask(llm, count, params, reuse=reuse)
    llm.service.ahead.wait()
    compiled = programs.num_programs
    again = ask(llm, count, params, reuse=reuse)
    assert {image.match for image in again[0].cache.images} == {"exact"}
    assert programs.num_programs == compiled
    assert programs.missing([LINK, Link(64, 1, 1)]) == [Link(64, 1, 1)]  # no image is so large


def test_where_nothing_is_kept_nothing_is_compiled(llm, ask):
    ask(llm, 1, reuse="off")
    ask(llm, 0)
    assert llm.service.ahead._thread is None
    assert llm.service.device.runner.programs.missing([LINK])


def test_a_program_that_two_threads_want_is_compiled_once(llm, monkeypatch):
    programs = llm.service.device.runner.programs
    go, _, keys = slow(programs, monkeypatch)
    threads = [threading.Thread(target=programs.run, args=[EmptyDecodeState()]) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert keys == [EmptyDecodeState()]


def test_an_interrupted_compilation_is_begun_anew(llm, monkeypatch):
    programs = llm.service.device.runner.programs
    with monkeypatch.context() as context:
        context.setattr(programs, "_lower", lambda key: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            programs.run(EmptyDecodeState())
    decode_slots = programs.run(EmptyDecodeState())
    assert all(len(array) == BUCKETS.max_sequences for array in decode_slots)
    assert decode_slots.is_ended.dtype == bool


@pytest.mark.slow
def test_no_program_is_compiled_where_maps_run_out(llm, ask, monkeypatch, tmp_path):
    """XLA would crash there; who asks is told, and served again when there is room."""
    few = tmp_path / "max_map_count"
    few.write_text("1000\n")
    with monkeypatch.context() as context:
        context.setattr(table, "_MAX_MAPS", few)
        with pytest.raises(MemoryError, match=r"too many memory maps: .*of 1000.*vm\.max_map_count"):
            ask(llm, 0)
    assert all(output.outputs[0].token_ids for output in ask(llm, 0))


def test_errors_are_left_to_who_needs_the_program(llm, ask, monkeypatch, caplog):
    programs = llm.service.device.runner.programs
    lower = programs._lower

    def failing(key):
        if threading.current_thread().name == "vlcache-ahead":  # the engine has a thread of its own, too
            raise RuntimeError("no memory")
        return lower(key)

    monkeypatch.setattr(programs, "_lower", failing)
    with caplog.at_level(logging.DEBUG, "vlcache_jax.engine.compile_ahead"):
        ask(llm, 1)
        llm.service.ahead.wait()
    assert f"compiling {LINK} ahead failed" in caplog.text
    assert programs.missing([LINK])
    assert ask(llm, 1)[0].cache.images[0].match == "exact"


@pytest.mark.parametrize("end", ["close", pytest.param("warmup", marks=pytest.mark.slow)])
def test_it_ends_after_the_program_under_way(checkpoints, ask, monkeypatch, end):
    buckets = BucketSizes(rows=(64,), patches=(64,), sequences=(1,))
    llm = LLM(checkpoints("qwen3_vl"), buckets=buckets, max_model_len=128, kv_cache_bytes=2**20, use_tqdm=False)
    llm.service.ahead._stopped = False
    programs = llm.service.device.runner.programs
    with monkeypatch.context() as context:
        go, begun, keys = slow(programs, context)
        llm.service.ahead._missing = [EmptyDecodeState(), LINK]
        llm.service.ahead.start()
        assert begun.wait(60)
        ending = threading.Thread(target=llm.close if end == "close" else llm.service.ahead.stop)
        ending.start()
        ending.join(0.2)
        assert ending.is_alive()
        go.set()
        ending.join(60)
    assert keys == [EmptyDecodeState()]
    if end == "warmup":
        llm.warmup(reuse="off", verbose=False)
        ask(llm, 1)
        assert llm.service.ahead._thread is None
        assert programs.missing([LINK]) == [LINK]
        llm.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "vlcache-ahead"]
