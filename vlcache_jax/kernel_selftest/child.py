"""The child process, which checks one kernel after the other, and reports each before its check and after it.

The report survives the process, so the parent finds the kernel that hung or crashed it.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
from collections.abc import Callable, Sequence

OVERTIME = 10  # seconds beyond the limit after which a child whose parent is gone ends itself


def run(
    report: str | os.PathLike[str],
    limit: float,
    kernels: Sequence[str],
    open_device: Callable[[], None],
    check: Callable[[str], str],
) -> None:
    """Check kernels until one fails. The others need a device in a good state, and so a new process.

    Args:
      report: file to write, a line of JSON at a time: {"kernel"} or {"kernel", "passed", "why"}; {"busy": why} if the
        device is not available.
      limit: seconds after which the parent ends this process.
      kernels: names of the kernels.
      open_device: raises if the device is not available.
      check: checks a kernel by name and returns the result in words; raises if the kernel is wrong.
    """
    signal.alarm(math.ceil(limit) + OVERTIME)  # ends the process even if Python code does not run

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
            message = _words(error)
            if "out of memory" in message.lower().replace("_", " "):  # another process has taken the memory
                write(busy=message)
            else:
                write(kernel=kernel, passed=False, why=message)
            return
        write(kernel=kernel, passed=True, why=why)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)
