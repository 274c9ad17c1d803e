"""`vlcache cache`: what a directory of records holds (`CacheConfig.disk`)."""

from __future__ import annotations

import contextlib
import datetime
import pathlib
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer

from vlcache_jax.cache.disk import FOLDER, DiskTier
from vlcache_jax.cache.record import DamagedError, Meta, TierError, verified
from vlcache_jax.checks import parse_bytes
from vlcache_jax.commands.schedule import say_errors
from vlcache_jax.progress import Progress
from vlcache_jax.study.report import show

app = typer.Typer(name="cache", no_args_is_help=True, help="Shows and tends a directory of records.")
DIRECTORY = typer.Argument(help="What `disk` of CacheConfig names.")
EVERYTHING = 2**62  # bytes; who only looks makes no room


@app.command("ls")
def ls_command(directory: Annotated[pathlib.Path, DIRECTORY]) -> None:
    """Lists the records, those that were used last at the end.

    Example: vlcache cache ls ~/records
    """
    with say_errors(), opened(directory) as tier:
        rows = []
        for name, size, used in tier.lines():
            if (meta := tier.meta(name)) is not None:  # another process may have deleted it
                rows.append(_row(meta, size, used))
        if rows:
            show(f"{len(rows)} records in {directory}", rows)
        else:
            print(f"no records in {directory}")


@app.command("stats")
def stats_command(directory: Annotated[pathlib.Path, DIRECTORY]) -> None:
    """Sums up the records by kind.

    Example: vlcache cache stats ~/records
    """
    with say_errors(), opened(directory) as tier:
        kinds: dict[str, list[int]] = {"encoder rows": [], "keys and values": []}
        images = set()
        for name, size, _ in tier.lines():
            kind, entry, *_ = name.split("/")
            kinds["encoder rows" if kind == "enc" else "keys and values"].append(size)
            images.add(entry)
        rows = [{"what": kind, "records": len(sizes), "MB": sum(sizes) / 1e6} for kind, sizes in kinds.items()]
        show(f"{len(images)} images in {directory}", rows)


@app.command("verify")
def verify_command(directory: Annotated[pathlib.Path, DIRECTORY]) -> None:
    """Reads every record, compares it with its checksums, and deletes what is damaged.

    Example: vlcache cache verify ~/records
    """
    with say_errors(), opened(directory) as tier:
        names, damaged, unread = tier.keys(), 0, 0
        with Progress("verifying", len(names)) as bar:
            for name in names:
                try:
                    _verify(tier, name)
                except DamagedError as error:
                    damaged += 1
                    print(f"deleted: {error}")
                    tier.delete(name)
                except TierError as error:
                    unread += 1
                    print(f"could not be read: {error}")
                bar.update()
        print(f"records: {len(names) - damaged - unread} whole, {damaged} damaged, {unread} that could not be read")
        if unread:
            raise typer.Exit(1)


@app.command("evict")
def evict_command(
    directory: Annotated[pathlib.Path, DIRECTORY],
    keys: Annotated[list[str], typer.Argument(help="Entry keys of images, or their first digits, eight at least.")],
) -> None:
    """Deletes all records of images.

    Example: vlcache cache evict ~/records 0d5f33a1
    """
    with say_errors(), opened(directory) as tier:
        for key in keys:
            if len(key) < 8 or set(key) - set("0123456789abcdef"):
                raise ValueError(f"keys must have eight hexadecimal digits at least, got {key!r}")
        names = [name for key in keys for kind in ("enc", "kv") for name in tier.keys(f"{kind}/{key}")]
        for name in names:
            tier.delete(name)
        print(f"records deleted: {len(names)}")


@app.command("prune")
def prune_command(
    directory: Annotated[pathlib.Path, DIRECTORY],
    size: Annotated[str, typer.Argument(help="What is to be left at most, such as 10GB; 0 deletes all.")],
) -> None:
    """Deletes the records that were not used for longest, until the others fit.

    Example: vlcache cache prune ~/records 10GB
    """
    with say_errors():
        capacity = parse_bytes(size, "size")
        with opened(directory) as tier:
            before = tier.counts()
        with opened(directory, capacity) as tier:
            after = tier.counts()
        gone = before["disk_records"] - after["disk_records"]
        print(f"records deleted: {gone}; left: {after['disk_records']}, {after['disk_bytes'] / 1e6:.2f} MB")


@contextlib.contextmanager
def opened(directory: pathlib.Path, capacity: int = EVERYTHING) -> Iterator[DiskTier]:
    """The records of a directory.

    Raises:
      ValueError: it holds none.
    """
    if not (directory / FOLDER).is_dir():
        raise ValueError(f"directory must be one of records, got {directory}")
    tier = DiskTier(directory, capacity)
    try:
        yield tier
    finally:
        tier.close()


def _row(meta: Meta, size: int, used: float) -> dict[str, object]:
    return {
        "image": meta.entry[:12],
        "what": "encoder rows" if meta.context is None else "keys and values",
        "context": "any" if meta.context is None else meta.context[:12],
        "tokens": meta.tokens,
        "kept as": "coded" if meta.planes else meta.dtype,
        "MB": size / 1e6,
        "last used": datetime.datetime.fromtimestamp(used).isoformat(sep=" ", timespec="seconds"),
    }


def _verify(tier: DiskTier, name: str) -> None:
    """Raises DamagedError if a record is damaged, TierError if it cannot be read."""
    if (meta := tier.meta(name)) is None:
        return  # another process has deleted it
    places = dict(zip(meta.parts, np.empty(meta.shape, meta.dtype), strict=True))
    for part, array in tier.read(name, meta.parts, places.__getitem__):
        verified(meta, part, array)
