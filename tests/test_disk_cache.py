"""Records on disk, with a model: what comes from there is what was computed, and no fault of it changes an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pathlib
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cache.records import verified_read
from tests.helper import SIZES, assert_nothing_left, some_cases, user
from vlcache_jax import LLM, BucketSizes, CacheConfig, SamplingParams
from vlcache_jax.cache.record import DamagedError, Tier, TierError, checksum
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.tiers.record_file import file_name, make_header, read_header
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.outputs import Why

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def open_llm(path, directory, sizes=SIZES, **cache):
    return LLM(path, enable_prefix_caching=False, use_tqdm=False, cache=CacheConfig(disk=directory, **cache), **sizes)


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    with open_llm(checkpoints("qwen3_vl"), tmp_path_factory.mktemp("records")) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    empty(engine)
    return engine


def empty(llm):
    llm.cache.flush()
    llm.reset_mm_cache()
    tier = channel_of(llm).tier
    tier = getattr(tier, "tier", tier)
    for line in tier.lines():
        tier.delete(line.name)


def channel_of(llm):
    [channel] = llm.service.cache.store.channels
    return channel


def disk(llm):
    """What was counted of the disk."""
    return llm.cache.stats().tiers["disk"]


def forget(llm):
    """As after a restart: nothing is in memory."""
    llm.cache.flush()
    llm.reset_mm_cache()


def chat(llm, *conversations, **options):
    return llm.chat(list(conversations), PARAMS, use_tqdm=False, **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def where(output):
    return [(image.kv, image.encoder) for image in output.cache.images]


def files(llm):
    return sorted(pathlib.Path(channel_of(llm).tier.directory).glob("??/*.safetensors"))


@pytest.fixture
def picture(textured_image):
    return textured_image(60, 90, 1)


@pytest.fixture
def other(textured_image):
    return textured_image(90, 60, 2)


def test_what_was_computed_outlives_the_process(checkpoints, tmp_path, picture, other, monkeypatch):
    conversation = user("See ", picture, " and ", other, " what?")
    with open_llm(checkpoints("qwen3_vl"), tmp_path) as llm:
        cold = chat(llm, conversation, reuse="off")
        assert where(cold[0]) == [("none", "computed")] * 2
        assert tokens(chat(llm, conversation)) == tokens(cold)
    with open_llm(checkpoints("qwen3_vl"), tmp_path) as llm:
        monkeypatch.setattr(llm.service.device.runner, "encode", lambda *_: pytest.fail("encoded"))
        monkeypatch.setattr(ImageProcessor, "patches", lambda *_: pytest.fail("cut"))  # the pixels are hashed alone
        [output] = chat(llm, conversation)
        assert tokens([output]) == tokens(cold)
        assert where(output) == [("disk", "none")] * 2
        assert output.cache.exact
        [first, _] = output.cache.images
        record = next(r for r in llm.service.cache.store.records(first.key) if r.meta.context is not None)
        read = record.meta.nbytes // record.meta.padded * record.meta.tokens
        assert first.bytes_moved == record.meta.nbytes + read
        counted = disk(llm)
        assert (counted.loaded, counted.stored, counted.failed, counted.records) == (2, 0, 0, 4)
        assert counted.bytes_in == 2 * read
        assert where(chat(llm, conversation)[0]) == [("host", "none")] * 2
        [output] = chat(llm, user("Elsewhere ", picture, "?"))  # encoder rows are right anywhere
        assert where(output) == [("none", "disk")]


@pytest.mark.parametrize("reuse", ["shift-0.3", *(pytest.param(r, marks=pytest.mark.slow) for r in ("0.3", "full"))])
def test_records_from_disk_give_the_answers_of_those_from_memory(llm, picture, reuse):
    chat(llm, user("See ", picture, " what?"))
    elsewhere = user("Elsewhere, what is ", picture, "?")
    from_host = chat(llm, elsewhere, reuse=reuse)
    assert where(from_host[0])[0][0] == "host"
    forget(llm)
    from_disk = chat(llm, elsewhere, reuse=reuse)
    assert where(from_disk[0])[0][0] == "disk"
    assert tokens(from_disk) == tokens(from_host)
    assert from_disk[0].cache.rows == from_host[0].cache.rows
    assert from_disk[0].cache.images[0].match == "approximate"


def test_in_another_context_exact_reuse_takes_the_encoder_rows_alone(llm, picture):
    chat(llm, user("See ", picture, " what?"))
    cold = chat(llm, user("Elsewhere, what is ", picture, "?"), reuse="off")
    forget(llm)
    before = disk(llm)
    output = chat(llm, user("Elsewhere, what is ", picture, "?"))
    assert tokens(output) == tokens(cold)
    assert where(output[0]) == [("none", "disk")]
    assert disk(llm).failed == before.failed


def test_a_batch_reports_what_its_requests_report_one_by_one(llm, picture, other):
    conversations = [user("See ", picture, " what?"), user("And ", other, "?"), user("See ", picture, " where?")]
    chat(llm, *conversations)
    forget(llm)
    one_by_one = [chat(llm, conversation)[0] for conversation in conversations]
    forget(llm)
    together = chat(llm, *conversations)
    assert tokens(together) == tokens(one_by_one)
    assert [where(output) for output in together] == [where(output) for output in one_by_one]
    assert where(together[0])[0][0] == "disk"
    assert where(together[2])[0][0] == "host"


@pytest.mark.slow
def test_another_ladder_reads_the_same_files(checkpoints, tmp_path, picture):
    conversation = user("See ", picture, " what?")
    with open_llm(checkpoints("qwen3_vl"), tmp_path) as llm:
        cold = chat(llm, conversation)
        sizes = llm.service.device.runner.token_buckets
    buckets = BucketSizes(rows=(32, 96), patches=(32, 96, 256), sequences=(4,))
    with open_llm(checkpoints("qwen3_vl"), tmp_path, SIZES | {"buckets": buckets}) as llm:
        assert llm.service.device.runner.token_buckets != sizes
        output = chat(llm, conversation)
        assert where(output[0]) == [("disk", "none")]
        assert tokens(output) == tokens(cold)


@pytest.mark.parametrize("codec", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_coded_records(checkpoints, tmp_path, picture, codec):
    elsewhere = user("Elsewhere, what is ", picture, "?")
    with open_llm(checkpoints("qwen3_vl"), tmp_path, codec=codec) as llm:
        chat(llm, user("See ", picture, " what?"))
        from_host = chat(llm, elsewhere, reuse="0.3")
        forget(llm)
        from_disk = chat(llm, elsewhere, reuse="0.3")
        assert where(from_disk[0])[0][0] == "disk"
        assert tokens(from_disk) == tokens(from_host)
    with open_llm(checkpoints("qwen3_vl"), tmp_path) as llm:  # kept as they are, they are other records
        assert where(chat(llm, elsewhere, reuse="0.3")[0])[0] == ("none", "computed")


def test_salts_share_nothing(llm, picture):
    conversation = user("See ", picture, " what?")
    chat(llm, conversation, cache_salt="me")
    forget(llm)
    assert where(chat(llm, conversation, cache_salt="you")[0]) == [("none", "computed")]
    assert where(chat(llm, conversation)[0]) == [("none", "computed")]
    assert where(chat(llm, conversation, cache_salt="me")[0]) == [("disk", "none")]


def test_what_host_memory_has_no_room_for_comes_from_disk(checkpoints, tmp_path, textured_image):
    pictures = [textured_image(60, 90, seed) for seed in range(4)]
    conversations = [user("See ", picture, " what?") for picture in pictures]
    with open_llm(checkpoints("qwen3_vl"), tmp_path, host_bytes="100KB") as llm:
        cold = [chat(llm, conversation, reuse="off")[0] for conversation in conversations]
        places = []
        for _ in range(2):
            for conversation, expected in zip(conversations, cold, strict=True):
                [output] = chat(llm, conversation)
                assert tokens([output]) == tokens([expected])
                places += where(output)
                llm.cache.flush()
        assert ("disk", "none") in places[len(pictures) :]
        stats = llm.cache.stats()
        assert stats.evicted > 0
        assert stats.bytes <= stats.capacity


def test_who_evicts_an_image_deletes_its_files(llm, picture, other):
    chat(llm, user("See ", picture, " and ", other))
    llm.cache.flush()
    assert len(files(llm)) == 4
    assert llm.cache.evict(picture) == 2
    assert len(files(llm)) == 2
    forget(llm)
    assert llm.cache.evict(other) == 2  # of the disk alone
    assert files(llm) == []
    assert where(chat(llm, user("See ", picture, " and ", other))[0]) == [("none", "computed")] * 2


def test_an_entry_that_nobody_knows_deletes_nothing(llm, picture):
    [output] = chat(llm, user("See ", picture, " what?"), cache_salt="me")
    llm.cache.flush()
    for entry in ("0" * 64, output.cache.images[0].key):  # the second one is another salt's
        assert llm.cache.evict(entry) == 0
    assert len(files(llm)) == 2


def test_an_entry_key_is_known_after_a_restart(llm, picture):
    [output] = chat(llm, user("See ", picture, " what?"), cache_salt="me")
    forget(llm)
    entry = output.cache.images[0].key
    assert llm.cache.evict(entry) == 0
    assert llm.cache.evict(entry, cache_salt="me") == 2
    assert files(llm) == []


def test_what_is_pinned_stays_on_disk(llm, picture):
    chat(llm, user("See ", picture, " what?"))
    assert llm.cache.pin(picture) == 2
    assert llm.cache.evict(picture) == 0
    assert len(files(llm)) == 2
    llm.cache.unpin(picture)


def test_lookup_brings_records_in(llm, picture):
    chat(llm, user("See ", picture, " what?"))
    forget(llm)
    with llm.cache.lookup(picture) as found:
        assert found.kv.is_ready
        assert found.encoder.is_ready


def flip_last_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": flip_last_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("which", ["encoder", "kv"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_changes_no_answer(llm, picture, how, which, caplog):
    conversation, elsewhere = user("See ", picture, " what?"), user("Elsewhere, what is ", picture, "?")
    cold = chat(llm, conversation, elsewhere, reuse="off")
    chat(llm, conversation)
    forget(llm)
    before = disk(llm)
    for path in files(llm):
        if path.name.count(".") == (2 if which == "kv" else 1):
            DAMAGES[how](path)
    asked = conversation if which == "kv" else elsewhere
    with caplog.at_level("CRITICAL"):
        output = chat(llm, asked)
    assert tokens(output) == tokens(cold[:1] if which == "kv" else cold[1:])
    [image] = output[0].cache.images
    if which == "kv":
        assert (image.kv, image.why) == ("none", Why.load_failed if how == "gone" else Why.corrupt)
    else:
        assert image.encoder == "computed"
    llm.cache.flush()
    counted = disk(llm)
    assert (counted.damaged - before.damaged, counted.gone - before.gone) == ((0, 1) if how == "gone" else (1, 0))
    assert tokens(chat(llm, conversation, elsewhere)) == tokens(cold)
    assert_nothing_left(llm)


class Faulty(Tier):
    """A tier whose `number`-th operation goes wrong.

    Args:
      fault: an error that it raises (DamagedError where data are lent: damages them), or "slow", "cut" or "mixed":
        it takes longer than anybody waits, gives no further parts, or gives them in another order.
    """

    is_local = True

    def __init__(self, tier, number, fault):
        self.tier, self.number, self.fault, self.done = tier, number, fault, []
        self.label = tier.label

    def _is_turn(self, name):
        self.done.append(name)
        return len(self.done) == self.number

    def _do(self, name, *args):
        if self._is_turn(name):
            if isinstance(self.fault, Exception):
                raise self.fault
            time.sleep(SLOW if self.fault == "slow" else 0)
        return getattr(self.tier, name)(*args)

    def find(self, entry):
        return self._do("find", entry)

    def write(self, meta, parts):
        return self._do("write", meta, parts)

    def delete(self, name):
        return self._do("delete", name)

    def touch(self, names):
        return self.tier.touch(names)

    def counts(self):
        return self.tier.counts()

    def read(self, meta, parts, place):
        if self._is_turn("read"):
            if isinstance(self.fault, Exception):
                raise self.fault
            if self.fault == "mixed":
                parts = list(reversed(list(parts)))
            time.sleep(SLOW if self.fault == "slow" else 0)
        for part, array in self.tier.read(meta, parts, place):
            if self._is_turn("part"):
                if self.fault == "cut":
                    return
                if isinstance(self.fault, DamagedError):
                    array[0].reshape(-1)[0] += 1
                elif isinstance(self.fault, Exception):
                    raise self.fault
                time.sleep(SLOW if self.fault == "slow" else 0)
            yield part, array


SLOW, PATIENCE = 0.6, 0.3  # seconds
COUNTER = {"slow": "late", "cut": "failed", "mixed": None}


def scenario(llm, picture, other):
    """Answers that touch every operation of a tier, from an empty one."""
    empty(llm)
    outputs = chat(llm, user("See ", picture, " what?"), user("And ", other, "?"))
    forget(llm)
    outputs += chat(llm, user("See ", picture, " what?"))
    forget(llm)
    outputs += chat(llm, user("Elsewhere ", other, "?"))
    llm.cache.evict(other)
    outputs += chat(llm, user("And ", other, "?"))
    llm.cache.flush()
    return outputs


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(TierError("the cable is out"), id="fails"),
        pytest.param(DamagedError("it is damaged"), id="damages", marks=pytest.mark.slow),
        pytest.param(RuntimeError("a bug"), id="bug", marks=pytest.mark.slow),
        *(pytest.param(fault, marks=pytest.mark.slow) for fault in COUNTER),
    ],
)
def test_no_fault_changes_an_answer(llm, picture, other, fault, caplog, monkeypatch):
    channel = channel_of(llm)
    cold = tokens(scenario(llm, picture, other))
    recorded = Faulty(channel.tier, 0, fault)
    with monkeypatch.context() as patch, caplog.at_level("CRITICAL"):
        patch.setattr(channel, "tier", recorded)
        assert tokens(scenario(llm, picture, other)) == cold
        sites = recorded.done
        assert len(sites) >= 30
        assert set(sites) == {"find", "read", "part", "write", "delete"}
    reading = ("read", "part")  # the others cannot be cut or mixed, and nobody waits for them
    numbers = [n for n, site in enumerate(sites, 1) if isinstance(fault, Exception) or site in reading]
    for number in numbers:
        with monkeypatch.context() as patch, caplog.at_level("CRITICAL"):
            patch.setattr(channel, "tier", faulty := Faulty(channel.tier, number, fault))
            if fault == "slow":
                patch.setitem(vars(llm.service.cache.store.config), "timeout", PATIENCE)
            before = disk(llm)
            found = tokens(scenario(llm, picture, other))
            llm.service.cache.store.flush()
            site = faulty.done[number - 1]
            assert found == cold, f"operation {number}, {site}"
            rose = {name for name in ("failed", "damaged", "late") if getattr(disk(llm), name) > getattr(before, name)}
            assert rose == expected(fault, site), f"operation {number}, {site}"
            assert_nothing_left(llm)


def expected(fault, site):
    """The counters that a fault of an operation raises."""
    if isinstance(fault, DamagedError):
        return {"damaged"}
    if isinstance(fault, Exception):
        return {"failed"}
    if fault == "mixed" or (fault, site) == ("cut", "read"):
        return set()
    return {COUNTER[fault]}


# A disk that is full, and engines that are killed.


def noise(number):
    return np.random.default_rng(number).integers(0, 256, (60, 90, 3), np.uint8)


ABOUT_NOISE = [user("See ", noise(number), " what?") for number in range(6)]


class Limited:
    """A disk that has room for nothing more, as far as a tier can tell that is open there."""

    def __init__(self, tier, monkeypatch):
        self.tier, self.is_full = tier, False
        allocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", lambda *args: self.fail() if self.is_full else allocate(*args))

    def fail(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    def take(self):
        self.is_full = True
        self.tier._index._index.execute("PRAGMA max_page_count = 1")  # the index grows no further either

    def give(self):
        self.is_full = False
        self.tier._index._index.execute(f"PRAGMA max_page_count = {2**30}")


class Filled:
    """A file system of its own that is filled."""

    def __init__(self, tier, monkeypatch):
        self.tier, self.filler = tier, tier.directory.parent / "filler"

    def take(self):
        with open(self.filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def give(self):
        self.filler.unlink()


MOUNT = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs"]


@pytest.fixture(params=[Limited, pytest.param(Filled, marks=pytest.mark.slow)])
def room(request, tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        if request.param is Filled:
            if subprocess.run([*MOUNT, tmp_path], capture_output=True).returncode:
                pytest.skip("nothing can be mounted here")
            stack.callback(subprocess.run, ["umount", tmp_path], check=True)
        tier = DiskTier(tmp_path, 10**9)
        stack.callback(tier.close)
        yield request.param(tier, monkeypatch)


def test_a_full_disk_changes_no_answer(llm, room, monkeypatch, caplog):
    """What it has no room for is counted; when there is some, it is used again."""
    channel, now = channel_of(llm), [0.0]
    cold = tokens(chat(llm, *ABOUT_NOISE, reuse="off"))
    monkeypatch.setattr(channel, "tier", room.tier)
    monkeypatch.setattr(channel._breaker, "_clock", lambda: now[0])

    def ask(conversations=ABOUT_NOISE):
        """One by one, as after a restart; where each was found."""
        found = []
        for conversation, expected in zip(conversations, cold, strict=False):
            forget(llm)
            now[0] += 120  # a store that has failed is left alone no longer
            [output] = chat(llm, conversation)
            assert output.outputs[0].token_ids == expected
            found += where(output)
        llm.cache.flush()
        return found

    before = disk(llm)
    assert ask(ABOUT_NOISE[:2]) == [("none", "computed")] * 2
    room.take()
    with caplog.at_level("CRITICAL"):
        for _ in range(2):
            assert ask() == [("disk", "none")] * 2 + [("none", "computed")] * 4
    full = disk(llm)
    assert full.stored - before.stored == 4
    assert full.failed - before.failed >= 16
    assert not list(room.tier.directory.rglob("*.part"))
    room.give()
    assert ask() == [("disk", "none")] * 2 + [("none", "computed")] * 4
    assert ask() == [("disk", "none")] * 6
    assert (disk(llm).stored - full.stored, disk(llm).failed, disk(llm).damaged) == (8, full.failed, before.damaged)
    assert_nothing_left(llm)


SERVING = """
import itertools, pathlib, sys
sys.path.insert(0, sys.argv[3])
from tests.test_disk_cache import ABOUT_NOISE, PARAMS, open_llm
with open_llm(pathlib.Path(sys.argv[1]), sys.argv[2]) as llm:
    for number in itertools.cycle(range(len(ABOUT_NOISE))):
        llm.reset_mm_cache()
        [output] = llm.chat(ABOUT_NOISE[number], PARAMS, use_tqdm=False)
        print(number, *output.outputs[0].token_ids, flush=True)
"""


@pytest.mark.parametrize("kills", some_cases((1, 5), (1, 3, 7, 2)))
def test_an_engine_that_is_killed_while_it_serves(llm, checkpoints, tmp_path, request, monkeypatch, kills):
    """At any point: what it said was right, what it kept is whole, and the next one goes on with it."""
    rng = random.Random(0)
    cold = tokens(chat(llm, *ABOUT_NOISE, reuse="off"))
    command = [sys.executable, "-P", "-c", SERVING, checkpoints("qwen3_vl"), tmp_path, request.config.rootpath]
    for answers in kills:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            said = [process.stdout.readline() for _ in range(answers)]
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            said += process.stdout.readlines()
        for line in filter(lambda line: line.endswith("\n"), said):
            number, *answer = map(int, line.split())
            assert tuple(answer) == cold[number]
        tier = DiskTier(tmp_path, 10**9)
        assert not list(tmp_path.rglob("*.part"))
        assert len(list(tmp_path.rglob("*.writer"))) == 1  # our own
        for line in tier.lines():
            [meta] = [one.meta for one in tier.find(line.name.split("/")[1]) if one.meta.name == line.name]
            verified_read(tier, meta)
        tier.close()
    tier = DiskTier(tmp_path, 10**9)
    monkeypatch.setattr(channel_of(llm), "tier", tier)
    forget(llm)
    before = disk(llm)
    outputs = chat(llm, *ABOUT_NOISE)
    assert tokens(outputs) == cold
    assert ("disk", "none") in [place for output in outputs for place in where(output)]
    assert (disk(llm).damaged, disk(llm).failed) == (before.damaged, before.failed)
    llm.cache.flush()
    monkeypatch.undo()
    tier.close()


# Records that say of themselves what this engine would not write.


def cut(count):
    """Another number of tokens, and as many rows."""

    def change(meta, data):
        axis = 1 if meta.context is None else 2
        rows = np.take(data, np.arange(meta.tokens + count) % meta.tokens, axis)
        return dataclasses.replace(meta, tokens=meta.tokens + count, shape=rows.shape), rows

    return change


def first_layers(meta, data):
    """Half the layers, or all but one of the vision tower's outputs."""
    data = data[: len(data) // 2 or 1]
    return dataclasses.replace(meta, shape=data.shape), data


def more_layers(meta, data):
    data = np.concatenate([data, data[:1]])
    return dataclasses.replace(meta, shape=data.shape), data


def narrow(meta, data):
    data = np.ascontiguousarray(data[..., : data.shape[-1] // 2])
    return dataclasses.replace(meta, shape=data.shape), data


def half_the_heads(meta, data):
    if meta.context is None:
        return narrow(meta, data)
    data = np.ascontiguousarray(data[..., : data.shape[-2] // 2, :])
    return dataclasses.replace(meta, shape=data.shape), data


def as_type(name):
    return lambda meta, data: (dataclasses.replace(meta, dtype=name), data.astype(name))


def saying(**more):
    return lambda meta, data: (dataclasses.replace(meta, **more), data)


def swapped(meta, data):
    time, height, width = meta.grid
    return dataclasses.replace(meta, grid=(time, width, height)), data


def vast(meta, data):
    """A header that says that there are 10^9 tokens, of an image that is as large."""
    axis = 1 if meta.context is None else 2
    shape = (*meta.shape[:axis], 10**9, *meta.shape[axis + 1 :])
    return dataclasses.replace(meta, tokens=10**9, shape=shape, grid=(1, 2 * 10**5, 2 * 10**4)), None


CHANGES = {
    "bfloat16": as_type("bfloat16"), "float16": as_type("float16"), "fewer tokens": cut(-1), "more tokens": cut(3),
    "fewer layers": first_layers, "more layers": more_layers, "fewer heads": half_the_heads, "narrow heads": narrow,
    "another model": saying(model="0" * 64), "no model": saying(model=""), "another owner": saying(owner="1" * 64),
    "another codec": saying(codec="int4"), "another grid": swapped, "10^9 tokens": vast,
}  # fmt: skip


def rewrite(tier, change):
    """Makes every record of a tier another one, whose header and checksums are right; returns their names."""
    lines = tier.lines()
    for line in lines:
        path = tier.directory / file_name(line.name)
        content = path.read_bytes()
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        meta = read_header(header)
        data = np.frombuffer(content[len(header) :], meta.dtype).reshape(meta.shape)
        meta, data = change(meta, data)
        parts = [] if data is None else [(part,) for part in data]
        checksums = tuple(checksum(meta, part) for part in parts) or meta.checksums
        meta = dataclasses.replace(meta, checksums=checksums)
        path.write_bytes(make_header(meta) + b"".join(part.tobytes() for (part,) in parts))
        with tier._index.changing():
            tier._index.enter(meta, time.time())
    return {line.name for line in lines}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_that_is_not_what_this_engine_writes_is_damaged(llm, textured_image, change, monkeypatch):
    """It is never read, its image is computed, and requests beside it answer as always."""
    shows, others = user(textured_image(60, 90, 1), "what?"), [user(textured_image(90, 60, i), "?") for i in (2, 3)]
    cold = tokens(chat(llm, shows, *others, reuse="off"))
    chat(llm, shows)
    forget(llm)
    tier, before, stored = channel_of(llm).tier, disk(llm).damaged, llm.cache.stats().corrupt
    changed = rewrite(tier, CHANGES[change])
    with monkeypatch.context() as patches:
        patches.setattr(DiskTier, "read", lambda *given: pytest.fail("read"))
        outputs = chat(llm, others[0], shows, others[1])
    assert tokens(outputs) == [cold[1], cold[0], cold[2]]
    assert {image.kv for output in outputs for image in output.cache.images} == {"none"}
    assert outputs[1].cache.images[0].why is Why.corrupt
    llm.cache.flush()
    assert len(changed) == 2
    assert (disk(llm).damaged - before, llm.cache.stats().corrupt - stored) == (2, 2)
    # What was computed stands in their place.
    forget(llm)
    assert tokens(chat(llm, shows)) == cold[:1]
    assert disk(llm).damaged - before == 2
    assert changed < {line.name for line in tier.lines()}
    assert_nothing_left(llm)
