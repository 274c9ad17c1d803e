"""Tables in the docs: how they are made, and that they say what their files say."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from research import charts, published
from vlcache_jax.benchmarks import ttft_table
from vlcache_jax.benchmarks.floor import HYBRIDS
from vlcache_jax.benchmarks.ttft_table import SHIFT_ENDS

ROW = {
    "size": "small", "arrangement": "text_first", "donors": "together", "images": "one", "group": "cold",
    "reuse": "off", "questions": 300, "mean": 99.0, "difference": 0.0, "low": -0.5, "high": 0.5, "worst task": "grid",
    "worst difference": 0.0, "worst low": -1.0, "worst high": 1.0, "at most": 1.0, "rows %": 100.0,
    "rows x layers %": 100.0, "MB read": 0.0, "ms": 80.4,
}  # fmt: skip
LOST = {
    "group": "no rows", "reuse": "full", "mean": 95.04, "difference": -3.96, "low": -6.0, "high": -2.0,
    "worst task": "count", "worst difference": -8.0, "worst low": -12.0, "worst high": -4.0, "at most": 12.0,
    "rows %": 0.0, "rows x layers %": 0.0, "MB read": 1.68, "ms": 9.6,
}  # fmt: skip
APART = {"arrangement": "question_first", "donors": "apart", "images": "several"}
ROWS = [ROW, ROW | LOST, ROW | APART, ROW | LOST | APART | {"difference": -60.0}]


def test_losses_have_a_line_for_each_setting():
    head, cold, full = published.losses(ROWS)
    assert len(head) == len(cold) == len(full) == 3 + len(published.CASES)
    assert cold == ["no reuse: accuracy [%]", "100.0", "100.0", "99.0", "", "", "", "", "99.0"]
    assert full == ["`full`", "0.0", "0.0", "-4.0", "", "", "", "", "-60.0"]


def test_each_case_has_schedules_of_its_own_and_all_are_one_line():
    own, other = ({"group": f"rows of {name}"} for name in ("schedule", "schedule-of-text_first"))
    settings = [own | {"reuse": name} for name in ("schedule", "shift-schedule", "0.0247", "spread-0.0247")]
    settings += [
        other | {"reuse": name} for name in ("schedule-of-text_first", "shift-schedule-of-text_first", "0.025")
    ]
    settings += [{"group": "r = 0.03", "reuse": "shift-0.03"}]
    found = [line[0] for line in published.losses([ROW | LOST | setting for setting in settings])]
    assert found[1:] == [
        "`schedule`", "`shift-schedule`", "`R`, R the schedule's mean", "`spread-R`, R the schedule's mean",
        "`schedule` of the other arrangement", "`shift-schedule` of the other arrangement", "`shift-0.03`",
    ]  # fmt: skip


def test_goals_have_a_line_for_each_case_and_setting():
    _, one, apart = published.goals(ROWS, ["full"])
    assert one == [
        "one image, new text before it", "`full`", "300", "99.0", "-4.0 [-6.0, -2.0]",
        "-8.0 [-12.0, -4.0] count", "12.00", "10", "1.7",
    ]  # fmt: skip
    assert apart[:2] == ["two images, cached separately, another question before them", "`full`"]
    _, one, _ = published.goals(ROWS, ["full"], digits=2)
    assert one[3:6] == ["99.00", "-3.96 [-6.00, -2.00]", "-8.00 [-12.00, -4.00] count"]


def test_agreement_is_that_of_each_engine_with_itself():
    row = {"equal": "7 of 10", "same five most likely": "107 of 136", "largest difference": 0.045}
    rows = [
        row | {"answers of": "ours bfloat16", "beside": "each prompt alone"},
        row | {"answers of": "vllm bfloat16", "beside": "each prompt alone"},
        row | {"answers of": "ours bfloat16", "beside": "vllm bfloat16"},
    ]
    assert list(published.agreement(rows))[1:] == [
        ["VLCache-JAX", "bfloat16", "7 of 10", "107 of 136", "0.04"],
        ["vLLM", "bfloat16", "7 of 10", "107 of 136", "0.04"],
    ]


def test_budgets_tell_memory_where_it_is_another():
    whole = {"method": "whole", "budget %": 100.0, "memory %": 100.0, "grid": 90.0, "questions": 5, "mean": 90.0}
    over = {"over random difference": 3.0, "over random low": 1.0, "over random high": 5.0}
    told = over | {"agreement": 71.0, "hit rate": None}
    rows = [whole] + [
        whole | told | {"method": method, "budget %": budget, "memory %": memory, "mean": mean}
        for method, budget, memory, mean in (
            ("snapkv", 10.0, 9.8, 20.0), ("snapkv", 50.0, 50.0, 40.0),
            ("fastv", 10.0, 60.2, 30.0), ("fastv", 50.0, 75.0, 50.0),
        )
    ]  # fmt: skip
    assert list(published.budgets(rows))[1:] == [
        ["`snapkv`", "20.0", "40.0"],
        ["`fastv`", "30.0 (60 % kept)", "50.0 (75 % kept)"],
        ["full cache", "", "90.0"],
    ]
    assert list(published.ahead(rows))[1] == ["`snapkv`", *["+3.0 [+1.0, +5.0]"] * 2, "71.0", "71.0", "", ""]
    assert list(published.by_task(rows)) == [
        ["`compress`", "grid [%]"], ["full cache", "90"], ["`snapkv-0.5`", "90"], ["`fastv-0.5`", "90"]
    ]  # fmt: skip


def test_sparsity_has_a_line_for_each_kind_of_rows(tmp_path, monkeypatch):
    heads = {"least": [0.1, 0.2], "mean": [0.5, 0.25], "greatest": [0.9, 0.3]}
    found = {"sparsity of heads by layer": {"prefill": heads, "decoding": heads}}
    (tmp_path / "a.json").write_text(json.dumps(found))
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    cells = ["50 (10 to 90)", "25 (20 to 30)"]
    head = ["sparsity [%]", "layer 0", "layer 1"]
    assert list(published.sparse("a.json")) == [head, ["prefill", *cells], ["decoding", *cells]]


def test_lengths_have_a_line_for_each_case(tmp_path, monkeypatch):
    case = {"arrangement": "text_first", "donors": "apart", "images": "several", "reuse": published.APPROXIMATE}
    row = case | {"kept MSE": 0.0941, "free MSE": 0.2394, "gain difference": 4.0, "gain low": -2.04, "gain high": 9.3}
    found = {"model": "small", "split": "test", "rows": [row | {"reuse": "shift-0.1"}, row]}
    (tmp_path / "a.json").write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    monkeypatch.setattr(published, "LENGTHS", ["a.json"])
    _, line = published.lengths()
    shown = "two images, cached separately, new text before them"
    assert line == ["small", "test", shown, "0.094", "0.24", "+4.0 [-2.0, +9.3]"]


def test_answers_have_a_line_for_each_case():
    rows = [*ROWS, ROW | {"reuse": published.APPROXIMATE, "mean": 98.96}]
    rows = [row for row in rows if row["donors"] == "together"]
    _, line = published.answers(rows)
    assert line == ["one image, new text before it", "300", "99.0", "99.0", "95.0"]


def test_a_choice_is_told_with_losses_and_errors():
    rows = [{"logit MSE": 0.0345} | row for row in ROWS]
    assert list(published.choice(rows)) == [
        ["images", "`full`"],
        ["one image, new text before it", "-4.0, 0.035"],
        ["two images, cached separately, another question before them", "-60.0, 0.035"],
    ]


def test_cold_answers_are_told_by_task():
    one = {"reuse": "off", "grid": 99.0, "compare": "-", "questions": 300, "mean": 99.0}
    case = {name: ROW[name] for name in ("arrangement", "donors", "images")}
    several = case | {"images": "several"}
    rows = [case | one, several | one | {"compare": 91.04}, several | one | {"donors": "apart"}, ROW | LOST]
    assert list(published.cold(rows)) == [
        ["accuracy [%]", "grid", "compare", "mean"],
        ["one image, new text before it", "99.0", "", "99.0"],
        ["two images, new text before them", "99.0", "91.0", "99.0"],
    ]


def test_times_are_told_by_configuration_and_size():
    names = ("cold", "encoder cached", "r = 0.1", "r = 0", "schedule, mean 0.0250", "shift, r = 0.03")
    rows = [
        {"configuration": name, "K, V in": place, "image tokens": tokens, "TTFT ms": tokens + 1000 * i,
             "spread ms": 227, "over cold": 11.2 * i,
         "over encoder cached": 1.0, "rows a layer": 34.4, "GFLOP/s of cold": i / 10, "floor ms": 100.0,
         "times floor": 2.0 + i, "TTFT minus compute %": 3.0}
        for tokens in (1024, 2048) for place in ("disk", "host") for i, name in enumerate(names)
    ]  # fmt: skip
    host = [row for row in rows if row["K, V in"] == "host"]
    _, small, large = published.ttft_sizes(host)
    assert small == ["1024", "1,020", "2,020", "3,020", "5,020", "6,020", "4,020", "0.20", "0.40", "5.0"]
    assert large[:2] == ["2048", "2,050"]
    first = [row for row in rows if row["image tokens"] == 1024]
    for row in first:
        row["TTFT ms"] *= row["K, V in"] != "disk"  # those do not count
    assert list(published.ttft_first(tuple(published.MODES), first)) == [
        ["reuse mode", "TTFT [ms]", "spread (max - min) [ms]", "speedup"],
        ["no reuse", "1,020", "227", "0"],  # a speedup has no more digits than the times have
        ['`"exact"`', "2,020", "227", "11"],
        ['`"approximate"`', "6,020", "227", "56"],
        ['`"full"`', "4,020", "227", "34"],
    ]
    modes = [line[0] for line in published.ttft_first(None, first)]
    assert modes[3:6] == ["`0.1`", '`"full"`', "schedule (mean 2.5 %)"]
    assert next(itertools.islice(published.ttft(first), 2, None))[:5] == ['`"exact"`', "2,020", "227", "0", "11"]
    launched = [{"what": "part: give pages", "ms": 732.39, "least ms": 1.0}]
    assert list(published.launched(launched))[1] == ["part: allocate KV blocks", "732", "1"]
    parts = ("rows", "work lists", "handing over", "together", "until the first layer")
    row = {"case": "a step"} | {f"{part} ms": i + 0.25 for i, part in enumerate(parts)}
    assert list(published.host([row]))[1] == ["a step", "0.2", "1.2", "2.2", "3.2", "4.2"]


def test_a_server_is_told_by_policy_and_rate():
    rows = [
        {"rate": rate, "reuse": reuse, "TTFT p50 ms": 1234.5 * rate, "goodput/s": rate / 3, "cached %": 10.0 * rate,
         "equal answers %": 100.0}
        for rate in (1.0, 2.0) for reuse in ("off", "full")
    ]  # fmt: skip
    head, off, full = published.policies(rows)
    assert head[1:5] == [
        "TTFT p50 [s] at 1 requests/s", "TTFT p50 [s] at 2 requests/s", "goodput [requests/s] at 1 requests/s",
        "goodput [requests/s] at 2 requests/s",
    ]  # fmt: skip
    assert off == ["no reuse", "1.2", "2.5", "0.33", "0.67", "15", "100"]
    assert full[0] == '`"full"`'
    rows = [
        {"what": "hits", "direct": 20.04, "HTTP": 22.5, "ratio": 1.1},
        {"what": "8 clients", "direct": 200.4, "HTTP": 190.0, "ratio": 0.95},
    ]
    assert list(published.server_cost(rows))[1:] == [
        ["TTFT of a cache hit [ms]", "20.0", "22.5", "+2.5 ms"],
        ["output of 8 clients [tokens/s]", "200", "190", "-5.0 %"],
    ]


def test_compression_is_told_by_prompt_and_way(tmp_path, monkeypatch):
    ways = ("full", "vl-cache-0.1")
    rows = [
        {"prompt": 4176, "answers": answers, "K, V": way, "tokens/s": 12.34 * (1 + i), "spread %": 3.0 - i,
         "times full": 1.0 + i, "K, V MB": 100.4 * (1 - i), "compressed MB": 10.0 * i, "end to end s": 20.06 - i}
        for answers in (1, 4) for i, way in enumerate(ways)
    ]  # fmt: skip
    head, *lines = published.compressed_decoding(rows)
    assert [line[:2] for line in lines] == [["4176", "1"], ["4176", "4"]]
    assert lines[0][2:] == ["12.3", "24.7", "2", "3", "100", "10", "20.1", "19.1"]
    assert len(head) == len(lines[0])
    whole = {"prompt": 4176, "K, V": "full", "kept %": 100.0, "first token s": 6.543, "prefill s": 6.0,
             "observe + compact s": 0.0, "of prefill %": 0.0, "tokens/s": 12.3, "spread %": 3.0,
             "end to end s": 15.0}  # fmt: skip
    less = {"K, V": "vl-cache-0.1", "kept %": 9.96, "observe + compact s": 0.12, "of prefill %": 2.0}
    head, *lines = published.compressed_requests([whole, whole | less])
    assert lines == [
        ["4176", "full cache", "100", "6.54", "6", "0", "", "12.3", "3", "15"],
        ["4176", "`vl-cache-0.1`", "9.96", "6.54", "6", "0.12", "2.0", "12.3", "3", "15"],
    ]
    first = [{"requests": "plain", "TTFT ms": 301.4, "least ms": 290.0, "in pairs ms": 0.0}]
    assert list(published.first_tokens(first))[1] == ["plain", "301", "290", "+0"]
    # Before it is measured the tables say so.
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    for name in ("compression", "compression requests", "compression first tokens"):
        assert list(published.TABLES[name]()) == [["not measured yet"]]
    (tmp_path / "compression_cpu.json").write_text(json.dumps({"first tokens": first}), encoding="utf-8")
    assert len(list(published.TABLES["compression first tokens"]())) == 2


def test_torch_is_told_with_the_encoder(tmp_path, monkeypatch):
    both = {
        "dtype": "float32",
        "prefill ms, vlcache": 2000.0,
        "prefill ms, torch": 1900.0,
        "encode ms, vlcache": 5000.0,
    }
    rows = [both | {"slots": slots, "encode ms, torch": ms} for slots, ms in ((1, 3100.0), (2, 3000.0))]
    (tmp_path / "prefill_cpu.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    assert list(published.prefill(rows))[1] == ["float32", "1", "2,000", "1,900", "5,000", "3,100", "0.71"]
    assert published.rewrite("a <!-- figure torch float32 -->0<!-- end --> b") == (
        "a <!-- figure torch float32 -->1.40 to 1.43<!-- end --> b"
    )
    with pytest.raises(ValueError, match=r"figure must be one of .*, got vllm"):
        published.rewrite("<!-- figure vllm --><!-- end -->")


def test_pages_are_rewritten_between_their_marks(monkeypatch):
    monkeypatch.setitem(published.TABLES, "of a test", lambda: iter([["a", "b"], ["1", "2"]]))
    page = "Before.\n\n<!-- table of a test -->\nold\n<!-- end -->\n\nBehind.\n"
    new = "Before.\n\n<!-- table of a test -->\n| a | b |\n| --- | --- |\n| 1 | 2 |\n<!-- end -->\n\nBehind.\n"
    assert published.rewrite(page) == published.rewrite(new) == new
    with pytest.raises(ValueError, match=r"table must be one of .*, got nothing"):
        published.rewrite(page.replace("of a test", "nothing"))


def test_the_readmes_times_are_of_files():
    readme = (published.ROOT / "README.md").read_text(encoding="utf-8")
    head = '| images in a new context | no reuse | `"exact"` | `"approximate"` | `"full"` |'
    assert f"<!-- table first token modes -->\n{head}" in readme
    assert "<!-- table peer first -->\n| case |" in readme
    for figure in ("agreement ours bfloat16", "agreement vllm bfloat16", "vllm amx cold bfloat16"):
        assert f"<!-- figure {figure} -->" in readme
    page = (published.ROOT / "docs" / "benchmarks" / "vllm_and_torch.md").read_text(encoding="utf-8")
    assert re.search(r"torch is\s<!-- figure torch float32 -->", page)


def test_speed_beside_vllm_is_by_sizes_and_may_be_of_another_case(monkeypatch):
    def row(case, size, unit, ours, vllm):
        figures = {"ours": ours, "vllm": vllm, "ours: CPU s": ours, "vllm: CPU s": vllm}
        return {"dtype": "float32", "case": case, "size": size, "unit": unit} | figures

    rows = [
        row("cold", 1024, "s", 2.0, 1.0), row("cold", 2048, "s", 2.0, 2.5), row("decode", 1, "tokens/s", 3.0, 4.0),
        row("known, linked", 1024, "s", 0.1, "-"), row("known", 1024, "s", 1.0, 0.8),
    ]  # fmt: skip
    monkeypatch.setattr(published, "_rows", lambda name: rows)
    assert published.peer_speed("float32", "cold") == "0.5 to 1.2"
    assert published.peer_speed("float32", "decode") == "0.75"
    assert published.peer_speed("float32", "known, linked", "known") == "8"
    assert list(published.peer_ratios(rows))[1:] == [
        ["new images", "1024", "0.5", ""],
        ["new images", "2048", "1.2", ""],
        ["decoding", "1", "0.75", ""],
        ["known, linked", "1024", "8", ""],
        ["known", "1024", "0.8", ""],
    ]
    assert len(list(published.peer("float32", rows))) == 1 + len(rows)
    assert len(list(published.peer("bfloat16", rows))) == 1


def test_cases_of_attention_are_written_in_public_words():
    assert published._attention("cold 4096") == "prefill of 4096 tokens"
    assert published._attention("decode 1 x 20480") == "decode 1 sequence of 20480 tokens"
    assert published._attention("decode 64 beside 448 rows, 4096 to 20480") == (
        "decode 64 sequences of 4096 to 20480 tokens, with 448 prefill tokens"
    )
    assert published._attention("another case") == "another case"


def test_every_result_has_a_public_name():
    """Names in result files are those of the code."""
    assert {row["what"] for row in published._rows("large_bodies_cpu.json")} - {"an unknown field"} == {
        *published.BODIES
    }
    assert {row["case"] for row in published._rows("host.json")} == {*published.HOST}
    for name in ("gpu attention", "peer float32", "launched", "ttft", "gpu first tokens"):
        cells = [cell for line in published.TABLES[name]() for cell in line]
        assert not any(re.search(r"picture|\br = |\bcold\b|beside|behind|rows", cell) for cell in cells), name


def test_modes_have_public_names():
    names = ("cold", "encoder cached", "r = 0.3", "r = 0", "schedule, mean 0.0325", "shift, r = 0.03", "another")
    assert [ttft_table.mode(name) for name in names] == [
        "no reuse", '"exact"', "0.3", '"full"', "schedule (mean 3.25 %)", '"approximate"', "another"
    ]  # fmt: skip


def test_charts_are_drawn_from_their_results(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "ROOT", tmp_path)
    monkeypatch.setitem(charts.CHARTS, "a.png", charts.CHARTS["docs/ttft.png"])
    charts.main(["a.png"])
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"chart must be one of docs/ttft\.png, .*, got b\.png"):
        charts.main(["b.png"])
    for name in charts.CHARTS:
        assert name == "a.png" or (published.ROOT / name).is_file()


def test_what_is_told_of_stores_leaves_no_load_out():
    """Nor what stays below 70 % where the memory that is loaded into was mapped before."""
    _, *lines = published.stores(published._rows("stores_cpu.json"))
    names = ["disk", "disk, cold", "object store (file://)", "peer (loopback)", "Redis (loopback)"]
    assert [line[0] for line in lines] == names * 2
    assert lines[5] == ["disk", "existing mapping", "", "36 ms, 41 %", "19 ms, 47 %", "17 ms, 37 %"]


def test_each_mode_has_its_own_time_and_speedup(monkeypatch):
    configurations = ("cold", "encoder cached", "shift, r = 0.03", "r = 0")

    def rows(name):
        times = (8000.0, 4000.0, 320.0, 64.26) if name == "ttft_cpu.json" else (321.6, 516.4, 64.74, 48.9)
        found = [
            {"configuration": of, "K, V in": "-", "TTFT ms": ms, "over cold": times[0] / ms}
            for of, ms in zip(configurations, times, strict=True)
        ]
        return [*found, found[-1] | {"K, V in": "disk", "TTFT ms": 1.0}]

    monkeypatch.setattr(published, "_rows", rows)
    _, cpu, gpu = published.first_token_modes()
    assert cpu[1:] == ["8.0 s", "4.0 s (2.0x)", "0.32 s (25x)", "0.064 s (124x)"]
    assert gpu[1:] == ["322 ms", "516 ms (0.62x)", "64.7 ms (5.0x)", "48.9 ms (6.6x)"]


def test_first_tokens_of_a_hybrid_have_the_bytes_that_are_moved():
    row = dict.fromkeys(
        ("TTFT ms", "spread ms", "over cold", "over encoder cached", "rows a layer", "MB moved", "floor ms"), 2.0
    )
    rows = [row | {"configuration": name} for name in ("encoder cached", "r = 0.1", SHIFT_ENDS)]
    head, exact, ratio, approximate = published.ttft_hybrid(rows)
    assert (exact[0], ratio[0], approximate[0]) == ('`"exact"`', "`0.1`", '`"approximate"`')
    assert dict(zip(head, exact, strict=True))["bytes moved [MB]"] == "2"


def test_floors_of_hybrids_name_their_modes(monkeypatch):
    monkeypatch.setattr(published, "_file", lambda name: {"rates": {"host": 5e10}})
    parts = {f"{part} ms": 1.0 for part in ("encoder", "linear", "head", "attention", "link", "move", "load")}
    cases = {"cold": 20.0, "encoder cached": 10.0, "r = 0": 5.0, "r = 0, int8": 4.0, "shift-ends, r = 0.1, int8": 2.5}
    rows = [parts | {"model": model, "case": case, "ms": ms} for model in HYBRIDS for case, ms in cases.items()]
    head, *lines = published.hybrid_floors([parts | {"model": "other", "case": "cold", "ms": 9.0}, *rows])
    own = [dict(zip(head, line, strict=True)) for line in lines if line[0] == "Qwen3.5-9B"]
    assert [line["reuse mode"] for line in own] == [
        "no reuse", '`"exact"`', '`"full"`', '`"full"`, `codec="int8"`', '`shift-ends-0.1`, `codec="int8"`'
    ]  # fmt: skip
    assert [line['speedup over `"exact"`'] for line in own] == ["0.5", "1", "2", "2.5", "4"]
    assert own[0]["bytes moved [GB]"] == "0.05"
    assert own[0]["linking and shift [ms]"] == "2"
    assert len(lines) == len(HYBRIDS) * len(cases)


def test_who_ran_once_has_no_spread():
    row = dict.fromkeys(
        ("TTFT ms", "spread ms", "over cold", "over encoder cached", "rows a layer", "GFLOP/s of cold", "floor ms",
         "times floor", "TTFT minus compute %"), 0.0,
    )  # fmt: skip
    assert list(published.ttft([row | {"configuration": "cold", "K, V in": "host"}]))[1][2] == "one run"


def test_pages_say_what_their_files_say():
    for page in published.PAGES:
        text = page.read_text(encoding="utf-8")
        assert published.rewrite(text) == text, f"{page}: run python -m research.published"


def test_results_are_small():
    """`study.report` writes compact JSON and pictures with a palette."""
    assert sum(file.stat().st_size for file in published.RESULTS.rglob("*") if file.is_file()) <= 3e6


def test_results_name_no_path_of_a_machine():
    """Lists of libraries and folders of work are told by name."""
    files = list(published.RESULTS.rglob("*.json"))
    assert files
    named = {file.name: re.findall(r'"(?:[^"]*[\s:=])?/\w+/[^"]*"', file.read_text("utf-8")) for file in files}
    assert not {name: paths for name, paths in named.items() if paths}


def test_steps_are_told_before_and_now(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    figures = {
        "launches a layer": 25.0, "launches": 941.4, "predicates": 3.0, "MB": 16000.0, "MB of temporaries": 1200.0,
        "memory of temporaries, MB": 21.0, "compile s": 30.0, "spilled bytes": 0, "registers": 168,
        "ms by the model": 5.764, "tokens/s by the model": 173.5, "of the floor": 0.623, "not compiled": None,
    }  # fmt: skip
    one, large = ({"model": "A", "program": f"window {rows}"} for rows in (1, 64))
    late = large | dict.fromkeys(figures) | {"not compiled": "in 900 s"}
    fused = figures | {"launches a layer": 12.0, "launches": 470.0, "spilled bytes": None}

    def write(name, version, *rows):
        content = {"versions": {"jax": version}, "rows": rows}
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")

    write("steps_h200_before.json", "0.11.2", one | figures, late)
    head, *lines = published.gpu_steps()
    assert lines[0] == ["A", "decode, 1 sequence", "25", "941", "3", "16000", "1200", "21", "30", "5.76", "174", "0.62"]
    assert lines[1] == ["A", "decode, 64 sequences", *["in 900 s"] * 10]
    write("steps_h200.json", "0.11.2", one | fused, large | fused)
    head, *lines = published.gpu_steps()
    assert lines[0][2:6] == ["25 → 12", "941 → 470", "3", "16000"]
    assert lines[1][2] == "in 900 s → 12"
    assert len(head) == len(lines[0])
    write("steps_h200_jax012.json", "0.12.0.1", one | figures)
    head, *lines = published.gpu_versions()
    assert head[2:4] == ["launches per layer, jax 0.11.2", "launches per layer, jax 0.12.0.1"]
    assert lines[0] == ["A", "decode, 1 sequence", "12", "25", "21", "21", "", "0", "168", "168", "30", "30"]
    assert lines[1][3] == "not tried"


def test_overviews_have_a_line_for_each_mode_prompt_and_method():
    _, *lines = published.TABLES["losses overview"]()
    assert [line[0] for line in lines[:2]] == ["no reuse: accuracy [%]", "`full`"]
    assert len(lines) == len(published.OVERVIEW)
    head, *lines = published.TABLES["budgets overview"]()
    assert [line[:2] for line in lines[:3]] == [
        ["short", "`postvision`"],
        ["short", "`vl-cache`"],
        ["short", "`random`"],
    ]
    assert len(lines) == 6
    assert all(len(line) == len(head) for line in lines)
    rows = [
        {"prompt": 4176, "answers": answers, "K, V": way, "times full": 1.0 + answers * i, "K, V MB": 104.0 * (1 - i),
         "compressed MB": 13.0 * i}
        for answers in (1, 4) for i, way in enumerate(("full", "postvision-0.1"))
    ]  # fmt: skip
    head, line = published.compression_overview(rows)
    assert line == ["4176", "2", "5", "104", "13"]
    assert head[1:3] == ["decode speedup, 1 sequence", "decode speedup, 4 sequences"]


def test_tasks_are_told_at_other_budgets():
    whole = {"method": "whole", "budget %": 100.0, "memory %": 100.0, "grid": 90.0, "questions": 5}
    tenth = whole | {"method": "random", "budget %": 10.0, "grid": 50.0}
    lines = list(published.by_task([whole, tenth], share=10))
    assert lines == [["`compress`", "grid [%]"], ["full cache", "90"], ["`random-0.1`", "50"]]


def test_kinds_of_donors_are_columns_and_attacks_have_a_line_for_each_policy():
    head, *lines = published.TABLES["donors"]()
    assert [line[:2] for line in lines[:3]] == [["one", "`full`"], ["one", "`approximate`"], ["one", "`0.1`"]]
    assert lines[0][head.index("after its number")] == ""  # a single image has no number
    assert all(cell for line in lines[3:] for cell in line)
    head, *lines = published.TABLES["donors paired"]()
    assert "neutral" not in head
    assert [line[1] for line in lines] == ["accuracy [points]", "logit MSE"] * 2
    head, *lines = published.TABLES["poisoning"]()
    assert len(lines) == 2 * 4
    assert all(len(line) == len(head) and all(line) for line in lines)
