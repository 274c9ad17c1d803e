"""Tables that the docs quote, made of results: `python -m vlcache_jax.benchmarks.published`.

A page has `<!-- table NAME -->` before a table and `<!-- end -->` behind it; what stands between is written anew. A
test fails where a page says something else than its files.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vlcache_jax.reuse.parse import APPROXIMATE
from vlcache_jax.study.accuracy import COLD
from vlcache_jax.study.pairs import interval

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMPARED = ("full", "0.02", APPROXIMATE, "shift-0.1")  # with intervals
STUDIES = {"numbered": "study_numbered.json", "unnumbered": "study_unnumbered.json"}  # by model
# Of a table's columns: what stands before the images, how they were cached, and how many a question shows.
CASES = (
    ("text_first", "together", "one"), ("question_first", "together", "one"),
    ("text_first", "together", "several"), ("question_first", "together", "several"),
    ("text_first", "apart", "several"), ("question_first", "apart", "several"),
)  # fmt: skip
_TABLE = re.compile(r"(<!-- table (\w[\w -]*) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def study(model: str, size: str) -> list[Row]:
    """The rows of a study about pictures of one size."""
    rows = json.loads((ROOT / "benchmarks" / "results" / STUDIES[model]).read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["size"] == size]


def _case(row: Row) -> tuple[str, str, str]:
    return row["arrangement"], row["donors"], row["images"]


def losses(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line for each setting: rows computed, and in each case what it loses in the mean over tasks."""
    yield [
        "`reuse`", "rows, %", "rows x layers, %",
        "one image: other text", "another question", "two, seen together: other text", "another question",
        "two, seen apart: other text", "another question",
    ]  # fmt: skip
    for setting in dict.fromkeys(row["reuse"] for row in rows):
        own = {_case(row): row for row in rows if row["reuse"] == setting}
        first = next(iter(own.values()))
        name, value = ("cold, right of 100", "mean") if setting == COLD else (f"`{setting}`", "difference")
        style = "{:.1f}" if setting == COLD else "{:+.1f}"
        cells = [style.format(own[case][value]) if case in own else "" for case in CASES]
        yield [name, f"{first['rows %']:.1f}", f"{first['rows x layers %']:.1f}", *cells]


def goals(rows: Sequence[Row], settings: Sequence[str]) -> Iterator[list[str]]:
    """A line for each case and setting: what is lost, in the mean and in the worst task, with intervals."""
    yield ["images", "`reuse`", "questions", "cold", "mean", "worst task", "some task may lose", "ms", "MB read"]
    for case in CASES:
        for row in rows:
            if _case(row) == case and row["reuse"] in settings:
                worst = f"{interval(row, 'worst ')} {row['worst task']}" if row["worst difference"] < 0 else "-"
                yield [
                    _title(case), f"`{row['reuse']}`", str(row["questions"]), f"{row['mean'] - row['difference']:.1f}",
                    interval(row), worst, f"{row['at most']:.2f}", f"{row['ms']:.0f}", f"{row['MB read']:.1f}",
                ]  # fmt: skip


def answers(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line for each case: how many of 100 answers are right cold, and under the ways to reuse."""
    yield ["an image comes again", "cold", '`"approximate"`', '`"full"`']
    for case in CASES:
        own = {row["reuse"]: f"{row['mean']:.1f}" for row in rows if _case(row) == case}
        if own:
            yield [_title(case), own[COLD], own[APPROXIMATE], own["full"]]


def _title(case: tuple[str, str, str]) -> str:
    arrangement, donors, images = case
    shown = "one" if images == "one" else f"two, seen {donors}"
    return f"{shown}, {'other text' if arrangement == 'text_first' else 'another question'}"


def markdown(lines: Iterator[list[str]]) -> str:
    """A table, its first line the head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rest)) + "\n"


def _losses(model: str, size: str) -> str:
    return markdown(losses(study(model, size)))


def _answers(model: str, size: str) -> str:
    return markdown(answers(study(model, size)))


def _goals(model: str, size: str) -> str:
    return markdown(goals(study(model, size), COMPARED))


TABLES: dict[str, Callable[[], str]] = {
    f"{name} {model} {size}": functools.partial(make, model, size)
    for name, make in (("losses", _losses), ("goals", _goals), ("answers", _answers))
    for model, size in itertools.product(STUDIES, ("small", "large"))
}


def rewrite(text: str) -> str:
    """A page with its tables as the files say.

    Raises:
      ValueError: there is no such table.
    """

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name}")
        return f"{begin}{TABLES[name]()}{end}"

    return _TABLE.sub(fill, text)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := rewrite(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page} is as the results say now")


if __name__ == "__main__":
    main()
