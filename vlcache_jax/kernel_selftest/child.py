"""The child process: checks one kernel after the other, and writes down each before it begins and when it has ended.

What it has written survives it: the parent knows which kernel hung or took the process with it.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
from collections.abc import Callable, Sequence

OVERTIME = 10  # seconds beyond the limit, after which a child that nobody ends any more ends itself


def run(
    report: str | os.PathLike[str],
    limit: float,
    kernels: Sequence[str],
    open_device: Callable[[], None],
    check: Callable[[str], str],
) -> None:
    """Checks until a kernel does not pass: what comes after it needs a device in a good state, and a new process.

    Args:
      report: file to write, a line of JSON at a time: {"kernel"} or {"kernel", "passed", "why"}; {"busy": why} if the
        device could not be had.
      limit: seconds after which the parent ends this process.
      kernels: by name.
      open_device: raises if the device cannot be had.
      check: of a kernel; raises if it is wrong, or says what was found.
    """
    signal.alarm(math.ceil(limit) + OVERTIME)  # kills, also where Python has no turn

    def write(**line: object) -> None:
        with open(pathlib.Path(report), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    try:
        open_device()
    except Exception as error:
        write(busy=_words(error))
        return
    for kernel in kernels:
        write(kernel=kernel)
        try:
            why = check(kernel)
        except Exception as error:
            said = _words(error)
            if "out of memory" in said.lower().replace("_", " "):  # others have taken it since
                write(busy=said)
            else:
                write(kernel=kernel, passed=False, why=said)
            return
        write(kernel=kernel, passed=True, why=why)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)
