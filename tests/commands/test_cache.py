"""`vlcache cache` on a directory of records."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.cache.test_disk import closing, key, make, path_of, write
from vlcache_jax.commands.cli import app

RECORDS = (make(1), make(1, key(7)), make(2, key(7), planes=(16, 4)))


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
    assert title == f"3 records in {directory}"
    assert [line.split("  ")[0] for line in lines] == [key(1)[:12], key(1)[:12], key(2)[:12]]
    assert ["encoder rows" in line for line in lines] == [True, False, False]
    assert ["coded" in line for line in lines] == [False, False, True]


def test_stats(directory):
    result = run("stats", directory)
    assert f"2 images in {directory}" in result.stdout
    assert [line.split()[-2] for line in result.stdout.splitlines()[-2:]] == ["1", "2"]


def test_verify(directory):
    assert run("verify", directory).stdout.splitlines()[-1] == "records: 3 whole, 0 damaged, 0 that could not be read"
    with closing(directory) as tier:
        path = path_of(tier, RECORDS[1])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("verify", directory)
    assert RECORDS[1].meta.name in result.stdout
    assert result.stdout.splitlines()[-1] == "records: 2 whole, 1 damaged, 0 that could not be read"
    assert not path.exists()


def test_evict(directory):
    assert run("evict", directory, key(1)).stdout == "records deleted: 2\n"
    assert run("evict", directory, "0" * 63).stdout == "records deleted: 1\n"
    result = run("evict", directory, "xyz")
    assert (result.exit_code, "keys must have eight hexadecimal digits" in result.stderr) == (1, True)
    assert run("ls", directory).stdout == f"no records in {directory}\n"


def test_prune(directory):
    with closing(directory) as tier:
        newest = tier.lines()[-1][1]
    assert run("prune", directory, newest).stdout.startswith("records deleted: 2; left: 1, ")
    assert run("prune", directory, "0").stdout == "records deleted: 1; left: 0, 0.00 MB\n"


@pytest.mark.parametrize("command", ["ls", "stats", "verify"])
def test_what_is_no_directory_of_records(tmp_path, command):
    result = run(command, tmp_path / "nothing")
    assert (result.exit_code, "directory must be one of records" in result.stderr) == (1, True)
    assert not (tmp_path / "nothing").exists()
