"""The tier over a server of Redis, a real one."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.cache.records import CASES, assert_whole, found, key, make, names, parts, verified_read, write
from tests.cache.tiers.redis_server import Server
from vlcache_jax.cache.keys import FORMAT_VERSION
from vlcache_jax.cache.record import DamagedError, EntryGoneError, TierError
from vlcache_jax.cache.tiers import redis_store
from vlcache_jax.cache.tiers.record_file import file_bytes, make_header
from vlcache_jax.cache.tiers.redis_store import RedisTier

pytestmark = pytest.mark.servers

KV = CASES["kv"]
SPACE = key(99)[:16]
HASH = f"vlcache-{FORMAT_VERSION}:{SPACE}:{key(1)}".encode()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.client.close()
    server.kill()


@pytest.fixture
def server(running):
    if running.process.poll() is not None:
        running.start()
    running.client.flushall()
    return running


@contextlib.contextmanager
def opened(server, *, timeout=60.0, namespace=SPACE, **options):
    tier = RedisTier(server.url, timeout=timeout, namespace=namespace, **options)
    yield tier
    tier.close()


@pytest.fixture
def tier(server):
    with opened(server) as tier:
        yield tier


@pytest.mark.parametrize("record", CASES.values(), ids=CASES)
def test_what_is_read_is_what_was_written(tier, record):
    write(tier, record)
    assert_whole(tier, record)
    [line] = tier.lines()
    assert line[:2] == (record.meta.name, file_bytes(record.meta))


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_any_size(tier, monkeypatch, name):
    for size in (1, 7, 64, 100, 10**6):
        monkeypatch.setattr(redis_store, "_CHUNK", size)
        write(tier, CASES[name])
        assert_whole(tier, CASES[name])
        tier.delete(CASES[name].meta.name)


def test_parts_of_several_chunks(tier, server):
    record = make(context=key(7), layers=1, tokens=150_000, padded=150_000)
    write(tier, record)
    assert_whole(tier, record)
    assert [server.client.strlen(chunk) for chunk in server.chunks()] == [2**23, 9_600_000 - 2**23] * 2


def test_what_is_kept(tier, server):
    """A hash of headers, and data beside it that stay."""
    with opened(server, clock=lambda: 1234.5678) as tier:
        write(tier, KV)
        [[field, value]] = server.client.hgetall(HASH).items()
        assert field == KV.meta.name.encode()
        assert value[16:] == (1_234_567).to_bytes(8, "big") + make_header(KV.meta)
        assert server.chunks() == [
            b"%b:%b:%d:%d" % (HASH, value[:16].hex().encode(), layer, half) for layer in range(3) for half in range(2)
        ]
        assert {server.client.ttl(name) for name in [HASH, *server.chunks()]} == {-1}
        assert [one.written for one in tier.find(key(1))] == [line.used for line in tier.lines()] == [1234.567]


def test_another_room(tier):
    write(tier, KV)
    for room in (6, 7, 64):
        for (array,), written in zip(verified_read(tier, found(tier, KV), room), KV.data, strict=True):
            np.testing.assert_array_equal(array[:, :6], written[:, :6])


def test_parts_come_in_the_order_that_is_asked_for(tier):
    write(tier, KV)
    places = parts(make(context=key(7), seed=5))
    got = list(tier.read(KV.meta, iter([("kv", 2), ("kv", 0)]), places.__getitem__))
    assert [part for part, _ in got] == [("kv", 2), ("kv", 0)]
    for part, buffers in got:
        assert buffers is places[part]
        np.testing.assert_array_equal(buffers[0][:, :6], KV.data[part[1], :, :6])


def test_a_place_of_another_size_is_an_error(tier):
    write(tier, KV)
    with pytest.raises(DamagedError, match="got a buffer of"):
        list(tier.read(KV.meta, KV.meta.parts, lambda part: (np.zeros((2, 3, 2, 8), np.float32),)))


def test_the_newest_is_last_and_images_do_not_mix(server):
    times = iter(range(100, 200))
    with opened(server, clock=lambda: next(times)) as tier:
        records = [make(number, context) for context in (key(8), None, key(7)) for number in (2, 1)]
        write(tier, *records)
        assert names(tier) == [record.meta.name for record in records]
        for number in (1, 2):
            assert [one.meta.name for one in tier.find(key(number))] == [
                record.meta.name for record in records if record.meta.entry == key(number)
            ]
        assert tier.find(key(3)) == []


def test_delete_leaves_nothing(tier, server):
    write(tier, KV, CASES["encoder"])
    tier.delete(KV.meta.name)
    tier.delete(KV.meta.name)
    assert names(tier) == [CASES["encoder"].meta.name]
    assert_whole(tier, CASES["encoder"])
    tier.delete(CASES["encoder"].meta.name)
    assert server.client.dbsize() == 0


def test_namespaces(server):
    """Models do not see each other; who has no model sees all."""
    other = key(99)[::-1]
    ours, theirs = KV, replace_model(KV, other)
    with (
        opened(server) as tier,
        opened(server, namespace=lambda: other[:16]) as second,
        opened(server, namespace=None) as whole,
    ):
        write(tier, ours)
        assert (second.find(key(1)), second.lines()) == ([], [])
        second.delete(ours.meta.name)
        write(second, theirs)
        assert found(tier, ours).model == key(99)
        assert found(second, theirs).model == other
        assert {one.meta.model for one in whole.find(key(1))} == {key(99), other}
        assert names(whole) == [ours.meta.name] * 2
        verified_read(whole, ours.meta)
        tier.delete(ours.meta.name)
        assert (names(tier), names(second), names(whole)) == ([], *[[ours.meta.name]] * 2)
        write(tier, ours)
        whole.delete(ours.meta.name)
        assert server.client.dbsize() == 0


def replace_model(record, model):
    other = make(context=record.meta.context, seed=4)
    other.meta = replace(other.meta, model=model)
    return other


# Several at once, and what they leave.


def test_a_record_is_written_once(tier, server):
    write(tier, KV)
    before = server.chunks()
    other = make(context=key(7), seed=3)
    assert tier.write(other.meta, parts(other)) == "known"
    assert server.chunks() == before
    assert_whole(tier, KV)


def test_of_two_writers_at_once_one_has_stored_it(tier, server, monkeypatch):
    """The second has written all its data when the first is done."""
    other = make(context=key(7), seed=3)
    real = tier._client.eval

    def publish(script, *arguments):
        monkeypatch.undo()
        with opened(server) as second:
            write(second, KV)
        return real(script, *arguments)

    monkeypatch.setattr(tier._client, "eval", publish)
    assert tier.write(other.meta, parts(other)) == "known"
    assert_whole(tier, KV)
    assert len(server.chunks()) == 6


def test_an_answer_that_is_lost(tier, server, monkeypatch):
    """What is asked again has been done."""
    real = tier._client.eval
    monkeypatch.setattr(tier._client, "eval", lambda *arguments: (real(*arguments), real(*arguments))[1])
    write(tier, KV)
    assert_whole(tier, KV)


def test_many_writers_of_one_name(server):
    records = [make(context=key(7), seed=seed) for seed in range(6)]
    outcomes = collections.Counter()
    barrier = threading.Barrier(len(records))

    def work(record):
        with opened(server) as tier:
            for number in range(1, 11):
                one = make(number, key(7), seed=record)
                barrier.wait()
                outcomes[tier.write(one.meta, parts(one))] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(len(records))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"stored": 10, "known": 50}
    with opened(server) as tier:
        for line in tier.lines():
            [one] = tier.find(line.name.split("/")[1])
            verified_read(tier, one.meta)
    assert len(server.chunks()) == 60


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.cache.records import key, make, parts, write
from vlcache_jax.cache.tiers.redis_store import RedisTier

class Slow(dict):
    def __getitem__(self, part):
        if part == ("kv", 2):
            print(flush=True)
            sys.stdin.read()
        return super().__getitem__(part)

tier = RedisTier(sys.argv[1], timeout=60)
write(tier, make(1, key(7)))
record = make(2, key(7))
tier.write(record.meta, Slow(parts(record)))
"""


def test_a_killed_writer_leaves_nothing_for_long(tier, server, request):
    command = [sys.executable, "-P", "-c", WRITER, server.url, str(request.config.rootpath)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        process.kill()
    assert names(tier) == [KV.meta.name]
    assert_whole(tier, KV)
    assert tier.find(key(2)) == []
    left = [server.client.ttl(name) for name in server.chunks() if key(2) in name.decode()]
    assert len(left) == 4
    assert min(left) > 0
    assert max(left) <= 3600
    write(tier, make(2, key(7)))  # nothing of it is in the way


def test_data_that_went_before_they_were_visible(tier, server, monkeypatch):
    real = tier._client.eval

    def publish(*arguments):
        server.client.delete(server.chunks()[3])
        return real(*arguments)

    monkeypatch.setattr(tier._client, "eval", publish)
    with pytest.raises(TierError, match="dropped a part of it"):
        write(tier, KV)
    assert server.client.dbsize() == 0


def test_threads(tier):
    """Whatever happens at once, a record is whole or not there."""
    records = [make(number, context) for number in range(1, 6) for context in (None, key(7))]
    seen = collections.Counter()
    faults = []

    def work(number):
        rng = random.Random(number)
        for _ in range(60):
            record = rng.choice(records)
            try:
                if rng.random() < 0.4:
                    seen[tier.write(record.meta, parts(record))] += 1
                elif rng.random() < 0.2:
                    tier.delete(record.meta.name)
                elif (meta := found(tier, record)) is not None:
                    verified_read(tier, meta)
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


# Damage.


@pytest.mark.parametrize("tokens", [10**9, 10**30])
def test_a_header_that_says_too_much_costs_nothing(tier, server, tokens, monkeypatch):
    """It is removed before as many keys are made as it says."""
    write(tier, KV)
    told, said = [], server.client.hget(HASH, KV.meta.name)
    vast = make_header(replace(KV.meta, tokens=tokens))
    server.client.hset(HASH, KV.meta.name, said[:24] + vast)
    monkeypatch.setattr(redis_store, "_all_keys", lambda *given: pytest.fail("keys"))
    tier.report = told.append
    assert found(tier, KV) is None
    assert (len(told), server.client.dbsize()) == (1, 0)


@pytest.mark.parametrize("name", ["encoder", "kv", "coded"])
def test_no_flipped_bit_passes(tier, server, name):
    record = CASES[name]
    write(tier, record)
    client, field = server.client, record.meta.name
    header, chunks = client.hget(HASH, field), {name: client.get(name) for name in server.chunks()}
    places = [(None, bit) for bit in range(8 * 24, 8 * len(header))]  # the id and the time are not the record's
    places += [(name, bit) for name, data in chunks.items() for bit in range(8 * len(data))]
    for place, bit in random.Random(0).sample(places, 300):
        flipped = bytearray(header if place is None else chunks[place])
        flipped[bit // 8] ^= 1 << bit % 8
        if place is None:
            client.hset(HASH, field, bytes(flipped))
            assert found(tier, record) is None
            assert client.dbsize() == 0
        else:
            client.set(place, bytes(flipped))
            with pytest.raises(DamagedError):
                verified_read(tier, found(tier, record))
        client.hset(HASH, field, header)
        client.mset(chunks)
    assert_whole(tier, record)


def test_no_length_of_a_header_or_of_a_chunk_passes(tier, server):
    record = make(context=key(7), layers=1, tokens=2)
    write(tier, record)
    client = server.client
    [value], chunks = client.hvals(HASH), {name: client.get(name) for name in server.chunks()}
    for length in range(0, len(value), 5):
        client.hset(HASH, record.meta.name, value[:length])
        assert found(tier, record) is None
        client.hset(HASH, record.meta.name, value)
        client.mset(chunks)
    for name, data in chunks.items():
        for length in [*range(len(data)), len(data) + 1]:
            client.set(name, data[:length] if length <= len(data) else data + b"\0")
            with pytest.raises(DamagedError):
                verified_read(tier, found(tier, record))
        client.set(name, data)
    assert_whole(tier, record)


def test_another_records_header_is_not_taken(tier, server):
    other = make(2, key(7))
    write(tier, KV, other)
    client = server.client
    theirs = client.hget(HASH.replace(key(1).encode(), key(2).encode()), other.meta.name)
    client.hset(HASH, KV.meta.name, theirs)
    assert found(tier, KV) is None
    write(tier, make())
    client.hset(HASH, KV.meta.name, client.hget(HASH, make().meta.name))
    assert [one.meta.name for one in tier.find(key(1))] == [make().meta.name]
    assert client.hkeys(HASH) == [make().meta.name.encode()]
    tier.delete(make().meta.name)
    client.hset(HASH, other.meta.name, theirs)
    assert tier.find(key(1)) == []
    assert_whole(tier, other)


def test_strangers_keys_are_left_alone(tier, server):
    write(tier, KV)
    client = server.client
    client.set("vlcache-0:x:y", "somebody else's")
    client.set(HASH.replace(key(1).encode(), key(2).encode()), "no hash")
    client.hset(HASH + b"0", "a", "b")
    client.hset(b"x" + HASH, "a", "b")
    before = client.dbsize()
    with opened(server, namespace=None) as whole:
        for one in (tier, whole):
            assert names(one) == [KV.meta.name]
            assert [found.meta.name for found in one.find(key(1))] == [KV.meta.name]
        assert whole.find(key(2)) == []
    with pytest.raises(TierError, match="WRONGTYPE"):
        tier.find(key(2))
    assert client.dbsize() == before


# What is gone.


def test_a_record_that_was_found_and_is_gone(tier):
    write(tier, KV)
    meta = found(tier, KV)
    tier.delete(meta.name)
    with pytest.raises(EntryGoneError, match=meta.name):
        verified_read(tier, meta)


def test_a_record_that_was_written_anew(tier):
    write(tier, KV)
    tier.delete(KV.meta.name)
    other = make(context=key(7), seed=3)
    write(tier, other)
    with pytest.raises(EntryGoneError):
        verified_read(tier, KV.meta)
    assert_whole(tier, other)


def test_a_record_that_is_written_anew_between_two_parts(tier):
    write(tier, KV)
    reading = tier.read(KV.meta, KV.meta.parts, parts(make(context=key(7))).__getitem__)
    next(reading)
    tier.delete(KV.meta.name)
    write(tier, KV)
    with pytest.raises(EntryGoneError):
        next(reading)
    assert_whole(tier, KV)


@pytest.mark.parametrize("number", range(6))
def test_a_record_without_one_chunk(tier, server, number):
    write(tier, KV)
    server.client.delete(server.chunks()[number])
    with pytest.raises(EntryGoneError):
        verified_read(tier, found(tier, KV))
    assert server.client.dbsize() == 0
    write(tier, KV)
    assert_whole(tier, KV)


def test_a_server_that_makes_room(tier, server):
    """Of what it has evicted nothing is read, and of the rest all is whole."""
    records = [make(number, key(7), layers=8, tokens=500, padded=500) for number in range(1, 61)]
    used = server.client.info("memory")["used_memory"]
    seen = collections.Counter()
    with server.set(maxmemory_policy="allkeys-random", maxmemory=used + 6_000_000):
        for record in records:
            with contextlib.suppress(TierError):  # it may evict what is being written
                seen[tier.write(record.meta, parts(record))] += 1
        for record in records:
            if (meta := found(tier, record)) is not None:
                try:
                    verified_read(tier, meta)
                    seen["read"] += 1
                except EntryGoneError:
                    seen["gone"] += 1
                    assert found(tier, record) is None
    assert min(seen["stored"], seen["gone"]) > 0


# Failures.

USES = {
    "find": lambda tier: tier.find(KV.meta.entry),
    "read": lambda tier: verified_read(tier, KV.meta),
    "write": lambda tier: tier.write(make(2).meta, parts(make(2))),
    "delete": lambda tier: tier.delete(KV.meta.name),
    "list": lambda tier: tier.lines(),
}


def assert_all_fail(tier, message=""):
    for name, use in USES.items():
        with pytest.raises(TierError, match=rf"^{name} .*{message}") as raised:
            use(tier)
        assert type(raised.value) is TierError
        assert "pass/word" not in str(raised.value)


def test_a_full_server(tier, server):
    write(tier, KV)
    size = server.client.dbsize()
    with server.set(maxmemory_policy="noeviction", maxmemory=1):
        with pytest.raises(TierError, match="maxmemory"):
            USES["write"](tier)
        assert_whole(tier, KV)
    assert server.client.dbsize() == size
    write(tier, CASES["encoder"])


def test_a_server_that_is_full_before_the_end(tier, server, monkeypatch):
    real = tier._client.eval

    def publish(*arguments):
        monkeypatch.undo()
        with server.set(maxmemory_policy="noeviction", maxmemory=1):
            return real(*arguments)

    monkeypatch.setattr(tier._client, "eval", publish)
    with pytest.raises(TierError, match="maxmemory"):
        write(tier, KV)
    assert server.client.dbsize() == 0


def test_a_server_that_takes_nothing(tier, server):
    write(tier, KV)
    server.client.replicaof("127.0.0.1", 1)
    try:
        for name in ("write", "delete"):
            with pytest.raises(TierError, match="replica"):
                USES[name](tier)
        assert_whole(tier, KV)
    finally:
        server.client.replicaof("NO", "ONE")
    USES["write"](tier)


@pytest.mark.parametrize("user", ["", ":wrong@"])
def test_a_password_that_is_none(server, user):
    tier = RedisTier(f"redis://{user}127.0.0.1:{server.port}/0", timeout=60, namespace=SPACE)
    assert_all_fail(tier, "(Authentication required|invalid username-password|WRONGPASS)")
    tier.close()


def test_a_server_that_is_not_there(server):
    with opened(server) as tier:
        write(tier, KV)
        server.kill()
        assert_all_fail(tier, "ConnectionError")
        server.start()
        assert tier.find(key(1)) == []
        write(tier, KV)
        assert_whole(tier, KV)


def test_a_server_that_was_started_anew_meanwhile(server):
    with opened(server) as tier:
        write(tier, KV)
        server.kill()
        server.start()
        assert tier.find(key(1)) == []  # the old connection is no fault


def be_patient(tier):
    """The same connections wait for long from now on."""
    for connection in tier._client.connection_pool._available_connections:
        connection.socket_timeout = connection.socket_connect_timeout = 60


def test_a_server_that_is_paused(server):
    with opened(server) as tier:
        write(tier, KV)
    with opened(server, timeout=0.5) as tier:
        with server.paused():
            assert_all_fail(tier, "Timeout")  # no connection can be made
        be_patient(tier)
        assert_whole(tier, KV)
    with opened(server, timeout=0.5) as tier:
        assert found(tier, KV) is not None
        with server.paused():
            assert_all_fail(tier, "Timeout")
        be_patient(tier)
        assert_whole(tier, KV)
        write(tier, make(2))


def test_a_pause_between_two_parts(server):
    """Answers that come too late are not taken for others."""
    with opened(server) as tier:
        write(tier, KV)
    with opened(server, timeout=0.5) as tier:
        reading = tier.read(KV.meta, KV.meta.parts, parts(make(context=key(7))).__getitem__)
        next(reading)
        with server.paused(), pytest.raises(TierError, match="Timeout"):
            next(reading)
        be_patient(tier)
        assert_whole(tier, KV)


@pytest.mark.parametrize(("is_silent", "most"), [(True, 1), (False, 2)])
def test_a_fault_is_not_tried_again_and_again(is_silent, most):
    """A server that never answers is asked once. One that closes connections may be asked for another."""
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def take():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    taken.append(connection)
                    if not is_silent:
                        connection.close()

        thread = threading.Thread(target=take)
        thread.start()
        tier = RedisTier(f"redis://127.0.0.1:{port}", timeout=0.3, namespace=SPACE)
        with pytest.raises(TierError):
            tier.find(key(1))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    tier.close()
    assert 0 < len(taken) <= most
    for connection in taken:
        connection.close()


def test_a_server_that_is_killed_again_and_again(server):
    """During reads and writes."""
    records = [make(number, key(7), layers=8, tokens=500, padded=500) for number in range(1, 5)]
    done, seen, faults = threading.Event(), collections.Counter(), []

    def work(number):
        rng = random.Random(number)
        with opened(server) as tier:
            while not done.is_set():
                record = rng.choice(records)
                try:
                    if rng.random() < 0.5:
                        seen[tier.write(record.meta, parts(record))] += 1
                    elif (meta := found(tier, record)) is not None:
                        verified_read(tier, meta)
                        seen["read"] += 1
                except DamagedError as error:
                    faults.append(error)
                except TierError:
                    seen["failed"] += 1
                except Exception as error:
                    faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        before = seen["read"]
        while seen["read"] < before + 5 and not faults:
            time.sleep(0.001)
        server.kill()
        server.start()
    done.set()
    for thread in threads:
        thread.join()
    assert not faults
    assert min(seen["stored"], seen["read"], seen["failed"]) > 0
