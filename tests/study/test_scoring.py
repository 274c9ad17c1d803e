"""Scores and rules of files. What is expected is what VLMEvalKit's code gives, where no test says otherwise."""

from __future__ import annotations

import itertools
import random

import pytest

from vlcache_jax.study.scoring import METHODS, Rules, chosen_option, edits, option, rules_of


@pytest.mark.parametrize(
    ("method", "answers", "text", "score"),
    [
        ("vqa", ["cat"] * 10, "The cat.", 1),
        ("vqa", ["cat"] * 3 + ["dog"] * 7, "cat", 0.9),
        ("vqa", ["cat"] + ["dog"] * 9, "a cat", 0.3),
        ("vqa", ["cat"], "cat", 0),  # nobody is left
        ("vqa", ["2"] * 4, "two", 1),
        ("vqa", ["none"] * 4, "0", 1),
        ("vqa", ["dont"] * 2 + ["don't"] * 2, "Don't!", 1),
        ("vqa", ["somebody'd"] * 4, "somebodyd", 1),
        ("vqa", ["couldn't've"] * 4, "couldnt've", 1),
        ("vqa", ["couldn't've"] * 4, "couldntve", 0),
        ("vqa", ["10,000"] * 4, "10000", 1),
        ("vqa", ["coca-cola"] * 4, "Coca Cola", 1),
        ("vqa", ["yes / no"] * 4, "yes no", 1),
        ("vqa", ["3.5"] * 4, "3.5.", 0),
        ("vqa", ["狗。"] * 4, "狗", 0),
        ("vqa", [""] * 4, "the", 1),
        ("vqa", ["a." * 32] * 4, "a" * 32, 1),
        ("vqa", ["a." * 33] * 4, "a" * 33, 0),
        ("anls", ["Paris"], "paris", 1),
        ("anls", ["Paris", "London"], "Pari", 0.8),
        ("anls", ["abcd"], "abxy", 0.5),
        ("anls", ["abcd"], "axyz", 0),
        ("anls", ["a  b"], "A b", 1),
        ("anls", ["abc"], "", 0),
        ("anls", [""], "", 1),
        ("anls", ["straße"], "STRASSE", 5 / 7),
        ("anls", ["straße"], "strafe", 6 / 7),
        ("anls", ["abcde"], "abc", 0.6),
        ("anls", ["ab"], "  ab  ", 1),
        ("anls", ["x" * 200], "x" * 150 + "y" * 50, 0.75),
        ("relaxed", ["100"], "105", 1),
        ("relaxed", ["100"], "105.1", 0),
        ("relaxed", ["-4"], "-4.1", 1),
        ("relaxed", ["5%"], "0.05", 1),
        ("relaxed", ["5%"], "5.2%", 1),
        ("relaxed", ["5%"], "5", 0),
        ("relaxed", ["0"], "0.0", 0),
        ("relaxed", ["0"], "0", 1),
        ("relaxed", ["Blue"], " blue ", 1),
        ("relaxed", ["1,000"], "1000", 0),
        ("relaxed", ["7", "8"], "8", 1),
        ("relaxed", ["2"], "about 2", 0),
        ("relaxed", ["nan"], "nan", 0),
        ("same", ["Jane Austen", "Austen"], "austen ", 1),
        ("same", ["Austen"], "Austen.", 0),
        ("same", [""], "", 1),
        ("same_in_mean", ["left", "Left", "right"], "LEFT", 2 / 3),
        ("same_in_mean", ["no"], "yes", 0),
        ("yes_no", ["Yes"], "yes", 1),
        ("yes_no", ["Yes"], "YES!", 1),
        ("yes_no", ["Yes"], "yes/maybe", 1),
        ("yes_no", ["Yes"], "Yes, no", 0),
        ("yes_no", ["No"], "Yes, no", 0),
        ("yes_no", ["Yes"], "Yesterday", 0),
        ("yes_no", ["No"], "No.", 1),
        ("yes_no", ["No"], "not", 0),
        ("yes_no", ["No"], "**no**", 0),
        ("yes_no", ["Yes"], "", 0),
    ],
)
def test_scores(method, answers, text, score):
    assert METHODS[method](answers, text) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "score"),
    [(" A  Cat.\n", 1), ("a dog", 1), ("cat", 0), ("a cat..", 0), ("", 0)],
)
def test_words_are_the_same_but_for_case_blanks_and_a_full_stop(text, score):
    assert METHODS["words"](["a cat", "A dog."], text) == score


def test_edits_are_those_of_the_table_of_distances():
    def by_table(one, other):
        rows = list(range(len(one) + 1))
        for j, letter in enumerate(other):
            above, rows[0] = rows[0], j + 1
            for i, own in enumerate(one):
                above, rows[i + 1] = rows[i + 1], min(rows[i] + 1, rows[i + 1] + 1, above + (own != letter))
        return rows[-1]

    rng = random.Random(0)
    words = ["", "a", *("".join(rng.choices("abc", k=rng.randrange(9))) for _ in range(40))]
    for one, other in itertools.product(words, words):
        assert edits(one, other) == by_table(one, other)


def test_very_long_answers_are_scored():
    # A table of distances would have a hundred million entries.
    long = "".join(random.Random(1).choices("abcdefgh ", k=10_000)).strip()
    assert METHODS["anls"]([long], long[:9_000]) == pytest.approx(0.9, abs=0.01)
    assert METHODS["anls"]([long], long[::-1]) == 0
    assert METHODS["anls"](["short"], long) == 0
    for method in ("vqa", "relaxed", "same", "yes_no", "words"):
        assert METHODS[method](["short"], long) == 0
    assert chosen_option({"A": "short", "B": "other"}, long) is None


OPTIONS = {"A": "dog", "B": "cat", "C": "a big dog", "D": "3.5"}


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", None),
        ("B.", "B"),
        ("(B)", "B"),
        ("**B**", "B"),
        ("B: cat", "B"),
        ("The answer is **B**", "B"),
        ("The answer is B because it is small and very red", "B"),
        ("B one two three", "B"),
        ("B one two three four", None),
        ("A or B", None),
        ("A or B, so the answer is B", "B"),
        ("cat", "B"),
        ("Cats", "B"),
        ("It is 3.5", "D"),
        ("dog", "A"),
        ("a big dog", None),
        ("cat " * 40, None),
        ("A", "A"),
        ("A.", "A"),
        ("A is right", "A"),
        ("A\nbird", "A"),
        ("A: cat", "A"),
        ("A 3.5", "A"),
        ("Option A", "A"),
        ("The answer is dog", "D"),  # the kit's, as are all in this table
        ("Z", None),
        ("Z cat", None),
        ("E", None),
        ("Cannot determine the answer B", None),
        ("", None),
    ],
)
def test_options(text, letter):
    assert chosen_option(OPTIONS, text) == letter
    assert option(OPTIONS, ["B"], text) == (letter == "B")


@pytest.mark.parametrize(
    ("text", "letter"),
    [("A cat", "B"), ("A dog", "A"), ("A bird", None), ("The answer is a cat", "B"), ("A cat, so A", "A")],
)
def test_an_article_that_begins_a_sentence_is_no_letter(text, letter):
    """The kit finds A in all of them."""
    assert chosen_option(OPTIONS, text) == letter


@pytest.mark.parametrize(
    "text",
    [
        "The answer is A because",
        "Option A seems right",
        "I choose A as the answer",
    ],
)
def test_a_letter_within_a_sentence_is_one(text):
    assert chosen_option(OPTIONS, text) == "A"


def test_a_letter_with_its_own_text_is_one():
    options = {"A": "Paris and London", "B": "Paris"}
    assert chosen_option(options, "A Paris and London") == chosen_option(options, "A. Paris and London.") == "A"


VQA = "\nPlease answer concisely with short words or phrases when possible."


@pytest.mark.parametrize(
    ("name", "method", "ending"),
    [
        ("TextVQA_VAL", "vqa", VQA),
        ("DocVQA_VAL", "anls", VQA),
        ("InfoVQA_TEST", "anls", VQA),
        ("ChartQA_TEST", "relaxed", VQA),
        ("OCRVQA_TESTCORE", "same", VQA),
        ("GQA_TestDev_Balanced", "same_in_mean", VQA),
        ("ChartQAPro", None, ""),
        ("mine", None, ""),
    ],
)
def test_sets_of_texts(name, method, ending):
    assert rules_of(name, [("yes",), ("a cat",)]) == Rules(method, method is None, ending)
    if method is not None:  # a part of a set has the rules of the set
        assert rules_of(name, [("yes",)]) == Rules(method, False, ending)


@pytest.mark.parametrize("name", ["MME", "HallusionBench", "POPE", "AMBER", "VSR-zeroshot"])
def test_sets_of_yes_and_no(name):
    assert rules_of(name, [("Yes",), ("No",)]) == Rules("yes_no", False, " Please answer yes or no.")


def test_a_set_of_yes_and_no_with_another_answer_is_one_still():
    assert rules_of("MME", [("Yes",), ("unknown",)]) == Rules("yes_no", False, " Please answer yes or no.")


def test_sets_that_no_rule_knows():
    assert rules_of("mine", [("Yes",), ("no",)]) == Rules("yes_no")
    assert rules_of("MME_CoT_TEST", [("Yes",), ("42",)]) == Rules()
    assert Rules().method_of(["cat"]) == "words"
    assert Rules().method_of(["cat", "cats"]) == "vqa"
    assert Rules("anls").method_of(["cat", "cats"]) == "anls"


@pytest.mark.parametrize(
    ("name", "known", "circular"),
    [
        ("MMBench_DEV_EN", True, True),
        ("CCBench", True, True),
        ("BLINK_circular", True, True),
        ("MMCR", True, True),
        ("MMStar", True, False),
        ("AI2D_TEST", True, False),
        ("mine", False, False),
        ("mine_circular", False, True),
    ],
)
def test_sets_of_options(name, known, circular):
    expected = Rules(circular=circular)
    if known:
        expected = Rules(numbered=False, choose="Answer with the option letter only.", circular=circular)
    assert rules_of(name, [("A",), ("B",)]) == expected


def test_open_questions_are_those_of_mmmu():
    assert rules_of("MMMU_DEV_VAL", [("A",), ("yes",)]) == Rules(numbered=False, open=True)
    assert not rules_of("CMMMU_VAL", [("A",), ("yes",)]).open
