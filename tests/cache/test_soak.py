"""Many threads of two processes on one directory, for a while: nothing blocks, nothing leaks, nothing wrong is read."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter

import numpy as np
import pytest

from tests.cache.records import GRID, key
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import owner_key
from vlcache_jax.cache.record import Donors, Meta, Record, blocks
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.tiers.disk import DiskTier

SECONDS = float(os.environ.get("VLCACHE_SOAK", "20"))
PROCESSES, THREADS = 2, 8
PATIENCE = 60.0  # seconds that a thread may take to end
MEMORY, DISK = 40_000_000, 60_000_000  # bytes; all records take 170 MB
# Beside the budget a process holds what lost its place while it is read or written (`left_bytes`, which is bounded by
# the requests in flight; what is seen of it is a sample), what threads fill, stacks, SQLite's pages, and what the heap
# does not give back: 81 to 93 MB were measured without the records.
ALLOWANCE = 110_000_000
IMAGES, CONTEXTS = 60, (key(7), key(8), key(9))
OWNER = owner_key("me")


def meta_of(number: int, context: str | None) -> Meta:
    tokens = 64 * (1 + number % 8)
    shape = (1, tokens, 256) if context is None else (4, 2, tokens, 2, 64)
    return Meta(key(number), OWNER, context, True, GRID, tokens, "float32", shape, codec="float32")


def fill(record: Record) -> None:
    """What computing gives: a function of the name."""
    record.data[:] = np.random.default_rng(zlib.crc32(record.meta.name.encode())).normal(size=record.meta.shape[1:])


def is_right(record: Record) -> bool:
    expected = Record(record.meta)
    fill(expected)
    pairs = zip(record.parts.values(), expected.parts.values(), strict=True)
    return all(
        np.array_equal(ours, theirs)
        for part, other in pairs
        for ours, theirs in zip(blocks(record.meta, part), blocks(record.meta, other), strict=True)
    )


class Process:
    """One engine's store, and threads that use it as requests and users do."""

    def __init__(self, directory: str, seed: int, seconds: float):
        config = CacheConfig(host_bytes=MEMORY, disk=directory, disk_bytes=DISK, max_contexts_per_image=2)
        self.disk = DiskTier(directory, DISK)
        self.store = Store(config, [self.disk])
        self.seed, self.seconds = seed, seconds
        self.done: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.errors: list[str] = []
        self.until = 0.0
        self._lock = threading.Lock()

    def request(self, random: random.Random) -> None:
        """Looks up, waits for what comes, reads it, and computes what is not there."""
        number, context = min(random.randrange(IMAGES), random.randrange(IMAGES)), random.choice(CONTEXTS)
        approximate = random.random() < 0.3
        entry = key(number)
        self.store.look([entry])
        with self.store.lookup(entry, context, grid=GRID, donors=Donors() if approximate else None) as handle:
            metas = [meta_of(number, None)] if handle.encoder is None else []
            metas += [] if handle.exact else [meta_of(number, context)]
            own = [meta for meta in metas if self.store.tier.get(meta.name) is None]
            made = [record for record in self.store.reserve(own) if record is not None]
            for record in made:
                record.begin()
            if random.random() < 0.5:
                handle.hold()
            for record in made:
                fill(record)
                self.store.publish(record) if random.random() < 0.95 else self.store.withdraw(record)
            self.done["computed"] += len(made)
            for record in (handle.encoder, handle.kv):
                if record is not None and record.wait(PATIENCE):
                    assert record.meta.entry == entry
                    assert is_right(record), record.meta.name
                    self.done["loaded" if record.meta.name in handle.brought else "read"] += 1
                elif record is not None:
                    assert record.is_settled, f"{record.meta.name} never came"

    def rule(self, random: random.Random) -> None:
        """What a user does now and then."""
        entry = key(random.randrange(IMAGES))
        match random.randrange(5):
            case 0:
                self.store.evict(entry)
            case 1:
                self.store.evict(entry)
                self.store.delete(entry, {record.meta.name for record in self.store.records(entry)})
            case 2:
                try:
                    self.store.keep(entry, True)
                except ValueError:  # there is no room left for what is pinned
                    return
                self.store.keep_outside(entry, True)
                self.request(random)
                self.unpin(entry)
            case 3:
                self.store.flush()
            case 4:
                assert self.store.verify() == []
        self.done["rules"] += 1

    def unpin(self, entry: str) -> None:
        self.store.keep_outside(entry, False)
        self.store.keep(entry, False)

    def work(self, number: int) -> None:
        own = random.Random(self.seed * 100 + number)
        try:
            while time.monotonic() < self.until and not self.errors:
                (self.rule if own.random() < 0.05 else self.request)(own)
        except BaseException as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            raise

    def watch(self) -> None:
        """What is kept, all the time."""
        while time.monotonic() < self.until:
            stats = self.store.stats()
            resident = re.search(r"RssAnon:\s+(\d+)", pathlib.Path("/proc/self/status").read_text(encoding="ascii"))
            assert resident is not None
            now = {
                "bytes": stats.bytes,
                "left_bytes": stats.left_bytes,
                "disk": self.disk.counts()["bytes"],
                "resident": int(resident[1]) * 1024,
            }
            self.most |= Counter(now)
            time.sleep(0.01)

    def run(self) -> dict[str, object]:
        before = Counter(self.most)
        self.until = time.monotonic() + 0.01
        self.watch()
        base = self.most["resident"]
        self.most = before
        self.until = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self.work, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        self.watch()
        for thread in threads:
            thread.join(PATIENCE)
        is_stuck = any(thread.is_alive() for thread in threads)
        leaks: list[str] = []
        if not is_stuck:
            for number in range(IMAGES):
                self.unpin(key(number))
            self.store.wait()
            stats = self.store.stats().tiers["disk"]
            self.store.close()  # what is to be written is written
            leaks = [one.meta.name for one in self.store.tier.records() if one.pins or one.held or not one.is_settled]
        left = self.store.stats()
        return {
            "errors": self.errors,
            "is_stuck": is_stuck,
            "leaks": leaks,
            "left_bytes": left.left_bytes,
            "corrupt": left.corrupt,
            "done": self.done,
            "most": self.most,
            "base": base,
            "disk": {} if is_stuck else dataclasses.asdict(stats),
        }


@pytest.mark.thorough
def test_threads_of_two_processes_for_a_while(tmp_path):
    command = [sys.executable, "-P", "-m", "tests.cache.test_soak", str(tmp_path), str(SECONDS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    processes = [
        subprocess.Popen([*command, str(seed)], env=environment, stdout=subprocess.PIPE, text=True)
        for seed in range(PROCESSES)
    ]
    try:
        told = [json.loads(process.communicate(timeout=SECONDS + 3 * PATIENCE)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for one in told:
        print(one)
        assert (one["errors"], one["is_stuck"], one["leaks"]) == ([], False, [])
        assert (one["left_bytes"], one["corrupt"]) == (0, 0)
        assert min(one["done"][what] for what in ("computed", "loaded", "read", "rules")) > 0
        assert one["most"]["bytes"] <= MEMORY
        assert one["most"]["disk"] <= DISK
        assert one["most"]["resident"] - one["base"] <= MEMORY + one["most"]["left_bytes"] + ALLOWANCE
        assert (one["disk"]["failed"], one["disk"]["damaged"], one["disk"]["late"]) == (0, 0, 0)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".part", ".writer")]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) <= DISK


if __name__ == "__main__":
    print(json.dumps(Process(sys.argv[1], int(sys.argv[3]), float(sys.argv[2])).run()))
