"""Compiled programs on disk.

jax keeps compiled programs by what is lowered, and tracing and lowering is most of what a start then waits for. Here
they are found by what they are made of, too: the package's code, the model's shapes and the program's sizes. Where
only code has changed, a program is traced and lowered, and found by that.

Files are as trustworthy as the folder of the user's own caches that they are in: whoever can write there can run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import pickle
import platform
import sys
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from vlcache_jax.device.programs.base import Program
from vlcache_jax.device.programs.shapes import Shapes
from vlcache_jax.files import cache_home, make_folder, write_whole
from vlcache_jax.pallas_kernels.dispatch import Choice

MOST_BYTES = 2**31  # of all files; beyond that those go that nobody has read for longest
PACKAGE = __name__.partition(".")[0]
_TRACED = tuple(f"{PACKAGE}.{wing}" for wing in ("codecs", "compress", "device", "models", "pallas_kernels", "reuse"))
_DECIDING = ("XLA_", "VLCACHE_")  # variables of the environment
_CHECKSUM = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)

Made = tuple[jax.stages.Compiled, tuple[Choice, ...]]


class UntoldError(Exception):
    """Something that decides what is computed cannot be told."""


class ProgramFiles:
    """Those of one engine.

    Args:
      shapes: of the engine.
      options: of the compiler.
    """

    def __init__(self, shapes: Shapes, options: Mapping[str, Any]):
        self._options = dict(options)
        self._machine = _machine() + json.dumps(self._options, sort_keys=True)
        self._engine = "\n".join((code(), self._machine, _engine(shapes)))

    @classmethod
    def of(cls, shapes: Shapes, options: Mapping[str, Any]) -> ProgramFiles | None:
        """None: jax keeps them, see `use_compilation_cache`, or they cannot be kept."""
        if is_kept_by_jax() or not _are_kept(shapes.devices.all):
            return None
        try:
            files = cls(shapes, options)
            make_folder(folder())
            _make_room()
        except (UntoldError, OSError) as error:
            _log.debug("compiled programs are not kept: %s", error)
            return None
        return files

    def find(self, program: Program[Any]) -> Made | None:
        """A program that was made of the same before; None: there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UntoldError):
            index = json.loads(self._index(program).read_text(encoding="utf-8"))
            compiled = _read(folder() / index["program"])
            if compiled is not None:
                return compiled, tuple(Choice(*choice) for choice in index["choices"])
        return None

    def make(
        self, program: Program[Any], lowered: jax.stages.Lowered, choices: tuple[Choice, ...]
    ) -> jax.stages.Compiled:
        """Compiles a program, unless what was lowered is known; from then on `find` finds it."""
        digest = _digest(self._machine, lowered.as_text(), str(lowered.in_tree), str(lowered.out_tree))
        compiled = _read(folder() / digest)
        try:
            if compiled is None:
                compiled = lowered.compile(self._options)
                if is_kept_by_jax():  # what jax has read from disk would lack functions when it is written again
                    return compiled
                _write(folder() / digest, compiled)
            write_whole(self._index(program), json.dumps({"program": digest, "choices": choices}))
        except (OSError, NotImplementedError, UntoldError) as error:  # a full disk keeps nobody from computing
            _log.debug("%s is not kept: %s", program, error)
        assert compiled is not None
        return compiled

    def _index(self, program: Program[Any]) -> pathlib.Path:
        return folder() / f"{_digest(self._engine, told(program))}.json"


def use_compilation_cache(devices: Sequence[jax.Device]) -> None:
    """Sees that programs for these devices are kept on disk: here, or where these are several or GPUs, as jax does it.
    A user who has decided where or whether is obeyed."""
    if not (_are_kept(devices) or is_kept_by_jax()):
        jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _are_kept(devices: Sequence[jax.Device]) -> bool:
    """Whether that has been seen to work: not yet on GPUs."""
    is_plain = len(devices) == 1 and devices[0].platform == "cpu" and jax.config.jax_default_device is None
    return is_plain and jax.config.jax_enable_compilation_cache


def folder() -> pathlib.Path:
    """Where they are."""
    return cache_home() / "programs"


def is_kept_by_jax() -> bool:
    """Whether jax keeps what it compiles."""
    return jax.config.jax_compilation_cache_dir is not None or "JAX_COMPILATION_CACHE_DIR" in os.environ


def told(value: Any) -> str:
    """Everything that makes a value what it is, the same in every process.

    Raises:
      UntoldError: it is of a kind of which that is not known, for example a class of somebody else's.
    """
    if value is None or isinstance(value, bool | int | float | str | np.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(told, value))}]"
    kind = type(value)
    if dataclasses.is_dataclass(value) and kind.__module__.startswith(f"{PACKAGE}."):
        fields = (f"{field.name}={told(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(fields)})"
    raise UntoldError(f"{kind.__module__}.{kind.__qualname__}")


def code() -> str:
    """A digest of the package's code as it is on disk and in memory, where somebody may have replaced a function."""
    return _digest(_sources(), *_loaded())


@functools.cache
def _sources() -> str:
    return _digest(*(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in source_files()))


def source_files() -> list[tuple[str, pathlib.Path]]:
    """The package's files, by their names in it. In a checkout some wings are links."""
    root = sys.modules[PACKAGE].__path__[0]
    paths = (pathlib.Path(folder, file) for folder, _, files in os.walk(root, followlinks=True) for file in files)
    return sorted((str(path.relative_to(root)), path) for path in paths if path.suffix == ".py")


def _loaded() -> Iterator[str]:
    """What stands in the modules that programs are traced from."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(_TRACED):
            yield from _stand(name, module)
            for member, value in sorted(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    yield from _stand(f"{name}.{member}", value)


def _stand(name: str, where: Any) -> Iterator[str]:
    for member, value in sorted(vars(where).items()):
        # Python itself adds attributes to classes as they are used, and no functions.
        if isinstance(value, types.FunctionType) or not member.startswith("__"):
            yield f"{name}.{member} {_stands(value)}"


def _stands(value: Any) -> str:
    """Where a function is from, or what a constant is; of other things only what they are."""
    if isinstance(value, types.FunctionType):
        return f"{value.__module__} {value.__qualname__} {value.__code__.co_firstlineno}"
    if isinstance(value, bool | int | float | str):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _machine() -> str:
    """What a compiled program depends on besides its text."""
    device = jax.devices()[0]
    settings = {name: repr(value) for name, value in jax.config.values.items()}
    variables = {name: value for name, value in os.environ.items() if name.startswith(_DECIDING)}
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    cores = os.cpu_count(), len(getattr(os, "sched_getaffinity", lambda _: [])(0)), os.environ.get("NPROC")
    machine = sys.version, device.device_kind, device.client.platform_version, _processor(), cores
    return json.dumps([settings, variables, versions, machine], sort_keys=True)


@functools.cache
def _processor() -> list[str]:
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = "model name", "flags", "CPU part", "Features"
        return sorted({line for line in lines if line.partition("\t")[0].strip() in names})
    return [platform.machine(), platform.processor(), platform.version()]


def _engine(shapes: Shapes) -> str:
    sizes = (
        shapes.config, shapes.num_slots, shapes.max_pages, shapes.ladder, shapes.implementation, shapes.kv,
        shapes.kept_tokens, shapes.compressed_slots,
    )  # fmt: skip
    weights = shapes.visual, shapes.normalization, shapes.text, shapes.head
    leaves, tree = jax.tree.flatten(weights)
    return "\n".join((told(sizes), str(tree), *(f"{leaf.shape} {leaf.dtype}" for leaf in leaves)))


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}\n".encode())
    return digest.hexdigest()


def _write(path: pathlib.Path, compiled: jax.stages.Compiled) -> None:
    content = zlib.compress(pickle.dumps(serialize_executable.serialize(compiled)), 1)
    write_whole(path, hashlib.sha256(content).digest() + content)


def _read(path: pathlib.Path) -> jax.stages.Compiled | None:
    """None: there is none, or it is damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[_CHECKSUM:]).digest() != content[:_CHECKSUM]:
            raise ValueError("its bytes are others than were written")
        os.utime(path)
        executable, takes, gives = pickle.loads(zlib.decompress(content[_CHECKSUM:]))
        return serialize_executable.deserialize_and_load(executable, takes, gives, execution_devices=jax.devices()[:1])
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with it, it can be compiled again
        _log.debug("%s cannot be read: %s", path, error)
        return None


def _make_room() -> None:
    """Removes what was read longest ago, until a quarter of the room is free, where there is too much."""
    files: list[tuple[float, int, pathlib.Path]] = []
    for path in folder().iterdir():
        with contextlib.suppress(OSError):  # others remove some, too
            known = path.stat()
            files.append((known.st_mtime, known.st_size, path))
    if (used := sum(size for _, size, _ in files)) > MOST_BYTES:
        for _, size, path in sorted(files):
            path.unlink(missing_ok=True)
            if (used := used - size) <= MOST_BYTES * 3 // 4:
                return
