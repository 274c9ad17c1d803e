"""What a run costs at least, against the values of the specification."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from vlcache_jax.benchmarks.floor import (
    H200,
    HYBRIDS,
    MODELS,
    DeviceRates,
    decode,
    floor,
    reference,
    reference_with_states,
)
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.models.params import parameters
from vlcache_jax.models.registry import load_config, published_config
from vlcache_jax.reuse.policies import Plan


@pytest.mark.parametrize(
    ("model", "printed"),
    [
        ("Qwen3-VL-8B", ("650", "504", "52", "15", "5.6")),
        ("Qwen3-VL-32B", ("2293", "2145", "216", "61", "19")),
        ("Qwen2.5-VL-7B", ("577", "430", "44", "12", "4.1")),
    ],
)
def test_the_specification(model, printed):
    """To the last digit that it prints."""
    found = reference(MODELS[model])
    cases = ("cold", "encoder cached", "r = 0.1", "falling to 0", "r = 0")
    milliseconds = [1000 * found[case].seconds for case in cases]
    assert tuple(f"{ms:.{len(p.partition('.')[2])}f}" for ms, p in zip(milliseconds, printed, strict=True)) == printed


def test_parts():
    config = dataclasses.replace(
        MODELS["Qwen3-VL-8B"], text=dataclasses.replace(MODELS["Qwen3-VL-8B"].text, num_layers=1)
    )
    text = config.text
    found = floor(config, Plan(np.array([1, 0, 0, 2], np.int16)), loaded=10**9)
    weights = text.hidden_size * (2 * text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    weights += 3 * text.hidden_size * text.intermediate_size
    # Two rows bring K and V; the last one alone goes on, and sees four slots.
    kv = 2 * 2 * text.hidden_size * 2 * text.num_kv_heads * text.head_dim
    other = 2 * (weights - text.hidden_size * 2 * text.num_kv_heads * text.head_dim)
    attention = 4 * 4 * text.num_heads * text.head_dim
    head = 2 * text.hidden_size * text.vocab_size
    assert found.operations == kv + other + attention + head
    assert found.parts["encoder"] == 0
    assert found.parts["load"] == 10**9 / H200.host
    assert found.parts["link"] == 2 * 2 * 2 * 2 * text.num_kv_heads * text.head_dim / H200.memory
    assert 2 * weights / H200.memory < found.parts["linear"] < 1.001 * 2 * weights / H200.memory
    assert found.parts["move"] == 0
    fast = dataclasses.replace(H200, memory=1e30, matrix=H200.matrix / 2)
    assert floor(config, Plan(np.array([1, 0, 0, 2], np.int16)), fast).seconds == pytest.approx(
        2 * found.operations / H200.matrix
    )


def test_layers_with_states_count_their_own_matrices(checkpoints):
    """Linear attention, the gate of full attention and the shared expert, by the shapes of the parameters."""
    for model in ("qwen3_5", "qwen3_5_moe"):
        config = load_config(checkpoints(model))
        text = config.text
        layers = text.num_layers
        depth = np.full(3, layers + 1, np.int16)
        found = floor(config, Plan(depth)).operations
        sizes = text.linear_attention
        states = sizes.value_heads * sizes.key_width * sizes.value_width * (layers - len(text.paged_layers))
        attention = 4 * text.num_heads * text.head_dim * (1 + 2 + 3) * len(text.paged_layers)
        decoder = [one for one in parameters(config) if one.path[0] == "language_model"]
        # Each row passes some experts of a layer, and the gate of the shared expert counts nothing.
        used = sum(
            math.prod(one.shape) * (text.experts.chosen / text.experts.count if "experts" in one.path else 1)
            for one in decoder
            if (one.is_kernel or "experts" in one.path) and "shared_expert_gate" not in one.path
        )
        assert found == 2 * 3 * (used + text.hidden_size * text.vocab_size) + 3 * 6 * states + attention


def linked(config, *inner):
    """Return a plan of 100 tokens that computes all but some runs of them."""
    depth = np.full(100, config.text.num_layers, np.int16)
    for start, stop in inner:
        depth[start:stop] = 0
    depth[-1] += 1
    return Plan(depth)


def test_linking_moves_the_map_of_each_image_and_the_state(checkpoints):
    config = load_config(checkpoints("qwen3_5"))
    text, sizes = config.text, config.text.linear_attention
    assert (text.num_layers, len(text.paged_layers)) == (4, 1)
    state = sizes.value_heads * sizes.key_width * sizes.value_width
    conv = 3 * (2 * sizes.key_heads * sizes.key_width + sizes.value_heads * sizes.value_width)
    kv = 2 * text.num_kv_heads * text.head_dim
    rates = DeviceRates(matrix=1e30, memory=1.0)
    one, two = linked(config, (10, 50)), linked(config, (10, 30), (35, 55))
    for plan, images in ((one, 1), (two, 2)):
        found = floor(config, plan, rates, itemsize=2).parts["link"]
        # A, B and the inputs of the convolution in, the state in and out, in three layers; KV of 40 tokens in one.
        assert found == 3 * images * (2 * 2 * state + 4 * conv + 2 * 4 * state) + 2 * 2 * kv * 40
        coded = floor(config, plan, rates, itemsize=2, kept=kv, mapped=state).parts["link"]
        assert coded == 3 * images * (state + 2 * 4 * state) + 3 * kv * 40
    assert floor(config, linked(config), rates).parts["link"] == 0
    # Both compute as many tokens, and the query of the layer with full attention is the last one.
    more = floor(config, two).operations - floor(config, one).operations
    assert more == 3 * 2 * sizes.key_width * state


def test_the_map_of_a_cache_entry_has_the_counted_bytes():
    for name, config in HYBRIDS.items():
        kv = KVShape.of(config, "bfloat16", maps="full")
        plan = linked(config, (10, 50))
        alike = [
            floor(config, plan, mapped=mapped).parts["link"]
            for mapped in (None, kv.map_bytes // (config.text.num_layers - kv.layers))
        ]
        assert alike[0] == alike[1], name


def test_reference_cases_of_models_with_states_load_their_entries():
    config = HYBRIDS["Qwen3.5-9B"]
    found = reference_with_states(config)
    assert [*found] == [
        "cold", "encoder cached", "r = 0", "r = 0, int8", "shift-ends, r = 0.1", "shift-ends, r = 0.1, int8",
        "shift-ends, r = 0.2", "shift-ends, r = 0.2, int8",
    ]  # fmt: skip
    entry = 33.6e6 + 50.3e6 + 2.4e6  # KV, B and A in bfloat16, inputs of the convolution; not the state after the image
    assert found["r = 0"].parts["load"] * 50e9 == pytest.approx(20 * entry, rel=0.01)
    assert found["encoder cached"].parts["load"] * 50e9 == 20 * 1024 * 4096 * 2
    rows = found["shift-ends, r = 0.1"].parts["linear"] / found["cold"].parts["linear"]
    assert rows == pytest.approx((20 * 102 + 26) / (20 * 1024 + 26), rel=0.01)
    for name in ("r = 0", "shift-ends, r = 0.1", "shift-ends, r = 0.2"):
        plain, coded = found[name].parts, found[f"{name}, int8"].parts
        assert coded["load"] < 0.54 * plain["load"]
        assert {**plain, "load": 0, "link": 0} == {**coded, "load": 0, "link": 0}
        assert (plain["move"] == 0) == (name == "r = 0")


def test_moving_reads_and_writes_what_is_not_computed_once_more():
    config = MODELS["Qwen3-VL-8B"]
    text = config.text
    depth = np.full(100, text.num_layers, np.int16)
    depth[10:90] = 0
    depth[-1] += 1
    plain, moved = (floor(config, Plan(depth, shift=shift)) for shift in (False, True))
    kv, again = 2 * text.num_kv_heads * text.head_dim, text.num_layers - 1
    assert moved.seconds - plain.seconds == pytest.approx(again * 2 * 2 * kv * 80 / H200.memory)
    assert moved.parts == plain.parts | {"move": moved.parts["move"]}


def test_a_row_sees_the_slots_before_its_own():
    config = MODELS["Qwen2.5-VL-7B"]
    depth = np.array([29, 0, 0, 28, 28], np.int16)  # a question that stands last in memory
    moved = Plan(depth, slot=np.array([4, 0, 1, 2, 3], np.int32))
    assert floor(config, moved).operations > floor(config, Plan(depth)).operations


def test_experts_count_for_the_rows_that_pass_them():
    config = published_config("Qwen3-VL-30B-A3B")
    text, width = dataclasses.replace(config.text, num_layers=1), config.text.hidden_size
    config, expert = dataclasses.replace(config, text=text), 3 * width * text.experts.intermediate_size
    linear = 2 * (2 * text.num_heads + 2 * text.num_kv_heads) * text.head_dim * width + 2 * width * 128
    for rows, chosen in ((1, 8), (20, 92.8), (4096, 128)):
        operators = [one for one in decode(config, rows, 0) if one.part == "linear"]
        assert sum(one.operations for one in operators) == rows * (linear + 2 * 8 * expert)
        moved = operators[-1].bytes - 2 * 2 * rows * width
        assert moved == pytest.approx(2 * chosen * expert, rel=1e-3)
