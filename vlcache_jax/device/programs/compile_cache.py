"""A disk cache of compiled programs.

JAX's cache finds programs by their lowered text, so a start still waits for tracing and lowering. This cache also finds
them by their inputs: the package's code, the model's shapes and the program's sizes. If only code has changed, a
program is traced and lowered, and then found by its lowered text.

The code is identified when an engine requests its first program. Cached files contain executable code, so only the user
may be able to write to their folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import operator
import os
import pathlib
import pickle
import platform
import re
import stat
import sys
import time
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from vlcache_jax.common.files import cache_home, make_folder, write_whole
from vlcache_jax.device.programs.base import Program, Shapes
from vlcache_jax.pallas_kernels.dispatch import Choice

MAX_BYTES = 2**31  # of all files; beyond this, the least recently read files are deleted
PACKAGE = __name__.partition(".")[0]
_TRACED = tuple(
    f"{PACKAGE}.{name}" for name in ("common.checks", "compress", "device", "models", "pallas_kernels", "reuse")
)
_INSIDE = "__wrapped__", "__func__", "fget", "func"  # functions inside jitted or cached ones, methods and properties
_FORMAT = "2"  # of the files; files of another format have other names, and are deleted as the oldest
_NAME = re.compile("[0-9a-f]{64}")
_CHECKSUM = hashlib.sha256().digest_size
_PROCESS_START = time.time()
_log = logging.getLogger(__name__)

CompiledProgram = tuple[jax.stages.Compiled, tuple[Choice, ...]]


class UnidentifiedError(Exception):
    """An error for a value or setting that affects compiled programs but has no reproducible identity."""


class ProgramFiles:
    """The cached programs of one engine.

    Args:
      shapes: shapes of the engine.
      options: options of the compiler.

    Raises:
      UnidentifiedError: the code or the machine's settings have no reproducible identity.
    """

    def __init__(self, shapes: Shapes, options: Mapping[str, Any]):
        self._options = dict(options)
        self._machine = _machine() + json.dumps(self._options, sort_keys=True)
        self._sizes = _sizes(shapes)
        self._code = code()

    @classmethod
    def of(cls, shapes: Shapes, options: Mapping[str, Any]) -> ProgramFiles | None:
        """Open the cache. None: JAX's cache is used, see `use_compilation_cache`, or this cache cannot be used."""
        if is_kept_by_jax() or not _are_kept(shapes.devices.all):
            return None
        try:
            files = cls(shapes, options)
            make_folder(folder())
            check_owner(folder())
            _make_room()
        except PermissionError as error:
            _log.warning("compiled programs are not cached: %s", error)
        except Exception as error:  # an engine opens without the cache
            _log.debug("compiled programs are not cached: %s", error)
        else:
            return files
        return None

    def has(self, program: Program[Any]) -> bool:
        """Return whether the cache has an index file for a program with the same inputs."""
        with contextlib.suppress(OSError, UnidentifiedError):
            return self._index(program).exists()
        return False

    def find(self, program: Program[Any]) -> CompiledProgram | None:
        """Return the cached program with the same inputs and its kernel choices, or None.

        Damaged files are deleted, and the program is compiled again.
        """
        try:
            place = self._index(program)
        except UnidentifiedError:
            return None
        try:
            if (found := _read_index(place)) is None:
                return None
            name, choices = found
            if (compiled := _read(folder() / name)) is not None:
                return compiled, choices
        except OSError as error:  # may be temporary, so nothing is deleted
            _log.debug("%s cannot be read: %s", place, error)
        return None

    def make(
        self, program: Program[Any], lowered: jax.stages.Lowered, choices: tuple[Choice, ...]
    ) -> tuple[jax.stages.Compiled, bool]:
        """Compile a program unless its lowered text is cached, and store it for `find`.

        Returns:
          The program, and True if it was read from disk.
        """
        compiled = path = None
        with contextlib.suppress(AttributeError, KeyError, OSError):  # another version of JAX may lack attributes
            path = folder() / self._digest_of(lowered)
            compiled = _read(path)
        is_known = compiled is not None
        compiled = compiled or lowered.compile(self._options)
        if path is None or is_kept_by_jax():  # a program that JAX read from disk would lack functions if written again
            return compiled, is_known
        try:
            if not is_known:
                _write(path, compiled)
            place = self._index(program)
            write_whole(place, json.dumps({"index": place.stem, "program": path.name, "choices": choices}))
        except Exception as error:  # a full disk or a failed write does not affect the computation
            _log.debug("%s is not cached: %s", program, error)
        return compiled, is_known

    def _index(self, program: Program[Any]) -> pathlib.Path:
        name = _digest(_FORMAT, self._code, self._machine, _settings(), self._sizes, identity(program))
        return folder() / f"{name}.json"

    def _digest_of(self, lowered: jax.stages.Lowered) -> str:
        # The text does not mention arguments that no result depends on.
        trees = map(str, (lowered.args_info, lowered.in_tree, lowered.out_tree, _used(lowered)))
        return _digest(_FORMAT, self._machine, _settings(), lowered.as_text(), *trees)


def use_compilation_cache(devices: Sequence[jax.Device]) -> None:
    """Make sure that programs for these devices are cached on disk.

    A single CPU uses this module. For other devices, JAX's cache is enabled. The user's JAX settings take precedence.
    """
    if not (_are_kept(devices) or is_kept_by_jax()):
        jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _are_kept(devices: Sequence[jax.Device]) -> bool:
    """Return whether this cache supports these devices: a single CPU. It has not been tested on GPUs."""
    is_plain = len(devices) == 1 and devices[0].platform == "cpu" and jax.config.jax_default_device is None
    return is_plain and jax.config.jax_enable_compilation_cache


def folder() -> pathlib.Path:
    """Return the folder of the cache."""
    return cache_home() / "programs"


def is_kept_by_jax() -> bool:
    """Return whether JAX's own disk cache is enabled."""
    return jax.config.jax_compilation_cache_dir is not None or "JAX_COMPILATION_CACHE_DIR" in os.environ


def identity(value: Any) -> str:
    """Return a text that identifies a value and is the same in every process.

    Raises:
      UnidentifiedError: the type is not supported, for example a class of another package.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | Fraction | np.dtype):
        return repr(value)
    if type(value) in (tuple, list):
        return f"[{', '.join(map(identity, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{identity(name)}: {identity(one)}' for name, one in value.items())}}}"
    kind = type(value)
    if dataclasses.is_dataclass(value) and kind.__module__.startswith(f"{PACKAGE}."):
        fields = (f"{field.name}={identity(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(fields)})"
    raise UnidentifiedError(f"{kind.__module__}.{kind.__qualname__}")


def code() -> str:
    """Return a digest of the package's code on disk and in memory, where functions may have been replaced."""
    return _digest(_sources(), *_loaded())


@functools.cache
def _sources() -> str:
    """Return a digest of the code on disk.

    Raises:
      UnidentifiedError: a file has changed since this process began, which may run the older code, or is missing.
    """
    known = source_files()
    if changed := [name for name, path in known if max(path.stat().st_mtime, path.stat().st_ctime) > _PROCESS_START]:
        raise UnidentifiedError(
            f"source files must not change after the process has started, got changes of {', '.join(changed)}"
        )
    there = {str(path.resolve()) for _, path in known}
    if absent := [name for name, module in _traced() if os.path.realpath(module.__file__ or "") not in there]:
        raise UnidentifiedError(f"source files must exist for all imported modules, got none for {', '.join(absent)}")
    return _digest(*(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in known))


def source_files() -> list[tuple[str, pathlib.Path]]:
    """Return (name in the package, path) of the package's files. In a checkout, some subpackages are links."""
    root = sys.modules[PACKAGE].__path__[0]
    paths = (pathlib.Path(place, name) for place, _, names in os.walk(root, followlinks=True) for name in names)
    kinds = ".py", ".json"
    return sorted((str(path.relative_to(root)), path) for path in paths if path.suffix in kinds and path.is_file())


def _traced() -> list[tuple[str, types.ModuleType]]:
    """Return the imported modules that programs are traced from, except this one, which holds `_PROCESS_START`."""
    traced = ((name, module) for name, module in sys.modules.items() if name.startswith(_TRACED) and name != __name__)
    return sorted(traced, key=lambda one: one[0])


def _loaded() -> Iterator[str]:
    """Yield the identities of the members of the traced modules and their classes."""
    for name, module in _traced():
        yield from _members(name, module)
        for member, value in sorted(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                yield from _members(f"{name}.{member}", value)


def _members(name: str, owner: Any) -> Iterator[str]:
    for member, value in sorted(vars(owner).items()):
        # Python adds attributes to classes as they are used, but no functions.
        if isinstance(value, types.FunctionType) or not member.startswith("__"):
            yield f"{name}.{member} {_identity_of(value)}"


def _identity_of(value: Any) -> str:
    """Return the identity of a function by its code or of a constant by its value. Others have only their type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        defaults = [_constant(one) for one in (value.__defaults__, value.__kwdefaults__)]
        return f"{value.__module__} {value.__qualname__} {_bytecode(value.__code__)} {cells} {defaults}"
    if not isinstance(value, type | types.ModuleType):
        for name in _INSIDE:
            if isinstance(inner := getattr(value, name, None), types.FunctionType):
                return f"{kind} {_identity_of(inner)} {_constant(getattr(value, 'args', None))}"
    return _constant(value)


def _constant(value: Any) -> str:
    try:
        return identity(value)
    except UnidentifiedError:
        return f"{type(value).__module__}.{type(value).__qualname__}"


def _cell(cell: types.CellType) -> str:
    try:
        return _constant(cell.cell_contents)
    except ValueError:
        return "empty"


def _bytecode(code: types.CodeType) -> str:
    """Return a digest that depends neither on a function's line numbers nor on the seed of hashes."""
    constants = [
        _bytecode(one) if isinstance(one, types.CodeType)
        else str(sorted(map(repr, one))) if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]  # fmt: skip
    return _digest(code.co_code.hex(), str(code.co_names), str(code.co_freevars), *constants)


def _machine() -> str:
    """Return everything that a compiled program depends on besides its text and JAX's settings.

    Raises:
      UnidentifiedError: XLA_FLAGS names a file of flags.
    """
    device = jax.devices()[0]
    flags = {name: value for name, value in os.environ.items() if name.startswith("XLA_")}
    words = flags.get("XLA_FLAGS", "").split()
    if any(not word.startswith("-") or "flagfile" in word for word in words):
        raise UnidentifiedError("XLA_FLAGS must list its flags, got a file of flags (or --flagfile)")
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    cores = os.cpu_count(), len(getattr(os, "sched_getaffinity", lambda _: [])(0)), os.environ.get("NPROC")
    machine = sys.version, device.device_kind, device.client.platform_version, _processor(), cores
    return json.dumps([flags, versions, machine], sort_keys=True)


def _settings() -> str:
    """Return JAX's settings in this thread."""
    return str(sorted((name, repr(value)) for name, value in jax.config.values.items()))


@functools.cache
def _processor() -> list[str]:
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = "model name", "flags", "CPU part", "Features"
        return sorted({line for line in lines if line.partition("\t")[0].strip() in names})
    return [platform.machine(), platform.processor(), platform.version()]


def _sizes(shapes: Shapes) -> str:
    sizes = (
        shapes.config, shapes.num_slots, shapes.max_pages, shapes.buckets, shapes.implementation, shapes.kv,
        shapes.kept_tokens, shapes.compressed_slots, shapes.num_snapshots,
    )  # fmt: skip
    weights = shapes.visual, shapes.normalization, shapes.text, shapes.head
    leaves, tree = jax.tree.flatten(weights)
    return "\n".join((identity(sizes), str(tree), *(f"{leaf.shape} {leaf.dtype}" for leaf in leaves)))


def _used(lowered: jax.stages.Lowered) -> list[int]:
    """Return the indices of the arguments that the program takes. JAX removes those that no result depends on."""
    return sorted(operator.attrgetter("_lowering.compile_args")(lowered)["kept_var_idx"])  # JAX has no public attribute


def check_owner(place: pathlib.Path) -> None:
    """Check that only the user can write programs to the folder.

    Raises:
      PermissionError: others can write to it, or it is no directory of the user.
    """
    known = place.lstat()
    is_own = known.st_uid == getattr(os, "geteuid", lambda: known.st_uid)()
    if not (stat.S_ISDIR(known.st_mode) and is_own and not known.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(f"{place} must be a directory that you own and only you can write to: remove it")


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}\n".encode())
    return digest.hexdigest()


def _write(path: pathlib.Path, compiled: jax.stages.Compiled) -> None:
    content = zlib.compress(pickle.dumps(serialize_executable.serialize(compiled)), 1)
    write_whole(path, _checksum(path, content) + content)


def _checksum(path: pathlib.Path, content: bytes) -> bytes:
    """Return the checksum of a program and its file name, so that a renamed file is invalid."""
    return hashlib.sha256(path.name.encode() + content).digest()


def _read(path: pathlib.Path) -> jax.stages.Compiled | None:
    """Read a program. None: the file does not exist, or was damaged and is deleted.

    Raises:
      OSError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        if _checksum(path, content[_CHECKSUM:]) != content[:_CHECKSUM]:
            raise ValueError("wrong checksum")
        _touch(path)
        executable, takes, gives = pickle.loads(zlib.decompress(content[_CHECKSUM:]))
        return serialize_executable.deserialize_and_load(executable, takes, gives, execution_devices=jax.devices()[:1])
    except Exception as error:  # after any error the program can be compiled again
        _discard(path, error)
        return None


def _read_index(place: pathlib.Path) -> tuple[str, tuple[Choice, ...]] | None:
    """Read the name of a program's file and its kernels. None: the index is missing, or was damaged and is deleted.

    Raises:
      OSError: the index cannot be read.
    """
    try:
        content = place.read_bytes()
    except FileNotFoundError:
        return None
    try:
        index = json.loads(content)
        if index["index"] != place.stem or not _NAME.fullmatch(index["program"]):
            raise ValueError("it belongs to another program")
        choices = tuple(Choice(*choice) for choice in index["choices"])
        _touch(place)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        _discard(place, error)
        return None
    return index["program"], choices


def _discard(path: pathlib.Path, error: Exception) -> None:
    _log.warning("the cached program %s is damaged; it is deleted and will be recompiled: %s", path, error)
    with contextlib.suppress(OSError):
        path.unlink()


def _touch(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # the file may be read-only
        os.utime(path)


def _make_room() -> None:
    """Delete the least recently read files until a quarter of `MAX_BYTES` is free, if they exceed `MAX_BYTES`."""
    files: list[tuple[float, int, pathlib.Path]] = []
    for path in folder().iterdir():
        with contextlib.suppress(OSError):  # other processes delete files too
            known = path.stat()
            files.append((known.st_mtime, known.st_size, path))
    if (used := sum(size for _, size, _ in files)) > MAX_BYTES:
        for _, size, path in sorted(files):
            with contextlib.suppress(OSError):
                path.unlink()
            if (used := used - size) <= MAX_BYTES * 3 // 4:
                return
