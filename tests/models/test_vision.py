"""The vision towers against the library's, and the tables that the host computes for them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.helper import drawn, each_family
from tests.models import helper, parity
from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.models import rope, vision
from vlcache_jax.models.qwen2_5_vl import encoder_tables as window_tables
from vlcache_jax.models.registry import load_config

# Sum order and the library's convolution for the patch embedding.
TOLERANCE = 2e-5


@pytest.fixture
def reference(checkpoint, load_oracle, textured_image):
    return parity.reference(load_oracle(checkpoint), checkpoint, textured_image)


@pytest.mark.slow_for("qwen3_vl_moe", "qwen3_vl-", "qwen2_5_vl-", "qwen2_vl-", "qwen3_5")
def test_packed_and_padded_images(checkpoint, reference):
    """Image tokens and DeepStack features of three images in one call."""
    model = helper.load(checkpoint)
    rows = helper.encode(model, reference.images, parity.NUM_PATCHES + 12)
    assert len(rows) == 1 + model.config.vision.num_deepstack
    assert parity.difference(rows, reference.encoder_rows) <= TOLERANCE


@pytest.mark.slow
@each_family
def test_neither_padding_nor_neighbours_are_seen(family_checkpoint, textured_image):
    model = helper.load(family_checkpoint)
    side = model.config.vision.patch_size * 2
    images = [textured_image(3 * side, 2 * side), textured_image(2 * side, 5 * side), textured_image(side, side)]
    num_patches = parity.NUM_PATCHES + 12
    packed = helper.encode(model, images, num_patches)
    alone = [helper.encode(model, [image], num_patches) for image in images]
    assert parity.difference(packed, np.concatenate(alone, axis=1)) <= TOLERANCE
    changed = helper.encode(model, [255 - images[0], *images[1:]], num_patches)
    assert parity.difference(packed[:, 6:], changed[:, 6:]) == 0
    assert parity.difference(packed[:, :6], changed[:, :6]) > 0.1
    without_padding = helper.encode(model, images, 4 * packed.shape[1])
    assert parity.difference(packed, without_padding) <= TOLERANCE


def test_windows():
    """The example of a 3 x 4 grid in windows of 2 x 2 tokens, packed behind another image and padded."""
    config = load_config_of_windows(window_size=56)
    tables = window_tables(config, [(1, 2, 4), (1, 6, 8)], 64)
    example = np.array([0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11])
    np.testing.assert_array_equal(tables["window_order"], [0, 1, *(example + 2), 14, 15])
    np.testing.assert_array_equal(tables["window_order"][tables["image_order"]], np.arange(16))
    lengths = (tables["window_end"] - tables["window_start"]).tolist()
    assert lengths == [8] * 8 + [16] * 32 + [8] * 16 + [0] * 8
    assert (tables["image_end"] - tables["image_start"]).tolist() == [8] * 8 + [48] * 48 + [0] * 8
    # Token 4 of the second image is its row 1, column 0: the third of its first window.
    np.testing.assert_array_equal(tables["yx"][16:20], [[2, 0], [2, 1], [3, 0], [3, 1]])


def load_config_of_windows(window_size):
    from vlcache_jax.models.qwen2_5_vl import Qwen25VLVisionConfig

    return Qwen25VLVisionConfig(
        depth=1,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=64,
        num_heads=2,
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        in_channels=3,
        window_size=window_size,
        full_blocks=(),
        tokens_per_second=2,
    )


def test_block_coordinates():
    expected = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    np.testing.assert_array_equal(vision.block_coordinates(2, 4, 2), expected)


def test_segments():
    start, end = vision.segments([3, 2], 7)
    assert start.tolist() == [0, 0, 0, 3, 3, 0, 0]
    assert end.tolist() == [3, 3, 3, 5, 5, 0, 0]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("grids", [[(1, 2, 2)], [(1, 6, 10), (1, 4, 2)], [(1, 2, 40)]])
def test_tables_are_padded_and_in_range(checkpoints, name, grids):
    config = load_config(checkpoints(name)).vision
    from vlcache_jax.models.registry import FAMILIES

    patches = sum(h * w for _, h, w in grids)
    for table in FAMILIES[name].encoder_tables(config, grids, patches + 8).values():
        assert len(table) in (patches + 8, (patches + 8) // 4)
        assert table.dtype in (np.int32, np.float32)
        assert np.isfinite(table).all()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 6), (8, 8), (14, 4), (50, 6)])
def test_learned_positions(height, width):
    """Bilinear taps, corner to corner: equal to interpolating a buffer exactly, and inside the table at the edges."""
    from vlcache_jax.models.qwen3_vl import _position_taps

    side = 8
    tap, weight = _position_taps(2 * height, 2 * width, 2, side)
    y, x = vision.block_coordinates(2 * height, 2 * width, 2).T
    assert tap.min() == 0
    assert tap.max() == side * side - 1
    np.testing.assert_allclose(weight.sum(axis=1), 1, atol=1e-6)
    # The grid's own coordinates are buffers, which bilinear interpolation reproduces.
    for value, at, n in ((tap // side, y, 2 * height), (tap % side, x, 2 * width)):
        np.testing.assert_allclose((value * weight).sum(axis=1), at * (side - 1) / (n - 1), atol=1e-5)


def test_keys_carry_what_is_not_finite_in_values(checkpoints, monkeypatch):
    """One value of one patch overflows: attention gets finite values, and the other image does not know."""
    config = load_config(checkpoints("qwen3_vl-tied")).vision
    layer = drawn(lambda: vision.VisionAttention(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    patch, head, place = 2, 1, 3
    column = 2 * config.hidden_size + head * config.head_dim + place
    kernel = np.array(layer.qkv.kernel[...])
    kernel[0, column] = np.finfo(np.float32).max
    layer.qkv.kernel[...] = jnp.asarray(kernel)
    y = np.random.default_rng(0).normal(size=(9, config.hidden_size)).astype(np.float32)
    y[:, 0] = 0
    y[patch, 0] = 1000
    given = []

    def attention(q, k, v, *rest, **options):
        given.extend((k, v))
        return kernels.attention(q, k, v, *rest, **options)

    monkeypatch.setattr(vision, "attention", attention)
    rotation = rope.vision_rotation(jnp.zeros((9, 2), jnp.int32), config.head_dim)
    out = layer(jnp.asarray(y), rotation, tuple(map(jnp.asarray, vision.segments([4, 5], 9))), None)
    k, v = given
    assert np.isfinite(v).all()
    np.testing.assert_array_equal(np.argwhere(np.isnan(k)), [[patch, head, place]])
    assert np.isnan(out[:4]).all()
    assert np.isfinite(out[4:]).all()
