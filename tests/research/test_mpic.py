"""`research.mpic`: dialogues, the judge, and the table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from research import mpic
from research.dialogues import CRITERIA, OVERALL, DialogueTurn, Judge, draw_turns, parse_scores, read_turns
from research.mpic import DialogueLoad, MpicResult, longest_prompt
from tests.benchmarks.test_serving import END, USAGE, piece, running
from vlcache_jax.benchmarks import label, notes
from vlcache_jax.benchmarks.serving_client import Client
from vlcache_jax.benchmarks.settings import TtftSetup

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MARKS = dict.fromkeys(CRITERIA, 6) | {OVERALL: 7}


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), np.uint8).repeat(28, 0).repeat(28, 1)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def mmdu(tmp_path):
    """Two dialogues as in MMDU's file, its images in a folder beside it: of two images, then a third; and of one."""
    folder = tmp_path / "mmdu_pics"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.png").write_bytes(picture(i))
    long = [
        ("user", "Image1: <ImageHere>. Image2: <ImageHere>.\nCompare them."),
        ("assistant", "One is red."),
        ("user", "And this <ImageHere>?"),
        ("assistant", "Blue."),
        ("user", "Why?"),
        ("assistant", "Who knows."),
    ]
    dialogues = [
        {
            "id": 0,
            "image": ["/elsewhere/pics/0.png", "/elsewhere/pics/1.png", "2.png"],
            "conversations": conversation_of(long),
        },
        {
            "id": 1,
            "image": ["3.png"],
            "conversations": conversation_of([("user", "<ImageHere>What?"), ("assistant", "A dog.")]),
        },
    ]
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps(dialogues))
    return path


def conversation_of(pairs):
    return [{"from": who, "value": text} for who, text in pairs]


def test_turns_of_mmdu(mmdu):
    found = read_turns([mmdu], (1, 2, 3), None, turns=3)
    one, two, third, fourth = found
    assert [(turn.name, turn.reference) for turn in found] == [
        ("benchmark.json 1 0", "A dog."),
        ("benchmark.json 0 0", "One is red."),
        ("benchmark.json 0 1", "Blue."),
        ("benchmark.json 0 2", "Who knows."),
    ]
    assert one.images == (picture(3),)
    assert two.messages == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Image1: "},
                {"type": "image", "image": picture(0)},
                {"type": "text", "text": ". Image2: "},
                {"type": "image", "image": picture(1)},
                {"type": "text", "text": ".\nCompare them."},
            ],
        }
    ]
    assert third.images == fourth.images == tuple(map(picture, range(3)))
    assert [message["role"] for message in fourth.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert fourth.messages[3]["content"] == "Blue."
    # Turns and requests are bounded, and other numbers of images left out.
    assert [turn.name for turn in read_turns([mmdu], (3,), 1, turns=3)] == ["benchmark.json 0 1"]
    assert len(read_turns([mmdu], (1, 2, 3), None, turns=1)) == 2
    # The file may be a dictionary of dialogues, too.
    mmdu.write_text(json.dumps(dict(enumerate(json.loads(mmdu.read_text())))))
    assert [turn.name for turn in read_turns([mmdu], (1,), None, turns=1)] == ["benchmark.json 1 0"]


def test_files_of_one_name_are_told_apart(mmdu, tmp_path):
    other = tmp_path / "other" / mmdu.name
    other.parent.mkdir()
    other.write_text(mmdu.read_text())
    (other.parent / "pics").symlink_to(mmdu.parent / "mmdu_pics")
    found = read_turns([mmdu, other], (1,), None, turns=1)
    assert [turn.name for turn in found] == ["0 benchmark.json 1 0", "1 benchmark.json 1 0"]
    roles = mmdu.read_bytes().replace(b'"user"', b'"human"').replace(b'"assistant"', b'"gpt"')
    mmdu.write_bytes(b"\xef\xbb\xbf" + roles)
    assert len(read_turns([mmdu], (1,), None, turns=1)) == 1


def test_turns_of_sparkles_eval(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations").mkdir()
    for i in range(2):
        (tmp_path / "images" / f"{i}.jpg").write_bytes(picture(i))
    first = {"role": "user", "content": "A<Img><ImageHere></Img>B", "images": [{"image_id": 0, "caption": "x"}]}
    second = {"role": "user", "content": "And now?", "images": [{"image_id": "1"}]}
    answers = [{"role": "assistant", "content": text} for text in ("Yes.", "No.")]
    path = tmp_path / "annotations" / "sparkles.json"
    path.write_text(json.dumps([{"evaluation_id": 5, "dialogue": [first, answers[0], second, answers[1]]}]))
    one, two = read_turns([path], (1, 2), None, turns=2)
    assert [part.get("text", "image") for part in one.messages[0]["content"]] == ["A", "image", "B"]
    assert two.images == (picture(0), picture(1))
    assert two.messages[2]["content"] == [
        {"type": "image", "image": picture(1)},
        {"type": "text", "text": "And now?"},
    ]
    assert (two.question, two.reference, two.sample) == ("And now?", "No.", None)


def test_wrong_files_are_named(mmdu):
    good = mmdu.read_text()
    for wrong, message in (
        ("[", "data must be MMDU's benchmark.json or SparklesEval's annotations, got .*: JSONDecodeError"),
        ('[{"id": 1}]', "KeyError: 'image'"),
        (good.replace('"2.png"', "[1]"), "must have an image for each of its 1 marks"),
        (good.replace('"assistant"', '"user"'), "a dialogue must have a text of assistant next, got"),
        (good.replace('"Blue."', "7"), "a dialogue must have a text of assistant next, got"),
        (good.replace('["3.png"]', '"3.png"'), "image of a dialogue must be a list, got '3.png'"),
        ("[" * 200_000, "RecursionError"),
        (good.replace('"2.png"', '"gone.png"'), "images of dialogue 0 .* must be next to it, got 'gone.png'"),
        (good.replace(', "2.png"', ""), "ValueError: a dialogue must have an image for each of its 1 marks"),
    ):
        mmdu.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            read_turns([mmdu], (1, 2, 3), None, turns=3)
    mmdu.write_text(good)
    with pytest.raises(ValueError, match="data must have requests of 7, 8 images, got none"):
        read_turns([mmdu], (7, 8), None, turns=3)
    (mmdu.parent / "mmdu_pics" / "3.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"images of dialogue 1 .* must be images, got .*3\.png"):
        read_turns([mmdu], (1,), None, turns=1)


def test_drawn_turns_have_as_many_pictures():
    turns = draw_turns((1, 3), 4, size="small")
    assert [len(turn.images) for turn in turns] == [1] * 4 + [3] * 4
    assert len({turn.name for turn in turns}) == 8
    for turn in turns:
        first = turn.messages[0]["content"][0]
        assert first["type"] == "text"  # so that no record of an upload fits exactly
        assert turn.sample.score(turn.reference) == 1
    [scaled] = draw_turns((1,), 1, size="small", side=64)
    assert Image.open(io.BytesIO(scaled.images[0])).size == (64, 64)


@pytest.mark.parametrize(
    ("text", "overall"),
    [
        (f"Creative: well.\n{MARKS}", 7),
        (json.dumps(MARKS), 7),
        (f"{MARKS} and, thinking again, {MARKS | {OVERALL: 3.5}}.", 3.5),
        (f"{MARKS} in the form {{'Creativity': 9, ...}}", 7),
        ("no dictionary", None),
        (str(MARKS | {OVERALL: 11}), None),
        (str(MARKS | {"Richness": "good"}), None),
        (str({name: mark for name, mark in MARKS.items() if name != "Richness"}), None),
        ("{" * 10_000, None),
        ("{[]: 1}", None),
    ],
)
def test_the_marks_of_a_judgement(text, overall):
    found = parse_scores(text)
    assert (found and found[OVERALL]) == overall


def says(*texts):
    """Judgements, one after the other."""
    return lambda number: (200, [piece(content=texts[number % len(texts)]), END, USAGE, None])


def test_a_judge_sees_question_answers_and_images():
    turn = DialogueTurn("x", [], (picture(0), picture(1)), "What is it?", "A dog.")
    with running(says(f"Good. {MARKS}", "I cannot.")) as server:
        judge = Judge(Client(server.url), at_once=1).found()
        assert judge.scores([(turn, "A cat."), (turn, "A cow.")]) == [{k: float(v) for k, v in MARKS.items()}, None]
        asked, _ = server.requests[0]
        assert asked["model"] == "fake"
        text, *images = asked["messages"][0]["content"]
        assert all(part in text["text"] for part in (*CRITERIA, "What is it?", "A dog.", "A cat."))
        assert [image["image_url"]["url"].partition(",")[0] for image in images] == ["data:image/png;base64"] * 2
    with running(lambda number: (401, [b"no key"])) as server, pytest.raises(ValueError, match=r"judge.*401"):
        Judge(Client(server.url), "model").scores([(turn, "A cat.")])


def result(text, ttft, **more):
    return MpicResult(text, ttft, 100, 50.0, 40, **({"score": None} | more))


def test_a_baseline_is_called_what_it_is():
    """MPIC's CacheBlend is another method than the one that is measured."""
    assert label("cacheblend-0.15") == "cacheblend-0.15 (VLCache's baseline)"
    assert [label(name) for name in ("mpic-32", "cacheblend-proto-0.1")] == ["mpic-32", "cacheblend-proto-0.1"]
    assert [label(name) for name in ("off", "schedule")] == ["off (no reuse)", "schedule (mean 2.5 %)"]
    assert notes(["off", "mpic-32", "schedule"]) == {}
    [result] = notes(["off", "cacheblend-0.15"]).values()
    assert "one pass" in result
    for name in ("mpic_cpu", "mpic_tiny_vqa", "mpic_online_cpu", "serve_policies_cpu"):
        assert json.loads((RESULTS / f"{name}.json").read_text())["notes"] == notes(["cacheblend-0.15"])


def test_the_table():
    turns = [DialogueTurn(str(i), [], (b"",) * count, "", "") for i, count in enumerate((1, 1, 2))]
    results = {
        "off": [result("a b c", 0.4), result("x", 0.4), result("y", 0.9)],
        "exact": [result("a b c", 0.2), result("x", 0.2), result("y", 0.8)],
        "mpic-32": [result("a c", 0.1, marks=MARKS), result("x", 0.1), result("y", 0.2)],
    }
    rows = {(row["images"], row["reuse"]): row for row in mpic.table(turns, results)}
    assert list(rows) == [(count, name) for count in (1, 2) for name in results]
    row = rows[1, "mpic-32"]
    assert (row["requests"], row["rows %"], row["TTFT ms"], row["as cold %"]) == (2, 50, pytest.approx(100), 50)
    assert row["TTFT to exact %"] == pytest.approx(-50)
    assert row["ROUGE-L to cold"] == pytest.approx((2 * 2 / 5 + 1) / 2)
    assert (row["judge"], row["judge failed"]) == (7, 1)
    assert "accuracy %" not in row
    scored = {name: [result("", 1.0, score=share) for share in (1.0, 0.0, 0.5)] for name in ("off", "exact")}
    assert [row["accuracy %"] for row in mpic.table(turns, scored)] == [50, 50, 50, 50]


def test_requests_at_a_rate(mmdu):
    turns = read_turns([mmdu], (1, 2), None, turns=1)
    load = DialogueLoad(turns, requests=5)
    chats = load.chats(0)
    assert chats == load.chats(0)
    assert load.chats(0, 2) == chats[:2]
    assert {chat.kind for chat in chats[:2]} == {"1 images", "2 images"}
    openings = [chat.messages[0]["content"][0]["text"] for run in (0, 1) for chat in load.chats(run)]
    assert len(set(openings)) == 10  # so that no prompt begins as another
    urls = [part for chat in load.shown() for part in chat.messages[0]["content"] if part["type"] == "image_url"]
    assert len(urls) == 3
    assert load.times(2.0, 0)[0] == 0
    assert json.loads(json.dumps(load.settings()))["images"] == [1, 2]
    # A token of the shipped sizes is 32 pixels wide: 56 x 56 pixels are at most 2 x 2.
    assert longest_prompt(TtftSetup(), turns, 32) >= 2 * 4 + len("Image1: . Image2: .\nCompare them.") + 32


def test_the_command_says_what_does_not_go_together():
    for options, message in (
        (["--preset", "some/model"], "preset cannot be combined with a model, got some/model"),
        (["--judge", "http://127.0.0.1:1", "--rates", "1"], "judge cannot be combined with rates"),
        (["--images", "none"], "images must be positive integers"),
        (["--policies", "foo-3"], "reuse must be"),
        (["--work", __file__], "work must be a new file or one that an earlier run"),
        (["--rates", "1", "--work", "new"], "work cannot be combined with rates"),
    ):
        result = CliRunner().invoke(mpic.app, options)
        assert (result.exit_code, message in result.output) == (1, True), result.output


def test_a_judge_has_a_name_and_a_key(monkeypatch):
    calls = []
    monkeypatch.setattr(mpic, "run_apart", lambda *_, **options: calls.append(options))
    words = ["--judge", "http://judge", "--judge-model", "strict", "--judge-key", "secret"]
    result = CliRunner().invoke(mpic.app, [*words, "--images", "1", "--questions", "1"])
    assert result.exit_code == 0, result.output
    [options] = calls
    assert options["judge"].model == "strict"
    assert options["judge"].client._key == {"Authorization": "Bearer secret"}


def test_turns_of_dialogues(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(mpic, "read_turns", lambda *_, turns: asked.append(turns) or 1 / 0)
    for words in (["--turns", "3"], []):
        result = CliRunner().invoke(mpic.app, ["--data", str(tmp_path), *words])
        assert isinstance(result.exception, ZeroDivisionError)
    assert asked == [3, 1]


@pytest.mark.slow
def test_requests_are_answered_alone_judged_and_not_twice(checkpoints, mmdu, tmp_path, capsys):
    turns = read_turns([mmdu], (1, 2), None, turns=1)
    setup = TtftSetup(model=str(checkpoints("qwen3_vl")), dtype="float32")
    files = {"work": tmp_path / "work", "out": tmp_path / "o.json", "picture": tmp_path / "o.png"}
    with running(says(f"{MARKS}", "no marks")) as server:
        options = {"max_tokens": 2, "judge": Judge(Client(server.url), at_once=1), "max_rows": 512, **files}
        mpic.measure(setup, turns, ("mpic-1", "full-two-pass"), **options)
        written = json.loads(files["out"].read_text())
        finished = files["work"].read_text()
        mpic.measure(setup, turns, ("mpic-1", "full-two-pass"), **options)
    assert files["work"].read_text() == finished
    assert json.loads(files["out"].read_text())["rows"] == written["rows"]
    rows = {(row["images"], row["reuse"]): row for row in written["rows"]}
    assert list(rows) == [(n, name) for n in (1, 2) for name in ("off", "exact", "mpic-1", "full-two-pass")]
    # The first dialogue begins with its image, as the upload did: that is reused exactly.
    assert [rows[1, name]["as cold %"] for name in ("off", "exact", "mpic-1", "full-two-pass")] == [100] * 4
    assert rows[1, "exact"]["rows %"] == rows[1, "mpic-1"]["rows %"] < 100
    assert rows[2, "off"]["rows %"] == rows[2, "exact"]["rows %"] == 100
    assert rows[2, "full-two-pass"]["rows %"] < rows[2, "mpic-1"]["rows %"] < 100
    reused = {(one["images"], one["reuse"]): one["reused"] for one in written["details"]}
    assert (reused[1, "full-two-pass"], reused[2, "full-two-pass"], reused[2, "mpic-1"]) == (0, 8, 6)
    assert [rows[count, "off"]["judge failed"] for count in (1, 2)] == [0, 1]
    assert files["picture"].stat().st_size > 1000


@pytest.mark.thorough  # as a server of its own, which `servers` has
def test_online(checkpoints, mmdu, tmp_path):
    out = tmp_path / "o.json"
    command = [checkpoints("qwen3_vl"), "--data", mmdu, "--images", "1,2", "--rates", "20"]
    command += ["--requests", 4, "--policies", "mpic-1", "--max-tokens", 2, "--out", out]
    result = CliRunner().invoke(mpic.app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [row["reuse"] for row in written["rows"]] == ["off", "exact", "mpic-1"]
    off, exact, mpic_1 = (row["cached %"] for row in written["rows"])
    assert off == 0
    assert mpic_1 > exact
    assert {row["kind"] for row in written["kinds"]} == {"1 images", "2 images"}
