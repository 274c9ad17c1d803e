"""The self-test of kernels without a stored result, run in child processes.

Results are stored in one file per GPU, driver, version and state of the kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcache_jax.common.checks import shorten
from vlcache_jax.common.files import cache_home, write_whole
from vlcache_jax.common.json_files import FLAG, OBJECT, TEXT, check_fields, one_of, read_object
from vlcache_jax.common.progress import Progress, say
from vlcache_jax.kernel_selftest.gpu import Gpu, find_chip, find_ptxas, refusal

FORMAT = "vlcache-verdicts/1"
_KERNELS = pathlib.Path(__file__).parents[1] / "pallas_kernels"
# Packages that compile and launch kernels.
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
)  # fmt: skip

Identity = dict[str, str]


@dataclass(frozen=True)
class SelfTestResult:
    """The result of a kernel's self-test on a GPU.

    Attributes:
      passed: True or False; None if the kernel could not be checked.
      why: reason in words.
    """

    passed: bool | None
    why: str

    def __str__(self) -> str:
        if self.passed is None:
            return f"unknown: {self.why}; run `vlcache doctor`"
        return f"{'passed' if self.passed else 'failed'}: {self.why}"


def identity_of(chip: Gpu) -> Identity:
    """Return the key of stored results: everything that may change the compiled kernels, including the ptxas."""
    ptxas = find_ptxas()
    return {
        "device": chip.name,
        "compute capability": chip.capability,
        "driver": chip.driver,
        **versions(),
        "ptxas": ptxas.version if ptxas else "none",
        "kernels": _digest_kernels(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed packages among JAX, its GPU plugins and CUDA's compilers."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def place(known: Identity) -> pathlib.Path:
    """Return the path of the file with the results for an identity."""
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return cache_home() / "verdicts" / f"{digest[:16]}.json"


def read(known: Identity) -> dict[str, SelfTestResult]:
    """Return the results by kernel. Empty if the file is missing, damaged or has another identity."""
    path = place(known)
    try:
        content = read_object(path)
        check_fields(content, {"format": one_of(FORMAT), "identity": OBJECT, "kernels": OBJECT}, path, required=True)
        if content["identity"] != known:
            return {}
        for name, entry in content["kernels"].items():
            check_fields(content["kernels"], {name: OBJECT}, path)
            check_fields(entry, {"passed": FLAG, "why": TEXT}, path, required=True)
    except ValueError:
        return {}
    return {name: SelfTestResult(entry["passed"], entry["why"]) for name, entry in content["kernels"].items()}


def keep(known: Identity, results: Mapping[str, SelfTestResult]) -> None:
    """Store results, except unknown ones, so that the next start checks those kernels again.

    Raises:
      OSError: the file cannot be written.
    """
    kernels = {
        name: {"passed": found.passed, "why": found.why} for name, found in results.items() if found.passed is not None
    }
    if kernels:
        content = {"format": FORMAT, "identity": known, "kernels": kernels}
        write_whole(place(known), json.dumps(content, indent=1) + "\n")


def _digest_kernels() -> str:
    """Return the digest of all kernel sources and of the table of fastest settings, which affects compilation."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _KERNELS.rglob("*") if path.suffix in (".py", ".json")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_KERNELS).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


PROGRAM = "vlcache_jax.pallas_kernels.checks"
LIMIT = 300.0  # seconds of a child process; compilation takes most of them
_GRACE = 10.0  # seconds for a killed process to end
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # not caused by a kernel
_SIGNALS = {number.value: number.name for number in signal.Signals}

_lock = threading.Lock()
_known: dict[str, SelfTestResult] | None = None  # results on this process's GPU


def run_selftest(
    kernels: Iterable[str],
    portable: Mapping[str, str] | None = None,
    *,
    again: bool = False,
    show: bool = True,
    limit: float = LIMIT,
) -> dict[str, SelfTestResult]:
    """Run the self-test of each kernel that has no stored result. Call it before JAX uses the GPU.

    On Hopper, the Hopper kernels are checked, and the portable kernel of each one that fails. On other GPUs since
    Ampere, only the portable kernels are checked.

    Args:
      kernels: names of the Hopper kernels.
      portable: name of the portable kernel by Hopper kernel, if it has one.
      again: also check kernels that have a result.
      show: report progress and failures on stderr.
      limit: seconds for a child process. A kernel that does not end in time has failed. The others get a new process.

    Returns:
      Results by kernel; empty without a supported GPU. Then no process is started, and neither is one if `refusal`
      rejects the toolchain.
    """
    global _known
    chip = chip_of_jax()
    kernels, portable = list(kernels), portable or {}
    if chip is None or not (chip.is_hopper or chip.is_since_ampere):
        return {}
    own = kernels if chip.is_hopper else [portable[kernel] for kernel in kernels if kernel in portable]
    with _lock:
        refused = refusal()
        if refused is not None:
            if show:
                say(f"XLA runs in place of the Pallas kernels: {refused}")
            _known = {name: SelfTestResult(None, refused) for name in own}
            return _known
        identity = identity_of(chip)
        known = {} if again else read(identity)
        known |= _missing(own, known, chip, identity, show, limit)
        failed = [kernel for kernel in kernels if chip.is_hopper and known[kernel].passed is False]
        second = [portable[kernel] for kernel in failed if kernel in portable]
        known |= _missing(second, known, chip, identity, show, limit)
        _known = known
    if show:
        for name in own:
            if not known[name].passed:
                other = known.get(portable.get(name, ""))
                runs = "runs as its portable kernel" if other is not None and other.passed else "runs on XLA"
                say(f"{name} {runs}; self-test on {chip.name} {known[name]}")
    return known


def _missing(
    names: Sequence[str],
    known: Mapping[str, SelfTestResult],
    chip: Gpu,
    identity: Identity,
    show: bool,
    limit: float,
) -> dict[str, SelfTestResult]:
    """Check the kernels without a result, and store their results with the others."""
    missing = [name for name in names if name not in known]
    if not missing:
        return {}
    with Progress(f"checking kernels on {chip.name}, once", show=show):
        found = _check(missing, limit)
    try:
        keep(identity, {**known, **found})
    except OSError as error:
        if show:
            say(f"results of the kernel self-test cannot be stored, so each start repeats it: {error}")
    return found


def result_on(kernel: str) -> SelfTestResult:
    """Return the stored result of a kernel on this process's GPU, without a check."""
    global _known
    if _known is None:
        chip = chip_of_jax()
        _known = read(identity_of(chip)) if chip is not None else {}
    return _known.get(kernel) or SelfTestResult(None, "the self-test has not run")


def chip_of_jax() -> Gpu | None:
    """Return the GPU that JAX uses or will use, found without JAX's backend.

    Returns:
      The GPU. None: JAX will use another device, or the driver finds none or does not work.
    """
    import jax

    platforms = jax.config.jax_platforms or jax.config.read("jax_platform_name") or "cuda"
    if platforms.split(",")[0] not in ("cuda", "gpu") or not any("-plugin" in name for name in versions()):
        return None
    with contextlib.suppress(OSError):
        return find_chip()
    return None


def _check(kernels: Sequence[str], limit: float) -> dict[str, SelfTestResult]:
    """Check kernels in child processes. A process without any result makes all remaining results unknown."""
    found: dict[str, SelfTestResult] = {}
    while left := [kernel for kernel in kernels if kernel not in found]:
        try:
            lines, ending, in_itself = _run_child(left, limit)
        except OSError as error:
            lines, ending, in_itself = [], f"could not be started: {error}", False
        ended = {
            line["kernel"]: SelfTestResult(line["passed"], shorten(line["why"], 400))
            for line in lines
            if "passed" in line
        }
        begun = [line["kernel"] for line in lines if "kernel" in line and line["kernel"] not in ended]
        busy = [line["busy"] for line in lines if "busy" in line]
        found |= ended
        if busy or not in_itself or not (begun or ended):
            why = f"the device was not available ({shorten(busy[0], 400)})" if busy else f"the check {ending}"
            found |= {kernel: SelfTestResult(None, why) for kernel in left if kernel not in found}
        elif begun and not (ended and ending.startswith("timed out")):  # else it had less than the full time
            found[begun[0]] = SelfTestResult(False, ending)
    return found


def _run_child(kernels: Sequence[str], limit: float) -> tuple[list[dict[str, Any]], str, bool]:
    """Run a child process. Return the lines of its report, how it ended, and True if it caused its end itself."""
    with tempfile.TemporaryDirectory(prefix="vlcache-contact-", ignore_cleanup_errors=True) as folder:
        report, errors = pathlib.Path(folder, "report"), pathlib.Path(folder, "errors")
        report.touch()
        with open(errors, "wb") as output:
            process = subprocess.Popen(
                command(report, limit, kernels),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            status = process.wait(limit)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            if not isinstance(error, subprocess.TimeoutExpired):  # Ctrl-C
                raise
            return _lines(report), f"timed out after {limit:g} s", True
        how = f"ended with status {status}" if status >= 0 else f"was killed by {_SIGNALS.get(-status, -status)}"
        last_lines = _last_lines(errors)
        return _lines(report), f"{how}: {last_lines}" if last_lines else how, -status not in _FROM_OUTSIDE


def command(report: pathlib.Path, limit: float, kernels: Sequence[str]) -> list[str]:
    """Return the command of the child process, which gets this process's import path."""
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from {PROGRAM} import main; main()"
    return [sys.executable, "-c", code, str(report), str(limit), *kernels]


def _environment() -> dict[str, str]:
    """Return the child's environment: no preallocated device memory, CUDA only, and no JAX option that rejects NaN."""
    changed = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    without = ("JAX_PLATFORM_NAME", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_DISABLE_JIT", "JAX_ENABLE_X64")
    return {name: value for name, value in os.environ.items() if name not in without} | changed


def _last_lines(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 400))
        return " / ".join(file.read().decode(errors="replace").strip().splitlines()[-3:])


def _lines(report: pathlib.Path) -> list[dict[str, Any]]:
    """Return the complete lines of a report."""
    lines = []
    for line in report.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines
