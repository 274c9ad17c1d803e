"""`vlcache doctor`: a report on this machine, with a remedy for each problem."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Mapping

import jax

from vlcache_jax.common.files import cache_home
from vlcache_jax.common.json_files import read_object
from vlcache_jax.common.progress import Progress
from vlcache_jax.device.mesh import Devices, check_exchange
from vlcache_jax.device.programs.compile_cache import folder as folder_of_programs
from vlcache_jax.kernel_selftest import SelfTestResult, run_selftest
from vlcache_jax.kernel_selftest.gpu import Gpu, find_chip, find_ptxas, memory, old_driver, refusal
from vlcache_jax.kernel_selftest.selftest import identity_of, place, versions
from vlcache_jax.pallas_kernels.attention import mosaic_gpu
from vlcache_jax.pallas_kernels.checks import CHECKS, PORTABLE
from vlcache_jax.preparation import planner
from vlcache_jax.study.report import environment

Findings = list[tuple[str, str]]
EXCHANGED = 2**26  # bytes of the all-reduce that is timed on several devices


def examine(again: bool) -> tuple[Findings, list[str]]:
    """Return (findings by name, a remedy for each problem).

    Args:
      again: True to repeat the self-test of kernels that have a result.
    """
    # Set before jax opens the device, which other processes may use: this command needs little memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problems: list[str] = []
    with Progress("examining this machine"):
        try:
            chip = find_chip()
        except OSError as error:
            chip = None
            problems.append(f"{error}: check that `nvidia-smi` works.")
        results = run_selftest(CHECKS, PORTABLE, again=again, show=False)  # before jax opens the device
        try:
            devices = jax.devices()
            platform, runs = devices[0].platform, devices[0].device_kind
        except (RuntimeError, AssertionError) as error:  # AssertionError: no requested platform is installed
            devices, platform, runs = [], "", f"nothing: {str(error) or 'no device'}"
            requested = jax.config.jax_platforms or jax.config.read("jax_platform_name")
            how = "set JAX_PLATFORMS=cpu to use the CPU"
            if requested:
                how = f"{requested!r} is requested, for example by JAX_PLATFORMS, but not available"
            problems.append(f"jax has no device: {how}.")
    # Versions and devices.
    named = environment("vlcache-jax", "flax", "transformers")["versions"] | versions()
    findings = [("versions", ", ".join(f"{name} {version}" for name, version in named.items())), ("jax uses", runs)]
    findings += _together(devices, problems)
    if chip is None:
        findings.append(("GPU", "none: XLA runs on the CPU. With an NVIDIA GPU, install with `--extra cuda13`"))
    else:
        findings += _gpu(chip)
        if platform != "gpu" and not (jax.config.jax_platforms or "cuda").startswith(
            "cpu"
        ):  # else the user selected the CPU
            how = "look with `nvidia-smi` for processes that use it, and set JAX_PLATFORMS=cuda to see the error"
            if not any(name.endswith("-plugin") for name in named):
                how = "install with `--extra cuda13`"
            elif (old := old_driver(chip.driver, named)) is not None:
                how = old
            problems.append(f"jax does not use {chip.name}: {how}.")
    # Implementation of each kernel, with the reason.
    refused = refusal() if results else None
    if refused is not None:
        problems.append(
            f"the kernels are off, and slower XLA programs replace them, because of the toolchain: {refused}. "
            "Install with `--extra cuda13`, which has a newer CUDA."
        )
    for kernel in CHECKS:
        found = "xla (no NVIDIA GPU since Ampere that jax uses)"
        if refused is not None:
            found = "xla (the toolchain is not supported)"
        elif results:
            found = _runs(kernel, results, problems)
        findings.append((kernel, found))
    findings.append(("linear attention", "xla (it has no kernel)"))
    # Files of results, tuned tiles, rates and programs.
    if chip is not None and results and refused is None:
        path = place(identity_of(chip))
        findings.append(("results", str(path)))
        if not path.is_file() and any(result.passed is not None for result in results.values()):
            problems.append(
                f"results of self-tests cannot be stored in {path.parent}, so they run at each start: make it writable."
            )
    findings += [("tuned", _tuned(problems)), ("rates", _rates(problems)), ("programs", _programs())]
    return findings, problems


def _together(devices: list[jax.Device], problems: list[str]) -> Findings:
    """Return whether several devices reach each other, and the time of an all-reduce."""
    found = [device for device in devices if device.device_kind == devices[0].device_kind]
    if len(found) < 2:
        return []
    try:
        seconds = check_exchange(Devices.over(found), EXCHANGED // 4)
    except RuntimeError as error:
        problems.append(str(error))
        return [("devices", f"{len(found)}, unable to communicate")]
    rate = f"{EXCHANGED >> 20} MiB in {1e3 * seconds:.2f} ms ({EXCHANGED / seconds / 1e9:.1f} GB/s)"
    return [("devices", f"{len(found)}, all-reduce of {rate}")]


def _gpu(chip: Gpu) -> Findings:
    sizes = memory(chip)
    room = "unknown: NVML does not report it"
    if sizes is not None:
        room = "{:.1f} GiB free of {:.1f} GiB".format(*(size / 2**30 for size in sizes))
    ptxas = find_ptxas()
    return [
        ("GPU", f"{chip.name}, compute capability {chip.capability}, driver {chip.driver}"),
        ("memory", room),
        ("ptxas", f"{ptxas.version} ({ptxas.path})" if ptxas else "none"),
    ]


def _runs(kernel: str, results: Mapping[str, SelfTestResult], problems: list[str]) -> str:
    """Return the implementation of a kernel that runs on this GPU, with the results of its self-tests."""
    found = []
    for implementation, name in (("mosaic_gpu", kernel), ("mosaic_gpu_mma", PORTABLE.get(kernel))):
        result = results.get(name or "")
        if result is None:
            continue
        found.append(str(result))
        if result.passed:
            return f"{implementation} ({'; '.join(found)})"
        problems += _problems(name or kernel, result)
    return f"xla ({'; '.join(found) or 'no kernel for this GPU'})"


def _problems(name: str, result: SelfTestResult) -> list[str]:
    if result.passed is None:
        return [
            f"{name} could not be checked: look with `nvidia-smi` for processes that use the device, then try again."
        ]
    return [
        f"{name} returns wrong values on this GPU, and a slower implementation replaces it: please report the text "
        "above. After an update of the driver or of a package it is tested again, or with `vlcache doctor --again`."
    ]


def _tuned(problems: list[str]) -> str:
    path = mosaic_gpu.TUNED
    if not path.exists():
        return "none: defaults"
    try:
        rows = read_object(path)["rows"]
        shapes = ", ".join(
            f"{row['N']} tokens, {row['H']}/{row['K']} heads x {row['D']}"
            + ("" if mosaic_gpu.is_tuned_here(row) else " (skipped: tuned for a jax with other register use)")
            for row in rows
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{path} is damaged ({error!r}): delete it, or replace it with `python -m benchmarks.gpu`.")
        return f"damaged: {path}"
    return f"{shapes} ({path})"


def _rates(problems: list[str]) -> str:
    models = []
    for path in sorted(planner.folder().glob("*.json")):
        try:
            known, _ = planner.read_rates(path)
            if planner.place(known) != path:
                raise ValueError(f"{path} must have the file name of its model and device, {planner.place(known).name}")
        except ValueError as error:
            problems.append(f"{error}: delete it, or replace it with `vlcache calibrate`.")
        else:
            names = ("model", "layers", "width", "dtype", "codec", "device")
            model, layers, width, dtype, codec, device = (known.get(name) for name in names)
            models.append(f"{model} of {layers} layers x {width} in {dtype}, codec {codec}, on {device}")
    if not models:
        return "none: KV of cached images is always loaded. `vlcache calibrate MODEL` measures whether that pays"
    return f"{'; '.join(models)} ({planner.folder()})"


def _programs() -> str:
    folders = pathlib.Path(jax.config.jax_compilation_cache_dir or cache_home() / "xla"), folder_of_programs()
    found = []
    for folder in folders:
        sizes = []
        for file in folder.rglob("*"):
            with contextlib.suppress(OSError):  # other processes delete files
                sizes.append(file.stat().st_size)
        found.append(f"{len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB in {folder}")
    return f"{'; '.join(found)}; deleted files are compiled again"
