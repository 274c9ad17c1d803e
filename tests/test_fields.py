"""JSON from elsewhere: a large text is parsed in pieces, and means the same."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from vlcache_jax.common import json_files
from vlcache_jax.common.json_files import parse_json


def made(rng: random.Random, depth: int = 0) -> Any:
    letters = 'a\u00e9\u4e2d\U0001f600\n"\\/\ud83d'
    match rng.randrange(9 if depth < 4 else 6):
        case 0:
            return rng.choice([None, True, False])
        case 1:
            return rng.randrange(-(10 ** rng.randrange(1, 25)), 10 ** rng.randrange(1, 25))
        case 2:
            return rng.random() * 10.0 ** rng.randrange(-9, 9)
        case 3 | 4:
            return "".join(rng.choices(letters, k=rng.randrange(9)))
        case 5 | 6:
            return [rng.randrange(-5, 10**6) for _ in range(rng.randrange(60))]
        case 7:
            return [made(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice("ab\n") + str(i): made(rng, depth + 1) for i in range(rng.randrange(5))}


def parse_result(parse: Any, text: str | bytes) -> Any:
    """The value, or the error."""
    try:
        return json.dumps(parse(text))
    except ValueError as error:
        return str(error)


def test_in_pieces_a_text_means_what_it_means_at_once(monkeypatch):
    rng, wrong = random.Random(0), 0
    for _ in range(1500):
        text = json.dumps(made(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1, 12]))
        if rng.random() < 0.5:  # one character more, less or another one
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.choice(["", *',"\\[]{}0-:. \x01NaN']) + text[place + rng.randrange(2) :]
        at_once = parse_result(parse_json, text)
        with monkeypatch.context() as context:
            context.setattr(json_files, "AT_ONCE", 0)
            context.setattr(json_files, "_SHORT", 2)
            assert parse_result(parse_json, text) == at_once, text
            if "\ud83d" not in text:
                assert parse_result(parse_json, text.encode()) == at_once, text
        wrong += "char" in at_once
    assert wrong > 300


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_large_texts_are_decoded_as_small_ones(encoding, monkeypatch):
    monkeypatch.setattr(json_files, "_PIECE", 3)
    monkeypatch.setattr(json_files, "AT_ONCE", 0)
    value = {"a": ["\u00e9\u4e2d\U0001f600" * 9, 1]}
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(encoding)) == value


@pytest.mark.parametrize("at_once", [0, json_files.AT_ONCE])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[1,{"a":', "}]")])
def test_texts_of_any_size_are_nested_to_one_depth(begin, end, at_once, monkeypatch):
    monkeypatch.setattr(json_files, "AT_ONCE", at_once)
    levels = begin.count("[") + begin.count("{")
    times = json_files.MAX_DEPTH // levels
    deepest = begin * times + "1" + end * times
    assert parse_json(deepest) == json.loads(deepest)
    for more in (1, 100_000):
        with pytest.raises(ValueError, match="at most 200 levels deep"):
            parse_json(begin * (times + more) + "1" + end * (times + more))


@pytest.mark.parametrize("at_once", [0, json_files.AT_ONCE])
@pytest.mark.parametrize("number", ["1" * 4301, "1." + "0" * 4300])
def test_numbers_of_any_text_have_so_many_digits(number, at_once, monkeypatch):
    monkeypatch.setattr(json_files, "AT_ONCE", at_once)
    with pytest.raises(ValueError, match=r"digits|4300"):
        parse_json(f"[{number}]")


LARGE = {
    "integers": b"[" + b"1," * (json_files.MAX_VALUES + 1) + b"1]",
    "lists": b"[" + b"[]," * (json_files.MAX_VALUES // 8) + b"1]",
    "names": b"{" + b'"a":1,' * (json_files.MAX_VALUES // 8) + b'"a":1}',
    "digits": b"[" + b"1" * 2**20 + b"]",
    "an infinity": b"[" + b"1," * 2**20 + b"1e999]",
}


@pytest.mark.parametrize("case", LARGE)
def test_what_costs_more_than_its_bytes_say(case):
    with pytest.raises(ValueError, match=r"at most|finite"):
        parse_json(LARGE[case])


def test_what_requests_hold_is_read():
    ids = list(range(100_000, 100_000 + 2**17))
    body = {"prompt": [ids] * 8, "image": "a" * 2**20, "text": "\n\u4e2d\U0001f600" * 2**17}
    for written in (json.dumps(body), json.dumps(body, indent=2), json.dumps(body, ensure_ascii=False)):
        assert parse_json(written.encode()) == body


def test_integers_on_lines_of_their_own_count_as_integers():
    ids = [list(range(100_000, 100_000 + 2**17))] * 3
    assert parse_json(json.dumps(ids).replace(", ", ",\n" + " " * 40)) == ids
