"""File format of a record: a self-describing safetensors file.

The header depends only on the description of the record and its checksums. A file whose header differs from the one
that its contents determine is damaged. The parts follow in order and without padding, so that layers can be read one by
one.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Mapping
from typing import IO, Any

import xxhash

from vlcache_jax.cache.keys import FORMAT_VERSION
from vlcache_jax.cache.record import CHECKSUM, DamagedError, Meta

SUFFIX = ".safetensors"
LENGTH = struct.Struct("<Q")  # length of the header, which precedes it
MAX_HEADER = 2**20  # maximum size of a header in bytes; with 200 layers it has 40 thousand
_FORMAT = f"vlcache-jax record {FORMAT_VERSION}"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8", "int8": "I8"}
_FILE = re.compile(rf"(?P<folder>..)/(?P<entry>[0-9a-f]{{64}})(\.(?P<context>[0-9a-f]{{64}}))?{SUFFIX}")
_PARSED = 1024  # cached headers, a few KB each: a lookup and the load after it parse the same ones
_NO_DIGEST = "0" * 32


def file_name(name: str) -> str:
    """Return the path of a record in a store: a folder named by the first digits, and a unique file name."""
    _, entry, *context = name.split("/")
    return f"{entry[:2]}/{'.'.join([entry, *context])}{SUFFIX}"


def name_of(file: str) -> str | None:
    """Return the name of the record with this path in a store; None: it is not the path of a record."""
    if (ours := _FILE.fullmatch(file)) is None or ours["folder"] != ours["entry"][:2]:
        return None
    return f"enc/{ours['entry']}" if ours["context"] is None else f"kv/{ours['entry']}/{ours['context']}"


def file_bytes(meta: Meta) -> int:
    """Return the size of a record's file in bytes."""
    return len(make_header(meta)) + meta.part_bytes * len(meta.parts)


@functools.lru_cache(_PARSED)
def make_header(meta: Meta) -> bytes:
    """Return the header of a complete record's file with its length prefix; its size is a multiple of 64 bytes."""
    return _header(meta, xxhash.xxh3_128_hexdigest(_header(meta, _NO_DIGEST)))


def take_header(file: IO[bytes], name: object) -> bytes:
    """Read the header at the beginning of a file, with its length prefix.

    Args:
      file: the file.
      name: name of the file in errors.

    Raises:
      DamagedError: the file has no header.
    """
    first = file.read(LENGTH.size)
    if len(first) < LENGTH.size or (length := LENGTH.unpack(first)[0]) > MAX_HEADER:
        raise DamagedError(f"{name}: file must begin with a header of at most {MAX_HEADER} bytes")
    return first + file.read(length)


@functools.lru_cache(_PARSED)
def read_header(header: bytes) -> Meta:
    """Return the description in a header, without padding.

    Raises:
      DamagedError: `make_header` would not have made this header.
    """
    try:
        about: Mapping[str, str] = json.loads(header[LENGTH.size :])["__metadata__"]
        grid, shape, buffers, checksums = (_numbers(about[name]) for name in ("grid", "shape", "planes", "checksums"))
        if shape[0] != len(checksums):  # before anything of this size is allocated
            raise ValueError(f"checksums must be {shape[0]}, one per part, got {len(checksums)}")
        meta = Meta(
            entry=about["entry"],
            owner=about["owner"],
            context=about.get("context"),
            canonical=about["canonical"] == "true",
            grid=(grid[0], grid[1], grid[2]),
            tokens=int(about["tokens"]),
            dtype=about["dtype"],
            shape=shape,
            buffers=buffers,
            states=int(about.get("states", "0")),
            maps=int(about.get("maps", "0")),
            model=about["model"],
            codec=about["codec"],
            checksums=checksums,
        )
        is_whole = make_header(meta) == header
    except Exception as error:  # every error means damage
        raise DamagedError(f"header of {len(header)} bytes is damaged: {type(error).__name__}: {error}") from error
    if not is_whole:
        raise DamagedError(f"header of {len(header)} bytes is damaged")
    return meta


def _header(meta: Meta, digest: str) -> bytes:
    meta = meta.with_room(meta.tokens)
    size = meta.part_bytes
    about = {
        "format": _FORMAT,
        "entry": meta.entry,
        "owner": meta.owner,
        "canonical": str(meta.canonical).lower(),
        "grid": _text(meta.grid),
        "tokens": str(meta.tokens),
        "dtype": meta.dtype,
        "shape": _text(meta.shape),
        "planes": _text(meta.buffers),
        "model": meta.model,
        "codec": meta.codec,
        "checksum": CHECKSUM,
        "checksums": _text(meta.checksums),
        "digest": digest,
    }
    if meta.context is not None:
        about["context"] = meta.context
    rest = [("states", "F32", meta.states, meta.state_bytes[0])] if meta.states else []
    if meta.maps:
        rest.append(("maps", _DTYPES[str(meta.map_dtype)], meta.maps, meta.state_bytes[1]))
    about |= {name: str(values) for name, _, values, _ in rest}
    tensors: dict[str, Any] = {"__metadata__": about}
    for i, (part, _) in enumerate(zip(meta.parts, meta.checksums, strict=True)):
        tensors[".".join(map(str, part))] = {
            "dtype": _DTYPES[meta.dtype],
            "shape": meta.shape[1:],
            "data_offsets": (i * size, end := (i + 1) * size - sum(meta.state_bytes)),
        }
        for name, dtype, values, nbytes in rest:
            offsets = (end, end := end + nbytes)
            tensors[f"{name}.{i}"] = {"dtype": dtype, "shape": (values,), "data_offsets": offsets}
    text = json.dumps(tensors, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % 64)
    return LENGTH.pack(len(text)) + text


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
