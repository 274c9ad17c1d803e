"""CONTRIBUTING.md says where new code goes, and the places are there."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"


def test_every_kind_of_change_has_a_place():
    text = PAGE.read_text(encoding="utf-8")
    [lines] = re.findall(r"(?m)^\| change \| start at \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    assert len({change for change, *_ in rows}) == len(rows) >= 20
    for change, place, also in rows:
        paths = re.findall(r"\]\(([^)]+)\)", place)
        assert paths, change
        for path in [*paths, *re.findall(r"\]\(([^)]+)\)", also)]:
            assert (ROOT / path).is_file(), (change, path)
            assert not (ROOT / path).is_symlink(), (change, path)


def test_the_page_stays_short():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 150


def test_every_mark_is_explained():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [marks] = re.findall(r"(?ms)^markers = \[\n(.*?)^\]", project)
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r'(?m)^    "(\w+)', marks):
        assert f"`{name}" in text, name
