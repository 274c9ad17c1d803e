"""The GPU as its driver describes it, found without JAX or device memory, and ptxas, the kernels' assembler."""

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

# The oldest driver for each JAX plugin by CUDA's release notes: every 12.x, or 13.x, runs on it.
_DRIVERS = {"jax-cuda13-plugin": (580, "CUDA 13"), "jax-cuda12-plugin": (525, "CUDA 12")}
_ROOTS = ("/usr/local/cuda", "/opt/cuda")
_OF_WHEELS = ("cu13", "cuda_nvcc")  # folders of nvidia-cuda-nvcc and nvidia-cuda-nvcc-cu12
_LIMIT = 10.0  # seconds for `ptxas --version`, which takes 6 ms


class Ptxas(NamedTuple):
    path: str
    version: str


def find_ptxas() -> Ptxas | None:
    """Return the ptxas that assembles kernels, or None. It is the first that reports its version. Uses no GPU.

    The order is that of JAX's Mosaic GPU: `cuda_sdk_lib` in the current folder, PATH, CUDA's usual folders, JAX's
    wheels. If nvJitLink assembles (JAX 0.12), the wheel's version is used, whatever ptxas is installed.
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
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(rb"\bV(\d+\.\d+\.\d+)\b", done.stdout)
    return found and found[1].decode()


def refusal() -> str | None:
    """Return why no kernel may run, if the ptxas of this CUDA version compiles masks wrong, else None.

    The versions are those for which JAX's own attention kernel rejects masks. 12.9.1 also reports 12.9. The test
    concerns the CUDA that JAX has loaded. The self-test checks a ptxas of another version in PATH.
    """
    from jax._src.lib import cuda_versions

    version = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    if not 12080 <= version < 12091:
        return None
    return (
        "mosaic_gpu needs CUDA before 12.8 or after 12.9, because ptxas 12.8 and 12.9 miscompile masks, "
        f"got {version // 1000}.{version % 1000 // 10}"
    )


def old_driver(driver: str, packages: Collection[str]) -> str | None:
    """Return what to do if a GPU's driver is too old for JAX's plugin. None: it is not, or its version is unknown.

    Args:
      driver: version that the driver reports.
      packages: names of the installed packages.
    """
    major = re.match(r"(\d+)\.", driver)
    for name, (min_driver, cuda) in _DRIVERS.items():
        if name in packages and major is not None and int(major[1]) < min_driver:
            other = " or install with `--extra cuda12`" if name == "jax-cuda13-plugin" else ""
            return f"{cuda} needs driver {min_driver} or later, but {driver} is installed: update it{other}"
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
      name: name, such as "NVIDIA H200".
      capability: compute capability, such as "9.0".
      driver: version of the driver.
      uuid: identifier in NVML.
    """

    name: str
    capability: str
    driver: str
    uuid: str

    @property
    def is_hopper(self) -> bool:
        """True if kernels for compute capability 9.0 run on it."""
        return self.capability.startswith("9.")

    @property
    def is_since_ampere(self) -> bool:
        """True if the portable kernels run on it."""
        return self.capability in SINCE_AMPERE


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def find_chip(load: Load = ctypes.CDLL) -> Gpu | None:
    """Return the first GPU that CUDA shows to this process, or None. The driver reads CUDA_VISIBLE_DEVICES.

    Args:
      load: loads a library by its name.

    Raises:
      OSError: the driver is installed but does not work.
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
    """Return the bytes (free, total) of a GPU's memory, or None if NVML does not report them."""
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
    """Yield NVML, or None if it is missing, as in some containers."""
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
        raise OSError(f"the CUDA driver returned error {status} from {call}")
