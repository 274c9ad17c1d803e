import ast
import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from vlcache_jax import assets
from vlcache_jax.engine import completions as detokenizers
from vlcache_jax.testing import make_checkpoint

TEXT = "the cat sat on the mat: Grüße, naïve 世界 👋🏽 — ok"


class Detokenizer(detokenizers.Detokenizer):
    """With all that has been taken, which no later text takes back."""

    whole = ""

    @property
    def text(self):
        self.whole += self.take()
        return self.whole


@pytest.fixture(scope="module", params=["bytes", "merges", "shipped"])
def tokenizer(request, tmp_path_factory):
    """One whose tokens are bytes, one that has learnt merges, and one that ships; each with an added token."""
    if request.param == "shipped":
        directory = assets.TINY_VQA
    else:
        corpus = [TEXT] * 9 if request.param == "merges" else []
        directory = make_checkpoint(
            tmp_path_factory.mktemp("tokenizer"), text={"vocab_size": 320}, weights=False, corpus=corpus
        )
    tokenizer = TokenizersBackend.from_pretrained(directory)
    tokenizer.add_tokens(["two words", "ſ世"])  # with characters that stand for no byte
    return tokenizer


def chunks(random_, ids):
    """The ids again, some at a time."""
    i = 0
    while i < len(ids):
        size = random_.randint(1, 4)
        yield ids[i : i + size]
        i += size


@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_are_decoded_as_by_the_tokenizer(tokenizer, skip):
    """Also bytes that are no text at all, and ids beyond the vocabulary."""
    random_ = random.Random(0)
    high = range(0x80, 0x100)  # ids of bytes that are parts of characters
    for _ in range(300):
        ids = random_.choices([*range(len(tokenizer) + 3), *high, *high], k=random_.randint(0, 40))
        detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip)
        done = []
        for chunk in chunks(random_, ids):
            assert detokenizer.append(chunk) is None
            done += chunk
            so_far, whole = detokenizer.text, tokenizer.decode(done, skip_special_tokens=skip)
            assert whole.rstrip("\ufffd") == so_far.rstrip("\ufffd")
            assert len(whole) - len(so_far) in (0, 1, 2)  # half of a surrogate pair is two
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_tokens_have_bytes_and_texts_of_their_own(tokenizer):
    """All of a text together, and parts of characters, too; what is no part is what the library has for it."""
    for text in (TEXT, "<|im_start|>two words<|im_end|>"):
        ids = tokenizer(text)["input_ids"]
        assert b"".join(detokenizers.token_bytes(tokenizer, token) for token in ids).decode() == text
    parts = 0
    for token in range(len(tokenizer)):
        data = detokenizers.token_bytes(tokenizer, token)
        text, alone = detokenizers.spelled(data), tokenizer.decode([token])
        if "\ufffd" in alone:
            assert ast.literal_eval(f"b{text.removeprefix('bytes:')!r}".replace("\\\\", "\\")) == data
            parts += 1
        else:
            assert text == alone
    assert parts >= 128
    assert detokenizers.spelled(b" \xe2\x88") == r"bytes: \xe2\x88"
    assert detokenizers.token_bytes(tokenizer, len(tokenizer)) == b""


def test_characters_appear_whole(tokenizer):
    detokenizer = Detokenizer(tokenizer, [])
    for token in tokenizer(TEXT)["input_ids"]:
        detokenizer.append([token])
        assert TEXT.startswith(detokenizer.text)
    assert detokenizer.text == TEXT


def by_hand(tokenizer, ids, stop, least):
    """(tokens up to the one that completes a stop string, where it begins, which), all texts decoded in full."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True).rstrip("\ufffd")
        found = [
            (start, len(s), s)
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > len(before)
        ]
        if found and count >= least:
            start, _, s = min(found)
            return count, start, s
        before = text
    return None


@pytest.mark.parametrize("include", [True, False])
def test_the_first_stop_string_ends_the_answer(tokenizer, include):
    random_ = random.Random(1)
    stopped = 0
    for _ in range(300):
        letters = "".join(random_.choices("aabbc é👋", k=random_.randint(1, 30)))
        ids = tokenizer(letters)["input_ids"]
        stop = ["".join(random_.choices("aabbcé👋", k=random_.randint(1, 4))) for _ in range(random_.randint(1, 4))]
        min_tokens = random_.choice([0, 1, 5, 12])
        expected = by_hand(tokenizer, ids, stop, min_tokens)
        detokenizer = Detokenizer(tokenizer, stop, include_stop=include, min_tokens=min_tokens)
        answers = [detokenizer.append(chunk) for chunk in chunks(random_, ids)]
        detokenizer.finish()
        if expected is None:
            assert set(answers) == {None}
            assert (detokenizer.text, detokenizer.stop_reason) == (letters, None)
            continue
        count, start, reason = expected
        stopped += 1
        assert next(answer for answer in answers if answer is not None) == answers[-1] == count
        assert detokenizer.stop_reason == reason
        assert detokenizer.text == letters[: start + len(reason) if include else start]
    assert stopped > 100


@pytest.mark.parametrize(
    ("stop", "count", "text"), [(["wo wo"], 1, "t"), (["rdsa"], 2, "two wo"), (["b", "rdsat"], 3, "two wo")]
)
def test_a_stop_string_within_and_across_tokens(tokenizer, stop, count, text):
    two = tokenizer.convert_tokens_to_ids("two words")
    detokenizer = Detokenizer(tokenizer, stop)
    answers = [detokenizer.append([token]) for token in (two, ord("a"), two, ord("b"))]
    assert answers == [None] * (count - 1) + [count] * (5 - count)  # what comes later counts for nothing
    assert (detokenizer.text, detokenizer.stop_reason) == (text, stop[-1])


def test_several_in_one_token(tokenizer):
    """The one that begins first, and of those the shortest, in whatever order they are listed."""
    two = tokenizer.convert_tokens_to_ids("two words")
    for stop in (["words", "two", "two w"], ["two w", "two", "words"]):
        detokenizer = Detokenizer(tokenizer, stop, include_stop=True)
        assert detokenizer.append([two, two]) == 1
        assert (detokenizer.text, detokenizer.stop_reason) == ("two", "two")


def test_special_tokens_can_be_stop_strings_where_they_are_shown(tokenizer):
    ids = [ord("a"), tokenizer.convert_tokens_to_ids("<|im_end|>"), ord("b")]
    shown = Detokenizer(tokenizer, ["im_"], skip_special_tokens=False)
    assert (shown.append(ids), shown.text) == (2, "a<|")
    skipped = Detokenizer(tokenizer, ["im_", "ab"], include_stop=True)
    assert (skipped.append(ids), skipped.text) == (3, "ab")


def test_a_tokenizer_of_other_pieces():
    backend = Tokenizer(models.BPE(vocab={"▁a": 0}, merges=[]))
    backend.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match=r"tokenizer must decode bytes .*Metaspace"):
        Detokenizer(TokenizersBackend(tokenizer_object=backend), [])


def test_no_more_is_held_back_than_what_may_begin_a_stop_string(tokenizer):
    """The longest of several beginnings counts."""
    detokenizer = detokenizers.Detokenizer(tokenizer, ["aab", "xyz"])
    shown = []
    for letter in "caaadxy":
        detokenizer.append([ord(letter)])
        shown.append(detokenizer.take())
    assert shown == ["c", "", "", "a", "aad", "", ""]
    detokenizer.finish()
    assert detokenizer.take() == "xy"
