"""Plans from safetensors headers: both layouts of names, and everything that can be wrong with a checkpoint."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.helper import divide, from_tensors
from vlcache_jax.convert import convert
from vlcache_jax.convert.plan import (
    PlanError,
    as_dtype,
    make_plan,
    sha256,
    source_digest,
    stored_dtype,
    tensor_digests,
)
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.models.params import library_name, parameters
from vlcache_jax.models.registry import load_config
from vlcache_jax.testing import make_checkpoint

SMAPS = pathlib.Path("/proc/self/smaps")


def plan_of(directory):
    return make_plan(directory, load_config(directory))


def tensors_of(directory):
    """Library name -> tensor, as safetensors reads them."""
    files = directory.glob("*.safetensors")
    tensors = {library_name(name): tensor for file in files for name, tensor in load_file(file).items()}
    divide(load_config(directory), tensors)
    return tensors


@pytest.fixture
def copy(checkpoints, tmp_path):
    """Copies a configuration's directory, to be spoiled."""
    return lambda name: shutil.copytree(checkpoints(name), tmp_path / "copy")


def edit_header(path, change):
    """Rewrites a file's header and leaves its data alone."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_every_parameter_is_planned_and_read_as_stored(checkpoint):
    config, stored = load_config(checkpoint), tensors_of(checkpoint)
    plan = make_plan(checkpoint, config)
    assert [source.parameter.path for source in plan] == [parameter.path for parameter in parameters(config)]
    assert {part.tensor for source in plan for part in source.parameter.parts} == set(stored)
    for source in plan:
        parameter = source.read(np.dtype(np.float32))
        assert parameter.shape == source.parameter.shape
        assert parameter.flags.c_contiguous
        assert parameter.flags.writeable
        expected = from_tensors(source.parameter, *(stored[part.tensor] for part in source.parameter.parts))
        np.testing.assert_array_equal(parameter, expected)


@pytest.mark.skipif(not SMAPS.exists(), reason="this system does not tell which pages of a file are mapped")
@pytest.mark.parametrize("name", ["qwen3_vl-tied", "qwen3_vl_moe-sharded"])
def test_files_that_were_read_take_no_memory(copy, name):
    directory = copy(name)

    def resident() -> int:
        """Of the directory's files, in KB."""
        own = [line for line in SMAPS.read_text().split("\nVmFlags") if str(directory) in line]
        return sum(int(line.split("\nRss:")[1].split()[0]) for line in own)

    checkpoint = open_checkpoint(directory)
    assert resident() > 0  # the headers
    checkpoint.load()
    assert resident() == 0
    assert checkpoint.fingerprint
    assert resident() == 0


def test_casts_round_to_nearest_even(checkpoints):
    for source in plan_of(checkpoints("qwen3_vl-sharded")):
        exact = source.read(np.dtype(np.float32))
        for dtype in (ml_dtypes.bfloat16, np.float16):
            np.testing.assert_array_equal(source.read(np.dtype(dtype)), exact.astype(dtype))
    half = np.uint32(0x8000)  # exactly between two bfloat16 values
    ties = (np.array([0x3F80, 0x3F81], np.uint32) << 16 | half).view(np.float32)
    assert ties.astype(ml_dtypes.bfloat16).view(np.uint16).tolist() == [0x3F80, 0x3F82]


@pytest.mark.parametrize("names", ["published", "library"])
def test_digest_does_not_depend_on_names_and_shards(tmp_path, names):
    digests = []
    for shards in (1, 3):
        directory = make_checkpoint(tmp_path / f"{names}{shards}", "qwen2_5_vl", names=names, shards=shards)
        plan = plan_of(directory)
        digests.append(source_digest(plan, tensor_digests(plan)))
    reference = plan_of(make_checkpoint(tmp_path / "reference", "qwen2_5_vl"))
    assert set(digests) == {source_digest(reference, tensor_digests(reference))}


SAVED_AS = [  # beginnings of the tower, the decoder and the head
    ("visual.", "model.", "lm_head."),
    ("visual.", "language_model.", "lm_head."),
    ("visual.", "language_model.model.", "language_model.lm_head."),
    ("model.visual.", "model.language_model.", "lm_head."),
]


def rename(directory, tower, decoder, head, *, singles=False):
    """Saves a checkpoint's tensors under names that begin so, and its experts one by one."""
    tensors = tensors_of(directory)
    parts = [part for parameter in parameters(load_config(directory)) for part in parameter.parts]
    for part in parts if singles else []:
        if part.is_stack:
            stack = tensors.pop(part.tensor)  # [E, in, out]
            if stack.shape != part.shape:
                stack = stack.swapaxes(1, 2)
            for expert, names in zip(stack, part.singles, strict=True):
                halves = np.split(expert.T, len(names))
                tensors |= {name: np.ascontiguousarray(half) for name, half in zip(names, halves, strict=True)}
    beginnings = {"model.visual.": tower, "model.language_model.": decoder, "lm_head.": head}
    for path in directory.glob("model*.safetensors*"):
        path.unlink()
    new = {to + name.removeprefix(own): tensor for name, tensor in tensors.items() for own, to in beginnings.items()
           if name.startswith(own)}  # fmt: skip
    assert len(new) == len(tensors)
    save_file(new, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("beginnings", SAVED_AS)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe-sharded"])
def test_names_of_every_release_are_read(checkpoints, copy, name, beginnings):
    reference, found = plan_of(checkpoints(name)), plan_of(rename(copy(name), *beginnings))
    assert source_digest(found, tensor_digests(found)) == source_digest(reference, tensor_digests(reference))


@pytest.mark.parametrize("name", ["qwen3_vl_moe-tied", "qwen3_vl_moe-sharded"])
@pytest.mark.parametrize("beginnings", SAVED_AS[2:])
def test_experts_that_are_stored_one_by_one(checkpoints, copy, tmp_path, name, beginnings):
    """As FP8 files have them: the same parameters, bit for bit, one expert at a time."""
    directory = rename(copy(name), *beginnings, singles=True)
    plan = plan_of(directory)
    stacks = 0
    for source, same in zip(plan, plan_of(checkpoints(name)), strict=True):
        assert source.parameter.path == same.parameter.path
        for dtype in map(np.dtype, (np.float32, ml_dtypes.bfloat16)):
            np.testing.assert_array_equal(source.read(dtype), same.read(dtype))
        if source.parameter.parts[0].is_stack:
            stacks += 1
            [tensor], [other] = source.tensors, same.tensors
            assert tensor.nbytes == other.nbytes
            assert tensor.sha256() == sha256(tensor.view())
            if same.parameter.parts[0].is_transposed:  # the library saves what these are together
                assert tensor.sha256() == other.sha256()
            tracemalloc.start()
            parameter = source.read(np.dtype(np.float32))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < parameter.nbytes + 3 * parameter[0].nbytes + 20_000
    assert stacks == 2 * len(load_config(checkpoints(name)).text.experts.layers)
    report = convert(directory, tmp_path / "out", verify=True)
    assert report.fingerprint == open_checkpoint(directory).fingerprint


def test_what_is_wrong_with_single_experts_is_said(copy):
    directory = rename(copy("qwen3_vl_moe-tied"), *SAVED_AS[-1], singles=True)
    tensors = load_file(directory / "model.safetensors")
    experts = "model.language_model.layers.0.mlp.experts"
    del tensors[f"{experts}.6.up_proj.weight"]
    tensors[f"{experts}.0.down_proj.weight"] = np.ones((3, 3), np.float32)
    tensors[f"{experts}.1.down_proj.weight"] = tensors[f"{experts}.1.down_proj.weight"].astype(np.float16)
    tensors[f"{experts}.7.up_proj.weight"] = np.ones((24, 56), np.float32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(PlanError, match="4 do not") as caught:
        plan_of(directory)
    for line in (
        f"missing (1):\n  {experts}.6.up_proj.weight [24, 56]",
        f"wrong shape (1):\n  {experts}.0.down_proj.weight must be [56, 24], got [3, 3]",
        f"wrong dtype (1):\n  {experts}.1.down_proj.weight must be float32, got float16",
        f"unused (1):\n  {experts}.7.up_proj.weight [24, 56]",
    ):
        assert line in str(caught.value)


def test_digest_depends_on_every_tensor(checkpoints):
    plan = plan_of(checkpoints("qwen3_vl"))
    digests = tensor_digests(plan)
    found = {source_digest(plan, digests)}
    for tensor in digests:
        found.add(source_digest(plan, digests | {tensor: "0" * 64}))
    assert len(found) == sum(len(source.tensors) for source in plan) + 1


def test_all_problems_are_in_one_error(copy):
    directory = copy("qwen3_vl")
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.visual.pos_embed.weight"]
    tensors["model.language_model.norm.weight"] = np.ones(3, np.float32)
    tensors["model.language_model.layers.9.mlp.up_proj.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(PlanError, match="4 do not") as caught:
        plan_of(directory)
    message = str(caught.value)
    assert "missing (2):\n  lm_head.weight [272, 64]\n  model.visual.pos_embed.weight [64, 32]" in message
    assert "wrong shape (1):\n  model.language_model.norm.weight must be [64], got [3]" in message
    assert "unused (1):\n  model.language_model.layers.9.mlp.up_proj.weight [2, 2]" in message


def test_a_long_list_of_problems_is_cut(copy):
    directory = copy("qwen3_vl")
    save_file({f"tensor{i}": np.ones(1, np.float32) for i in range(50)}, directory / "model.safetensors")
    with pytest.raises(PlanError, match="and 30 more") as caught:
        plan_of(directory)
    assert len(str(caught.value).splitlines()) < 50


def test_a_tensor_under_both_names_is_an_error(copy):
    directory = copy("qwen2_5_vl")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(PlanError, match=r"duplicate \(1\)"):
        plan_of(directory)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(copy):
    directory = copy("qwen3_vl-tied")
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.language_model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.copy()}, directory / "model.safetensors")
    assert "lm_head.weight" not in tensor_digests(plan_of(directory))
    save_file(tensors | {"lm_head.weight": embedding + 1}, directory / "model.safetensors")
    with pytest.raises(PlanError, match="tie_word_embeddings is true, but it differs"):
        plan_of(directory)


@pytest.mark.parametrize("kept", [0, 5, 100, 20_000, -1])
def test_a_cut_off_file_is_an_error(copy, kept):
    directory = copy("qwen3_vl")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(PlanError, match=r"inside the header|damaged or cut off"):
        plan_of(directory)


@pytest.mark.parametrize("header", ["[" * 100_000, '{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}'])
def test_a_hostile_header_is_an_error(copy, header):
    directory = copy("qwen3_vl")
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(PlanError, match=f"{path} must begin with a safetensors header"):
        plan_of(directory)


def test_a_damaged_header_is_an_error(copy):
    directory = copy("qwen3_vl")
    path = directory / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:8] + b"\xff" + good[9:])
    with pytest.raises(PlanError, match="must begin with a safetensors header"):
        plan_of(directory)
    path.write_bytes((1 << 60).to_bytes(8, "little") + good[8:])
    with pytest.raises(PlanError, match="inside the header"):
        plan_of(directory)
    path.write_bytes(good)

    def beyond(header):
        header["lm_head.weight"]["data_offsets"][1] += 1 << 40

    edit_header(path, beyond)
    with pytest.raises(PlanError, match=r"lm_head.weight .* must have \[272, 64\] values"):
        plan_of(directory)
    path.write_bytes(good)

    def overlap(header):
        size = header["lm_head.weight"]["data_offsets"][1] - header["lm_head.weight"]["data_offsets"][0]
        header["lm_head.weight"]["data_offsets"] = [8, 8 + size]

    edit_header(path, overlap)
    with pytest.raises(PlanError, match="must be contiguous"):
        plan_of(directory)


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E8M0", "I64", "U8", "BOOL", "F64"])
def test_other_dtypes_are_an_error(copy, dtype):
    directory = copy("qwen3_vl")
    edit_header(directory / "model.safetensors", lambda header: header["lm_head.weight"].update(dtype=dtype))
    message = (
        f"F32, BF16, F16, F8_E4M3, got {dtype} for lm_head.weight .*: use the published bfloat16 or FP8 checkpoint"
    )
    with pytest.raises(PlanError, match=message):
        plan_of(directory)


def test_missing_files_are_named(copy):
    directory = copy("qwen3_vl-sharded")
    shards = sorted(directory.glob("*.safetensors"))
    shards[1].rename(directory / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"lacks {shards[1].name}"):
        plan_of(directory)
    (directory / "elsewhere").rename(shards[1])
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither.*model-00001-of-00003.safetensors"):
        plan_of(directory)
    for shard in shards:
        shard.unlink()
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="only safetensors is supported"):
        plan_of(directory)


def test_the_index_must_be_right(copy):
    directory = copy("qwen3_vl-sharded")
    index = directory / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    names = sorted(set(good["weight_map"].values()))
    for bad in ("", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": ' + "[" * 100_000):
        index.write_text(bad)
        with pytest.raises(PlanError, match="weight_map"):
            plan_of(directory)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}}))
    with pytest.raises(PlanError, match="must name files in the same folder"):
        plan_of(directory)
    moved = next(name for name, file in good["weight_map"].items() if file == names[0])
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], moved: names[1]}}))
    with pytest.raises(PlanError, match=f"{moved}: not in {names[1]}"):
        plan_of(directory)


def test_dtype_of_a_checkpoint(copy):
    directory = copy("qwen3_vl")
    assert stored_dtype(plan_of(directory), load_config(directory)) == np.float32
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    assert stored_dtype(plan_of(directory), load_config(directory)) == np.float32  # as config.json says
    config = json.loads((directory / "config.json").read_text())
    del config["dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"dtype must be set .* bfloat16, float32"):
        stored_dtype(plan_of(directory), load_config(directory))


@pytest.mark.parametrize("dtype", ["int8", "float64", "fp8", np.int32, 3])
def test_unknown_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        as_dtype(dtype)


@pytest.mark.parametrize("names", ["published", "library"])
@pytest.mark.parametrize("width", [64, 32])  # of experts: gate and up, or down, are square
def test_square_experts_have_the_layout_of_the_others(tmp_path, names, width):
    """A square matrix does not show how it lies; the other one of its layer is not square."""
    text = {"moe_intermediate_size": width, "num_hidden_layers": 2}
    vision = {"depth": 1, "deepstack_visual_indexes": [0]}
    make = functools.partial(make_checkpoint, model_type="qwen3_vl_moe", text=text, vision=vision)
    found = {source.parameter.path: source for source in plan_of(make(tmp_path / "found", names=names))}
    for source in plan_of(make(tmp_path / "published")):
        same = found[source.parameter.path].read(np.dtype(np.float32))
        np.testing.assert_array_equal(same, source.read(np.dtype(np.float32)))
