"""Opening and loading converted checkpoints and Hugging Face directories."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vlcache_jax.convert import convert
from vlcache_jax.engine.checkpoint import open_checkpoint
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


def test_loaded_arrays_are_the_stored_tensors(checkpoints):
    directory = checkpoints("qwen2_5_vl")
    stored = load_file(directory / "model.safetensors")
    tree = open_checkpoint(directory).load()
    layer = tree["language_model"]["layers"][3]
    np.testing.assert_array_equal(layer["mlp"]["down_proj"]["kernel"], stored["model.layers.3.mlp.down_proj.weight"].T)
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


def test_load_places_weights_on_a_device(converted):
    device = jax.devices()[0]
    for place in (device, jax.sharding.SingleDeviceSharding(device)):
        tree = open_checkpoint(converted).load(place)
        assert {x.device for x in jax.tree.leaves(tree)} == {device}


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
    with pytest.raises(FileNotFoundError, match=r"directory or the id of a model on the hub, got '.*absent'"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"directory or the id of a model on the hub, got './absent'"):
        open_checkpoint("./absent")
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotADirectoryError, match="is a file"):
        open_checkpoint(converted / "config.json")
    shutil.copy(converted / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"must hold model.safetensors"):
        open_checkpoint(tmp_path)


def test_a_hub_id_is_fetched(checkpoints, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        assert {"config.json", "tokenizer.json", "*.safetensors"} <= set(allow_patterns)
        return str(checkpoints("qwen3_vl"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("owner/some-model.v2", revision="main").directory == checkpoints("qwen3_vl")
    assert asked == [("owner/some-model.v2", "main")]


def test_a_hub_that_cannot_be_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="there is no directory 'owner/no-such-model', and the hub"):
        open_checkpoint("owner/no-such-model")


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
    with pytest.raises(ValueError, match=r"1 are not; language_model/norm/scale must be .* got None"):
        open_checkpoint(copy)


def test_another_config_does_not_open(copy):
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["intermediate_size"] += 8
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must be those of its config.json, but 12 are not"):
        open_checkpoint(copy)


def test_dtype_must_be_known(converted):
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int4'"):
        open_checkpoint(converted, dtype="int4")


def test_opening_imports_neither_orbax_nor_the_hub(checkpoints, converted):
    program = (
        "import sys\n"
        "for name in ('orbax', 'orbax.checkpoint', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from vlcache_jax.engine.checkpoint import open_checkpoint\n"
        "for directory in sys.argv[1:]:\n"
        "    open_checkpoint(directory).load()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(checkpoints("qwen3_vl")), str(converted)], check=True)
