"""The GPU as its driver describes it, without jax or memory on the device; and ptxas, the kernels' assembler."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import re
import subprocess
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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


# Compute capabilities of NVIDIA GPUs since Ampere, for which the portable kernels are made.
SINCE_AMPERE = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")

_NO_DEVICE = 100
_MAJOR, _MINOR = 75, 76  # attributes of a device: its compute capability

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
      name: such as "NVIDIA H200".
      capability: compute capability, such as "9.0".
      driver: its version.
      uuid: by which NVML knows it.
    """

    name: str
    capability: str
    driver: str
    uuid: str

    @property
    def is_hopper(self) -> bool:
        """Whether kernels for compute capability 9.0 run on it."""
        return self.capability.startswith("9.")

    @property
    def is_since_ampere(self) -> bool:
        """Whether the portable kernels run on it."""
        return self.capability in SINCE_AMPERE


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def find_chip(load: Load = ctypes.CDLL) -> Gpu | None:
    """The first GPU that CUDA shows this process (CUDA_VISIBLE_DEVICES is the driver's to read), or None.

    Args:
      load: of libraries by their names.

    Raises:
      OSError: there is a driver, and it does not work.
    """
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return None
    status = cuda.cuInit(0)
    if status == _NO_DEVICE:
        return None
    _check("cuInit", status)
    device, number = ctypes.c_int(), ctypes.c_int()
    _check("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(number)))
    if not number.value:
        return None
    _check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), 0))
    name, identifier = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    _check("cuDeviceGetName", cuda.cuDeviceGetName(name, len(name), device))
    get_uuid = cuda.cuDeviceGetUuid_v2 if hasattr(cuda, "cuDeviceGetUuid_v2") else cuda.cuDeviceGetUuid  # an old driver
    _check("cuDeviceGetUuid", get_uuid(identifier, device))
    capability = []
    for attribute in (_MAJOR, _MINOR):
        _check("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device))
        capability.append(str(number.value))
    _check("cuDriverGetVersion", cuda.cuDriverGetVersion(ctypes.byref(number)))
    driver = _driver_version(load) or f"of CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    return Gpu(name.value.decode(), ".".join(capability), driver, str(uuid.UUID(bytes=identifier.raw)))


def memory(chip: Gpu, load: Load = ctypes.CDLL) -> tuple[int, int] | None:
    """Bytes (free, in all) of a GPU, whoever uses them; None where NVML does not tell."""
    with _nvml(load) as nvml:
        if nvml is None:
            return None
        handle, found = ctypes.c_void_p(), _Memory()
        for kind in ("GPU", "MIG"):
            if not nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{chip.uuid}".encode(), ctypes.byref(handle)):
                return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)) else (found.free, found.total)
    return None


def _driver_version(load: Load) -> str:
    with _nvml(load) as nvml:
        version = ctypes.create_string_buffer(80)
        if nvml is None or nvml.nvmlSystemGetDriverVersion(version, len(version)):
            return ""
        return version.value.decode()


@contextlib.contextmanager
def _nvml(load: Load) -> Iterator[Any]:
    """NVML, which containers may lack, or None."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2():
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _check(call: str, status: int) -> None:
    if status:
        raise OSError(f"the CUDA driver answers {call} with error {status}")
