"""Which implementation of a kernel runs, and why."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from vlcache_jax.kernel_selftest import verdict_on
from vlcache_jax.kernel_selftest.gpu import refusal
from vlcache_jax.pallas_kernels.chips import chip_at_hand, default_device, is_since_ampere

INTERPRETED = "_interpreted"
HOPPERS, PORTABLE = FAMILIES = "mosaic_gpu", "mosaic_gpu_mma"
IMPLEMENTATIONS = ("xla", HOPPERS, HOPPERS + INTERPRETED, PORTABLE, PORTABLE + INTERPRETED)

Checks = Mapping[str, Callable[[], None]]  # of a case, by who would do it


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


def family(implementation: str) -> str:
    """The kernels that an implementation runs, interpreted or not; "xla" has none."""
    return implementation.removesuffix(INTERPRETED)


def checked_as(kernel: str, implementation: str) -> str:
    """The name by which a kernel of an implementation has checks and a verdict."""
    return f"{kernel}_mma" if family(implementation) == PORTABLE else kernel


def choose(kernel: str, case: str, implementation: str | None, checks: Checks) -> Choice:
    """Chooses for one call, and records the choice.

    Args:
      kernel, case: see `Choice`.
      implementation: that the caller asks for; None is the best available. On a chip that is what has been checked
        there: see `vlcache_jax.kernel_selftest`.
      checks: of each family of Mosaic GPU kernels that has this one, what raises NotImplementedError where it does not
        do the case.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the implementation asked for does not do the case, or would be compiled wrong.
    """
    check_name(implementation)
    if implementation is None:
        implementation, why = _best(kernel, checks)
    else:
        why = "asked for"
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
    """Raises ValueError unless the name is known."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")


def check_device(implementation: str | None, device: jax.Device) -> None:
    """Raises NotImplementedError if the device cannot run the implementation."""
    if implementation == HOPPERS and not is_hopper(device):
        raise NotImplementedError(f"implementation='mosaic_gpu' needs a Hopper GPU, got {device.device_kind}")
    if implementation == PORTABLE and not is_since_ampere(device):
        raise NotImplementedError(
            f"implementation='mosaic_gpu_mma' needs an NVIDIA GPU since Ampere, got {device.device_kind}"
        )


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
    if not choice.implementation.endswith(INTERPRETED):
        return None
    if jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"{choice.implementation} needs jax 0.12 or later, found {jax.__version__}")
    if int(os.environ.get("NPROC") or os.cpu_count() or 1) < 8:
        # Warpgroups are programs that wait for each other in the threads of XLA's CPU client: too few, and all wait.
        raise NotImplementedError(f"{choice.implementation} needs 8 threads: set NPROC=16 before jax starts")
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


def has_bulk_copies(choice: Choice) -> bool:
    """Whether TMA copies what is small, too, in the kernels of a choice. Those for every GPU are interpreted as before
    Hopper: the copies of threads are the ones that no other test sees."""
    if family(choice.implementation) == HOPPERS:
        return True
    return not choice.implementation.endswith(INTERPRETED) and chip_at_hand().has_bulk_copies


def _best(kernel: str, checks: Checks) -> tuple[str, str]:
    """The first that does the case and has been checked: on Hopper its own kernels, then those of every GPU."""
    device = default_device()
    kinds = [HOPPERS] * is_hopper(device) + [PORTABLE] * is_since_ampere(device)
    if not kinds:
        return "xla", f"no NVIDIA GPU since Ampere, but {device.device_kind}"
    whys: list[str] = []
    for kind in kinds:
        if kind not in checks:
            continue
        try:
            checks[kind]()
            check_toolchain()
        except NotImplementedError as error:
            whys = whys or [str(error)]  # the second choice does no more cases than the first
            continue
        verdict = verdict_on(checked_as(kernel, kind))
        why = f"check on {device.device_kind} {verdict}"
        if verdict.passed:
            return kind, "; ".join([why, *whys])
        if not whys or verdict.passed is not None:  # a second choice is checked only where the first one has failed
            whys.append(why)
    return "xla", "; ".join(whys) or f"{kinds[0]} has no kernel of {kernel}"
