"""How a model is spread over devices; `tests/tensor_parallel` runs it on some."""

from __future__ import annotations

import math
import re
import types

import numpy as np
import pytest

from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.memory_plan import kept_token_bytes, weight_bytes
from vlcache_jax.device.mesh import Devices, check_sizes, copied, copied_rows, fitting, repeats, spec_of, widened
from vlcache_jax.device.programs.encode import rows_apart
from vlcache_jax.models.params import parameters
from vlcache_jax.models.registry import SIZES, published_config
from vlcache_jax.pallas_kernels.split import AXIS, WHOLE


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_published_models_can_be_spread_over(name):
    eight = not re.search("qwen2-vl-(2b|7b)|qwen2.5-vl-7b", name.lower())  # of 12 and 28 query heads
    assert [count for count in (1, 2, 4, 8) if count in fitting(published_config(name).text)] == [1, 2, 4, 8][
        : 3 + eight
    ]


def test_other_sizes_are_refused_by_name():
    text = published_config("Qwen2.5-VL-7B").text
    with pytest.raises(ValueError, match=r"one of 1, 2, 4 for this model, got 8: 28 query heads cannot be divided"):
        check_sizes(text, 8)
    with pytest.raises(ValueError, match=r"got 3: 28 query heads and .* and 4 KV heads cannot be divided evenly"):
        check_sizes(text, 3)
    text = published_config("Qwen3-VL-30B-A3B").text
    with pytest.raises(ValueError, match=r"got 7: .* and 128 experts and 4 KV heads cannot be divided evenly"):
        check_sizes(text, 7)


@pytest.mark.parametrize("lead", [(5,), ()])
def test_copies_of_heads_have_their_share_of_the_queries(lead):
    K, G, D, copies = 2, 6, 3, 3
    stored = np.random.default_rng(0).standard_normal((*lead, K, G + 2, D))
    spread = copied(stored, copies)
    assert spread.shape == (*lead, K * copies, G // copies + 2, D)
    for head in range(K * copies):
        own, share = stored[..., head // copies, :, :], head % copies * (G // copies)
        np.testing.assert_array_equal(spread[..., head, :-2, :], own[..., share : share + G // copies, :])
        np.testing.assert_array_equal(spread[..., head, -2:, :], own[..., -2:, :])


@pytest.mark.slow_for("Qwen3-VL-32B", "Qwen2.5")
@pytest.mark.parametrize(("name", "count"), [("Qwen3-VL-32B", 4), ("Qwen3-VL-30B-A3B", 8), ("Qwen2.5-VL-7B", 4)])
def test_what_each_device_holds(name, count):
    """All of the decoder's matrices are shared out, on an axis that divides; the tower, norms and routers are not."""
    config = widened(published_config(name), count)
    whole = shared = 0
    for parameter in parameters(config):
        spec, size = spec_of(parameter.path), math.prod(parameter.shape)
        if spec == WHOLE:
            assert parameter.path[0] == "visual" or len(parameter.shape) == 1 or parameter.path[-2] == "gate"
            whole += size
        else:
            assert parameter.shape[list(spec).index(AXIS)] % count == 0
            shared += size
    assert weight_bytes(config, np.dtype("bfloat16"), count) == 2 * (shared + whole * count)
    assert shared > 10 * whole


def test_what_the_device_tier_keeps_is_counted_on_each_device():
    config = widened(published_config("Qwen3-VL-8B"), 8)
    kv = KVShape.of(config, "bfloat16")
    assert kept_token_bytes(config, kv, 8) == 147456 + 8 * 32768


def test_images_are_shared_out_by_their_patches():
    devices = Devices(types.SimpleNamespace(size=3))
    assert devices.share_out([4, 16, 8, 8, 12, 4]) == [[1, 5], [4, 0], [2, 3]]
    assert devices.share_out([5]) == [[0], [], []]
    assert devices.shares(64, (8, 16, 24, 32, 64)) == [24, 32]
    assert devices.shares(8, (8, 16)) == []


def test_rows_of_images_that_devices_encode_apart_come_in_order():
    """Two devices have two images each, one none; rows that a device has more are left out."""
    tokens = [2, 3, 1, 4]
    rows = rows_apart([[1, 2], [], [3, 0]], tokens, each=7)
    assert rows.tolist() == [18, 19, 0, 1, 2, 3, 14, 15, 16, 17]


def test_copies_of_heads_in_8_bits():
    stored = np.random.default_rng(0).standard_normal((2, 8, 3, 5))  # [K, G + 2, D, M]
    turned = np.moveaxis(copied(np.moveaxis(stored, -1, 0), 3), 0, -1)
    np.testing.assert_array_equal(copied_rows(stored, 3), turned)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("Qwen3-VL-4B-FP8", 8), ("Qwen3-VL-30B-A3B-FP8", 8)])
def test_factors_are_shared_out_where_blocks_do_not_fall_on_devices(name, count):
    """76 blocks of inputs of the down projection of 4B, on eight devices: of half of a block there are two of each."""
    config = widened(published_config(name), count)
    times = {}
    for parameter in parameters(config):
        spec = list(spec_of(parameter.path))
        if parameter.parts[0].kept is None or AXIS not in spec:
            continue
        shape = list(parameter.shape)
        times[parameter.path[-2:]] = repeated = repeats(parameter.path, parameter.shape, count)
        shape[-1] *= repeated
        assert shape[spec.index(AXIS)] % count == 0
    odd = {path for path, repeated in times.items() if repeated > 1}
    assert odd == ({("down_proj", "weight_scale")} if "4B" in name else set())
    whole = sum(parameter.nbytes(np.dtype("bfloat16")) for parameter in parameters(config))
    assert weight_bytes(config, np.dtype("bfloat16")) == whole
    more = weight_bytes(config, np.dtype("bfloat16"), count) - whole
    alone = sum(p.nbytes(np.dtype("bfloat16")) for p in parameters(config) if spec_of(p.path) == WHOLE)
    assert more - (count - 1) * alone == (36 * 76 * 2560 * 4 if "4B" in name else 0)
