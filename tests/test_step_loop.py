"""The step loop against requests one by one: random arrivals, aborts, tiny pools, fences, and what a pass may cost.

Most tests drive the passes by hand, so that a seed says what happens; some leave that to the engine's own thread.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest

from tests.helper import BUCKETS, SIZES, give_compressed_pages, give_pages, some_seeds, spoil, spoil_compressed, user
from vlcache_jax import LLM, BucketSizes, SamplingParams
from vlcache_jax.cache.record import Lost, Record, State, Why
from vlcache_jax.device.programs.base import Demand
from vlcache_jax.device.programs.window import ANSWER
from vlcache_jax.device.sampler import NO_ANSWER, NO_DECODE_SLOT
from vlcache_jax.engine import engine as engine_module
from vlcache_jax.engine.request import CacheReservation, Generation
from vlcache_jax.engine.uploads import Transfers
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.request_options import RequestOptions, ResolvedOptions
from vlcache_jax.reuse.policies import Spread
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import parse_policy

SHORT_STEPS = dataclasses.replace(BUCKETS, rows=(96,))
FEW_ROWS = dataclasses.replace(BUCKETS, rows=(64, 512))
PLENTY = 1 << 28  # bytes
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def open_llm(directory, **changes):
    return LLM(directory, **SIZES | {"compressed_kv_bytes": 2**22, "use_tqdm": False} | changes)


def renew(llm, host_bytes=PLENTY, pages=None, compressed=None):
    """An empty cache of another size, and empty pools of other pages; programs stay as they are."""
    llm.reset_mm_cache()
    give_compressed_pages(llm, compressed)
    give_pages(llm, llm.service.device.runner.num_slots // PAGE - 1 if pages is None else pages)
    llm.service.cache.store.tier.capacity = host_bytes


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory) as llm:
        yield llm


@pytest.fixture(scope="module")
def short_steps(directory):
    """Prompts take several steps."""
    with open_llm(directory, buckets=SHORT_STEPS) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(directory, engine):
    """Runs requests one by one; it shares nothing but compiled programs."""
    with open_llm(directory) as llm:
        llm.service.device.runner.programs = engine.service.device.runner.programs
        llm.service.device.runner.run = engine.service.device.runner.run
        yield llm


@pytest.fixture(scope="module")
def pictures(textured_image):
    return [textured_image(*size, i) for i, size in enumerate([(70, 100), (150, 110), (100, 190), (150, 210)])]


@dataclasses.dataclass
class RunRequest:
    """A request of a run.

    Attributes:
      end_after: tokens after which it is aborted, 0: at once; None: it is not.
      compress: what its answers go on with.
      donors: rule for images in new contexts.
    """

    conversation: list
    params: SamplingParams
    policy: object
    priority: int = 0
    end_after: int | None = None
    compress: str | None = None
    donors: str | None = None


class Driver:
    """Hands requests to an engine and, unless that has its own thread, runs its passes."""

    def __init__(self, llm, by_hand=True):
        self.llm, self.by_hand = llm, by_hand
        llm.service.loop.wait()  # its thread outlives a call for a moment

    def arrive(self, asked, heard=None):
        call = self.llm.service.call(
            "conversation", [asked.conversation], self.llm.service.renderer.from_conversation,
            RequestOptions(
                reuse=asked.policy, compress=asked.compress, priority=asked.priority, donors=asked.donors
            ),
            "return", params=asked.params,
        )  # fmt: skip

        def listen(job):
            if asked.end_after is not None and any(len(one.generated) >= asked.end_after for one in job.sequences):
                self.abort(job)
            if heard is not None:
                heard(job)

        begin = self.llm.service.loop.begin
        if self.by_hand:
            self.llm.service.loop.begin = lambda: None
        try:
            job = self.llm.service.caller.arrive(self.llm.service.caller.to_answer(call), listen)
        finally:
            self.llm.service.loop.begin = begin
        return job

    @staticmethod
    def abort(job):
        job.abort()

    def step(self):
        """One pass; whether there was anything to do."""
        loop, engine = self.llm.service.loop, self.llm.service.engine
        arriving, loop._arriving = loop._arriving, []
        for sequence in arriving:
            engine.scheduler.add(sequence)
        if engine.is_idle:
            return False
        engine.step()
        return True

    def finish(self):
        """Runs everything that has arrived."""
        if self.by_hand:
            while self.step():
                pass
        else:
            self.llm.service.loop.wait()

    def output(self, job):
        """What a job that has ended came to."""
        output = self.llm.service.caller.reporter.output(job.planned, job.sequences)
        self.llm.service.caller.end(job)
        return output


def random_text(rng):
    words = ["what", "is", "this", "and", "that", "or", "a", "dog", "in", "the", "shade", "of", "trees"]
    return " ".join(rng.choice(words, int(rng.choice([1, 3, 8, 12]))))


STARTS = ("Look: ", "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade. " * 2)
SCHEDULE = Spread(schedule=Schedule((9, 5, 3, 2), "any", "any", allow_other_model=True))


def random_requests(rng, pictures, policies, count, most, *, held=False):
    """Some ask what was asked before, and some go on from there. Where some are `held`, to a grammar, they are short,
    and several windows of a pass may be theirs."""
    asked, requests = [], []
    for _ in range(count):
        parts = random_parts(rng, pictures)
        if asked and rng.random() < 0.45:
            parts = asked[rng.integers(len(asked))]
            if len(parts) <= 3 and rng.random() < 0.3:
                parts = [*parts, random_text(rng)]
        asked.append(parts)
        requests.append(RunRequest(user(*parts), random_params(rng, most, held), policies[rng.integers(len(policies))]))
    return requests


def random_parts(rng, pictures):
    parts = [STARTS[rng.integers(2)]] if rng.random() < 0.6 else [random_text(rng)]
    for _ in range(rng.choice(3, p=[0.25, 0.5, 0.25])):
        parts.append(pictures[rng.integers(len(pictures))])
        if rng.random() < 0.5:
            parts.append(random_text(rng))
    if rng.random() < 0.7:
        parts.append("?" if rng.random() < 0.5 else random_text(rng))
    return parts


def random_params(rng, most, held):
    count = int(rng.integers(1, most + 1))
    changes = {}
    if rng.random() < 0.25:
        changes = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    if rng.random() < 0.3:
        changes["stop"] = [chr(c) for c in rng.choice(range(32, 127), 12)]
        changes["include_stop_str_in_output"] = bool(rng.integers(2))
    if rng.random() < 0.3:
        changes["min_tokens"] = int(rng.integers(1, count + 1))
    if rng.random() < 0.3:
        changes["logprobs"] = 2
    if held and rng.random() < 0.2:
        changes["structured_outputs"] = {"regex": ["[a-f]{2}(north|south)+", "(yes|no).*"][rng.integers(2)]}
    return SamplingParams(
        temperature=float(rng.integers(2)), seed=int(rng.integers(1000)), max_tokens=count,
        n=int(rng.choice([1, 1, 1, 2])), ignore_eos=bool(rng.integers(2)), **changes,
    )  # fmt: skip


def image_report(image, is_short):
    """Where the cache is too small for an image's record, only pages say whether it is computed once more."""
    if is_short and image.match != "approximate":
        return image.key, "exact or computed"
    return image.key, image.match, image.recomputed, image.why


def answers(output):
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]


def report(output, memory):
    """What must be as one by one, whatever the timing; memory for records may be "short"."""
    kept = output.compression and output.compression.kept
    told = [answers(output), output.error, output.cache.exact, output.cache.policy, kept]
    told.append([image_report(image, memory == "short") for image in output.cache.images])
    return told


def assert_same_work(got, expected):
    """Where memory was plenty. Of pages that are almost alike the eldest is taken, and who is that may differ."""
    assert abs(got.num_cached_tokens - expected.num_cached_tokens) <= PAGE // 4
    if got.num_cached_tokens == expected.num_cached_tokens:
        assert got.cache.rows == expected.cache.rows
        for mine, its in zip(got.cache.images, expected.cache.images, strict=True):
            assert (mine.kv, mine.encoder) == (its.kv, its.encoder)


def assert_same_logprobs(got, expected):
    for mine, its in zip(got.outputs, expected.outputs, strict=True):
        pairs = [[p.chosen for p in one.logprobs or ()] for one in (mine, its)]
        np.testing.assert_allclose(*pairs, atol=3e-5, rtol=0)


def one_by_one(llm, requests, host_bytes):
    renew(llm, host_bytes)
    driver, outputs = Driver(llm), []
    for asked in requests:
        job = driver.arrive(dataclasses.replace(asked, end_after=None))
        driver.finish()
        outputs.append(driver.output(job))
    return outputs


class Fences:
    """Watches memory that programs read and that is not the pool.

    Numpy arguments must stay as they are until the engine is idle; a record that nobody uses any more and that has
    lost its place is filled with NaN.

    Attributes:
      early: records that were released while a launch that reads them was unread.
      spoiled: records that were filled with NaN.
    """

    def __init__(self, llm, monkeypatch):
        self.early = self.spoiled = self.arrays = 0
        self._llm = llm
        self._given = []
        self._users = collections.Counter()
        self._reading = {}  # where a record's memory begins -> number of the results that follow its last launch
        run, start = llm.service.device.runner.run, Transfers.start
        device_put = jax.device_put
        init, leave, removed = CacheReservation.__init__, CacheReservation.leave, llm.service.cache.store._forget

        def noted_run(key, *args):
            self._keep(args)
            return run(key, *args)

        def noted_device_put(x, *args, **options):
            if not options.get("may_alias"):  # records are watched by themselves
                self._keep(x)
            return device_put(x, *args, **options)

        def noted_start(transfers, records, layers, wanted):
            for record in records:
                self._read(record.data)
            return start(transfers, records, layers, wanted)

        def noted_init(hold, store, handles, made, *given):
            init(hold, store, handles, made, *given)
            hold.records = {*made, *(record for handle in handles for record in handle._records)}
            self._users.update(hold.records)

        def noted_leave(hold, **options):
            leave(hold, **options)
            if not hold._users:
                records, hold.records = hold.records, set()
                self._users.subtract(records)
                for record in records:
                    self._released(record)

        def noted_removed(record, why):
            removed(record, why)
            self._gone(record)

        monkeypatch.setattr(llm.service.device.runner, "run", noted_run)
        monkeypatch.setattr(Transfers, "start", noted_start)
        monkeypatch.setattr(jax, "device_put", noted_device_put)
        monkeypatch.setattr(CacheReservation, "__init__", noted_init)
        monkeypatch.setattr(CacheReservation, "leave", noted_leave)
        monkeypatch.setattr(llm.service.cache.store, "_forget", noted_removed)

    def check(self):
        """The engine is idle."""
        for array, copy in self._given:
            np.testing.assert_array_equal(array, copy)
        self.arrays += len(self._given)
        self._given.clear()
        assert self.early == 0

    def _keep(self, args):
        for leaf in jax.tree.leaves(args):
            # Records are lent by tiers and may be evicted and spoiled later; `_read` watches them.
            if isinstance(leaf, np.ndarray) and self._place(leaf) not in self._reading:
                self._given.append((leaf, leaf.copy()))

    @staticmethod
    def _place(array):
        return array.ctypes.data

    def _read(self, data):
        self._reading[self._place(data)] = self._llm.service.engine._in_flight.launched + 1

    def _released(self, record):
        if self._users[record] or "buffers" not in record.__dict__:
            return
        self.early += self._reading.get(self._place(record.data), 0) > self._llm.service.engine._in_flight.read
        self._gone(record)

    def _gone(self, record):
        """It is spoiled if nobody is to read it any more. What is still to be filled is whole afterwards, but lost."""
        is_placed = self._llm.service.cache.store.tier.get(record.meta.name) is record
        if not (self._users[record] or is_placed) and record.is_settled and "buffers" in record.__dict__:
            self._reading.pop(self._place(record.data), None)
            record.data[...] = np.nan
            self.spoiled += 1


COMPRESSED = 20  # pages, of four layers: some of the answers that outgrow the other pool are swapped out
POLICIES = ["off", "exact", "exact", "0.3", "shift-0.2", "cacheblend-0.2", SCHEDULE]


# 121: all results are read early, as pages run out with a step in flight; 241: rows whose last bits once depended on
# the others of their step
@pytest.mark.parametrize("seed", some_seeds(1, buckets=(0, 2, 3, 4, 5, 12, 14, 121, 241), thorough=range(200)))
def test_together_as_one_by_one(request, engine, reference, pictures, monkeypatch, seed):
    llm = request.getfixturevalue("short_steps") if seed // 6 % 3 == 2 else engine
    assert_together_as_one_by_one(llm, reference, pictures, monkeypatch, seed)


WITH_DONORS = (402, 403, 407, 411, 418, 428)  # one of each kind of run


@pytest.mark.parametrize("seed", some_seeds(buckets=WITH_DONORS, thorough=range(400, 500)))
def test_together_as_one_by_one_with_donors_made(request, engine, reference, pictures, monkeypatch, seed):
    """Images are computed in a neutral context for some of the requests."""
    llm = request.getfixturevalue("short_steps") if seed // 6 % 3 == 2 else engine
    before = llm.cache.stats().donors_made
    assert_together_as_one_by_one(llm, reference, pictures, monkeypatch, seed, ("neutral", "own", "neutral", None))
    assert llm.cache.stats().donors_made > before or seed not in WITH_DONORS


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl_moe-every"])
def others(request, checkpoints):
    """Engines of other families as `engine` and `reference` are, with fewer programs."""
    directory = checkpoints(request.param)
    with open_llm(directory, buckets=FEW_ROWS) as llm, open_llm(directory, buckets=FEW_ROWS) as alone:
        alone.service.device.runner.programs, alone.service.device.runner.run = (
            llm.service.device.runner.programs,
            llm.service.device.runner.run,
        )
        yield llm, alone


@pytest.mark.thorough_for("qwen3_vl_moe-every")
@pytest.mark.parametrize("seed", some_seeds(buckets=(302,), thorough=range(300, 312)))
def test_other_families_together_as_one_by_one(others, pictures, monkeypatch, seed):
    assert_together_as_one_by_one(*others, pictures, monkeypatch, seed)


def assert_together_as_one_by_one(llm, reference, pictures, monkeypatch, seed, donors=(None,)):
    rng = np.random.default_rng(seed)
    kind = ("plain", "tiny", "aborts", "tiny", "thread", "small cache")[seed % 6]
    policies = POLICIES
    if llm.service.device.runner.buckets.max_rows == SHORT_STEPS.max_rows:
        policies = [policy for policy in POLICIES if policy != "cacheblend-0.2"]  # all of its rows stand in one step
    if kind == "aborts" and rng.random() < 0.5:
        policies = policies[:3]
    is_plain = kind == "plain"
    count = int(rng.integers(5, 12))
    requests = random_requests(rng, pictures, policies, count, 20, held=True)
    host_bytes = (
        int(rng.choice([0, 10**5, 4 * 10**5, 10**6])) if kind == "small cache" or rng.random() < 0.2 else PLENTY
    )
    if kind in ("plain", "aborts"):
        host_bytes = PLENTY
    pages = None if is_plain else int(rng.integers(4, 10))
    if kind == "tiny":
        requests = [dataclasses.replace(one, priority=int(rng.integers(2))) for one in requests]
        for one in requests[::2]:  # they outgrow the pool together
            one.params = dataclasses.replace(one.params, max_tokens=250, ignore_eos=True, stop=())
    aborted = [int(i) for i in rng.choice(count, 2, replace=False)] if kind in ("aborts", "thread") else []
    if host_bytes < PLENTY:
        aborted = []  # what an aborted request displaced is gone, but what it computed may never come
    for i in aborted:
        requests[i].end_after = int(rng.choice([0, 0, 1, 5]))
    for one, draw in zip(requests, np.random.default_rng([seed, 1]).integers(4, size=count), strict=True):
        one.compress = (None, None, "streaming-0.4", "postvision-0.4")[draw]
        one.donors = donors[draw % len(donors)]

    renew(llm, host_bytes, pages, None if is_plain else COMPRESSED)
    with monkeypatch.context() as context:
        spoil(llm, context)
        spoil_compressed(llm, context)
        fences = Fences(llm, context)
        before = llm.stats()
        driver = Driver(llm, by_hand=kind != "thread")
        jobs, i = [], 0
        while i < count:
            for asked in requests[i : i + int(rng.integers(1, 5))]:
                jobs.append(driver.arrive(asked))
                i += 1
            if driver.by_hand:
                for _ in range(int(rng.choice([0, 1, 2, 5, 12]))):
                    driver.step()
            else:
                time.sleep(float(rng.choice([0, 0.002, 0.02])))
            # Those that end after no token at all: somewhere between arrival and end.
            for job in (
                jobs[k] for k in aborted if k < len(jobs) and requests[k].end_after == 0 and rng.random() < 0.7
            ):
                driver.abort(job)
        driver.finish()
        outputs = [driver.output(job) for job in jobs]
        llm.service.cache.writer.flush()
        fences.check()
    stats = llm.stats()
    assert stats.in_use == stats.waiting == stats.running == stats.compressed_in_use == stats.swapped_bytes == 0
    assert sorted(llm.service.engine.scheduler._decode_slots) == list(range(BUCKETS.max_sequences))
    assert not llm.service.engine.scheduler._fillers
    was_plenty = is_plain and stats.evictions == before.evictions and stats.preemptions == before.preemptions
    memory = "short" if host_bytes < PLENTY else "plenty" if was_plenty else ""
    # Whoever came after an aborted request saw it run, or saw it not; or it counted on that one to fill a record, and
    # then it computes.
    let_down = [k for k, output in enumerate(outputs) if aborted and k not in aborted and was_let_down(output)]
    for k in let_down:
        [cold] = one_by_one(reference, [dataclasses.replace(requests[k], policy=parse_policy("off"))], host_bytes)
        assert answers(outputs[k]) == answers(cold)
        assert_same_logprobs(outputs[k], cold)
    worlds = []
    for gone in itertools.chain.from_iterable(itertools.combinations(aborted, n) for n in range(len(aborted) + 1)):
        kept = [k for k in range(count) if k not in gone]
        worlds.append(dict(zip(kept, one_by_one(reference, [requests[k] for k in kept], host_bytes), strict=True)))
        wrong = [k for k in range(count) if k not in let_down and not agrees(k, k in aborted, outputs, worlds, memory)]
        if not wrong:
            break
    for k in wrong:
        found = next((world[k] for world in worlds if k in world), None)
        assert report(outputs[k], memory) == report(found, memory), (seed, kind, k, requests[k])
    for k, output in enumerate(outputs):
        if k not in (*aborted, *let_down) and not outputs[k].error:
            world = next(w for w in worlds if k in w and report(output, memory) == report(w[k], memory))
            assert_same_logprobs(output, world[k])
            if memory == "plenty":
                assert_same_work(output, world[k])


@pytest.mark.parametrize("seed", some_seeds(buckets=(0, 1), thorough=range(6)))
def test_many_that_are_put_back(request, engine, reference, pictures, monkeypatch, seed):
    llm = request.getfixturevalue("short_steps") if seed % 2 else engine
    assert_put_back(llm, reference, pictures, monkeypatch, seed)


@pytest.mark.thorough_for("qwen3_vl_moe-every")
@pytest.mark.parametrize("seed", some_seeds(buckets=(0,), thorough=range(3)))
def test_many_of_other_families_that_are_put_back(others, pictures, monkeypatch, seed):
    assert_put_back(*others, pictures, monkeypatch, seed)


def assert_put_back(llm, reference, pictures, monkeypatch, seed):
    """Prompts of almost a page whose answers fill two more, in a pool of four pages: most are preempted."""
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, pictures, ["exact", "exact", "0.3", "shift-0.2", "off"], 8, 20)
    for one in requests:
        one.conversation = user("See ", pictures[rng.integers(2)], "x" * int(rng.integers(20, 50)))
        one.params = dataclasses.replace(one.params, max_tokens=240, ignore_eos=True, stop=(), n=1, logprobs=1)
    renew(llm, pages=4)
    spoil(llm, monkeypatch)
    before, driver = llm.stats().preemptions, Driver(llm)
    jobs = [driver.arrive(asked) for asked in requests]
    driver.finish()
    outputs = [driver.output(job) for job in jobs]
    assert llm.stats().preemptions - before >= 6
    assert llm.stats().in_use == 0
    for output, alone in zip(outputs, one_by_one(reference, requests, PLENTY), strict=True):
        assert len(output.outputs[0].token_ids) == 240
        assert report(output, "") == report(alone, "")
        assert_same_logprobs(output, alone)


def was_let_down(output):
    """Whether a record was never filled that it was to link, and it computed all."""
    failed = any(image.why is Why.load_failed for image in output.cache.images)
    return failed and output.cache.exact and not output.error


def agrees(k, was_aborted, outputs, worlds, memory):
    for world in (world for world in worlds if k in world):
        if not was_aborted and report(outputs[k], memory) == report(world[k], memory):
            return True
        if was_aborted:
            pairs = list(zip(outputs[k].outputs, world[k].outputs, strict=True))
            if all(mine.token_ids == its.token_ids[: len(mine.token_ids)] for mine, its in pairs):
                return True
    return False


def at_once(llm, monkeypatch):
    """A request that ends leaves at once, whatever of it is still to be read."""
    in_flight = llm.service.engine._in_flight
    leave = in_flight.leave
    monkeypatch.setattr(in_flight, "leave", lambda sequence, now: leave(sequence, now=True))


def at_launch(llm, monkeypatch):
    """A request leaves when its prompt has been launched."""
    in_flight = llm.service.engine._in_flight
    launched, leave = llm.service.engine.scheduler.launched, in_flight.leave

    def leaving(group):
        launched(group)
        for prefill in group:
            leave(prefill.sequence, now=True)

    monkeypatch.setattr(llm.service.engine.scheduler, "launched", leaving)
    monkeypatch.setattr(in_flight, "leave", lambda sequence, now: None)


@pytest.mark.parametrize("broken", [None, at_once, at_launch])
def test_records_stay_until_what_reads_them_has_been_read(engine, pictures, monkeypatch, broken):
    """An exact hit, the records of which lose their place while it is planned, ends while its step is unread."""
    shown = user("See ", pictures[3], "?")
    renew(engine)
    driver = Driver(engine)
    for _ in range(2):
        job = driver.arrive(RunRequest(shown, GREEDY, "exact"))
        driver.finish()
        last = driver.output(job)
        engine.service.cache.writer.flush()
        engine.reset_prefix_cache()
    assert last.cache.images[0].kv == "host"
    with monkeypatch.context() as context:
        if broken is not None:
            broken(engine, context)
        fences = Fences(engine, context)
        watched = driver.arrive(RunRequest(shown, GREEDY, "exact"))
        assert engine.cache.evict(pictures[3]) == 0  # it is held
        for record in list(engine.service.cache.store.tier.records()):
            engine.service.cache.store.remove(record)
        driver.step()  # launches the hit's step
        assert watched.sequences[0].progress.prefilled == 1
        assert not watched.sequences[0].generated
        driver.abort(watched)
        engine.service.caller.end(watched)  # who asked for it has gone
        assert fences.spoiled == 0 or broken is at_launch
        driver.finish()
        assert fences.spoiled == 2  # encoder rows and K, V
        if broken is None:
            fences.check()
        else:
            assert fences.early > 0


def test_encoder_rows_stay_until_what_reads_them_has_been_read(engine, pictures, monkeypatch):
    """Rows of an image are computed from stored encoder rows that lose their place meanwhile."""
    renew(engine)
    driver = Driver(engine)
    one, other = user("See ", pictures[3], "?"), user("Elsewhere there is ", pictures[3], "?")
    expected = []
    for asked in (one, other):
        job = driver.arrive(RunRequest(asked, GREEDY, "exact"))
        driver.finish()
        expected.append(driver.output(job))
    renew(engine)
    with monkeypatch.context() as context:
        spoil(engine, context)
        fences = Fences(engine, context)
        job = driver.arrive(RunRequest(one, GREEDY, "exact"))
        driver.finish()
        outputs = [driver.output(job)]
        engine.service.cache.writer.flush()
        job = driver.arrive(RunRequest(other, GREEDY, "exact"))
        for record in list(engine.service.cache.store.tier.records()):
            engine.service.cache.store.remove(record)
        driver.finish()
        outputs.append(driver.output(job))
        engine.service.cache.writer.flush()
        assert outputs[1].cache.images[0].encoder == "host"
        assert fences.spoiled > 0
        fences.check()
    assert [answers(output) for output in outputs] == [answers(output) for output in expected]


def test_what_another_request_encodes_is_found_though_nothing_is_stored_yet(engine, pictures, monkeypatch):
    renew(engine)
    driver, reporter = Driver(engine), engine.service.caller.reporter
    _, job = [driver.arrive(RunRequest(user(text, pictures[0]), GREEDY, "exact")) for text in ("One ", "Two ")]
    driver.finish()
    record = job.sequences[0].progress.images[0].encoder
    for state, told in ((State.filling, "host"), (State.ready, "host"), (Lost(Why.load_failed), "computed")):
        with monkeypatch.context() as context:
            context.setattr(record, "state", state)
            context.setattr(Record, "buffers", None)  # nobody looks at memory that may not be there
            assert reporter.output(job.planned, job.sequences).cache.images[0].encoder == told
    driver.output(job)


@pytest.mark.slow
def test_first_tokens_leave_the_device_before_what_is_stored(short_steps, pictures, monkeypatch):
    """The prompt takes several steps, and two of them have rows of an image whose K, V nobody has."""
    renew(short_steps)
    driver, copied = Driver(short_steps), []
    writer, put = short_steps.service.cache.writer, Record.put
    first = dataclasses.replace(GREEDY, max_tokens=1)
    driver.arrive(RunRequest(user(pictures[2], "?"), first, "exact"))
    driver.finish()
    writer.flush()
    monkeypatch.setattr(Record, "put", lambda *given: (copied.append(len(job.sequences[0].generated)), put(*given)))
    steps = writer.requested
    job = driver.arrive(RunRequest(user(STARTS[1], pictures[2], "?"), first, "exact"))
    driver.finish()
    assert writer.requested == steps + 2
    writer.flush()
    assert copied
    assert set(copied) == {1}  # tokens that there were then
    assert driver.output(job).cache.images[0].encoder == "host"


class WindowWrites:
    """Checks of each window which slots of keys and values it changes, and which decode slots.

    Attributes:
      tokens: of each window, how many tokens each of its rows came to.
    """

    def __init__(self, runner, monkeypatch):
        self.tokens, self._run = [], runner.run
        monkeypatch.setattr(runner, "run", self._noted)

    def _noted(self, program, *given):
        if "window" not in program.name:
            return self._run(program, *given)
        pool, decode_slots, rows = given[2], jax.tree.map(np.array, given[3]), np.asarray(given[4])
        before = jax.tree.map(np.array, pool)
        chosen, after, pool = came = self._run(program, *given)
        decode_slot, counts = rows[:, ANSWER], (np.asarray(chosen.token) != NO_ANSWER).sum(0)
        own = np.flatnonzero(decode_slot != NO_DECODE_SLOT)
        assert not counts[decode_slot == NO_DECODE_SLOT].any()
        self.tokens.append(counts[own].tolist())
        # Decode slots of other answers, and of those that had ended, are as they were.
        other = np.ones(len(decode_slots.step), bool)
        other[decode_slot[own][counts[own] > 0]] = False
        for old, new in zip(decode_slots, after, strict=True):
            np.testing.assert_array_equal(old[other], np.asarray(new)[other])
        begin = (
            rows[own, 0] + decode_slots.step[decode_slot[own]] - 1
        )  # what is computed first is the token that was chosen last
        written = self._written(program, given[5:], own, rows[:, 0], begin, counts[own])
        for old, new, slots in zip(before, pool, written, strict=True):
            for one, other in zip(old, new, strict=True):
                changed = np.flatnonzero((one != np.asarray(other)).any((1, 2)))
                assert set(changed.tolist()) == slots
        return came

    @staticmethod
    def _written(program, given, own, length, begin, counts):
        """Slots in which the tokens behind row i's first `begin[i]` ones lie, of each layer or of all together."""

        def slots(table, first, count):
            place = np.arange(first, first + count)
            return (table[place // PAGE] * PAGE + place % PAGE).tolist()

        if program.name == "window":
            tables = np.asarray(given[0].parts().tables)
            found = {slot for row, *one in zip(own, begin, counts, strict=True) for slot in slots(tables[row], *one)}
            return itertools.repeat(found, 4)
        tables, kept = np.asarray(given[2]), np.asarray(given[3])
        return [
            {
                slot
                for layer in range(len(tables))
                for row, first, count in zip(own, begin, counts, strict=True)
                for slot in slots(tables[layer, row], first - length[row] + kept[layer, row], count)
            }
        ]


@pytest.mark.parametrize("compress", [None, "snapkv-0.5"])
def test_a_row_that_has_ended_writes_nothing(engine, pictures, monkeypatch, compress):
    """Neither does padding. Within a window answers end at their length, at a token, and not at all."""
    runner = engine.service.device.runner
    texts, long = ("One ", "Two ", "Three "), dataclasses.replace(GREEDY, max_tokens=14)
    scheduler = engine.service.engine.scheduler
    monkeypatch.setattr(scheduler, "_decode_slots", sorted(scheduler._decode_slots)[-3:])  # the last one is in use, too

    def answered(*params):
        renew(engine)
        for pool in (runner.pool, runner.compressed):
            pool.arrays = jax.tree.map(lambda half: jax.device_put(np.full_like(half, 0.5)), pool.make())  # no token's
        driver = Driver(engine)
        asked = [RunRequest(user(text, pictures[0], "?"), one, "exact", compress=compress)
                 for text, one in zip(texts, params, strict=True)]  # fmt: skip
        first = driver.arrive(RunRequest(user(pictures[0]), GREEDY, "exact"))  # others need not wait for its image
        driver.finish()
        driver.output(first)
        jobs = [driver.arrive(one) for one in asked]
        driver.finish()
        return [driver.output(job).outputs[0].token_ids for job in jobs]

    whole = answered(long, long, long)
    stop = next(token for i, token in enumerate(whole[1][3:6], 3) if token not in whole[1][:i])
    windows = WindowWrites(runner, monkeypatch)
    params = long, dataclasses.replace(long, stop_token_ids=[stop]), dataclasses.replace(long, max_tokens=3)
    last, stopped, short = answered(*params)
    assert (short, last) == (whole[2][:3], whole[0])
    assert stopped[: whole[1].index(stop)] == whole[1][: whole[1].index(stop)]
    assert len(stopped) <= whole[1].index(stop) + 1
    assert any(0 < min(tokens) < max(tokens) for tokens in windows.tokens)  # some end while others go on


@pytest.mark.slow
@pytest.mark.parametrize("compress", [None, "snapkv-0.5"])
def test_windows_of_a_number_of_steps_answer_the_same(engine, pictures, monkeypatch, compress):
    """As a GPU has them: the host says how many, and what rows may ask for."""
    of_all = dataclasses.replace(GREEDY, max_tokens=13)
    some = [
        of_all,
        dataclasses.replace(of_all, temperature=0.9, top_p=0.9, top_k=30, seed=3),
        dataclasses.replace(of_all, repetition_penalty=1.3, logprobs=3, min_tokens=4),
        dataclasses.replace(of_all, bad_words=["e"], logit_bias={70: 4.0}, ignore_eos=False),
        dataclasses.replace(of_all, structured_outputs={"regex": "[a-f]{4,9}"}),
        dataclasses.replace(of_all, max_tokens=3),
    ]
    runner, ran = engine.service.device.runner, {}

    def answered(*params):
        renew(engine)
        driver, run = Driver(engine), runner.run
        programs = ran.setdefault(runner.shapes.is_host, {})
        with monkeypatch.context() as context:
            context.setattr(runner, "run", lambda one, *args: programs.setdefault(one) or run(one, *args))
            asked = [
                RunRequest(user("What is it, ", pictures[0], "?"), one, "exact", compress=compress) for one in params
            ]
            jobs = [driver.arrive(one) for one in asked]
            driver.finish()
        outputs = [driver.output(job) for job in jobs]
        return [(answers(output), [one.logprobs for one in output.outputs]) for output in outputs]

    cases = [some[:1], some[:2], some, some[-1:]]
    expected = [answered(*params) for params in cases]
    monkeypatch.setattr(runner.shapes, "is_host", False)
    assert [answered(*params) for params in cases] == expected
    windows = {is_host: [one for one in programs if "window" in one.name] for is_host, programs in ran.items()}
    assert {(one.choice, one.steps) for one in windows[True]} == {("dynamic", None)}
    steps = runner.buckets.window
    assert {(one.choice, one.steps) for one in windows[False]} == {("greedy", steps), ("drawn", steps), ("any", 1)}
    # They are what a warm-up makes.
    known = type(windows[False][0]).family(runner.shapes, Demand(runner.buckets))
    assert set(windows[False]) <= set(known)
    assert {one.choice for one in ran[False] if one.name == "sample"} == {"greedy", "drawn", "any"}


# What a pass may cost.

MANY = BucketSizes(rows=(128,), patches=(256,), sequences=(4, 64))
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def many(directory):
    with open_llm(directory, buckets=MANY, max_model_len=4 * PAGE) as llm:
        yield llm


class Windows:
    """What is launched and read.

    Attributes:
      rows: of each window, in their order.
      ended: sequence -> how many windows had been launched when its end was known, and the one that brought it.
      delivered: sequence -> how many windows had been launched at each delivery of its tokens.
    """

    def __init__(self, llm, monkeypatch):
        self.rows, self.ended, self.delivered = [], {}, collections.defaultdict(list)
        decode, read, end = engine_module.decode, llm.service.engine._read_next, llm.service.engine._end
        number, reading, results_of = {}, [], []  # whose ids stay theirs

        def noted_decode(runner, decode_slots, active, tokens):
            results = decode(runner, decode_slots, active, tokens)
            number[id(results)] = len(self.rows)
            results_of.append(results)
            self.rows.append(list(active))
            return results

        def noted_read():
            results = llm.service.engine._in_flight.oldest
            reading[:] = [number.get(id(results))]
            before = {sequence: len(sequence.generated) for row in self.rows for sequence in row}
            read()
            for sequence, count in before.items():
                if len(sequence.generated) > count:
                    self.delivered[sequence].append(len(self.rows))
            reading.clear()

        def noted_end(sequence, **options):
            self.ended[sequence] = len(self.rows), reading[0] if reading else None
            end(sequence, **options)

        monkeypatch.setattr(engine_module, "decode", noted_decode)
        monkeypatch.setattr(llm.service.engine, "_read_next", noted_read)
        monkeypatch.setattr(llm.service.engine, "_end", noted_end)


@pytest.mark.slow
def test_a_hit_among_many_answers_waits_two_passes(many, pictures, monkeypatch):
    renew(many)
    driver = Driver(many)
    question = "What is it, where does it stand, and who may have put it there? Say it in one word."
    shown = [user(start, pictures[i], question) for i, start in itertools.product(range(4), ("See ", "Look: "))]
    for conversation in shown:
        job = driver.arrive(RunRequest(conversation, GREEDY, "exact"))
        driver.finish()
        driver.output(job)
    many.service.cache.writer.flush()
    windows = Windows(many, monkeypatch)
    decoding = [driver.arrive(RunRequest(user(f"{i} and more"), LONG, "exact")) for i in range(32)]
    while not all(job.sequences[0].generated for job in decoding):
        driver.step()

    many.reset_prefix_cache()  # so that they are linked, not found in pages
    hit = driver.arrive(RunRequest(shown[0], GREEDY, "exact"))
    [sequence] = hit.sequences
    passes = 0  # there are decode slots and pages, so the first one admits it
    while not sequence.generated:
        driver.step()
        passes += 1
    assert passes <= 2
    assert len(many.service.engine.scheduler.decoding) >= 32

    many.reset_prefix_cache()
    first = len(windows.rows)
    hits = [driver.arrive(RunRequest(conversation, GREEDY, "exact")) for conversation in shown]
    while not all(job.sequences[0].generated for job in hits):
        driver.step()
    assert len(windows.rows) - first > 3  # they took several steps
    aborted = decoding[:5]
    for job in aborted:
        driver.abort(job)
    launched = len(windows.rows)
    driver.finish()
    outputs = [driver.output(job) for job in (*decoding, hit, *hits)]
    assert {output.cache.images[0].match for output in outputs[32:]} == {"exact"}
    assert all(64 < output.cache.rows[0] <= 128 for output in outputs[32:])
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 5 + ["length"] * 36
    for job in decoding:
        delivered = windows.delivered[job.sequences[0]]
        assert max(after - before for before, after in itertools.pairwise(delivered)) <= 2
    for job in (*decoding, hit, *hits):
        [sequence] = job.sequences
        mine = [i for i, rows in enumerate(windows.rows) if sequence in rows]
        known, bringing = windows.ended[sequence]
        assert mine[-1] < known
        assert mine[-1] < launched if job in aborted else mine[-1] <= bringing + 1
    assert many.stats().in_use == 0


@pytest.mark.parametrize("seed", some_seeds(0, buckets=(1, 2), thorough=range(20)))
def test_who_has_ended_decodes_no_more(engine, pictures, monkeypatch, seed):
    """A stop string ends a row that the device knows nothing of: it is in the window in flight, and in no other."""
    renew(engine)
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, pictures, ["off", "exact"], 8, 60)
    with monkeypatch.context() as context:
        windows = Windows(engine, context)
        driver = Driver(engine)
        jobs = [driver.arrive(asked) for asked in requests]
        gone = {}
        for steps in itertools.count():
            job = jobs[rng.integers(len(jobs))]
            if rng.random() < 0.1 and steps > 3 and len(gone) < 3 and not job.has_ended:
                driver.abort(job)
                gone.setdefault(job, len(windows.rows))
            if not driver.step():
                break
    for job in jobs:
        driver.output(job)
        for sequence in job.sequences:
            mine = [i for i, rows in enumerate(windows.rows) if sequence in rows]
            known, bringing = windows.ended[sequence]
            assert all(i < known for i in mine)
            if bringing is not None:
                assert all(i <= bringing + 1 for i in mine)
            if job in gone and not engine_needed(sequence):
                assert all(i < gone[job] for i in mine)


def engine_needed(sequence):
    """Whether an aborted one may have gone on for others' sake."""
    return any(use.saved is not None for use in sequence.progress.images) or len(sequence.layout) >= PAGE


def test_who_lacks_one_thing_after_the_other_is_waited_for(engine, pictures, monkeypatch):
    """What may come next is found out right after it was asked for; only then the picture, which is slow."""
    renew(engine)
    held = dataclasses.replace(GREEDY, structured_outputs={"choice": ["left", "right"]})
    asked = RunRequest(user("See ", pictures[1], "?"), held, "exact")
    [first] = engine.chat(asked.conversation, held, use_tqdm=False)
    engine.cache.flush()
    engine.reset_prefix_cache()
    driver = Driver(engine)
    job = driver.arrive(asked)
    for record in engine.service.cache.store.tier.records():
        record.lose(Why.load_failed, spoiled=True)
    [sequence] = job.sequences
    may_go_on, decoded = Generation.may_go_on, ImageSource.decode
    looks = iter([False])

    def slow(self, *args):
        time.sleep(0.3)
        return decoded(self, *args)

    with monkeypatch.context() as context:
        context.setattr(
            Generation, "may_go_on", lambda one, *patience: next(looks, None) is None and may_go_on(one, 60)
        )
        context.setattr(ImageSource, "decode", slow)
        driver.finish()
    assert sequence.end.finish_reason == "stop"
    assert answers(driver.output(job)) == answers(first)


def test_an_engine_that_cannot_go_on_says_so(engine, pictures):
    """A record is linked that nobody claims or settles: the one who was to fill it never ran."""
    renew(engine)
    driver = Driver(engine)
    conversation = user("See ", pictures[0], "?")
    prompt = engine.service.renderer.from_conversation(conversation)
    [lost] = engine.service.preparation.identifier.identify([prompt])
    planned = engine.service.preparation.planner.plan(lost, ResolvedOptions(reuse=parse_policy("exact")))
    with pytest.raises(RuntimeError, match="the engine is stuck: 0 requests wait and 1 run"):
        engine.chat(conversation, GREEDY, use_tqdm=False)
    job = driver.arrive(RunRequest(conversation, GREEDY, "exact"))
    with pytest.raises(RuntimeError, match="the engine is stuck"):
        driver.finish()
    engine.service.engine.fail(RuntimeError("stuck"))
    assert job.has_ended
    engine.service.caller.end(job)
    planned.reservation.leave(failed=True)
    [output] = engine.chat(conversation, GREEDY, use_tqdm=False)
    assert output.cache.images[0].why.value == "unknown_image"
    assert engine.stats().in_use == 0


# Sampling, from a call's parameters to its outputs.

LETTERS = tuple(range(97, 123))  # a token is a byte
PLAIN = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
END_TOKENS = {256, 258}  # of the checkpoint
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5}


@pytest.fixture(scope="module")
def asking(pictures):
    return [user("Tell me about ", pictures[1], " in a word."), user("What is a word? Say one.")]


class Librarys:
    """transformers' logits of a conversation and an answer to it, one forward."""

    def __init__(self, model, llm):
        self.model, self.llm = model, llm

    def logits(self, conversation, answer=()):
        """Float32 [n, V] of the prompt's n tokens and the answer's, and the prompt's token ids."""
        torch = pytest.importorskip("torch")
        prompt = self.llm.service.renderer.from_conversation(conversation)
        processor = self.llm.service.preparation.processor
        patches = [processor.patches(image.decode()) for image in prompt.images]
        counts = [processor.num_tokens(p.grid) for p in patches]
        prompt_ids = self.llm.service.renderer.expander.expand(prompt.token_ids, counts)[0].tolist()
        image = self.model.config.image_token_id
        assert image not in answer  # the library would look for pixels
        ids = torch.tensor([[*prompt_ids, *answer]])
        inputs = {"mm_token_type_ids": (ids == image).int()}
        if patches:
            inputs["pixel_values"] = torch.tensor(np.concatenate([processor.pixel_values(p) for p in patches]))
            inputs["image_grid_thw"] = torch.tensor([p.grid for p in patches])
        self.model.model.rope_deltas = None
        with torch.no_grad():
            out = self.model(input_ids=ids, use_cache=False, **inputs)
        return out.logits[0].float().numpy(), prompt_ids


@pytest.fixture(scope="module")
def librarys(load_oracle, directory, many):
    return Librarys(load_oracle(directory), many)


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def ends(params):
    return set(params.stop_token_ids) | (set() if params.ignore_eos else END_TOKENS)


def processed(logits, params, prompt, answer):
    """What vLLM's parameters make of the logits of the token behind `answer`."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[~np.isin(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for word in params.bad_words:
        *begun, last = word.encode()
        if list(answer[len(answer) - len(begun) :]) == begun:
            x[last] = -np.inf
    if len(answer) < params.min_tokens:
        x[list(ends(params))] = -np.inf
    for token in range(len(x)):
        count = list(answer).count(token)
        if count or token in prompt:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return x


def spelled(tokens):
    return bytes(tokens).decode()


def assert_is_greedy(llm, librarys, conversation, params, output):
    """Token by token: each is the best, and the answer ends where it must and nowhere else."""
    [answer] = output.outputs
    params = params.resolve({})
    tokens = list(answer.token_ids)
    logits, prompt = librarys.logits(conversation, tokens)
    assert prompt == output.prompt_token_ids.tolist()
    most = params.max_tokens or llm.max_model_len - len(prompt)
    for i, token in enumerate(tokens):
        assert token == processed(logits[len(prompt) - 1 + i], params, prompt, tokens[:i]).argmax(), i
        count = i + 1
        reason = stop = None
        if token in ends(params) and count >= params.min_tokens:
            reason, stop = "stop", token if token in params.stop_token_ids else None
        elif params.stop and count >= params.min_tokens and spelled(tokens[:count]).endswith(params.stop):
            reason, stop = "stop", next(s for s in params.stop if spelled(tokens[:count]).endswith(s))
        elif count == most:
            reason = "length"
        assert (reason is not None) == (count == len(tokens))
    assert (answer.finish_reason, answer.stop_reason) == (reason, stop)
    if params.stop and reason == "stop":
        text = spelled(tokens)
        cut = len(text) - (0 if params.include_stop_str_in_output else len(stop))
        assert answer.text == text[:cut]
    if params.logprobs is not None:
        told = log_softmax(logits[len(prompt) - 1 : -1])
        assert_logprobs(llm, told, tokens, answer.logprobs, params.logprobs)
        np.testing.assert_allclose(answer.cumulative_logprob, told[np.arange(len(tokens)), tokens].sum(), atol=1e-3)


def assert_logprobs(llm, expected, tokens, logprobs, count):
    """Log-probabilities of tokens are those expected, [n, V]."""
    assert len(logprobs) == len(tokens) == len(expected)
    for row, token, one in zip(expected, tokens, logprobs, strict=True):
        assert one.token == token
        assert one.rank == 1 + (row > row[token] + 1e-6).sum()
        np.testing.assert_allclose(one.chosen, row[token], atol=5e-5)
        best = np.argsort(-row, kind="stable")[:count]
        assert list(one.top) == best.tolist()
        np.testing.assert_allclose(list(one.top.values()), row[best], atol=5e-5)
        texts = {t: llm.service.renderer.tokenizer.decode([t]) for t in (token, *best.tolist())}
        spelt = {t: bytes([t]) if t < 256 else text.encode() for t, text in texts.items()}  # as tests make vocabularies
        assert one.token_bytes == spelt
        assert one.texts == {t: f"bytes:\\x{t:02x}" if "\ufffd" in text else text for t, text in texts.items()}


@pytest.fixture(scope="module")
def greedy_cases(many, asking):
    """Parameters that matter for these very answers."""

    def told(i, **changes):
        return many.chat(asking[i], SamplingParams(**PLAIN | changes), use_tqdm=False)[0].outputs[0].token_ids

    plain = [told(i) for i in range(2)]
    letters = [spelled(told(i, allowed_token_ids=LETTERS)) for i in range(2)]
    varied = {"allowed_token_ids": LETTERS, **PENALTIES}
    mixed = [spelled(told(i, **varied)) for i in range(2)]
    cases = []
    for i in range(2):
        late = plain[i][9]
        cases += [(i, SamplingParams(**PLAIN | changes)) for changes in [
            {},
            {"presence_penalty": 1.5},
            {"presence_penalty": -1.5, "logprobs": 0},
            {"frequency_penalty": 1.0},
            {"repetition_penalty": 1.5},
            PENALTIES | {"logit_bias": {plain[i][0]: -5.0, 100: 3.0, 101: 2.5}, "logprobs": 5},
            {"min_p": 0.3, "top_k": -1, "top_p": 0.5, "logprobs": 20},
            {"allowed_token_ids": LETTERS},
            {"allowed_token_ids": LETTERS, "bad_words": [letters[i][:1], letters[i][3:5]]},
            varied | {"bad_words": [mixed[i][2:4], mixed[i][5:8], mixed[i][9]]},
            varied | {"stop": [mixed[i][6:8], "never there"]},
            varied | {"stop": mixed[i][6:8], "include_stop_str_in_output": True},
            varied | {"stop": [mixed[i][1], mixed[i][7:9]], "min_tokens": 12},
            varied | {"stop_token_ids": [ord(mixed[i][5])]},
            {"stop_token_ids": [late, 5], "min_tokens": 8},
            {"stop_token_ids": [plain[i][0]], "min_tokens": 16, "presence_penalty": 2.0},
            {"ignore_eos": False, "logit_bias": {258: 100.0}, "min_tokens": 5},
            {"ignore_eos": False, "logit_bias": {256: 100.0}},
            {"prompt_logprobs": 2, "logprobs": 1},
        ]]  # fmt: skip
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_greedy_answers_are_the_reference_loops(many, librarys, asking, greedy_cases, half):
    cases = greedy_cases[half::2]  # of every second one, the image or the text alone
    conversations, params = [asking[i] for i, _ in cases], [own for _, own in cases]
    together = many.chat(conversations, params, use_tqdm=False)
    alone = [many.chat(c, own, use_tqdm=False)[0] for c, own in zip(conversations, params, strict=True)]
    assert [answers(output) for output in together] == [answers(output) for output in alone]
    for conversation, own, output, one in zip(conversations, params, together, alone, strict=True):
        assert_is_greedy(many, librarys, conversation, own, output)
        assert_same_logprobs(output, one)
    reasons = collections.Counter(output.outputs[0].finish_reason for output in together)
    assert min(reasons["stop"], reasons["length"]) >= 6


@pytest.mark.slow
def test_answers_without_a_limit_fill_the_context(many, librarys):
    conversation = user(STARTS[1] * 2 + "Why?")
    for changes in ({}, PENALTIES):
        params = SamplingParams(temperature=0, max_tokens=None, top_k=-1, ignore_eos=True, **changes)
        [output] = many.chat(conversation, params, use_tqdm=False)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == many.max_model_len
        assert_is_greedy(many, librarys, conversation, params, output)


@pytest.mark.slow
def test_special_tokens_are_in_the_text_if_they_are_wanted(many, asking):
    biased = {"allowed_token_ids": [260, 261, 97, 98], "frequency_penalty": 2.0, "logit_bias": {260: 3.0}}
    texts = {}
    for skip in (True, False):
        [output] = many.chat(
            asking[1], SamplingParams(**PLAIN | biased, skip_special_tokens=skip), use_tqdm=False
        )  # fmt: skip
        [answer] = output.outputs
        texts[skip] = answer.text
    spell = {260: "<|vision_end|>", 261: "<|vision_pad|>", 97: "a", 98: "b"}
    assert texts[False] == "".join(spell[token] for token in answer.token_ids)
    assert texts[True] == "".join(spell[token] for token in answer.token_ids if token < 256)
    assert {260, 97} <= set(answer.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("is_again", [False, True])
def test_prompt_logprobs_are_the_librarys(short_steps, librarys, pictures, is_again):
    """Of prompts that take one step or several, also of what a repeat finds in pages or in records."""
    if not is_again:
        renew(short_steps)
    conversations = [
        user("Short."), user(STARTS[1] + "Is it so?"), user("See ", pictures[3], STARTS[1], pictures[0], "?"),
    ]  # fmt: skip
    assert SHORT_STEPS.max_rows < len(STARTS[1])
    params = [dataclasses.replace(GREEDY, prompt_logprobs=count) for count in (0, 4, 20)]
    for output, conversation, own in zip(
        short_steps.chat(conversations, params, use_tqdm=False), conversations, params, strict=True
    ):
        logits, prompt = librarys.logits(conversation)
        assert output.prompt_logprobs[0] is None
        count = own.prompt_logprobs
        assert_logprobs(short_steps, log_softmax(logits[:-1]), prompt[1:], output.prompt_logprobs[1:], count)
        assert_is_greedy(short_steps, librarys, conversation, own, output)


SAMPLED = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2},
    {"temperature": 1.3, "top_k": 5, "seed": 3},
    {"temperature": 1.0, "top_k": -1, "min_p": 0.2, "seed": 4, "logprobs": 2},
    {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 0},
    {"temperature": 1.0, "seed": 6, **PENALTIES},
    {"temperature": 1.5, "seed": 7, "allowed_token_ids": LETTERS, "bad_words": ["e", "th", "ing"]},
    {"temperature": 1.0, "seed": 8, "allowed_token_ids": LETTERS, "stop": ["a", "xy"], "min_tokens": 3},
    {"temperature": 1.0, "seed": 9, "ignore_eos": False, "logit_bias": {258: 3.0}, "min_tokens": 4},
    {"temperature": 2.0, "seed": 10, "stop_token_ids": list(range(40)), "min_tokens": 2},
]


@pytest.fixture(scope="module")
def sampled(many, asking):
    """Each alone."""
    params = [SamplingParams(**PLAIN | changes) for changes in SAMPLED]
    return params, [many.chat(asking[i % 2], own, use_tqdm=False)[0] for i, own in enumerate(params)]


@pytest.mark.slow
def test_sampled_answers_are_the_same_in_a_batch(many, librarys, asking, sampled, greedy_cases):
    params, alone = sampled
    others = [own for _, own in greedy_cases[:12]]
    conversations = [asking[i % 2] for i in range(len(params))] + [asking[0]] * len(others)
    together = many.chat(conversations, params + others, use_tqdm=False)[: len(params)]
    assert [answers(output) for output in together] == [answers(output) for output in alone]
    for i, (own, output) in enumerate(zip(params, alone, strict=True)):
        own = own.resolve({})
        assert len({answer.token_ids for answer in output.outputs}) == own.n
        for answer in output.outputs:
            if 262 in answer.token_ids:
                continue
            logits, prompt = librarys.logits(asking[i % 2], answer.token_ids)
            for k, token in enumerate(answer.token_ids):
                x = processed(logits[len(prompt) - 1 + k], own, prompt, answer.token_ids[:k])
                p = np.exp(log_softmax(x / own.temperature))
                assert p[token] > 0
                assert p[token] >= own.min_p * p.max() * (1 - 1e-4)
                assert not own.top_k or (p > p[token] * (1 + 1e-4)).sum() < own.top_k
                assert p[p > p[token] * (1 + 1e-4)].sum() < own.top_p
            if own.logprobs is not None:
                told = log_softmax(logits[len(prompt) - 1 : -1])
                assert_logprobs(many, told, answer.token_ids, answer.logprobs, own.logprobs)


@pytest.mark.parametrize("window", some_seeds(buckets=(3,), thorough=(1, 20)))
def test_windows_of_any_length_give_the_same_tokens(directory, asking, sampled, greedy_cases, many, window):
    params, alone = sampled
    cases = greedy_cases[:19:2]
    expected = [answers(output) for output in alone]
    expected += [answers(many.chat(asking[i], own, use_tqdm=False)[0]) for i, own in cases]
    buckets = BucketSizes(rows=(128,), patches=(256,), sequences=(4,), window=window)
    with open_llm(directory, buckets=buckets) as llm:
        conversations = [asking[i % 2] for i in range(len(params))] + [asking[i] for i, _ in cases]
        outputs = llm.chat(conversations, params + [own for _, own in cases], use_tqdm=False)
    assert [answers(output) for output in outputs] == expected
