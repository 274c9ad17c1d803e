"""What `tests/code_metrics.py` finds in a small package, and the ceilings of this package."""

from __future__ import annotations

import pathlib
import re

import pytest

import vlcache_jax
from tests import code_metrics
from tests.helper import SIZES

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
    (package / "layer").symlink_to(tmp_path / "real")
    (package / "top.py").write_text("def most():\n" + "    pass\n" * 700)
    names = code_metrics.files(package)
    assert names == {str(tmp_path / "real" / "pool.py"): "layer/pool.py", str(package / "top.py"): "top.py"}
    sources = {name: code_metrics.read(name, pathlib.Path(path).read_text()) for path, name in names.items()}
    pool = sources["layer/pool.py"]
    assert pool.reads == [
        "layer/pool.py:11 owner._slots", "layer/pool.py:11 like._unknown", "layer/pool.py:11 self.owner._slots"
    ]  # fmt: skip
    assert [(part.name, part.lines) for part in pool.classes] == [("layer/pool.py: Pool", 16)]
    parts = {part.name.rpartition(" ")[2]: part for part in pool.functions}
    assert {name: part.complexity for name, part in parts.items()} == {
        "Pool.__init__": 1, "Pool.long": 7, "Pool.long.inside": 2
    }  # fmt: skip
    found = {row["what"]: (row["number"], row["which"]) for row in code_metrics.rows(list(sources.values()))}
    assert found == {
        "files over 600 lines": (1, "top.py 701"),
        "functions * over 80 lines": (1, "top.py: most 701"),
        "largest class, lines": (16, "layer/pool.py: Pool"),
        "largest function, lines": (701, "top.py: most, complexity 1"),
        "largest function *, lines": (701, "top.py: most, complexity 1"),
        "largest complexity *": (7, "layer/pool.py: Pool.long"),
        "repeated class names": (0, ""),
        "files that name kinds of layers": (0, ""),
        "import cycles": (0, ""),
    }
    kernel = code_metrics.read("pallas_kernels/top.py", (package / "top.py").read_text())
    assert [row["number"] for row in code_metrics.rows([kernel, pool])][1:5:3] == [0, 7]


def test_repeated_class_names_are_found():
    sources = [
        code_metrics.read("a.py", "class One:\n    class Two: ..."),
        code_metrics.read("b/c.py", "class Two: ..."),
    ]
    assert code_metrics.repeated_classes(sources) == {"Two": ["a.py", "b/c.py"]}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        # Two modules of a package, one of which imports the other in a function.
        (
            {"a/x.py": "import vlcache_jax.a.y", "a/y.py": "def f():\n    from vlcache_jax.a.x import g"},
            [["a.x", "a.y"]],
        ),
        # Packages, though no two of their modules import each other.
        (
            {
                "a/x.py": "from vlcache_jax.b import y",
                "a/z.py": "",
                "b/y.py": "",
                "b/w.py": "from vlcache_jax.c.v import f",
                "c/v.py": "from vlcache_jax.a.z import Z",
            },
            [["a", "b", "c"]],
        ),
        # A package that imports its own modules, and its modules each other in one direction.
        (
            {"a/__init__.py": "from vlcache_jax.a.x import f", "a/x.py": "from vlcache_jax.a import y", "a/y.py": ""},
            [],
        ),
    ],
)
def test_import_cycles_are_found(texts, expected):
    sources = [code_metrics.read(name, text) for name, text in texts.items()]
    assert code_metrics.cycles(sources) == expected


def test_the_package_is_read(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["code_metrics", "--still"])
    code_metrics.main()
    shown = capsys.readouterr().out
    assert "Packages" in shown
    table = dict(re.split(r" {2,}", line)[:2] for line in shown[shown.index("Code metrics") :].splitlines()[3:])
    assert int(table["modules"]) > 200
    assert int(table["lines"]) > int(table["lines of vlcache_jax/"]) > 10_000
    assert "largest function, lines" in table
    for name in (
        "files over 600 lines",
        "functions * over 80 lines",
        "repeated class names",
        "import cycles",
        "private attributes of other classes, read",
    ):
        assert table[name] == "0", name
    assert 0 < int(table["files that name kinds of layers"]) <= 20
    assert int(table["largest class, lines"]) <= 300


@pytest.mark.parametrize(
    ("trace", "most_files", "most_functions"), [(code_metrics.trace_hit, 50, 465), (code_metrics.trace_stream, 64, 610)]
)
def test_a_hit_enters_few_files_and_functions(trace, most_files, most_functions, checkpoints):
    """A feature that needs more raises a ceiling in its own commit, which says why."""
    names = code_metrics.files(pathlib.Path(vlcache_jax.__file__).resolve().parent)
    found = trace(names, checkpoints("qwen3_vl"), **SIZES).functions
    assert len(found) <= most_files, sorted(found)
    assert found.total() <= most_functions, found
