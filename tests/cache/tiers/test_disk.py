"""The disk tier, without a model: whatever happens to its files, nothing wrong is read."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import random
import sqlite3
import stat
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cache.records import CASES, assert_whole, found, key, load, make, names, parts, verified_read, write
from tests.helper import some_cases, some_seeds
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import SHARED, Quotas, owner_key
from vlcache_jax.cache.record import DamagedError, EntryGoneError, TierError
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.tiers.disk import FOLDER, DiskTier
from vlcache_jax.cache.tiers.disk_index import Index
from vlcache_jax.cache.tiers.record_file import file_bytes, file_name, make_header, read_header


def read(tier, record):
    """A record as a store of its own gets it from the tier; None if it does not."""
    return load(Store(CacheConfig()), tier, record.meta.name)


@pytest.fixture
def tier(tmp_path):
    with closing(tmp_path / "records") as tier:
        yield tier


class closing:  # noqa: N801
    def __init__(self, directory, capacity=10**6, **options):
        self.tier = DiskTier(directory, capacity, **options)

    def __enter__(self):
        return self.tier

    def __exit__(self, *_):
        self.tier.close()


def path_of(tier, record):
    return tier.directory / file_name(record.meta.name)


@pytest.mark.parametrize("record", CASES.values(), ids=CASES)
def test_what_is_read_is_what_was_written(tier, record):
    write(tier, record)
    there = read(tier, record)
    assert there.checksums() == record.checksums() == there.meta.checksums
    assert there.meta.with_room(record.meta.padded) == record.meta
    assert names(tier) == [record.meta.name]


def test_it_is_found_after_reopening(tmp_path):
    with closing(tmp_path) as tier:
        write(tier, CASES["encoder"], CASES["kv"])
    with closing(tmp_path) as tier:
        assert names(tier) == [CASES["encoder"].meta.name, CASES["kv"].meta.name]
        assert read(tier, CASES["encoder"]) is not None


def test_another_room(tier):
    """A file has no padding, so that engines of other bucket sizes read it, too."""
    record = CASES["kv"]
    write(tier, record)
    meta = found(tier, record).with_room(7)
    place = np.zeros(meta.shape, np.float32)
    places = {part: (place[part[1]],) for part in meta.parts}
    assert [part for part, _ in tier.read(meta, meta.parts, places.__getitem__)] == list(meta.parts)
    np.testing.assert_array_equal(place[:, :, :6], record.data[:, :, :6])
    assert not place[:, :, 6:].any()


def test_parts_come_in_the_order_that_is_asked_for(tier):
    record = CASES["kv"]
    write(tier, record)
    places = parts(make(context=key(7), padded=8, seed=9))
    order = [("kv", 2), ("kv", 0)]
    for part, (array,) in tier.read(record.meta, order, places.__getitem__):
        assert part == order.pop(0)
        np.testing.assert_array_equal(array[:, :6], record.data[part[1], :, :6])


def test_it_is_a_file_of_safetensors(tier):
    record = CASES["kv"]
    write(tier, record)
    tensors = load_file(path_of(tier, record))
    assert sorted(tensors) == ["kv.0", "kv.1", "kv.2"]
    np.testing.assert_array_equal(tensors["kv.1"], record.data[1, :, :6])


def test_the_header_is_a_function_of_what_the_record_is():
    record = CASES["kv"]
    header = make_header(record.meta)
    assert header == make_header(record.meta.with_room(64))
    assert read_header(header) == record.meta.with_room(6)
    for other in (
        dataclasses.replace(record.meta, owner=owner_key("you")),
        dataclasses.replace(record.meta, canonical=False),
        dataclasses.replace(record.meta, checksums=(1, 2, 3)),
        dataclasses.replace(record.meta, grid=(1, 6, 4)),
    ):
        assert make_header(other) != header
        assert read_header(make_header(other)) == other.with_room(6)
    with pytest.raises(ValueError, match="zip"):
        make_header(dataclasses.replace(record.meta, checksums=()))


# Damage.


@pytest.mark.parametrize("name", ["encoder", "coded"])
def test_no_flipped_bit_of_a_header_passes(name):
    header = make_header(CASES[name].meta)
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            read_header(bytes(flipped))


def test_a_header_that_claims_much_takes_nothing():
    header = make_header(CASES["kv"].meta).replace(b'"shape":"3,2,6,2,8"', b'"shape":"9999999999999,2,6,2,8"')
    assert b"9999999999999" in header
    with pytest.raises(DamagedError, match="checksums must be 9999999999999, one per part, got 3"):
        read_header(header)


@pytest.mark.parametrize("name", ["kv", *(pytest.param(n, marks=pytest.mark.slow) for n in ("encoder", "coded"))])
def test_no_flipped_bit_of_a_file_passes(tier, name):
    """The header's bits in steps, as all of them are flipped above, and a thousand of the data's."""
    record = CASES[name]
    write(tier, record)
    path = path_of(tier, record)
    whole = path.read_bytes()
    head = 8 * len(make_header(record.meta))
    rng = random.Random(0)
    bits = [*range(0, head, 97), *(rng.randrange(head, 8 * len(whole)) for _ in range(1000))]
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedError):
            verified_read(tier, record.meta)
    path.write_bytes(whole)
    verified_read(tier, record.meta)


def test_no_length_of_a_cut_file_passes(tier):
    record = make(context=key(7), layers=1, tokens=2)
    write(tier, record)
    path = path_of(tier, record)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            verified_read(tier, record.meta)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedError):
        verified_read(tier, record.meta)


def test_a_damaged_record_is_deleted_and_counted(tier, caplog):
    record = CASES["kv"]
    write(tier, record)
    path = path_of(tier, record)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store = Store(CacheConfig(), [tier])
    with caplog.at_level("CRITICAL"):
        with store.lookup(record.meta.entry, key(7), grid=None, donors=None, waits=True) as handle:
            assert handle.brought == {record.meta.name: "disk"}
        store.flush()
    assert (store.stats().corrupt, store.stats().bytes) == (1, 0)
    assert (names(tier), path.exists()) == ([], False)
    assert store.stats().tiers["disk"].damaged == 1
    write(tier, record)
    assert read(tier, record) is not None


def test_another_records_file_is_not_taken(tier):
    ours, other = CASES["kv"], make(2, key(7))
    write(tier, ours, other)
    path_of(tier, ours).write_bytes(path_of(tier, other).read_bytes())
    with pytest.raises(DamagedError, match="file is damaged"):
        verified_read(tier, ours.meta)


def test_a_file_that_is_gone_is_forgotten(tier):
    record = CASES["kv"]
    write(tier, record)
    path_of(tier, record).unlink()
    with pytest.raises(EntryGoneError, match="its file is missing"):
        verified_read(tier, record.meta)
    assert found(tier, record) is None
    write(tier, record)
    assert read(tier, record) is not None


# The index.


def spoil(path, how):
    if how == "gone":
        path.unlink()
    elif how == "text":
        path.write_text("this is no data base" * 500)
    elif how == "zeros":
        data = bytearray(path.read_bytes())
        data[100:4096] = bytes(3996)
        path.write_bytes(data)
    else:
        index = sqlite3.connect(path)
        index.execute("DROP TABLE records")
        index.execute("CREATE TABLE records (name TEXT)")
        index.commit()
        index.close()


@pytest.mark.parametrize("how", ["gone", "text", "zeros", "other"])
def test_the_index_is_made_anew_from_the_files(tmp_path, how, caplog):
    with closing(tmp_path) as tier:
        write(tier, CASES["encoder"], CASES["kv"])
    spoil(tmp_path / FOLDER / "index.sqlite", how)
    with caplog.at_level("CRITICAL"), closing(tmp_path) as tier:
        assert len(names(tier)) == 2
        for name in ("encoder", "kv"):
            assert read(tier, CASES[name]).checksums() == CASES[name].checksums()


KEPT = [make(number, context) for number in range(1, 6) for context in (None, key(7))]


@pytest.fixture
def index(tmp_path, caplog):
    """The file of an index of several pages."""
    caplog.set_level("CRITICAL")
    with closing(tmp_path) as tier:
        write(tier, *KEPT)
    return tmp_path / FOLDER / "index.sqlite"


def assert_opens(index):
    """Opening works, all records are found, and another can be written."""
    new = make(50)
    with closing(index.parents[1]) as tier:
        assert set(names(tier)) == {record.meta.name for record in KEPT}
        for record in KEPT:
            assert found(tier, record) == record.meta.with_room(record.meta.tokens)
        write(tier, new)
        tier.delete(new.meta.name)
        assert tier.counts()["records"] == len(KEPT)


@pytest.mark.parametrize("seed", some_seeds(0, buckets=(), thorough=range(8)))
def test_no_byte_of_the_index_stops_an_opening(index, seed):
    """Each of the first 100, some of those behind them that are not 0, and many at once."""
    rng, whole = random.Random(seed), index.read_bytes()
    filled = [place for place in range(100, len(whole)) if whole[place]]
    flips = [[place] for place in (*range(100), *rng.sample(filled, 40 if seed == 0 else 300))]
    flips += [rng.sample(range(len(whole)), rng.choice([2, 10, 100])) for _ in range(10)]
    for places in flips:
        damaged = bytearray(whole)
        for place in places:
            damaged[place] ^= rng.randrange(1, 256)
        index.write_bytes(damaged)
        assert_opens(index)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x55])
def test_no_pattern_and_no_length_of_the_index_stops_an_opening(index, byte):
    whole = index.read_bytes()
    for first, last in ((0, len(whole)), (0, 100), (100, len(whole)), (0, 4096), (4096, 8192)):
        index.write_bytes(whole[:first] + bytes([byte]) * (last - first) + whole[last:])
        assert_opens(index)
    for length in (0, 1, 16, 99, 100, 512, 4095, 4096, 4097, len(whole) - 4096, len(whole) - 1):
        index.write_bytes(whole[:length])
        assert_opens(index)


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE records",
        "CREATE TABLE other (x)",
        "CREATE UNIQUE INDEX one ON records (used)",
        "CREATE TRIGGER t BEFORE DELETE ON records BEGIN SELECT RAISE(ABORT, 'no'); END",
        "CREATE TABLE r AS SELECT * FROM records; DROP TABLE records; ALTER TABLE r RENAME TO records",
        "ALTER TABLE records RENAME TO r; CREATE VIEW records AS SELECT * FROM r",
        "ALTER TABLE records ADD COLUMN more",
        "UPDATE records SET name = CAST(x'656e632fff' AS TEXT) WHERE name LIKE 'enc%1'",
        "UPDATE records SET name = 'enc' || name WHERE name LIKE 'enc%1'",
        "UPDATE records SET name = CAST(name AS BLOB)",
        "UPDATE records SET bytes = 'many'",
        "UPDATE records SET bytes = bytes + 1",
        "UPDATE records SET used = x'00', written = 'long ago'",
        "UPDATE records SET used = 9e999",
        "UPDATE records SET header = 'text'",
        "UPDATE records SET header = zeroblob(900)",
        "UPDATE records SET owner = CAST(x'ff' AS TEXT)",
        "UPDATE records SET owner = '{}'".format("0" * 64),
        "UPDATE records SET pinned = 'yes'",
        "UPDATE records SET writer = CAST(x'ff' AS TEXT)",
        "UPDATE records SET writer = '{}'".format("0" * 32),
    ],
)
def test_no_index_of_other_things_stops_an_opening(index, statement):
    other = sqlite3.connect(index)
    other.executescript(statement)
    other.close()
    assert_opens(index)


def stand(path, kind, elsewhere):
    """Something that is no file stands in a file's place."""
    path.unlink(missing_ok=True)
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(elsewhere)
        case "dangling":
            path.symlink_to(elsewhere.with_name("nowhere") / "at all")


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal"])
def test_nothing_in_the_place_of_the_index_stops_an_opening(index, tmp_path, name):
    path, elsewhere = index.with_name(name), tmp_path / "elsewhere"
    elsewhere.write_text("somebody else's")
    for kind in ("pipe", "link", "dangling"):
        stand(path, kind, elsewhere)
        assert_opens(index)
    path.write_bytes(random.Random(0).randbytes(40_000))
    path.chmod(0)
    assert_opens(index)
    assert elsewhere.read_text() == "somebody else's"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("lock", kind) for kind in ("folder", "pipe", "link", "dangling")),
        *((f"index.sqlite{behind}", "folder") for behind in ("", "-wal", "-shm", "-journal")),
    ],
)
def test_what_cannot_be_mended_is_named(index, tmp_path, name, kind):
    path = index.with_name(name)
    stand(path, kind, index)
    told = (
        "must be a regular file; delete the existing one"
        if name == "lock"
        else "must be a file, got a folder: move it away"
    )
    with pytest.raises(ValueError, match=f"^disk must be a usable directory, got .*: {path} {told}$"):
        DiskTier(tmp_path, 10**6)
    assert not list(tmp_path.rglob("*.writer"))
    path.rmdir() if kind == "folder" else path.unlink()
    assert_opens(index)


@pytest.mark.parametrize("kind", ["locked", "full"])
def test_an_index_that_is_whole_is_not_made_anew(index, tmp_path, monkeypatch, kind):
    """What is pinned is written nowhere else."""
    with closing(tmp_path) as tier:
        tier.pin(KEPT[0].meta.name, True)
    monkeypatch.setattr("vlcache_jax.cache.tiers.disk_index._PATIENCE", 0.05)
    other = sqlite3.connect(index, isolation_level=None)
    if kind == "locked":
        other.execute("BEGIN IMMEDIATE")
        told = "its index: database is locked; another process locks it: try again after that process has ended"
    else:
        connect = Index._connect
        monkeypatch.setattr(Index, "_connect", lambda own: limited(connect(own)))
        told = "its index: database or disk is full; free space on its disk"
        for number in range(60, 80):  # files that the index has no room for
            path = index.parent / file_name(make(number).meta.name)
            path.write_bytes(make_header(make(number).meta) + bytes(3 * 6 * 16 * 4))
    with pytest.raises(ValueError, match=f"^disk must be a usable directory, got .*: {told}$"):
        DiskTier(tmp_path, 10**6)
    assert not list(tmp_path.rglob("*.writer"))
    other.close()
    monkeypatch.undo()
    with closing(tmp_path) as tier:
        assert tier.pinned(KEPT[0].meta.entry) == {KEPT[0].meta.name}


def limited(connection):
    """It takes no further page, as on a disk that is full."""
    connection.execute("PRAGMA max_page_count = 1")
    return connection


def test_a_transaction_that_a_full_disk_has_ended_is_over(tier, monkeypatch):
    """What went wrong is told, and the next one begins again."""

    def fail(*_):
        tier._index._index.execute("ROLLBACK")  # as SQLite does then
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tier._index, "claim", fail)
        with pytest.raises(TierError, match="disk is full"):
            write(tier, CASES["kv"])
    write(tier, CASES["kv"])
    assert names(tier) == [CASES["kv"].meta.name]


def test_what_was_written_by_a_clock_that_was_ahead_was_written_now(tmp_path):
    """It leaves when its time is over, and in the order in which it was used."""
    now = [1e9]
    with closing(tmp_path, ttl=60.0, clock=lambda: now[0]) as tier:
        for number in (1, 2, 3):
            write(tier, make(number))
            now[0] += 1
        verified_read(tier, make(1).meta)
        tier.delete(make(9).meta.name)
        now[0] = 1000.0  # it is right again
        write(tier, make(4))
        assert [one.written for number in range(1, 5) for one in tier.find(key(number))] == [1000.0] * 4
        assert [name[-1] for name in names(tier)] == ["2", "3", "1", "4"]
        now[0] += 61
        write(tier, make(5))
        assert [name[-1] for name in names(tier)] == ["5"]


@pytest.mark.parametrize("is_index_lost", [False, True])
def test_a_clock_that_was_ahead_is_noticed_at_opening(tmp_path, is_index_lost):
    now = [1e10]
    with closing(tmp_path, clock=lambda: now[0]) as tier:
        write(tier, make(1))
        os.utime(path_of(tier, make(1)), (1e10, 1e10))
    if is_index_lost:
        (tmp_path / FOLDER / "index.sqlite").unlink()
    now[0] = 1000.0
    with closing(tmp_path, ttl=60.0, clock=lambda: now[0]) as tier:
        assert [one.written for one in tier.find(key(1))] == [1000.0]
        now[0] += 61
    with closing(tmp_path, ttl=60.0, clock=lambda: now[0]) as tier:
        assert names(tier) == []


def test_files_and_index_agree_after_opening(tmp_path, caplog):
    with closing(tmp_path) as tier:
        write(tier, CASES["encoder"], CASES["kv"], make(2), make(3))
        paths = [path_of(tier, record) for record in (CASES["kv"], make(2), make(3))]
    paths[0].unlink()
    paths[1].write_bytes(b"short")
    paths[2].rename(paths[2].with_name(f"{key(4)}.safetensors"))
    foreign = [paths[2].with_name(name) for name in ("model.safetensors", "download.part")]
    for path in foreign:
        path.write_bytes(b"somebody else's")
    (paths[2].parent / f"{key(5)}.safetensors.{'0' * 32}.0.part").write_bytes(b"half")
    with caplog.at_level("CRITICAL"), closing(tmp_path) as tier:
        assert names(tier) == [CASES["encoder"].meta.name]
        assert Store(CacheConfig(), [tier]).stats().tiers["disk"].damaged == 2
        ours = path_of(tier, CASES["encoder"])
        assert sorted((tmp_path / FOLDER).glob("??/*")) == sorted([ours, *foreign])
        assert tier.counts() == {
            "records": 1,
            "bytes": path_of(tier, CASES["encoder"]).stat().st_size,
            "capacity": 10**6,
        }


# The budget.


def test_the_least_recently_used_leave(tmp_path):
    now = iter(range(1000))
    size = len(make_header(make().meta)) + 3 * 6 * 16 * 4
    with closing(tmp_path, 3 * size + 100, clock=lambda: next(now)) as tier:
        records = [make(i) for i in range(1, 6)]
        write(tier, *records[:3])
        assert read(tier, records[0]) is not None  # used
        write(tier, records[3])
        assert [name[-1] for name in names(tier)] == ["3", "1", "4"]
        assert tier.write(records[3].meta, parts(records[3])) == "known"
        write(tier, records[4])
        assert [name[-1] for name in names(tier)] == ["1", "4", "5"]
        there = sum(path.stat().st_size for path in (tmp_path / FOLDER).glob("??/*"))
        assert tier.counts()["bytes"] == there <= 3 * size + 100
    with closing(tmp_path, size + 10) as tier:  # a smaller budget holds from the start
        assert [name[-1] for name in names(tier)] == ["5"]


def test_what_is_larger_than_the_budget_is_refused(tmp_path):
    with closing(tmp_path, 1000) as tier:
        assert tier.write(CASES["kv"].meta, parts(CASES["kv"])) == "refused"
        assert (names(tier), list((tmp_path / FOLDER).glob("??"))) == ([], [])


def test_a_salt_has_its_share(tmp_path):
    """Its own oldest records leave, not those of others; who has no salt, or is the operator, has no limit."""
    now = iter(range(1000))
    size = file_bytes(make().meta)
    owners = {"greedy": 4, None: 3, SHARED: 3}
    with closing(tmp_path, 20 * size, shares=Quotas(2 * size + 10), clock=lambda: next(now)) as tier:
        numbers = iter(range(1, 100))
        made = {owner: [make(next(numbers), owner=owner) for _ in range(count)] for owner, count in owners.items()}
        for records in made.values():
            write(tier, *records)
        kept = [record for records in made.values() for record in records if record.meta.name in names(tier)]
        assert [record.meta.owner for record in kept].count(owner_key("greedy")) == 2
        assert kept == made["greedy"][2:] + made[None] + made[SHARED]
        large = make(50, tokens=18, padded=18, owner="greedy")
        assert tier.write(large.meta, parts(large)) == "refused"
        assert len(names(tier)) == 8  # nothing left in vain


def test_what_leaves_a_share_makes_room_on_the_disk_too(tmp_path):
    """Another's record stays where that is enough, although it is the oldest one."""
    size = file_bytes(make().meta)
    now = iter(range(1000))
    with closing(tmp_path, 3 * size, shares=Quotas(2 * size), clock=lambda: next(now)) as tier:
        other, first, second, third = (make(i, owner="own" if i else "other") for i in range(4))
        write(tier, other, first, second, third)
        assert sorted(names(tier)) == sorted(record.meta.name for record in (other, second, third))


def test_what_is_pinned_makes_no_room(tmp_path):
    now = iter(range(1000))
    size = file_bytes(make().meta)
    records = [make(number) for number in range(1, 6)]
    with closing(tmp_path, 2 * size + 10, clock=lambda: next(now)) as tier:
        write(tier, records[0])
        tier.pin(records[0].meta.name, True)
        write(tier, *records[1:3])
        assert names(tier) == [records[0].meta.name, records[2].meta.name]
    with closing(tmp_path, size + 10, clock=lambda: next(now)) as tier:  # also when it opens with fewer bytes
        assert names(tier) == [records[0].meta.name]
        assert tier.write(records[3].meta, parts(records[3])) == "refused"
        tier.pin(records[0].meta.name, False)
        write(tier, records[3])
        assert names(tier) == [records[3].meta.name]


def test_a_date_outlives_the_index_and_may_come_too_late(tmp_path):
    with closing(tmp_path) as tier:
        write(tier, make(1), make(2))
        tier.date(make(1).meta.name, 50.0)
        tier.delete(make(2).meta.name)
        tier.date(make(2).meta.name, 50.0)  # of what has left
        assert names(tier) == [make(1).meta.name]
    for file in (tmp_path / FOLDER).glob("index.sqlite*"):
        file.unlink()
    with closing(tmp_path) as tier:
        [one] = tier.find(make(1).meta.entry)
        assert one.written == 50.0


def test_what_is_too_old_leaves_with_the_next_record(tmp_path):
    now = [100.0]
    with closing(tmp_path, ttl=60.0, clock=lambda: now[0]) as tier:
        write(tier, make(1))
        now[0] += 61
        [one] = tier.find(make(1).meta.entry)  # to be deleted, if somebody wants that
        assert one.written == 100.0
        write(tier, make(2))
        assert names(tier) == [make(2).meta.name]


# Faults of the disk.


def failing(monkeypatch, name, number, error):
    """The `number`-th call of a function of `os` fails; how many there were."""
    real, calls = getattr(os, name), []

    def call(*args, **options):
        calls.append(name)
        if len(calls) == number:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(os, name, call)
    return calls


@pytest.mark.parametrize("name", ["open", "posix_fallocate", "write", "fsync", "close"])
def test_a_disk_that_fails_while_it_is_written(tier, name, monkeypatch):
    record, calls = CASES["kv"], []
    with monkeypatch.context() as patch:
        for number in range(1, 100):
            with patch.context() as inner:
                calls = failing(inner, name, number, OSError(28, "No space left on device"))
                failed = False
                try:
                    write(tier, record)
                except TierError:
                    failed = True
            if len(calls) < number:
                assert number > 1, "the fault never came"
                assert not failed
                break
            if not failed:
                continue  # the folder was in sync all the same
            # It is not there, nothing is left of it, and the next one may write it.
            if found(tier, record) is None:
                assert not list(tier.directory.rglob("*.part"))
                assert tier.counts()["bytes"] == 0
            tier.delete(record.meta.name)
    assert read(tier, record).checksums() == record.checksums()


def test_a_short_write_goes_on(tier, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    write(tier, CASES["kv"])
    assert read(tier, CASES["kv"]).checksums() == CASES["kv"].checksums()


def test_a_short_read_goes_on(tier, monkeypatch):
    write(tier, CASES["kv"])
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: real(descriptor, [buffers[0][:5]], offset))
    assert read(tier, CASES["kv"]).checksums() == CASES["kv"].checksums()


def test_a_locked_index_is_a_fault_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("vlcache_jax.cache.tiers.disk_index._PATIENCE", 0.05)
    with closing(tmp_path) as tier:
        other = sqlite3.connect(tmp_path / FOLDER / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TierError, match="locked"):
            write(tier, CASES["kv"])
        assert found(tier, CASES["kv"]) is None
        other.execute("ROLLBACK")
        write(tier, CASES["kv"])
        other.execute("BEGIN IMMEDIATE")
        verified_read(tier, CASES["kv"].meta)  # readers do not wait for writers
        other.close()


def test_a_look_waits_for_no_writer(tmp_path):
    """A thread that waits for another process to write keeps nobody from looking."""
    with closing(tmp_path) as tier, concurrent.futures.ThreadPoolExecutor(1) as threads:
        write(tier, CASES["kv"])
        other = sqlite3.connect(tmp_path / FOLDER / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = threads.submit(write, tier, CASES["encoder"])
        while tier._index._lock.acquire(blocking=False):  # until the writer has it
            tier._index._lock.release()
            time.sleep(0.001)
        assert found(tier, CASES["kv"]) is not None
        assert names(tier) == [CASES["kv"].meta.name]
        assert not waiting.done()
        other.execute("ROLLBACK")
        other.close()
        waiting.result()
        assert len(names(tier)) == 2


def test_a_read_waits_for_no_writer(tmp_path, monkeypatch):
    """Another process may keep the index for long; what was used is noted later."""
    now = iter(range(100))
    with closing(tmp_path, clock=lambda: next(now)) as tier:
        write(tier, CASES["kv"], CASES["encoder"])
        other = sqlite3.connect(tmp_path / FOLDER / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(tier, "_changing", lambda: pytest.fail("a reader waits"))
        verified_read(tier, CASES["kv"].meta)
        monkeypatch.undo()
        other.execute("ROLLBACK")
        other.close()
        assert names(tier)[-1] == CASES["encoder"].meta.name
        tier.delete(make(9).meta.name)
        assert names(tier)[-1] == CASES["kv"].meta.name


def test_what_lies_beside_is_nobody_elses_business(tmp_path):
    others = [tmp_path / name for name in ("index.sqlite", "my novel.writer", "ab")]
    others.append(others.pop() / f"{key(1)}.safetensors")
    others[-1].parent.mkdir()
    for path in others:
        path.write_text("somebody else's")
    with closing(tmp_path) as tier:
        write(tier, CASES["kv"])
    assert {path.read_text() for path in others} == {"somebody else's"}


def test_a_file_that_is_open_is_read_though_it_leaves(tier, monkeypatch):
    def leaving(name):
        file = opened(name)
        path_of(tier, CASES["kv"]).unlink()
        return file

    write(tier, CASES["kv"])
    opened = tier._open
    monkeypatch.setattr(tier, "_open", leaving)
    verified_read(tier, CASES["kv"].meta)
    with pytest.raises(EntryGoneError):
        verified_read(tier, CASES["kv"].meta)


def test_a_file_that_cannot_be_read_for_once_stays(tmp_path, monkeypatch, caplog):
    with closing(tmp_path) as tier:
        write(tier, CASES["kv"])
    with monkeypatch.context() as patch, caplog.at_level("CRITICAL"):
        patch.setattr("vlcache_jax.cache.tiers.disk._header", failing_header)
        with closing(tmp_path) as tier:
            assert names(tier) == [CASES["kv"].meta.name]
    with closing(tmp_path) as tier:
        verified_read(tier, CASES["kv"].meta)


def failing_header(path):
    raise OSError(5, "Input/output error")


def test_a_dead_writers_place_is_taken_over(tmp_path, monkeypatch):
    dead = DiskTier(tmp_path, 10**6)
    monkeypatch.setattr(dead, "_write", lambda *_: True)  # it is killed before it has begun
    write(dead, CASES["kv"])
    with closing(tmp_path) as tier:
        assert tier.write(CASES["kv"].meta, parts(CASES["kv"])) == "known"
        assert names(tier) == []  # somebody who lives has it
        dead._alive.close()  # the lock goes with its owner
        write(tier, CASES["kv"])
        verified_read(tier, CASES["kv"].meta)
    dead._index.close()


def test_what_is_no_file_is_left_alone(tmp_path):
    with closing(tmp_path) as tier:
        write(tier, CASES["kv"])
        path = path_of(tier, CASES["kv"])
    path.unlink()
    path.mkdir()
    os.mkfifo(path_of(tier, make(3)))
    with closing(tmp_path) as tier:
        assert names(tier) == []
        assert path.is_dir()


def test_it_belongs_to_its_owner_alone(tmp_path):
    with closing(tmp_path / "new" / "records") as tier:
        write(tier, CASES["kv"])
        for path in [tier.directory, *tier.directory.rglob("*")]:
            if path.name not in ("lock",) and path.suffix not in (".writer", ".sqlite-shm", ".sqlite-wal"):
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@pytest.mark.parametrize("below", ["", "records"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_an_error(tmp_path, kind, below):
    path = tmp_path / kind
    if kind == "file":
        path.write_text("x")
        told = "is a file: move it away, or name another directory"
    else:
        path.symlink_to(tmp_path / "nowhere")
        told = "is a broken symbolic link: delete it, or name another directory"
    with pytest.raises(ValueError, match=f"^disk must be a usable directory, got '{path / below}': {path} {told}$"):
        DiskTier(path / below, 1000)


# Several at once.


def test_threads_that_write_and_read(tmp_path):
    records = [make(i, context) for i in range(1, 13) for context in (None, key(7))]
    with closing(tmp_path, 12_000) as tier, concurrent.futures.ThreadPoolExecutor(8) as threads:

        def work(number):
            rng = random.Random(number)
            for _ in range(30):
                record = rng.choice(records)
                if rng.random() < 0.5:
                    tier.write(record.meta, parts(record))
                elif rng.random() < 0.1:
                    tier.delete(record.meta.name)
                else:
                    try:
                        there = load(Store(CacheConfig()), tier, record.meta.name)
                    except TierError:
                        continue
                    assert there is None or there.checksums() == record.checksums()

        list(threads.map(work, range(8)))
        sizes = sum(path.stat().st_size for path in (tmp_path / FOLDER).glob("??/*"))
        assert sizes == tier.counts()["bytes"] <= 12_000
        assert names(tier)


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.cache.records import make, parts
from vlcache_jax.cache.tiers.disk import FOLDER, DiskTier
tier = DiskTier(sys.argv[1], 40_000)
for number in range(1, 10**6):
    record = make(number % 50 + 1, None if number % 2 else "7" * 64)
    assert tier.write(record.meta, parts(record))
    print(record.meta.name, flush=True)
"""


def writing(directory, root):
    """A process that writes records, and tells the names of those that are stored."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, str(directory), root], stdout=subprocess.PIPE, text=True
    )


def killed_loads(directory, count, root):
    """Writers that are killed at any point: what they said was stored is there, and all that is seen is whole."""
    rng = random.Random(0)
    for _ in range(count):
        with writing(directory, root) as process:
            process.stdout.readline()  # it is in flight
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            said = process.stdout.read().split()
        with closing(directory, 40_000) as tier:
            there = names(tier)
            assert there
            for name in there:
                _, entry, *context = name.split("/")
                record = make(int(entry, 16), context[0] if context else None)
                assert_whole(tier, record)
            assert not said or said[-1] in there  # the newest one never makes room
            assert not list(directory.rglob("*.part"))
            assert tier.counts()["bytes"] <= 40_000
            assert len(list(directory.rglob("*.writer"))) == 1  # our own


@pytest.mark.slow
def test_killed_writers(tmp_path, request):
    killed_loads(tmp_path, 4, str(request.config.rootpath))


@pytest.mark.parametrize("count", some_cases(15, int(os.environ.get("VLCACHE_KILLS", "40"))))  # 200 by hand
def test_many_killed_writers(tmp_path, request, count):
    killed_loads(tmp_path, count, str(request.config.rootpath))


def test_two_processes_on_one_directory(tmp_path, request):
    root = str(request.config.rootpath)
    with writing(tmp_path, root) as first, writing(tmp_path, root) as second:
        for process in (first, second):
            for _ in range(60):
                assert process.stdout.readline(), "it has ended"
        with closing(tmp_path, 40_000) as tier:
            assert tier.counts()["records"] > 0
            assert tier.counts()["bytes"] <= 40_000
        first.kill()
        second.kill()
    with closing(tmp_path, 40_000) as tier:
        for name in names(tier):
            _, entry, *context = name.split("/")
            assert_whole(tier, make(int(entry, 16), context[0] if context else None))
        assert sum(path.stat().st_size for path in (tmp_path / FOLDER).glob("??/*")) == tier.counts()["bytes"] <= 40_000


def test_what_index_and_file_say_of_another_record_is_deleted(tmp_path):
    told = []
    with closing(tmp_path) as tier:
        tier.report = told.append
        one, other = make(1, key(7)), make(1, key(8))
        write(tier, one, other)
        for damage in (make_header(other.meta), b"x"):
            path_of(tier, one).write_bytes(path_of(tier, other).read_bytes())
            tier._index._execute("UPDATE records SET header = ? WHERE name = ?", damage, one.meta.name)
            assert [found.meta.name for found in tier.find(key(1))] == [other.meta.name]
            assert (names(tier), path_of(tier, one).exists()) == ([other.meta.name], False)
            write(tier, one)
        assert [type(error) for error in told] == [DamagedError] * 2
