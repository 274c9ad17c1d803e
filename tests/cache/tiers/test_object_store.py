"""The tier over object stores: a directory, the library's own memory, and a server that speaks S3."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import datetime
import http.server
import os
import random
import resource
import stat
import subprocess
import sys
import threading
import urllib.parse
import xml.sax.saxutils

import numpy as np
import obstore
import pytest
from obstore.exceptions import GenericError, UnauthenticatedError
from obstore.store import MemoryStore

from tests.cache.records import CASES, assert_whole, found, key, make, names, parts, verified_read, write
from vlcache_jax.cache.record import DamagedError, EntryGoneError, TierError
from vlcache_jax.cache.tiers import object_store
from vlcache_jax.cache.tiers.object_store import FOLDER, ObjectTier
from vlcache_jax.cache.tiers.record_file import LENGTH, MAX_HEADER, file_bytes, file_name, make_header

KV = CASES["kv"]


class Bucket(http.server.ThreadingHTTPServer):
    """As much of S3 as a tier needs, with short pages of listings. It answers nothing as long as it is stalled."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Requests)
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str, str | None]] = []
        self.sent = 0  # bytes of objects
        self.page = 2
        self.is_open = threading.Event()
        self.is_open.set()


class Requests(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer leaves in one piece

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def take(self):
        self.server.is_open.wait()
        parts = urllib.parse.urlsplit(self.path)
        self.server.log.append((self.command, self.path, self.headers["Range"]))
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        name = urllib.parse.unquote(parts.path.removeprefix("/bucket").removeprefix("/"))
        return name, dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True)), body

    def do_PUT(self):
        name, _, body = self.take()
        if self.headers["If-None-Match"] == "*" and name in self.server.objects:
            return self.answer(412)
        self.server.objects[name] = body
        return self.answer(200, ETag='"1"')

    def do_POST(self):
        _, _, body = self.take()
        name = body.decode().partition("<Key>")[2].partition("</Key>")[0]
        self.server.objects.pop(name, None)
        self.answer(200, f"<DeleteResult><Deleted><Key>{name}</Key></Deleted></DeleteResult>".encode())

    def do_DELETE(self):
        self.server.objects.pop(self.take()[0], None)
        self.answer(204)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        name, query, _ = self.take()
        if not name:
            return self.answer(200, self.listing(query))
        if (data := self.server.objects.get(name)) is None:
            return self.answer(404)
        about = {"ETag": '"1"', "Last_Modified": "Mon, 05 Jan 2026 10:00:00 GMT"}
        if (asked := self.headers["Range"]) is None:
            self.server.sent += len(data)
            return self.answer(200, data, **about)
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        if first >= len(data):
            return self.answer(416)
        some = data[first : last + 1]
        self.server.sent += len(some)
        about["Content_Range"] = f"bytes {first}-{first + len(some) - 1}/{len(data)}"
        return self.answer(206, some, **about)

    def listing(self, query):
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        all_names = sorted(name for name in self.server.objects if name.startswith(query["prefix"]) and name > after)
        page = all_names[: self.server.page]
        more = len(all_names) > len(page)
        contents = "".join(
            f"<Contents><Key>{xml.sax.saxutils.escape(name)}</Key><Size>{len(self.server.objects[name])}</Size>"
            "<LastModified>2026-01-05T10:00:00.000Z</LastModified></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        truncated = str(more).lower()
        return f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{token}{contents}</ListBucketResult>".encode()


@pytest.fixture
def bucket(monkeypatch):
    with running_bucket(monkeypatch) as bucket:
        yield bucket


@contextlib.contextmanager
def running_bucket(monkeypatch):
    """One that `s3://bucket` is."""
    with Bucket() as bucket:
        thread = threading.Thread(target=bucket.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{bucket.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "here",
        }.items():
            monkeypatch.setenv(name, value)
        yield bucket
        bucket.is_open.set()
        bucket.shutdown()
        thread.join()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "a shared" / "directory"


@pytest.fixture(params=["file", "memory", "s3"])
def tier(request, directory):
    if request.param == "s3":
        request.getfixturevalue("bucket")
        tier = ObjectTier("s3://bucket/some/prefix", timeout=60)
    elif request.param == "file":
        tier = ObjectTier(directory.as_uri(), timeout=60)
    else:
        tier = ObjectTier("memory:///", timeout=60, store=MemoryStore())
    yield tier
    tier.close()


@pytest.fixture
def quick():
    """Where nothing depends on the store."""
    tier = ObjectTier("memory:///", timeout=60, store=MemoryStore())
    yield tier
    tier.close()


def path_of(record):
    return f"{FOLDER}/{file_name(record.meta.name)}"


def content(tier, record):
    return bytes(obstore.get(tier._store, path_of(record)).bytes())


def change(tier, record, data):
    obstore.put(tier._store, path_of(record), data)


def objects(tier):
    return sorted(one["path"] for page in obstore.list(tier._store) for one in page)


@pytest.mark.parametrize("record", CASES.values(), ids=CASES)
def test_what_is_read_is_what_was_written(tier, record):
    write(tier, record)
    assert_whole(tier, record)
    assert names(tier) == [record.meta.name]
    assert len(content(tier, record)) == file_bytes(record.meta) == tier.lines()[0].bytes


def test_an_object_is_what_the_disk_tier_writes(tier):
    write(tier, KV)
    rows = KV.data[:, :, : KV.meta.tokens].tobytes()
    assert content(tier, KV) == make_header(KV.meta) + rows
    assert objects(tier) == [path_of(KV)]


def test_another_room(tier):
    write(tier, KV)
    for room in (6, 7, 64):
        for (array,), written in zip(verified_read(tier, found(tier, KV), room), KV.data, strict=True):
            np.testing.assert_array_equal(array[:, :6], written[:, :6])


def test_parts_come_in_the_order_that_is_asked_for(tier):
    record = make(context=key(7), layers=9)
    write(tier, record)
    places = parts(make(context=key(7), layers=9, seed=5))
    order = [("kv", layer) for layer in (8, 0, 3, 7, 5, 6, 1)]
    got = list(tier.read(record.meta, iter(order), places.__getitem__))
    assert [part for part, _ in got] == order
    for part, buffers in got:
        assert buffers is places[part]
        np.testing.assert_array_equal(buffers[0][:, :6], record.data[part[1], :, :6])


def test_nothing_but_the_parts_is_read(bucket):
    tier = ObjectTier("s3://bucket", timeout=60)
    write(tier, KV)
    meta = found(tier, KV)
    bucket.log.clear()
    places = parts(make(context=key(7)))
    assert len(list(tier.read(meta, [("kv", 1)], places.__getitem__))) == 1
    first = len(make_header(meta)) + meta.part_bytes
    assert bucket.log == [("GET", f"/bucket/{path_of(KV)}", f"bytes={first}-{first + meta.part_bytes - 1}")]
    tier.close()


def test_a_look_lists_once_from_where_the_image_begins(bucket):
    tier = ObjectTier("s3://bucket", timeout=60)
    records = [make(number) for number in range(1, 9)]
    write(tier, *records)
    bucket.page = 100
    bucket.log.clear()
    assert found(tier, records[1]) is not None
    [listing, header] = bucket.log
    assert listing[0] == "GET"
    assert f"start-after={FOLDER}%2F00%2F{records[1].meta.entry}" in listing[1]
    assert header == ("GET", f"/bucket/{path_of(records[1])}", "bytes=0-65535")
    tier.close()


def test_a_look_does_not_list_what_lies_behind_the_image(bucket, monkeypatch):
    monkeypatch.setattr(object_store, "_PAGE", 2)
    tier = ObjectTier("s3://bucket", timeout=60)
    records = [make(number) for number in range(1, 31)]
    write(tier, *records)
    bucket.log.clear()
    assert found(tier, records[1]) is not None
    assert len([path for _, path, _ in bucket.log if "list-type" in path]) < 4
    tier.close()


def test_a_place_of_another_size_is_an_error(tier):
    write(tier, KV)
    with pytest.raises(DamagedError, match="got a buffer of"):
        list(tier.read(KV.meta, KV.meta.parts, lambda part: (np.zeros((2, 3, 2, 8), np.float32),)))


def test_a_record_is_written_once(tier):
    write(tier, KV)
    before = content(tier, KV)
    other = make(context=key(7), seed=3)
    assert tier.write(other.meta, parts(other)) == "known"
    assert content(tier, KV) == before


def test_of_two_writers_at_once_one_has_stored_it(tier, monkeypatch):
    """The second begins before the first has ended."""
    monkeypatch.setattr(obstore, "head", missing)
    write(tier, KV)
    other = make(context=key(7), seed=3)
    assert tier.write(other.meta, parts(other)) == "known"
    assert_whole(tier, KV)


def missing(*_):
    raise FileNotFoundError


def test_images_do_not_mix(tier):
    records = [make(number, context) for number in (1, 2, 3) for context in (None, key(7), key(8))]
    write(tier, *records)
    for number in (1, 2, 3):
        assert {one.meta.name for one in tier.find(key(number))} == {
            record.meta.name for record in records if record.meta.entry == key(number)
        }
    assert tier.find(key(4)) == []
    tier.delete(records[0].meta.name)
    tier.delete(records[0].meta.name)
    assert found(tier, records[0]) is None
    assert sorted(names(tier)) == sorted(record.meta.name for record in records[1:])


def test_the_newest_is_last(directory):
    tier = ObjectTier(directory.as_uri(), timeout=60)
    contexts = [key(number) for number in (3, 1, 2)]
    for number, context in enumerate(contexts):
        record = make(context=context)
        write(tier, record)
        os.utime(directory / path_of(record), (1000.5 + number, 1000.5 + number))
    assert [(one.meta.context, one.written) for one in tier.find(key(1))] == [
        (context, 1000.5 + number) for number, context in enumerate(contexts)
    ]
    assert [(line.name.split("/")[2], line.used) for line in tier.lines()] == [
        (context, 1000.5 + number) for number, context in enumerate(contexts)
    ]
    tier.close()


def test_of_many_the_newest_are_looked_at_and_encoder_rows(directory):
    tier = ObjectTier(directory.as_uri(), timeout=60)
    records = [make(), *(make(context=key(number)) for number in range(20))]
    write(tier, *records)
    for number, record in enumerate(records):
        os.utime(directory / path_of(record), (number, number))
    assert [one.meta.name for one in tier.find(key(1))] == [record.meta.name for record in (records[0], *records[6:])]
    tier.close()


def test_a_long_header(quick):
    record = make(context=key(7), layers=800, tokens=1, padded=1)
    assert len(make_header(record.meta)) > 2**16
    write(quick, record)
    assert_whole(quick, record)


def test_a_directory_belongs_to_its_owner_alone(directory):
    ObjectTier(directory.as_uri(), timeout=60).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("url", ["file://{0}", "file://{0}/below"])
def test_what_is_no_directory_is_an_error(tmp_path, url):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ValueError, match=rf"remote must be a reachable store, got .*: {path} is a file: move"):
        ObjectTier(url.format(path), timeout=60)


def test_what_the_environment_must_say_is_an_error(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"remote must be .*, got 'az://container': .*Account must be specified$"):
        ObjectTier("az://container", timeout=60)


# Damage.


def assert_damage_is_seen(tier, record, data):
    """Whether it is looked for or was found before."""
    change(tier, record, data)
    with pytest.raises(TierError):
        verified_read(tier, record.meta)
    meta = found(tier, record)
    if meta is None:
        assert objects(tier) == []
    else:
        with pytest.raises(DamagedError):
            verified_read(tier, meta)


def test_no_length_of_a_cut_object_passes(tier):
    record = make(context=key(7), layers=1, tokens=2)
    write(tier, record)
    whole = content(tier, record)
    step = 1 if isinstance(tier._store, MemoryStore) else 97
    for length in range(0, len(whole), step):
        assert_damage_is_seen(tier, record, whole[:length])
        assert objects(tier) == [], length
    change(tier, record, whole[:-1])
    with pytest.raises(DamagedError):
        verified_read(tier, record.meta)
    change(tier, record, whole + b"\0")
    assert found(tier, record) is None
    change(tier, record, whole)
    assert_whole(tier, record)


@pytest.mark.parametrize("name", ["encoder", "kv", "coded"])
def test_no_flipped_bit_passes(quick, name):
    record = CASES[name]
    write(quick, record)
    whole = content(quick, record)
    rng = random.Random(0)
    for bit in rng.sample(range(8 * len(whole)), 300):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        change(quick, record, bytes(flipped))
        meta = found(quick, record)
        assert (meta is None) == (bit // 8 < len(make_header(record.meta)))
        if meta is not None:
            with pytest.raises(DamagedError):
                verified_read(quick, meta)
    change(quick, record, whole)
    assert_whole(quick, record)


@pytest.mark.parametrize("length", [0, 2**40, MAX_HEADER + 1, MAX_HEADER, 2**64 - 1])
def test_a_header_of_any_length_is_damaged(tier, length):
    write(tier, CASES["encoder"])
    change(tier, KV, LENGTH.pack(length) + bytes(200))
    assert [one.meta.name for one in tier.find(key(1))] == [CASES["encoder"].meta.name]
    assert names(tier) == [CASES["encoder"].meta.name]


def test_a_damaged_object_that_stays_is_left_out(quick, monkeypatch, caplog):
    write(quick, KV, CASES["encoder"])
    change(quick, KV, b"x" * 1000)
    monkeypatch.setattr(obstore, "delete", failing(PermissionError("not yours")))
    assert [one.meta.name for one in quick.find(key(1))] == [CASES["encoder"].meta.name]
    assert "is damaged, and is deleted" in caplog.text


def test_another_records_object_is_not_taken(tier):
    other = make(2, key(7))
    write(tier, KV, other)
    change(tier, KV, content(tier, other))
    assert tier.find(key(1)) == []
    change(tier, KV, content(tier, other))
    with pytest.raises(DamagedError):
        verified_read(tier, KV.meta)
    assert_whole(tier, other)


def test_a_record_that_was_found_and_is_gone(tier):
    write(tier, KV)
    meta = found(tier, KV)
    tier.delete(meta.name)
    with pytest.raises(EntryGoneError, match=meta.name):
        verified_read(tier, meta)


def test_a_record_that_goes_between_two_parts(tier):
    record = make(context=key(7), layers=20)
    write(tier, record)
    places = parts(make(context=key(7), layers=20))
    reading = tier.read(record.meta, record.meta.parts, places.__getitem__)
    next(reading)
    tier.delete(record.meta.name)
    with pytest.raises(EntryGoneError):
        list(reading)


def test_a_reader_may_stop(tier):
    write(tier, KV)
    reading = tier.read(KV.meta, KV.meta.parts, parts(make(context=key(7))).__getitem__)
    next(reading)
    reading.close()
    assert_whole(tier, KV)


def test_a_reader_that_stops_fetches_no_more_parts(quick):
    """A part whose fetch has not begun is not fetched any more."""
    begun, gate = [], threading.Event()

    def fetch(number):
        begun.append(number)
        if number:
            assert gate.wait(10)
        return number

    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patches:
        patches.setattr(quick, "_pool", pool)
        fetched = quick._side_by_side(fetch, range(6), 3)
        assert next(fetched) == (0, 0)
        fetched.close()
        gate.set()
    assert set(begun) <= {0, 1}


def test_a_record_that_goes_while_it_is_listed(quick, monkeypatch):
    write(quick, KV, CASES["encoder"])
    real = obstore.get

    def get(store, path, **options):
        if path == path_of(KV):
            obstore.delete(store, path)
        return real(store, path, **options)

    monkeypatch.setattr(obstore, "get", get)
    assert [one.meta.name for one in quick.find(key(1))] == [CASES["encoder"].meta.name]


def test_strangers_objects_are_left_alone(tier):
    write(tier, KV)
    entry = KV.meta.entry
    others = [
        "index",
        f"{FOLDER}/index",
        f"{FOLDER}/{entry}.safetensors",
        f"{FOLDER}/ab/{entry}.safetensors",
        f"{FOLDER}/00/{entry}.txt",
        f"{FOLDER}/00/{entry}.safetensors.bak",
        f"{FOLDER}/00/{entry}.{key(8)[1:]}.safetensors",
        f"{FOLDER}/00/{entry}/deeper.safetensors",
        f"vlcache-0/{file_name(KV.meta.name)}",
    ]
    for path in others:
        obstore.put(tier._store, path, b"somebody else's")
    assert [one.meta for one in tier.find(entry)] == [KV.meta.with_room(6)]
    assert names(tier) == [KV.meta.name]
    assert objects(tier) == sorted([path_of(KV), *others])


# Failures.


def failing(error):
    def call(*_, **__):
        raise error

    return call


class Panic(BaseException):
    """As the library's panics: no Exception."""


ERRORS = [GenericError("down\n\nDebug source: secret"), UnauthenticatedError("who?"), OSError(5, "bad"), Panic("bug")]
USES = {
    "find": lambda tier: tier.find(KV.meta.entry),
    "read": lambda tier: verified_read(tier, KV.meta),
    "write": lambda tier: tier.write(make(2).meta, parts(make(2))),
    "delete": lambda tier: tier.delete(KV.meta.name),
    "list": lambda tier: tier.lines(),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("use", "call"),
    [("find", "list"), ("find", "get"), ("read", "get_range"), ("write", "head"), ("write", "put"),
     ("delete", "delete"), ("list", "list")],
)  # fmt: skip
def test_each_error_of_the_library_is_one_of_the_tier(quick, monkeypatch, use, call, error):
    write(quick, KV)
    with monkeypatch.context() as patch:
        patch.setattr(object_store.obstore, call, failing(error))
        with pytest.raises(TierError, match=f"^{use} .*: {type(error).__name__}: ") as raised:
            USES[use](quick)
    assert "secret" not in str(raised.value)
    USES[use](quick)


def test_ctrl_c_is_none_of_the_tiers_errors(quick, monkeypatch):
    monkeypatch.setattr(obstore, "list", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        quick.lines()


def test_a_name_that_is_none(quick):
    with pytest.raises(TierError, match=r"^delete nonsense: ValueError"):
        quick.delete("nonsense")


def test_a_closed_tier_is_an_error(quick):
    write(quick, KV)
    quick.close()
    with pytest.raises(TierError):
        verified_read(quick, KV.meta)


def test_a_server_that_does_not_answer(bucket):
    tier = ObjectTier("s3://bucket", timeout=0.1)
    bucket.is_open.clear()
    for name, use in USES.items():
        with pytest.raises(TierError, match=f"^{name} "):
            use(tier)
    bucket.is_open.set()
    tier.close()
    tier = ObjectTier("s3://bucket", timeout=60)
    write(tier, KV)
    assert_whole(tier, KV)
    tier.close()


def test_a_server_that_is_not_there(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    tier = ObjectTier("s3://bucket", timeout=60)
    for name, use in USES.items():
        with pytest.raises(TierError, match=f"^{name} ") as raised:
            use(tier)
        assert "\n" not in str(raised.value)
    tier.close()


def test_a_failed_write_leaves_nothing_that_is_seen(directory):
    """As on a full disk."""
    tier = ObjectTier(directory.as_uri(), timeout=60)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(TierError, match="File too large"):
            write(tier, KV)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tier.find(key(1)), tier.lines()) == ([], [])
    write(tier, KV)
    assert_whole(tier, KV)
    tier.close()


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.cache.records import key, make, write
from vlcache_jax.cache.tiers.object_store import ObjectTier
tier = ObjectTier(sys.argv[1], timeout=60)
write(tier, make(1, key(7)))
print(flush=True)
record = make(2, key(7), tokens=10_000, padded=10_000)
while True:
    tier.delete(record.meta.name)
    write(tier, record)
"""


def test_a_killed_writer_leaves_nothing_that_is_seen(directory, request):
    root = str(request.config.rootpath)
    command = [sys.executable, "-P", "-c", WRITER, directory.as_uri(), root]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        while not any((directory / path_of(KV)).parent.glob("*#*")):  # it is writing
            assert process.poll() is None
        process.kill()
    tier = ObjectTier(directory.as_uri(), timeout=60)
    assert_whole(tier, KV)
    for one in tier.find(key(2)):  # it may just have been written
        verified_read(tier, one.meta)
    assert len(tier.lines()) == 1 + len(tier.find(key(2)))
    tier.close()


def test_threads(quick):
    """Whatever happens at once, a record is whole or not there."""
    records = [make(number, context) for number in range(1, 6) for context in (None, key(7))]
    seen: collections.Counter[str] = collections.Counter()
    faults = []

    def work(number):
        rng = random.Random(number)
        for _ in range(60):
            record = rng.choice(records)
            try:
                if rng.random() < 0.4:
                    seen[quick.write(record.meta, parts(record))] += 1
                elif rng.random() < 0.2:
                    quick.delete(record.meta.name)
                elif (meta := found(quick, record)) is not None:
                    verified_read(quick, meta)
                    seen["read"] += 1
            except EntryGoneError:
                seen["gone"] += 1
            except Exception as error:
                faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert min(seen["stored"], seen["known"], seen["read"]) > 0


def test_times_are_seconds_since_the_epoch(bucket):
    tier = ObjectTier("s3://bucket", timeout=60)
    write(tier, KV)
    [one] = tier.find(key(1))
    assert one.written == datetime.datetime(2026, 1, 5, 10, tzinfo=datetime.UTC).timestamp()
    assert one.meta == KV.meta.with_room(6)
    tier.close()
