"""Compiled programs on disk.

jax keeps compiled programs by what is lowered, and tracing and lowering is most of what a start then waits for. Here
they are found by what they are made of, too: the package's code, the model's shapes and the program's sizes. Where
only code has changed, a program is traced and lowered, and found by that.

Code counts as it stands when an engine's first program is asked for. Files are programs: whoever can write to their
folder can run code, so that none but the user may.
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

MOST_BYTES = 2**31  # of all files; beyond that those go that nobody has read for longest
PACKAGE = __name__.partition(".")[0]
_TRACED = tuple(
    f"{PACKAGE}.{name}" for name in ("common.checks", "compress", "device", "models", "pallas_kernels", "reuse")
)
_INSIDE = "__wrapped__", "__func__", "fget", "func"  # of what is compiled or cached, methods of classes, properties
_FORMAT = "2"  # of the files; those of another one have other names, and leave as the oldest
_NAME = re.compile("[0-9a-f]{64}")
_CHECKSUM = hashlib.sha256().digest_size
_BEGUN = time.time()
_log = logging.getLogger(__name__)

Made = tuple[jax.stages.Compiled, tuple[Choice, ...]]


class UntoldError(Exception):
    """Something that decides what is computed cannot be told."""


class ProgramFiles:
    """Those of one engine.

    Args:
      options: of the compiler.
    """

    def __init__(self, shapes: Shapes, options: Mapping[str, Any]):
        self._options = dict(options)
        self._machine = _machine() + json.dumps(self._options, sort_keys=True)
        self._sizes = _sizes(shapes)
        self._code = code()

    @classmethod
    def of(cls, shapes: Shapes, options: Mapping[str, Any]) -> ProgramFiles | None:
        """None: jax keeps them, see `use_compilation_cache`, or they cannot be kept."""
        if is_kept_by_jax() or not _are_kept(shapes.devices.all):
            return None
        try:
            files = cls(shapes, options)
            make_folder(folder())
            check_owner(folder())
            _make_room()
        except PermissionError as error:
            _log.warning("compiled programs are not kept: %s", error)
        except Exception as error:  # an engine opens without them
            _log.debug("compiled programs are not kept: %s", error)
        else:
            return files
        return None

    def has(self, program: Program[Any]) -> bool:
        """Whether a program was made of the same before, as far as its index says."""
        with contextlib.suppress(OSError, UntoldError):
            return self._index(program).exists()
        return False

    def find(self, program: Program[Any]) -> Made | None:
        """A program that was made of the same before; None: there is none that can be read. Damaged files are deleted,
        and the program is compiled again."""
        try:
            place = self._index(program)
        except UntoldError:
            return None
        try:
            if (found := _read_index(place)) is None:
                return None
            name, choices = found
            if (compiled := _read(folder() / name)) is not None:
                return compiled, choices
        except OSError as error:  # it may pass
            _log.debug("%s cannot be read: %s", place, error)
        return None

    def make(
        self, program: Program[Any], lowered: jax.stages.Lowered, choices: tuple[Choice, ...]
    ) -> tuple[jax.stages.Compiled, bool]:
        """Compiles a program, unless what was lowered is known; from then on `find` finds it.

        Returns:
          The program, and whether it was read from disk.
        """
        compiled = path = None
        with contextlib.suppress(AttributeError, KeyError, OSError):  # another jax may not say all of it
            path = folder() / self._digest_of(lowered)
            compiled = _read(path)
        is_known = compiled is not None
        compiled = compiled or lowered.compile(self._options)
        if path is None or is_kept_by_jax():  # what jax read from disk would lack functions when it is written again
            return compiled, is_known
        try:
            if not is_known:
                _write(path, compiled)
            place = self._index(program)
            write_whole(place, json.dumps({"index": place.stem, "program": path.name, "choices": choices}))
        except Exception as error:  # a full disk, or what cannot be written, keeps nobody from computing
            _log.debug("%s is not kept: %s", program, error)
        return compiled, is_known

    def _index(self, program: Program[Any]) -> pathlib.Path:
        return folder() / f"{_digest(_FORMAT, self._code, self._machine, _settings(), self._sizes, told(program))}.json"

    def _digest_of(self, lowered: jax.stages.Lowered) -> str:
        # The text says nothing of arguments that nothing depends on.
        trees = map(str, (lowered.args_info, lowered.in_tree, lowered.out_tree, _used(lowered)))
        return _digest(_FORMAT, self._machine, _settings(), lowered.as_text(), *trees)


def use_compilation_cache(devices: Sequence[jax.Device]) -> None:
    """Sees that programs for these devices are kept on disk: here, or where these are several or GPUs, as jax does it.
    A user who has decided where or whether is obeyed."""
    if not (_are_kept(devices) or is_kept_by_jax()):
        jax.config.update("jax_compilation_cache_dir", str(cache_home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _are_kept(devices: Sequence[jax.Device]) -> bool:
    """Whether programs for these devices can be kept here: for one CPU; nobody has seen it on a GPU yet."""
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
    if value is None or isinstance(value, bool | int | float | str | bytes | Fraction | np.dtype):
        return repr(value)
    if type(value) in (tuple, list):
        return f"[{', '.join(map(told, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{told(name)}: {told(one)}' for name, one in value.items())}}}"
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
    """A digest of the code on disk.

    Raises:
      UntoldError: it has changed since this process began, which may run what was there before, or it is not there.
    """
    known = source_files()
    if changed := [name for name, path in known if max(path.stat().st_mtime, path.stat().st_ctime) > _BEGUN]:
        raise UntoldError(f"{', '.join(changed)}, changed since this process began")
    there = {str(path.resolve()) for _, path in known}
    if absent := [name for name, module in _traced() if os.path.realpath(module.__file__ or "") not in there]:
        raise UntoldError(f"the code of {', '.join(absent)}")
    return _digest(*(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for name, path in known))


def source_files() -> list[tuple[str, pathlib.Path]]:
    """The package's files, by their names in it. In a checkout some wings are links."""
    root = sys.modules[PACKAGE].__path__[0]
    paths = (pathlib.Path(place, name) for place, _, names in os.walk(root, followlinks=True) for name in names)
    kinds = ".py", ".json"
    return sorted((str(path.relative_to(root)), path) for path in paths if path.suffix in kinds and path.is_file())


def _traced() -> list[tuple[str, types.ModuleType]]:
    """The modules that programs are traced from, as far as they have been imported; this one says when it was."""
    traced = ((name, module) for name, module in sys.modules.items() if name.startswith(_TRACED) and name != __name__)
    return sorted(traced, key=lambda one: one[0])


def _loaded() -> Iterator[str]:
    """What stands in these modules."""
    for name, module in _traced():
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
    """What a function computes, or what a constant is; of other things only of what kind they are."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        given = [_constant(one) for one in (value.__defaults__, value.__kwdefaults__)]
        return f"{value.__module__} {value.__qualname__} {_bytecode(value.__code__)} {cells} {given}"
    if not isinstance(value, type | types.ModuleType):
        for name in _INSIDE:
            if isinstance(inner := getattr(value, name, None), types.FunctionType):
                return f"{kind} {_stands(inner)} {_constant(getattr(value, 'args', None))}"
    return _constant(value)


def _constant(value: Any) -> str:
    try:
        return told(value)
    except UntoldError:
        return f"{type(value).__module__}.{type(value).__qualname__}"


def _cell(cell: types.CellType) -> str:
    try:
        return _constant(cell.cell_contents)
    except ValueError:
        return "empty"


def _bytecode(code: types.CodeType) -> str:
    """A digest that does not depend on where a function stands, nor on the seed of hashes."""
    constants = [
        _bytecode(one) if isinstance(one, types.CodeType)
        else str(sorted(map(repr, one))) if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]  # fmt: skip
    return _digest(code.co_code.hex(), str(code.co_names), str(code.co_freevars), *constants)


def _machine() -> str:
    """What a compiled program depends on besides its text and settings.

    Raises:
      UntoldError: flags stand in a file.
    """
    device = jax.devices()[0]
    flags = {name: value for name, value in os.environ.items() if name.startswith("XLA_")}
    words = flags.get("XLA_FLAGS", "").split()
    if any(not word.startswith("-") or "flagfile" in word for word in words):
        raise UntoldError("XLA_FLAGS names a file")
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    cores = os.cpu_count(), len(getattr(os, "sched_getaffinity", lambda _: [])(0)), os.environ.get("NPROC")
    machine = sys.version, device.device_kind, device.client.platform_version, _processor(), cores
    return json.dumps([flags, versions, machine], sort_keys=True)


def _settings() -> str:
    """Of jax, in this thread."""
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
        shapes.config, shapes.num_slots, shapes.max_pages, shapes.ladder, shapes.implementation, shapes.kv,
        shapes.kept_tokens, shapes.compressed_slots,
    )  # fmt: skip
    weights = shapes.visual, shapes.normalization, shapes.text, shapes.head
    leaves, tree = jax.tree.flatten(weights)
    return "\n".join((told(sizes), str(tree), *(f"{leaf.shape} {leaf.dtype}" for leaf in leaves)))


def _used(lowered: jax.stages.Lowered) -> list[int]:
    """Numbers of the arguments that the program takes: what nothing depends on, jax leaves out."""
    return sorted(operator.attrgetter("_lowering.compile_args")(lowered)["kept_var_idx"])  # jax says it nowhere else


def check_owner(place: pathlib.Path) -> None:
    """Sees that nobody but the user can write programs there.

    Raises:
      PermissionError: somebody else can.
    """
    known = place.lstat()
    is_own = known.st_uid == getattr(os, "geteuid", lambda: known.st_uid)()
    if not (stat.S_ISDIR(known.st_mode) and is_own and not known.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise PermissionError(f"{place} must be a directory of yours to which nobody else can write: remove it")


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}\n".encode())
    return digest.hexdigest()


def _write(path: pathlib.Path, compiled: jax.stages.Compiled) -> None:
    content = zlib.compress(pickle.dumps(serialize_executable.serialize(compiled)), 1)
    write_whole(path, _checksum(path, content) + content)


def _checksum(path: pathlib.Path, content: bytes) -> bytes:
    """Of a program under its name: under another one it is another program."""
    return hashlib.sha256(path.name.encode() + content).digest()


def _read(path: pathlib.Path) -> jax.stages.Compiled | None:
    """None: there is none, or it is damaged, and is deleted.

    Raises:
      OSError: it cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        if _checksum(path, content[_CHECKSUM:]) != content[:_CHECKSUM]:
            raise ValueError("its bytes are others than were written")
        _touch(path)
        executable, takes, gives = pickle.loads(zlib.decompress(content[_CHECKSUM:]))
        return serialize_executable.deserialize_and_load(executable, takes, gives, execution_devices=jax.devices()[:1])
    except Exception as error:  # whatever is wrong with it, it can be compiled again
        _discard(path, error)
        return None


def _read_index(place: pathlib.Path) -> tuple[str, tuple[Choice, ...]] | None:
    """The name of a program's file, and its kernels; None: there is none, or it is damaged, and is deleted.

    Raises:
      OSError: it cannot be read.
    """
    try:
        content = place.read_bytes()
    except FileNotFoundError:
        return None
    try:
        index = json.loads(content)
        if index["index"] != place.stem or not _NAME.fullmatch(index["program"]):
            raise ValueError("it is another program's")
        choices = tuple(Choice(*choice) for choice in index["choices"])
        _touch(place)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        _discard(place, error)
        return None
    return index["program"], choices


def _discard(path: pathlib.Path, error: Exception) -> None:
    _log.warning("the kept program %s is damaged, and is deleted and compiled again: %s", path, error)
    with contextlib.suppress(OSError):
        path.unlink()


def _touch(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # it may be there to be read only
        os.utime(path)


def _make_room() -> None:
    """Removes what was read longest ago, until a quarter of the room is free, where there is too much."""
    files: list[tuple[float, int, pathlib.Path]] = []
    for path in folder().iterdir():
        with contextlib.suppress(OSError):  # others remove some, too
            known = path.stat()
            files.append((known.st_mtime, known.st_size, path))
    if (used := sum(size for _, size, _ in files)) > MOST_BYTES:
        for _, size, path in sorted(files):
            with contextlib.suppress(OSError):
                path.unlink()
            if (used := used - size) <= MOST_BYTES * 3 // 4:
                return
