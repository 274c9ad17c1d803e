"""Which ptxas assembles kernels; those here are scripts."""

from __future__ import annotations

import types

import pytest

from vlcache_jax.kernel_selftest import gpu
from vlcache_jax.kernel_selftest.gpu import find_ptxas, refusal

ANSWER = "echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'; echo 'Cuda compilation tools, release 13.0, V{version}'"


@pytest.fixture
def put(tmp_path, monkeypatch):
    """(folder, version, script) -> None: puts a ptxas there; no others are on this machine, as far as it is seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"/bin:{tmp_path / 'first'}:{tmp_path / 'second'}")
    monkeypatch.setattr(gpu, "_ROOTS", (str(tmp_path / "cuda"),))
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: spec)

    def put(folder, version="", script=ANSWER):
        path = tmp_path / folder / "ptxas"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script.format(version=version)}\n")
        path.chmod(0o755)

    return put


def test_the_ptxas_is_the_one_that_jax_runs(put, tmp_path):
    assert find_ptxas() is None
    # Each stands before those that were there.
    for number, folder in enumerate(
        ("nvidia/cuda_nvcc/bin", "nvidia/cu13/bin", "cuda/bin", "second", "first", "cuda_sdk_lib/bin")
    ):
        put(folder, f"13.0.{number}")
        assert find_ptxas() == (str(tmp_path / folder / "ptxas"), f"13.0.{number}")


def test_one_that_tells_no_version_is_passed_over(put, tmp_path):
    put("second", "12.6.85")
    for script in ("exit 1", "echo V13", "kill -9 $$"):
        put("first", script=script)
        assert find_ptxas().version == "12.6.85"
    (tmp_path / "first" / "ptxas").write_bytes(b"\x7fELF no program")
    assert find_ptxas().version == "12.6.85"
    (tmp_path / "first" / "ptxas").chmod(0o644)
    assert find_ptxas().version == "12.6.85"


def test_one_that_hangs_is_passed_over(put, monkeypatch):
    monkeypatch.setattr(gpu, "_LIMIT", 0.2)
    put("first", script="exec sleep 100")
    put("second", "12.6.85")
    assert find_ptxas().version == "12.6.85"


@pytest.mark.parametrize(("version", "refused"), [(12060, False), (12080, True), (12090, True), (13000, False)])
def test_what_is_refused(version, refused, monkeypatch):
    versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: version)
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    assert (refusal() is not None) == refused


def test_without_cuda_nothing_is_refused(monkeypatch):
    monkeypatch.setattr("jax._src.lib.cuda_versions", None)
    assert refusal() is None


@pytest.mark.parametrize(
    ("driver", "packages", "told"),
    [
        ("570.86.15", ["jax", "jax-cuda13-plugin"], "CUDA 13 needs driver 580 or later, but 570.86.15 is installed"),
        (
            "520.61.05",
            ["jax-cuda12-plugin"],
            "CUDA 12 needs driver 525 or later, but 520.61.05 is installed: update it",
        ),
        ("580.65.06", ["jax-cuda13-plugin"], None),
        ("570.86.15", ["jax-cuda12-plugin"], None),
        ("of CUDA 12.4", ["jax-cuda13-plugin"], None),
        ("570.86.15", ["jax"], None),
    ],
)
def test_a_driver_that_is_too_old(driver, packages, told):
    found = gpu.old_driver(driver, packages)
    assert found is None if told is None else found is not None and found.startswith(told)
