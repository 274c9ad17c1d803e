"""GPUs as the kernels know them: what a multiprocessor has, by compute capability."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from vlcache_jax.kernel_selftest.gpu import SINCE_AMPERE

KIB = 1024
# Bytes of shared memory of a multiprocessor, by compute capability (CUDA programming guide, technical specifications).
# A program may use what is left of them with RESERVED of its own.
_SHARED_MEMORY = {
    "8.0": 164 * KIB, "8.6": 100 * KIB, "8.7": 164 * KIB, "8.9": 100 * KIB, "9.0": 228 * KIB,
    "10.0": 228 * KIB, "10.3": 228 * KIB, "11.0": 228 * KIB, "12.0": 100 * KIB, "12.1": 100 * KIB,
}  # fmt: skip
RESERVED = 1 * KIB  # of each program, by CUDA
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Chip:
    """A GPU.

    Attributes:
      capability: compute capability, such as "8.9".
      multiprocessors: how many it has.
    """

    capability: str
    multiprocessors: int

    @property
    def has_bulk_copies(self) -> bool:
        """Whether copies to shared memory are TMA's, which fill a barrier; before Hopper threads issue them."""
        return int(self.capability.split(".")[0]) >= 9

    @property
    def converts_8_bits(self) -> bool:
        """Whether it has an instruction that makes float16 of float8_e4m3fn."""
        major, minor = map(int, self.capability.split("."))
        return (major, minor) >= (8, 9)

    @property
    def shared_memory(self) -> int:
        """Bytes of a multiprocessor."""
        return _SHARED_MEMORY[self.capability]


HOPPER = Chip("9.0", 132)  # also stands for a device that is none, as in jax's lowering
_chosen: contextvars.ContextVar[Chip | None] = contextvars.ContextVar("chip to compile for", default=None)


@contextlib.contextmanager
def compiling_for(chip: Chip) -> Iterator[None]:
    """Kernels that are traced within are for this chip, whatever the default device is."""
    token = _chosen.set(chip)
    try:
        yield
    finally:
        _chosen.reset(token)


def chip_at_hand() -> Chip:
    """Of `compiling_for`, else that of the default device; `HOPPER` where that is no GPU."""
    if (chosen := _chosen.get()) is not None:
        return chosen
    return chip_of(default_device())


def chip_of(device: jax.Device) -> Chip:
    """The chip that a device is; `HOPPER` where it is no GPU."""
    if device.platform != "gpu":
        return HOPPER
    return Chip(device.compute_capability, getattr(device, "core_count", None) or HOPPER.multiprocessors)


def default_device() -> jax.Device:
    """On which jax computes unless it is told otherwise."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0] if chosen else jax.devices()[0]


def is_since_ampere(device: jax.Device) -> bool:
    """Whether the portable kernels run on the device."""
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")) in SINCE_AMPERE
