"""Models whose matrices stay in 8 bits, against a float64 product of what they stand for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import float8, helper, parity
from tests.models.helper import forward, join, padding_rows, rows_of
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.models import abstract_model
from vlcache_jax.models.model import layer_graphs

SLOTS, ROWS = 80, 72
TOLERANCE = 2e-5  # at a scale of 4, as of models without 8 bits
# Layers that are all alike compile once.
ALIKE = {"text": float8.TEXT | float8.EXPERTS | {"num_hidden_layers": 2, "mlp_only_layers": []}}


def load(directory, dtype="float32"):
    checkpoint = open_checkpoint(directory, dtype=dtype)
    model = abstract_model(checkpoint.config, jnp.dtype(dtype))
    return helper.Model(
        checkpoint.config, nnx.graphdef(model), layer_graphs(model), checkpoint.load(), jnp.dtype(dtype)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "quantization", "left_out"),
    [
        ("qwen3_vl", "fp8", []),
        ("qwen3_vl_moe", "fp8", []),
        ("qwen2_5_vl", "channel", []),
        ("qwen3_vl", "block", []),
        ("qwen3_vl", "fp8", ["0.mlp.down_proj", "1.self_attn.k_proj"]),
        ("qwen3_vl_moe", "channel", ["1.mlp.experts.3.up_proj"]),
        ("qwen3_5", "fp8", []),
        ("qwen3_5", "channel", ["0.linear_attn.in_proj_z"]),
        ("qwen3_5_moe", "block", ["2.linear_attn.in_proj_qkv", "1.mlp.shared_expert.up_proj"]),
    ],
)
def test_logits_are_those_of_a_float64_product(tmp_path, load_oracle, textured_image, kind, quantization, left_out):
    """Keys, values and logits are those of the library's model in float64, with the matrices that 8 bits stand for."""
    options = ALIKE if kind == "qwen3_vl_moe" else {}
    source = float8.make(tmp_path / "whole", kind, quantization, dtype="bfloat16", **options)
    names = [f"model.language_model.layers.{name}" for name in left_out]
    source = float8.left_out(source, tmp_path / "source", names)
    oracle = load_oracle(float8.twin(source, tmp_path / "twin"), "float64")
    reference = parity.reference(oracle, tmp_path / "twin", textured_image)
    model = load(source)
    encoder_rows = helper.encode(model, reference.images, parity.NUM_PATCHES + 12)
    n, base = len(reference.prompt.token_ids), 3
    rows = rows_of(reference.prompt, base=base)
    rows = join(rows, padding_rows(ROWS - n, SLOTS))
    pool, runs = helper.empty_pool(model, SLOTS), helper.runs_of(model, helper.blocks_of(reference.prompt), size=ROWS)
    logits, pool, _ = forward(model, rows, encoder_rows, pool, runs=runs)
    k, v = helper.kept_by(model, pool)
    scale = 1 if model.config.text.has_states else 4
    pairs = {
        "logits": ([logits[:n]], [reference.logits]),
        "k": ([one[base : base + n] for one in k], reference.k),
        "v": ([one[base : base + n] for one in v], reference.v),
    }
    found = {name: parity.relative(*pair, scale) for name, pair in pairs.items()}
    assert max(found.values()) <= TOLERANCE, found
    assert np.abs(reference.logits).max() > 2
