"""Mixtures of experts: the router against the library's, and what is computed for whom."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.helper import drawn
from tests.models import helper, parity
from vlcache_jax.models import decoder
from vlcache_jax.models.config import ExpertsConfig
from vlcache_jax.models.decoder import SparseMLP, route

NAMES = ["qwen3_vl_moe-tied", "qwen3_vl_moe-every", "qwen3_vl_moe-sharded", "qwen3_5_moe", "qwen3_5_moe-sharded"]


def routes_of(model, reference, monkeypatch):
    """The experts that our rows pass, by layer."""
    found = []

    def noted(logits, chosen):
        weight, expert = route(logits, chosen)
        jax.debug.callback(lambda value: found.append(np.asarray(value)), expert, ordered=True)
        return weight, expert

    monkeypatch.setattr(decoder, "route", noted)
    monkeypatch.setattr(helper, "layer", uncached_layer)
    pool = helper.empty_pool(model, len(reference.logits))
    runs = helper.runs_of(model, helper.blocks_of(reference.prompt))
    helper.forward(model, helper.rows_of(reference.prompt), reference.encoder_rows, pool, runs=runs)
    jax.effects_barrier()
    return dict(zip(model.config.text.experts.layers, found, strict=True))


def uncached_layer(model, params):
    graph = model.layer_graphs[jax.tree.structure(params)]
    return lambda *args, keep: jax.jit(functools.partial(nnx.merge(graph, params), keep=keep, return_kv=True))(*args)


@pytest.mark.slow
@pytest.mark.thorough_for("qwen3_vl_moe-sharded")
@pytest.mark.parametrize("name", NAMES)
def test_rows_pass_the_librarys_experts(name, checkpoints, load_oracle, textured_image, monkeypatch):
    """Every row in every layer, though some experts are chosen often and others hardly ever."""
    directory = checkpoints(name)
    reference = parity.reference(load_oracle(directory), directory, textured_image)
    model = helper.load(directory)
    config = model.config.text.experts
    ours = routes_of(model, reference, monkeypatch)
    assert set(ours) == set(reference.routes) == set(config.layers)
    for layer, expert in reference.routes.items():
        np.testing.assert_array_equal(ours[layer], expert)
    counts = [np.bincount(expert.ravel(), minlength=config.count) for expert in reference.routes.values()]
    assert max(count.max() / count.mean() for count in counts) > 1.5
    assert min(count.min() / count.mean() for count in counts) < 0.3


@pytest.mark.slow
@pytest.mark.thorough_for("qwen3_vl_moe-sharded")
@pytest.mark.parametrize("name", NAMES)
def test_few_rows_change_their_experts_in_bfloat16(name, checkpoints, load_oracle, textured_image, monkeypatch, capsys):
    """A rounding can do that, here and in the library: counted, and printed."""
    directory = checkpoints(name)
    exact, rounded = (
        parity.reference(load_oracle(directory, dtype), directory, textured_image) for dtype in ("float32", "bfloat16")
    )
    ours = routes_of(helper.load(directory, "bfloat16"), exact, monkeypatch)

    def flips(routes):
        return sum((np.sort(routes[i]) != np.sort(exact.routes[i])).any(axis=1).sum() for i in exact.routes)

    choices = sum(map(len, exact.routes.values()))
    with capsys.disabled():
        print(f"\n{name}: of {choices} choices {flips(ours)} differ here, {flips(rounded.routes)} in the library")
    assert flips(ours) <= max(2 * flips(rounded.routes), 0.05 * choices)


def test_the_router_chooses_and_weighs_in_float32():
    """In bfloat16 the probabilities of logits that differ by less than a hundredth would be the same."""
    rng = np.random.default_rng(0)
    near = rng.permuted(np.tile(np.arange(1, 129) / 2**14, (50, 1)), axis=1)
    logits = jnp.asarray(np.concatenate([near, 3 * rng.standard_normal((200, 128))]).astype(jnp.bfloat16))
    weight, expert = route(logits, 8)
    exact = np.asarray(logits, np.float64)
    best = np.argsort(-exact, axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(expert, best)
    likely = np.exp(np.take_along_axis(exact, best, axis=1))
    likely /= likely.sum(axis=1, keepdims=True)
    # Rounded once, at the end: half a unit in the last of eight bits.
    assert (np.abs(np.asarray(weight, np.float64) - likely) <= likely * 2.0**-8 * 1.001).all()


@pytest.fixture(scope="module")
def mlp():
    """Of ten experts; rows that begin with a 1 choose among the first four."""
    module = drawn(lambda: SparseMLP(8, ExpertsConfig(10, 3, 5, (0,)), dtype=jnp.float32, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    for stack in (module.experts.gate_up_proj, module.experts.down_proj):
        stack[...] = jnp.asarray(rng.standard_normal(stack.shape, np.float32))
    kernel = np.array(module.gate.kernel[...])
    kernel[0] = np.where(np.arange(10) < 4, 50, 0)
    module.gate.kernel[...] = jnp.asarray(kernel)
    return module


def rows(count):
    x = np.random.default_rng(1).standard_normal((count, 8), np.float32)
    x[:, 0] = 1
    return x


def test_a_row_is_the_weighted_sum_of_its_experts(mlp):
    x = rows(21)
    weight, expert = map(np.asarray, jax.jit(lambda x: route(mlp.gate(x), 3))(x))
    gate_up, down = (np.asarray(stack[...]) for stack in (mlp.experts.gate_up_proj, mlp.experts.down_proj))
    np.testing.assert_allclose(weight.sum(1), 1, rtol=1e-6)
    expected = np.zeros_like(x)
    for i, k in np.ndindex(expert.shape):
        gate, up = np.split(x[i] @ gate_up[expert[i, k]], 2)
        hidden = gate / (1 + np.exp(-gate)) * up
        expected[i] += weight[i, k] * (hidden @ down[expert[i, k]])
    np.testing.assert_allclose(jax.jit(mlp)(x, np.ones(21, bool)), expected, atol=2e-5)


@pytest.mark.slow
def test_what_nobody_needs_is_not_touched(mlp):
    """Neither experts that no row passes, nor rows that are not needed: all of these are NaN."""
    x, is_needed = rows(21), np.arange(21) % 3 > 0
    whole = mlp(x, np.ones(21, bool))
    graph, state = nnx.split(mlp)
    state = jax.tree.map(jnp.array, state)
    for name in ("gate_up_proj", "down_proj"):
        stack = state["experts"][name]
        stack[...] = stack[...].at[4:].set(jnp.nan)
    x[~is_needed] = np.nan
    found = np.asarray(nnx.merge(graph, state)(x, is_needed))
    np.testing.assert_allclose(found[is_needed], whole[is_needed], atol=1e-5)
    assert not found[~is_needed].any()
