"""What a server refuses, by a process of its own."""

import json

import pytest

from research import refusals


@pytest.mark.thorough
def test_the_table(tmp_path):
    out = tmp_path / "out.json"
    refusals.main(["--within", "60", "--out", str(out)])  # others may run beside
    rows = json.loads(out.read_text())["rows"]
    assert all(row["status"] in (400, 413, 415) and row["ms"] < 60_000 for row in rows)
