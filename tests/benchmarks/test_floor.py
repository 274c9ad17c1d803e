"""What a run costs at least, against the values of the specification."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from vlcache_jax.benchmarks.floor import H200, MODELS, decode, floor, reference
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
