"""The benchmark of the tiers, in small."""

from __future__ import annotations

import json

import pytest

from research import stores
from vlcache_jax.cache.tiers import disk

SMALL = ["--mb", "0.4", "--records", "1", "--repeats", "1"]


def test_every_tier_is_measured(tmp_path, capsys):
    out = tmp_path / "stores.json"
    stores.main([*SMALL, "--out", str(out)])
    said = json.loads(out.read_text())
    assert {"date", "processor", "cores", "versions"} <= said.keys()
    assert said["tokens"] == 3
    rows = said["rows"]
    assert len(capsys.readouterr().out.splitlines()) > len(rows)
    kinds = [(row["store"].split()[0], row["what"], row["memory"], row["codec"]) for row in rows]
    expected = {
        *((store, "write", "-", codec) for store in ("disk", "object") for codec in ("bfloat16", "int8", "int4")),
        *(
            (store, "read", memory, codec)
            for store in ("disk", "object", "peer")
            for memory in ("new", "old")
            for codec in ("bfloat16", "int8", "int4")
        ),
    }
    assert set(kinds) == expected
    assert len(rows) == len(expected) + 6  # the disk's reads, cold or not possible
    sizes = {row["codec"]: row["MB"] for row in rows}
    assert sizes["bfloat16"] == pytest.approx(3 * stores.TOKEN / 1e6)
    assert sizes["bfloat16"] > sizes["int8"] > sizes["int4"]
    for row in rows:
        assert min(row[name] for name in ("ms", "plain ms", "GB/s", "plain GB/s", "xxh3 GB/s")) > 0
        assert row["GB/s"] == pytest.approx(row["MB"] / row["ms"])
        slower = min(row["plain GB/s"], row["xxh3 GB/s"])
        assert row["ratio %"] == pytest.approx(100 * row["GB/s"] / slower)
        is_enough = "-" if row["what"] == "write" else "yes" if row["ratio %"] >= stores.LEAST else "no"
        assert row[f"at least {stores.LEAST:.0f} %"] == is_enough
    caches = [row["page cache"] for row in rows if row["store"] == "disk" and row["what"] == "read"]
    assert {cache.split(":")[0] for cache in caches} == {"warm", "cold"}


def flip(buffers):
    buffers[0][0] ^= 1


def read_and_flip(descriptor, buffers, offset, read=disk._read_all):
    read(descriptor, buffers, offset)
    flip(buffers)


def fill_and_flip(filling, *given, read=stores.PendingWrite.read):
    read(filling, *given)
    filling.record.data.reshape(-1).view("uint8")[-1] ^= 1


def read_file_and_flip(path, first, record, read=stores._read_file):
    buffers = read(path, first, record)
    flip([buffers[0].reshape(-1).view("uint8")])
    return buffers


@pytest.mark.parametrize(
    ("module", "name", "wrong", "message"),
    [
        (disk, "_read_all", read_and_flip, "is damaged"),
        (stores.PendingWrite, "read", fill_and_flip, "load from disk must return the written bytes"),
        (stores.PendingWrite, "read", lambda *_: None, "must be complete"),
        (stores, "_read_file", read_file_and_flip, "plain read of disk must return the written bytes"),
        (stores, "_read_file", lambda *_: [], "plain read of disk must return .* are missing"),
        (disk.DiskTier, "write", lambda *_: "refused", "disk must store .*, got 'refused'"),
        (disk.DiskTier, "find", lambda *_: [], "disk must have one entry .*, got 0"),
    ],
)
def test_what_is_read_wrong_is_no_result(tmp_path, monkeypatch, module, name, wrong, message):
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(SystemExit, match=rf"^stores: .*{message}"):
        stores.main([*SMALL, "--out", str(tmp_path / "stores.json")])
    assert not (tmp_path / "stores.json").exists()


@pytest.mark.parametrize("wrong", [["--mb", "0"], ["--records", "0"], ["--repeats", "0"]])
def test_of_nothing_no_rate_is_taken(wrong):
    with pytest.raises(SystemExit, match=r"^stores: mb must be at least"):
        stores.main(wrong)
