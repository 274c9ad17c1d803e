"""Verdicts on kernels, kept in a file for each GPU, driver, version and state of the kernels."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from vlcache_jax.fields import FLAG, OBJECT, TEXT, check_fields, one_of, read_object
from vlcache_jax.files import cache_home, write_whole
from vlcache_jax.first_contact.chip import Chip
from vlcache_jax.first_contact.toolchain import find_ptxas

FORMAT = "vlcache-verdicts/1"
_KERNELS = pathlib.Path(__file__).parents[1] / "pallas_kernels"
# What compiles kernels and launches them.
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12",
)  # fmt: skip

Identity = dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """Of a kernel on a chip.

    Attributes:
      passed: None is unknown: it could not be checked.
      why: what was found, in words.
    """

    passed: bool | None
    why: str

    def __str__(self) -> str:
        if self.passed is None:
            return f"unknown: {self.why}; run `vlcache doctor`"
        return f"{'passed' if self.passed else 'failed'}: {self.why}"


def identity(chip: Chip) -> Identity:
    """What verdicts hold for. Whatever may change what runs on the chip is in it, the machine's own ptxas, too."""
    ptxas = find_ptxas()
    return {
        "device": chip.name,
        "compute capability": chip.capability,
        "driver": chip.driver,
        **versions(),
        "ptxas": ptxas.version if ptxas else "none",
        "kernels": _digest_kernels(),
    }


def versions() -> dict[str, str]:
    """Of jax and of what makes it run on a GPU: those packages that are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def place(known: Identity) -> pathlib.Path:
    """The file of an identity's verdicts."""
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return cache_home() / "verdicts" / f"{digest[:16]}.json"


def read(known: Identity) -> dict[str, Verdict]:
    """The verdicts by kernel; none where the file is missing, damaged or of another identity."""
    path = place(known)
    try:
        content = read_object(path)
        check_fields(content, {"format": one_of(FORMAT), "identity": OBJECT, "kernels": OBJECT}, path, required=True)
        if content["identity"] != known:
            return {}
        for name, entry in content["kernels"].items():
            check_fields(content["kernels"], {name: OBJECT}, path)
            check_fields(entry, {"passed": FLAG, "why": TEXT}, path, required=True)
    except ValueError:
        return {}
    return {name: Verdict(entry["passed"], entry["why"]) for name, entry in content["kernels"].items()}


def keep(known: Identity, verdicts: Mapping[str, Verdict]) -> None:
    """Writes what is known; an unknown verdict is worth another try, and is not kept.

    Raises:
      OSError: it cannot be written.
    """
    kernels = {
        name: {"passed": found.passed, "why": found.why} for name, found in verdicts.items() if found.passed is not None
    }
    if kernels:
        content = {"format": FORMAT, "identity": known, "kernels": kernels}
        write_whole(place(known), json.dumps(content, indent=1) + "\n")


def _digest_kernels() -> str:
    """Of the sources of all kernels and the table of fastest settings, which decides how they are compiled."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _KERNELS.rglob("*") if path.suffix in (".py", ".json")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_KERNELS).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
