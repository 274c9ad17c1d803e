"""Choice of the implementation of a kernel, with the reason."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from vlcache_jax.kernel_selftest import result_on
from vlcache_jax.kernel_selftest.gpu import refusal
from vlcache_jax.pallas_kernels.chips import chip_at_hand, default_device, is_since_ampere

INTERPRETED = "_interpreted"
HOPPERS, PORTABLE = FAMILIES = "mosaic_gpu", "mosaic_gpu_mma"
IMPLEMENTATIONS = ("xla", HOPPERS, HOPPERS + INTERPRETED, PORTABLE, PORTABLE + INTERPRETED)

Checks = Mapping[str, Callable[[], None]]  # of a case, by family of kernels


class Choice(NamedTuple):
    """One call of a kernel.

    Attributes:
      kernel: Its name in `checks.CHECKS`.
      case: Shapes and dtype of the call.
      implementation: One of `IMPLEMENTATIONS`.
      why: The reason, in words.
    """

    kernel: str
    case: str
    implementation: str
    why: str


_record: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices of kernels", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Collect the choices of the kernels that are called (in compiled code: traced) within."""
    choices: list[Choice] = []
    token = _record.set(choices)
    try:
        yield choices
    finally:
        _record.reset(token)


def family(implementation: str) -> str:
    """Return the family of kernels of an implementation, interpreted or not; "xla" has none."""
    return implementation.removesuffix(INTERPRETED)


def checked_as(kernel: str, implementation: str) -> str:
    """Return the name under which a kernel of an implementation has checks and a result."""
    return f"{kernel}_mma" if family(implementation) == PORTABLE else kernel


def choose(kernel: str, case: str, implementation: str | None, checks: Checks) -> Choice:
    """Choose for one call, and record the choice.

    Args:
      kernel, case: See `Choice`.
      implementation: Name of the requested implementation; None is the best available. On a chip that is the best that
        has passed its self-test there (`vlcache_jax.kernel_selftest`).
      checks: For each family of Mosaic GPU kernels that has this one, a function that raises NotImplementedError if it
        does not support the case.

    Raises:
      ValueError: There is no such implementation.
      NotImplementedError: The requested implementation does not support the case, or would be compiled wrong.
    """
    check_name(implementation)
    if implementation is None:
        implementation, why = _best(kernel, checks)
    else:
        why = "requested"
        if implementation != "xla":
            if family(implementation) not in checks:
                raise NotImplementedError(f"{family(implementation)} has no kernel of {kernel}")
            checks[family(implementation)]()
        if implementation in (HOPPERS, PORTABLE):
            check_toolchain()
    choice = Choice(kernel, case, implementation, why)
    record = _record.get()
    if record is not None:
        record.append(choice)
    return choice


def check_name(implementation: str | None) -> None:
    """Raise ValueError unless the name is known."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def check_device(implementation: str | None, device: jax.Device) -> None:
    """Raise NotImplementedError if the device cannot run the implementation."""
    if implementation == HOPPERS and not is_hopper(device):
        raise NotImplementedError(f"implementation='mosaic_gpu' needs a Hopper GPU, got {device.device_kind}")
    if implementation == PORTABLE and not is_since_ampere(device):
        raise NotImplementedError(
            f"implementation='mosaic_gpu_mma' needs an NVIDIA GPU (Ampere or later), got {device.device_kind}"
        )


def check_array(implementation: str | None, array: jax.Array) -> None:
    """Check the device of a concrete array. Traced code may be compiled for another device than the default one."""
    if not isinstance(array, jax.core.Tracer):
        check_device(implementation, next(iter(array.devices())))


def check_toolchain() -> None:
    """Raise NotImplementedError if CUDA's assembler is known to compile masks wrong."""
    why = refusal()
    if why is not None:
        raise NotImplementedError(why)


def is_hopper(device: jax.Device) -> bool:
    """Return whether kernels for compute capability 9.0 run on the device."""
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")


def interpreter(choice: Choice) -> Any:
    """Return the value of a Mosaic GPU kernel's `interpret`: None, or the interpreter, which also detects data
    races.
    """
    if not choice.implementation.endswith(INTERPRETED):
        return None
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"{choice.implementation} needs jax 0.12 or later, found {jax.__version__}")
    if int(os.environ.get("NPROC") or os.cpu_count() or 1) < 8:
        # Warpgroups are programs that wait for each other in the threads of XLA's CPU client; too few threads deadlock.
        raise NotImplementedError(f"{choice.implementation} needs 8 threads: set NPROC=16 before jax starts")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


def has_bulk_copies(choice: Choice) -> bool:
    """Return whether TMA also does small copies in the kernels of a choice.

    Portable kernels are interpreted as before Hopper, because no other test covers the copies of threads.
    """
    if family(choice.implementation) == HOPPERS:
        return True
    return not choice.implementation.endswith(INTERPRETED) and chip_at_hand().has_bulk_copies


def _best(kernel: str, checks: Checks) -> tuple[str, str]:
    """Return the first implementation that supports the case and has passed: Hopper's kernels, then the portable
    ones.
    """
    device = default_device()
    kinds = [HOPPERS] * is_hopper(device) + [PORTABLE] * is_since_ampere(device)
    if not kinds:
        return "xla", f"Pallas kernels need an NVIDIA GPU (Ampere or later), got {device.device_kind}"
    whys: list[str] = []
    for kind in kinds:
        if kind not in checks:
            continue
        try:
            checks[kind]()
            check_toolchain()
        except NotImplementedError as error:
            whys = whys or [str(error)]  # the second choice supports no more cases than the first
            continue
        result = result_on(checked_as(kernel, kind))
        why = f"self-test on {device.device_kind} {result}"
        if result.passed:
            return kind, "; ".join([why, *whys])
        if not whys or result.passed is not None:  # the second choice is checked only if the first one has failed
            whys.append(why)
    return "xla", "; ".join(whys) or f"{kinds[0]} has no kernel of {kernel}"
