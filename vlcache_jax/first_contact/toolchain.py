"""The assembler of the kernels, CUDA's ptxas: which one jax runs, and versions that are known to be wrong."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
from collections.abc import Collection
from typing import NamedTuple

# The least driver of what jax was installed with, by CUDA's release notes: every 12.x, or 13.x, runs on it.
_DRIVERS = {"jax-cuda13-plugin": (580, "CUDA 13"), "jax-cuda12-plugin": (525, "CUDA 12")}
_ROOTS = ("/usr/local/cuda", "/opt/cuda")
_OF_WHEELS = ("cu13", "cuda_nvcc")  # folders of nvidia-cuda-nvcc and nvidia-cuda-nvcc-cu12
_LIMIT = 10.0  # seconds for an answer that takes 6 ms


class Ptxas(NamedTuple):
    path: str
    version: str


def find_ptxas() -> Ptxas | None:
    """The ptxas that assembles kernels, without touching a GPU: the first that tells its version.

    Looked for as jax's Mosaic GPU does: in `cuda_sdk_lib` here, in PATH, in CUDA's usual folders, and only then in
    jax's wheels. Where nvJitLink assembles (jax 0.12), that is the wheel's, whatever ptxas there is.
    """
    wheels = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path("cuda_sdk_lib", "bin"), *map(pathlib.Path, os.get_exec_path())]
    folders += [pathlib.Path(root, "bin") for root in _ROOTS]
    for location in (wheels and wheels.submodule_search_locations) or ():
        folders += [pathlib.Path(location, name, "bin") for name in _OF_WHEELS]
    for folder in folders:
        path = str(folder.absolute() / "ptxas")
        if os.access(path, os.X_OK) and (version := _version(path)):
            return Ptxas(path, version)
    return None


def _version(path: str) -> str | None:
    try:
        asked = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(rb"\bV(\d+\.\d+\.\d+)\b", asked.stdout)
    return found and found[1].decode()


def refusal() -> str | None:
    """Why no kernel runs, if CUDA is of a version whose ptxas is known to compile masks wrong.

    The versions are those for which jax's own attention kernel refuses masks. 12.9.1, too, calls itself 12.9. It is the
    version of the CUDA that jax has loaded; a ptxas of another one, from PATH, is left to the checks.
    """
    from jax._src.lib import cuda_versions

    version = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    if not 12080 <= version < 12091:
        return None
    return (
        "mosaic_gpu needs a CUDA before 12.8 or after 12.9, as the ptxas of those miscompiles masks, "
        f"got {version // 1000}.{version % 1000 // 10}"
    )


def old_driver(driver: str, packages: Collection[str]) -> str | None:
    """What to do about a GPU's driver that is too old for jax's plugin; None where it is not, or nobody can tell.

    Args:
      driver: its version, as the driver tells it.
      packages: names of what is installed.
    """
    major = re.match(r"(\d+)\.", driver)
    for name, (least, cuda) in _DRIVERS.items():
        if name in packages and major is not None and int(major[1]) < least:
            other = " or install with `--extra cuda12`" if name == "jax-cuda13-plugin" else ""
            return f"{cuda} needs driver {least} or later, and {driver} is installed: update it{other}"
    return None
