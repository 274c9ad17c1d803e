"""Which implementation of a kernel runs, and why."""

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_gpu_interpreted")


class Choice(NamedTuple):
    """One call of a kernel.

    Attributes:
      kernel: "attention" or "link".
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
      implementation: that the caller asks for; None is the best available.
      check: raises NotImplementedError where the Mosaic GPU kernel does not do the case.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the implementation asked for does not do the case, or would be compiled wrong.
    """
    check_name(implementation)
    if implementation is None:
        implementation, why = _best(check)
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
    """Raises NotImplementedError if ptxas, CUDA's assembler, is one that is known to compile masks wrong.

    The versions are those for which jax's own attention kernel refuses masks. 12.9.1, too, calls itself 12.9.
    """
    from jax._src.lib import cuda_versions

    version = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    if 12080 <= version < 12091:
        raise NotImplementedError(
            "mosaic_gpu needs a CUDA before 12.8 or after 12.9, as the ptxas of those miscompiles masks, "
            f"got {version // 1000}.{version % 1000 // 10}"
        )


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


def _best(check: Callable[[], None]) -> tuple[str, str]:
    chosen = jax.config.jax_default_device
    device = chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0] if chosen else jax.devices()[0]
    if not is_hopper(device):
        return "xla", f"no Hopper GPU, but {device.device_kind}"
    try:
        check()
        check_toolchain()
    except NotImplementedError as error:
        return "xla", str(error)
    return "mosaic_gpu", f"{device.device_kind} is a Hopper GPU"
