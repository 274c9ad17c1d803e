"""Speed of the tiers outside host memory on this machine, compared with the speed of their media.

    python -m research.stores --redis --out benchmarks/results/stores_cpu.json

Cache entries have the KV of an image of 1024 tokens of Qwen3-VL-8B; `--mb` scales them. A load is the engine's:
`store.PendingWrite` into an entry that a store has just made, with every check. "plain" is reading the same bytes only:
the file into an entry's memory, an object or chunks into separate bytes, the file from the peer's server into an
entry's memory. "xxh3" is computing their checksums only. A load must reach `LEAST` percent of the rate of the slower of
the two. The plain way of a write is the same bytes in one file, on the disk, or in one object, or in chunks.

If memory is new, its first touch is within the times, as in the engine; if it is old, both sides find it touched. All
parts are interleaved, because the speed of a shared machine varies. Times are medians, and their spread is the
interquartile range. Cold files have left the page cache of this machine; caches of the disk or of the host of a virtual
machine are unknown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import http.client
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import obstore
from obstore.store import LocalStore

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import owner_key
from vlcache_jax.cache.record import Meta, Record, Tier, TierError, blocks
from vlcache_jax.cache.store import PendingWrite, Store
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.tiers.object_store import ObjectTier
from vlcache_jax.cache.tiers.peer import PeerTier
from vlcache_jax.cache.tiers.peer_server import PeerServer
from vlcache_jax.cache.tiers.record_file import file_bytes, file_name, make_header
from vlcache_jax.cache.tiers.redis_store import RedisTier
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.study.report import environment, publish

LEAST = 70.0  # percent
LAYERS, HEADS, WIDTH = 36, 8, 128  # of keys and values
TOKEN = 4 * LAYERS * HEADS * WIDTH  # bytes of one token in bfloat16
PLAIN = "bfloat16"
_KEY = "5a" * 32
_TIMEOUT = 60.0  # seconds
_CHUNK = 2**23  # bytes; of one value in Redis

Buffers = Sequence[Any]
"""Bytes that were read, one behind the other."""


class ReadCase(NamedTuple):
    """A way to read the cache entries of a tier.

    Attributes:
      name: Name of the tier.
      cache: State of the page cache: "warm", "cold", or that the bytes could not be made cold.
      tier: Reads the entries.
      plain: Reads the bytes of an entry only, into its own memory or that of the other entry.
      prepare: Called before each read; returns whether the bytes are where they should be.
    """

    name: str
    cache: str
    tier: Tier
    plain: Callable[[Record, Record], Buffers]
    prepare: Callable[[Record], bool] = lambda record: True


class WriteCase(NamedTuple):
    """A way to write cache entries.

    Attributes:
      name: Name of the tier.
      tier: Writes the entries.
      plain: Writes the bytes of an entry only.
      clear: Removes the files that `plain` has written.
    """

    name: str
    tier: Tier
    plain: Callable[[Record], object]
    clear: Callable[[], object]


@dataclasses.dataclass
class Times:
    """Seconds of the same work by the tier, by the plain way and of its checksums."""

    tier: list[float] = dataclasses.field(default_factory=list)
    plain: list[float] = dataclasses.field(default_factory=list)
    xxh3: list[float] = dataclasses.field(default_factory=list)

    def row(self, size: int) -> dict[str, Any]:
        """Return medians in milliseconds, rates in GB/s, and the ratio to the slower one in percent."""
        ms = {name: 1e3 * statistics.median(own) for name, own in dataclasses.asdict(self).items()}
        return {
            "ms": ms["tier"],
            "spread ms": 1e3 * _spread(self.tier),
            "GB/s": size / ms["tier"] / 1e6,
            "plain ms": ms["plain"],
            "plain spread ms": 1e3 * _spread(self.plain),
            "plain GB/s": size / ms["plain"] / 1e6,
            "xxh3 GB/s": size / ms["xxh3"] / 1e6,
            "ratio %": 100 * max(ms["plain"], ms["xxh3"]) / ms["tier"],
        }


def make_record(codec: str, number: int, tokens: int) -> Record:
    """Return a complete cache entry of random KV, all of it finite."""
    kv = KVShape(LAYERS, HEADS, WIDTH, np.dtype(PLAIN), CODECS.get(codec))
    data = kv.record(tokens)
    entry = f"{sorted((PLAIN, *CODECS)).index(codec):02x}{number:062x}"
    grid = (1, 2, 2 * tokens)
    meta = Meta(
        entry,
        owner_key(None),
        _KEY,
        True,
        grid,
        tokens,
        str(data.dtype),
        data.shape,
        kv.code_bytes,
        model=_KEY,
        codec=codec,
    )
    record = Record(meta)
    rng = np.random.default_rng((number, tokens))
    # Without this bit neither a bfloat16 nor a float16, of a scale, is infinite.
    for buffer in record.buffers:
        buffer.reshape(-1).view(np.uint16)[:] = rng.integers(0, 2**16, buffer.nbytes // 2, np.uint16) & 0xBFFF
    record.complete()
    return record


def read(case: ReadCase, records: Sequence[Record], is_new: bool, times: Times) -> None:
    """Read cache entries by the plain way and by the tier, and compute their checksums.

    Raises:
      TierError: An entry could not be read.
      ValueError: The content is empty, or differs from the written one.
    """
    largest = max(record.meta.nbytes for record in records)
    store = Store(CacheConfig(host_bytes=2 * largest))
    for record in records:
        spare = Record(record.meta)
        if not is_new:
            _clear(spare)
        case.prepare(record)
        times.plain.append(_seconds(kept := _Call(functools.partial(case.plain, record, spare))))
        _check(f"plain read of {case.name}", record, kept.result)
        del spare, kept
        found = [one for one in case.tier.find(record.meta.entry) if one.meta.name == record.meta.name]
        if len(found) != 1:
            raise ValueError(f"{case.name} must have one entry of {record.meta.name}, got {len(found)}")
        [(meta, written)] = found
        [place] = store.reserve([dataclasses.replace(meta, checksums=())], source="disk")
        assert place is not None
        place.written = written
        if not is_new:
            _clear(place)
        case.prepare(record)
        times.tier.append(_seconds(PendingWrite(store, case.tier, meta, place).read))
        if not place.is_ready or place.meta.checksums != record.meta.checksums:
            raise ValueError(f"entry of {case.name} must be complete and have equal checksums, but does not")
        _check(f"load from {case.name}", record, _content(place))
        times.xxh3.append(_seconds(record.checksums))
        store.clear()
        del place


def write(keeper: WriteCase, records: Sequence[Record], times: Times) -> None:
    """Write cache entries by the plain way and by the tier, which no longer has them.

    Raises:
      TierError: An entry could not be written.
      ValueError: An entry was not written.
    """
    for record in records:
        keeper.clear()
        times.plain.append(_seconds(functools.partial(keeper.plain, record)))
        keeper.tier.delete(record.meta.name)
        times.tier.append(_seconds(kept := _Call(functools.partial(keeper.tier.write, record.meta, record.parts))))
        if kept.result != "stored":
            raise ValueError(f"{keeper.name} must store {record.meta.name}, got {kept.result!r}")
        times.xxh3.append(_seconds(record.checksums))


class _Call:
    """Wrapper that stores the result of a function."""

    def __init__(self, work: Callable[[], Any]):
        self._work = work
        self.result: Any = None

    def __call__(self) -> None:
        self.result = self._work()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _spread(seconds: Sequence[float]) -> float:
    first, _, third = statistics.quantiles(seconds, method="inclusive") if len(seconds) > 1 else (0.0, 0.0, 0.0)
    return third - first


def _clear(record: Record) -> None:
    for buffer in record.buffers:
        buffer[:] = 0


def _memory(record: Record) -> list[np.ndarray]:
    """Return the bytes of its buffers."""
    return [buffer.reshape(-1).view(np.uint8) for buffer in record.buffers]


def _content(record: Record) -> list[np.ndarray]:
    """Return its bytes, in the order in which tiers store them."""
    rows = (rows for part in record.parts.values() for rows in blocks(record.meta, part))
    return [one.reshape(-1).view(np.uint8) for one in rows]


def _check(what: str, record: Record, buffers: Buffers) -> None:
    expected = np.concatenate(_content(record))
    for buffer in buffers:
        got = buffer.reshape(-1).view(np.uint8) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
        if len(got) > len(expected) or not np.array_equal(got, expected[: len(got)]):
            raise ValueError(f"{what} must return the written bytes, got others")
        expected = expected[len(got) :]
    if len(expected):
        raise ValueError(f"{what} must return {record.meta.nbytes} bytes, {len(expected)} are missing")


# The disk.


def drop_from_page_cache(path: pathlib.Path) -> bool:
    """Return whether a file has left the page cache; not every system and file system supports or reports that."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(descriptor, [bytearray(1)], os.fstat(descriptor).st_size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the check may have started read-ahead
            return True
        except OSError:  # it does not support the check
            pass
        return False
    finally:
        os.close(descriptor)


def _read_file(path: pathlib.Path, first: int, record: Record) -> Buffers:
    """Read the content after the header into an entry's memory."""
    with open(path, "rb", buffering=0) as file:
        file.seek(first)
        _read_into(cast(Callable[[memoryview], int], file.readinto), record)
    return _memory(record)


def _read_into(readinto: Callable[[memoryview], int], record: Record) -> None:
    for buffer in _memory(record):
        left = memoryview(buffer)
        while left and (got := readinto(left)):
            left = left[got:]


def _write_file(path: pathlib.Path, record: Record) -> None:
    with open(path, "wb", buffering=0) as file:
        for buffer in _memory(record):
            left = memoryview(buffer)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


# The stores.


@contextlib.contextmanager
def opened(folder: pathlib.Path, size: int, *, has_redis: bool) -> Iterator[tuple[list[WriteCase], list[ReadCase]]]:
    """Open the tiers, all of them on this machine.

    Args:
      folder: Folder of all of their files.
      size: Bytes of all entries.
    """
    with contextlib.ExitStack() as stack:
        # The tiers as an engine has them.
        disk = DiskTier(folder / "disk", 2 * size + 2**30)
        stack.callback(disk.close)
        objects = ObjectTier((folder / "objects").as_uri(), timeout=_TIMEOUT)
        stack.callback(objects.close)
        server = stack.enter_context(PeerServer(disk, "127.0.0.1", 0))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.address
        peer = PeerTier(f"http://{host}:{port}", timeout=_TIMEOUT)
        stack.callback(peer.close)
        # Next to each, the plainest way to the same bytes as its reference.
        raw = stack.enter_context(contextlib.closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT)))
        plain = folder / "plain"
        shared, plain_objects = (LocalStore(folder / name, mkdir=True) for name in ("objects", "plain objects"))
        [home] = {path.name for path in disk.directory.parent.iterdir()}

        def file(record: Record) -> pathlib.Path:
            return disk.directory / file_name(record.meta.name)

        def plain_file(record: Record, spare: Record) -> Buffers:
            return _read_file(file(record), len(make_header(record.meta)), spare)

        def plain_object(record: Record, spare: Record) -> Buffers:
            header = len(make_header(record.meta))
            path = f"{home}/{file_name(record.meta.name)}"
            return [obstore.get_range(shared, path, start=header, length=record.meta.nbytes)]

        def plain_put(record: Record) -> None:
            obstore.put(plain_objects, "object", _memory(record))

        def clear_objects() -> None:
            (folder / "plain objects" / "object").unlink(missing_ok=True)

        def plain_answer(record: Record, spare: Record) -> Buffers:
            byte_range = f"bytes={len(make_header(record.meta))}-{file_bytes(record.meta) - 1}"
            raw.request("GET", f"/v1/files/{file_name(record.meta.name)}", headers={"Range": byte_range})
            _read_into(raw.getresponse().readinto, spare)
            return _memory(spare)

        keepers = [
            WriteCase("disk", disk, functools.partial(_write_file, plain), functools.partial(plain.unlink, True)),
            WriteCase("object store (file://)", objects, plain_put, clear_objects),
        ]
        cases = [
            ReadCase("disk", "warm", disk, plain_file),
            ReadCase("disk", "cold", disk, plain_file, lambda record: drop_from_page_cache(file(record))),
            ReadCase("object store (file://)", "warm", objects, plain_object),
            ReadCase("peer (loopback)", "warm", peer, plain_answer),
        ]
        if has_redis:
            keeper, case = stack.enter_context(_opened_redis(folder))
            keepers.append(keeper)
            cases.append(case)
        yield keepers, cases


@contextlib.contextmanager
def _opened_redis(folder: pathlib.Path) -> Iterator[tuple[WriteCase, ReadCase]]:
    """Run a server on its own port, without persistence."""
    import redis

    if (binary := shutil.which("redis-server")) is None:
        raise ValueError("--redis needs redis-server, which is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # In memory only.
    options = {"bind": "127.0.0.1", "port": str(port), "save": "", "appendonly": "no"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen([binary, *words], cwd=folder, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    client: Any = redis.Redis.from_url(url, socket_timeout=_TIMEOUT)
    tier = RedisTier(url, timeout=_TIMEOUT, namespace=_KEY[:16])
    keys: dict[str, list[bytes]] = {}

    def plain_get(record: Record, spare: Record) -> Buffers:
        return [client.get(key) or b"" for key in keys[record.meta.entry]]

    def plain_set(record: Record) -> None:
        for number, buffer in enumerate(_memory(record)):
            for first in range(0, len(buffer), _CHUNK):
                client.set(f"plain:{number}:{first}", memoryview(buffer)[first : first + _CHUNK])

    def find_keys(record: Record) -> bool:
        """Find the keys of an entry's chunks, in order; they change with each write."""
        found = client.scan_iter(f"*:{record.meta.entry}:*:*")
        keys[record.meta.entry] = sorted(found, key=lambda key: [int(number) for number in key.split(b":")[-2:]])
        return True

    try:
        for _ in range(3000):
            if process.poll() is not None:
                raise ValueError(f"redis-server must run, but ended with status {process.returncode}")
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                break
            time.sleep(0.01)
        name = "Redis (loopback)"
        yield (
            WriteCase(name, tier, plain_set, lambda: client.delete(*client.keys("plain:*"), "plain")),
            ReadCase(name, "in its memory", tier, plain_get, find_keys),
        )
    finally:
        tier.close()
        client.close()
        process.kill()
        process.wait()


def measure(*, mb: float, records: int, repeats: int, has_redis: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows for writes and reads, and their settings.

    Raises:
      TierError: A tier failed.
      ValueError: The content read differs from the written one.
    """
    if min(records, repeats) < 1 or (tokens := round(mb * 1e6 / TOKEN)) < 1:
        raise ValueError(
            f"mb must be at least {TOKEN / 1e6}, and records and repeats 1, got {mb}, {records} and {repeats}"
        )
    # Cache entries of each codec, and the times of writing and reading them.
    kept = {codec: [make_record(codec, number, tokens) for number in range(records)] for codec in (PLAIN, *CODECS)}
    sizes = {codec: own[0].meta.nbytes for codec, own in kept.items()}
    writes: defaultdict[tuple[str, str], Times] = defaultdict(Times)
    reads: defaultdict[tuple[str, str, bool, str], Times] = defaultdict(Times)
    with (
        tempfile.TemporaryDirectory(prefix="vlcache-bench-") as directory,
        opened(pathlib.Path(directory), records * sum(sizes.values()), has_redis=has_redis) as (keepers, cases),
        Progress("measuring", (1 + repeats) * len(kept)) as bar,
    ):
        for repeat in range(1 + repeats):
            for codec, own in kept.items():
                for keeper in keepers:
                    write(keeper, own, writes[keeper.name, codec])
                for case in cases:
                    there = [case.prepare(record) for record in own]
                    cache = case.cache if all(there) else f"{case.cache}: not possible here"
                    for is_new in (True, False):
                        read(case, own, is_new, reads[case.name, cache, is_new, codec])
                bar.update()
            if not repeat:  # it has warmed up
                writes.clear()
                reads.clear()
    rows = [
        {"store": name, "what": "write", "codec": codec, "MB": sizes[codec] / 1e6, "page cache": "-", "memory": "-"}
        | times.row(sizes[codec])
        | {f"at least {LEAST:.0f} %": "-"}
        for (name, codec), times in writes.items()
    ]
    # A row for each way to read, with its minimum rate relative to the plain way.
    for (name, cache, is_new, codec), times in reads.items():
        about: dict[str, Any] = {
            "store": name,
            "what": "read",
            "codec": codec,
            "MB": sizes[codec] / 1e6,
            "page cache": cache,
        }
        row = about | {"memory": "new" if is_new else "old"} | times.row(sizes[codec])
        rows.append(row | {f"at least {LEAST:.0f} %": "yes" if cast(float, row["ratio %"]) >= LEAST else "no"})
    order = list(dict.fromkeys((row["store"], row["what"], row["page cache"], row["memory"]) for row in rows))
    rows.sort(key=lambda row: order.index((row["store"], row["what"], row["page cache"], row["memory"])))
    return rows, {"tokens": tokens, "layers": LAYERS, "records": records, "repeats": repeats}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=1024 * TOKEN / 1e6, help="megabytes of a cache entry in bfloat16")
    parser.add_argument("--records", type=int, default=2, help="cache entries of each codec")
    parser.add_argument("--repeats", type=int, default=5, help="repeats after a warm-up")
    parser.add_argument("--redis", action="store_true", help="also measure a Redis server on this machine")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    check_writable("out", args.out)
    try:
        rows, about = measure(mb=args.mb, records=args.records, repeats=args.repeats, has_redis=args.redis)
    except (TierError, ValueError) as error:
        sys.exit(f"stores: {error}")
    head = environment("numpy", "xxhash", "obstore", "redis") | about
    head["notes"] = (
        "A machine that others use at the same time: all of it takes turns, times are medians, spread is what lies "
        "between the quartiles. plain: the same bytes alone; ratio: the load's rate to the slower of plain and xxh3."
    )
    publish("Rates of the tiers outside host memory", rows, head, args.out)


if __name__ == "__main__":
    main()
