"""What `tests/house.py` finds in a small house."""

from __future__ import annotations

import pathlib
import re

from tests import house

PLANTED = """
import numpy as np

class Pool:
    _size: int

    def __init__(self, owner: Owner, other: Pool, like):
        super()._begin()
        self._slots = np._core
        self._same = other._slots, like._slots, Pool._make_one, like._replace()
        self._wrong = owner._slots, like._unknown, self.owner._slots

    def long(self, x):
        if x and x > 1 or x < -1:
            return [y for y in x if y]
        def inside():
            for _ in x:
                pass
        return inside
"""


def test_planted_cases_are_found(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "pool.py").write_text(PLANTED)
    package = tmp_path / "package"
    package.mkdir()
    (package / "wing").symlink_to(tmp_path / "real")
    (package / "top.py").write_text("def most():\n" + "    pass\n" * 700)
    names = house.files(package)
    assert names == {str(tmp_path / "real" / "pool.py"): "wing/pool.py", str(package / "top.py"): "top.py"}
    sources = {name: house.read(name, pathlib.Path(path).read_text()) for path, name in names.items()}
    pool = sources["wing/pool.py"]
    assert pool.reads == [
        "wing/pool.py:11 owner._slots", "wing/pool.py:11 like._unknown", "wing/pool.py:11 self.owner._slots"
    ]  # fmt: skip
    assert [(part.name, part.lines) for part in pool.classes] == [("wing/pool.py: Pool", 16)]
    parts = {part.name.rpartition(" ")[2]: part for part in pool.functions}
    assert {name: part.complexity for name, part in parts.items()} == {
        "Pool.__init__": 1, "Pool.long": 7, "Pool.long.inside": 2
    }  # fmt: skip
    found = {row["what"]: (row["number"], row["which"]) for row in house.rows(list(sources.values()))}
    assert found == {
        "files over 600 lines": (1, "top.py 701"),
        "functions * over 80 lines": (1, "top.py: most 701"),
        "largest class, lines": (16, "wing/pool.py: Pool"),
        "largest function, lines": (701, "top.py: most, complexity 1"),
        "largest function *, lines": (701, "top.py: most, complexity 1"),
        "largest complexity *": (7, "wing/pool.py: Pool.long"),
    }
    kernel = house.read("pallas_kernels/top.py", (package / "top.py").read_text())
    assert [row["number"] for row in house.rows([kernel, pool])][1:5:3] == [0, 7]


def test_the_package_is_read(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["house", "--still"])
    house.main()
    shown = capsys.readouterr().out
    assert "largest function" in shown
    assert "Wings" in shown
    table = dict(re.split(r" {2,}", line)[:2] for line in shown[shown.index("The house") :].splitlines()[3:])
    assert (
        table["files over 600 lines"] == table["functions * over 80 lines"] == table["private to others, read"] == "0"
    )
    assert int(table["largest class, lines"]) <= 300
