"""Positions and rotation tables against the library's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.helper import prompt
from vlcache_jax.models import load_config, rope
from vlcache_jax.testing import TOKEN_IDS

IMAGE = TOKEN_IDS["<|image_pad|>"]


def test_worked_example():
    positions, delta = rope.mrope_positions(19, [4, 13], [(2, 3), (2, 2)])
    np.testing.assert_array_equal(
        positions,
        [
            [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9, 10, 10, 10, 10, 12, 13],
            [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9, 10, 10, 11, 11, 12, 13],
            [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 10, 11, 12, 13],
        ],
    )
    assert delta == -5
    assert positions.dtype == np.int32


def test_text_only():
    positions, delta = rope.mrope_positions(5, [], [])
    np.testing.assert_array_equal(positions, np.tile(np.arange(5), (3, 1)))
    assert delta == 0


def test_positions_are_the_librarys(family_checkpoint, load_oracle):
    torch = pytest.importorskip("torch")
    model = load_oracle(family_checkpoint).model
    rng = np.random.default_rng(0)
    for case in range(50):
        # At least one token, and sometimes an image as the first or the last part.
        parts = [int(rng.integers(case % 5 == 0, 9))]
        for _ in range(case % 5):
            parts += [tuple(map(int, rng.integers(1, 12, 2))), int(rng.integers(0, 9))]
        ours = prompt(case, parts)
        ids = torch.tensor(ours.token_ids)[None]
        grids = torch.tensor([[1, 2 * h, 2 * w] for h, w in ours.grids]) if ours.grids else None
        positions, delta = model.get_rope_index(ids, (ids == IMAGE).int(), grids)
        np.testing.assert_array_equal(ours.positions, positions[:, 0])
        assert ours.delta == int(delta)


def test_an_image_may_end_the_prompt():
    """The vision end token is text like any other: without it the next token still has n + delta."""
    positions, delta = rope.mrope_positions(8, [2], [(2, 3)])
    assert positions.max() + 1 == 8 + delta == 5


# Head widths and bases of the published models and of small ones; all sections as published or scaled down.
ROTATIONS = [
    ("qwen2_5_vl", 128, 1e6, (16, 24, 24)),
    ("qwen2_5_vl", 16, 1e6, (2, 3, 3)),
    ("qwen3_vl", 128, 5e6, (24, 20, 20)),
    ("qwen3_vl", 24, 5e6, (6, 3, 3)),
    ("qwen3_vl", 64, 1e4, (12, 10, 10)),
]


def library_rotation(model_type, head_dim, theta, section):
    """The library's rotary embedding of a head width, without a model."""
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
    from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

    parameters = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(section)}
    if model_type == "qwen3_vl":
        config = configuration_qwen3_vl.Qwen3VLTextConfig(head_dim=head_dim, rope_parameters=parameters)
        return modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding(config)
    config = configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, rope_parameters=parameters
    )
    return modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding(config)


@pytest.mark.parametrize(("model_type", "head_dim", "theta", "section"), ROTATIONS)
def test_inverse_frequencies(model_type, head_dim, theta, section):
    """Correctly rounded in each step; torch's own power misses the last digit of one in sixty-four."""
    ours = rope.inverse_frequencies(theta, head_dim)
    theirs = library_rotation(model_type, head_dim, theta, section).inv_freq.numpy()
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=1.2e-7)
    assert (ours != theirs).mean() <= 1 / 64
    power = [np.float32(theta ** float(np.float32(2 * i) / np.float32(head_dim))) for i in range(head_dim // 2)]
    np.testing.assert_array_equal(ours, np.float32(1) / np.array(power))


@pytest.mark.slow_for("float32")
@pytest.mark.parametrize(("model_type", "head_dim", "theta", "section"), ROTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_rotation_is_the_librarys(model_type, head_dim, theta, section, dtype):
    """Positions up to the last one of Qwen3-VL, where angles are large and their reduction must be exact."""
    torch = pytest.importorskip("torch")
    oracle = library_rotation(model_type, head_dim, theta, section)
    rng = np.random.default_rng(0)
    position = np.concatenate(
        [np.tile(np.arange(64), (3, 1)), rng.integers(0, 262144, (3, 4000)), np.full((3, 1), 262143)], axis=1
    ).astype(np.int32)
    cos_sin = jax.jit(rope.text_rotation, static_argnums=(1, 2, 3, 4))(
        position, theta, section, model_type == "qwen3_vl", jnp.dtype(dtype)
    )

    def difference():
        expected = oracle(torch.zeros(1, dtype=getattr(torch, dtype)), torch.tensor(position)[:, None])
        return max(
            np.abs(np.asarray(ours[:, 0], np.float32) - theirs[0, :, : head_dim // 2].float().numpy()).max()
            for ours, theirs in zip(cos_sin, expected, strict=True)
        )

    for part in cos_sin:
        assert part.dtype == dtype
        assert part.shape == (position.shape[1], 1, head_dim // 2)
    # The last digit of a frequency, times the last position. In bf16 the same difference can round the other way.
    rounding = 0 if dtype == "float32" else 2.0**-8
    assert difference() <= 1e-3 + rounding
    oracle.inv_freq.copy_(torch.tensor(rope.inverse_frequencies(theta, head_dim)))
    assert difference() <= 1e-6 + rounding


def test_cos_and_sin_reduce_large_angles():
    """The compiled functions against float64, at angles as large as positions get."""
    angle = np.random.default_rng(0).uniform(0, 262144, 100_000).astype(np.float32)
    for ours, exact in ((jnp.cos, np.cos), (jnp.sin, np.sin)):
        np.testing.assert_allclose(jax.jit(ours)(angle), exact(angle.astype(np.float64)), rtol=0, atol=2e-7)


@pytest.mark.parametrize(("height", "width", "head_dim"), [(6, 8, 16), (10, 4, 72), (2, 14, 80)])
def test_vision_rotation(height, width, head_dim):
    """The formula, patch by patch: y frequencies, then x frequencies."""
    from vlcache_jax.models.vision import block_coordinates

    rotation = jax.jit(rope.vision_rotation, static_argnums=1)
    cos, sin = map(np.asarray, rotation(block_coordinates(height, width, 2), head_dim))
    frequencies = 10000.0 ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2))
    rows = [
        (y + dy, x + dx) for y in range(0, height, 2) for x in range(0, width, 2) for dy in range(2) for dx in range(2)
    ]
    angle = np.array([np.concatenate([y * frequencies, x * frequencies]) for y, x in rows])
    np.testing.assert_allclose(cos[:, 0], np.cos(angle), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin[:, 0], np.sin(angle), rtol=0, atol=1e-6)


def test_rotation_depends_on_the_difference_of_positions(family_checkpoint):
    """Scores of rotated queries and keys do not change when all positions shift."""
    text = load_config(family_checkpoint).text
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 6, 1, text.head_dim), np.float32)
    position = rng.integers(0, 50, (3, 6)).astype(np.int32)

    @jax.jit
    def rotated(position):
        table = rope.text_rotation(position, text.rope_theta, text.mrope_section, text.mrope_interleaved, jnp.float32)
        return rope.rotate(q, *table), rope.rotate(k, *table)

    def scores(shift):
        a, b = (np.asarray(x)[:, 0] for x in rotated(position + np.int32(shift)))
        return a @ b.T

    np.testing.assert_allclose(scores(0), scores(200), rtol=0, atol=2e-4)
