"""Answers that go on with a part of their prompts. The reference sees the whole cache through a mask."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.budget_answers import POLICIES
from tests.compress.example import kept_of
from tests.helper import (
    ALONE,
    FEW,
    SIZES,
    assert_nothing_left,
    compilations,
    each_family,
    give_compressed_pages,
    give_pages,
    one_device,
    spoil_compressed,
    user,
)
from tests.test_step_loop import Driver, RunRequest
from vlcache_jax import LLM, AsyncLLM, CacheConfig, SamplingParams
from vlcache_jax.cache.record import Why
from vlcache_jax.compress.budgets import sparsity
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.compress.policies import PostVision, VLCache, make_counts
from vlcache_jax.compress.scores import KeyStatistics, seeds
from vlcache_jax.device.programs.base import MOVED_PAGES
from vlcache_jax.device.programs.compress import Compact, Observe, ReadPages, WritePages
from vlcache_jax.device.programs.window import CompressedWindow
from vlcache_jax.engine.compressed_pages import Compression
from vlcache_jax.engine.scheduler import order
from vlcache_jax.models import Rows
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.study.probe import Probe

SETTINGS = SIZES | {"buckets": ALONE, "compressed_kv_bytes": 2**22, "use_tqdm": False}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOLD = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def ask(llm, *conversations, params=GREEDY, **options):
    return llm.chat(list(conversations), params, use_tqdm=False, **options)


def tokens(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def opened(family_checkpoint):
    with LLM(family_checkpoint, **SETTINGS) as llm:
        llm.service.ahead.stop()
        yield llm


@pytest.fixture
def llm(opened, monkeypatch):
    """An empty engine. Pages of compressed prompts come in any order, and free ones hold what nobody may see."""
    opened.reset_mm_cache()
    runner, pages = opened.service.device.runner, opened.service.engine.scheduler.compressed
    runner.compressed.arrays = [
        [jnp.full_like(half, value) for half, value in zip(runner.compressed.make()[0], (jnp.nan, 1e4), strict=True)]
    ]
    np.random.default_rng(3).shuffle(pages._free)
    spoil_compressed(opened, monkeypatch)
    yield opened
    assert_nothing_left(opened)
    assert opened.stats().compressed_in_use == opened.stats().swapped_bytes == 0
    give_compressed_pages(opened)


@pytest.fixture(scope="module")
def conversations(textured_image):
    first, second = textured_image(150, 210, 1), textured_image(190, 120, 2)
    film = {"type": "video", "video": [textured_image(75, 103, i) for i in range(7)], "video_metadata": {"fps": 2.0}}
    return [
        user(first, "What is at C2, and what is beside it? " * 3),
        user("On page 3: ", first, second, "Which picture has more stars? " * 6),
        user("Nothing is shown here. " * 9),
        [{"role": "user", "content": [film, {"type": "text", "text": "What happens, and when does it end?"}]}],
    ]


class Reference:
    """All rows of a prompt and its answer at once, in dense attention: what a row sees is a mask for each KV head."""

    def __init__(self, llm):
        self.probe = Probe(llm)
        self.runner = self.probe.runner
        self._layer = jax.jit(self._through)

    def _through(self, params, i, x, deepstack, position, seen):  # [K, N, N]
        config = self.runner.config.text
        layer, rows = self.runner.shapes.bind_layer(params), Rows(None, position, None, None, None)
        y = layer.input_layernorm(x)
        q, k, _, v = layer.self_attn.project(y, rows, keep=len(x))
        q = q.reshape(len(x), config.num_kv_heads, -1, q.shape[-1])
        score = jnp.einsum("nkgd,skd->kgns", q, k, precision="highest") * config.head_dim**-0.5
        weight = jax.nn.softmax(jnp.where(seen[:, None], score, -jnp.inf), -1)
        out = jnp.einsum("kgns,skd->nkgd", weight, v, precision="highest")
        out = layer.self_attn.back(y, out.reshape(len(x), -1, config.head_dim))
        x = layer.transform(x, out, jnp.ones(len(x), bool))
        return (x + jnp.where(i < len(deepstack), deepstack[i], 0) if len(deepstack) else x), weight

    def run(self, placed, masks):
        n, x, weights = len(placed.layout), placed.x, []
        position = np.zeros((3, len(x)), np.int32)
        position[:, :n] = placed.layout.positions
        for i, seen in enumerate(masks):
            x, weight = self._layer(self.runner.text["layers"][i], i, x, placed.deepstack, position, seen)
            weights.append(np.asarray(weight, np.float64))
        return np.stack(weights), self.probe.logits(np.asarray(x)[placed.prompt_length - 1 : n - 1])

    def answer(self, conversation, answer, compressor):
        """What is kept, sparsity, and log-probabilities of an answer's tokens [c, V]."""
        text = self.runner.config.text
        placed = self.probe.place(conversation, answer)
        N, n, layout = len(placed.x), placed.prompt_length, self.probe.place(conversation).layout
        causal = np.tri(N, dtype=bool)
        masks = np.broadcast_to(causal, (text.num_layers, text.num_kv_heads, N, N)).copy()
        weights, _ = self.run(placed, masks)
        observed = compressor.observed(layout)
        weights = weights[..., n - observed : n, :]  # [L, K, G, rows, N]
        received, gamma = weights.sum(3).mean(2), None
        if compressor.p is not None:
            small = (weights < compressor.p * weights.max(-1, keepdims=True)) & causal[n - observed : n]
            gamma = sparsity(small.sum((3, 4)).reshape(text.num_layers, -1), n, observed)
        counts = make_counts(compressor, n, gamma, text.num_layers)
        for layer, count in enumerate(counts):
            window = np.int32(compressor.window(count))
            seen = KeyStatistics(
                received[layer].astype(np.float32), np.int32(n), window, seeds(layout, len(counts))[layer]
            )
            kept = np.asarray(kept_of(compressor.scores, seen, np.int32(count), max_count=N))
            for head, mask in enumerate(masks[layer]):
                mask[n:, :n] = False
                mask[n:, kept[head, :count]] = True
        _, logits = self.run(placed, masks)
        return counts, gamma, np.asarray(jax.nn.log_softmax(logits)), np.abs(logits).max()


def check(reference, conversation, output, compressor):
    [answer] = output.outputs
    counts, gamma, logprobs, largest = reference.answer(conversation, answer.token_ids, compressor)
    compression = output.compression
    assert (compression.policy, compression.prompt_tokens) == (compressor.name, len(output.prompt_token_ids))
    assert compression.kept == counts
    assert gamma is None or np.allclose(compression.sparsity, gamma, atol=1e-9)
    assert not output.cache.exact
    of_token = reference.runner.shapes.kv.slot_bytes // len(counts)
    assert compression.bytes == of_token * sum(counts)
    assert compression.bytes_full == of_token * len(counts) * compression.prompt_tokens
    assert compression.seconds == output.metrics.compress > 0
    for row, told in zip(logprobs, answer.logprobs, strict=True):
        assert row.argmax() == told.token
        for token, logprob in told.top.items():
            assert abs(row[token] - logprob) < 3e-6 * largest  # float64 is 8e-7 from either at most


@pytest.mark.slow
@one_device
@each_family
@pytest.mark.thorough_for("qwen2_vl-flat-tied", "qwen2_5_vl-flat-tied")
def test_decoding_equals_a_masked_whole_cache(llm, conversations):
    """Some together, each layer with as much as it needs."""
    reference, compressor = Reference(llm), parse_compressor("vl-cache-0.5")
    outputs = ask(llm, *conversations, params=TOLD, compress="vl-cache-0.5")
    for conversation, output in zip(conversations, outputs, strict=True):
        check(reference, conversation, output, compressor)
    kept = [count for output in outputs for count in output.compression.kept]
    assert len(set(kept)) > 3
    assert min(kept) < PAGE < max(kept)
    # The pool is updated in place.
    runner = llm.service.device.runner
    plan = runner.programs.program(CompressedWindow(8, runner.shapes.page_buckets[0])).memory_analysis()
    pool, decode_slots = jax.tree.leaves(runner.compressed.arrays), runner.shapes.decode_slots
    pool_bytes = sum(x.nbytes for x in pool) // runner.devices.count
    assert plan.alias_size_in_bytes == pool_bytes + sum(x.size * x.dtype.itemsize for x in decode_slots)


ONE = pytest.mark.parametrize("family_checkpoint", ["qwen3_vl"], indirect=True, scope="session")


@one_device
@ONE
@pytest.mark.parametrize(
    "compress",
    [
        "snapkv-0.2",
        *(
            pytest.param(compress, marks=pytest.mark.slow)
            for compress in (
                "postvision-0.2", "pyramidkv-0.2", "streaming-0.2", "random-0.2", "h2o-0.2", "zipcache-0.2",
                VLCache(0.2, refill=True, granularity="layer"),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_each_policy_keeps_what_it_says(llm, conversations, compress):
    """Also behind images that were known, whose rows the last ones of some policies are."""
    reference, compressor = Reference(llm), parse_compressor(compress)
    for _ in range(2):
        for conversation, output in zip(
            conversations, ask(llm, *conversations, params=TOLD, compress=compress), strict=True
        ):
            check(reference, conversation, output, compressor)
        llm.reset_prefix_cache()


@pytest.mark.slow
@one_device
@ONE
def test_nothing_compiles_after_warmup(family_checkpoint, conversations):
    """Every policy that a word stands for; scores of one's own are compiled where they are first asked for."""
    with LLM(family_checkpoint, **SIZES | {"buckets": FEW}, compressed_kv_bytes=2**22, use_tqdm=False) as llm:
        programs = llm.service.device.runner.programs
        count, _ = llm.warmup(verbose=False)
        assert count == programs.num_programs
        with compilations() as compiled:
            for name in POLICIES:
                outputs = ask(llm, *conversations, compress=f"{name}-0.2")
                assert all(output.compression.policy == f"{name}-0.2" for output in outputs)
        assert not compiled
        assert programs.num_programs == count
        ask(llm, conversations[0], compress=VLCache(0.2, granularity="layer"))
        assert programs.num_programs == count + 1


@pytest.mark.slow
@ONE
def test_nothing_dropped_changes_nothing(llm, conversations, monkeypatch):
    before = llm.stats().compressed
    whole = ask(llm, *conversations, reuse="off")
    assert all(output.compression is None and output.metrics.compress == 0 for output in whole)
    same = ask(llm, *conversations, compress="vl-cache-1")
    assert tokens(same) == tokens(whole)
    for output in same:
        assert output.cache.exact
        assert output.compression.is_whole
        assert output.compression.bytes == output.compression.bytes_full
        assert output.compression.sparsity is None  # nothing had to be observed
    assert llm.stats().compressed == before
    # And what is compacted whole is the same, too.
    monkeypatch.setattr(Compression, "is_whole", False)
    moved = ask(llm, *conversations, compress="vl-cache-1", params=GREEDY)
    assert tokens(moved) == tokens(whole)
    assert llm.stats().compressed == before + len(conversations)


@ONE
def test_memory_returns(llm, conversations, monkeypatch):
    """The prompt's pages become residents, so that it is found again, and compressed alike."""
    scheduler, pages, seen = llm.service.engine.scheduler, llm.service.cache.pages, []
    compacted = scheduler.compacted

    def noted(sequence):
        before = pages.stats()
        compacted(sequence)
        seen.append((before, pages.stats()))

    monkeypatch.setattr(scheduler, "compacted", noted)
    params = dataclasses.replace(GREEDY, max_tokens=40)
    [first], [again] = (ask(llm, conversations[0], params=params, compress="vl-cache-0.1") for _ in range(2))
    length = len(first.prompt_token_ids)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, length - 1)
    assert tokens([again]) == tokens([first])
    assert again.compression.kept == first.compression.kept
    for before, after in seen:
        assert (before.in_use, after.in_use) == (-(-length // PAGE), 0)
        assert after.resident == -(-length // PAGE)
    assert llm.stats().resident == -(-length // PAGE)  # of the answers nothing


@ONE
def test_compressed_and_whole_requests_run_together(llm, conversations):
    """And mean what each means alone: with several answers, stop strings, draws and grammars."""
    stop = ask(llm, conversations[0], compress="vl-cache-0.3")[0].outputs[0].text[3:6]
    asked = [
        (conversations[0], GREEDY, "vl-cache-0.3"),
        (conversations[1], GREEDY, None),
        (conversations[1], SamplingParams(temperature=1, seed=3, max_tokens=12, n=3), "snapkv-0.2"),
        (conversations[2], dataclasses.replace(GREEDY, max_tokens=30), "vl-cache-0.2"),
        (conversations[0], dataclasses.replace(GREEDY, stop=[stop]), "vl-cache-0.3"),
        (
            conversations[1],
            SamplingParams(temperature=0, structured_outputs={"choice": ["left", "right"]}),
            "snapkv-0.2",
        ),
        (conversations[2], dataclasses.replace(GREEDY, max_tokens=1), "vl-cache-0.2"),
    ]
    alone = [ask(llm, conversation, params=params, compress=compress) for conversation, params, compress in asked]
    assert alone[-1][0].compression is None  # nothing comes behind its only token
    engine = AsyncLLM(llm.service)

    async def one(conversation, params, compress):
        async for output in engine.generate(conversation, params, compress=compress):
            last = output
        return last

    async def every():
        return await asyncio.gather(*(one(*each) for each in asked))

    together = asyncio.run(every())
    assert [tokens([output]) for output in together] == [tokens(outputs) for outputs in alone]
    kept = lambda output: output.compression and output.compression.kept  # noqa: E731
    assert [kept(output) for output in together] == [kept(outputs[0]) for outputs in alone]
    # Also as rows of one call, each with its own; what is wrong with one is that row's error.
    rows, params, compress = zip(*asked, (conversations[2], GREEDY, "most"), strict=True)
    iterated = dict(llm.chat_iter(rows, iter(params), False, compress=iter(compress), on_error="return"))
    wrong = iterated.pop(len(asked))
    assert wrong.error.startswith(f"conversations[{len(asked)}] compress must be one of vl-cache-A, ")
    assert tokens(iterated[i] for i in range(len(asked))) == [tokens(outputs)[0] for outputs in alone]
    with pytest.raises(ValueError, match="compress must have a value for each conversation, got fewer"):
        list(llm.chat_iter(rows, GREEDY, False, compress=compress[:2]))


@ONE
def test_aborts_and_errors_leave_nothing(llm, conversations, monkeypatch):
    engine = AsyncLLM(llm.service)
    params = dataclasses.replace(GREEDY, max_tokens=200)

    async def leave(after):
        async for output in engine.generate(conversations[0], params, compress="vl-cache-0.3"):
            if len(output.outputs[0].token_ids) >= after:
                return

    for after in (1, 2, 20):
        asyncio.run(leave(after))
        assert_nothing_left(llm)
        assert llm.stats().compressed_in_use == 0
    [whole] = ask(llm, conversations[1], compress="vl-cache-0.3")
    runner = llm.service.device.runner
    run = runner.run

    def fail_at(kind):
        return lambda program, *arguments: 1 / 0 if isinstance(program, kind) else run(program, *arguments)

    for kind in (Observe, Compact, CompressedWindow):
        with monkeypatch.context() as context:
            context.setattr(runner, "run", fail_at(kind))
            with pytest.raises(ZeroDivisionError):
                ask(llm, *conversations, compress="vl-cache-0.3")
        assert_nothing_left(llm)
        assert tokens(ask(llm, conversations[1], compress="vl-cache-0.3")) == tokens([whole])


@ONE
def test_without_room_it_waits_and_what_never_fits_is_an_error(llm, conversations):
    pages = llm.service.engine.scheduler.compressed
    alone = [ask(llm, one, compress="vl-cache-0.3") for one in conversations]
    needed = [pages.needed(output.compression.kept, GREEDY.max_tokens - 1) for [output] in alone]
    give_compressed_pages(llm, max(needed))  # for any one of them
    assert tokens(ask(llm, *conversations, compress="vl-cache-0.3")) == [tokens(outputs)[0] for outputs in alone]
    # What others need of the prompts' own pages, they wait for, too.
    prompts = [-(-len(output.prompt_token_ids) // PAGE) for [output] in alone]
    have = llm.service.cache.pages.count
    try:
        give_pages(llm, max(prompts) + 1)
        assert tokens(ask(llm, *conversations, compress="vl-cache-0.3")) == [tokens(one)[0] for one in alone]
    finally:
        give_pages(llm, have)
    wrong = dataclasses.replace(GREEDY, max_tokens=800)
    for compress in ("vl-cache-0.3", "snapkv-0.3"):  # what is kept is known with the observation, and before it
        message = (
            rf"conversations\[0\]: max_tokens must be .* compressed_kv_bytes, got 800: {compress} needs \d+ pages, "
            rf"but the pool has {pages.count}; reduce"
        )
        with pytest.raises(ValueError, match=message):
            ask(llm, conversations[0], params=[wrong], compress=compress)


@ONE
def test_who_waits_for_pages_has_them_by_priority_then_by_arrival(llm, conversations, monkeypatch):
    """Whichever prompts were through the layers first."""
    [alone] = ask(llm, conversations[2], compress="vl-cache-0.3")
    scheduler, begun = llm.service.engine.scheduler, []
    give_compressed_pages(llm, scheduler.compressed.needed(alone.compression.kept, GREEDY.max_tokens - 1))
    compacted = scheduler.compacted
    monkeypatch.setattr(scheduler, "compacted", lambda sequence: begun.append(sequence) or compacted(sequence))
    driver, priorities = Driver(llm), (2, 1, 0, 1, 0)
    jobs = [
        driver.arrive(RunRequest(conversations[2], GREEDY, "exact", one, compress="vl-cache-0.3")) for one in priorities
    ]
    while driver.step():
        scheduler.decoding.sort(key=order, reverse=True)
    assert [tokens([driver.output(job)]) for job in jobs] == [tokens([alone])] * 5
    assert begun == [jobs[number].sequences[0] for number in (2, 4, 1, 3, 0)]


@ONE
def test_each_layer_has_a_seed_of_its_own(llm, conversations, monkeypatch):
    """By which `random` draws; every policy's program gets it."""
    runner, given = llm.service.device.runner, []
    run = runner.run

    def noted(program, *arguments):
        if isinstance(program, Compact):
            given.append((int(arguments[3][0]), int(arguments[4])))
        return run(program, *arguments)

    driver = Driver(llm)
    monkeypatch.setattr(runner, "run", noted)
    job = driver.arrive(RunRequest(conversations[2], GREEDY, "exact", compress="vl-cache-0.3"))
    [sequence] = job.sequences
    driver.finish()
    driver.output(job)
    layers = runner.config.text.num_layers
    assert given == list(enumerate(seeds(sequence.layout, layers).tolist()))
    assert len({seed for _, seed in given}) == layers > 1


@ONE
def test_a_compressor_of_ones_own_fails_its_own_requests(llm, conversations):
    class Own(PostVision):
        def counts(self, length, gamma, layers):
            return {1: super().counts, 2: lambda *_: 1 / 0, 3: lambda *_: [length + 1]}[self.way](length, gamma, layers)

    class NotSeen(Own):
        def observed(self, layout):
            raise KeyError("rows")

    class NoWindow(Own):
        def window(self, count):
            return count + 1

    def one(kind, way=1):
        return type("One", (kind,), {"way": way})(0.3)

    wrong = [one(Own, 2), one(Own, 3), one(NotSeen), one(NoWindow)]
    rows, params = [conversations[0]] * 6, dataclasses.replace(GREEDY, max_tokens=40)
    got = dict(llm.chat_iter(rows, params, False, compress=[None, *wrong, one(Own)], on_error="return"))
    assert [tokens([got[0]]), tokens([got[5]])] == [
        tokens(ask(llm, conversations[0], params=params, compress=compress)) for compress in (None, "postvision-0.3")
    ]
    said = "counts of .* raised Zero", "counts of .* must be", "observed of .* raised KeyError", "window of .* must be"
    for row, message in enumerate(said, 1):
        assert re.match(rf"conversations\[{row}\]: {message}", got[row].error)


LONG = SamplingParams(temperature=1, seed=4, max_tokens=290, ignore_eos=True, logprobs=0)


def same_logprobs(got, expected):
    for mine, its in zip(got.outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(
            [one.chosen for one in mine.logprobs], [one.chosen for one in its.logprobs], atol=3e-5
        )


def give_some(llm, outputs):
    """Pages of compressed prompts for all tokens of one of these answers and the first ones of two more."""
    pages = llm.service.engine.scheduler.compressed
    layers = llm.service.device.runner.config.text.num_layers
    needed = [pages.needed(output.compression.kept, LONG.max_tokens - 1) for output in outputs]
    give_compressed_pages(llm, max(needed) + 2 * layers)


def watch_moves(llm, monkeypatch):
    """Who is swapped out is the last of those that have pages; what comes back is what it had, to the bit. Returns the
    answers that were swapped out, and a list of theirs that came back."""
    scheduler, runner, compactor = (
        llm.service.engine.scheduler,
        llm.service.device.runner,
        llm.service.engine._compactor,
    )
    pages, gone, back = scheduler.compressed, [], []
    swap_out, bring_back = pages.swap_out, compactor._bring_back

    def content(block_table):
        page = np.concatenate([np.arange(PAGE) + PAGE * number for number in block_table.pages])
        return [np.asarray(half)[page] for half in runner.compressed.arrays[0]]

    def noted_swap(block_table, held):
        having = [one for one in scheduler.decoding if one.progress.compressed is not None and not one.is_swapped_out]
        last = max(having, key=lambda one: (one.progress.priority, one.progress.arrived))
        assert last.progress.compressed is block_table
        gone.append((last, content(block_table)))
        swap_out(block_table, held)

    def noted_back(block_table):
        [(answer, had)] = [pair for pair in gone if pair[0].progress.compressed is block_table][-1:]
        if bring_back(block_table):
            back.append(answer)
            for before, after in zip(had, content(block_table), strict=True):
                np.testing.assert_array_equal(before, after)
            return True
        return False

    monkeypatch.setattr(pages, "swap_out", noted_swap)
    monkeypatch.setattr(compactor, "_bring_back", noted_back)
    return gone, back


@ONE
def test_put_aside_and_gone_on(llm, conversations, monkeypatch):
    """Answers that outgrow the pool together wait in host memory and go on as if nothing had been: several to a prompt,
    of any priority, and those that a stop string ends."""
    three = dataclasses.replace(LONG, n=3)
    [alone] = ask(llm, conversations[0], params=LONG, compress="vl-cache-0.3")
    stop = dataclasses.replace(LONG, stop=[alone.outputs[0].text[150:156]])
    asked = [
        RunRequest(conversations[0], LONG, "exact", 1),
        RunRequest(conversations[1], three, "exact", 2),
        RunRequest(conversations[2], LONG, "exact", 0),
        RunRequest(conversations[3], dataclasses.replace(LONG, max_tokens=40), "exact", 1),
        RunRequest(conversations[0], stop, "exact", 1),
    ]
    driver, expected = Driver(llm), []
    for one in asked:
        one.compress = "vl-cache-0.3"
        job = driver.arrive(one)
        driver.finish()
        expected.append(driver.output(job))
    before = llm.stats()
    give_some(llm, expected)
    gone, back = watch_moves(llm, monkeypatch)
    jobs = [driver.arrive(one) for one in asked]
    driver.finish()
    outputs, stats = [driver.output(job) for job in jobs], llm.stats()
    assert tokens(outputs) == tokens(expected)
    for mine, its in zip(outputs, expected, strict=True):
        same_logprobs(mine, its)
        assert (mine.compression.kept, mine.compression.seconds > 0) == (its.compression.kept, True)
        assert [one.finish_reason for one in mine.outputs] == [one.finish_reason for one in its.outputs]
    assert len(back) == len(gone) == stats.swapped_out - before.swapped_out == stats.swapped_in - before.swapped_in > 0
    moved = 2 * sum(half.nbytes for _, had in gone for half in had)
    assert stats.moved_bytes - before.moved_bytes == moved
    # Nobody of the highest priority had to wait for others.
    assert jobs[2].sequences[0] not in {answer for answer, _ in gone}


@pytest.mark.slow
@ONE
def test_who_ends_while_it_is_put_aside_leaves_nothing(llm, conversations):
    """Because nobody wants it any more, by an error of the engine, or as the engine closes."""
    expected = [ask(llm, one, params=LONG, compress="vl-cache-0.3")[0] for one in conversations[:3]]
    give_some(llm, expected)

    def begin():
        driver = Driver(llm)
        jobs = [driver.arrive(RunRequest(one, LONG, "exact", compress="vl-cache-0.3")) for one in conversations[:3]]
        while not llm.stats().swapped_bytes:
            assert driver.step()
        return driver, jobs, [job.sequences[0].is_swapped_out for job in jobs].index(True)

    driver, jobs, aside = begin()
    driver.abort(jobs[aside])
    driver.step()
    assert (jobs[aside].has_ended, llm.stats().swapped_bytes) == (True, 0)
    driver.finish()
    for number, (job, alone) in enumerate(zip(jobs, expected, strict=True)):
        [mine], [its] = tokens([driver.output(job)])[0], tokens([alone])[0]
        assert mine == (its[: len(mine)] if number == aside else its)
    driver, jobs, _ = begin()
    llm.service.engine.fail(RuntimeError("lost"))
    assert all(job.has_ended for job in jobs)
    for job in jobs:
        llm.service.caller.end(job)
    assert llm.stats().swapped_bytes == llm.stats().compressed_in_use == 0
    assert tokens(ask(llm, *conversations[:3], params=LONG, compress="vl-cache-0.3")) == tokens(expected)


@one_device
@ONE
def test_pages_that_move_are_all_that_is_copied(llm):
    """The pool, which is that of all layers, is updated in place."""
    runner = llm.service.device.runner
    pool = sum(half.nbytes for half in runner.compressed.make()[0]) // runner.devices.count
    moved = MOVED_PAGES[0] * pool * PAGE // runner.shapes.compressed_slots
    read, write = (runner.programs.program(kind(MOVED_PAGES[0])).memory_analysis() for kind in (ReadPages, WritePages))
    assert (read.output_size_in_bytes, write.alias_size_in_bytes) == (moved, pool)
    assert max(read.temp_size_in_bytes, write.temp_size_in_bytes) < 2 * moved < pool


@ONE
def test_what_lacks_pixels_goes_on_with_the_whole_prompt(family_checkpoint, textured_image):
    """Nothing else needs them of a picture that is known. It is told."""
    words = {"type": "text", "text": "What is at C2?"}

    def shown(picture):
        return [{"role": "user", "content": [{"type": "image", "image": picture, "uuid": "one"}, words]}]

    with LLM(family_checkpoint, **SETTINGS, cache=CacheConfig(trust_uuids=True)) as trusting:
        [first] = ask(trusting, shown(textured_image(150, 210, 1)))
        [less] = ask(trusting, shown(b"no picture"), compress="h2o-0.3")
        assert not less.compression.is_whole
        for record in trusting.service.cache.store.tier.records():
            record.lose(Why.load_failed, spoiled=True)
        [whole] = ask(trusting, shown(b"no picture"), compress="h2o-0.3")
        assert tokens([whole]) == tokens([first])
        assert (whole.compression, whole.cache.exact, whole.error) == (None, True, None)
        assert (trusting.stats().compressed, trusting.stats().uncompressed) == (1, 1)
        assert_nothing_left(trusting)


@ONE
def test_behind_reuse(llm, conversations, monkeypatch):
    """Of any kind: what is compressed is the K, V that are there."""
    ask(llm, conversations[0])
    moved = user("Before it stands something else. ", conversations[0][0]["content"][0]["image"], "What?")
    for reuse in ("full", "approximate"):
        llm.reset_prefix_cache()
        [linked] = ask(llm, moved, reuse=reuse)
        assert linked.cache.approximate_tokens
        llm.reset_prefix_cache()
        [same] = ask(llm, moved, reuse=reuse, compress="vl-cache-1")
        assert tokens([same]) == tokens([linked])
        llm.reset_prefix_cache()
        with monkeypatch.context() as context:
            context.setattr(Compression, "is_whole", False)  # compacted, it is the same, too
            assert tokens(ask(llm, moved, reuse=reuse, compress="vl-cache-1")) == tokens([linked])
        llm.reset_prefix_cache()
        [less] = ask(llm, moved, reuse=reuse, compress="vl-cache-0.5")
        assert not less.compression.is_whole
        assert less.cache.approximate_tokens == linked.cache.approximate_tokens


@ONE
def test_verified_it_is_compared_with_the_whole_cache(llm, conversations):
    [output] = ask(llm, conversations[0], compress="streaming-0.02", verify=True)
    [whole] = ask(llm, conversations[0])
    same = [a == b for a, b in zip(output.outputs[0].token_ids, whole.outputs[0].token_ids, strict=True)]
    assert output.verification.tokens_agree == [*same, False].index(False)
    assert output.verification.tokens_agree >= 1


@ONE
@pytest.mark.slow
def test_a_prompt_of_several_steps(llm, textured_image, monkeypatch):
    """What is observed does not depend on how the prompt was cut."""
    conversation = user(textured_image(420, 420, 5), "a b c d e f g h " * 30)
    [output] = ask(llm, conversation, params=TOLD, compress="vl-cache-0.2")
    assert len(output.prompt_token_ids) > SIZES["buckets"].max_rows
    monkeypatch.setattr(llm.service.device.runner, "buckets", dataclasses.replace(SIZES["buckets"], rows=(1024,)))
    check(Reference(llm), conversation, output, parse_compressor("vl-cache-0.2"))


@ONE
def test_what_is_refused(llm, family_checkpoint, conversations):
    with pytest.raises(ValueError, match=r"^compress must be .*vl-cache-A"):
        ask(llm, conversations[2], compress="vl-cache")
    with LLM(family_checkpoint, **SIZES, use_tqdm=False) as plain:
        with pytest.raises(ValueError, match=r"^compress='.*' needs a compressed KV pool: "):
            ask(plain, conversations[2], compress="vl-cache-0.1")
        names = {one.name for one in plain.service.device.runner.programs.family_of(plain.service.policy)}
        assert not names & {"observe", "compact", "compressed_window", "sums", "compressed_pool"}
    with pytest.raises(ValueError, match=r"^compressed_kv_bytes must be 0 or at least"):
        LLM(family_checkpoint, **SIZES | {"compressed_kv_bytes": 100}, use_tqdm=False)
