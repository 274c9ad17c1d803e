"""This engine beside others: what is asked, what is told of it, and what is refused. No engine is opened."""

from __future__ import annotations

import ast
import copy
import json
import sys
import textwrap

import pytest

from vlcache_jax.benchmarks import peer
from vlcache_jax.benchmarks.peer import table
from vlcache_jax.benchmarks.peer.jobs import QUICK, SECTIONS, first, make_steps
from vlcache_jax.benchmarks.throughput import IMAGE

pytestmark = pytest.mark.slow  # a tool of the clone

CASES = {
    "cold",
    "repeat",
    "next question",
    "new prefix",
    "new prefix, full",
    "reordered",
    "batch",
    "repeated",
    "decode",
    "memory at the end",
}
ENGINE = """
import json, os, sys
PACKAGES, REUSE = ("psutil",), {reuse}
def setup(folder):
    return sys.executable, dict(SPOKEN="once")
class ENGINE:
    def __init__(self, model, dtype, options):
        assert os.environ["SPOKEN"] == "once" and options["requests"] and dtype == "float32", dtype
    def warm(self, reuse):
        assert set(reuse) <= set(REUSE)
    def answer(self, requests, reuse, logprobs):
        assert all(image.size for one in requests for image in one["images"])
        answers = [
            dict(tokens=[ord(letter) for letter in one["prompt"][: one["max_tokens"]]] +
                 [0] * (one["max_tokens"] - len(one["prompt"])),
                 prompt_tokens=len(one["prompt"]), cached=len(one["prompt"]) - 1,
                 matches=["approximate"] * len(one["images"]),
                 logprobs=[{{"1": -1.0, "2": -2.0}}] * one["max_tokens"] if logprobs else [])
            for one in requests
        ]
        {wrong}
        return answers
    def settle(self): pass
    def forget(self): pass
    def close(self): pass
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Makes a folder of engines that need no model; `wrong` spoils what those of a name answer."""

    def make(**wrong):
        for name, reuse in {"ours": ("exact", "approximate", "full"), "other": ("exact",), "torch": ("exact",)}.items():
            spoilt = textwrap.dedent(wrong.get(name, "pass"))
            (tmp_path / f"{name}.py").write_text(ENGINE.format(reuse=reuse, wrong=spoilt))
        monkeypatch.setattr(peer, "ENGINES", tmp_path)
        return tmp_path

    return make


def measure(tmp_path, **options):
    out = tmp_path / "out.json"
    options = {"peers": ["other"], "dtypes": ["float32"], "repeats": 1, "work": tmp_path / "work"} | options
    peer.measure(QUICK, out=out, **options)
    return json.loads(out.read_text())


def test_engines_are_asked_in_turn_and_compared(stand_ins, tmp_path):
    stand_ins()
    content = measure(tmp_path, repeats=2)
    rows = {(row["case"], row["size"]): row for row in content["rows"]}
    assert len(rows) == len(content["rows"])
    assert {case for case, _ in rows} >= CASES
    cold = rows["cold", QUICK.image_tokens]
    assert (cold["ours: runs"], cold["other: runs"]) == (4, 4)  # of the smallest size two a turn
    assert 0 < cold["ours: least"] <= cold["ours"] <= cold["ours: most"]
    assert cold["ours over other"] == pytest.approx(cold["other"] / cold["ours"])
    batch = rows["batch", QUICK.requests]
    assert batch["ours over other"] == pytest.approx(batch["ours"] / batch["other"])  # more is better
    assert rows["new prefix, full", QUICK.image_tokens]["other"] == "-"
    assert rows["start to the first answer, nothing kept", "-"]["ours: runs"] == 2  # these engines keep nothing
    pairs = {(row["answers of"], row["beside"]): row for row in content["agreement"]}
    assert pairs["ours float32", "torch float32"]["equal"] == f"{QUICK.compared} of {QUICK.compared}"
    assert pairs["other float32", "each prompt alone"]["largest difference"] == 0
    assert [row["answers as ours"] for row in content["batches"]] == [f"{QUICK.requests} of {QUICK.requests}"] * 4
    assert content["engines"]["other"]["versions"]["psutil"]
    assert list(content["commits"]) == ["ours"]


def test_parts_can_be_had(stand_ins, tmp_path):
    stand_ins()
    content = measure(tmp_path, only=["cold", "decode"], peers=[], against=peer.ROOT)
    measured = {row["case"] for row in content["rows"] if row["unit"] != "GB"}
    assert {case for case in measured if "start" not in case and "warm" not in case} == {"cold", "decode"}
    assert {"ours over against"} < content["rows"][0].keys()
    assert content["agreement"] == content["batches"] == []


def test_what_cannot_be_set_up_is_left_out(stand_ins, tmp_path):
    file = stand_ins() / "other.py"
    file.write_text(
        file.read_text().replace(
            "return sys.executable", "raise RuntimeError('no such wheel')\n    return sys.executable"
        )
    )
    content = measure(tmp_path, only=["decode"])
    assert content["left out"] == ["other is left out: no such wheel"]
    assert "other" not in content["rows"][0]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"other": "answers[0]['tokens'].pop()"}, "other, prompts 2 exact: answers must have the requested lengths"),
        ({"ours": "answers = []"}, "ours, prompts 2 exact: answers must have the requested lengths"),
        ({"other": "answers[0]['prompt_tokens'] += 1"}, "prompts must have the same number of tokens"),
        ({"other": "raise MemoryError('too small')"}, "other ended with status 1, see .*MemoryError: too small"),
        ({"ours": "os._exit(7)"}, "ours ended with status 7"),
    ],
)
def test_wrong_answers_fail(stand_ins, tmp_path, wrong, told):
    stand_ins(**wrong)
    with pytest.raises(ValueError, match=told):
        measure(tmp_path, only=["decode"])
    assert not (tmp_path / "out.json").exists()


@pytest.fixture
def results(tmp_path):
    """Makes what an engine answered in one turn, of one section."""

    def make(section):
        def answer(step, request):
            count = request["max_tokens"]
            told = [{str(i): -float(i + 1) for i in range(5)}] * count if step.logprobs else []
            matches = [step.reuse] * len(request["images"])
            return {"tokens": [1] * count, "prompt_tokens": 999, "cached": 998, "matches": matches, "logprobs": told}

        steps = [
            (step, {"seconds": 1.0, "cpu": 2.0, "answers": [answer(step, request) for request in step.requests]})
            for step in make_steps(QUICK, [section], tmp_path / section)
        ]
        for _, found in steps:
            for one in found["answers"]:
                one["matches"] = ["approximate"] * len(one["matches"])
        return {"steps": steps}

    return make


@pytest.mark.parametrize(
    ("section", "case", "change", "told"),
    [
        ("hits", "repeat", {"cached": 0}, "repeat .*: the beginning of the prompt must be cached"),
        ("hits", "new prefix", {"matches": ["none"]}, "new prefix .* approximate: all images must be cached"),
        ("agreement", "alone", {"logprobs": []}, "each token must have log-probabilities, got 0"),
        ("agreement", "together", {"logprobs": [{"1": float("nan")}] * QUICK.answer}, "must be finite"),
    ],
)
def test_wrong_results_are_told(results, section, case, change, told):
    result = results(section)
    table.check("one", result)
    reuse = "approximate" if case == "new prefix" else "exact"
    found = next(found for step, found in result["steps"] if (step.case, step.reuse) == (case, reuse))
    found["answers"][0] |= change
    with pytest.raises(ValueError, match=told):
        table.check("one", result)
    with pytest.raises(ValueError, match="at least one step must run"):
        table.check("one", {"steps": []})


def test_answers_are_compared_up_to_the_first_difference(results):
    one = results("agreement")
    other = copy.deepcopy(one)
    for (_, found), (step, mine) in zip(other["steps"], one["steps"], strict=True):
        if step.case == "together":
            found["answers"][1]["tokens"][2] = 7
            found["answers"][1]["logprobs"] = [{"0": -1.01, "1": -2.0, "2": -3.0, "3": -4.0, "9": -5.0}] * QUICK.answer
            assert mine["answers"][1]["tokens"][2] == 1
    runs = {("one", "float32"): [one], ("torch", "float32"): [other]}
    alone, row = table.agreement(runs)
    assert (alone["equal"], alone["first differences at"]) == ("3 of 3", "-")
    assert (row["equal"], row["first differences at"]) == ("2 of 3", "2")
    assert row["same five most likely"] == f"{2 * QUICK.answer} of {2 * QUICK.answer + 3}"
    assert row["largest difference"] == pytest.approx(0.01)
    for _, found in other["steps"]:
        for answer in found["answers"]:
            answer["logprobs"] = [{"0": -1.5}] * QUICK.answer
    with pytest.raises(ValueError, match=r"must agree to 0\.02"):
        table.agreement(runs)


def test_every_prompt_is_new_or_meant_to_be_known(tmp_path):
    steps = make_steps(QUICK, SECTIONS, tmp_path / "all")
    again = make_steps(QUICK, SECTIONS, tmp_path / "again")
    assert [len(step.requests) for step in steps] == [len(step.requests) for step in again]
    assert [one["prompt"] for step in steps for one in step.requests] == [
        one["prompt"] for step in again for one in step.requests
    ]
    seen: set[str] = set()
    for step in steps:
        for one in step.requests:
            assert one["prompt"].count(IMAGE) == len(one["images"])
            before = one["prompt"].partition(IMAGE)[0]
            if step.case in ("cold", "new prefix"):
                assert before not in seen
            if step.case in ("repeat", "next question"):
                assert before in seen
            seen.add(before)
    orders = {step.reuse: step.requests[0]["images"] for step in steps if step.case == "reordered"}
    assert len({images[0] for images in orders.values()}) == 3  # no order begins like another
    assert [
        step.case for step in make_steps(QUICK, ["hits"], tmp_path / "hits") if step.timed and step.case == "cold"
    ] == []
    assert first(QUICK, tmp_path / "first").requests[0]["images"]


def test_what_runs_in_other_environments_imports_nothing_of_ours():
    folder = peer.ENGINES.parent
    for file in (folder / "harness.py", *(path for path in peer.ENGINES.glob("*.py") if path.stem != "ours")):
        tree = ast.parse(file.read_text(), feature_version=(3, 11))
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        top = [node for node in named if node in tree.body and not (isinstance(node, ast.ImportFrom) and node.level)]
        names = {name.name for node in named if isinstance(node, ast.Import) for name in node.names}
        names |= {str(node.module) for node in named if isinstance(node, ast.ImportFrom)}
        assert not [name for name in names if name.startswith(("vlcache_jax", "research"))], file
        outer = {name.name for node in top if isinstance(node, ast.Import) for name in node.names}
        assert {name.partition(".")[0] for name in outer} <= {*sys.stdlib_module_names, "psutil"}, file


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--only", "some"], "only: got"),
        (["--dtype", ""], "dtype: got"),
        (["--repeats", "0"], "repeats must be at least 1"),
    ],
)
def test_wrong_options(capsys, given, told):
    with pytest.raises(SystemExit):
        peer.main(given)
    assert told in capsys.readouterr().err


def test_wrong_engines(tmp_path):
    with pytest.raises(ValueError, match="peers must be names of vllm, got sglang"):
        peer.measure(QUICK, peers=["sglang"], work=tmp_path)
    with pytest.raises(ValueError, match="against must be a checkout"):
        peer.measure(QUICK, against=tmp_path, work=tmp_path)
    with pytest.raises(ValueError, match="out must be a file"):
        peer.measure(QUICK, out=tmp_path, work=tmp_path)
