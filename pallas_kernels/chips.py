"""GPUs: the resources of a multiprocessor, by compute capability."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from vlcache_jax.kernel_selftest.gpu import SINCE_AMPERE

KIB = 1024
# Bytes of shared memory of a multiprocessor, by compute capability (CUDA programming guide, technical specifications).
# A program may use them except for RESERVED.
_SHARED_MEMORY = {
    "8.0": 164 * KIB, "8.6": 100 * KIB, "8.7": 164 * KIB, "8.9": 100 * KIB, "9.0": 228 * KIB,
    "10.0": 228 * KIB, "10.3": 228 * KIB, "11.0": 228 * KIB, "12.0": 100 * KIB, "12.1": 100 * KIB,
}  # fmt: skip
RESERVED = 1 * KIB  # bytes of each program, reserved by CUDA
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Chip:
    """A GPU.

    Attributes:
      capability: Compute capability, such as "8.9".
      multiprocessors: Number of multiprocessors.
    """

    capability: str
    multiprocessors: int

    @property
    def has_bulk_copies(self) -> bool:
        """True if TMA copies to shared memory and fills a barrier; before Hopper threads issue copies."""
        return int(self.capability.split(".")[0]) >= 9

    @property
    def converts_8_bits(self) -> bool:
        """True if an instruction converts float8_e4m3fn to float16."""
        major, minor = map(int, self.capability.split("."))
        return (major, minor) >= (8, 9)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a multiprocessor."""
        return _SHARED_MEMORY[self.capability]


HOPPER = Chip("9.0", 132)  # also used if the device is no GPU, as in jax's lowering
_chosen: contextvars.ContextVar[Chip | None] = contextvars.ContextVar("chip to compile for", default=None)


@contextlib.contextmanager
def compiling_for(chip: Chip) -> Iterator[None]:
    """Compile kernels that are traced within for this chip, whatever the default device is."""
    token = _chosen.set(chip)
    try:
        yield
    finally:
        _chosen.reset(token)


def chip_at_hand() -> Chip:
    """Return the chip of `compiling_for`, else that of the default device; `HOPPER` if that is no GPU."""
    if (chosen := _chosen.get()) is not None:
        return chosen
    return chip_of(default_device())


def chip_of(device: jax.Device) -> Chip:
    """Return the chip of a device; `HOPPER` if it is no GPU."""
    if device.platform != "gpu":
        return HOPPER
    return Chip(device.compute_capability, getattr(device, "core_count", None) or HOPPER.multiprocessors)


def default_device() -> jax.Device:
    """Return the device on which jax computes by default."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0] if chosen else jax.devices()[0]


def is_since_ampere(device: jax.Device) -> bool:
    """Return whether the portable kernels run on the device."""
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")) in SINCE_AMPERE
