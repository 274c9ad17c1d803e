"""The GPU through its driver; the libraries are stand-ins that fill in what they are pointed to."""

from __future__ import annotations

import uuid

import pytest

from vlcache_jax.kernel_selftest.gpu import Gpu, find_chip, memory

CHIP = Gpu("NVIDIA H200", "9.0", "580.65.06", "00010203-0405-0607-0809-0a0b0c0d0e0f")


class Cuda:
    """libcuda with one H200; `errors` by the name of a call."""

    def __init__(self, count=1, **errors):
        self.count, self.errors = count, errors

    def __getattr__(self, name):
        def call(*arguments):
            if name in self.errors:
                return self.errors[name]
            target, *rest = (getattr(x, "_obj", x) for x in arguments)
            match name:
                case "cuInit":
                    assert target == 0
                case "cuDeviceGetCount":
                    target.value = self.count
                case "cuDeviceGet":
                    assert rest == [0]
                    target.value = 7
                case "cuDeviceGetName":
                    assert rest[1].value == 7
                    target.value = b"NVIDIA H200"
                case "cuDeviceGetUuid_v2":
                    target.raw = bytes(range(16))
                case "cuDeviceGetAttribute":
                    target.value = {75: 9, 76: 0}[rest[0]]
                case "cuDriverGetVersion":
                    target.value = 13000
                case _:
                    raise AssertionError(name)
            return 0

        return call


class Nvml:
    def __init__(self, kind="GPU", **errors):
        self.kind, self.errors, self.open = kind, errors, 0

    def __getattr__(self, name):
        def call(*arguments):
            if name in self.errors:
                return self.errors[name]
            match name:
                case "nvmlInit_v2":
                    self.open += 1
                case "nvmlShutdown":
                    self.open -= 1
                case "nvmlSystemGetDriverVersion":
                    arguments[0].value = b"580.65.06"
                case "nvmlDeviceGetHandleByUUID":
                    if arguments[0] != f"{self.kind}-{uuid.UUID(bytes=bytes(range(16)))}".encode():
                        return 6
                    arguments[1]._obj.value = 2**40
                case "nvmlDeviceGetMemoryInfo":
                    assert arguments[0].value == 2**40
                    arguments[1]._obj.free, arguments[1]._obj.total = 5 * 2**30, 140 * 2**30
            return 0

        return call


def loader(cuda=None, nvml=None):
    def load(name):
        found = {"libcuda.so.1": cuda, "libnvidia-ml.so.1": nvml}[name]
        if found is None:
            raise OSError(f"{name}: cannot open shared object file")
        return found

    return load


def test_the_first_gpu_is_found_without_jax():
    nvml = Nvml()
    assert find_chip(loader(Cuda(count=4), nvml)) == CHIP
    assert CHIP.is_hopper
    assert nvml.open == 0
    assert find_chip(loader(Cuda())).driver == "of CUDA 13.0"  # in a container without NVML
    assert find_chip(loader(Cuda(), Nvml(nvmlInit_v2=9))).driver == "of CUDA 13.0"


def test_no_driver_and_no_gpu_are_no_error_and_a_broken_driver_is():
    assert find_chip(loader()) is None
    assert find_chip(loader(Cuda(cuInit=100))) is None  # such as CUDA_VISIBLE_DEVICES=""
    assert find_chip(loader(Cuda(count=0))) is None
    with pytest.raises(OSError, match="the CUDA driver returned error 803 from cuInit"):
        find_chip(loader(Cuda(cuInit=803)))
    with pytest.raises(OSError, match="returned error 1 from cuDeviceGetName"):
        find_chip(loader(Cuda(cuDeviceGetName=1)))


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_memory(kind):
    nvml = Nvml(kind)
    assert memory(CHIP, loader(nvml=nvml)) == (5 * 2**30, 140 * 2**30)
    assert nvml.open == 0
    assert memory(CHIP, loader()) is None
    assert memory(CHIP, loader(nvml=Nvml(nvmlDeviceGetMemoryInfo=3))) is None
    assert memory(CHIP, loader(nvml=Nvml("another"))) is None
