"""Reading benchmark files: images, answers, options, prompts, questions of several rows; and user turns."""

from __future__ import annotations

import base64
import textwrap

import pytest

from tests.study.tables import encoded, png, write_tsv
from vlcache_jax.study.questions import first, read_tsv, rows_of_questions, user_turn


def test_a_file_is_read(tsv):
    samples = read_tsv(tsv)
    assert [sample.task for sample in samples] == ["one"] * 3 + ["two"] * 3
    assert [len(sample.images) for sample in samples] == [1, 1, 1, 2, 2, 2]
    assert samples[2].images == samples[0].images == (png(0),)
    assert samples[4].images == (png(5), png(6))
    assert samples[3].score(" Image 1.\n")
    assert not samples[3].score("image 2")


def test_options_and_hints(tmp_path):
    header = ["index", "hint", "question", "A", "B", "C", "answer", "image"]
    path = write_tsv(tmp_path / "mcq.tsv", header, ["7", "look", "Which?", "cat", "dog", "", "B", encoded(0)])
    [sample] = read_tsv(path)
    assert sample.task == "mcq"
    assert sample.question == (
        "Hint: look\nQuestion: Which?\nOptions:\nA. cat\nB. dog\n"
        "Please select the correct answer from the options above."
    )
    assert [sample.score(text) for text in ("B", "B.", "(B) dog", "The answer is B.", "dog")] == [1] * 5
    assert [sample.score(text) for text in ("A", "cat", "C", "", "bird")] == [0] * 5


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (["index", "question", "answer"], ["0", "Q", "A"], "got none named image"),
        (
            ["index", "question", "answer", "image"],
            ["0", "Q", "A", ""],
            "must have at least one row with an image, got none",
        ),
        (["index", "question", "answer", "image"], ["0", "Q", "A", "[]"], "image in row 0 .* must not be empty"),
        (
            ["index", "question", "answer", "image"],
            ["0", "Q", "A", "99"],
            "or the index of a row that has an image, got '99'",
        ),
        (["index", "question", "answer", "image"], ["0", "Q", "A", "???"], "image in row 0 .* must be base64"),
        (["index", "question", "answer", "image"], ["0", "Q", "A", "[1, 2"], "image in row 0 .* must be base64"),
        (["index", "question", "answer", "image"], ["0", "Q", "A", "aaaa"], "image in row 0 .* must be an image file"),
        (["index", "question", "answer", "image"], ["0", "Q", "", "aaaa"], "answer in row 0 .* must be a text"),
        (["index", "question", "A", "answer", "image"], ["0", "Q", "x", "B", "aaaa"], "must be an option, got 'B'"),
    ],
)
def test_bad_files_are_refused(tmp_path, header, row, message):
    with pytest.raises(ValueError, match=message):
        read_tsv(write_tsv(tmp_path / "bad.tsv", header, row))


HEADER = ["index", "question", "answer", "image"]


def test_a_picture_that_is_cut_off_is_refused_by_its_row(tmp_path):
    half = base64.b64encode(png(0)[: len(png(0)) // 2]).decode()
    path = write_tsv(tmp_path / "half.tsv", HEADER, ["3", "Q", "A", encoded(1)], ["4", "Q", "A", half])
    with pytest.raises(
        ValueError, match=r"image in row 4 of .*half.tsv must be an image file in base64, got \d+ bytes"
    ):
        read_tsv(path)


def test_rows_of_one_index_are_refused(tmp_path):
    path = write_tsv(tmp_path / "twice.tsv", HEADER, *[["3", "Q", "A", encoded(0)]] * 2)
    with pytest.raises(ValueError, match=r"index must be unique in .*twice.tsv, got '3' in 2 rows"):
        read_tsv(path)


def test_rows_without_an_image_are_left_out(tmp_path, capsys):
    path = write_tsv(tmp_path / "some.tsv", HEADER, ["0", "Q", "A", ""], ["1", "Q", "A", encoded(0)])
    assert [sample.index for sample in read_tsv(path)] == ["1"]
    assert "1 of 2 rows of some.tsv have no image and are left out" in capsys.readouterr().err


def test_marks_of_a_spreadsheet_and_wrapped_base64_are_read(tmp_path):
    wrapped = "\n".join(textwrap.wrap(encoded(0), 20))
    path = write_tsv(tmp_path / "excel.tsv", HEADER, ["0", "Q", "A", wrapped])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    [sample] = read_tsv(path)
    assert sample.images == (png(0),)


def test_files_that_are_no_tables_are_refused(tmp_path):
    (tmp_path / "latin.tsv").write_bytes("index\té".encode("latin-1"))
    for path in (tmp_path / "latin.tsv", tmp_path / "none.tsv", tmp_path):
        with pytest.raises(ValueError, match=f"data must be a readable TSV file in UTF-8, got {path}: "):
            read_tsv(path)


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one row"):
        read_tsv(write_tsv(tmp_path / "bad.tsv", ["index", "question", "answer", "image"]))


def texts(turn):
    return [part.get("text", "<image>") for part in turn]


def test_arrangements():
    assert texts(user_turn([b"x"], "Q", "image_first")) == ["<image>", "\nQ"]
    assert texts(user_turn([b"x"], "Q", "text_first", "T")) == ["T\n", "<image>", "\nQ"]
    assert texts(user_turn([b"x", b"y"], "Q", "question_first")) == [
        "Q\n", "Image one: ", "<image>", "\nImage two: ", "<image>",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="arrangement must be one of"):
        user_turn([b"x"], "Q", "last")
    shown = user_turn([b"x", b"y"], "Q", "image_first", numbered=False)
    assert texts(shown) == ["<image>", "<image>", "\nQ"]


def read_one(folder, name, columns):
    """The sample of a file with one row."""
    cells = {"index": "0", "question": "Q", "image": encoded(0)} | columns
    [sample] = read_tsv(write_tsv(folder / f"{name}.tsv", list(cells), list(cells.values())))
    return sample


@pytest.mark.parametrize(
    ("cell", "answers"),
    [
        ("a cat", ("a cat",)),
        ("['a cat', \"dog's\"]", ("a cat", "dog's")),
        ('["a cat", "3"]', ("a cat", "3")),
        ("[2, 3.5]", ("2", "3.5")),
        ('["\\u72d7", "狗"]', ("狗", "狗")),
        ('["\\ud83d\\ude00"]', ("😀",)),
        ("['one']", ("one",)),
        ("[sic] a cat", ("[sic] a cat",)),
        ("[\\d]", ("[\\d]",)),
        ("['\\d']", ("\\d",)),
        ("[1], [2]", ("[1], [2]",)),
        ("[[1, 2], [3, 4]]", ("[[1, 2], [3, 4]]",)),
        ("[" * 5000, ("[" * 5000,)),
    ],
)
def test_answers(tmp_path, cell, answers):
    sample = read_one(tmp_path, "DocVQA_VAL", {"answer": cell})
    assert sample.answers == answers
    assert sample.score(answers[-1]) == 1
    assert sample.score("nothing like it") == 0


def test_a_list_of_no_answers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"answer in row 0 .* must be a text or a list of texts, got '\[\]'"):
        read_one(tmp_path, "TextVQA_VAL", {"answer": "[]"})


def test_questions_are_asked_and_scored_by_the_name_of_their_file(tmp_path):
    known = read_one(tmp_path, "ChartQA_TEST", {"answer": "100"})
    assert known.question == "Q\nPlease answer concisely with short words or phrases when possible."
    assert (known.score("104"), known.numbered) == (1, False)
    mine = read_one(tmp_path, "mine", {"answer": "100"})
    assert (mine.question, mine.score("104"), mine.numbered) == ("Q", 0, True)
    several = read_one(tmp_path, "mine", {"answer": "['a', 'b', 'b']"})
    assert several.score("b") == pytest.approx((2 / 3 + 1 / 3 + 1 / 3) / 3)
    pope = read_one(tmp_path, "POPE", {"answer": "Yes"})
    assert (pope.question, pope.score("Yes, it is."), pope.score("no")) == ("Q Please answer yes or no.", 1, 0)
    star = read_one(tmp_path, "MMStar", {"answer": "B", "A": "cat", "B": "dog", "hint": "H"})
    assert star.question == "Hint: H\nQuestion: Q\nOptions:\nA. cat\nB. dog\nAnswer with the option letter only."


def test_a_letter_in_lower_case_is_an_option(tmp_path):
    sample = read_one(tmp_path, "mine", {"answer": "b", "A": "cat", "B": "dog"})
    assert [sample.score(text) for text in ("B", "dog", "A")] == [1, 1, 0]


def test_questions_of_mmmu(tmp_path):
    asked = read_one(tmp_path, "MMMU_DEV_VAL", {"answer": "B", "A": "cat", "B": "dog"})
    ending = "Options:\nA. cat\nB. dog\nPlease select the correct answer from the options above."
    assert asked.question == f"Question: Q\n{ending}"
    assert (asked.score("B"), asked.score("A")) == (1, 0)
    free = read_one(tmp_path, "MMMU_DEV_VAL", {"answer": "3.5", "hint": "H"})
    assert free.question == "Hint: H\nQuestion: Q"
    assert [free.score(text) for text in ("It is 3.5 m", "A", "B", "4")] == [1, 1, 0, 0]
    listed = read_one(tmp_path, "MMMU_DEV_VAL", {"answer": "['5', '6']"})
    assert [listed.score(text) for text in ("['5', '6']", "5")] == [1, 0]
    for answer, right in (("?", "A"), ("AB", "A"), ("F", "F")):
        other = read_one(tmp_path, "MMMU_TEST", {"answer": answer, "A": "cat", "B": "dog"})
        assert other.answers == (right,)


def circular(folder, name="MMBench_DEV_EN"):
    """Two questions, the first one asked twice, between them the second one."""
    header = ["index", "question", "A", "B", "answer", "image"]
    rows = [
        ["7", "Q", "cat", "dog", "A", encoded(0)],
        ["8", "R", "cat", "dog", "A", encoded(1)],
        ["1000007", "Q", "dog", "cat", "B", "7"],
    ]
    return read_tsv(write_tsv(folder / f"{name}.tsv", header, *rows))


def test_rows_of_one_question(tmp_path):
    samples = circular(tmp_path)
    assert rows_of_questions(samples) == [[0, 2], [1]]
    assert [sample.index for sample in first(samples, 1)] == ["7", "1000007"]
    assert first(samples, None) == first(samples, 9) == samples
    assert rows_of_questions([*samples, *circular(tmp_path, "CCBench")]) == [[0, 2], [1], [3, 5], [4]]
    assert rows_of_questions(circular(tmp_path, "MMStar")) == [[0], [1], [2]]
    grouped = [
        read_one(tmp_path, "BLINK_circular", {"answer": "A", "A": "x", "index": i, "g_index": "4"}) for i in "45"
    ]
    assert rows_of_questions(grouped) == [[0, 1]]
    with pytest.raises(
        ValueError, match=r"index and g_index in row x of .* must be integers because the data set is circular"
    ):
        read_one(tmp_path, "CCBench", {"index": "x", "A": "cat", "answer": "A"})
