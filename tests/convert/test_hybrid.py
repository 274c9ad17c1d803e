"""Checkpoints of hybrids: names, dtypes and layouts as they are published, in bfloat16 and in 8 bits."""

from __future__ import annotations

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors

from tests.convert.test_float8 import dequantized, parameter_of
from tests.models import float8
from tests.models.helper import state_layers
from vlcache_jax.convert import check_contents, convert, verify_weights
from vlcache_jax.convert.plan import PlanError, make_plan
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.models.params import parameters
from vlcache_jax.models.registry import load_config
from vlcache_jax.testing import _rounded, make_checkpoint

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LAYER = "model.language_model.layers.0.linear_attn"
LAYERS = "model.language_model.layers"
KINDS = ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(kind, quantization) -> a checkpoint in bfloat16, or in 8 bits."""
    root, known = tmp_path_factory.mktemp("hybrid"), {}

    def make(kind="qwen3_5", quantization=None):
        key = f"{kind}-{quantization}"
        if key not in known:
            own = {"dtype": "bfloat16"} if quantization in (None, "fp8") else {}
            known[key] = float8.make(root / key, kind, quantization, **own)
        return known[key]

    return make


@pytest.fixture
def changed(made, tmp_path):
    """(change of the tensors, kind, quantization) -> a copy of a checkpoint."""

    def change_copy(change, kind="qwen3_5", quantization=None):
        directory = shutil.copytree(made(kind, quantization), tmp_path / "changed")
        tensors = {name: tensor.copy() for name, tensor in float8.read(directory / "model.safetensors").items()}
        change(tensors)
        float8.write(directory / "model.safetensors", tensors)
        return directory

    return change_copy


def plan_of(directory):
    return make_plan(directory, load_config(directory))


def errors_of(directory):
    with pytest.raises(PlanError) as error:
        plan_of(directory)
    return str(error.value).splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_published_and_library_names_are_the_same_weights(tmp_path, kind):
    """Experts are published as the library saves them, [E, out, in]."""
    both = [make_checkpoint(tmp_path / names, kind, names=names, seed=4) for names in ("published", "library")]
    first, second = (float8.read(one / "model.safetensors") for one in both)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])
    config = load_config(both[0]).text
    assert first[f"{LAYER}.in_proj_qkv.weight"].shape == (32 + 32 + 64, config.hidden_size)
    assert first[f"{LAYER}.conv1d.weight"].shape == (32 + 32 + 64, 1, 4)
    if config.experts is not None:
        folder = f"{LAYERS}.0.mlp.experts"
        assert first[f"{folder}.gate_up_proj"].shape == (8, 80, 64)
        assert first[f"{folder}.down_proj"].shape == (8, 64, 40)


def test_norms_are_around_0_and_the_heads_norm_around_1(made):
    for name, tensor in float8.read(made("qwen3_5") / "model.safetensors").items():
        if name.startswith("model.language_model.") and "norm" in name:
            is_plain = name.endswith("linear_attn.norm.weight")
            assert abs(tensor.astype(np.float32).mean() - is_plain) < 0.2, name


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_decays_stay_in_float32(changed, stored):
    """Whatever their file has, and whatever the model is loaded in. The dtype is that of the other weights."""
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(4).astype(stored if stored == "float32" else BFLOAT16)
              for name in (f"{LAYER}.A_log", f"{LAYER}.dt_bias")}  # fmt: skip
    checkpoint = open_checkpoint(changed(lambda tensors: tensors.update(values)))
    assert checkpoint.dtype == BFLOAT16
    own = checkpoint.load()["language_model"]["layers"][0]["linear_attn"]
    for name in ("A_log", "dt_bias"):
        assert own[name].dtype == np.float32
        wanted = values[f"{LAYER}.{name}"].astype(np.float32)
        np.testing.assert_array_equal(np.asarray(own[name]).ravel(), wanted)  # value heads of a key head are together
    assert own["norm"]["scale"].dtype == BFLOAT16


def test_a_norm_in_float32_does_not_choose_the_dtype(changed):
    """Some published files have it so."""
    name = f"{LAYER}.norm.weight"
    directory = changed(lambda tensors: tensors.update({name: tensors[name].astype(np.float32)}))
    assert open_checkpoint(directory).dtype == BFLOAT16


def mtp_tensors(quantization=None):
    """What predicts several tokens: its layer and, in 8 bits, its experts one by one with their scales."""
    rng = np.random.default_rng(5)
    found = {f"mtp.{name}.weight": rng.standard_normal((3, 7)).astype(BFLOAT16)
             for name in ("fc", "norm", "layers.0.mlp.gate")}  # fmt: skip
    if quantization is not None:
        name = "mtp.layers.0.mlp.experts.0.up_proj.weight"
        found[name] = rng.standard_normal((5, 9)).astype(float8.FLOAT8)
        found[f"{name}_scale_inv"] = np.ones((1, 1), BFLOAT16)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_predicts_several_tokens_is_not_loaded(made, changed, kind):
    directory = changed(lambda tensors: tensors.update(mtp_tensors("fp8")), kind)
    assert open_checkpoint(directory).fingerprint == open_checkpoint(made(kind)).fingerprint


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_conversion_keeps_what_predicts_several_tokens(made, changed, tmp_path, quantization):
    """Names, dtypes and values stay, also in a model of another dtype. Opening needs no such file."""
    wanted = mtp_tensors(quantization)
    source = changed(lambda tensors: tensors.update(wanted), quantization=quantization)
    out = tmp_path / "out"
    report = convert(source, out, dtype="float32", verify=True)
    file = out / "mtp.safetensors"
    assert report.kept_nbytes == file.stat().st_size
    assert report.fingerprint == open_checkpoint(made(quantization=quantization), dtype="float32").fingerprint
    kept = float8.read(file)
    assert kept.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert kept[name].dtype == tensor.dtype
        np.testing.assert_array_equal(kept[name].view(np.uint8), tensor.view(np.uint8))
    with safetensors.safe_open(file, "np") as opened:  # its own reader accepts the file
        assert set(opened.keys()) == wanted.keys()
    check_contents(out)
    verify_weights(source, out)

    whole = file.read_bytes()
    for damaged, problem in ((whole[:-1] + b"x", "mtp.safetensors differs"), (whole[:-1], "has another size of mtp.s")):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"but is damaged:\n  {problem}"):
            check_contents(out)
        with pytest.raises(ValueError, match=f"must equal the tensors of its source, but {problem}"):
            verify_weights(source, out)
    file.unlink()
    with pytest.raises(ValueError, match=r"but is damaged:\n  misses mtp.safetensors"):
        check_contents(out)
    assert open_checkpoint(out).fingerprint == report.fingerprint
    with pytest.raises(ValueError, match=f"source must be a Hugging Face checkpoint, but {out} is converted"):
        convert(out, tmp_path / "again")


def test_a_conversion_of_an_older_version_has_no_such_file(changed, tmp_path):
    """It is complete without it, and only a new conversion adds it."""
    source, out = changed(lambda tensors: tensors.update(mtp_tensors())), tmp_path / "out"
    convert(source, out)
    (out / "mtp.safetensors").unlink()
    manifest = json.loads((out / "vlcache.json").read_text())
    del manifest["kept"]
    (out / "vlcache.json").write_text(json.dumps(manifest))
    check_contents(out)
    verify_weights(source, out)
    assert open_checkpoint(out, verify_weights=True).fingerprint == open_checkpoint(source).fingerprint


def test_a_conversion_without_such_tensors_writes_no_such_file(made, tmp_path):
    assert convert(made(), tmp_path / "out").kept_nbytes == 0
    assert not (tmp_path / "out" / "mtp.safetensors").exists()


def test_two_tensors_of_one_name_are_refused_though_they_are_not_loaded(made, tmp_path):
    source = shutil.copytree(made(), tmp_path / "source")
    for name in ("a", "b"):
        float8.write(source / f"{name}.safetensors", mtp_tensors())
    weights = float8.read(source / "model.safetensors")
    index = {"mtp.fc.weight": "a.safetensors", "mtp.norm.weight": "b.safetensors"}
    text = json.dumps({"weight_map": index | dict.fromkeys(weights, "model.safetensors")})
    (source / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PlanError, match=r"duplicate \(3\):\n  mtp.fc.weight in b.safetensors"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda tensors: tensors.update({f"{LAYER}.in_proj_qkv.weight": np.ones((127, 80), BFLOAT16)}),
            f"  {LAYER}.in_proj_qkv.weight must have 128 rows, got [127, 80]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.in_proj_qkv.weight": np.ones((128, 81), BFLOAT16)}),
            f"  {LAYER}.in_proj_qkv.weight, rows of in_proj_q must be [32, 80], got [32, 81]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.conv1d.weight": np.ones((96, 1, 4), BFLOAT16)}),
            f"  {LAYER}.conv1d.weight must have 128 rows, got [96, 1, 4]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.conv1d.weight": np.ones((128, 4), BFLOAT16)}),
            f"  {LAYER}.conv1d.weight, rows of conv1d_q must be [32, 1, 4], got [32, 4]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.conv1d.weight": np.ones((), BFLOAT16)}),
            f"  {LAYER}.conv1d.weight must have 128 rows, got []",
        ),
        (lambda tensors: tensors.pop(f"{LAYER}.A_log"), f"  {LAYER}.A_log [4]"),
        (
            lambda tensors: tensors.update({f"{LAYER}.dt_bias": np.ones((3,), BFLOAT16)}),
            f"  {LAYER}.dt_bias must be [4], got [3]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.conv1d.bias": np.ones((128,), BFLOAT16)}),
            f"  {LAYER}.conv1d.bias [128]",
        ),
        (
            lambda tensors: tensors.pop(f"{LAYER}.in_proj_qkv.weight"),
            f"  {LAYER}.in_proj_qkv.weight, rows of in_proj_v [64, 80]",
        ),
        (
            lambda tensors: tensors.pop(f"{LAYER}.conv1d.weight"),
            f"  {LAYER}.conv1d.weight, rows of conv1d_k [32, 1, 4]",
        ),
    ],
)
def test_what_does_not_fit_is_named(changed, change, line):
    found = errors_of(changed(change))
    assert line in found
    assert "linear_attn.in_proj_q." not in "\n".join(found)  # no file has tensors of such names


@pytest.mark.parametrize("wanted", ["stack", "singles", "transposed"])
def test_layouts_of_experts(made, changed, wanted):
    """As they are published, one by one, and in the layout of other families."""

    def change(tensors):
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            if wanted == "transposed":
                tensors[name] = tensors[name].swapaxes(1, 2)
            elif wanted == "singles":
                folder, _, kind = name.rpartition(".")
                kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
                for i, matrix in enumerate(tensors.pop(name)):
                    for own, part in zip(kinds, np.split(matrix, len(kinds)), strict=True):
                        tensors[f"{folder}.{i}.{own}.weight"] = part

    checkpoint = open_checkpoint(changed(change, "qwen3_5_moe"))
    expected = open_checkpoint(made("qwen3_5_moe")).load()
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(), expected)


# In 8 bits.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "quantization", [None, *(pytest.param(one, marks=pytest.mark.slow) for one in ("block", "channel")), "fp8"]
)
def test_a_conversion_has_the_same_weights(made, tmp_path, kind, quantization):
    source = made(kind, quantization)
    report = convert(source, tmp_path / "out", verify=True)
    verify_weights(source, tmp_path / "out")
    hub, converted = open_checkpoint(source), open_checkpoint(tmp_path / "out", verify_weights=True)
    assert report.fingerprint == hub.fingerprint == converted.fingerprint
    assert report.nbytes == hub.nbytes() == converted.nbytes()
    trees = hub.load(), converted.load()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (a, b))), *trees)


OUTSIDE = ("gate", "shared_expert_gate", "in_proj_ba")  # never in 8 bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "quantization", ["fp8", *(pytest.param(one, marks=pytest.mark.slow) for one in ("block", "channel"))]
)
def test_weights_stand_for_what_is_published(made, tmp_path, kind, quantization):
    """Queries, keys and values have the scales of their rows of one stored matrix."""
    source = made(kind, quantization)
    stored = float8.read(source / "model.safetensors")
    assert stored[f"{LAYER}.in_proj_qkv.weight"].dtype == float8.FLOAT8
    checkpoint, plain = open_checkpoint(source), open_checkpoint(float8.twin(source, tmp_path / "twin"))
    tree, expected, in_8_bits = checkpoint.load(), plain.load(), 0
    for parameter in parameters(plain.config):
        wanted = parameter_of(expected, parameter.path)
        is_matrix = parameter.path[-1] in ("kernel", "gate_up_proj", "down_proj")
        if parameter.path[0] != "language_model" or not is_matrix or parameter.path[-2] in OUTSIDE:
            found = parameter_of(tree, parameter.path)
            np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)
            continue
        np.testing.assert_array_equal(dequantized(tree, parameter.path), np.asarray(wanted, np.float64))
        in_8_bits += 1
    layers = checkpoint.config.text.num_layers
    linear = len(state_layers(checkpoint.config.text))
    assert in_8_bits == 3 * linear + 2 * (layers - linear) + (4 if kind == "qwen3_5_moe" else 2) * layers


def published_list(layers):
    """As in Qwen3.6: of each layer what stays in bfloat16, and names that no file has."""
    linear = ("A_log", "dt_bias", "conv1d", "norm", "in_proj_a", "in_proj_b", "in_proj_ba")
    mlp = ("mlp.gate", "mlp.shared_expert_gate", "input_layernorm", "post_attention_layernorm")
    return [
        "lm_head", "model.embed_tokens", "model.visual", "model.visual.deepstack_merger_list.0", "mtp.fc",
        "mtp.layers.0.mlp.gate", "visual.blocks.0.attn.qkv_proj",
        *(f"{LAYERS}.{i}.linear_attn.{name}" for i in range(layers) for name in linear),
        *(f"{LAYERS}.{i}.{name}" for i in range(layers) for name in mlp),
        *(f"{LAYERS}.{i}.self_attn.{name}" for i in range(layers) for name in ("q_norm", "k_norm")),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_list_leaves_no_matrix_out(made, tmp_path, kind):
    directory = shutil.copytree(made(kind, "fp8"), tmp_path / "copy")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = published_list(config["text_config"]["num_hidden_layers"])
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(directory)
    assert {product for _, product in checkpoint.config.text.quantization.left_out} == {"in_proj_ba"}
    assert checkpoint.fingerprint == open_checkpoint(made(kind, "fp8")).fingerprint
    factors = [one for name, one in float8.read(directory / "model.safetensors").items() if name.endswith("_scale_inv")]
    assert {one.dtype for one in factors} == {BFLOAT16}


@pytest.mark.parametrize(
    ("quantization", "modules", "listed", "in_8_bits"),
    [
        ("block", ["in_proj_qkv", "in_proj_z", "out_proj"], ["re:.*linear_attn.*"], set()),
        ("fp8", ["in_proj_z"], None, {"in_proj_qk", "in_proj_v", "out_proj"}),
        pytest.param("channel", ["in_proj_qkv"], None, {"in_proj_z", "out_proj"}, marks=pytest.mark.slow),
        pytest.param("fp8", ["out_proj"], None, {"in_proj_qk", "in_proj_vz"}, marks=pytest.mark.slow),
    ],
)
def test_matrices_of_linear_layers_are_left_out(made, tmp_path, quantization, modules, listed, in_8_bits):
    """The others of their products stay in 8 bits, as products of their own."""
    source = made("qwen3_5", quantization)
    linear = state_layers(load_config(source).text)
    names = [f"{LAYERS}.{i}.linear_attn.{module}" for i in linear for module in modules]
    directory = float8.left_out(source, tmp_path / "left-out", names, listed)
    checkpoint = open_checkpoint(directory, dtype="float32")
    tree, expected = checkpoint.load(), open_checkpoint(float8.twin(directory, tmp_path / "twin")).load()
    for i in linear:
        own = tree["language_model"]["layers"][i]["linear_attn"]
        for product in ("in_proj_qk", "in_proj_vz", "out_proj"):
            wanted = expected["language_model"]["layers"][i]["linear_attn"][product]["kernel"]
            np.testing.assert_array_equal(float8.stands_for(own[product], product), np.asarray(wanted, np.float64))
        assert set(float8.names_in_8_bits(own)) == in_8_bits
    assert checkpoint.nbytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "quantization", ["fp8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("block", "channel"))]
)
def test_small_matrices_in_8_bits_are_dequantized(made, tmp_path, quantization):
    """Decays and rates, which published files have in bfloat16. The model is that of what the 8 bits stand for."""
    source = shutil.copytree(made("qwen3_5", quantization), tmp_path / "source")
    config = load_config(source)
    tensors = float8.read(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("in_proj_a.weight", "in_proj_b.weight"))]:
        tensors |= _rounded(name, tensors[name].astype(np.float32), config)
    float8.write(source / "model.safetensors", tensors)
    listed = open_checkpoint(source)  # a listed matrix may be in 8 bits all the same, as all others
    raw = json.loads((source / "config.json").read_text())
    key = "modules_to_not_convert" if quantization == "fp8" else "ignore"
    raw["quantization_config"][key] = [one for one in raw["quantization_config"][key] if "in_proj" not in one]
    (source / "config.json").write_text(json.dumps(raw))
    checkpoint = open_checkpoint(source)
    assert checkpoint.fingerprint == listed.fingerprint != open_checkpoint(made("qwen3_5", quantization)).fingerprint
    tree = open_checkpoint(source, dtype="float32").load()
    expected = open_checkpoint(float8.twin(source, tmp_path / "twin")).load()
    for i in state_layers(config.text):
        path = ("language_model", "layers", i, "linear_attn", "in_proj_ba", "kernel")
        np.testing.assert_array_equal(parameter_of(tree, path), parameter_of(expected, path))
    convert(source, tmp_path / "out", verify=True)
    assert open_checkpoint(tmp_path / "out").fingerprint == checkpoint.fingerprint


@pytest.mark.parametrize("names", [["in_proj_a"], ["in_proj_a", "in_proj_b"], ["in_proj_ba"], []])
def test_small_matrices_that_are_not_in_8_bits_are_listed(made, tmp_path, names):
    """By their own names, or by the one of both, as for all other matrices."""
    directory = shutil.copytree(made("qwen3_5", "fp8"), tmp_path / "copy")
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = [f"{LAYER}.{name}" for name in names] + [
        f"{LAYERS}.{i}.linear_attn" for i in (1, 2)
    ]
    (directory / "config.json").write_text(json.dumps(raw))
    missing = {"in_proj_a", "in_proj_b"} - set(names) if names != ["in_proj_ba"] else set()
    wrong = {f"  {LAYER}.{name}.weight must be float8_e4m3fn, got bfloat16" for name in missing}
    if wrong:
        assert set(errors_of(directory)[2:]) == wrong
    else:
        plan_of(directory)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda tensors: tensors.pop(f"{LAYER}.in_proj_qkv.weight_scale_inv"),
            f"  {LAYER}.in_proj_qkv.weight_scale_inv, rows of in_proj_v [2, 3]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.in_proj_qkv.weight_scale_inv": np.ones((3, 3), BFLOAT16)}),
            f"  {LAYER}.in_proj_qkv.weight_scale_inv must have 4 rows, got [3, 3]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.in_proj_a.weight_scale_inv": np.ones((1, 3), BFLOAT16)}),
            f"  {LAYER}.in_proj_a.weight_scale_inv [1, 3]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.in_proj_a.weight": np.ones((4, 80), float8.FLOAT8)}),
            f"  {LAYER}.in_proj_a.weight_scale_inv [1, 3]",
        ),
        (
            lambda tensors: tensors.update({f"{LAYER}.in_proj_qkv.weight": np.ones((128, 80), BFLOAT16)}),
            f"  {LAYER}.in_proj_qkv.weight, rows of in_proj_q must be float8_e4m3fn, got bfloat16",
        ),
    ],
)
def test_what_is_wrong_in_8_bits_is_named(changed, change, line):
    assert line in errors_of(changed(change, quantization="fp8"))


def test_a_scale_of_an_expert_that_is_left_over_is_refused(changed):
    name = f"{LAYERS}.0.mlp.experts.2.gate_proj.weight_scale_inv"
    other = name.replace("gate_proj", "gate_up_proj")
    found = errors_of(changed(lambda tensors: tensors.update({other: tensors.pop(name)}), "qwen3_5_moe", "fp8"))
    assert {f"  {name} [2, 3]", f"  {other} [2, 3]"} <= set(found)


def test_pieces_that_do_not_end_with_blocks_of_scales_are_refused(tmp_path):
    """Of a width that no published model has."""
    text = {"linear_key_head_dim": 20}
    directory = make_checkpoint(tmp_path, "qwen3_5", text=text, quantization="fp8", block=32)
    lines = [line for line in errors_of(directory) if "in_proj_qkv.weight_scale_inv" in line]
    wanted = "must have a scale for 32 outputs that are all queries, all keys or all values, got [40, 40, 64] outputs"
    assert any(line.startswith(f"  {LAYER}.in_proj_qkv.weight_scale_inv {wanted}: use ") for line in lines)
