"""Conversion: exact, whole or not at all, and in bounded memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest
import typer
import typer.testing
from safetensors.numpy import load_file, save_file

from tests.convert.sources import TEXT, make_source
from tests.models.helper import from_tensors
from vlcache_jax.convert import convert, stream, verify_weights
from vlcache_jax.convert.command import convert_command
from vlcache_jax.convert.partial import describe_leftovers
from vlcache_jax.convert.plan import make_plan
from vlcache_jax.convert.progress import PeakMemory
from vlcache_jax.convert.restore import StoredWeights
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.models.registry import load_config
from vlcache_jax.testing import make_checkpoint


def assert_same_bytes(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of 120 MB in uneven shards, of random bits."""
    directory = tmp_path_factory.mktemp("large") / "source"
    text = TEXT | {"hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 24_001}
    total, largest = make_source(directory, text)
    return directory, total, largest


@pytest.mark.slow_for("float32", "bfloat16", "float16", "qwen3_vl-", "qwen2_5_vl-flat", "qwen3_5_moe")
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_converted_weights_are_exact(checkpoint, tmp_path, dtype):
    seen = []
    report = convert(checkpoint, tmp_path / "out", dtype=dtype, verify=True, progress=seen.append)
    plan = make_plan(checkpoint, load_config(checkpoint))
    target = np.dtype(getattr(ml_dtypes, dtype or "", dtype or np.float32))
    weights = StoredWeights(tmp_path / "out" / "weights")
    for source in plan:
        assert_same_bytes(weights.read(source.parameter.path), source.read(target))
    assert report.verified
    assert report.tensors == len(plan)
    assert report.nbytes == sum(source.parameter.nbytes(target) for source in plan)
    assert report.dtype == target.name
    for step in ("convert", "verify"):
        last = [progress for progress in seen if progress.step == step][-1]
        assert (last.tensors, last.nbytes) == (last.total_tensors, last.total_nbytes) == (report.tensors, report.nbytes)
        assert last.rate > 0


def test_stored_dtype_is_kept(tmp_path):
    source = make_checkpoint(tmp_path / "source", dtype="bfloat16")
    assert convert(source, tmp_path / "out").dtype == "bfloat16"
    for item in make_plan(source, load_config(source)):
        stored = StoredWeights(tmp_path / "out" / "weights").read(item.parameter.path)
        assert_same_bytes(stored, from_tensors(item.parameter, *(tensor.view() for tensor in item.tensors)))


def test_orbax_restores_it(family_checkpoint, tmp_path):
    convert(family_checkpoint, tmp_path / "out")
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        arguments = orbax.checkpoint.checkpoint_utils.construct_restore_args(
            checkpointer.metadata(tmp_path / "out" / "weights").item_metadata.tree
        )
        restored = checkpointer.restore(tmp_path / "out" / "weights", restore_args=arguments)
    loaded = open_checkpoint(tmp_path / "out").load()
    by_name = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree.leaves_with_path(loaded)}
    for path, array in jax.tree.leaves_with_path(restored):
        assert_same_bytes(array, by_name.pop(jax.tree_util.keystr(path, simple=True, separator="/")))
    assert not by_name


def test_files_beside_the_weights(checkpoints, tmp_path):
    source = checkpoints("qwen2_5_vl")
    convert(source, tmp_path / "out")
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    manifest = json.loads((tmp_path / "out" / "vlcache.json").read_text())
    assert manifest["format"] == "vlcache-checkpoint/2"
    assert manifest["source"] == str(source)
    assert manifest["revision"] is None
    assert manifest["dtype"] == "float32"
    assert manifest["parameters"]["language_model/norm/scale"]["shape"] == [64]
    assert manifest["fingerprint"] == open_checkpoint(tmp_path / "out").fingerprint


def test_a_snapshot_of_the_hub_tells_its_commit(checkpoints, tmp_path):
    snapshot = tmp_path / "models--o--n" / "snapshots" / ("ab" * 20)
    shutil.copytree(checkpoints("qwen3_vl"), snapshot)
    convert(snapshot, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").revision == "ab" * 20
    with pytest.raises(ValueError, match="revision must be None for a local directory"):
        convert(snapshot, tmp_path / "other", revision="main")


def test_destination_must_be_free(checkpoints, tmp_path):
    source = checkpoints("qwen3_vl")
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out")  # empty is free
    before = (tmp_path / "out" / "vlcache.json").read_bytes()
    with pytest.raises(FileExistsError, match="must be a new path or an empty directory"):
        convert(source, tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out" / "vlcache.json").read_bytes() == before
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="must be a new path"):
        convert(source, tmp_path / "file")
    with pytest.raises(FileExistsError, match="must be a new path"):
        convert(source, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_bad_sources_write_nothing(checkpoints, tmp_path):
    source = shutil.copytree(checkpoints("qwen3_vl-sharded"), tmp_path / "source")
    shard = min(source.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged or cut off"):
        convert(source, tmp_path / "out")
    with pytest.raises(ValueError, match="dtype must be one of"):
        convert(checkpoints("qwen3_vl"), tmp_path / "out", dtype="int8")
    with pytest.raises(FileNotFoundError, match="directory or a Hub ID"):
        convert(tmp_path / "absent", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_too_small_a_disk_is_an_error(checkpoints, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="of free disk space, got"):
        convert(checkpoints("qwen3_vl"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tiny_disk(tmp_path):
    """bytes -> a directory on a disk of that size."""
    directory = tmp_path / "disk"
    directory.mkdir()

    def mount(size):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        return directory

    yield mount
    subprocess.run(["umount", directory], capture_output=True, check=False)


def test_a_disk_that_fills_up_is_an_error(checkpoints, tiny_disk, capfd):
    """There is room for the weights, but not for what lies around them."""
    source = checkpoints("qwen3_vl")
    nbytes = sum(tensor.nbytes for item in make_plan(source, load_config(source)) for tensor in item.tensors)
    disk = tiny_disk(nbytes + 4096)
    with pytest.raises(
        OSError,
        match=rf"^disk full while writing {disk}/out: the checkpoint needs about 1\.\d MB, but 1\.\d MB were free$",
    ):
        convert(source, disk / "out")
    assert not list(disk.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_limit_of_file_sizes_is_an_error(checkpoints, tmp_path):
    """In a process of its own, as in a shell with `ulimit -f`: threads must not fill the screen with tracebacks."""
    program = (
        "import resource, runpy, sys\n"
        "sys.modules['torch'] = None\n"  # nothing here needs it, and it takes seconds
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "runpy.run_module('vlcache_jax.convert', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", program, str(checkpoints("qwen3_vl")), str(tmp_path / "out")]
    quiet = {**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    first, *progress, error = done.stderr.splitlines()
    assert done.returncode == 1
    assert first == "importing JAX"
    assert all(line.startswith("convert ") for line in progress), done.stderr
    assert re.fullmatch(
        rf"error: disk full while writing {tmp_path}/out: the checkpoint needs about 1\.\d MB, "
        r"but .* were free \(File too large\)",
        error,
    )
    assert not list(tmp_path.iterdir())


def with_tensors(source, directory, **changes):
    """A copy of a checkpoint in which some values of some tensors are others."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        tensor = tensors["model.language_model." + name.replace("__", ".")].copy()
        tensor.reshape(-1)[len(tensor) // 2] = value
        tensors["model.language_model." + name.replace("__", ".")] = tensor
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_weights_that_are_not_finite_are_refused_by_name(checkpoints, tmp_path, dtype, verify):
    changes = {"norm__weight": np.nan, "layers__2__mlp__up_proj__weight": -np.inf, "embed_tokens__weight": 1e5}
    source = with_tensors(checkpoints("qwen3_vl"), tmp_path / "source", **changes)
    with pytest.raises(ValueError, match="weights must be finite, but") as caught:
        convert(source, tmp_path / "out", dtype=dtype, verify=verify)
    assert str(caught.value).splitlines() == [
        f"weights must be finite, but {3 if dtype == 'float16' else 2} tensors are not:",
        *(["  model.language_model.embed_tokens.weight (too large for float16)"] if dtype == "float16" else []),
        "  model.language_model.layers.2.mlp.up_proj.weight (as stored in model.safetensors)",
        "  model.language_model.norm.weight (as stored in model.safetensors)",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_verify_refuses_what_is_not_finite(checkpoints, tmp_path, monkeypatch):
    """Also in checkpoints that were converted before anybody looked."""
    source = with_tensors(checkpoints("qwen3_vl"), tmp_path / "source", norm__weight=np.nan)
    with monkeypatch.context() as patched:
        patched.setattr(stream, "is_finite", lambda array: True)
        convert(source, tmp_path / "out")
    with pytest.raises(ValueError, match=r"must be finite, but 1 tensors are not:\n  model.language_model.norm.weight"):
        verify_weights(source, tmp_path / "out")


def test_two_conversions_into_one_destination(checkpoints, tmp_path):
    source = checkpoints("qwen3_vl")

    def again(progress):
        with pytest.raises(FileExistsError, match="another process is converting"):
            convert(source, tmp_path / "out")

    convert(source, tmp_path / "out", progress=again)
    assert open_checkpoint(tmp_path / "out").load()


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_conversion_cleans_up(large, tmp_path):
    seen = []

    def interrupt(progress):
        seen.append(progress.tensors)
        if progress.tensors == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)

    with pytest.raises(KeyboardInterrupt):
        convert(large[0], tmp_path / "out", progress=interrupt)
    assert seen == [1]  # it did not go on to the end
    assert not list(tmp_path.iterdir())


def test_a_failed_conversion_cleans_up(checkpoints, tmp_path):
    def fail(progress):
        if progress.tensors == 20:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        convert(checkpoints("qwen3_vl"), tmp_path / "out", progress=fail)
    assert not list(tmp_path.iterdir())


def start_conversion(source, destination):
    """A process that has begun to write, and its partial directory."""
    command = [sys.executable, "-W", "error", "-m", "vlcache_jax.convert", str(source), str(destination)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    partial = destination.parent / f".{destination.name}.converting"
    deadline = time.monotonic() + 120
    while not sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) > 1_000_000:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process, partial


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_opens(large, tmp_path):
    source, _, _ = large
    process, partial = start_conversion(source, tmp_path / "out")
    assert not describe_leftovers(tmp_path)  # it is still needed
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert partial.exists()
    [left] = describe_leftovers(tmp_path)
    assert str(partial) in left
    assert not describe_leftovers(tmp_path, but=tmp_path / "out")
    for directory in (tmp_path / "out", partial):
        with pytest.raises(FileNotFoundError):
            open_checkpoint(directory)
    convert(source, tmp_path / "out", verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    open_checkpoint(tmp_path / "out")


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.slow
def test_ctrl_c_on_the_command_cleans_up(large, tmp_path):
    process, _ = start_conversion(large[0], tmp_path / "out")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: the incomplete files are deleted" in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(large, tmp_path):
    source, total, largest = large
    program = (
        "import json, sys, transformers, vlcache_jax.convert.store\n"
        "from vlcache_jax.convert import convert\n"
        "from vlcache_jax.convert.progress import PeakMemory\n"
        "transformers.AutoConfig\n"
        "with PeakMemory(interval=0.001) as memory:\n"
        "    convert(sys.argv[1], sys.argv[2])\n"
        "print(memory.peak - memory.base)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "out")]
    # glibc keeps freed blocks below a threshold that grows with what was freed: what is counted here is what is held.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    assert largest < total / 2
    # The limit for a checkpoint of 2 GB, twice the largest tensor + 300 MB, with the constant scaled down.
    assert int(done.stdout) <= 2 * largest + 30_000_000


def test_loading_takes_little_more_than_the_model(large, tmp_path):
    source, total, _ = large
    convert(source, tmp_path / "out")
    for directory in (source, tmp_path / "out"):
        checkpoint = open_checkpoint(directory)
        with PeakMemory(interval=0.001) as memory:
            checkpoint.load()
        if memory.peak is not None:
            assert memory.peak - memory.base <= total + 30_000_000


def test_verify_finds_one_flipped_byte(large, tmp_path):
    source, _, _ = large
    convert(source, tmp_path / "out")
    verify_weights(source, tmp_path / "out")
    data = max((tmp_path / "out" / "weights").rglob("*"), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ValueError, match="must equal those of the source, but 1 differ"):
        verify_weights(source, tmp_path / "out")


def test_verify_runs_before_the_destination_appears(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_equal_bytes", lambda a, b: False)
    with pytest.raises(ValueError, match=r"but 104 differ: .* and 84 more"):
        convert(checkpoints("qwen3_vl"), tmp_path / "out", verify=True)
    assert not list(tmp_path.iterdir())


def command(*arguments):
    app = typer.Typer()
    app.command()(convert_command)
    return typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command(checkpoints, tmp_path):
    done = command(checkpoints("qwen3_vl"), tmp_path / "out", "--dtype", "bfloat16", "--verify")
    assert done.exit_code == 0, done.output
    assert "converted and verified 104 tensors, 0.7 MB of bfloat16" in done.stdout
    assert open_checkpoint(tmp_path / "out").fingerprint in done.stdout
    assert "verify 104/104 tensors" in done.stderr
    again = command(checkpoints("qwen3_vl"), tmp_path / "out")
    assert again.exit_code == 1
    assert again.stderr.startswith("error: destination must be a new path or an empty directory")


def test_the_command_says_how_large_biases_of_keys_are(checkpoints, tmp_path):
    source = shutil.copytree(checkpoints("qwen2_5_vl"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    norms = (605, 22.4, 0, 921.4)
    for layer, norm in enumerate(norms):
        bias = tensors[f"model.layers.{layer}.self_attn.k_proj.bias"]
        bias *= norm / np.linalg.norm(bias)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert convert(source, tmp_path / "out").key_bias_norms == pytest.approx(norms)
    done = command(source, tmp_path / "again", "--dtype", "bfloat16", "--verify")
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stdout.splitlines() if "bias" in line]
    assert re.fullmatch(r"norm of the key bias per layer: 60\d\S* 22\.\d+ 0 92\d\S*", line)
    assert done.stdout.splitlines()[-1] == str(tmp_path / "again")
    assert "bias" not in command(checkpoints("qwen3_vl"), tmp_path / "other").stdout
    assert convert(checkpoints("qwen3_vl"), tmp_path / "more").key_bias_norms == ()


def test_the_command_checks(checkpoints, tmp_path):
    source, out = checkpoints("qwen3_vl"), tmp_path / "out"
    convert(source, out, dtype="bfloat16")
    done = command("--check", out)
    assert (done.exit_code, done.stdout) == (0, f"{out}: all 104 parameters match their hashes\n")
    assert "check 104/104 tensors" in done.stderr
    data = max((out / "weights").rglob("*"), key=lambda path: path.stat().st_size)
    good = data.read_bytes()
    place = len(good) // 2
    data.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    done = command("--check", out)
    assert done.exit_code == 1
    assert re.search(rf"error: {out} must match its manifest, but is damaged:\n  [/\w]+ differs\n$", done.stderr)
    data.write_bytes(good)
    manifest = json.loads((out / "vlcache.json").read_text())
    del manifest["parameters"]["language_model/norm/scale"]
    (out / "vlcache.json").write_text(json.dumps(manifest))
    assert "but 1 do not; language_model/norm/scale must be" in command("--check", out).stderr
    done = command("--check", source)
    assert done.exit_code == 1
    assert "a Hugging Face directory has none" in done.stderr
    for arguments in ((source,), ("--check", out, tmp_path / "other"), ("--check", out, "--verify")):
        assert command(*arguments).exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command_names_leftovers(checkpoints, tmp_path):
    for name, size in (("a", 3_000_000), ("b", 5)):
        (tmp_path / f".{name}.converting").mkdir()
        (tmp_path / f".{name}.converting" / "data").write_bytes(bytes(size))
    done = command(checkpoints("qwen3_vl"), tmp_path / "b")
    assert done.exit_code == 0
    left = f"a killed conversion left {tmp_path}/.a.converting (3.0 MB): delete it, or convert to"
    assert done.stderr.count("conversion left") == done.stderr.count(left) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.converting", "b"]
    assert left in command("--check", tmp_path / "b").stderr


def test_help_has_an_example():
    done = command("--help")
    assert done.exit_code == 0
    assert "vlcache convert Qwen/" in done.stdout
