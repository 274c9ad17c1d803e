"""Runs the kernel self-test: a child process checks the kernels of which no result is known.

Results are kept in a file for each GPU, driver, version and state of the kernels.
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
# What compiles kernels and launches them.
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
class Verdict:
    """Of a kernel on a chip.

    Attributes:
      passed: None is unknown: it could not be checked.
      why: what was found, in words.
    """

    passed: bool | None
    why: str

    def __str__(self) -> str:
        if self.passed is None:
            return f"unknown: {self.why}; run `vlcache doctor`"
        return f"{'passed' if self.passed else 'failed'}: {self.why}"


def identity_of(chip: Gpu) -> Identity:
    """What verdicts hold for. Whatever may change what runs on the chip is in it, the machine's own ptxas, too."""
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
    """Of jax and of what makes it run on a GPU: those packages that are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def place(known: Identity) -> pathlib.Path:
    """The file of an identity's verdicts."""
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return cache_home() / "verdicts" / f"{digest[:16]}.json"


def read(known: Identity) -> dict[str, Verdict]:
    """The verdicts by kernel; none where the file is missing, damaged or of another identity."""
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
    return {name: Verdict(entry["passed"], entry["why"]) for name, entry in content["kernels"].items()}


def keep(known: Identity, verdicts: Mapping[str, Verdict]) -> None:
    """Writes what is known; an unknown verdict is worth another try, and is not kept.

    Raises:
      OSError: it cannot be written.
    """
    kernels = {
        name: {"passed": found.passed, "why": found.why} for name, found in verdicts.items() if found.passed is not None
    }
    if kernels:
        content = {"format": FORMAT, "identity": known, "kernels": kernels}
        write_whole(place(known), json.dumps(content, indent=1) + "\n")


def _digest_kernels() -> str:
    """Of the sources of all kernels and the table of fastest settings, which decides how they are compiled."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _KERNELS.rglob("*") if path.suffix in (".py", ".json")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_KERNELS).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


PROGRAM = "vlcache_jax.pallas_kernels.checks"
LIMIT = 300.0  # seconds of a child process: most go into compiling
_GRACE = 10.0  # seconds for a killed process to go
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # say nothing about a kernel
_SIGNALS = {number.value: number.name for number in signal.Signals}

_lock = threading.Lock()
_known: dict[str, Verdict] | None = None  # of this process's chip


def meet(
    kernels: Iterable[str],
    portable: Mapping[str, str] | None = None,
    *,
    again: bool = False,
    show: bool = True,
    limit: float = LIMIT,
) -> dict[str, Verdict]:
    """Makes sure that there is a verdict on each kernel that jax may run on its GPU. Call it before jax uses that.

    On Hopper these are the kernels, and in place of each that fails its portable form; on other GPUs since Ampere the
    portable forms alone.

    Args:
      kernels: by name, in their form for Hopper.
      portable: the name of each one's portable form, where it has one.
      again: check also those that have a verdict.
      show: say on stderr what is done.
      limit: seconds for a child process. A kernel that does not end within has failed, the others get a new process.

    Returns:
      By name; nothing where there is no such GPU. Then no process is started, as where the toolchain is refused.
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
                say(f"the kernels run on XLA: {refused}")
            _known = {name: Verdict(None, refused) for name in own}
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
                runs = "in its portable form" if other is not None and other.passed else "on XLA"
                say(f"{name} runs {runs}; check on {chip.name} {known[name]}")
    return known


def _missing(
    names: Sequence[str],
    known: Mapping[str, Verdict],
    chip: Gpu,
    identity: Identity,
    show: bool,
    limit: float,
) -> dict[str, Verdict]:
    """Finds the verdicts that are not known yet, and keeps them with the others."""
    missing = [name for name in names if name not in known]
    if not missing:
        return {}
    with Progress(f"checking kernels on {chip.name}, once", show=show):
        found = _check(missing, limit)
    try:
        keep(identity, {**known, **found})
    except OSError as error:
        if show:
            say(f"verdicts on the kernels cannot be kept, and are found anew at each start: {error}")
    return found


def verdict_on(kernel: str) -> Verdict:
    """What is known about a kernel on this process's chip. Checks nothing."""
    global _known
    if _known is None:
        chip = chip_of_jax()
        _known = read(identity_of(chip)) if chip is not None else {}
    return _known.get(kernel) or Verdict(None, "never checked")


def chip_of_jax() -> Gpu | None:
    """The GPU that jax will use or uses, as far as can be told without touching jax's backend.

    None: jax will use another device, or there is none, as far as the driver tells, which may not work.
    """
    import jax

    platforms = jax.config.jax_platforms or jax.config.read("jax_platform_name") or "cuda"
    if platforms.split(",")[0] not in ("cuda", "gpu") or not any("-plugin" in name for name in versions()):
        return None
    with contextlib.suppress(OSError):
        return find_chip()
    return None


def _check(kernels: Sequence[str], limit: float) -> dict[str, Verdict]:
    """Each child process finds at least one verdict, or all that is left is unknown."""
    found: dict[str, Verdict] = {}
    while left := [kernel for kernel in kernels if kernel not in found]:
        try:
            lines, ending, in_itself = _run_child(left, limit)
        except OSError as error:
            lines, ending, in_itself = [], f"could not be started: {error}", False
        ended = {
            line["kernel"]: Verdict(line["passed"], shorten(line["why"], 400)) for line in lines if "passed" in line
        }
        begun = [line["kernel"] for line in lines if "kernel" in line and line["kernel"] not in ended]
        busy = [line["busy"] for line in lines if "busy" in line]
        found |= ended
        if busy or not in_itself or not (begun or ended):
            why = f"the device could not be had ({shorten(busy[0], 400)})" if busy else f"the check {ending}"
            found |= {kernel: Verdict(None, why) for kernel in left if kernel not in found}
        elif begun and not (ended and ending.startswith("timed out")):  # else it had less time than it may have
            found[begun[0]] = Verdict(False, ending)
    return found


def _run_child(kernels: Sequence[str], limit: float) -> tuple[list[dict[str, Any]], str, bool]:
    """(lines of its report, how it ended, whether that came from itself)"""
    with tempfile.TemporaryDirectory(prefix="vlcache-contact-", ignore_cleanup_errors=True) as folder:
        report, errors = pathlib.Path(folder, "report"), pathlib.Path(folder, "errors")
        report.touch()
        with open(errors, "wb") as said:
            process = subprocess.Popen(
                command(report, limit, kernels),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
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
        said_last = _last_lines(errors)
        return _lines(report), f"{how}: {said_last}" if said_last else how, -status not in _FROM_OUTSIDE


def command(report: pathlib.Path, limit: float, kernels: Sequence[str]) -> list[str]:
    """What is started: the program, with this process's import path, wherever that has the package from."""
    code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from {PROGRAM} import main; main()"
    return [sys.executable, "-c", code, str(report), str(limit), *kernels]


def _environment() -> dict[str, str]:
    """No more memory than is needed, beside whoever uses the device; a GPU or nothing; NaN is part of the checks."""
    changed = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    without = ("JAX_PLATFORM_NAME", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_DISABLE_JIT", "JAX_ENABLE_X64")
    return {name: value for name, value in os.environ.items() if name not in without} | changed


def _last_lines(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 400))
        return " / ".join(file.read().decode(errors="replace").strip().splitlines()[-3:])


def _lines(report: pathlib.Path) -> list[dict[str, Any]]:
    """Those that are whole."""
    lines = []
    for line in report.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines
