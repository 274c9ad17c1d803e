"""The plan of a conversion or load: the bytes of safetensors files that each parameter is made from.

Only headers and the few scales of FP8 weights are read. So a checkpoint with missing, additional or wrongly shaped
tensors is rejected in milliseconds, before anything is written or put on a device, with all errors at once. Tensors are
mapped, not read, and their pages are released after they are copied or hashed. So the process never holds the weights
twice.
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
from vlcache_jax.convert.progress import gigabytes
from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.params import Parameter, Part, is_ignored, library_name, parameters, piece_name, pieces
from vlcache_jax.models.quantization import ADVICE, FLOAT8
from vlcache_jax.models.registry import load_config

_log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_NAMES = ", ".join(one.name for one in DTYPES.values())
STORED_DTYPES = {**DTYPES, "F8_E4M3": FLOAT8}

_HEAD = "lm_head.weight"
_EMBEDDING = "model.language_model.embed_tokens.weight"
_MAX_HEADER_BYTES = 100 << 20  # the limit of safetensors' own readers
_MAX_LINES = 20  # lines for each kind of problem in an error
_FACTOR_NAMES = (".weight_scale", ".weight_scale_inv", ".input_scale", ".weight_packed")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: little-endian, in C order, from byte `begin` to `end` of the mapping."""

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
        """Return the tensor, mapped and read-only. Pages are read from the file at first access."""
        flat = np.frombuffer(self.mapping, np.uint8, self.nbytes, self.begin)
        return flat.view(self.dtype).reshape(self.shape)

    def matrices(self) -> Iterator[np.ndarray]:
        """Return an iterator over the matrices of a stack."""
        return iter(self.view())

    def sha256(self) -> str:
        return sha256(self.view())

    def release(self) -> None:
        """Release the file's pages that views have read, which count as memory of the process. Views stay valid."""
        self.mapping.madvise(mmap.MADV_DONTNEED)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of experts that are stored one by one, as one tensor, as the library saves it.

    Attributes:
      name: name of that tensor.
      shape: its shape, [E, out, in].
      experts: tensors of each expert's matrix, to be concatenated along the outputs.
    """

    name: str
    shape: tuple[int, ...]
    experts: tuple[tuple[StoredTensor | StoredFactors | Dequantized, ...], ...]

    @property
    def dtype(self) -> np.dtype:
        """Common dtype of all tensors, or float32 if some are dequantized and others are not."""
        found = {part.dtype for parts in self.experts for part in parts}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    @property
    def file(self) -> pathlib.Path:
        """One of the files that contain the experts."""
        return self.experts[0][0].file

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.experts for part in parts)

    def view(self) -> np.ndarray:
        """Return the stacked matrices, in new memory."""
        return np.stack(list(self.matrices()))

    def matrices(self) -> Iterator[np.ndarray]:
        """Return an iterator over the experts' matrices, each in new memory."""
        return (np.concatenate([part.view() for part in parts]) for parts in self.experts)

    def sha256(self) -> str:
        """Return the digest of the stacked tensor."""
        digest = hashlib.sha256()
        for parts in self.experts:
            for part in parts:
                digest.update(part.view().reshape(-1).view(np.uint8))
        return digest.hexdigest()

    def release(self) -> None:
        """Release the files' pages, see `StoredTensor.release`."""
        for parts in self.experts:
            for part in parts:
                part.release()


type Tensor = StoredTensor | Stack | StoredFactors | Dequantized


@dataclasses.dataclass(frozen=True)
class Source:
    """A parameter and the stored tensors that it is made from, in the order of its parts."""

    parameter: Parameter
    tensors: tuple[Tensor, ...]

    @property
    def parts(self) -> Iterator[tuple[Part, Tensor]]:
        return zip(self.parameter.parts, self.tensors, strict=True)

    def read(self, dtype: np.dtype) -> np.ndarray:
        """Read the parameter for a model in `dtype`, in new memory.

        It is copied block by block. A transposed copy of a full matrix in numpy misses the cache at every element and
        is several times slower. A cast of the full matrix would need a second copy.
        """
        out = aligned_empty(self.parameter.shape, self.parameter.dtype_in(dtype))
        for part, tensor in self.parts:
            with np.errstate(over="ignore", invalid="ignore"):  # the conversion reports non-finite tensors by name
                _copy(part, tensor, part.of(out))
            tensor.release()
        return out


def _copy(part: Part, tensor: Tensor, out: np.ndarray) -> None:
    if part.is_transposed:
        for matrix, own in zip(tensor.matrices(), out, strict=True):
            _transpose(matrix, own)
    elif part.is_stack:
        for matrix, own in zip(tensor.matrices(), out, strict=True):
            np.copyto(_bits(own), _bits(matrix), casting="unsafe")
    elif part.is_kernel:
        heads = out.shape[1:-2]  # their outputs are not contiguous in the parameter
        rows = tensor.view().reshape(*heads, -1, len(out))
        for head in np.ndindex(heads):
            _transpose(rows[head], out[:, *head].reshape(len(out), -1))
    else:
        np.copyto(_bits(out), _bits(tensor.view().reshape(out.shape)), casting="unsafe")


def _bits(array: np.ndarray) -> np.ndarray:
    """Return a view that numpy copies fast."""
    return array.view(np.uint8) if array.dtype == FLOAT8 else array


def _transpose(rows: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, len(rows), 64):
        out[:, i : i + 64] = rows[i : i + 64].astype(out.dtype, copy=False).T


class PlanError(ValueError):
    """An error for a checkpoint whose tensors do not match its model, or whose files are damaged."""


def source_config(directory: str | pathlib.Path) -> ModelConfig:
    """Return the configuration of a directory with safetensors files.

    If `config.json` describes an output head that is missing, as in Qwen3-VL-Embedding-8B, it is an embedding model.
    The table of token embeddings replaces the head, and a warning is logged.

    Raises:
      FileNotFoundError, ValueError: see `load_config` and `make_plan`.
    """
    directory, config = pathlib.Path(directory), load_config(directory)
    if config.tie_word_embeddings:
        return config
    names = {library_name(tensor.name) for tensor in _stored_tensors(directory)[0]}
    if _HEAD in names or _EMBEDDING not in names:
        return config
    _log.warning("%s has no output head: use it for embeddings only, not to generate or rank", directory)
    return dataclasses.replace(config, tie_word_embeddings=True)


def make_plan(directory: str | pathlib.Path, config: ModelConfig) -> list[Source]:
    """Find the stored tensors of every parameter, in the order of `parameters(config)`.

    Raises:
      FileNotFoundError: there are no safetensors files, or files that the index names are missing.
      PlanError: a file is damaged, or tensors are missing, unused, of another shape or of an unsupported dtype. The
        message lists all of them.
    """
    directory = pathlib.Path(directory)
    stored, problems = _stored_tensors(directory)
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = library_name(tensor.name)
        if name in tensors:
            problems.append(("duplicate", f"{tensor.name} in {tensor.file.name} and as {tensors[name].name}"))
        tensors[name] = tensor
    tensors = {name: tensor for name, tensor in tensors.items() if not is_ignored(config, tensor.name)}
    _check_bits(directory, config, tensors.values())
    _divide(config, tensors, problems)

    embedding = tensors.get(_EMBEDDING)
    plan = []
    for parameter in _as_stored(parameters(config), tensors):
        if _is_in_singles(first := parameter.parts[0], tensors):
            made = parameter if first.kept else parameter.transposed()
            plan.append(Source(made, (_stack(first, tensors, problems),)))
        else:
            parts = tuple(_as_mixed(part, tensors) for part in parameter.parts)
            found = [_taken(part, tensors, problems) for part in parts]
            problems += _problems(parts, found)
            pairs = zip(parts, found, strict=True)
            whole = tuple(_as_part(part, one) for part, one in pairs if one is not None)
            plan.append(Source(dataclasses.replace(parameter, parts=parts), whole))
    if config.tie_word_embeddings and _HEAD in tensors:
        # Some tied checkpoints also store the head. It is only ignored if it equals the embeddings.
        head = tensors.pop(_HEAD)
        if embedding is not None and not _same(head, embedding):
            problems.append(("unused", f"{_HEAD}: tie_word_embeddings is true, but it differs from {embedding.name}"))
    problems += [("unused", f"{tensor.name} {list(tensor.shape)}") for tensor in tensors.values()]
    problems = problems or list(_flawed_factors(plan))
    if problems:
        raise PlanError(_report(directory, problems))
    _log_dequantized(directory, plan)
    return plan


def ignored_tensors(directory: str | pathlib.Path, config: ModelConfig) -> list[StoredTensor]:
    """Return the stored tensors that are no part of the plan, see `is_ignored`.

    Raises:
      FileNotFoundError, PlanError: see `make_plan`.
    """
    return [tensor for tensor in _stored_tensors(pathlib.Path(directory))[0] if is_ignored(config, tensor.name)]


def _divide(config: ModelConfig, tensors: dict[str, StoredTensor], problems: list[tuple[str, str]]) -> None:
    """Replace each tensor that is several here by its parts, which are consecutive rows, see `pieces`."""
    suffix = "" if config.text.quantization is None else config.text.quantization.suffix
    for module, outputs in pieces(config).items():
        endings = f".{module}.weight", f".{module}.weight{suffix}"
        for name in [name for name in tensors if name.endswith(endings)]:
            tensor, before, leaf = tensors[name], name.rpartition(".")[0], name.rpartition(".")[2]
            block = 1 if leaf == "weight" or config.text.quantization is None else config.text.quantization.outputs
            if any(rows % block for rows in outputs.values()):
                reason = f"must have a scale for {block} outputs that are all queries, all keys or all values"
                problems.append(
                    ("wrong shape", f"{tensor.name} {reason}, got {list(outputs.values())} outputs: {ADVICE}")
                )
            rows = {own: -(-count // block) for own, count in outputs.items()}
            total = sum(rows.values())
            if tensor.shape[:1] != (total,):
                problems.append(("wrong shape", f"{tensor.name} must have {total} rows, got {list(tensor.shape)}"))
            del tensors[name]
            begin, size = tensor.begin, tensor.nbytes // total
            for own, count in rows.items():
                end = begin + size * count
                part = dataclasses.replace(
                    tensor, begin=begin, end=end, shape=(count, *tensor.shape[1:]), name=f"{tensor.name}, rows of {own}"
                )
                tensors[f"{before.rpartition('.')[0]}.{own}.{leaf}"], begin = part, end


def _check_bits(directory: pathlib.Path, config: ModelConfig, stored: Iterable[StoredTensor]) -> None:
    """Reject FP8 weights without a `quantization_config`, and an FP8 vision tower, which some tools write."""
    if config.text.quantization is None and (found := [one.name for one in stored if one.dtype == FLOAT8]):
        raise PlanError(
            f"config.json of {directory} must have a quantization_config that describes FP8 weights, "
            f"got none and {len(found)} tensors of {FLOAT8}, such as {found[0]}"
        )
    tower = [one for one in stored if library_name(one.name).startswith("model.visual.")]
    found = [one.name for one in tower if one.dtype == FLOAT8 or one.name.endswith(_FACTOR_NAMES)]
    if found:
        raise PlanError(
            f"the vision tower of {directory} must not be quantized, but {len(found)} of its tensors are, such as "
            f"{found[0]}: use a checkpoint with a tower in bfloat16"
        )


def _as_part(part: Part, tensor: StoredTensor | Dequantized) -> StoredTensor | StoredFactors | Dequantized:
    return tensor if part.factors is None else StoredFactors(tensor, part.factors, part.shape[-2])


def _is_mixed(part: Part, name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether a matrix of this name is stored in FP8 although its product is not in FP8."""
    return part.mixed is not None and name in tensors and tensors[name].dtype == FLOAT8


def _as_mixed(part: Part, tensors: Mapping[str, StoredTensor]) -> Part:
    """Return the part as stored. A stack of FP8 matrices is [E, out, in]."""
    return part.transposed() if part.is_stack and _is_mixed(part, part.tensor, tensors) else part


def _taken(
    part: Part, tensors: dict[str, StoredTensor], problems: list[tuple[str, str]]
) -> StoredTensor | Dequantized | None:
    """Remove the tensor of a part from `tensors` and return it, or None if it is missing."""
    if not _is_mixed(part, part.tensor, tensors):
        return tensors.pop(part.tensor, None)
    return _dequantized(part, part.tensor, part.tensor_shape, tensors, problems)


def _dequantized(
    part: Part, name: str, shape: tuple[int, ...], tensors: dict[str, StoredTensor], problems: list[tuple[str, str]]
) -> StoredTensor | Dequantized:
    """Return an FP8 matrix dequantized, because its product is not in FP8."""
    assert part.mixed is not None
    tensor, own = tensors.pop(name), name + part.mixed.quantization.suffix
    factors, wanted = tensors.pop(own, None), part.mixed.stored_shape(shape)
    if factors is None:
        problems.append(("missing", f"{piece_name(own)} {list(wanted)}"))
        return tensor
    found = [(one, expected) for one, expected in ((tensor, shape), (factors, wanted)) if one.shape != expected]
    problems += [("wrong shape", f"{one.name} must be {list(right)}, got {list(one.shape)}") for one, right in found]
    if factors.dtype == FLOAT8:
        problems.append(("wrong dtype", f"{piece_name(own)} must be one of {_NAMES}, got {factors.dtype}"))
    is_wrong = found or factors.dtype == FLOAT8
    return tensor if is_wrong else Dequantized(tensor, StoredFactors(factors, part.mixed, shape[-2]))


def _flawed_factors(plan: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """Yield a problem for each tensor of scales that are not finite and above 0, which give wrong weights."""
    for source in plan:
        for single in _singles(source):
            if isinstance(single, StoredFactors | Dequantized) and (flaw := single.flaw) is not None:
                yield "with scales that are not finite and above 0", flaw


def _log_dequantized(directory: pathlib.Path, plan: Iterable[Source]) -> None:
    """Log what FP8 matrices cost that are dequantized. Decays and rates always are, and are small."""
    sources = [source for source in plan if source.parameter.path[-2] != "in_proj_ba"]
    found = [one.tensor for source in sources for one in _singles(source) if isinstance(one, Dequantized)]
    if found:
        _log.warning(
            "%d FP8 matrices of %s are dequantized, because config.json excludes them or other experts of their layer "
            "from FP8; they take %s more in bfloat16: %s",
            len(found), directory, gigabytes(sum(one.nbytes for one in found)), _some([one.name for one in found]),
        )  # fmt: skip


def _singles(source: Source) -> Iterator[StoredTensor | StoredFactors | Dequantized]:
    """Yield the tensors of a parameter, those of experts one by one."""
    for tensor in source.tensors:
        yield from (one for parts in tensor.experts for one in parts) if isinstance(tensor, Stack) else (tensor,)


def _problems(parts: Iterable[Part], found: Iterable[StoredTensor | Dequantized | None]) -> Iterator[tuple[str, str]]:
    """Yield the problems of the tensors of a parameter's parts. None: the tensor is missing."""
    for part, tensor in zip(parts, found, strict=True):
        expected = list(part.tensor_shape)
        if isinstance(tensor, Dequantized) or (
            part.mixed is not None and tensor is not None and tensor.dtype == FLOAT8
        ):
            continue  # `_dequantized` has reported its problems
        if tensor is None:
            yield "missing", f"{piece_name(part.tensor)} {expected}"
        elif tensor.shape != part.tensor_shape:
            yield "wrong shape", f"{tensor.name} must be {expected}, got {list(tensor.shape)}"
        elif part.is_stored_float8 != (tensor.dtype == FLOAT8):
            wanted = FLOAT8.name if part.is_stored_float8 else f"one of {_NAMES}"
            yield "wrong dtype", f"{tensor.name} must be {wanted}, got {tensor.dtype}"


def _is_in_singles(part: Part, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether a part is a stack whose experts are stored one by one."""
    names = (name for expert in part.singles for name in expert) if part.is_stack else ()
    return part.tensor not in tensors and any(name in tensors for name in names)


def _stack(part: Part, tensors: dict[str, StoredTensor], problems: list[tuple[str, str]]) -> Stack:
    """Return the stack of experts that are stored one by one."""
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
                problems.append(("wrong shape", f"{single.name} must be {list(shape)}, got {list(single.shape)}"))
            elif single.dtype != (dtype := FLOAT8 if part.is_float8 else first.dtype):
                problems.append(("wrong dtype", f"{single.name} must be {dtype}, got {single.dtype}"))
            elif part.factors is not None:
                singles.append(StoredFactors(single, part.factors, outputs // len(names)))
            else:
                singles.append(single)
        experts.append(tuple(singles))
    return Stack(part.tensor, part.shape if part.kept else part.transposed().tensor_shape, tuple(experts))


def _as_stored(wanted: list[Parameter], tensors: Mapping[str, StoredTensor]) -> list[Parameter]:
    """Return the parameters, with matrices of experts in the layout of the checkpoint.

    Published checkpoints and those that the library saves have different layouts. Square matrices do not show it, but
    gate_up and down are never both square.
    """
    parts = [part for parameter in wanted for part in parameter.parts if part.is_stack and part.kept is None]
    stacks = [part for part in parts if part.tensor in tensors and not _is_mixed(part, part.tensor, tensors)]
    is_transposed = any(tensors[part.tensor].shape == part.transposed().tensor_shape != part.shape for part in stacks)
    return [one.transposed() if is_transposed and one.parts[0] in parts else one for one in wanted]


def stored_dtype(plan: Iterable[Source], config: ModelConfig) -> np.dtype:
    """Return the dtype of a checkpoint: that of its tensors, or of `config.json` if they differ.

    FP8 weights and matrices excluded from FP8 do not count.

    Raises:
      ValueError: tensors differ and `config.json` has no dtype.
    """
    found = {
        tensor.dtype for source in plan for part, tensor in source.parts if part.kept is None and part.mixed is None
    }
    if len(found) == 1:
        return found.pop()
    if config.dtype is None:
        names = ", ".join(sorted(dtype.name for dtype in found))
        raise ValueError(f"dtype must be set for a checkpoint that mixes dtypes, got tensors of {names}")
    return as_dtype(config.dtype)


def as_dtype(dtype: Any, *besides: str) -> np.dtype:
    """Return a supported dtype for a name, a scalar type or a dtype. "half" and "float" are names, too.

    Args:
      besides: further valid names for the error.

    Raises:
      ValueError: the dtype is not supported.
    """
    supported = {dtype.name: dtype for dtype in DTYPES.values()}
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return supported[{"half": "float16", "float": "float32"}.get(name, name)]
    except (KeyError, TypeError):
        raise ValueError(f"dtype must be one of {', '.join((*besides, *supported))}, got {dtype!r}") from None


def tensor_digests(plan: Iterable[Source]) -> dict[str, str]:
    """Return the SHA-256 of every stored tensor by library name. Hashing releases the GIL and uses several cores."""
    tensors = {part.tensor: tensor for source in plan for part, tensor in source.parts}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vlcache-sha256") as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    digest = tensor.sha256()
    tensor.release()
    return digest


def sha256(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes, little-endian, in C order."""
    return hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()


def source_digest(plan: Iterable[Source], digests: dict[str, str]) -> str:
    """Return a digest of all stored weights: names, dtypes, shapes and the SHA-256 of each tensor's bytes."""
    listed = [
        [part.tensor, tensor.dtype.name, tensor.shape, digests[part.tensor]]
        for source in plan
        for part, tensor in source.parts
    ]
    return hashlib.sha256(json.dumps(["vlcache-weights/1", sorted(listed)]).encode()).hexdigest()


def _stored_tensors(directory: pathlib.Path) -> tuple[list[StoredTensor], list[tuple[str, str]]]:
    """Return all tensors of a directory, and problems for tensors that the index lists but the files lack."""
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(_no_weights(directory))
        return _read_header(directory / WEIGHTS_FILE), []
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise PlanError(f"{index} must contain a weight_map from tensors to files: {error!r}") from error
    for name in files:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise PlanError(f"weight_map of {index} must name files in the same folder, got {name!r}")
    if absent := [name for name in files if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{directory} must contain all files in {INDEX_FILE}, but lacks {_some(absent)}")
    tensors = [tensor for name in files for tensor in _read_header(directory / name)]
    where = {(tensor.name, tensor.file.name) for tensor in tensors}
    return tensors, [("missing", f"{n}: not in {file}, although {INDEX_FILE} lists it there")
                     for n, file in weight_map.items() if (n, file) not in where]  # fmt: skip


def _no_weights(directory: pathlib.Path) -> str:
    message = f"{directory} must contain {WEIGHTS_FILE} or {INDEX_FILE}, but has neither"
    if shards := sorted(path.name for path in directory.glob("*.safetensors")):
        return f"{message} (found {_some(shards)})"
    for suffix in (".bin", ".gguf"):
        if any(directory.glob(f"*{suffix}")):
            return f"{message} (found {suffix} files, but only safetensors is supported)"
    return message


def _read_header(path: pathlib.Path) -> list[StoredTensor]:
    """Return the tensors of a file. Their offsets are checked against its size, so later reads stay within it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise PlanError(f"{path} must be a complete safetensors file, but its {size} bytes end inside the header")
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
            raise PlanError(f"tensors of {path} must be contiguous, but {tensor.name} does not begin at byte {end}")
        end = tensor.end
    if end != size:
        raise PlanError(f"{path} must have {end} bytes as its header says, got {size}: the file is damaged or cut off")
    return tensors


def _entry(path: pathlib.Path, mapping: mmap.mmap, data: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    if entry["dtype"] not in STORED_DTYPES:
        raise PlanError(
            f"tensors must be stored as one of {', '.join(STORED_DTYPES)}, got {entry['dtype']} for {name} in {path}: "
            f"{ADVICE}"
        )
    dtype = STORED_DTYPES[entry["dtype"]]
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    if min(begin, *shape, 0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise PlanError(f"{name} of {path} must have {list(shape)} values of {dtype}, got bytes {begin} to {end}")
    return StoredTensor(name, path, data + begin, data + end, dtype, shape, mapping)


def _report(directory: pathlib.Path, problems: list[tuple[str, str]]) -> str:
    lines = [f"the tensors of {directory} must match its config.json, but {len(problems)} do not"]
    for kind in dict.fromkeys(kind for kind, _ in problems):
        listed = [line for other, line in problems if other == kind]
        lines.append(f"{kind} ({len(listed)}):")
        lines += [f"  {line}" for line in listed[:_MAX_LINES]]
        if len(listed) > _MAX_LINES:
            lines.append(f"  and {len(listed) - _MAX_LINES} more")
    return "\n".join(lines)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.sha256() == b.sha256()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return uninitialized memory, aligned to 64 bytes, so that a CPU device can use it without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
