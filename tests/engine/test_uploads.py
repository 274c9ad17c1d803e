"""Records that come layer by layer: what is there is linked and computed with, what does not come is computed."""

import asyncio
import collections
import itertools
import threading
import time
import types

import numpy as np
import pytest

from tests.cache.records import load
from tests.helper import SIZES, WITHIN, assert_nothing_left, user
from vlcache_jax import LLM, AsyncLLM, CacheConfig, SamplingParams
from vlcache_jax.cache.record import Found, Tier, TierError
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.device.programs.base import LinkGroup
from vlcache_jax.device.programs.layers import BLOCK
from vlcache_jax.engine.uploads import Upload, _Batch, _Piece
from vlcache_jax.testing import make_checkpoint

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(checkpoints):
    with LLM(checkpoints("qwen3_vl"), enable_prefix_caching=False, use_tqdm=False, **SIZES) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    engine.reset_mm_cache()
    return engine


@pytest.fixture
def picture(textured_image):
    return textured_image(60, 90, 1)


class SlowTier(Tier):
    """Gives a record's parts one after the other, each when it is let go."""

    def __init__(self, record):
        self.record_meta, self.data = record.meta, record.data.copy()
        self.gates = [threading.Event() for _ in record.meta.parts]
        self.broken = len(self.gates)  # the first part that does not come

    def find(self, entry):
        return [Found(self.record_meta, 0.0)]

    def read(self, meta, parts, place):
        for i, part in enumerate(parts):
            assert self.gates[i].wait(WITHIN)
            if i >= self.broken:
                raise TierError("the cable is out")
            yield part, (self.data[i],)

    def delete(self, name):
        pass


def loading(llm, conversation):
    """Has the K, V of a conversation's image leave memory, and come again slowly; the tier, and the load's thread."""
    llm.chat(conversation, PARAMS, use_tqdm=False)
    llm.cache.flush()
    [record] = [record for record in llm.service.cache.store.tier.records() if record.meta.context is not None]
    tier = SlowTier(record)
    llm.service.cache.store.remove(record, None)
    thread = threading.Thread(target=load, args=(llm.service.cache.store, tier, record.meta.name))
    thread.start()
    while llm.service.cache.store.tier.get(record.meta.name) is None:
        time.sleep(0.001)
    return tier, thread


def asking(llm, *conversations, **options):
    """A call in a thread of its own, and the list that gets its outputs."""
    outputs = []
    thread = threading.Thread(
        target=lambda: outputs.extend(llm.chat(list(conversations), PARAMS, use_tqdm=False, **options))
    )
    thread.start()
    return outputs, thread


def spy(llm, monkeypatch):
    """Launches in their order: ("link", its first layer), ("layer", its number) and others by name."""
    launched, changed = [], threading.Condition()
    kept = llm.service.engine._prefiller.copies
    run, link, numbers = llm.service.device.runner.run, kept.link, llm.service.device.runner.text["layers"]

    def noted(entry):
        with changed:
            launched.append(entry)
            changed.notify_all()

    def noted_run(program, *args):
        made = run(program, *args)
        if program.name == "layer":
            noted(("layer", next(i for i in numbers if numbers[i] is args[0])))
        elif program.name != "link":
            noted((program.name,))
        return made

    def noted_link(group, *args):
        made = link(group, *args)
        noted(("link", group.layers.start))
        return made

    monkeypatch.setattr(llm.service.device.runner, "run", noted_run)
    monkeypatch.setattr(kept, "link", noted_link)

    def wait_for(entry):
        with changed:
            assert changed.wait_for(lambda: entry in launched, WITHIN), launched

    return launched, wait_for


@pytest.mark.parametrize("reuse", ["exact", "0.3", "shift-0.3"])
def test_computing_begins_before_a_slow_load_ends(llm, picture, monkeypatch, reuse):
    conversation = user("See ", picture, " what?")
    [cold] = llm.chat(conversation, PARAMS, use_tqdm=False, reuse="off")
    tier, load = loading(llm, conversation)
    launched, wait_for = spy(llm, monkeypatch)
    outputs, call = asking(llm, conversation, reuse=reuse)
    layers = len(tier.gates)
    for layer in range(layers):
        # A layer is linked when it has arrived, and computed while those behind it have not.
        assert ("link", layer) not in launched
        tier.gates[layer].set()
        wait_for(("link", layer))
        wait_for(("layer", layer))
    load.join(WITHIN)
    call.join(WITHIN)
    [output] = outputs
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    assert (output.cache.images[0].match, output.cache.images[0].kv) == ("exact", "host")
    assert [entry for entry in launched if entry[0] in ("link", "layer")][: 2 * layers] == [
        (name, layer) for layer in range(layers) for name in ("link", "layer")
    ]
    assert_nothing_left(llm)


def test_others_go_on_meanwhile(llm, picture):
    conversation = user("See ", picture, " what?")
    tier, load = loading(llm, conversation)
    running = llm.chat(user("Count."), PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    outputs, call = asking(llm, conversation)
    assert llm.chat(user("Count."), PARAMS, use_tqdm=False)[0].outputs[0].token_ids == running
    assert not outputs
    for gate in tier.gates:
        gate.set()
    load.join(WITHIN)
    call.join(WITHIN)
    assert outputs[0].cache.images[0].match == "exact"


@pytest.mark.parametrize("reuse", ["exact", "0.3", "shift-0.3"])
def test_records_that_another_thread_brings(llm, picture, textured_image, monkeypatch, reuse):
    """As on a device with memory of its own."""
    conversations = [user("See ", picture, " and ", textured_image(90, 60, 2), f" {i}?") for i in range(4)]
    llm.chat(user("Other ", picture, textured_image(90, 60, 2)), PARAMS, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in llm.chat(conversations, PARAMS, use_tqdm=False, reuse=reuse)]
    monkeypatch.setitem(llm.service.device.runner.__dict__, "is_host", False)
    monkeypatch.setattr(llm.service.device.runner, "transfer_bytes", 20_000)
    for _ in range(5):
        outputs = llm.chat(conversations, PARAMS, use_tqdm=False, reuse=reuse)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert_nothing_left(llm)


def test_what_comes_while_nobody_looks_is_found(llm, picture, monkeypatch):
    """A record is there, or a picture, between the look at what a prompt lacks and the wait for it."""
    readiness, looked = llm.service.engine._readiness, itertools.count()
    look = readiness.look
    monkeypatch.setattr(readiness, "look", lambda *given: look(*given) if next(looked) > 0 else None)
    [output] = llm.chat(user("See ", picture, " what?"), PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert next(looked) >= 2


@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_what_does_not_come_after_all_is_computed(llm, picture, textured_image, arrived):
    conversation, other = user("See ", picture, " what?"), user("See ", textured_image(90, 60, 2), " what?")
    outputs = llm.chat([conversation, other], PARAMS, use_tqdm=False, reuse="off")
    cold = [output.outputs[0].token_ids for output in outputs]
    tier, load = loading(llm, conversation)
    tier.broken = arrived
    outputs, call = asking(llm, conversation, other)
    for gate in tier.gates:
        gate.set()
        time.sleep(0.05)
    load.join(WITHIN)
    call.join(WITHIN)
    assert [output.outputs[0].token_ids for output in outputs] == cold
    [image] = outputs[0].cache.images
    assert (image.match, image.why.value, image.kv) == ("miss", "load_failed", "none")
    assert image.recomputed == (image.tokens,) * len(tier.gates)
    assert outputs[0].cache.exact
    llm.cache.flush()
    assert llm.cache.stats().failed
    [again] = llm.chat(conversation, PARAMS, use_tqdm=False)
    assert again.outputs[0].token_ids == cold[0]
    assert_nothing_left(llm)


def test_a_damaged_part_never_reaches_an_answer(llm, picture):
    conversation = user("See ", picture, " what?")
    [cold] = llm.chat(conversation, PARAMS, use_tqdm=False, reuse="off")
    tier, load = loading(llm, conversation)
    tier.data[-1].view(np.uint8).reshape(-1)[3] ^= 1
    outputs, call = asking(llm, conversation)
    for gate in tier.gates:
        gate.set()
    load.join(WITHIN)
    call.join(WITHIN)
    assert outputs[0].outputs[0].token_ids == cold.outputs[0].token_ids
    assert outputs[0].cache.images[0].match == "miss"
    assert outputs[0].cache.images[0].why.value in ("corrupt", "load_failed")
    assert_nothing_left(llm)


# --- few launches -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of nine layers, so that some of them are one program."""
    directory = tmp_path_factory.mktemp("deep")
    make_checkpoint(directory, "qwen3_vl", text={"num_hidden_layers": 9})
    with LLM(directory, enable_prefix_caching=False, use_tqdm=False, **SIZES) as llm:
        yield llm


def counted(llm, monkeypatch, *conversation, reuse):
    """The logits of an answer, and how many programs of each name were launched for it."""
    names, run = collections.Counter(), llm.service.device.runner.run
    with monkeypatch.context() as context:
        context.setattr(
            llm.service.device.runner,
            "run",
            lambda one, *args: (names.update([one.name]), run(one, *args))[1],
        )
        [score] = llm.score([user(*conversation)], ["ab"], reuse=reuse, keep_logits=True, use_tqdm=False)
    return score.logits, names


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["exact", pytest.param("0.5", marks=pytest.mark.thorough), "shift-0.5"])
def test_images_are_linked_together_and_layers_launched_together(deep, textured_image, monkeypatch, reuse):
    pictures = [textured_image(60, 60, seed) for seed in range(5)]
    deep.reset_mm_cache()
    deep.chat(user("See ", *pictures), SamplingParams(max_tokens=1), use_tqdm=False)
    deep.cache.flush()
    before = "See " if reuse == "exact" else "Look at "
    logits, names = counted(deep, monkeypatch, before, *pictures, " what?", reuse=reuse)
    groups = len(deep.service.device.runner.shapes.link_groups)
    assert names["link"] == groups * 2  # four images, and one
    assert names["stage"] == (reuse != "exact")  # the rows of all images
    vision = deep.service.checkpoint.config.vision
    assert names["layers"] == (9 - 1 - vision.num_deepstack) // BLOCK
    assert names["layers"] * BLOCK + names["layer"] == 9
    monkeypatch.setattr("vlcache_jax.engine.prefilling.BLOCK_ROWS", 0)
    apart, names = counted(deep, monkeypatch, before, *pictures, " what?", reuse=reuse)
    assert (names["layers"], names["layer"]) == (0, 9)
    np.testing.assert_allclose(logits, apart, atol=1e-4, rtol=0)


def test_what_a_slow_image_keeps_waiting_is_encoded_meanwhile(llm, picture, textured_image, monkeypatch):
    """Nothing of a stored image has come: the other one of the request is encoded, and all begins when it is there."""
    other = textured_image(90, 60, 2)
    [cold] = llm.chat(user("See ", picture, " and ", other, " what?"), PARAMS, use_tqdm=False, reuse="off")
    llm.reset_mm_cache()
    tier, thread = loading(llm, user("See ", picture, " what?"))
    launched, wait_for = spy(llm, monkeypatch)
    outputs, asked = asking(llm, user("See ", picture, " and ", other, " what?"))
    wait_for(("encode",))
    assert not {"link", "layer", "layers"} & {name for name, *_ in launched}
    for gate in tier.gates:
        gate.set()
    asked.join()
    thread.join()
    assert [name for name, *_ in launched].count("encode") == 1
    [output] = outputs
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    assert [image.match for image in output.cache.images] == ["exact", "miss"]
    assert [image.encoder for image in output.cache.images] == ["none", "computed"]
    assert output.metrics.encode > 0
    assert_nothing_left(llm)


def test_a_slow_image_that_does_not_come_is_computed_beside_one_encoded(llm, picture, textured_image, monkeypatch):
    other = textured_image(90, 60, 2)
    question = user("See ", picture, " and ", other, " what?")
    [cold] = llm.chat(question, PARAMS, use_tqdm=False, reuse="off")
    llm.reset_mm_cache()
    tier, thread = loading(llm, user("See ", picture, " what?"))
    tier.broken = 0
    _, wait_for = spy(llm, monkeypatch)
    outputs, asked = asking(llm, question)
    wait_for(("encode",))
    tier.gates[0].set()
    asked.join()
    thread.join()
    [output] = outputs
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    assert_nothing_left(llm)


def test_what_one_encoded_ahead_others_get_though_it_was_aborted(llm, picture, textured_image, monkeypatch):
    """Nobody waits for encoder rows that no prefill group would ever copy."""
    other = textured_image(90, 60, 2)
    tier, thread = loading(llm, user("See ", picture, " what?"))
    launched, wait_for = spy(llm, monkeypatch)
    engine = AsyncLLM(llm.service)

    async def ask():
        first = asyncio.ensure_future(anext(engine.generate(user("See ", picture, " and ", other, " what?"), PARAMS)))
        await asyncio.to_thread(wait_for, ("encode",))
        first.cancel()
        async with asyncio.timeout(WITHIN):
            async for output in engine.generate(user("Only ", other, " what?"), PARAMS):
                last = output
        return last

    output = asyncio.run(ask())
    assert len(output.outputs[0].token_ids) == 4
    assert [name for name, *_ in launched].count("encode") == 1
    for gate in tier.gates:
        gate.set()
    thread.join()


def test_first_layers_of_all_come_before_the_last_ones_of_any(checkpoints, textured_image, tmp_path, monkeypatch):
    """Twenty hits on the disk, read by four threads: computing begins with the layers that are there."""
    pictures = [textured_image(32, 32 + 32 * (i % 2), i) for i in range(20)]
    question = user(*pictures, "which?")
    with LLM(checkpoints("qwen3_vl"), cache=CacheConfig(disk=tmp_path), use_tqdm=False, **SIZES) as llm:
        [cold] = llm.chat(question, PARAMS, use_tqdm=False)
        llm.cache.flush()
    with LLM(checkpoints("qwen3_vl"), cache=CacheConfig(disk=tmp_path), use_tqdm=False, **SIZES) as llm:
        read, gate, came = DiskTier.read, threading.Event(), collections.Counter()
        queued, [channel] = threading.Event(), llm.service.cache.store.channels
        first = llm.service.device.runner.shapes.link_groups[0].count

        def held(self, meta, parts, place):
            parts = tuple(parts)
            assert queued.wait(WITHIN)
            for part, buffers in read(self, meta, parts, place):
                number = meta.parts.index(part)
                if meta.context is not None and number >= first:
                    assert gate.wait(WITHIN)  # later layers of all, until the first ones have been computed
                came[number] += meta.context is not None
                yield part, buffers

        monkeypatch.setattr(DiskTier, "read", held)
        _, wait_for = spy(llm, monkeypatch)
        outputs, asked = asking(llm, question)
        while channel._queued < 16:  # of the others the threads have taken the first ones
            time.sleep(0.001)
        queued.set()
        wait_for(("layer", 0))
        assert came[0] == 20
        assert came[first] == 0
        gate.set()
        asked.join()
        [output] = outputs
        assert output.outputs[0].token_ids == cold.outputs[0].token_ids
        assert [image.kv for image in output.cache.images] == ["disk"] * 20


class Linked:
    """Result of a link, which a test marks as done."""

    def __init__(self, number):
        self.number, self.done = number, False

    def is_ready(self):
        return self.done


def test_what_is_being_linked_takes_room_until_it_is_linked():
    """A link reads what was transferred, so that only as much is on its way as there is room beside that."""
    links, buffer = [], np.zeros((1, 20), np.float32)

    def link(group, images, places, where):
        links.append(Linked(len(links)))
        return links[-1]

    shapes = types.SimpleNamespace(link_groups=[], split_links=None)
    config = types.SimpleNamespace(text=types.SimpleNamespace(num_layers=9))
    runner = types.SimpleNamespace(reads_in_place=False, transfer_bytes=2 * buffer.nbytes, shapes=shapes, config=config)
    copies = types.SimpleNamespace(runner=runner, tier=types.SimpleNamespace(num_pages=0), link=link)
    upload = Upload(copies, types.SimpleNamespace(start=lambda records, parts, wanted: [[buffer]]), [])
    record = types.SimpleNamespace(kv=[buffer], states=None, meta=types.SimpleNamespace(kv_buffers=1))
    batch = _Batch((record,), lambda: "places", None)
    group = LinkGroup(slice(0, 1), (0,), slice(0, 1))
    upload._waiting.extend(_Piece(batch, group) for _ in range(6))

    def launched():
        before = len(links)
        _, done = upload.advance()
        assert done == links[before:]
        return [one.number for one in done]

    assert [launched(), launched()] == [[0, 1], []]
    links[0].done = True
    assert [launched(), launched()] == [[2], []]
    links[1].done = links[2].done = True
    assert [launched(), launched()] == [[3, 4], []]
    links[3].done = links[4].done = True
    assert (launched(), upload.layers) == ([5], 9)
