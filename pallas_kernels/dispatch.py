"""Which implementation of a kernel runs, and why."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from vlcache_jax.first_contact import verdict_on
from vlcache_jax.first_contact.toolchain import refusal

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_gpu_interpreted")


class Choice(NamedTuple):
    """One call of a kernel.

    Attributes:
      kernel: by its name in `checks.CHECKS`.
      case: shapes and dtype of the call.
      implementation: one of `IMPLEMENTATIONS`.
      why: the reason, in words.
    """

    kernel: str
    case: str
    implementation: str
    why: str


_record: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices of kernels", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Collects the choices of the kernels that are called (in compiled code: traced) within."""
    choices: list[Choice] = []
    token = _record.set(choices)
    try:
        yield choices
    finally:
        _record.reset(token)


def choose(kernel: str, case: str, implementation: str | None, check: Callable[[], None]) -> Choice:
    """Chooses for one call, and records the choice.

    Args:
      kernel, case: see `Choice`.
      implementation: that the caller asks for; None is the best available. On a chip that is what has been checked
        there: see `vlcache_jax.first_contact`.
      check: raises NotImplementedError where the Mosaic GPU kernel does not do the case.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the implementation asked for does not do the case, or would be compiled wrong.
    """
    check_name(implementation)
    if implementation is None:
        implementation, why = _best(kernel, check)
    else:
        why = "asked for"
        if implementation != "xla":
            check()
        if implementation == "mosaic_gpu":
            check_toolchain()
    choice = Choice(kernel, case, implementation, why)
    record = _record.get()
    if record is not None:
        record.append(choice)
    return choice


def check_name(implementation: str | None) -> None:
    """Raises ValueError unless the name is known."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def check_device(implementation: str | None, device: jax.Device) -> None:
    """Raises NotImplementedError if the device cannot run the implementation."""
    if implementation == "mosaic_gpu" and not is_hopper(device):
        raise NotImplementedError(f"implementation='mosaic_gpu' needs a Hopper GPU, got {device.device_kind}")


def check_array(implementation: str | None, array: jax.Array) -> None:
    """The same for an array at hand. Code that is traced may be compiled for another device than the default one."""
    if not isinstance(array, jax.core.Tracer):
        check_device(implementation, next(iter(array.devices())))


def check_toolchain() -> None:
    """Raises NotImplementedError if CUDA's assembler is one that is known to compile masks wrong."""
    why = refusal()
    if why is not None:
        raise NotImplementedError(why)


def is_hopper(device: jax.Device) -> bool:
    """Whether kernels for compute capability 9.0 run on the device."""
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")


def interpreter(choice: Choice) -> Any:
    """What a Mosaic GPU kernel's `interpret` is to be: None, or the interpreter, which also looks for data races."""
    if choice.implementation != "mosaic_gpu_interpreted":
        return None
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"mosaic_gpu_interpreted needs jax 0.12 or later, found {jax.__version__}")
    if int(os.environ.get("NPROC") or os.cpu_count() or 1) < 8:
        # Warpgroups are programs that wait for each other in the threads of XLA's CPU client: too few, and all wait.
        raise NotImplementedError("mosaic_gpu_interpreted needs 8 threads: set NPROC=16 before jax starts")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


def _best(kernel: str, check: Callable[[], None]) -> tuple[str, str]:
    chosen = jax.config.jax_default_device
    device = chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0] if chosen else jax.devices()[0]
    if not is_hopper(device):
        return "xla", f"no Hopper GPU, but {device.device_kind}"
    try:
        check()
        check_toolchain()
    except NotImplementedError as error:
        return "xla", str(error)
    verdict = verdict_on(kernel)
    return "mosaic_gpu" if verdict.passed else "xla", f"check on {device.device_kind} {verdict}"
