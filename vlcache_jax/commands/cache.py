"""`vlcache cache`: cache entries of a directory (`CacheConfig.disk`) or of a remote store (`CacheConfig.remote`)."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import pathlib
import tarfile
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, cast

import numpy as np
import typer

from vlcache_jax.cache.folders import older_folders
from vlcache_jax.cache.record import Buffers, DamagedError, Line, Meta, Part, Record, Tier, TierError, blocks, verified
from vlcache_jax.cache.tiers.disk import FOLDER, DiskTier
from vlcache_jax.cache.tiers.record_file import file_name, make_header, name_of, read_header, take_header
from vlcache_jax.common.checks import parse_bytes
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress, say_errors
from vlcache_jax.study.report import show

app = typer.Typer(name="cache", no_args_is_help=True, help="List, check, move and serve stored cache entries.")
STORE = typer.Argument(help="Directory (the value of --disk) or URL (the value of --remote).", metavar="STORE")
EVERYTHING = 2**62  # maximum bytes of the tier, so that opening it evicts nothing
_TIMEOUT = 30.0  # seconds for a response of a remote store
_DAY = 24 * 3600


@app.command("ls")
def ls_command(store: Annotated[str, STORE]) -> None:
    """List the cache entries, the most recently used last.

    Example: vlcache cache ls ~/cache
    """
    with say_errors(), opened(store) as tier:
        rows = []
        for line, meta in _contents(tier):
            if meta is not None:  # another process may have deleted it
                rows.append(_row(meta, line))
        if rows:
            show(f"{len(rows)} cache entries in {_title(store)}", rows)
        else:
            print(f"no cache entries in {_title(store)}")


@app.command("stats")
def stats_command(store: Annotated[str, STORE]) -> None:
    """Sum up the cache entries by kind, and folders of older formats, which are not read.

    Example: vlcache cache stats ~/cache
    """
    with say_errors(), opened(store) as tier:
        kinds: dict[str, list[int]] = {"encoder output": [], "KV": []}
        images = set()
        for line in tier.lines():
            kind, entry, *_ = line.name.split("/")
            kinds["encoder output" if kind == "enc" else "KV"].append(line.bytes)
            images.add(entry)
        rows = [{"what": kind, "entries": str(len(one)), "MB": sum(one) / 1e6} for kind, one in kinds.items()]
        rows += [
            {"what": f"{name}, older format", "entries": "-", "MB": size / 1e6} for name, size in tier.older().items()
        ]
        show(f"{len(images)} images in {_title(store)}", rows)


@app.command("verify")
def verify_command(store: Annotated[str, STORE]) -> None:
    """Check all cache entries against their checksums, and delete damaged ones.

    Example: vlcache cache verify ~/cache
    """
    with say_errors(), opened(store) as tier:
        valid, damaged, unread = 0, 0, 0
        lines = list(tier.lines())
        with Progress("verifying", len(lines)) as bar:
            for line in lines:
                try:
                    if (meta := _meta(tier, line.name)) is not None:
                        _parts(tier, meta)
                        valid += 1
                except DamagedError as error:
                    damaged += 1
                    print(f"deleted: {error}")
                    tier.delete(line.name)
                except TierError as error:
                    unread += 1
                    print(f"unreadable: {error}")
                bar.update()
        print(f"cache entries: {valid} valid, {damaged} damaged, {unread} unreadable")
        if unread:
            raise typer.Exit(1)


@app.command("evict")
def evict_command(
    store: Annotated[str, STORE],
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY", help="Entry keys of images, or at least their first eight digits.")
    ],
) -> None:
    """Delete all cache entries of some images.

    Example: vlcache cache evict ~/cache 0d5f33a1
    """
    with say_errors(), opened(store) as tier:
        names = [line.name for line in _chosen(tier, keys)]
        for name in names:
            tier.delete(name)
        print(f"cache entries deleted: {len(names)}")


@app.command("prune")
def prune_command(
    store: Annotated[str, STORE],
    size: Annotated[
        str,
        typer.Argument(metavar="SIZE", help="Maximum size of the store, such as 10GB; 0 deletes all cache entries."),
    ],
    days: Annotated[
        float | None, typer.Option(min=0, help="Maximum age of cache entries, in days since they were written.")
    ] = None,
    old_formats: Annotated[bool, typer.Option("--old-formats", help="Also delete folders of older formats.")] = False,
) -> None:
    """Delete the least recently used cache entries until the others fit a size. Pinned entries stay.

    Example: vlcache cache prune ~/cache 10GB
    """
    with say_errors(), opened(store) as tier:
        before = len(list(tier.lines()))
        tier.prune(parse_bytes(size, "size"), None if days is None else time.time() - days * _DAY)
        left = [line.bytes for line in tier.lines()]
        print(f"cache entries deleted: {before - len(left)}; left: {len(left)}, {sum(left) / 1e6:.2f} MB")
        for name, size_of in tier.older().items() if old_formats else ():
            tier.remove_older(name)
            print(f"deleted: {name}, of an older format, {size_of / 1e6:.2f} MB")


@app.command("export")
def export_command(
    store: Annotated[str, STORE],
    out: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="File to write (tar).")],
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Entry keys of images, or at least their first eight digits."),
    ] = None,
) -> None:
    """Write cache entries to one file, all of them or those of some images.

    Example: vlcache cache export ~/cache manuals.tar 0d5f33a1
    """
    with say_errors(), opened(store) as tier:
        check_writable("out", out)
        lines = _chosen(tier, keys) if keys else list(tier.lines())
        if not lines:
            raise ValueError(f"store must have cache entries to export, got {_title(store)}")
        unfinished = out.with_name(f"{out.name}.part")
        count = 0
        try:
            with tarfile.open(unfinished, "w") as archive, Progress("exporting", len(lines)) as bar:
                for line in lines:
                    if (meta := _meta(tier, line.name)) is not None:
                        _add(archive, meta, _parts(tier, meta))
                        count += 1
                    bar.update()
            unfinished.replace(out)
        finally:
            unfinished.unlink(missing_ok=True)
        print(f"cache entries exported: {count}, {out.stat().st_size / 1e6:.2f} MB in {out}")


@app.command("import")
def import_command(
    file: Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="File of `vlcache cache export`.")],
    store: Annotated[str, STORE],
) -> None:
    """Add the cache entries of a file to a store, after a check of their checksums.

    Example: vlcache cache import manuals.tar s3://bucket/cache
    """
    with say_errors():
        if not file.is_file():
            raise ValueError(f"file must be a file of `vlcache cache export`, got {file}")
        counts = {"stored": 0, "known": 0, "refused": 0, "damaged": 0}
        try:
            with (
                tarfile.open(file, "r|*") as archive,
                opened(store, make=True) as tier,
                Progress("importing") as bar,
            ):
                for member in archive:
                    try:
                        counts[tier.write(*_record(archive, member))] += 1
                    except DamagedError as error:
                        counts["damaged"] += 1
                        print(f"skipped: {error}")
                    bar.update()
        except (tarfile.TarError, EOFError, OSError) as error:
            done = f"; {counts['stored']} cache entries were imported" if counts["stored"] else ""
            raise ValueError(f"file must be a file of `vlcache cache export`, got {file}: {error}{done}") from error
        print(
            f"cache entries imported: {counts['stored']}; in the store before: {counts['known']}; "
            f"refused: {counts['refused']}; damaged: {counts['damaged']}"
        )
        if counts["refused"] or counts["damaged"]:
            raise typer.Exit(1)


@app.command("serve")
def serve_command(
    directory: Annotated[
        pathlib.Path, typer.Argument(metavar="DIRECTORY", help="Directory of cache entries, the value of --disk.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free one.")] = 8470,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="VLCACHE_PEER_TOKEN", help="Token that clients must send, the value of their --peer-token."
        ),
    ] = None,
) -> None:
    """Let other machines read the cache entries of a directory, with `vlcache serve --peers URL`.

    Example: VLCACHE_PEER_TOKEN=secret vlcache cache serve ~/cache --host 0.0.0.0
    """
    from vlcache_jax.cache.tiers.peer_server import PeerServer

    with (
        say_errors(),
        opened(str(directory)) as tier,
        PeerServer(cast(DiskTier, tier), host, port, token=token) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        address, chosen = server.address[:2]
        print(f"serving {directory} at http://{address}:{chosen}", flush=True)
        server.serve_forever()


@contextlib.contextmanager
def opened(store: str, *, make: bool = False) -> Iterator[Tier]:
    """Open the cache entries of a directory or of a URL.

    Args:
      store: directory or URL.
      make: True to create a directory that does not exist.

    Raises:
      ValueError: the directory has no cache entries, or the store cannot be reached.
    """
    if "://" in store:
        from vlcache_jax.cache.tiers.remote import open_remote

        tier = open_remote(store, timeout=_TIMEOUT)
    else:
        directory = pathlib.Path(store).expanduser()
        has_records = (directory / FOLDER).is_dir() or (directory.is_dir() and older_folders(directory, FOLDER))
        if not (make or has_records):
            raise ValueError(f"store must be a URL or a directory of cache entries, got {store}")
        tier = DiskTier(directory, EVERYTHING)
    try:
        yield tier
    except TierError as error:
        raise ValueError(f"store must be reachable, got {_title(store)}: {error}") from error
    finally:
        tier.close()


def _title(store: str) -> str:
    """Return `store` without user name and password."""
    before, _, after = store.rpartition("@")
    return f"{before.partition('://')[0]}://...@{after}" if before and "://" in before else store


def _meta(tier: Tier, name: str) -> Meta | None:
    found = tier.find(name.split("/")[1])
    return next((one.meta for one in found if one.meta.name == name), None)


def _contents(tier: Tier) -> Iterator[tuple[Line, Meta | None]]:
    """Yield each line of the index with its metadata, or None if the entry was deleted meanwhile."""
    known: dict[str, Meta] = {}
    for line in list(tier.lines()):
        if line.name not in known:
            known |= {one.meta.name: one.meta for one in tier.find(line.name.split("/")[1])}
        yield line, known.get(line.name)


def _chosen(tier: Tier, keys: Iterable[str]) -> list[Line]:
    for key in keys:
        if len(key) < 8 or set(key) - set("0123456789abcdef"):
            raise ValueError(f"keys must have at least eight hexadecimal digits, got {key!r}")
    return [line for line in tier.lines() if line.name.split("/")[1].startswith(tuple(keys))]


def _row(meta: Meta, line: Line) -> dict[str, object]:
    return {
        "image": meta.entry[:12],
        "what": "encoder output" if meta.context is None else "KV",
        "context": "any" if meta.context is None else meta.context[:12],
        "tokens": meta.tokens,
        "format": meta.codec if meta.buffers else meta.dtype,
        "model": meta.model[:8],
        "MB": line.bytes / 1e6,
        "last used": datetime.datetime.fromtimestamp(line.used).isoformat(sep=" ", timespec="seconds"),
    }


def _parts(tier: Tier, meta: Meta) -> dict[Part, Buffers]:
    """Read a cache entry and check it against its checksums.

    Raises:
      DamagedError: it is damaged.
      TierError: it cannot be read.
    """
    record = Record(meta)  # allocates memory with the first part, after the tier has checked the size of the file

    def place(part: Part) -> Buffers:
        return record.part(meta.parts.index(part))

    return {part: verified(meta, part, buffers) for part, buffers in tier.read(meta, meta.parts, place)}


def _add(archive: tarfile.TarFile, meta: Meta, parts: dict[Part, Buffers]) -> None:
    content = io.BytesIO(make_header(meta))
    content.seek(0, os.SEEK_END)
    for part in meta.parts:
        for rows in blocks(meta, parts[part]):
            content.write(rows.view(np.uint8).data.cast("B"))
    about = tarfile.TarInfo(f"{FOLDER}/{file_name(meta.name)}")
    about.size, about.mode = content.tell(), 0o600
    content.seek(0)
    archive.addfile(about, content)


def _record(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[Meta, dict[Part, Buffers]]:
    """Return the cache entry of an archive member.

    Raises:
      DamagedError: the member is incomplete, damaged, or no cache entry.
    """
    folder, _, path = member.name.partition("/")
    name, file = name_of(path), archive.extractfile(member) if member.isfile() else None
    if folder != FOLDER or name is None or file is None:
        raise DamagedError(f"{member.name} is not a cache entry of format {FOLDER}")
    with file:
        meta = read_header(take_header(file, name))
        content = np.frombuffer(file.read(meta.nbytes + 1), np.uint8)
    if meta.name != name or len(content) != meta.nbytes:
        raise DamagedError(f"{name}: file is damaged")
    parts = Record(meta).parts
    for buffers in parts.values():
        for rows in blocks(meta, buffers):
            rows.reshape(-1).view(np.uint8)[:], content = content[: rows.nbytes], content[rows.nbytes :]
    return meta, {part: verified(meta, part, buffers) for part, buffers in parts.items()}
