"""Opening and loading converted checkpoints and Hugging Face directories."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.numpy import load_file, save_file

from tests.models.helper import from_tensor
from vlcache_jax import LLM
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.convert import check_contents, convert, verify_weights
from vlcache_jax.convert.manifest import expected, parameter_name, read_manifest, weight_files
from vlcache_jax.convert.plan import make_plan, sha256, tensor_digests
from vlcache_jax.convert.restore import StoredWeights
from vlcache_jax.convert.source import locate
from vlcache_jax.convert.store import save_weights
from vlcache_jax.device import checkpoint as checkpoint_module
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.models.params import abstract_params
from vlcache_jax.models.registry import load_config
from vlcache_jax.testing import make_checkpoint


@pytest.fixture(scope="module")
def converted(checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("converted") / "out"
    convert(checkpoints("qwen3_vl"), directory)
    return directory


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


@pytest.mark.slow_for("bfloat16", "float16", "qwen2_5_vl-library-names", "qwen3_vl-sharded", "qwen2_vl", "qwen3_5_moe")
@pytest.mark.parametrize("dtype", [None, "bfloat16", jnp.float16])
def test_both_kinds_load_the_same(checkpoint, tmp_path, dtype):
    convert(checkpoint, tmp_path / "out")
    hub, converted = open_checkpoint(checkpoint, dtype=dtype), open_checkpoint(tmp_path / "out", dtype=dtype)
    assert hub.config == converted.config == load_config(checkpoint)
    assert hub.dtype == converted.dtype == np.dtype(dtype or np.float32)
    assert hub.directory == checkpoint
    assert converted.directory == tmp_path / "out"
    assert hub.fingerprint == converted.fingerprint
    loaded = []
    trees = hub.load(loaded=lambda: loaded.append(1)), converted.load(loaded=lambda: loaded.append(1))
    assert len(loaded) == hub.num_parameters + converted.num_parameters
    abstract = abstract_params(hub.config, hub.dtype)
    for tree in trees:
        assert jax.tree.structure(tree) == jax.tree.structure(abstract)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))
    jax.tree.map(np.testing.assert_array_equal, *trees)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array to be written."""

    path: tuple[str | int, ...]
    array: np.ndarray

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def read(self):
        return self.array


def convert_apart(source, directory):
    """As conversions were before queries, keys and values were one product, and gate and up another."""
    convert(source, directory)
    config, manifest = load_config(source), read_manifest(directory)
    leaves, entries = [], {}
    for item in make_plan(source, config):
        for part, tensor in item.parts:
            leaves.append(Leaf(part.path, np.ascontiguousarray(from_tensor(part, tensor.view()))))
            digests = {"source_sha256": tensor.sha256(), "sha256": sha256(leaves[-1].array)}
            entries[parameter_name(part.path)] = expected(part.shape, leaves[-1].dtype) | digests
    shutil.rmtree(directory / "weights")
    save_weights(directory / "weights", leaves, lambda leaf: None)
    old = {"format": "vlcache-checkpoint/1", "parameters": entries, "files": weight_files(directory)}
    dataclasses.replace(manifest, **old).write(directory)
    return manifest


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl_moe-sharded"])
def test_what_was_converted_before_layers_were_joined_is_read(checkpoints, tmp_path, name):
    source, old = checkpoints(name), tmp_path / "old"
    manifest = convert_apart(source, old)
    assert len(read_manifest(old).parameters) > len(manifest.parameters)
    assert check_contents(old).format == "vlcache-checkpoint/1"
    verify_weights(source, old)
    for dtype in (None, "bfloat16"):
        hub, converted = open_checkpoint(source, dtype=dtype), open_checkpoint(old, dtype=dtype)
        assert converted.fingerprint == hub.fingerprint
        jax.tree.map(np.testing.assert_array_equal, converted.load(), hub.load())
    flip(old, "language_model", "layers", 1, "self_attn", "k_proj", "kernel")
    with pytest.raises(ValueError, match=r"damaged:\n  language_model/layers/1/self_attn/k_proj/kernel differs$"):
        open_checkpoint(old, verify_weights=True)
    with pytest.raises(ValueError, match=r"but 1 differ: language_model/layers/1/self_attn/k_proj/kernel$"):
        verify_weights(source, old)


def test_loaded_arrays_are_the_stored_tensors(checkpoints):
    directory = checkpoints("qwen2_5_vl")
    stored = load_file(directory / "model.safetensors")
    tree = open_checkpoint(directory).load()
    layer = tree["language_model"]["layers"][3]
    of_layer = {name.removeprefix("model.layers.3."): tensor for name, tensor in stored.items()}
    np.testing.assert_array_equal(layer["mlp"]["down_proj"]["kernel"], of_layer["mlp.down_proj.weight"].T)
    gate, up = layer["mlp"]["gate_up_proj"]["kernel"].swapaxes(0, 1)
    np.testing.assert_array_equal(gate, of_layer["mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(up, of_layer["mlp.up_proj.weight"].T)
    kernel, bias = (layer["self_attn"]["qkv_proj"][leaf] for leaf in ("kernel", "bias"))
    for name, place in (("q", slice(-2)), ("k", -2), ("v", -1)):  # of each KV head
        projection = f"self_attn.{name}_proj"
        np.testing.assert_array_equal(kernel[:, :, place].reshape(64, -1), of_layer[f"{projection}.weight"].T)
        np.testing.assert_array_equal(bias[:, place].reshape(-1), of_layer[f"{projection}.bias"])
    np.testing.assert_array_equal(tree["lm_head"]["embedding"], stored["lm_head.weight"])
    np.testing.assert_array_equal(
        tree["visual"]["patch_embed"]["proj"]["kernel"], stored["visual.patch_embed.proj.weight"].reshape(32, -1).T
    )


def test_loaded_arrays_do_not_live_in_the_file(checkpoints, tmp_path):
    source = shutil.copytree(checkpoints("qwen3_vl"), tmp_path / "source")
    convert(source, tmp_path / "out")
    for directory in (source, tmp_path / "out"):
        tree = open_checkpoint(directory).load()
        before = jax.tree.map(np.array, tree)
        for path in directory.rglob("*"):
            if path.is_file():
                path.write_bytes(bytes(path.stat().st_size))
        jax.tree.map(np.testing.assert_array_equal, tree, before)


def test_bytes_are_known_before_loading(checkpoints, converted):
    for directory in (checkpoints("qwen3_vl"), checkpoints("qwen3_vl-tied"), converted):
        checkpoint = open_checkpoint(directory, dtype="bfloat16")
        nbytes = sum(x.nbytes for x in jax.tree.leaves(checkpoint.load()))
        assert checkpoint.nbytes() == nbytes
        assert checkpoint.nbytes("float32") == 2 * nbytes


def test_load_places_weights_as_it_is_told(converted):
    placed = {}

    def place(parameter, array):
        placed[parameter.path] = jax.device_put(array)
        return placed[parameter.path]

    tree = open_checkpoint(converted).load(place)
    found = {tuple(key.key for key in keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    assert found.keys() == placed.keys()
    assert all(leaf is placed[path] for path, leaf in found.items())


@pytest.mark.parametrize("is_converted", [False, True])
def test_loading_holds_as_many_tensors_as_it_has_threads(checkpoints, converted, monkeypatch, is_converted):
    """However slowly they are placed: the one that is, and those that are read ahead. Placed ones are let go."""
    monkeypatch.setattr(checkpoint_module.os, "cpu_count", lambda: 3)
    load, tensors, placed = checkpoint_module._load, [], []

    def counted(config, read, place, loaded):
        def noted(parameter):
            array = read(parameter)
            tensors.append(weakref.ref(array))
            return array

        return load(config, noted, place, loaded)

    def place(parameter, array):
        if len(placed) < 8:
            time.sleep(0.05)  # others may be read meanwhile
        for _ in range(200):  # a thread may hold for a moment longer what it has read
            if (count := sum(one() is not None for one in tuple(tensors))) <= 3:
                break
            time.sleep(0.01)
        assert 1 <= count <= 3
        placed.append(count)
        return jax.device_put(np.zeros(1, np.float32))

    monkeypatch.setattr(checkpoint_module, "_load", counted)
    opened = open_checkpoint(converted if is_converted else checkpoints("qwen3_vl"))
    opened.load(place)
    assert len(placed) == opened.num_parameters > 20


def test_who_comes_meanwhile_does_not_hash_the_same(checkpoints):
    opened = open_checkpoint(checkpoints("qwen3_vl"))
    hashed = []

    def slow(plan):
        hashed.append(threading.get_ident())
        time.sleep(0.05)
        return tensor_digests(plan)

    with (
        mock.patch.object(checkpoint_module, "tensor_digests", slow),
        ThreadPoolExecutor(4) as threads,
    ):
        found = list(threads.map(lambda _: opened.fingerprint, range(4)))
    assert len(hashed) == len(set(found)) == 1


def test_fingerprints_tell_weights_apart(checkpoints, tmp_path):
    source = checkpoints("qwen3_vl")
    reference = open_checkpoint(source)
    assert open_checkpoint(source, dtype="bfloat16").fingerprint != reference.fingerprint

    convert(source, tmp_path / "bfloat16", dtype="bfloat16")
    rounded = open_checkpoint(tmp_path / "bfloat16")
    assert rounded.fingerprint == open_checkpoint(source, dtype="bfloat16").fingerprint
    # Widened again, these are not the source's weights.
    assert open_checkpoint(tmp_path / "bfloat16", dtype="float32").fingerprint != reference.fingerprint

    other = shutil.copytree(source, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.language_model.norm.weight"][5] = np.nextafter(
        tensors["model.language_model.norm.weight"][5], np.float32(9)
    )
    save_file(tensors, other / "model.safetensors")
    assert open_checkpoint(other).fingerprint != reference.fingerprint


def test_a_cast_that_changes_nothing_is_not_in_the_fingerprint(tmp_path):
    source = make_checkpoint(tmp_path / "source", dtype="bfloat16")
    convert(source, tmp_path / "kept")
    convert(source, tmp_path / "asked", dtype="bfloat16")
    for dtype in ("bfloat16", "float32"):
        opened = [open_checkpoint(tmp_path / name, dtype=dtype) for name in ("source", "kept", "asked")]
        assert len({checkpoint.fingerprint for checkpoint in opened}) == 1


def test_missing_and_foreign_directories(tmp_path, converted):
    with pytest.raises(FileNotFoundError, match=r"directory or a Hub ID, got '.*absent'"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"directory or a Hub ID, got './absent'"):
        open_checkpoint("./absent")
    with pytest.raises(
        FileNotFoundError, match=r"with config.json and safetensors files, but .*config.json does not exist"
    ):
        open_checkpoint(tmp_path)
    with pytest.raises(NotADirectoryError, match="is a file"):
        open_checkpoint(converted / "config.json")
    shutil.copy(converted / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"must contain model.safetensors"):
        open_checkpoint(tmp_path)


def test_a_hub_id_is_fetched(checkpoints, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        assert {"config.json", "tokenizer.json", "*.safetensors"} <= set(allow_patterns)
        return str(checkpoints("qwen3_vl"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/some-model.v2", "main").directory == checkpoints("qwen3_vl")
    assert asked == [("owner/some-model.v2", "main")]


def test_a_hub_that_cannot_be_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match="got 'owner/no-such-model'; there is no such directory, and the download"
    ) as caught:
        open_checkpoint("owner/no-such-model")
    assert str(caught.value).endswith("or try tiny-vqa, which ships with the package")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (RepositoryNotFoundError, "Check its name; if it is private, log in with `hf auth login`"),
        (GatedRepoError, "Request access on the model's page, then log in with `hf auth login`"),
        (RevisionNotFoundError, "Name a branch, tag or commit that the model has"),
    ],
)
def test_what_the_hub_says_comes_with_advice(monkeypatch, error, advice):
    def download(*_, **__):
        raise error("404 Client Error\n\nMore.", response=mock.Mock())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError) as caught:
        open_checkpoint("owner/model")
    assert str(caught.value).endswith(f"(404 Client Error). {advice}")


def test_the_shipped_model_has_a_name(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("tiny-vqa").directory == TINY_VQA
    with pytest.raises(ValueError, match="revision must be None"):
        locate("tiny-vqa", "main")
    (tmp_path / "tiny-vqa").symlink_to(checkpoints("qwen3_vl"))
    assert open_checkpoint("tiny-vqa").directory.resolve() == checkpoints("qwen3_vl").resolve()  # one's own comes first


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "got ''$"),
        ("tiny_vqa", "got 'tiny_vqa'; did you mean 'tiny-vqa'[?]$"),
        ("Tiny-VQA", "did you mean 'tiny-vqa'[?]$"),
        ("qwen3-vl-8b", "got 'qwen3-vl-8b'; did you mean 'Qwen/Qwen3-VL-8B-Instruct'[?]$"),
        ("Qwen2.5-VL-7B-Instruct", "did you mean 'Qwen/Qwen2.5-VL-7B-Instruct'[?]$"),
        ("qwen3_vl_30b_a3b", "did you mean 'Qwen/Qwen3-VL-30B-A3B-Instruct'[?]$"),
        ("someone/Qwen3-VL-8B-Instruct-GGUF", "GGUF': GGUF files are not supported, use the published checkpoint"),
        ("/nope", "got '/nope', and there is no such directory$"),
        ("~/nope", "got '~/nope', and there is no such directory$"),
        ("models/q4.gguf", "q4.gguf': GGUF files are not supported"),
    ],
)
def test_a_name_that_is_nearly_right_is_told_at_once(monkeypatch, name, message):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("the device was taken"))
    for ask in (open_checkpoint, LLM):
        with pytest.raises(FileNotFoundError, match=f"model must be a checkpoint directory or a Hub ID, .*{message}"):
            ask(name)


def test_files_that_a_download_has_left_undone(checkpoints, tmp_path, monkeypatch):
    """Said by opening before anything is read or taken, a checkpoint's small files included."""
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("the device was taken"))
    directory = shutil.copytree(checkpoints("qwen3_vl-sharded"), tmp_path / "copy")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 4976698672\n"
    shard = sorted(directory.glob("*.safetensors"))[1]
    for path in (shard, directory / "tokenizer.json"):
        whole = path.read_bytes()
        path.write_text(pointer)
        with pytest.raises(
            ValueError, match=f"{path} must be the full file, got a Git LFS pointer: run `git lfs pull` in its"
        ):
            LLM(directory)
        path.write_bytes(whole)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"{directory} has no tokenizer: copy tokenizer.json"):
        LLM(directory)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"has no config.json: GGUF files are not supported, use the published"):
        LLM(tmp_path / "gguf")
    with pytest.raises(NotADirectoryError, match=r"model.gguf is a file: GGUF files are not supported"):
        LLM(tmp_path / "gguf" / "model.gguf")
    with pytest.raises(NotADirectoryError, match=f"is a file: give its folder, {directory}$"):
        LLM(shard)
    shutil.copy(directory / "config.json", tmp_path / "gguf")
    with pytest.raises(FileNotFoundError, match=r"found .gguf files, but only safetensors is supported"):
        open_checkpoint(tmp_path / "gguf")


def test_damaged_converted_checkpoints(copy):
    files = sorted((path for path in (copy / "weights").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    content = files[-1].read_bytes()
    files[-1].write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"has another size of weights/.*\(1 of \d+ files are wrong\)"):
        open_checkpoint(copy)
    files[-1].unlink()
    with pytest.raises(ValueError, match="misses weights/"):
        open_checkpoint(copy)
    files[-1].write_bytes(content)
    index = copy / "weights" / "manifest.ocdbt"
    index.write_bytes(bytes(index.stat().st_size))  # the right size, no sense
    with pytest.raises(ValueError, match=r"weights of .* cannot be read"):
        open_checkpoint(copy).load()
    shutil.rmtree(copy / "weights")
    with pytest.raises(ValueError, match="misses weights/"):
        open_checkpoint(copy)


def test_damaged_manifests(copy):
    manifest = copy / "vlcache.json"
    good = json.loads(manifest.read_text())
    for bad in ("", "[]", "{}", '{"format": "vlcache-checkpoint/9"}', '{"format": "vlcache-checkpoint/1"}'):
        manifest.write_text(bad)
        with pytest.raises(ValueError, match=r"vlcache.json must be"):
            open_checkpoint(copy)
    del good["parameters"]["language_model/norm/scale"]
    manifest.write_text(json.dumps(good))
    with pytest.raises(ValueError, match=r"but 1 do not; language_model/norm/scale must be .* got None"):
        open_checkpoint(copy)


HASH = "0" * 64
HOSTILE_MANIFESTS = {
    "source": (None, 5, []),
    "revision": (5, []),
    "dtype": (None, 5, ["float32"], "int8", {}),
    "source_digest": (None, 5, "", HASH[1:], "x" * 64),
    "casts": (None, "float16", ["int8"], [5], {}, ["float16"] * 100),
    "parameters": (None, [], "x", 5),
    "files": (None, [], "x", 5),
    "versions": (None, []),
    "fingerprint": (None, 5, "x"),
    "kept": (5, [], "x"),
    "files d": (None, -1, 1.5, True, "7", 10**30, {}),
    "parameters visual/pos_embed/embedding": (None, 5, [], "x"),
    "parameters visual/pos_embed/embedding shape": (None, 64, ["64"], [-1], [0], [1.5], [True], [1] * 100, [10**30]),
    "parameters visual/pos_embed/embedding dtype": (None, 5, [], "int8"),
    "parameters visual/pos_embed/embedding sources": (None, 5, [], "x"),
    "parameters visual/pos_embed/embedding sources model.visual.pos_embed.weight": (None, 5, "x"),
    "parameters visual/pos_embed/embedding sha256": (None, 5, "x", HASH[1:]),
}


def test_manifests_of_wrong_types(copy):
    path = copy / "vlcache.json"
    good = path.read_text()
    for where, values in HOSTILE_MANIFESTS.items():
        for value in values:
            manifest = json.loads(good)
            *sections, last = where.split()
            functools.reduce(lambda node, name: node[name], sections, manifest)[last] = value
            path.write_text(json.dumps(manifest))
            with pytest.raises(ValueError, match=rf"{where} ?of {path} must be .*, got ") as caught:
                raise AssertionError(f"{where} = {value!r} gave {open_checkpoint(copy)}")
            assert caught.value.__cause__ is None
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"{path} must be a JSON file"):
        open_checkpoint(copy)
    path.write_text(json.dumps(json.loads(good) | {"source_digest": HASH}))
    with pytest.raises(ValueError, match=f"fingerprint of {path} must match its source_digest"):
        open_checkpoint(copy)


def flip(directory, *path):
    """A bit in the middle of a stored parameter."""
    stored = StoredWeights(directory / "weights").read(path).tobytes()
    for file in (directory / "weights").rglob("*"):
        content = bytearray(file.read_bytes()) if file.is_file() else b""
        if (at := content.find(stored)) >= 0:
            content[at + len(stored) // 2] ^= 1
            file.write_bytes(content)
            return
    raise AssertionError(f"{path} is nowhere")


def test_a_flipped_bit_is_found_by_who_asks(copy):
    assert open_checkpoint(copy, verify_weights=True).load()
    flip(copy, "language_model", "layers", 2, "mlp", "gate_up_proj", "kernel")
    flip(copy, "visual", "merger", "linear_fc1", "kernel")
    assert open_checkpoint(copy).load()  # sizes tell nothing
    message = (
        "damaged:\n  language_model/layers/2/mlp/gate_up_proj/kernel differs\n"
        "  visual/merger/linear_fc1/kernel differs$"
    )
    with pytest.raises(ValueError, match=message):
        open_checkpoint(copy, verify_weights=True)
    with pytest.raises(ValueError, match=message):
        LLM(copy, verify_weights=True)


def test_everything_damaged_is_named(copy):
    flip(copy, "visual", "merger", "linear_fc2", "kernel")
    largest = max((copy / "weights").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes() + b"x")
    (copy / "weights" / "_METADATA").unlink()
    with pytest.raises(ValueError, match=r"damaged:(?s:.*)linear_fc2/kernel differs") as caught:
        check_contents(copy)
    assert "misses weights/_METADATA" in str(caught.value)
    assert f"has another size of {largest.relative_to(copy)}" in str(caught.value)


def test_an_index_that_makes_no_sense_damages_all(copy):
    index = copy / "weights" / "manifest.ocdbt"
    index.write_bytes(bytes(index.stat().st_size))
    with pytest.raises(ValueError, match="damaged") as caught:
        check_contents(copy)
    assert str(caught.value).count(" differs") == len(json.loads((copy / "vlcache.json").read_text())["parameters"])


def test_what_has_no_hashes_cannot_be_verified(checkpoints, copy):
    with pytest.raises(ValueError, match="a Hugging Face directory has none"):
        open_checkpoint(checkpoints("qwen3_vl"), verify_weights=True)
    manifest = json.loads((copy / "vlcache.json").read_text())
    for entry in manifest["parameters"].values():
        del entry["sha256"]
    (copy / "vlcache.json").write_text(json.dumps(manifest))
    assert open_checkpoint(copy).load()
    with pytest.raises(ValueError, match=r"has no hashes of its weights, .*: convert it again"):
        open_checkpoint(copy, verify_weights=True)
    with pytest.raises(ValueError, match="verify_weights must be a bool, got 'yes'"):
        open_checkpoint(copy, verify_weights="yes")


def test_a_stored_shape_must_be_the_manifests(converted):
    weights, path = StoredWeights(converted / "weights"), ("language_model", "norm", "scale")
    assert len(weights.read(path, entry={"shape": [64], "dtype": "float32"})) == 64
    for entry in ({"shape": [63], "dtype": "float32"}, {"shape": [64], "dtype": "bfloat16"}):
        with pytest.raises(
            ValueError,
            match=r"language_model.norm.scale must have the shape and dtype of the manifest, .* got .*64",
        ):
            weights.read(path, entry=entry)


def test_opening_names_what_killed_conversions_left(copy, caplog):
    left = copy.parent / ".other.converting"
    (left / "weights").mkdir(parents=True)
    (left / "weights" / "data").write_bytes(bytes(2_500_000))
    open_checkpoint(copy)
    [record] = caplog.records
    expected = f"a killed conversion left {left} (2.5 MB): delete it, or convert to {copy.parent}/other again"
    assert record.getMessage() == expected
    with pytest.raises(FileNotFoundError):
        open_checkpoint(copy.parent / "other")
    assert [record.getMessage() for record in caplog.records] == [expected] * 2


def test_a_model_must_be_a_path():
    with pytest.raises(ValueError, match="model must be a checkpoint directory or a Hub ID, got None"):
        open_checkpoint(None)


def test_another_config_does_not_open(copy):
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["intermediate_size"] += 8
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must match its config.json, but 8 do not"):
        open_checkpoint(copy)


def test_dtype_must_be_known(converted):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int4'"):
        open_checkpoint(converted, dtype="int4")


@pytest.mark.slow
def test_opening_imports_neither_orbax_nor_the_hub(checkpoints, converted):
    program = (
        "import sys\n"
        "for name in ('orbax', 'orbax.checkpoint', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from vlcache_jax.device.checkpoint import open_checkpoint\n"
        "for directory in sys.argv[1:]:\n"
        "    open_checkpoint(directory).load()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(checkpoints("qwen3_vl")), str(converted)], check=True)
