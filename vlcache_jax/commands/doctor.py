"""`vlcache doctor`: what runs on this machine, and why."""

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
from vlcache_jax.kernel_selftest import Verdict, meet
from vlcache_jax.kernel_selftest.gpu import Gpu, find_chip, find_ptxas, memory, old_driver, refusal
from vlcache_jax.kernel_selftest.selftest import identity_of, place, versions
from vlcache_jax.pallas_kernels.attention import mosaic_gpu
from vlcache_jax.pallas_kernels.checks import CHECKS, PORTABLE
from vlcache_jax.preparation import planner
from vlcache_jax.study.report import environment

Findings = list[tuple[str, str]]
EXCHANGED = 2**26  # bytes, in which several devices show how fast they add up


def examine(again: bool) -> tuple[Findings, list[str]]:
    """Returns (what was found, by name; what to do about each problem).

    Args:
      again: check kernels that have a verdict, too.
    """
    # Before jax opens the device, which may be in use: nothing here needs much of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problems: list[str] = []
    with Progress("examining this machine"):
        try:
            chip = find_chip()
        except OSError as error:
            chip = None
            problems.append(f"{error}: see that `nvidia-smi` works.")
        verdicts = meet(CHECKS, PORTABLE, again=again, show=False)  # before jax holds the device
        try:
            devices = jax.devices()
            platform, runs = devices[0].platform, devices[0].device_kind
        except (RuntimeError, AssertionError) as error:  # the latter where no platform asked for is installed
            devices, platform, runs = [], "", f"nothing: {str(error) or 'no device'}"
            asked = jax.config.jax_platforms or jax.config.read("jax_platform_name")
            how = f"{asked!r} is asked for, say by JAX_PLATFORMS" if asked else "JAX_PLATFORMS=cpu runs on the CPU"
            problems.append(f"jax has no device: {how}.")
    # What is installed and what runs it.
    named = environment("vlcache-jax", "flax", "transformers")["versions"] | versions()
    findings = [("versions", ", ".join(f"{name} {version}" for name, version in named.items())), ("jax uses", runs)]
    findings += _together(devices, problems)
    if chip is None:
        findings.append(("GPU", "none: XLA runs on the CPU. With an NVIDIA GPU, install with `--extra cuda13`"))
    else:
        findings += _of_chip(chip)
        if platform != "gpu" and not (jax.config.jax_platforms or "cuda").startswith("cpu"):  # else so wished
            how = "see with `nvidia-smi` who uses it, and set JAX_PLATFORMS=cuda to be told why"
            if not any(name.endswith("-plugin") for name in named):
                how = "install with `--extra cuda13`"
            elif (old := old_driver(chip.driver, named)) is not None:
                how = old
            problems.append(f"jax does not use {chip.name}: {how}.")
    # Which kernels are used, and why not.
    refused = refusal() if verdicts else None
    if refused is not None:
        problems.append(
            f"the toolchain is refused, and XLA, which is slower, runs in place of the kernels: {refused}. "
            "Install with `--extra cuda13`, which brings a newer CUDA."
        )
    for kernel in CHECKS:
        found = "xla (no NVIDIA GPU since Ampere that jax uses)"
        if refused is not None:
            found = "xla (the toolchain is refused)"
        elif verdicts:
            found = _runs(kernel, verdicts, problems)
        findings.append((kernel, found))
    # Where that is kept, and what else is.
    if chip is not None and verdicts and refused is None:
        path = place(identity_of(chip))
        findings.append(("verdicts", str(path)))
        if not path.is_file() and any(verdict.passed is not None for verdict in verdicts.values()):
            problems.append(
                f"verdicts cannot be kept in {path.parent}, and are found anew at each start: see who owns it."
            )
    findings += [("tuned", _tuned(problems)), ("rates", _rates(problems)), ("programs", _programs())]
    return findings, problems


def _together(devices: list[jax.Device], problems: list[str]) -> Findings:
    """Whether several devices can share a model, and how fast they add up."""
    found = [device for device in devices if device.device_kind == devices[0].device_kind]
    if len(found) < 2:
        return []
    try:
        seconds = check_exchange(Devices.over(found), EXCHANGED // 4)
    except RuntimeError as error:
        problems.append(str(error))
        return [("devices", f"{len(found)}, which do not reach each other")]
    rate = f"{EXCHANGED >> 20} MiB in {1e3 * seconds:.2f} ms ({EXCHANGED / seconds / 1e9:.1f} GB/s)"
    return [("devices", f"{len(found)}, which add up {rate}")]


def _of_chip(chip: Gpu) -> Findings:
    sizes = memory(chip)
    room = "unknown: NVML does not tell"
    if sizes is not None:
        room = "{:.1f} GiB free of {:.1f} GiB".format(*(size / 2**30 for size in sizes))
    ptxas = find_ptxas()
    return [
        ("GPU", f"{chip.name}, compute capability {chip.capability}, driver {chip.driver}"),
        ("memory", room),
        ("ptxas", f"{ptxas.version} ({ptxas.path})" if ptxas else "none"),
    ]


def _runs(kernel: str, verdicts: Mapping[str, Verdict], problems: list[str]) -> str:
    """Which form of a kernel runs on a GPU, and what was found of those before it."""
    found = []
    for implementation, name in (("mosaic_gpu", kernel), ("mosaic_gpu_mma", PORTABLE.get(kernel))):
        verdict = verdicts.get(name or "")
        if verdict is None:
            continue
        found.append(str(verdict))
        if verdict.passed:
            return f"{implementation} ({'; '.join(found)})"
        problems += _problems(name or kernel, verdict)
    return f"xla ({'; '.join(found) or 'it has no kernel for this GPU'})"


def _problems(name: str, verdict: Verdict) -> list[str]:
    if verdict.passed is None:
        return [f"{name} could not be checked: see with `nvidia-smi` who uses the device, and run this again."]
    return [
        f"{name} is wrong on this GPU, and what is slower runs in its place: please report the text above. "
        "Another driver or version is checked by itself, these with `vlcache doctor --again`."
    ]


def _tuned(problems: list[str]) -> str:
    path = mosaic_gpu.TUNED
    if not path.exists():
        return "none: defaults"
    try:
        rows = read_object(path)["rows"]
        shapes = ", ".join(
            f"{row['N']} rows of {row['H']}/{row['K']} heads of {row['D']}"
            + ("" if mosaic_gpu.is_tuned_here(row) else " (passed over: of a jax that uses registers otherwise)")
            for row in rows
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{path} is damaged ({error!r}): remove it, or let `python -m benchmarks.gpu` make it anew.")
        return f"damaged: {path}"
    return f"{shapes} ({path})"


def _rates(problems: list[str]) -> str:
    models = []
    for path in sorted(planner.folder().glob("*.json")):
        try:
            known, _ = planner.read_rates(path)
            if planner.place(known) != path:
                raise ValueError(f"{path} must have the name of what its rates hold for, {planner.place(known).name}")
        except ValueError as error:
            problems.append(f"{error}: remove it, or let `vlcache calibrate` make it anew.")
        else:
            told = ("model", "layers", "width", "dtype", "codec", "device")
            model, layers, width, dtype, codec, device = (known.get(name) for name in told)
            models.append(f"{model} of {layers} layers x {width} in {dtype}, codec {codec}, on {device}")
    if not models:
        return "none: images that are found are linked. `vlcache calibrate MODEL` measures whether that pays"
    return f"{'; '.join(models)} ({planner.folder()})"


def _programs() -> str:
    folders = pathlib.Path(jax.config.jax_compilation_cache_dir or cache_home() / "xla"), folder_of_programs()
    found = []
    for folder in folders:
        sizes = []
        for file in folder.rglob("*"):
            with contextlib.suppress(OSError):  # others write there
                sizes.append(file.stat().st_size)
        found.append(f"{len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB in {folder}")
    return f"{'; '.join(found)}; made anew where they are removed"
