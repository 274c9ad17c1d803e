"""The decoder: against the library's, and what the engine relies on when it chooses rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import helper, parity
from tests.models.helper import forward, join, padding_rows, rows_of, take
from vlcache_jax.models import decoder
from vlcache_jax.models.model import bind_layer

# At a scale of 4; the sums run in another order. Of models with states at a scale of 1: these carry differences from
# token to token, and the library in float32 is as far from the library in float64.
TOLERANCE = 2e-5
SLOTS = 80
ROWS = 72


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("qwen2_5_vl-flat-tied", marks=pytest.mark.slow),
        "qwen3_vl-tied",
        pytest.param("qwen3_vl_moe-tied", marks=pytest.mark.slow),
    ],
)
def family_checkpoint(request, checkpoints):
    """Experts are chosen in some layers of the last one, and not in others."""
    return checkpoints(request.param)


@pytest.fixture
def reference(checkpoint, load_oracle, textured_image):
    return parity.reference(load_oracle(checkpoint), checkpoint, textured_image)


def padded(rows):
    """One number of rows for all prefills, so that they compile once."""
    return join(rows, padding_rows(ROWS - len(rows.slot), SLOTS))


@pytest.mark.slow_for("qwen3_vl-tied", "qwen3_vl_moe-every", "qwen3_vl_moe-sharded", "qwen2_5_vl-flat-tied")
@pytest.mark.slow_for("qwen3_5")
@pytest.mark.thorough_for("qwen3_vl-sharded", "qwen2_5_vl-library-names", "qwen2_vl-", "qwen3_vl_moe-every")
@pytest.mark.thorough_for("qwen3_vl_moe-sharded")
def test_prefill_of_images_and_text(checkpoint, reference):
    """Outputs of every layer, keys before and after rotation, values, states, and logits at every position."""
    model = helper.load(checkpoint)
    encoder_rows = helper.encode(model, reference.images, parity.NUM_PATCHES + 12)
    n, base = len(reference.prompt.token_ids), 3
    rows = padded(rows_of(reference.prompt, base=base))
    runs, hidden = helper.runs_of(model, helper.blocks_of(reference.prompt), size=ROWS), []
    pool = helper.empty_pool(model, SLOTS)
    logits, pool, raw_k = forward(model, rows, encoder_rows, pool, runs=runs, hidden=hidden)
    k, v = helper.kept_by(model, pool)
    states = [[state[1] for state in pool[i]] for i in helper.state_layers(model.config.text)]
    pairs = {
        "logits": ([logits[:n]], [reference.logits]),
        "raw_k": ([one[:n] for one in raw_k], reference.raw_k),
        "k": ([one[base : base + n] for one in k], reference.k),
        "v": ([one[base : base + n] for one in v], reference.v),
        "hidden": ([one[:n] for one in hidden], reference.hidden),
        **{f"states {i}": pair for i, pair in enumerate(zip(states, reference.states, strict=True))},
    }
    scale = 1 if model.config.text.has_states else 4
    found = {name: parity.relative(*pair, scale) for name, pair in pairs.items()}
    assert max(found.values()) <= TOLERANCE, found
    assert np.abs(reference.logits).max() > 2  # else the tolerance would mean little


def test_decode_after_prefill(family_checkpoint, load_oracle, textured_image):
    """The last three tokens of the prompt one by one, at the positions that delta gives."""
    reference = parity.reference(load_oracle(family_checkpoint), family_checkpoint, textured_image)
    model = helper.load(family_checkpoint)
    prompt, steps = reference.prompt, 3
    rows, n = rows_of(prompt), len(prompt.token_ids)
    pool = helper.empty_pool(model, SLOTS)
    _, pool, _ = forward(model, padded(take(rows, slice(n - steps))), reference.encoder_rows, pool)
    for slot in range(n - steps, n):
        position = np.full((3, 1), slot + prompt.delta, np.int32)
        row = take(rows, [slot])._replace(position=position)
        logits, pool, _ = forward(model, row, reference.encoder_rows[:1], pool)  # no DeepStack at decode
        assert parity.difference(logits, reference.logits[[slot]]) <= TOLERANCE


# What follows is the decoder alone, with random encoder rows.


class Case:
    """A prompt with random encoder rows, and its prefill without any padding."""

    def __init__(self, model, seed, parts):
        self.model = model
        self.prompt = helper.prompt(seed, parts)
        self.length = len(self.prompt.token_ids)
        self.rows = rows_of(self.prompt)
        shape = 1 + model.config.vision.num_deepstack, 24, model.config.text.hidden_size
        self.encoder_rows = np.random.default_rng(seed).standard_normal(shape, np.float32)
        self.logits, self.pool, _ = self.run(self.rows, bounds=(self.length,) * (model.config.text.num_layers + 1))

    def run(self, rows, pool=None, bounds=None):
        """All rows, padded, by default."""
        count = len(rows.slot)
        pool = pool or helper.empty_pool(self.model, SLOTS)
        logits, pool, raw_k = forward(self.model, rows if bounds else padded(rows), self.encoder_rows, pool, bounds)
        return logits[:count], pool, raw_k


@pytest.fixture(scope="module")
def case(family_checkpoint):
    return Case(helper.load(family_checkpoint), 0, (4, (2, 3), 3, (3, 2), 5))


def pools_differ_by(a, b, slots=slice(None)):
    return parity.difference(*([part[slots] for layer in pool for part in layer] for pool in (a, b)))


def test_the_last_layer_runs_for_the_wanted_rows_only(case):
    order = np.roll(np.arange(case.length), 2)
    bounds = (case.length,) * case.model.config.text.num_layers
    logits, pool, _ = case.run(take(case.rows, order), bounds=(*bounds, 2))
    assert logits.shape[0] == 2
    assert parity.difference(logits, case.logits[order[:2]]) <= TOLERANCE
    assert pools_differ_by(pool, case.pool) <= TOLERANCE


def test_rows_that_drop_out_are_taken_from_the_pool(case):
    """Selective recompute: nested row sets over a pool that holds the right K, V. Fresh slots start as NaN."""
    # Logits are wanted of the last three tokens, which come first; other text is fresh in all layers; image tokens
    # leave one after the other, four per layer.
    order = np.lexsort((case.rows.source < 0, case.rows.slot < case.length - 3))
    bounds = *(case.length - 4 * layer for layer in range(case.model.config.text.num_layers)), 3
    linked = []
    for n, (k, v) in zip(bounds, case.pool, strict=False):
        is_fresh = np.isin(np.arange(SLOTS), order[:n])[:, None, None]
        linked.append((np.where(is_fresh, np.nan, k), np.where(is_fresh, np.nan, v)))
    logits, pool, _ = case.run(take(case.rows, order), linked, bounds)
    assert parity.difference(logits, case.logits[order[:3]]) <= TOLERANCE
    assert pools_differ_by(pool, case.pool) <= TOLERANCE


def test_queries_that_nobody_needs(case, monkeypatch):
    """Whether they are computed and dropped or not at all, the others are the same."""
    layer = bind_layer(case.model.layer_graphs, case.model.params["language_model"]["layers"][0])
    attention, keep = layer.self_attn, 5
    y = np.random.default_rng(4).standard_normal((case.length, attention.config.hidden_size)).astype(np.float32)
    parts, projected = [], []
    for surplus in (case.length, 0):
        monkeypatch.setattr(decoder, "SURPLUS", surplus)
        parts.append([one.shape[:3:2] for one in jax.eval_shape(functools.partial(attention.products, keep=keep), y)])
        projected.append(jax.jit(functools.partial(attention.project, keep=keep))(y, case.rows))
    group = attention.config.num_heads // attention.config.num_kv_heads
    assert parts == [[(case.length, group + 2)], [(keep, group + 2), (case.length - keep, 2)]]
    assert parity.difference(*map(list, projected)) <= TOLERANCE


def test_the_order_of_rows_does_not_matter(case):
    order = np.random.default_rng(1).permutation(case.length)
    logits, pool, _ = case.run(take(case.rows, order))
    assert parity.difference(logits, case.logits[order]) <= TOLERANCE
    assert pools_differ_by(pool, case.pool) <= TOLERANCE


def test_packed_requests_equal_each_alone(case):
    """Two requests at other slots of one pool, the second one up to the last slot, rows of both mixed."""
    other = helper.prompt(1, (3, (2, 4), 2))
    first_encoder_row = 12
    alone, *_ = case.run(rows_of(other, first_encoder_row=first_encoder_row))
    rows = join(
        rows_of(case.prompt, base=2),
        rows_of(other, base=SLOTS - len(other.token_ids), first_encoder_row=first_encoder_row),
    )
    order = np.random.default_rng(2).permutation(len(rows.slot))
    logits, *_ = case.run(take(rows, order), helper.empty_pool(case.model, SLOTS, fill=7.0))
    assert parity.difference(logits, np.concatenate([case.logits, alone])[order]) <= TOLERANCE


def test_padding_rows_change_nothing(case):
    """Neither the logits nor any slot, not even the last one, which a padding slot of -1 would overwrite."""
    fill = 7.0
    order = np.random.default_rng(3).permutation(ROWS)
    for free in (1, 0):  # slots behind the request: with none it owns the last slot
        base = SLOTS - case.length - free
        rows = take(padded(rows_of(case.prompt, base=base)), order)
        logits, pool, _ = case.run(rows, helper.empty_pool(case.model, SLOTS, fill))
        assert np.isfinite(logits).all()
        assert parity.difference(logits[np.argsort(order)][: case.length], case.logits) <= TOLERANCE
        for array, alone in (
            (a, b) for ours, full in zip(pool, case.pool, strict=True) for a, b in zip(ours, full, strict=True)
        ):
            assert parity.difference(array[base : base + case.length], alone[: case.length]) <= TOLERANCE
            np.testing.assert_array_equal(array[:base], fill)
            np.testing.assert_array_equal(array[base + case.length :], fill)


def test_chunks_in_slot_order_equal_one_prefill(case):
    first, pool, _ = case.run(take(case.rows, slice(9)))
    second, *_ = case.run(take(case.rows, slice(9, None)), pool)
    assert parity.difference(np.concatenate([first, second]), case.logits) <= TOLERANCE


def test_kv_is_returned_on_request(case):
    layer = bind_layer(case.model.layer_graphs, case.model.params["language_model"]["layers"][0])
    x = jnp.asarray(np.zeros((case.length, case.model.config.text.hidden_size), np.float32))
    memory = [jnp.asarray(half) for half in helper.empty_pool(case.model, SLOTS)[0]]
    step = functools.partial(layer, x, memory, case.rows, keep=5)
    *without, nothing = jax.eval_shape(step)
    *others, (raw_k, v) = jax.eval_shape(functools.partial(step, return_kv=True))
    assert nothing is None
    assert without == others
    assert raw_k.shape == v.shape == (case.length, *memory[0].shape[1:])


def test_keys_carry_what_is_not_finite_in_values(case):
    """One value of one row overflows: the pool's values stay finite, and no row before it knows."""
    text = case.model.config.text
    row, head, place = 5, text.num_kv_heads - 1, 3
    params = jax.tree.map(jnp.array, case.model.params["language_model"]["layers"][0])
    largest = float(jnp.finfo(jnp.float32).max)
    projection = params["self_attn"]["qkv_proj"]
    projection["kernel"] = projection["kernel"].at[0, head, -1, place].set(largest)
    params["input_layernorm"]["scale"] = jnp.ones(text.hidden_size)
    layer = bind_layer(case.model.layer_graphs, params)
    x = np.random.default_rng(0).normal(size=(case.length, text.hidden_size)).astype(np.float32)
    x[:, 0] = 0
    x[row, 0] = 1000
    memory = [jnp.asarray(half) for half in helper.empty_pool(case.model, SLOTS, fill=2.0)[0]]
    step = jax.jit(functools.partial(layer, keep=case.length, return_kv=True))
    out, (k, v), (raw_k, raw_v) = step(x, memory, case.rows)
    assert np.isfinite(v).all()
    np.testing.assert_array_equal(np.argwhere(np.isnan(k)), [[row, head, place]])
    assert np.isfinite(raw_k).all()  # records see what was computed
    np.testing.assert_array_equal(np.argwhere(np.isinf(raw_v)), [[row, head, place]])
    assert np.isfinite(out[:row]).all()
    assert np.isnan(out[row:]).all()
