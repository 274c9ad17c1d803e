"""Pages stay readable, and addresses that were published once stay valid."""

import pathlib
import re

import pytest

from tests.prose import DIALECT, ROOT, Banned, docstrings, errors, faults, opening, pages, paragraphs, sentences, words

OLD = pathlib.Path(__file__).with_name("old_addresses.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_have_short_sentences_and_plain_words(path):
    assert [message for _, message in faults(ROOT, path)] == []


def test_there_are_pages():
    assert len(pages(ROOT)) > 40


MAX_FRAGMENTS = 30  # docstrings that may open as one


def test_docstrings_open_with_an_imperative_or_a_noun_phrase():
    texts = list(docstrings(ROOT))
    assert len(texts) > 2000
    found = [f"{place}: {text.splitlines()[0]}" for place, text in texts if opening(text)]
    assert len(found) <= MAX_FRAGMENTS, "\n".join(found)


def test_errors_have_plain_words():
    texts = list(errors(ROOT))
    assert len(texts) > 500
    found = [
        f"{place}: {one!r}; write {word.instead}"
        for place, text in texts
        for word in DIALECT
        for one in word.found(text)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["Of a request.", "What is kept.", "Whether it ended.", "The same for videos."])
def test_what_is_a_fragment(text):
    assert opening(text)


@pytest.mark.parametrize(
    "text", ["Return the key.", "Bytes of a record.", "Offset in bytes.", "Asserts.", "Somewhere."]
)
def test_what_is_no_fragment(text):
    assert not opening(text)


def page(tmp_path, text):
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    return [kind for kind, _ in faults(tmp_path, tmp_path / "README.md")]


def test_what_is_counted_as_a_fault(tmp_path):
    assert page(tmp_path, "# A title\n\n" + "word " * 30 + "end.\n") == ["sentence"]
    assert page(tmp_path, "word " * 29 + "end.\n") == []
    assert page(tmp_path, "One two. " * 41) == ["paragraph"]
    assert page(tmp_path, "\n".join(["- One two three."] * 41)) == []
    assert page(tmp_path, "The text after\nthe picture.\n") == ["word"]
    assert page(tmp_path, "| head |\n|---|\n| a lane |\n") == ["word"]
    assert page(tmp_path, "## The ladder\n") == ["word"]
    assert page(tmp_path, "> [!NOTE]\n> " + "word " * 31) == ["sentence"]


@pytest.mark.parametrize(
    "text",
    ["```python\npicture = 1\n```\n", "`picture`", "[page](picture.md)", "<!-- picture -->", "a server behind a proxy"],
)
def test_code_links_and_common_meanings_are_no_faults(tmp_path, text):
    assert page(tmp_path, text + "\n") == []


def test_text_after_a_block_of_code_counts(tmp_path):
    assert page(tmp_path, "```sh\nvlcache demo\n```\nA picture.\n") == ["word"]
    assert page(tmp_path, "- item\n\n  ```sh\n  picture\n  ```\n\n  A lane.\n") == ["word"]


def test_paragraphs_and_sentences_are_found():
    text = "One `a. B` two. Three\nfour!\n\n- Five.\n- Six\n  seven.\n\n| a |\n|---|\n"
    found = list(paragraphs(text))
    assert found == [(1, "One CODE two. Three four!"), (4, "Five."), (5, "Six seven.")]
    assert list(map(words, sentences(found[0][1]))) == [3, 2]


def test_a_word_is_allowed_only_in_its_place():
    word = Banned("behind", "after", "behind a proxy")
    assert word.found("text behind an image, behind a proxy") == ["behind"]


def slug(heading):
    """The anchor of a heading, on GitHub and on the site."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


@pytest.mark.parametrize("address", OLD)
def test_old_addresses_lead_somewhere(address):
    name, _, anchor = address.partition("#")
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = {slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)}
    assert not anchor or anchor in headings | set(re.findall(r'<a id="([^"]+)"', text))
