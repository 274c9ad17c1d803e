"""Mutants of a small package, and the tests that find them."""

from __future__ import annotations

import ast
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

from research import mutants

SOURCE = '''"""A module of 3 functions."""
import logging
import time

LIMIT = 4


def grow(size: int = 2, *, limit: int = 8) -> int:
    """Return 1 more."""
    logging.debug("grows by %d", 1)
    if size < limit and size > 0:
        size += 1
    return size


def name(size: int) -> str:
    def inner(x: int) -> int:
        return x * 3

    return f"{size + 1}" + "s" * inner(size)


def never(size: int) -> int:
    if not size:
        size = max(size, 1)
    return pow(size, 1)


def wait(ready: bool) -> None:
    if not ready:
        time.sleep(60)
'''
TESTS = """from small.code import grow, name, never, wait


def test_cheap():
    assert grow() == 3


def test_names():
    assert name(1) == "2sss"


def test_full():
    assert grow(8) == 8


def test_never():
    assert never(0) == 1


def test_wait():
    wait(True)
"""


@pytest.fixture
def clone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "__init__.py").write_text("")
    (tmp_path / "small" / "code.py").write_text(SOURCE)
    (tmp_path / "test_small.py").write_text(TESTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for one in ("small", "small.code"):
        sys.modules.pop(one, None)


def _of(operator: str) -> list[mutants.Mutant]:
    return [one for one in mutants.mutants("small/code.py", SOURCE) if one.operator == operator]


def test_what_changes():
    changes = [(mutants.shown(SOURCE, one), one) for one in mutants.mutants("small/code.py", SOURCE)]
    told = {(one.operator, code["was"], code["now"]) for code, one in changes}
    assert {
        ("comparison", "size < limit", "size <= limit"),
        ("and, or", "size < limit and size > 0", "size < limit or size > 0"),
        ("operand removed", "size < limit and size > 0", "size < limit and size < limit"),
        ("constant", "0", "-1"),
        ("arithmetic", "size += 1", "size -= 1"),
        ("statement removed", "size += 1", "pass"),
        ("default argument", "8", "9"),
        ("return value", "return size", "return None"),
        ("arithmetic", "x * 3", "x // 3"),
        ("not removed", "not size", "not not size"),
        ("min and max", "max", "min"),
        ("arguments swapped", "pow(size, 1)", "pow(1, size)"),
    } <= told
    lines = {one.line for one in mutants.mutants("small/code.py", SOURCE)}
    assert not lines & {1, 2, 3, 5, 9, 10}  # docstrings, constants of the module, and what is logged


def test_each_changes_one_place_and_compiles():
    for one in mutants.mutants("small/code.py", SOURCE):
        tree = ast.parse(SOURCE)
        mutants.find(tree, one).change()
        assert ast.unparse(tree) != ast.unparse(ast.parse(SOURCE)), one
        compile(ast.fix_missing_locations(tree), "small/code.py", "exec")


def test_a_draw_depends_on_its_seed_and_begins_with_a_shorter_one(clone):
    covered = {"small/code.py": {8, 11, 12, 13}}
    many, few = (mutants.draw(clone, covered, number, 1) for number in (8, 3))
    assert many[:3] == few
    assert {one.line for one in many} <= covered["small/code.py"]
    assert mutants.draw(clone, covered, 8, 2) != many


def test_functions_of_the_process_change_and_sources_do_not(clone):
    code = importlib.import_module("small.code")
    grow = code.grow
    assert mutants.apply(clone, _of("comparison")[0]) == 1
    assert (grow(8), grow(9)) == (9, 9)
    assert mutants.apply(clone, _of("default argument")[1]) == 1
    assert (grow.__defaults__, grow.__kwdefaults__) == ((2,), {"limit": 9})
    assert mutants.apply(clone, _of("default argument")[0]) == 1
    assert grow.__defaults__ == (3,)
    assert (clone / "small" / "code.py").read_text() == SOURCE


SCRIPT = """
import json, pathlib, sys
import pytest
from research import mutants

root, step = pathlib.Path.cwd(), sys.argv[1]
if step == "cover":
    plugin = mutants.Coverage(root, root / "lines.jsonl", ["small"])
else:
    lines = mutants.Lines.read(root / "lines.jsonl")
    chosen = mutants.draw(root, lines.covered, int(step), 0)
    before = mutants.read(root / "before.jsonl")
    plugin = mutants.Runner(root, lines, chosen, root / "out.jsonl", before, 2, 60, 60, ["json"], ["small"])
sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "test_small.py", *sys.argv[2:]], plugins=[plugin]))
"""


def test_a_run_continues_where_it_stopped(clone):
    def step(*words: str) -> None:
        root = pathlib.Path(__file__).parents[2]
        subprocess.run(
            [sys.executable, "-c", SCRIPT, *words], cwd=clone, env={"PYTHONPATH": f"{root}:{clone}"}, check=True
        )

    step("cover")
    covered = [json.loads(line) for line in (clone / "lines.jsonl").read_text().splitlines()]
    assert [row["test"].partition("::")[2] for row in covered] == [
        "test_cheap",
        "test_names",
        "test_full",
        "test_never",
        "test_wait",
    ]
    assert [row["lines"] for row in covered] == [
        {"small/code.py": lines} for lines in ([10, 11, 12, 13], [17, 18, 20], [10, 11, 13], [24, 25, 26], [30])
    ]
    step("3")
    first = mutants.read(clone / "out.jsonl")
    assert len(first) == 3
    step("1000")
    rows = mutants.read(clone / "out.jsonl")
    assert rows[:3] == first
    assert len(rows) == len({mutants._key(row) for row in rows}) > 20
    results = {(row["operator"], row["was"], row["now"]): row for row in rows}
    changed = results["comparison", "size < limit", "size <= limit"]
    assert (changed["status"], changed["killer"]) == ("killed", "test_small.py::test_full")
    assert results["not removed", "not ready", "not not ready"]["status"] == "time-out"
    assert results["arguments swapped", "pow(size, 1)", "pow(1, size)"]["status"] == "survived"
    assert 31 not in {row["line"] for row in rows}  # no test executes it
    table = mutants.table(rows)
    assert "small/code.py:26 arguments swapped: pow(size, 1) -> pow(1, size) (1 of 1 tests)" in table
    assert table.startswith(f"killed {sum(row['status'] == 'killed' for row in rows)}, survived ")
    # Of fewer tests, only what another one found is run again.
    (clone / "out.jsonl").rename(clone / "before.jsonl")
    step("1000", "--deselect=test_small.py::test_full")
    after = {mutants._key(row): row for row in mutants.read(clone / "out.jsonl")}
    assert len(after) == len(rows)
    for row in rows:
        if row.get("killer") != "test_small.py::test_full":
            assert after[mutants._key(row)] == row
    assert after[mutants._key(changed)]["status"] == "survived"
