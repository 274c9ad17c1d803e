"""What one large body does to others, by a process of its own."""

import json

import pytest

from research import large_bodies


def test_each_kind_is_a_body_of_its_size():
    size = 2**16
    made = {what: make() for what, _, make in large_bodies.bodies(size)}
    assert all(size - 2**10 < len(body) <= size for body in made.values())
    wrong = {what for what, body in made.items() if not is_json(body)}
    assert wrong == {"no JSON", "digits"}  # of digits Python reads some thousands


def is_json(body):
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


@pytest.mark.thorough
def test_the_table(tmp_path):
    out = tmp_path / "out.json"
    large_bodies.main(["--mib", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 1 + len(list(large_bodies.bodies(1)))
    assert all(row["status"] in (200, 400) for row in rows)
