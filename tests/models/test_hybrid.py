"""Models of layers with states and layers with K and V: prompts in steps, then token by token, and bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import helper, parity
from tests.models.helper import forward, join, padding_rows, rows_of, take
from tests.models.test_bfloat16 import assert_no_worse
from vlcache_jax.engine.runs import PromptStates, block_ends, make_runs, whole_blocks
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.models.layer_kinds import BLOCK, TokenStates

TOLERANCE = 2e-5  # at a scale of 1
SLOTS, ROWS = 80, 72
NAMES = ["qwen3_5-tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "qwen3_5_moe-sharded"))]
TAIL = 3  # tokens that are computed one by one


def layout_of(prompt):
    """The engine's layout of a prompt."""
    images = np.flatnonzero(prompt.token_ids == helper.TOKEN_IDS["<|vision_start|>"]) + 1
    refs = [ImageRef(str(i), (1, 2 * h, 2 * w), h * w, lambda: None) for i, (h, w) in enumerate(prompt.grids)]
    return make_layout(prompt.token_ids.astype(np.int32), images.tolist(), refs, 2)


def test_tests_and_engine_cut_prompts_alike():
    for seed, parts in enumerate([parity.PARTS, (200,), (1,), (2,), ((3, 4), 1), (70, (8, 9), (2, 2), 65)]):
        prompt = helper.prompt(seed, parts)
        n = len(prompt.token_ids)
        ends = block_ends(layout_of(prompt), n)
        cuts = np.cumsum(helper.blocks_of(prompt))
        np.testing.assert_array_equal(np.flatnonzero(ends) + 1, cuts)
        assert max(helper.blocks_of(prompt)) <= BLOCK
        assert whole_blocks(ends, n) == n


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_blocks_and_then_tokens(name, checkpoints, load_oracle, textured_image):
    """The logits of all tokens and the states at the end are the library's, of rows in any order."""
    directory = checkpoints(name)
    reference = parity.reference(load_oracle(directory), directory, textured_image)
    model, prompt = helper.load(directory), reference.prompt
    n = len(prompt.token_ids)
    rows, count = rows_of(prompt), n - TAIL
    ends = block_ends(layout_of(prompt), n)
    ends[count - 1] = True
    pool, logits, done = helper.empty_pool(model, SLOTS, fill=np.nan), np.zeros_like(reference.logits), 0
    for i in model.config.text.paged_layers:
        pool[i] = [np.zeros_like(half) for half in pool[i]]  # attention multiplies what it does not see by 0
    rng = np.random.default_rng(0)
    while done < count:
        step = whole_blocks(ends[done:count], 30)
        order = rng.permutation(step)
        own = np.arange(done, done + step)
        runs = make_runs(np.zeros(step, np.int32), own, ends[own], [PromptStates(2)], order)
        runs = helper.padded_runs(runs, ROWS)
        given = join(take(rows, own[order]), padding_rows(ROWS - step, SLOTS))
        found, pool, _ = forward(model, given, reference.encoder_rows, pool, runs=runs)
        logits[own[order]] = found[:step]
        done += step
    for slot in range(count, n):
        row = take(rows, [slot])._replace(position=np.full((3, 1), slot + prompt.delta, np.int32))
        states = TokenStates(np.array([2], np.int32), np.array([2], np.int32))
        logits[slot : slot + 1], pool, _ = forward(model, row, reference.encoder_rows[:1], pool, runs=states)
    states = [[array[2] for array in pool[i]] for i in helper.state_layers(model.config.text)]
    found = {
        "logits": parity.relative([logits], [reference.logits], 1),
        **{
            f"states {i}": parity.relative(*pair, 1)
            for i, pair in enumerate(zip(states, reference.states, strict=True))
        },
    }
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe"])
def test_bfloat16(name, checkpoints, load_oracle, textured_image):
    """No worse than the library's own bfloat16, whose states of the rule are in float32, too, after the same tower."""
    directory = checkpoints(name)
    exact = parity.reference(load_oracle(directory), directory, textured_image)
    theirs = parity.reference(load_oracle(directory, "bfloat16"), directory, textured_image, exact)
    model = helper.load(directory, "bfloat16")
    pool, hidden = helper.empty_pool(model, len(exact.logits)), []
    runs = helper.runs_of(model, helper.blocks_of(exact.prompt))
    logits, pool, raw_k = forward(
        model, rows_of(exact.prompt), theirs.encoder_rows, pool, runs=runs, routes=exact.routes, hidden=hidden
    )
    assert_no_worse(logits, theirs.logits, exact.logits)
    assert_no_worse(np.stack(hidden), np.stack(theirs.hidden), np.stack(exact.hidden))
    assert_no_worse(np.stack(raw_k), np.stack(theirs.raw_k), np.stack(exact.raw_k))
    for layer, own, other in zip(helper.state_layers(model.config.text), theirs.states, exact.states, strict=True):
        for array, rounded, right in zip(pool[layer], own, other, strict=True):
            assert_no_worse(np.asarray(array[1], np.float32), rounded, right)
