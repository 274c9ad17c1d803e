"""Checkpoints in 8 bits: both published layouts, opened and converted, and everything that can be wrong with them."""

from __future__ import annotations

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.models import float8
from vlcache_jax.convert import check_contents, convert, verify_weights
from vlcache_jax.convert.plan import PlanError, make_plan
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.models.layers import layers_of
from vlcache_jax.models.params import is_apart, parameters
from vlcache_jax.models.registry import load_config
from vlcache_jax.testing import make_checkpoint

LAYER = "model.language_model.layers.1"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(kind, quantization) -> a checkpoint, and the one that it stands for."""
    root, known = tmp_path_factory.mktemp("float8"), {}

    def make(kind="qwen3_vl", quantization="fp8"):
        key = f"{kind}-{quantization}"
        if key not in known:
            dtype = "bfloat16" if quantization == "fp8" else "float32"
            source = float8.make(root / key, kind, quantization, dtype=dtype)
            known[key] = source, float8.twin(source, root / f"{key}-twin")
        return known[key]

    return make


@pytest.fixture
def spoiled(made, tmp_path):
    """(change of the tensors, kind, quantization) -> a copy of a checkpoint."""

    def spoil(change, kind="qwen3_vl", quantization="fp8"):
        source, _ = made(kind, quantization)
        for path in source.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        tensors = {name: tensor.copy() for name, tensor in float8.read(source / "model.safetensors").items()}
        change(tensors)
        float8.write(tmp_path / "model.safetensors", tensors)
        return tmp_path

    return spoil


def plan_of(directory):
    return make_plan(directory, load_config(directory))


def dequantized(tree, path):
    """What a parameter in 8 bits stands for, as the model without 8 bits has it."""
    *folders, leaf = path
    for key in folders:
        tree = tree[key]
    name = "weight" if leaf == "kernel" else leaf
    matrix, factors = (np.asarray(tree[own]).astype(np.float64) for own in (name, f"{name}_scale"))
    whole = matrix * np.repeat(factors, matrix.shape[-1] // factors.shape[-1], axis=-1)
    return np.moveaxis(whole, -1, 0) if leaf == "kernel" else whole.swapaxes(1, 2)


@pytest.mark.slow_for("qwen3_vl_moe")
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("quantization", ["fp8", "block", "channel"])
def test_weights_stay_in_8_bits_and_stand_for_what_is_published(made, kind, quantization):
    """Each value as the layout says, though q, k, v are one matrix here, and gate and up, and experts."""
    source, plain = map(open_checkpoint, made(kind, quantization))
    assert source.dtype == ("bfloat16" if quantization == "fp8" else "float32")
    tree, expected = source.load(), plain.load()
    in_8_bits = 0
    for parameter in parameters(plain.config):
        wanted = expected
        for key in parameter.path:
            wanted = wanted[key]
        is_matrix = parameter.path[-1] in ("kernel", "gate_up_proj", "down_proj")
        if parameter.path[0] != "language_model" or not is_matrix or parameter.path[-2] == "gate":
            found = tree
            for key in parameter.path:
                found = found[key]
            np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)
            continue
        np.testing.assert_array_equal(dequantized(tree, parameter.path), np.asarray(wanted, np.float64))
        in_8_bits += 1
    assert in_8_bits == 4 * source.config.text.num_layers
    leaves = [x for x in jax.tree.leaves(tree) if x.dtype == float8.FLOAT8]
    assert len(leaves) == in_8_bits
    assert source.nbytes() == sum(x.nbytes for x in jax.tree.leaves(tree))


def parameter_of(tree, path):
    for key in path:
        tree = tree[key]
    return np.asarray(tree)


@pytest.mark.parametrize(
    ("kind", "quantization", "modules", "listed", "plain"),
    [
        pytest.param("qwen3_vl", "fp8", ["mlp.down_proj"], None, {"down_proj"}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_vl", "block", ["self_attn.o_proj"], [r"re:.*layers\.1\.self_attn\.o_"], {"o_proj"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3_vl", "fp8", ["mlp.gate_proj", "mlp.up_proj"], None, {"gate_up_proj"}, marks=pytest.mark.slow
        ),
        # A part of a product: the others stay in 8 bits.
        ("qwen3_vl", "channel", ["self_attn.k_proj", "mlp.up_proj"], None, {"k_proj", "up_proj"}),
        # Experts stay together: the others are what their 8 bits stand for.
        pytest.param(
            "qwen3_vl_moe", "block", ["mlp.experts.3.up_proj"], None, {"gate_up_proj", "down_proj"},
            marks=pytest.mark.slow,
        ),
        # A matrix may be in 8 bits although it is listed.
        pytest.param(
            "qwen3_vl_moe", "fp8", [], [f"{LAYER}.self_attn"], {"o_proj", "qkv_proj"}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_matrices_that_are_left_out_are_not_in_8_bits(
    made, tmp_path, caplog, kind, quantization, modules, listed, plain
):
    """They are what is stored, bit for bit; all others stay in 8 bits. A conversion has the same weights."""
    is_of_experts = modules == ["mlp.experts.3.up_proj"]
    layer = "model.language_model.layers.0" if is_of_experts else LAYER
    source, _ = made(kind, quantization)
    names = [f"{layer}.{module}" for module in modules]
    directory = float8.left_out(source, tmp_path / "source", names, listed)
    checkpoint, twin = open_checkpoint(directory), open_checkpoint(float8.twin(directory, tmp_path / "twin"))
    lines = [record.getMessage() for record in caplog.records if "are dequantized" in record.getMessage()]
    if is_of_experts:
        assert f"17 FP8 matrices of {directory} are dequantized" in lines[0]
        assert "take 0.1 MB more in bfloat16: model.language_model.layers.0.mlp.experts.0." in lines[0]
    else:
        assert len(lines) == (not modules)
    half, exact, expected = checkpoint.load(), open_checkpoint(directory, dtype="float32").load(), twin.load()
    found = set()
    for parameter in parameters(checkpoint.config):
        *folders, name, leaf = parameter.path
        if folders[:3] != ["language_model", "layers", int(layer[-1])] or name == "gate":
            continue
        if leaf == "kernel" or leaf in ("gate_up_proj", "down_proj"):
            own = parameter_of(exact, parameter.path)
            if is_apart(parameter.path):
                product = parameter_of(expected, [*folders, "kernel"])
                first, last = layers_of(folders[-1], product.shape[-2])[name]
                wanted = product[..., first:last, :]
            else:
                wanted = parameter_of(expected, parameter.path)
            np.testing.assert_array_equal(own, wanted)
            np.testing.assert_array_equal(parameter_of(half, parameter.path), wanted.astype(checkpoint.dtype))
            assert parameter_of(half, parameter.path).dtype == checkpoint.dtype
            found.add(leaf if is_of_experts else name)
    assert found == plain
    for i in range(checkpoint.config.text.num_layers):
        for folder, product in (("self_attn", "qkv_proj"), ("self_attn", "o_proj"), ("mlp", "gate_up_proj")):
            if product in (own := exact["language_model"]["layers"][i][folder]):
                wanted = expected["language_model"]["layers"][i][folder][product]["kernel"]
                np.testing.assert_array_equal(float8.stands_for(own[product], product), np.asarray(wanted, np.float64))

    report = convert(directory, tmp_path / "out", verify=True)
    converted = open_checkpoint(tmp_path / "out", verify_weights=True)
    verify_weights(directory, tmp_path / "out")
    assert report.fingerprint == checkpoint.fingerprint == converted.fingerprint
    assert checkpoint.fingerprint != open_checkpoint(source).fingerprint
    assert report.nbytes == checkpoint.nbytes() == converted.nbytes()
    assert report.nbytes == sum(x.nbytes for x in jax.tree.leaves(converted.load()))


def mixed(tensors, change):
    """One matrix of `LAYER`'s queries, keys and values as it is where it is left out, and a change of another's."""
    name = f"{LAYER}.self_attn.v_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    del tensors[f"{name}_scale_inv"]
    change(tensors, f"{LAYER}.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda tensors, name: tensors.pop(f"{name}_scale_inv"),
            f"missing (1):\n  {LAYER}.self_attn.q_proj.weight_scale_inv [3, 3]",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_scale_inv": np.ones((3, 1), np.float32)}),
            f"wrong shape (1):\n  {LAYER}.self_attn.q_proj.weight_scale_inv must be [3, 3], got [3, 1]",
        ),
        (
            lambda tensors, name: tensors.update({name: tensors[name][:32]}),
            f"wrong shape (1):\n  {LAYER}.self_attn.q_proj.weight must be [96, 80], got [32, 80]",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_scale_inv": np.ones((3, 3), float8.FLOAT8)}),
            f"wrong dtype (1):\n  {LAYER}.self_attn.q_proj.weight_scale_inv must be one of float32, bfloat16, "
            "float16, got float8_e4m3fn",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_scale_inv": np.zeros((3, 3), np.float32)}),
            f"above 0 (1):\n  {LAYER}.self_attn.q_proj.weight_scale_inv: 9 of 9, such as 0",
        ),
    ],
)
def test_what_is_wrong_with_the_others_of_a_product_is_named(spoiled, change, problem):
    directory = spoiled(lambda tensors: mixed(tensors, change))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"].append(f"{LAYER}.self_attn.v_proj")
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError) as error:
        plan_of(directory)
    assert str(error.value).endswith(problem)
    assert "but 1 do not" in str(error.value)


@pytest.mark.slow_for("qwen3_vl_moe")
@pytest.mark.parametrize(("kind", "quantization"), [("qwen3_vl_moe", "fp8"), ("qwen3_vl", "channel")])
def test_a_conversion_keeps_them(made, tmp_path, kind, quantization):
    source, plain = made(kind, quantization)
    report = convert(source, tmp_path / "out", verify=True)
    check_contents(tmp_path / "out")
    verify_weights(source, tmp_path / "out")
    hub, converted = open_checkpoint(source), open_checkpoint(tmp_path / "out", verify_weights=True)
    assert hub.config.text.quantization == converted.config.text.quantization is not None
    assert report.nbytes == hub.nbytes() == converted.nbytes()
    assert report.fingerprint == hub.fingerprint == converted.fingerprint
    assert hub.source_digest == converted.source_digest
    trees = hub.load(), converted.load()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (a, b))), *trees)
    # What they stand for are other weights.
    assert open_checkpoint(plain).fingerprint != hub.fingerprint
    # The others may be cast.
    half = convert(source, tmp_path / "half", dtype="float16")
    cast = open_checkpoint(tmp_path / "half")
    assert (half.dtype, cast.dtype) == ("float16", np.float16)
    assert cast.fingerprint == open_checkpoint(source, dtype="float16").fingerprint != hub.fingerprint
    found = {x.dtype for x in jax.tree.leaves(cast.load())}
    assert found == {np.dtype(np.float16), np.dtype(np.float32), float8.FLOAT8}


def test_experts_narrower_than_a_block_are_converted(tmp_path):
    source = make_checkpoint(tmp_path / "source", "qwen3_vl_moe", quantization="fp8")
    report = convert(source, tmp_path / "out", verify=True)
    assert report.fingerprint == open_checkpoint(source).fingerprint
    verify_weights(source, tmp_path / "out")


def test_factors_of_another_dtype_are_the_same_weights(made, spoiled):
    def widen(tensors):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].astype(np.float32)

    assert open_checkpoint(spoiled(widen)).fingerprint == open_checkpoint(made()[0]).fingerprint

    def change(tensors):
        widen(tensors)
        tensors[f"{LAYER}.mlp.up_proj.weight_scale_inv"][0, 0] *= 2

    assert open_checkpoint(spoiled(change)).fingerprint != open_checkpoint(made()[0]).fingerprint


def renamed(tensors, old, new):
    for name in [name for name in tensors if name.endswith(old)]:
        tensors[name.removesuffix(old) + new] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            lambda tensors: tensors.pop(f"{LAYER}.self_attn.k_proj.weight_scale_inv"),
            ["missing (1):", f"  {LAYER}.self_attn.k_proj.weight_scale_inv [2, 3]"],
        ),
        (
            lambda tensors: renamed(
                tensors, f"{LAYER}.mlp.down_proj.weight_scale_inv", f"{LAYER}.mlp.down_proj.weight_scale"
            ),
            [
                f"  {LAYER}.mlp.down_proj.weight_scale_inv [3, 4]",
                "unused (1):",
                f"  {LAYER}.mlp.down_proj.weight_scale [3, 4]",
            ],
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.mlp.down_proj.weight_scale_inv": np.ones((4, 3), np.float32)}),
            ["wrong shape (1):", f"  {LAYER}.mlp.down_proj.weight_scale_inv must be [3, 4], got [4, 3]"],
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.self_attn.o_proj.weight": np.ones((80, 96), ml_dtypes.bfloat16)}),
            ["wrong dtype (1):", f"  {LAYER}.self_attn.o_proj.weight must be float8_e4m3fn, got bfloat16"],
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": np.ones((272, 80), float8.FLOAT8)}),
            ["  lm_head.weight must be one of float32, bfloat16, float16, got float8_e4m3fn"],
        ),
        (
            lambda tensors: tensors.update(
                {f"{LAYER}.self_attn.q_proj.weight_scale_inv": np.ones((3, 3), float8.FLOAT8)}
            ),
            [
                f"  {LAYER}.self_attn.q_proj.weight_scale_inv must be one of float32, bfloat16, float16, "
                "got float8_e4m3fn"
            ],
        ),
    ],
)
def test_what_is_missing_or_mislabelled_is_named(spoiled, change, lines):
    with pytest.raises(PlanError) as error:
        plan_of(spoiled(change))
    told = str(error.value).splitlines()
    assert [line for line in lines if line not in told] == []


@pytest.mark.parametrize("value", [np.nan, np.inf, 0, -1])
def test_factors_that_are_not_finite_and_above_0_are_an_error(spoiled, value):
    name = f"{LAYER}.self_attn.v_proj.weight_scale_inv"

    def change(tensors):
        tensors[name] = tensors[name].astype(np.float32)
        tensors[name][1, 2] = value

    directory = spoiled(change)
    message = rf"scales that are not finite and above 0 \(1\):\n  {re.escape(name)}: 1 of 6, such as {value:g}$"
    for open_ in (plan_of, open_checkpoint):
        with pytest.raises(PlanError, match=message):
            open_(directory)


def test_factors_of_single_experts_are_looked_at(spoiled):
    name = "model.language_model.layers.2.mlp.experts.4.up_proj"

    def change(tensors):
        tensors[f"{name}.weight_scale"][3] = np.inf

    with pytest.raises(PlanError, match=rf"{re.escape(name)}.weight_scale: 1 of 48, such as inf"):
        plan_of(spoiled(change, "qwen3_vl_moe", "channel"))


def test_experts_that_lack_something_are_named(spoiled):
    folder = "model.language_model.layers.0.mlp.experts"

    def change(tensors):
        del tensors[f"{folder}.3.gate_proj.weight_scale_inv"]
        tensors[f"{folder}.2.down_proj.weight"] = np.ones((80, 48), np.float32)

    with pytest.raises(PlanError) as error:
        plan_of(spoiled(change, "qwen3_vl_moe"))
    assert f"missing (1):\n  {folder}.3.gate_proj.weight_scale_inv [2, 3]" in str(error.value)
    assert f"{folder}.2.down_proj.weight must be float8_e4m3fn, got float32" in str(error.value)


@pytest.mark.parametrize("what", ["weight", "scale"])
def test_a_tower_in_8_bits_is_refused_whatever_the_config_says(spoiled, what):
    name = "model.visual.blocks.0.attn.qkv.weight"

    def change(tensors):
        if what == "weight":
            tensors[name] = tensors[name].astype(float8.FLOAT8)
        else:
            tensors[f"{name}_scale_inv"] = np.ones((3, 1), np.float32)

    message = rf"the vision tower of .* must not be quantized, but 1 of its tensors are, such as {re.escape(name)}"
    with pytest.raises(PlanError, match=message):
        plan_of(spoiled(change))


def test_weights_in_8_bits_need_a_config_that_says_how(made, spoiled):
    directory = spoiled(lambda tensors: None)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        PlanError, match=r"must have a quantization_config .*, got none and \d+ tensors of float8_e4m3fn"
    ):
        open_checkpoint(directory)


def test_a_config_alone_makes_no_8_bits(tmp_path):
    directory = make_checkpoint(tmp_path / "plain")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        PlanError, match=r"missing \(28\):\n  model.language_model.layers.0.mlp.down_proj.weight_scale_inv"
    ):
        open_checkpoint(directory)


def test_a_conversion_tells_weights_that_are_not_finite(spoiled, tmp_path):
    name = f"{LAYER}.mlp.gate_proj.weight"

    def change(tensors):
        tensors[name][3, 4] = np.nan

    with pytest.raises(ValueError, match=rf"weights must be finite, but 1 tensors are not:\n  {re.escape(name)}"):
        convert(spoiled(change), tmp_path / "out")
