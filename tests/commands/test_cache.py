"""`vlcache cache` on a directory of records."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tarfile

import pytest
from typer.testing import CliRunner

from tests.cache.records import assert_whole, key, make, names, write
from tests.cache.tiers.test_disk import closing, path_of
from vlcache_jax.cache.record import RefusedError
from vlcache_jax.cache.tiers.peer import PeerTier
from vlcache_jax.commands.cli import app

RECORDS = (make(1), make(1, key(7)), make(2, key(7), buffers=(16, 4)))


@pytest.fixture
def directory(tmp_path):
    now = iter(range(10))
    with closing(tmp_path / "records", clock=lambda: next(now)) as tier:
        write(tier, *RECORDS)
    return tmp_path / "records"


def run(*arguments):
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def test_ls(directory):
    result = run("ls", directory)
    assert result.exit_code == 0
    _, title, _, _, *lines = result.stdout.splitlines()
    assert title == f"3 cache entries in {directory}"
    assert [line.split("  ")[0] for line in lines] == [key(1)[:12], key(1)[:12], key(2)[:12]]
    assert ["encoder output" in line for line in lines] == [True, False, False]
    assert ["float32 int8" in line for line in lines] == [False, False, True]
    assert [key(99)[:8] in line for line in lines] == [True] * 3


def test_stats(directory):
    result = run("stats", directory)
    assert f"2 images in {directory}" in result.stdout
    assert [line.split()[-2] for line in result.stdout.splitlines()[-2:]] == ["1", "2"]


def test_verify(directory):
    assert run("verify", directory).stdout.splitlines()[-1] == "cache entries: 3 valid, 0 damaged, 0 unreadable"
    with closing(directory) as tier:
        path = path_of(tier, RECORDS[1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("verify", directory)
    assert RECORDS[1].meta.name in result.stdout
    assert result.stdout.splitlines()[-1] == "cache entries: 2 valid, 1 damaged, 0 unreadable"
    assert not path.exists()


def test_evict(directory):
    assert run("evict", directory, key(1)).stdout == "cache entries deleted: 2\n"
    assert run("evict", directory, "0" * 63).stdout == "cache entries deleted: 1\n"
    result = run("evict", directory, "xyz")
    assert (result.exit_code, "keys must have at least eight hexadecimal digits" in result.stderr) == (1, True)
    assert run("ls", directory).stdout == f"no cache entries in {directory}\n"


def test_prune(directory):
    with closing(directory) as tier:
        newest = tier.lines()[-1].bytes
    assert run("prune", directory, newest).stdout.startswith("cache entries deleted: 2; left: 1, ")
    assert run("prune", directory, "0").stdout == "cache entries deleted: 1; left: 0, 0.00 MB\n"


@pytest.mark.parametrize("kind", ["directory", "url"])
def test_folders_of_older_formats_are_named_and_deleted(directory, kind, caplog):
    for name in ("vlcache-1", "vlcache-2", "libraries-0", "vlcache-99", "vlcache-2.old", "mine"):
        (directory / name / "ab").mkdir(parents=True)
        (directory / name / "ab" / "file").write_bytes(bytes(2_000_000))
    store = directory if kind == "directory" else directory.as_uri()
    older = {"vlcache-1", "vlcache-2"} | ({"libraries-0"} if kind == "directory" else set())
    told = run("stats", store).stdout
    lines = {line.split(",")[0].strip(): line.split()[-1] for line in told.splitlines() if "older format" in line}
    assert lines == dict.fromkeys(older, "2.00")
    assert {f"vlcache-{number}" in caplog.text for number in (1, 2)} == {kind == "directory"}  # engines say it, too
    assert "older" not in run("prune", store, "1GB").stdout
    told = run("prune", store, "1GB", "--old-formats").stdout.splitlines()
    assert told[1:] == [f"deleted: {name}, of an older format, 2.00 MB" for name in sorted(older)]
    assert "older format" not in run("stats", store).stdout
    assert {path.name for path in directory.iterdir() if any(path.rglob("file"))} >= {
        "vlcache-99",
        "vlcache-2.old",
        "mine",
    }
    assert run("verify", directory).stdout.splitlines()[-1].startswith("cache entries: 3 valid")


def test_a_folder_that_an_older_engine_uses_stays(directory):
    old = directory / "vlcache-2"
    old.mkdir()
    with open(old / f"{'a' * 32}.writer", "wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        result = run("prune", directory, "1GB", "--old-formats")
        assert (result.exit_code, "vlcache-2 must not be in use" in result.stderr, old.exists()) == (1, True, True)
    assert run("prune", directory, "1GB", "--old-formats").exit_code == 0
    assert not old.exists()


@pytest.mark.parametrize("command", ["ls", "stats", "verify"])
def test_what_is_no_directory_of_records(tmp_path, command):
    result = run(command, tmp_path / "nothing")
    assert (result.exit_code, "store must be a URL or a directory of cache entries" in result.stderr) == (1, True)
    assert not (tmp_path / "nothing").exists()


def test_pinned_records_stay_when_others_leave(directory):
    with closing(directory) as tier:
        tier.pin(RECORDS[0].meta.name, True)
    assert run("prune", directory, "0").stdout.startswith("cache entries deleted: 2; left: 1, ")
    assert run("evict", directory, key(1)).stdout == "cache entries deleted: 1\n"


def test_what_is_old_leaves(directory):
    """The records of the fixture were written in the first seconds of the epoch."""
    with closing(directory) as tier:
        write(tier, make(3))
    assert run("prune", directory, "1GB", "--days", "1").stdout.startswith("cache entries deleted: 3; left: 1, ")


def test_records_move_in_a_file(directory, tmp_path):
    archive, other = tmp_path / "records.tar", tmp_path / "other"
    result = run("export", directory, archive)
    assert result.stdout.startswith("cache entries exported: 3, "), result.stderr
    assert (
        run("import", archive, other).stdout
        == "cache entries imported: 3; in the store before: 0; refused: 0; damaged: 0\n"
    )
    assert (
        run("import", archive, other).stdout
        == "cache entries imported: 0; in the store before: 3; refused: 0; damaged: 0\n"
    )
    with closing(other) as tier:
        for record in RECORDS:
            assert_whole(tier, record)
    assert run("export", directory, archive, key(2)).stdout.startswith("cache entries exported: 1, ")
    assert "store must have cache entries to export" in run("export", directory, archive, "f" * 10).stderr
    url = f"file://{tmp_path / 'far'}"
    assert run("import", archive, url).stdout.startswith("cache entries imported: 1; ")
    assert "1 cache entries in" in run("ls", url).stdout
    assert run("verify", url).stdout.splitlines()[-1].startswith("cache entries: 1 valid, 0 damaged")
    assert run("prune", url, "0").stdout.startswith("cache entries deleted: 1; left: 0")


@pytest.mark.parametrize("how", ["cut", "flipped", "text", "other"])
def test_a_damaged_archive_brings_nothing_wrong(directory, tmp_path, how):
    archive, other = tmp_path / "records.tar", tmp_path / "other"
    run("export", directory, archive)
    data = bytearray(archive.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[data.rindex(RECORDS[1].data[-1, 1, :6].tobytes())] ^= 1
    elif how == "text":
        data = b"this is no archive" * 100
    else:
        with tarfile.open(archive, "w") as foreign:
            foreign.add(__file__, arcname="../../etc/passwd")
        data = archive.read_bytes()
    archive.write_bytes(data)
    result = run("import", archive, other)
    told = {"flipped": "skipped: kv/", "other": "is not a cache entry of format"}.get(how)
    said = "file must be a file of `vlcache cache export`" in result.stderr if told is None else told in result.stdout
    assert (result.exit_code, said) == (1, True)
    assert other.exists() == (how != "text")
    with closing(other) as tier:
        assert len(names(tier)) < 3
        assert len(names(tier)) == {"flipped": 2, "text": 0, "other": 0}.get(how, len(names(tier)))
        for record in RECORDS:
            if record.meta.name in names(tier):
                assert_whole(tier, record)


def test_what_cannot_be_imported(tmp_path):
    result = run("import", tmp_path / "nothing.tar", tmp_path / "store")
    assert (result.exit_code, "file must be a file of `vlcache cache export`" in result.stderr) == (1, True)
    assert not (tmp_path / "store").exists()
    result = run("ls", "ftp://secret@nowhere/records")
    assert (result.exit_code, "remote must be a URL" in result.stderr, "secret" in result.stderr) == (1, True, False)


@pytest.mark.usefixtures("ctrl_c")
def test_serve(directory):
    """Another engine's tier reads what the command serves."""
    program = "from vlcache_jax.commands.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "cache", "serve", str(directory), "--port", "0"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"VLCACHE_PEER_TOKEN": "secret"},
    ) as process:  # fmt: skip
        try:
            url = process.stdout.readline().split()[-1]
            peer = PeerTier(url, token="secret", timeout=10.0, model=key(99), codec="float32")
            for record in RECORDS:
                assert_whole(peer, record)
            peer.close()
            stranger = PeerTier(url, token="guess", timeout=10.0, model=key(99), codec="float32")
            with pytest.raises(RefusedError, match="token"):
                stranger.find(key(1))
            stranger.close()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
