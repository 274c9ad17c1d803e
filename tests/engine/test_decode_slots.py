"""Tests of the state that the device holds for each answer. Nothing is computed."""

from __future__ import annotations

import types

import numpy as np

from tests.helper import planned
from vlcache_jax.engine.decode_slots import DecodeSlots, bad_word_tokens, marks_row, recent_tokens
from vlcache_jax.engine.request import Generation
from vlcache_jax.inputs.layout import make_layout
from vlcache_jax.reuse.policies import full_prefill
from vlcache_jax.sampling import SamplingParams

V = 50
PROMPT, ENDS = [3, 7, 7], frozenset([13])


def held(decode_slot, **params):
    """An answer whose matcher allows everything."""
    layout = make_layout(np.array(PROMPT, np.int32), [], [], 2)
    matcher = types.SimpleNamespace(mask=lambda count: ("after", count))
    answer = Generation(
        planned(layout, full_prefill(layout, 2)), 9, params=SamplingParams(**params).resolve({}), seed=0,
        end_tokens=ENDS, bad_words=(), detokenizer=None, matcher=matcher,
    )  # fmt: skip
    answer.progress.decode_slot = decode_slot
    return answer


def test_forced_tokens_count_for_penalties():
    """Slots of other answers stay open as they are."""
    opened, allowed = [], []
    config = types.SimpleNamespace(text=types.SimpleNamespace(vocab_size=V))
    runner = types.SimpleNamespace(
        config=config, open_decode_slot=lambda *given: opened.append(given), hold=allowed.append
    )
    slots, answers = DecodeSlots(runner), [held(4, presence_penalty=1), held(2)]
    expected = slots.open(answers)
    assert [decode_slot for decode_slot, *_ in opened] == [4, 2]
    opened.clear()
    allowed.clear()
    np.testing.assert_array_equal(slots.go_on(answers, [[5, 6, 5], [8]]), expected)
    [(decode_slot, marks, _, _, recent)] = opened
    assert decode_slot == 4
    np.testing.assert_array_equal(marks, marks_row(PROMPT, [5, 6, 5], ENDS, V))
    np.testing.assert_array_equal(recent, recent_tokens([5, 6, 5]))
    assert allowed == [{4: (("after", 3), ()), 2: (("after", 1), ())}]


def test_a_bad_word_after_a_space_is_another_one_if_it_begins_with_another_token():
    ids = {
        "cat": [5], " cat": [6],
        "dog": [7], " dog": [1, 7],  # The space is a token.
        "bird": [8, 9], " bird": [8, 9],  # The space is dropped.
        "papa": [3, 3], " papa": [4, 3],
    }  # fmt: skip

    def tokenizer(text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": ids[text]}

    words = ("cat", "dog", "bird", "papa")
    assert [bad_word_tokens(tokenizer, [word]) for word in words] == [[[5], [6]], [[7]], [[8, 9]], [[3, 3], [4, 3]]]
