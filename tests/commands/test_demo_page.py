"""The demo's report, of outputs that no engine has made."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from markupsafe import escape

from vlcache_jax.commands.demo_page import BASE, MODES, DemoRun, DemoTurn, lesson, make_page, result
from vlcache_jax.engine.completions import RequestMetrics
from vlcache_jax.outputs import Why
from vlcache_jax.reuse.selection import APPROXIMATE

TURNS = (
    DemoTurn(("picture.png",), "", "What is at C2?", "red triangle"),
    DemoTurn(("left.png", "right.png"), "If 1 < 2:", "Which has more rings?", "image two"),
)
MADE_ON = {"processor": "CPU", "cores": 2, "versions": {"jax": "1"}, "date": "2026-11-28"}


def run(turn, ttft, *, answer=None, match="exact", why=None, tokens=7):
    cache = SimpleNamespace(images=[SimpleNamespace(match=match, why=why)], rows=(20, tokens))
    outputs = [SimpleNamespace(text=answer or turn.answer)]
    return DemoRun(
        turn, SimpleNamespace(outputs=outputs, metrics=RequestMetrics(ttft=ttft, prefill=ttft / 2), cache=cache)
    )


@pytest.fixture
def runs():
    one, two = TURNS
    new = {"match": "approximate", "why": Why.other_context}
    return {
        "no reuse": [run(turn, 0.06, match="miss", why=Why.reuse_off) for turn in TURNS],
        "exact": [run(one, 0.02), run(two, 0.08, match="miss", why=Why.evicted)],
        "approximate": [run(one, 0.02), run(two, 0.03, **new)],
        "full": [run(one, 0.01), run(two, 0.01, answer="<b>", **new)],
    }


def test_the_report_compares_four_modes(runs):
    page = make_page(runs, "tiny-vqa on cpu, float32", 5, MADE_ON)
    assert list(runs) == list(MODES)
    rows = re.findall(r'class="mode">([^<]*)</th><td class="what">([^<]+)<.*?>(\d of 2)<.*?speed">(.*?)<', page)
    assert [(mode, *more) for mode, _, *more in rows] == [
        ("no reuse", "2 of 2", "baseline"),
        ("exact", "2 of 2", "1.2x faster"),
        ("approximate", "2 of 2", "2.4x faster"),
        ("full", "1 of 2", "6.0x faster"),
    ]
    assert f"{100 * float(APPROXIMATE.removeprefix('shift-')):g} % of the image tokens" in rows[2][1]
    assert re.findall(r'"context">(.*?)<', page) == ["-", "same", "same", "same", "-", "new", "new", "new"]
    assert "&lt;b&gt; ✗" in page
    assert "If 1 &lt; 2: Image one: [left.png]" in page
    # In this order: the result in one sentence, the modes, the questions, the terms.
    places = [page.index(escape(part)) for part in (result(runs), lesson(runs))]
    places += [page.index(part) for part in ("<table", "<h2>Images", "<h2>Questions", "<h2>Terms")]
    assert places == sorted(places)
    assert "http" not in page  # nothing is loaded from elsewhere


def test_the_result_is_that_of_the_runs(runs):
    assert result(runs) == (
        'With reuse="approximate", 2 of 2 answers are correct (without reuse: 2 of 2) '
        "and the first token comes 2.4x faster."
    )
    assert lesson(runs).startswith('With "full", the answer to question 2 is wrong: the two images of the prompt were')
    assert lesson(runs).endswith(". Recomputing a few tokens fixes it.")
    runs["approximate"][1] = run(TURNS[1], 0.22, answer="wrong", match="approximate", why=Why.other_context)
    assert "1 of 2 answers are correct (without reuse: 2 of 2) and the first token comes 2.0x slower." in result(runs)
    assert "fixes" not in lesson(runs)
    runs["full"] = runs[BASE]
    assert lesson(runs) == 'With "full", all answers are correct.'
