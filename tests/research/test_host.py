import json

import pytest

from research import host


@pytest.mark.slow
def test_every_part_of_every_case_is_timed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "host.json"
    monkeypatch.setattr("sys.argv", ["host", "--repeats", "2", "--out", str(out)])
    host.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6
    assert [row["case"] for row in rows[-2:]] == [
        f"the same of compressed prompts, {lists}" for lists in ("1 work list", "4 work lists")
    ]
    assert len(capsys.readouterr().out.splitlines()) > len(rows)
    for row in rows:
        parts = [row[f"{part} ms"] for part in ("rows", "work lists", "handing over")]
        assert min(parts) > 0
        assert row["together ms"] == pytest.approx(sum(parts))
        assert row["until the first layer ms"] > 0
        assert row["arrays"] <= 12  # one of rows, and a work list for each bound
