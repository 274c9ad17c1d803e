"""First contact with stand-ins for chip and kernels; the child processes are real, and light: they import no jax."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import jax
import pytest

from vlcache_jax.kernel_selftest import SelfTestResult, result_on, run_selftest, selftest
from vlcache_jax.kernel_selftest.gpu import SINCE_AMPERE, Gpu, Ptxas

HOPPER = Gpu("NVIDIA H200", "9.0", "580.65.06", "")
KERNELS = """
import os, signal, sys, time
from vlcache_jax.kernel_selftest import child

def right():
    return "3 cases, largest error 0.01"

def wrong():
    raise ValueError("packed: error 0.3, must be at most 0.04")

def raises():
    raise RuntimeError("INTERNAL: ptxas\\n  gave up")

def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

def exits():
    print("one\\ntwo\\nXid 13\\n", file=sys.stderr, flush=True)
    os._exit(3)

def hangs():
    time.sleep(100)

def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def lacks_memory():
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes")

def is_there():
    pass

def is_busy():
    raise RuntimeError("Unable to initialize backend 'cuda': CUDA_ERROR_DEVICE_UNAVAILABLE")

def does_not_come():
    time.sleep(100)

right_mma, wrong_mma = right, wrong
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of results; a Hopper GPU is there, and nothing is known of it yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "chip_of_jax", lambda: HOPPER)
    monkeypatch.setattr(selftest, "_known", None)
    monkeypatch.setattr(selftest, "find_ptxas", lambda: None)  # which starts a process
    return tmp_path / "vlcache-jax" / "verdicts"


@pytest.fixture
def started(monkeypatch):
    """The kernels of each child process that was started: those of `KERNELS`, on its device `started.device`."""

    class Started(list):
        device = "is_there"

    calls = Started()

    def command(report, limit, kernels):
        calls.append(list(kernels))
        run = f"child.run({str(report)!r}, {limit}, {kernels!r}, {calls.device}, lambda name: globals()[name]())"
        return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{KERNELS}\n{run}"]

    monkeypatch.setattr(selftest, "command", command)
    return calls


def no_process(*_, **__):
    raise AssertionError("a process is started")


def test_each_kernel_gets_its_verdict(home, started, monkeypatch, capsys):
    kernels = ["right", "wrong", "raises", "crashes", "exits"]
    found = run_selftest(kernels)
    assert {kernel: (result.passed, result.why) for kernel, result in found.items()} == {
        "right": (True, "3 cases, largest error 0.01"),
        "wrong": (False, "packed: error 0.3, must be at most 0.04"),
        "raises": (False, "INTERNAL: ptxas gave up"),
        "crashes": (False, "was killed by SIGSEGV"),
        "exits": (False, "ended with status 3: one / two / Xid 13"),
    }
    # After a failure the rest gets a process of its own.
    assert started == [kernels, kernels[2:], kernels[3:], kernels[4:]]
    said = capsys.readouterr().err
    assert said.startswith("checking kernels on NVIDIA H200, once\n")
    assert "wrong runs on XLA; self-test on NVIDIA H200 failed: packed: error 0.3" in said
    assert "\nright" not in said

    # From now on no process is needed: neither here nor in the next one.
    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert result_on("wrong") == found["wrong"]
    monkeypatch.setattr(selftest, "_known", None)
    assert result_on("right") == found["right"]
    assert result_on("another") == SelfTestResult(None, "the self-test has not run")
    assert run_selftest(kernels, show=False) == found
    assert [path.suffix for path in home.iterdir()] == [".json"]


def test_a_kernel_that_hangs_is_ended_and_the_others_are_checked(home, started):
    found = run_selftest(["hangs", "right"], show=False, limit=3.0)
    assert found == {
        "hangs": SelfTestResult(False, "timed out after 3 s"),
        "right": SelfTestResult(True, "3 cases, largest error 0.01"),
    }
    assert started == [["hangs", "right"], ["right"]]


@pytest.mark.parametrize(
    ("device", "kernel", "why"),
    [
        ("is_busy", "right", r"the device was not available \(Unable to initialize backend .*UNAVAILABLE\)"),
        ("is_there", "lacks_memory", r"the device was not available \(RESOURCE_EXHAUSTED: Out of memory .* 8 bytes\)"),
        ("exits", "right", "the check ended with status 3: one / two / Xid 13"),
        ("is_there", "is_killed", "the check was killed by SIGKILL"),  # by whoever needs the host's memory
        ("does_not_come", "right", "the check timed out after 0.5 s"),
    ],
)
def test_what_cannot_be_checked_is_unknown(home, started, device, kernel, why):
    started.device = device
    found = run_selftest([kernel, "right"], show=False, limit=0.5 if device == "does_not_come" else 30.0)
    assert len(started) == 1
    for name in (kernel, "right"):
        assert found[name].passed is None
        assert re.fullmatch(why, found[name].why)
        assert str(found[name]) == f"unknown: {found[name].why}; run `vlcache doctor`"
    assert not home.exists()


def test_what_passed_before_the_device_was_lost_is_kept(home, started, monkeypatch):
    found = run_selftest(["right", "lacks_memory"], show=False)
    assert (found["right"].passed, found["lacks_memory"].passed) == (True, None)
    monkeypatch.setattr(selftest, "_known", None)
    assert result_on("right").passed
    assert result_on("lacks_memory") == SelfTestResult(None, "the self-test has not run")
    run_selftest(["right", "lacks_memory"], show=False)  # tries again what is unknown
    assert started == [["right", "lacks_memory"], ["lacks_memory"]]


def test_a_process_that_cannot_be_started(home, monkeypatch):
    monkeypatch.setattr(selftest, "command", lambda *_: ["/nothing/here"])
    assert "could not be started: " in run_selftest(["right"], show=False)["right"].why
    monkeypatch.setattr("tempfile.tempdir", "/nothing/here")
    assert "could not be started: " in run_selftest(["right"], show=False)["right"].why


def test_ctrl_c_ends_the_child(home, started, monkeypatch):
    wait, children = subprocess.Popen.wait, []

    def interrupted(process, timeout=None):
        if not children:
            children.append(process)
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_selftest(["hangs"], show=False)
    assert children[0].returncode == -signal.SIGKILL


@pytest.fixture
def checked(monkeypatch):
    """The kernels of each check, which finds that all are right, without a process."""
    calls = []

    def check(kernels, limit):
        calls.append(list(kernels))
        return {kernel: SelfTestResult(True, f"found {len(calls)}") for kernel in kernels}

    monkeypatch.setattr(selftest, "_check", check)
    return calls


def test_only_what_is_new_is_checked(home, checked, monkeypatch):
    run_selftest(["a"], show=False)
    run_selftest(["a", "b"], show=False)
    assert checked == [["a"], ["b"]]
    assert run_selftest(["a", "b"], show=False) == {
        "a": SelfTestResult(True, "found 1"),
        "b": SelfTestResult(True, "found 2"),
    }
    assert run_selftest(["a", "b"], show=False, again=True)["a"] == SelfTestResult(True, "found 3")
    assert checked[2:] == [["a", "b"]]
    # Another chip, driver or version is another matter.
    for change in ({"name": "NVIDIA H100"}, {"driver": "590"}, {"capability": "9.1"}):
        monkeypatch.setattr(selftest, "chip_of_jax", lambda change=change: dataclasses.replace(HOPPER, **change))
        run_selftest(["a"], show=False)
    monkeypatch.setattr(selftest, "chip_of_jax", lambda: HOPPER)
    monkeypatch.setattr(selftest, "versions", lambda: {"jax": "0.99"})
    run_selftest(["a"], show=False)
    monkeypatch.setattr(selftest, "_digest_kernels", lambda: "changed")
    run_selftest(["a"], show=False)
    for version in ("12.9.86", "13.0.88"):  # of the machine's own ptxas
        monkeypatch.setattr(selftest, "find_ptxas", lambda version=version: Ptxas("/usr/local/cuda/bin/ptxas", version))
        run_selftest(["a"], show=False)
    assert checked[3:] == [["a"]] * 7
    assert len(list(home.iterdir())) == 8


def test_a_change_of_a_kernel_or_of_the_table_of_settings_changes_the_identity(tmp_path, monkeypatch):
    assert selftest.identity_of(HOPPER)["jax"] == jax.__version__
    monkeypatch.setattr(selftest, "_KERNELS", tmp_path)
    (tmp_path / "attention").mkdir()
    seen = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("attention/a.py", ""), ("attention/tuned.json", "{}")):
        (tmp_path / name).write_text(content)
        seen.add(selftest.identity_of(HOPPER)["kernels"])
    assert len(seen) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "",
        lambda content: "\x00\xff garbage",
        lambda content: content[: len(content) // 2],
        lambda content: "[1, 2]",
        lambda content: "[" * 100_000,
        lambda content: content.replace("verdicts/1", "verdicts/2"),
        lambda content: content.replace("NVIDIA H200", "NVIDIA H100"),
        lambda content: content.replace('"passed": true', '"passed": null'),
        lambda content: content.replace('"passed": true', '"passed": "yes"'),
        lambda content: content.replace('"why": "found 1"', '"why": 3'),
        lambda content: json.dumps(json.loads(content) | {"kernels": ["a"]}),
        lambda content: json.dumps(json.loads(content) | {"kernels": {"a": True}}),
    ],
)
def test_a_damaged_file_is_made_anew(home, checked, damage):
    run_selftest(["a"], show=False)
    [path] = home.iterdir()
    content = path.read_text()
    path.write_text(damage(content))
    assert run_selftest(["a"], show=False) == {"a": SelfTestResult(True, "found 2")}
    assert path.read_text() == content.replace("found 1", "found 2")


def test_what_cannot_be_kept_holds_for_this_process(home, checked, capsys, monkeypatch):
    home.parent.write_text("no folder")
    assert run_selftest(["a"])["a"].passed
    assert result_on("a").passed
    assert "results of the kernel self-test cannot be stored, so each start repeats it: " in capsys.readouterr().err
    run_selftest(["a"], show=False)
    assert checked == [["a"], ["a"]]


PORTABLE = {"right": "right_mma", "wrong": "right_mma", "raises": "wrong_mma"}  # not of `exits`


@pytest.mark.parametrize("capability", [capability for capability in SINCE_AMPERE if capability != "9.0"])
def test_on_other_gpus_the_portable_forms_are_checked(home, checked, monkeypatch, capsys, capability):
    monkeypatch.setattr(selftest, "chip_of_jax", lambda: Gpu(f"GPU of {capability}", capability, "580", ""))
    assert run_selftest(["a", "b", "c"], {"a": "a_mma", "c": "c_mma"}) == {
        "a_mma": SelfTestResult(True, "found 1"),
        "c_mma": SelfTestResult(True, "found 1"),
    }
    assert checked == [["a_mma", "c_mma"]]
    assert capsys.readouterr().err == f"checking kernels on GPU of {capability}, once\n"
    assert result_on("a_mma").passed
    assert result_on("a") == SelfTestResult(None, "the self-test has not run")
    [path] = home.iterdir()
    assert json.loads(path.read_text())["identity"]["compute capability"] == capability


def test_on_hopper_they_are_checked_in_place_of_what_fails(home, started, capsys):
    found = run_selftest(["right", "wrong", "exits"], PORTABLE)
    assert started == [["right", "wrong", "exits"], ["exits"], ["right_mma"]]
    assert {name: result.passed for name, result in found.items()} == {
        "right": True,
        "wrong": False,
        "exits": False,
        "right_mma": True,
    }
    said = capsys.readouterr().err
    assert "wrong runs as its portable kernel; self-test on NVIDIA H200 failed: packed: error 0.3" in said
    assert "exits runs on XLA; self-test on NVIDIA H200 failed: ended with status 3" in said
    assert run_selftest(["right", "wrong", "exits"], PORTABLE, show=False) == found
    assert len(started) == 3


def test_a_portable_form_that_is_wrong_too(home, started, capsys):
    found = run_selftest(["raises"], PORTABLE)
    assert started == [["raises"], ["wrong_mma"]]
    assert not found["wrong_mma"].passed
    assert "raises runs on XLA; self-test on NVIDIA H200 failed: INTERNAL: ptxas gave up" in capsys.readouterr().err


@pytest.mark.parametrize("chip", [None, *(dataclasses.replace(HOPPER, capability=other) for other in ("7.5", "13.0"))])
def test_without_a_gpu_since_ampere_no_process_is_started(home, monkeypatch, chip):
    monkeypatch.setattr(selftest, "chip_of_jax", lambda: chip)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert run_selftest(["a"], {"a": "a_mma"}) == {}
    assert result_on("a").passed is None
    assert not home.exists()


def test_a_refused_toolchain_is_said_and_nothing_is_checked(home, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "refusal", lambda: "mosaic_gpu needs another CUDA, got 12.8")
    monkeypatch.setattr(subprocess, "Popen", no_process)
    refused = SelfTestResult(None, "mosaic_gpu needs another CUDA, got 12.8")
    assert run_selftest(["a", "b"]) == {"a": refused, "b": refused}
    assert result_on("b") == refused
    assert (
        capsys.readouterr().err == "XLA runs in place of the Pallas kernels: mosaic_gpu needs another CUDA, got 12.8\n"
    )
    assert not home.exists()


def test_the_driver_is_asked_only_where_jax_will_use_a_gpu(monkeypatch):
    monkeypatch.setattr(selftest, "find_chip", lambda: HOPPER)
    monkeypatch.setattr(selftest, "versions", lambda: {"jax": "0.12", "jax-cuda13-plugin": "0.12"})
    platforms = jax.config.jax_platforms
    try:
        for chosen in ("cuda", "cuda,cpu", "gpu", None, "cpu,cuda", "cpu"):
            jax.config.update("jax_platforms", chosen)
            assert selftest.chip_of_jax() == (None if chosen and chosen.startswith("cpu") else HOPPER)
        jax.config.update("jax_platforms", None)
        monkeypatch.setattr(selftest, "versions", lambda: {"jax": "0.12"})
        assert selftest.chip_of_jax() is None  # a build for the CPU

        def broken():
            raise OSError("the CUDA driver returned error 803 from cuInit")

        monkeypatch.setattr(selftest, "versions", lambda: {"jax-cuda12-plugin": "0.12"})
        monkeypatch.setattr(selftest, "find_chip", broken)
        assert selftest.chip_of_jax() is None  # and jax will say why
    finally:
        jax.config.update("jax_platforms", platforms)


def test_the_child_gets_this_process_s_import_path_and_little_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DEBUG_NANS", "1")
    monkeypatch.setattr(selftest, "PROGRAM", "program")
    (tmp_path / "program.py").write_text(
        "import os, sys\ndef main():\n    open(sys.argv[1], 'w').write(repr((sys.argv[2:], dict(os.environ))))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    report = tmp_path / "report"
    subprocess.run(selftest.command(report, 2.5, ["a", "b"]), env=selftest._environment(), check=True, cwd="/")
    arguments, environment = eval(report.read_text())
    assert arguments == ["2.5", "a", "b"]
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert environment["JAX_PLATFORMS"] == "cuda"
    assert "JAX_DEBUG_NANS" not in environment
    assert os.environ["JAX_DEBUG_NANS"] == "1"
