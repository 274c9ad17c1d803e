"""Meets the chip: reads the verdicts on it, and has a child process find those that are missing."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from vlcache_jax.checks import shorten
from vlcache_jax.first_contact import verdicts
from vlcache_jax.first_contact.chip import Chip, find_chip
from vlcache_jax.first_contact.toolchain import refusal
from vlcache_jax.first_contact.verdicts import Verdict
from vlcache_jax.progress import Progress, say

PROGRAM = "vlcache_jax.pallas_kernels.checks"
LIMIT = 300.0  # seconds of a child process: most go into compiling
_GRACE = 10.0  # seconds for a killed process to go
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # say nothing about a kernel
_SIGNALS = {number.value: number.name for number in signal.Signals}

_lock = threading.Lock()
_known: dict[str, Verdict] | None = None  # of this process's chip


def meet(kernels: Iterable[str], *, again: bool = False, show: bool = True, limit: float = LIMIT) -> dict[str, Verdict]:
    """Makes sure that there is a verdict on each kernel, if jax is going to use a Hopper GPU. Call it before jax does.

    Args:
      kernels: by name.
      again: check also those that have a verdict.
      show: say on stderr what is done.
      limit: seconds for a child process. A kernel that does not end within has failed, the others get a new process.

    Returns:
      By kernel; nothing where there is no such GPU. Then no process is started, as where the toolchain is refused.
    """
    global _known
    chip = chip_of_jax()
    if chip is None or not chip.is_hopper:
        return {}
    with _lock:
        refused = refusal()
        if refused is not None:
            if show:
                say(f"the kernels run on XLA: {refused}")
            _known = {kernel: Verdict(None, refused) for kernel in kernels}
            return _known
        identity = verdicts.identity(chip)
        known = {} if again else verdicts.read(identity)
        missing = [kernel for kernel in kernels if kernel not in known]
        if missing:
            with Progress(f"checking kernels on {chip.name}, once", show=show):
                known |= _check(missing, limit)
            try:
                verdicts.keep(identity, known)
            except OSError as error:
                if show:
                    say(f"verdicts on the kernels cannot be kept, and are found anew at each start: {error}")
        _known = known
    if show:
        for kernel, verdict in known.items():
            if not verdict.passed:
                say(f"{kernel} runs on XLA; check on {chip.name} {verdict}")
    return known


def verdict_on(kernel: str) -> Verdict:
    """What is known about a kernel on this process's chip. Checks nothing."""
    global _known
    if _known is None:
        chip = chip_of_jax()
        _known = verdicts.read(verdicts.identity(chip)) if chip is not None else {}
    return _known.get(kernel) or Verdict(None, "never checked")


def chip_of_jax() -> Chip | None:
    """The GPU that jax will use or uses, as far as can be told without touching jax's backend.

    None: jax will use another device, or there is none, as far as the driver tells, which may not work.
    """
    import jax

    platforms = jax.config.jax_platforms or jax.config.read("jax_platform_name") or "cuda"
    if platforms.split(",")[0] not in ("cuda", "gpu") or not any("-plugin" in name for name in verdicts.versions()):
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
