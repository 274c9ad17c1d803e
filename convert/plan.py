"""From the headers of safetensors files to a plan: which bytes of which file become which parameter.

Nothing but headers is read, and the few factors of weights in 8 bits. So a checkpoint that lacks a tensor, has one too
many or one of another shape is refused in milliseconds, before anything is written or put on a device, and all that is
wrong is said at once. The tensors themselves are mapped, not read, and what has been copied or hashed of them is let go
of: the process never holds the weights twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from vlcache_jax.convert.factors import Dequantized, StoredFactors
from vlcache_jax.models.config import FLOAT8, ModelConfig
from vlcache_jax.models.params import Parameter, Part, library_name, parameters
from vlcache_jax.models.registry import load_config

_log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_NAMES = ", ".join(one.name for one in DTYPES.values())
_STORED = {**DTYPES, "F8_E4M3": FLOAT8}

_HEAD = "lm_head.weight"
_EMBEDDING = "model.language_model.embed_tokens.weight"
_MOST_HEADER_BYTES = 100 << 20  # the limit of the format's own readers
_MOST_LINES = 20  # of each kind of problem in one error
_FACTOR_NAMES = (".weight_scale", ".weight_scale_inv", ".input_scale", ".weight_packed")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a file: little-endian, in C order, from byte `begin` to `end` of its mapping."""

    name: str
    file: pathlib.Path
    begin: int
    end: int
    dtype: np.dtype
    shape: tuple[int, ...]
    mapping: mmap.mmap = dataclasses.field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def view(self) -> np.ndarray:
        """The tensor, mapped and read-only; pages come from the file when they are touched."""
        flat = np.frombuffer(self.mapping, np.uint8, self.nbytes, self.begin)
        return flat.view(self.dtype).reshape(self.shape)

    def matrices(self) -> Iterator[np.ndarray]:
        """Those that it is a stack of."""
        return iter(self.view())

    def sha256(self) -> str:
        return sha256(self.view())

    def release(self) -> None:
        """Lets go of the file's pages that views have touched, which count as the process's; they come again."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of experts that are stored one by one, as if they were one tensor, as the library saves it.

    Attributes:
      name, shape: of that tensor, [E, out, in].
      experts: what each expert's matrix is made of, one above the other.
    """

    name: str
    shape: tuple[int, ...]
    experts: tuple[tuple[StoredTensor | StoredFactors | Dequantized, ...], ...]

    @property
    def dtype(self) -> np.dtype:
        """Of all of them; float32 where some are dequantized and others are not."""
        found = {part.dtype for parts in self.experts for part in parts}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    @property
    def file(self) -> pathlib.Path:
        """One of those that it is in."""
        return self.experts[0][0].file

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.experts for part in parts)

    def view(self) -> np.ndarray:
        """All of it, in memory of its own."""
        return np.stack(list(self.matrices()))

    def matrices(self) -> Iterator[np.ndarray]:
        """Of one expert after the other, each in memory of its own."""
        return (np.concatenate([part.view() for part in parts]) for parts in self.experts)

    def sha256(self) -> str:
        """That of the one tensor."""
        digest = hashlib.sha256()
        for parts in self.experts:
            for part in parts:
                digest.update(part.view().reshape(-1).view(np.uint8))
        return digest.hexdigest()

    def release(self) -> None:
        """Lets go of the files' pages; see `StoredTensor.release`."""
        for parts in self.experts:
            for part in parts:
                part.release()


type Tensor = StoredTensor | Stack | StoredFactors | Dequantized


@dataclasses.dataclass(frozen=True)
class Source:
    """One parameter and the stored tensors it is made from, in the order of its parts."""

    parameter: Parameter
    tensors: tuple[Tensor, ...]

    @property
    def parts(self) -> Iterator[tuple[Part, Tensor]]:
        return zip(self.parameter.parts, self.tensors, strict=True)

    def read(self, dtype: np.dtype) -> np.ndarray:
        """The parameter of a model in `dtype`, in memory of its own.

        The copy goes block by block: numpy's transposing copy of a whole matrix misses the cache at every element and
        is several times slower, and a cast of the whole would be a second copy.
        """
        out = aligned_empty(self.parameter.shape, self.parameter.dtype_in(dtype))
        for part, tensor in self.parts:
            with np.errstate(over="ignore", invalid="ignore"):  # the conversion tells what is not finite, by name
                _copy(part, tensor, part.of(out))
            tensor.release()
        return out


def _copy(part: Part, tensor: Tensor, out: np.ndarray) -> None:
    if part.is_turned:
        for matrix, turned in zip(tensor.matrices(), out, strict=True):
            _transpose(matrix, turned)
    elif part.is_stack:
        for matrix, own in zip(tensor.matrices(), out, strict=True):
            np.copyto(_bits(own), _bits(matrix), casting="unsafe")
    elif part.is_kernel:
        heads = out.shape[1:-2]  # whose outputs lie apart
        rows = tensor.view().reshape(*heads, -1, len(out))
        for head in np.ndindex(heads):
            _transpose(rows[head], out[:, *head].reshape(len(out), -1))
    else:
        np.copyto(_bits(out), _bits(tensor.view().reshape(out.shape)), casting="unsafe")


def _bits(array: np.ndarray) -> np.ndarray:
    """What numpy copies fast."""
    return array.view(np.uint8) if array.dtype == FLOAT8 else array


def _transpose(rows: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, len(rows), 64):
        out[:, i : i + 64] = rows[i : i + 64].astype(out.dtype, copy=False).T


class PlanError(ValueError):
    """A checkpoint's tensors are not those of its model."""


def source_config(directory: str | pathlib.Path) -> ModelConfig:
    """The configuration of a directory with safetensors files.

    Where its `config.json` speaks of an output head that is not there, as in Qwen3-VL-Embedding-8B, the model is one
    that embeds: the table of token embeddings stands in the head's place, and a warning says so.

    Raises:
      FileNotFoundError, ValueError: see `load_config` and `make_plan`.
    """
    directory, config = pathlib.Path(directory), load_config(directory)
    if config.tie_word_embeddings:
        return config
    names = {library_name(tensor.name) for tensor in _stored_tensors(directory)[0]}
    if _HEAD in names or _EMBEDDING not in names:
        return config
    _log.warning("%s has no output head: it embeds, and what it answers or ranks means nothing", directory)
    return dataclasses.replace(config, tie_word_embeddings=True)


def make_plan(directory: str | pathlib.Path, config: ModelConfig) -> list[Source]:
    """Finds the stored tensor of every parameter, in the order of `parameters(config)`.

    Raises:
      FileNotFoundError: there are no safetensors files, or some that the index names are missing.
      PlanError: a file is damaged, or tensors are missing, unused, of another shape or of an unsupported dtype; the
        message lists all of them.
    """
    directory = pathlib.Path(directory)
    stored, problems = _stored_tensors(directory)
    _check_bits(directory, config, stored)
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = library_name(tensor.name)
        if name in tensors:
            problems.append(("twice", f"{tensor.name} in {tensor.file.name} and as {tensors[name].name}"))
        tensors[name] = tensor

    embedding = tensors.get(_EMBEDDING)
    plan = []
    for parameter in _as_stored(parameters(config), tensors):
        if _is_in_singles(first := parameter.parts[0], tensors):
            made = parameter if first.kept else parameter.turned()
            plan.append(Source(made, (_stack(first, tensors, problems),)))
        else:
            parts = tuple(_as_mixed(part, tensors) for part in parameter.parts)
            found = [_taken(part, tensors, problems) for part in parts]
            problems += _problems(parts, found)
            pairs = zip(parts, found, strict=True)
            whole = tuple(_as_part(part, one) for part, one in pairs if one is not None)
            plan.append(Source(dataclasses.replace(parameter, parts=parts), whole))
    if config.tie_word_embeddings and _HEAD in tensors:
        # Some tied checkpoints store the head all the same. It may only go unused if it says the same.
        head = tensors.pop(_HEAD)
        if embedding is not None and not _same(head, embedding):
            problems.append(("unused", f"{_HEAD}: tie_word_embeddings is true, but it differs from {embedding.name}"))
    problems += [("unused", f"{tensor.name} {list(tensor.shape)}") for tensor in tensors.values()]
    problems = problems or list(_flawed_factors(plan))
    if problems:
        raise PlanError(_report(directory, problems))
    return plan


def _check_bits(directory: pathlib.Path, config: ModelConfig, stored: Iterable[StoredTensor]) -> None:
    """A tower in 8 bits is refused whatever `config.json` says of it: there are tools that forget to leave it out."""
    if config.text.quantization is None and (found := [one.name for one in stored if one.dtype == FLOAT8]):
        raise PlanError(
            f"config.json of {directory} must have a quantization_config that says how weights in 8 bits are stored, "
            f"got none beside {len(found)} tensors of {FLOAT8}, such as {found[0]}"
        )
    tower = [one for one in stored if library_name(one.name).startswith("model.visual.")]
    found = [one.name for one in tower if one.dtype == FLOAT8 or one.name.endswith(_FACTOR_NAMES)]
    if found:
        raise PlanError(
            f"the vision tower of {directory} must not be quantized, but {len(found)} of its tensors are, such as "
            f"{found[0]}: take a checkpoint whose tower was left in bfloat16"
        )


def _as_part(part: Part, tensor: StoredTensor | Dequantized) -> StoredTensor | StoredFactors | Dequantized:
    return tensor if part.factors is None else StoredFactors(tensor, part.factors, part.shape[-2])


def _is_mixed(part: Part, name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a matrix of this name is stored in 8 bits, though its product is not in 8 bits."""
    return part.mixed is not None and name in tensors and tensors[name].dtype == FLOAT8


def _as_mixed(part: Part, tensors: Mapping[str, StoredTensor]) -> Part:
    """The part as it is stored: a stack of matrices in 8 bits is [E, out, in]."""
    return part.turned() if part.is_stack and _is_mixed(part, part.tensor, tensors) else part


def _taken(
    part: Part, tensors: dict[str, StoredTensor], problems: list[tuple[str, str]]
) -> StoredTensor | Dequantized | None:
    """The tensor of a part, which is no longer among the others; None: it is not there."""
    if not _is_mixed(part, part.tensor, tensors):
        return tensors.pop(part.tensor, None)
    return _dequantized(part, part.tensor, part.tensor_shape, tensors, problems)


def _dequantized(
    part: Part, name: str, shape: tuple[int, ...], tensors: dict[str, StoredTensor], problems: list[tuple[str, str]]
) -> StoredTensor | Dequantized:
    """A matrix in 8 bits that is multiplied as what it stands for, as others of its product are not in 8 bits."""
    assert part.mixed is not None
    tensor, own = tensors.pop(name), name + part.mixed.quantization.suffix
    factors, wanted = tensors.pop(own, None), part.mixed.stored_shape(shape)
    if factors is None:
        problems.append(("missing", f"{own} {list(wanted)}"))
        return tensor
    found = [(one, expected) for one, expected in ((tensor, shape), (factors, wanted)) if one.shape != expected]
    problems += [
        ("of another shape", f"{one.name} must be {list(right)}, got {list(one.shape)}") for one, right in found
    ]
    if factors.dtype == FLOAT8:
        problems.append(("of another dtype", f"{own} must be one of {_NAMES}, got {factors.dtype}"))
    is_wrong = found or factors.dtype == FLOAT8
    return tensor if is_wrong else Dequantized(tensor, StoredFactors(factors, part.mixed, shape[-2]))


def _flawed_factors(plan: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """Factors that are not finite or not above 0, which would make weights of nothing."""
    for source in plan:
        for tensor in source.tensors:
            singles = [one for parts in tensor.experts for one in parts] if isinstance(tensor, Stack) else [tensor]
            for single in singles:
                if isinstance(single, StoredFactors | Dequantized) and (flaw := single.flaw) is not None:
                    yield "with factors that are not finite and above 0", flaw


def _problems(parts: Iterable[Part], found: Iterable[StoredTensor | Dequantized | None]) -> Iterator[tuple[str, str]]:
    """Of the tensors of a parameter's parts, None: not there."""
    for part, tensor in zip(parts, found, strict=True):
        expected = list(part.tensor_shape)
        if part.mixed is not None and tensor is not None and tensor.dtype == FLOAT8:
            continue  # what is wrong with it has been found
        if tensor is None:
            yield "missing", f"{part.tensor} {expected}"
        elif tensor.shape != part.tensor_shape:
            yield "of another shape", f"{tensor.name} must be {expected}, got {list(tensor.shape)}"
        elif part.in_8_bits != (tensor.dtype == FLOAT8):
            wanted = FLOAT8.name if part.in_8_bits else f"one of {_NAMES}"
            yield "of another dtype", f"{tensor.name} must be {wanted}, got {tensor.dtype}"


def _is_in_singles(part: Part, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether it is a stack that is not there, but something of its experts one by one is."""
    names = (name for expert in part.singles for name in expert) if part.is_stack else ()
    return part.tensor not in tensors and any(name in tensors for name in names)


def _stack(part: Part, tensors: dict[str, StoredTensor], problems: list[tuple[str, str]]) -> Stack:
    """What a stack is made from where experts are stored one by one."""
    wanted, outputs = part.singles, part.shape[1]
    found = [tensors[name] for names in wanted for name in names if name in tensors]
    first = next((one for one in found if one.dtype != FLOAT8), found[0])
    experts = []
    for names in wanted:
        singles: list[StoredTensor | StoredFactors | Dequantized] = []
        for name, shape in names.items():
            if _is_mixed(part, name, tensors):
                singles.append(_dequantized(part, name, shape, tensors, problems))
            elif (single := tensors.pop(name, None)) is None:
                problems.append(("missing", f"{name} {list(shape)}"))
            elif single.shape != shape:
                problems.append(("of another shape", f"{single.name} must be {list(shape)}, got {list(single.shape)}"))
            elif single.dtype != (dtype := FLOAT8 if part.in_8_bits else first.dtype):
                problems.append(("of another dtype", f"{single.name} must be {dtype}, got {single.dtype}"))
            elif part.factors is not None:
                singles.append(StoredFactors(single, part.factors, outputs // len(names)))
            else:
                singles.append(single)
        experts.append(tuple(singles))
    return Stack(part.tensor, part.shape if part.kept else part.turned().tensor_shape, tuple(experts))


def _as_stored(wanted: list[Parameter], tensors: Mapping[str, StoredTensor]) -> list[Parameter]:
    """The parameters, with matrices of experts in the layout that the checkpoint has them in.

    Published ones and those that the library saves differ in it. Matrices that are square do not show it; gate_up and
    down are never both square, so others do.
    """
    parts = [part for parameter in wanted for part in parameter.parts if part.is_stack and part.kept is None]
    stacks = [part for part in parts if part.tensor in tensors and not _is_mixed(part, part.tensor, tensors)]
    is_turned = any(tensors[part.tensor].shape == part.turned().tensor_shape != part.shape for part in stacks)
    return [one.turned() if is_turned and one.parts[0] in parts else one for one in wanted]


def stored_dtype(plan: Iterable[Source], config: ModelConfig) -> np.dtype:
    """The dtype of a checkpoint: that of its tensors, or what `config.json` says where they differ.

    What stays in 8 bits does not count, nor do matrices that are left out of that.
    """
    found = {
        tensor.dtype for source in plan for part, tensor in source.parts if part.kept is None and part.mixed is None
    }
    if len(found) == 1:
        return found.pop()
    if config.dtype is None:
        names = ", ".join(sorted(dtype.name for dtype in found))
        raise ValueError(f"dtype must be given for a checkpoint whose tensors differ in it, got tensors of {names}")
    return as_dtype(config.dtype)


def as_dtype(dtype: Any, *besides: str) -> np.dtype:
    """A supported dtype from a name, a scalar type or a dtype; "half" and "float" are names, too.

    Raises:
      ValueError: it is none; the error also lists the names that are taken `besides`.
    """
    supported = {dtype.name: dtype for dtype in DTYPES.values()}
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return supported[{"half": "float16", "float": "float32"}.get(name, name)]
    except (KeyError, TypeError):
        raise ValueError(f"dtype must be one of {', '.join((*besides, *supported))}, got {dtype!r}") from None


def tensor_digests(plan: Iterable[Source]) -> dict[str, str]:
    """SHA-256 of every stored tensor by library name; hashing releases the GIL, so it runs on several cores."""
    tensors = {part.tensor: tensor for source in plan for part, tensor in source.parts}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vlcache-sha256") as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    digest = tensor.sha256()
    tensor.release()
    return digest


def sha256(array: np.ndarray) -> str:
    """Of an array's bytes, little-endian, in C order."""
    return hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()


def source_digest(plan: Iterable[Source], digests: dict[str, str]) -> str:
    """One digest of all weights as they are stored: names, dtypes, shapes and the SHA-256 of each tensor's bytes."""
    listed = [
        [part.tensor, tensor.dtype.name, tensor.shape, digests[part.tensor]]
        for source in plan
        for part, tensor in source.parts
    ]
    return hashlib.sha256(json.dumps(["vlcache-weights/1", sorted(listed)]).encode()).hexdigest()


def _stored_tensors(directory: pathlib.Path) -> tuple[list[StoredTensor], list[tuple[str, str]]]:
    """All tensors of a directory, and what the index says that is not so."""
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(_no_weights(directory))
        return _read_header(directory / WEIGHTS_FILE), []
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"{index} must hold a weight_map from tensors to files: {error!r}") from error
    for name in files:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise PlanError(f"weight_map of {index} must name files beside it, got {name!r}")
    if absent := [name for name in files if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{directory} must hold every file that {INDEX_FILE} names, but lacks {_some(absent)}")
    tensors = [tensor for name in files for tensor in _read_header(directory / name)]
    where = {(tensor.name, tensor.file.name) for tensor in tensors}
    return tensors, [("missing", f"{n}: not in {file}, where the index has it") for n, file in weight_map.items()
                     if (n, file) not in where]  # fmt: skip


def _no_weights(directory: pathlib.Path) -> str:
    message = f"{directory} must hold {WEIGHTS_FILE} or {INDEX_FILE}, but has neither"
    if shards := sorted(path.name for path in directory.glob("*.safetensors")):
        return f"{message} (there is {_some(shards)})"
    for suffix in (".bin", ".gguf"):
        if any(directory.glob(f"*{suffix}")):
            return f"{message} (there are {suffix} files: only safetensors is read)"
    return message


def _read_header(path: pathlib.Path) -> list[StoredTensor]:
    """The tensors of one file, checked against its size: nothing later reads beyond its end."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise PlanError(f"{path} must be a whole safetensors file, but its {size} bytes end inside the header")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = 8 + length
    try:
        header = json.loads(mapping[8:data])
        header.pop("__metadata__", None)
        tensors = [_entry(path, mapping, data, name, entry) for name, entry in header.items()]
    except PlanError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"{path} must begin with a safetensors header: {error!r}") from error
    end = data
    for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
        if tensor.begin != end:
            raise PlanError(f"tensors of {path} must follow each other, but {tensor.name} is not at byte {end}")
        end = tensor.end
    if end != size:
        raise PlanError(f"{path} must have {end} bytes as its header says, got {size}: the file is damaged or cut off")
    return tensors


def _entry(path: pathlib.Path, mapping: mmap.mmap, data: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in _STORED:
        raise PlanError(
            f"tensors must be stored as one of {', '.join(_STORED)}, got {entry['dtype']} for {name} in {path}: take "
            f"the model as it was published in bfloat16, or its FP8"
        )
    dtype = _STORED[entry["dtype"]]
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    if min(begin, *shape, 0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise PlanError(f"{name} of {path} must have {list(shape)} values of {dtype}, got bytes {begin} to {end}")
    return StoredTensor(name, path, data + begin, data + end, dtype, shape, mapping)


def _report(directory: pathlib.Path, problems: list[tuple[str, str]]) -> str:
    lines = [f"the tensors of {directory} must be those of its config.json, but {len(problems)} are not"]
    for kind in dict.fromkeys(kind for kind, _ in problems):
        listed = [line for other, line in problems if other == kind]
        lines.append(f"{kind} ({len(listed)}):")
        lines += [f"  {line}" for line in listed[:_MOST_LINES]]
        if len(listed) > _MOST_LINES:
            lines.append(f"  and {len(listed) - _MOST_LINES} more")
    return "\n".join(lines)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.sha256() == b.sha256()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that a device on the host can take over as it is, which it does from 64 bytes alignment on."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
