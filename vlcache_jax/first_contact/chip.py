"""The GPU as its driver tells of it: no jax, no context on the device, none of its memory."""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Compute capabilities of NVIDIA GPUs since Ampere, for which the portable kernels are made.
SINCE_AMPERE = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")

_NO_DEVICE = 100
_MAJOR, _MINOR = 75, 76  # attributes of a device: its compute capability

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Chip:
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


def find_chip(load: Load = ctypes.CDLL) -> Chip | None:
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
    return Chip(name.value.decode(), ".".join(capability), driver, str(uuid.UUID(bytes=identifier.raw)))


def memory(chip: Chip, load: Load = ctypes.CDLL) -> tuple[int, int] | None:
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
