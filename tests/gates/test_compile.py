"""Programs of the real sizes, compiled for an H200 on a machine without one, and their memory plans."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from vlcache_jax.models import ModelConfig, Rows, abstract_model, bind
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.qwen3_vl import VisionConfig
from vlcache_jax.pallas_kernels import link

pytestmark = pytest.mark.cuda_gate

TARGET = pathlib.Path(__file__).parents[2] / "benchmarks" / "h200.txtpb"
SLOTS = 20480
QWEN3_VL_8B = ModelConfig(
    model_type="qwen3_vl",
    text=TextConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        mrope_section=(24, 20, 20),
        mrope_interleaved=True,
        qkv_bias=False,
        qk_norm=True,
        max_position_embeddings=262144,
    ),
    vision=VisionConfig(
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        out_hidden_size=4096,
        num_heads=16,
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        in_channels=3,
        num_position_embeddings=2304,
        deepstack_blocks=(8, 16, 24),
    ),
    image_token_id=151655,
    video_token_id=151656,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def on_h200():
    """Shape -> abstract array on an H200."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@pytest.mark.parametrize(("size", "keep"), [(4096, 4096), (4096, 64), (64, 64), (1, 1)])
@pytest.mark.parametrize("capture", [False, True])
def test_a_layer_step_updates_the_pool_in_place(on_h200, size, keep, capture):
    text = QWEN3_VL_8B.text
    layer = abstract_model(QWEN3_VL_8B, jnp.bfloat16).language_model.layers[0]
    graph, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((size, text.hidden_size), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((SLOTS, text.num_kv_heads, text.head_dim), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((size,), jnp.int32)
    rows = Rows(index, jax.ShapeDtypeStruct((3, size), jnp.int32), index, index, index)

    def step(params, x, k, v, rows, deepstack):
        return bind(graph, params)(x, k, v, rows, deepstack, keep=keep, capture=capture, implementation="xla")

    arguments = on_h200((nnx.to_pure_dict(state), x, pool, pool, rows, x))
    plan = jax.jit(step, donate_argnums=(2, 3)).lower(*arguments).compile().memory_analysis()
    pool_bytes = 2 * SLOTS * text.num_kv_heads * text.head_dim * 2
    assert plan.alias_size_in_bytes == pool_bytes
    # A few arrays of the rows, in float32, and nothing that grows with the pool.
    row_bytes = 4 * (4 * text.hidden_size + 3 * text.intermediate_size + 4 * text.num_heads * text.head_dim)
    assert plan.temp_size_in_bytes < size * row_bytes + 64 * 2**20


@pytest.mark.parametrize("tokens", [64, 16384])
def test_linking_updates_the_pool_in_place(on_h200, tokens):
    text = QWEN3_VL_8B.text
    pool = jax.ShapeDtypeStruct((SLOTS, text.num_kv_heads, text.head_dim), jnp.bfloat16)
    stored = jax.ShapeDtypeStruct((tokens, text.num_kv_heads, text.head_dim), jnp.bfloat16)
    angles = jax.ShapeDtypeStruct((tokens, 1, text.head_dim // 2), jnp.bfloat16)
    slot = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    arguments = on_h200((pool, pool, stored, stored, slot, angles, angles))
    plan = jax.jit(link, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis()
    assert plan.alias_size_in_bytes == 2 * SLOTS * text.num_kv_heads * text.head_dim * 2
    # The rotated keys at most, and nothing that grows with the pool.
    assert plan.temp_size_in_bytes < 2 * tokens * text.num_kv_heads * text.head_dim * 4 + 2**20
