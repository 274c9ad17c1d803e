"""Sampling parameters and end tokens of a checkpoint: which of its files has them."""

from __future__ import annotations

import json
import types

import pytest
import transformers

from vlcache_jax.preparation.sequences import read_generation_config

SPOKEN, TEXT, NESTED, FILED = 1, 2, 3, 4
TOKENIZER = types.SimpleNamespace(eos_token_id=SPOKEN)


def read(directory, generation, config, tokenizer=TOKENIZER):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return read_generation_config(directory, tokenizer, 8)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, None, set()),
        ({"eos_token_id": FILED}, {"eos_token_id": TEXT}, {FILED}),
        ({"eos_token_id": [FILED, SPOKEN]}, {}, {FILED, SPOKEN}),
        ({"do_sample": True}, {"eos_token_id": TEXT, "text_config": {"eos_token_id": NESTED}}, {TEXT}),
        ({"eos_token_id": None}, {"eos_token_id": None, "text_config": {"eos_token_id": [NESTED]}}, {NESTED}),
        (None, {"text_config": {"eos_token_id": NESTED}}, {NESTED}),
        (None, {"text_config": None, "eos_token_id": [TEXT, NESTED]}, {TEXT, NESTED}),
        (None, {"text_config": {}}, set()),
    ],
)
def test_end_tokens_are_the_tokenizers_and_those_of_the_first_file_that_names_any(tmp_path, generation, config, ends):
    assert read(tmp_path, generation, config)[1] == {SPOKEN} | ends
    assert read(tmp_path, None, None, types.SimpleNamespace(eos_token_id=None))[1] == ends
    # One that the model cannot say ends nothing.
    assert read(tmp_path, None, None, types.SimpleNamespace(eos_token_id=8))[1] == ends


@pytest.mark.parametrize("text", [{}, {"eos_token_id": NESTED, "top_k": 7}])
@pytest.mark.parametrize("top", [{}, {"eos_token_id": TEXT, "do_sample": True, "temperature": 0.5}])
def test_without_a_file_of_their_own_they_are_those_that_the_library_finds(tmp_path, top, text):
    found, ends = read(tmp_path, None, {**top, "text_config": text})
    expected = transformers.GenerationConfig.from_model_config({**top, "text_config": text}).to_dict()
    named = expected["eos_token_id"]
    assert ends == {SPOKEN} | (set() if named is None else {named})
    assert found == {
        name: expected[name]
        for name in ("do_sample", "temperature", "top_k", "eos_token_id")
        if name in top or name in text
    }


def test_a_file_of_their_own_has_all_sampling_parameters(tmp_path):
    found, _ = read(tmp_path, {"do_sample": True}, {"temperature": 0.5, "text_config": {"top_k": 7}})
    assert found == {"do_sample": True}


@pytest.mark.parametrize("ends", [8, [2, -1], True, "2", [2, None]])
def test_the_file_of_an_end_token_that_the_model_does_not_have_is_named(tmp_path, ends):
    message = r"eos_token_id of .*{} must be token ids below 8, got "
    with pytest.raises(ValueError, match=message.format(r"/config\.json")):
        read(tmp_path, {}, {"text_config": {"eos_token_id": ends}})
    with pytest.raises(ValueError, match=message.format(r"generation_config\.json")):
        read(tmp_path, {"eos_token_id": ends}, {})
