"""`vlcache doctor` on machines of all kinds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import types

import jax
import pytest
from typer.testing import CliRunner

from vlcache_jax.commands import doctor
from vlcache_jax.commands.cli import app
from vlcache_jax.kernel_selftest import SelfTestResult, selftest
from vlcache_jax.kernel_selftest import selftest as kept
from vlcache_jax.kernel_selftest.gpu import Gpu, Ptxas
from vlcache_jax.pallas_kernels.attention import mosaic_gpu
from vlcache_jax.pallas_kernels.checks import PORTABLE

CHIP = Gpu("NVIDIA H200", "9.0", "580.65.06", "")
PASSED = {
    "attention": SelfTestResult(True, "24 cases"),
    "paged_attention": SelfTestResult(True, "20 cases"),
    "link": SelfTestResult(True, "6 cases"),
    "link_coded": SelfTestResult(True, "9 cases"),
    "statistics": SelfTestResult(True, "10 cases"),
    "norm_residual": SelfTestResult(True, "5 cases"),
    "rotate_write": SelfTestResult(True, "9 cases"),
    "experts": SelfTestResult(True, "11 cases"),
    "float8_matmul": SelfTestResult(True, "7 cases"),
    "float8_experts": SelfTestResult(True, "4 cases"),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(options) -> the result; the found lines are `found`, by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "_known", None)

    def run(*options):
        result = CliRunner().invoke(app, ["doctor", *options])
        lines = result.stdout.split("\n\n")[0].splitlines()
        result.found = {name: value.strip() for name, _, value in (line.partition("  ") for line in lines)}
        return result

    return run


@pytest.fixture
def on_a_chip(monkeypatch):
    """(results) -> None: from then on there is an H200, on which the checks find these; jax uses it, if `used`."""

    def put(results, *, used=True, plugin=True):
        monkeypatch.setattr(doctor, "find_chip", lambda: CHIP)
        monkeypatch.setattr(doctor, "memory", lambda chip: (100 * 2**30, 140 * 2**30))
        monkeypatch.setattr(selftest, "chip_of_jax", lambda: CHIP if plugin else None)
        monkeypatch.setattr(selftest, "_check", lambda kernels, limit: {kernel: results[kernel] for kernel in kernels})
        packages = {"jax": "0.12"} | ({"jax-cuda13-plugin": "0.12"} if plugin else {})
        monkeypatch.setattr(doctor, "versions", lambda: packages)
        for module in (doctor, kept):
            monkeypatch.setattr(module, "find_ptxas", lambda: Ptxas("/usr/local/cuda/bin/ptxas", "13.0.88"))
        if used:
            device = types.SimpleNamespace(platform="gpu", device_kind=CHIP.name)
            monkeypatch.setattr(jax, "devices", lambda: [device])

    return put


def test_without_a_gpu_all_is_well(run):
    result = run()
    assert result.exit_code == 0
    assert f"jax {jax.__version__}" in result.found["versions"]
    assert result.found["jax uses"] == "cpu"
    assert result.found["GPU"] == "none: XLA runs on the CPU. With an NVIDIA GPU, install with `--extra cuda13`"
    assert result.found["attention"] == result.found["link"] == "xla (no NVIDIA GPU since Ampere that jax uses)"
    assert "to do" not in result.stdout


def test_a_chip_on_which_all_passes(run, on_a_chip, tmp_path):
    on_a_chip(PASSED)
    result = run()
    assert result.exit_code == 0, result.output
    assert result.found["GPU"] == "NVIDIA H200, compute capability 9.0, driver 580.65.06"
    assert result.found["memory"] == "100.0 GiB free of 140.0 GiB"
    assert result.found["ptxas"] == "13.0.88 (/usr/local/cuda/bin/ptxas)"
    assert result.found["attention"] == "mosaic_gpu (passed: 24 cases)"
    assert result.found["link"] == "mosaic_gpu (passed: 6 cases)"
    assert result.found["results"].startswith(str(tmp_path))
    assert "to do" not in result.stdout


def test_what_is_wrong_or_unknown_is_a_problem(run, on_a_chip):
    wrong = {name: SelfTestResult(False, "windows: error 0.3") for name in ("attention", "attention_mma")}
    on_a_chip(PASSED | wrong)
    result = run()
    assert result.exit_code == 1
    assert result.found["attention"] == "xla (failed: windows: error 0.3; failed: windows: error 0.3)"
    assert result.stdout.count("to do: ") == 2
    assert "to do: attention returns wrong values on this GPU" in result.stdout
    on_a_chip(PASSED | {"link": SelfTestResult(None, "the device was not available (busy)")})
    assert run().found["attention"].startswith("xla (failed: windows: error 0.3; ")  # as kept
    result = run("--again")
    assert result.exit_code == 1
    assert result.found["attention"] == "mosaic_gpu (passed: 24 cases)"
    assert "to do: link could not be checked: look with `nvidia-smi` for processes that use the device" in result.stdout


def test_a_portable_form_in_place_of_what_is_wrong(run, on_a_chip):
    wrong = {
        "attention": SelfTestResult(False, "windows: error 0.3"),
        "attention_mma": SelfTestResult(True, "24 cases"),
    }
    on_a_chip(PASSED | wrong)
    result = run()
    assert result.exit_code == 1
    assert result.found["attention"] == "mosaic_gpu_mma (failed: windows: error 0.3; passed: 24 cases)"
    assert result.stdout.count("to do: ") == 1


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_the_portable_forms_on_other_gpus(run, on_a_chip, monkeypatch, capability):
    on_a_chip({PORTABLE[kernel]: result for kernel, result in PASSED.items() if kernel in PORTABLE})
    chip = dataclasses.replace(CHIP, name="another", capability=capability)
    for module, name in ((doctor, "find_chip"), (selftest, "chip_of_jax")):
        monkeypatch.setattr(module, name, lambda: chip)
    result = run()
    assert result.exit_code == 0, result.output
    assert result.found["GPU"] == f"another, compute capability {capability}, driver 580.65.06"
    assert result.found["attention"] == "mosaic_gpu_mma (passed: 24 cases)"
    assert result.found["statistics"] == "xla (no kernel for this GPU)"
    assert "to do" not in result.stdout


def test_a_refused_toolchain_is_no_wrong_kernel(run, on_a_chip, monkeypatch, tmp_path):
    on_a_chip({})
    versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: 12080)
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    result = run()
    assert result.exit_code == 1
    for kernel in PASSED:
        assert result.found[kernel] == "xla (the toolchain is not supported)"
    assert result.stdout.count("to do: ") == 1
    assert (
        "to do: the kernels are off, and slower XLA programs replace them, because of the toolchain: mosaic_gpu needs "
        "CUDA before 12.8 or after 12.9, because ptxas 12.8 and 12.9 miscompile masks, got 12.8. Install with `--"
    ) in result.stdout
    assert "wrong" not in result.stdout
    assert not (tmp_path / "vlcache-jax" / "verdicts").exists()


def test_importing_it_changes_nothing(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    spec = importlib.util.find_spec("vlcache_jax.commands.doctor")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


def test_it_takes_little_of_the_device(run, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")  # preempted afterwards
    del os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]
    devices, seen = jax.devices, []
    monkeypatch.setattr(jax, "devices", lambda: seen.append(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]) or devices())
    assert run().exit_code == 0
    assert seen == ["false"]


def test_a_chip_that_jax_does_not_use(run, on_a_chip, monkeypatch):
    on_a_chip(PASSED, used=False, plugin=False)
    monkeypatch.setattr(doctor, "memory", lambda chip: None)
    assert run().exit_code == 0  # tests wish so: JAX_PLATFORMS=cpu
    platforms = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        result = run()
        assert result.exit_code == 1
        assert result.found["memory"] == "unknown: NVML does not report it"
        assert "to do: jax does not use NVIDIA H200: install with `--extra cuda13`." in result.stdout
        on_a_chip(PASSED, used=False)
        assert "and set JAX_PLATFORMS=cuda to see the error." in run().stdout
        monkeypatch.setattr(doctor, "find_chip", lambda: dataclasses.replace(CHIP, driver="570.86.15"))
        found = " ".join(run().stdout.split())
        assert "CUDA 13 needs driver 580 or later, but 570.86.15 is installed: update it or install with" in found
    finally:
        jax.config.update("jax_platforms", platforms)


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unknown backend 'cuda'")])
def test_a_jax_without_a_device_is_a_problem(run, monkeypatch, error):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    platforms = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", "cuda")
        result = run()
    finally:
        jax.config.update("jax_platforms", platforms)
    assert result.exit_code == 1
    assert result.found["jax uses"] == f"nothing: {str(error) or 'no device'}"
    assert (
        "to do: jax has no device: 'cuda' is requested, for example by JAX_PLATFORMS, but not available."
        in result.stdout
    )


def test_verdicts_that_cannot_be_kept_are_a_problem(run, on_a_chip, tmp_path):
    on_a_chip(PASSED)
    (tmp_path / "vlcache-jax").write_text("no folder")
    result = run()
    assert result.exit_code == 1
    assert result.found["attention"] == "mosaic_gpu (passed: 24 cases)"
    assert f"to do: results of self-tests cannot be stored in {tmp_path / 'vlcache-jax' / 'verdicts'}" in result.stdout


def test_a_driver_that_does_not_work(run, monkeypatch):
    def broken():
        raise OSError("the CUDA driver returned error 803 from cuInit")

    monkeypatch.setattr(doctor, "find_chip", broken)
    result = run()
    assert result.exit_code == 1
    assert "to do: the CUDA driver returned error 803 from cuInit: check that `nvidia-smi` works." in result.stdout


def test_tuned_settings(run, tmp_path, monkeypatch):
    assert run().found["tuned"] == "none: defaults"
    path = tmp_path / "tuned.json"
    monkeypatch.setattr(mosaic_gpu, "TUNED", path)
    row = {"N": 512, "H": 32, "K": 8, "D": 128, "config": {}, "splits registers": mosaic_gpu.SPLITS_REGISTERS}
    path.write_text(json.dumps({"rows": [row]}))
    assert run().found["tuned"] == f"512 tokens, 32/8 heads x 128 ({path})"
    monkeypatch.setattr(mosaic_gpu, "SPLITS_REGISTERS", not mosaic_gpu.SPLITS_REGISTERS)
    passed_over = "512 tokens, 32/8 heads x 128 (skipped: tuned for a jax with other register use)"
    assert run().found["tuned"] == f"{passed_over} ({path})"
    path.write_text('{"rows": [{"N": 512}]}')
    result = run()
    assert result.exit_code == 1
    assert result.found["tuned"] == f"damaged: {path}"
    assert "delete it, or replace it with `python -m benchmarks.gpu`" in result.stdout
