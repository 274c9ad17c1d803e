"""A record as a file: a safetensors file that says all about itself.

The header is a function of what the record is and of its checksums, and of nothing else; a file whose header is not
exactly what its own contents give is damaged. Behind it lie the parts in their order, without padding, so that layers
can be read one after the other, or apart.
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
LENGTH = struct.Struct("<Q")  # in front of the header: its length
MOST_HEADER = 2**20  # bytes; for 200 layers it has 40 thousand
_FORMAT = f"vlcache-jax record {FORMAT_VERSION}"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
_FILE = re.compile(rf"(?P<folder>..)/(?P<entry>[0-9a-f]{{64}})(\.(?P<context>[0-9a-f]{{64}}))?{SUFFIX}")
_PARSED = 1024  # headers that are remembered, as a look and what follows it need the same ones; some KB apiece
_NO_DIGEST = "0" * 32


def file_name(name: str) -> str:
    """Where in a store the record of a name lies: a folder by the first digits, and a name that no other record has."""
    _, entry, *context = name.split("/")
    return f"{entry[:2]}/{'.'.join([entry, *context])}{SUFFIX}"


def name_of(file: str) -> str | None:
    """The record whose file this is, by its path in a store; None: it is no record's."""
    if (ours := _FILE.fullmatch(file)) is None or ours["folder"] != ours["entry"][:2]:
        return None
    return f"enc/{ours['entry']}" if ours["context"] is None else f"kv/{ours['entry']}/{ours['context']}"


def file_bytes(meta: Meta) -> int:
    """Of a record's whole file."""
    return len(make_header(meta)) + meta.part_bytes * len(meta.parts)


@functools.lru_cache(_PARSED)
def make_header(meta: Meta) -> bytes:
    """The beginning of a complete record's file, a multiple of 64 bytes."""
    return _header(meta, xxhash.xxh3_128_hexdigest(_header(meta, _NO_DIGEST)))


def take_header(file: IO[bytes], name: object) -> bytes:
    """The header at the beginning of a file, with its length.

    Raises:
      DamagedError: there is none; it calls the file by its name.
    """
    first = file.read(LENGTH.size)
    if len(first) < LENGTH.size or (length := LENGTH.unpack(first)[0]) > MOST_HEADER:
        raise DamagedError(f"{name}: no header")
    return first + file.read(length)


@functools.lru_cache(_PARSED)
def read_header(header: bytes) -> Meta:
    """What a file's beginning says; its data have no room for padding.

    Raises:
      DamagedError: it is not what `make_header` made.
    """
    try:
        said: Mapping[str, str] = json.loads(header[LENGTH.size :])["__metadata__"]
        grid, shape, planes, checksums = (_numbers(said[name]) for name in ("grid", "shape", "planes", "checksums"))
        if shape[0] != len(checksums):  # before anything is as large as it says
            raise ValueError(f"{shape[0]} parts, {len(checksums)} checksums")
        meta = Meta(
            entry=said["entry"],
            owner=said["owner"],
            context=said.get("context"),
            canonical=said["canonical"] == "true",
            grid=(grid[0], grid[1], grid[2]),
            tokens=int(said["tokens"]),
            dtype=said["dtype"],
            shape=shape,
            planes=planes,
            model=said["model"],
            codec=said["codec"],
            checksums=checksums,
        )
        is_whole = make_header(meta) == header
    except Exception as error:  # whatever is wrong with it, it is damaged
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
        "planes": _text(meta.planes),
        "model": meta.model,
        "codec": meta.codec,
        "checksum": CHECKSUM,
        "checksums": _text(meta.checksums),
        "digest": digest,
    }
    if meta.context is not None:
        about["context"] = meta.context
    tensors: dict[str, Any] = {"__metadata__": about}
    for i, (part, _) in enumerate(zip(meta.parts, meta.checksums, strict=True)):
        tensors[".".join(map(str, part))] = {
            "dtype": _DTYPES[meta.dtype],
            "shape": meta.shape[1:],
            "data_offsets": (i * size, (i + 1) * size),
        }
    text = json.dumps(tensors, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH.size + len(text)) % 64)
    return LENGTH.pack(len(text)) + text


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
