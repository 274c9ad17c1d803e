"""`vlcache cache`: what a directory of records holds (`CacheConfig.disk`), or a store elsewhere (`remote`)."""

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
from vlcache_jax.cache.record import DamagedError, Line, Meta, Part, Planes, Record, Tier, TierError, blocks, verified
from vlcache_jax.cache.tiers.disk import FOLDER, DiskTier
from vlcache_jax.cache.tiers.record_file import file_name, make_header, name_of, read_header, take_header
from vlcache_jax.common.checks import parse_bytes
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress, say_errors
from vlcache_jax.study.report import show

app = typer.Typer(name="cache", no_args_is_help=True, help="List, check, move and serve stored cache entries.")
STORE = typer.Argument(help="What `disk` or `remote` of CacheConfig names: a directory, or a URL.", metavar="STORE")
EVERYTHING = 2**62  # bytes; who only looks makes no room
_TIMEOUT = 30.0  # seconds that a store elsewhere may take to answer
_DAY = 24 * 3600


@app.command("ls")
def ls_command(store: Annotated[str, STORE]) -> None:
    """Lists the records, those that were used last at the end.

    Example: vlcache cache ls ~/records
    """
    with say_errors(), opened(store) as tier:
        rows = []
        for line, meta in _contents(tier):
            if meta is not None:  # another process may have deleted it
                rows.append(_row(meta, line))
        if rows:
            show(f"{len(rows)} records in {_title(store)}", rows)
        else:
            print(f"no records in {_title(store)}")


@app.command("stats")
def stats_command(store: Annotated[str, STORE]) -> None:
    """Sums up the records by kind, and folders of older formats, which are not read.

    Example: vlcache cache stats ~/records
    """
    with say_errors(), opened(store) as tier:
        kinds: dict[str, list[int]] = {"encoder rows": [], "keys and values": []}
        images = set()
        for line in tier.lines():
            kind, entry, *_ = line.name.split("/")
            kinds["encoder rows" if kind == "enc" else "keys and values"].append(line.bytes)
            images.add(entry)
        rows = [{"what": kind, "records": str(len(one)), "MB": sum(one) / 1e6} for kind, one in kinds.items()]
        rows += [
            {"what": f"{name}, older format", "records": "-", "MB": size / 1e6} for name, size in tier.older().items()
        ]
        show(f"{len(images)} images in {_title(store)}", rows)


@app.command("verify")
def verify_command(store: Annotated[str, STORE]) -> None:
    """Reads every record, compares it with its checksums, and deletes what is damaged.

    Example: vlcache cache verify ~/records
    """
    with say_errors(), opened(store) as tier:
        whole, damaged, unread = 0, 0, 0
        lines = list(tier.lines())
        with Progress("verifying", len(lines)) as bar:
            for line in lines:
                try:
                    if (meta := _meta(tier, line.name)) is not None:
                        _parts(tier, meta)
                        whole += 1
                except DamagedError as error:
                    damaged += 1
                    print(f"deleted: {error}")
                    tier.delete(line.name)
                except TierError as error:
                    unread += 1
                    print(f"could not be read: {error}")
                bar.update()
        print(f"records: {whole} whole, {damaged} damaged, {unread} that could not be read")
        if unread:
            raise typer.Exit(1)


@app.command("evict")
def evict_command(
    store: Annotated[str, STORE],
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY", help="Entry keys of images, or their first digits, eight at least.")
    ],
) -> None:
    """Deletes all records of images.

    Example: vlcache cache evict ~/records 0d5f33a1
    """
    with say_errors(), opened(store) as tier:
        names = [line.name for line in _chosen(tier, keys)]
        for name in names:
            tier.delete(name)
        print(f"records deleted: {len(names)}")


@app.command("prune")
def prune_command(
    store: Annotated[str, STORE],
    size: Annotated[
        str, typer.Argument(metavar="SIZE", help="What is to be left at most, such as 10GB; 0 deletes all.")
    ],
    days: Annotated[
        float | None, typer.Option(min=0, help="What was written before so many days leaves in any case.")
    ] = None,
    old_formats: Annotated[
        bool, typer.Option("--old-formats", help="Also delete folders of older formats, with all that they hold.")
    ] = False,
) -> None:
    """Deletes the records that were not used for longest, until the others fit. Pinned ones stay.

    Example: vlcache cache prune ~/records 10GB
    """
    with say_errors(), opened(store) as tier:
        before = len(list(tier.lines()))
        tier.prune(parse_bytes(size, "size"), None if days is None else time.time() - days * _DAY)
        left = [line.bytes for line in tier.lines()]
        print(f"records deleted: {before - len(left)}; left: {len(left)}, {sum(left) / 1e6:.2f} MB")
        for name, size_of in tier.older().items() if old_formats else ():
            tier.remove_older(name)
            print(f"deleted: {name}, of an older format, {size_of / 1e6:.2f} MB")


@app.command("export")
def export_command(
    store: Annotated[str, STORE],
    out: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="File to write (tar).")],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Entry keys of images, or their first digits.")
    ] = None,
) -> None:
    """Writes records into one file, all of them or those of some images.

    Example: vlcache cache export ~/records manuals.tar 0d5f33a1
    """
    with say_errors(), opened(store) as tier:
        check_writable("out", out)
        lines = _chosen(tier, keys) if keys else list(tier.lines())
        if not lines:
            raise ValueError(f"store must have records of these images, got {_title(store)}")
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
        print(f"records exported: {count}, {out.stat().st_size / 1e6:.2f} MB in {out}")


@app.command("import")
def import_command(
    file: Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="What `vlcache cache export` wrote.")],
    store: Annotated[str, STORE],
) -> None:
    """Adds the records of a file to a store; each is compared with its checksums first.

    Example: vlcache cache import manuals.tar s3://bucket/records
    """
    with say_errors():
        if not file.is_file():
            raise ValueError(f"file must be what `vlcache cache export` wrote, got {file}")
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
                        print(f"left out: {error}")
                    bar.update()
        except (tarfile.TarError, EOFError, OSError) as error:
            done = f"; {counts['stored']} records were imported" if counts["stored"] else ""
            raise ValueError(f"file must be what `vlcache cache export` wrote, got {file}: {error}{done}") from error
        print(
            f"records imported: {counts['stored']}; there already: {counts['known']}; "
            f"refused: {counts['refused']}; damaged: {counts['damaged']}"
        )
        if counts["refused"] or counts["damaged"]:
            raise typer.Exit(1)


@app.command("serve")
def serve_command(
    directory: Annotated[pathlib.Path, typer.Argument(metavar="DIRECTORY", help="What `disk` of CacheConfig names.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8470,
    token: Annotated[
        str | None, typer.Option(envvar="VLCACHE_PEER_TOKEN", help="That clients must know (peer_token).")
    ] = None,
) -> None:
    """Lets other machines read the records of a directory (`peers` of CacheConfig).

    Example: VLCACHE_PEER_TOKEN=secret vlcache cache serve ~/records --host 0.0.0.0
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
    """The records of a directory or of a URL.

    Args:
      make: a directory that does not exist is made.

    Raises:
      ValueError: it holds none.
    """
    if "://" in store:
        from vlcache_jax.cache.tiers.remote import open_remote

        tier = open_remote(store, timeout=_TIMEOUT)
    else:
        directory = pathlib.Path(store).expanduser()
        has_records = (directory / FOLDER).is_dir() or (directory.is_dir() and older_folders(directory, FOLDER))
        if not (make or has_records):
            raise ValueError(f"store must be a URL or a directory of records, got {store}")
        tier = DiskTier(directory, EVERYTHING)
    try:
        yield tier
    except TierError as error:
        raise ValueError(f"store must be there and answer, got {_title(store)}: {error}") from error
    finally:
        tier.close()


def _title(store: str) -> str:
    """Without a password."""
    before, _, after = store.rpartition("@")
    return f"{before.partition('://')[0]}://...@{after}" if before and "://" in before else store


def _meta(tier: Tier, name: str) -> Meta | None:
    found = tier.find(name.split("/")[1])
    return next((one.meta for one in found if one.meta.name == name), None)


def _contents(tier: Tier) -> Iterator[tuple[Line, Meta | None]]:
    """All records, and what they are; None: they are not there any more."""
    known: dict[str, Meta] = {}
    for line in list(tier.lines()):
        if line.name not in known:
            known |= {one.meta.name: one.meta for one in tier.find(line.name.split("/")[1])}
        yield line, known.get(line.name)


def _chosen(tier: Tier, keys: Iterable[str]) -> list[Line]:
    for key in keys:
        if len(key) < 8 or set(key) - set("0123456789abcdef"):
            raise ValueError(f"keys must have eight hexadecimal digits at least, got {key!r}")
    return [line for line in tier.lines() if line.name.split("/")[1].startswith(tuple(keys))]


def _row(meta: Meta, line: Line) -> dict[str, object]:
    return {
        "image": meta.entry[:12],
        "what": "encoder rows" if meta.context is None else "keys and values",
        "context": "any" if meta.context is None else meta.context[:12],
        "tokens": meta.tokens,
        "kept as": meta.codec if meta.planes else meta.dtype,
        "model": meta.model[:8],
        "MB": line.bytes / 1e6,
        "last used": datetime.datetime.fromtimestamp(line.used).isoformat(sep=" ", timespec="seconds"),
    }


def _parts(tier: Tier, meta: Meta) -> dict[Part, Planes]:
    """A record as it is kept, compared with its checksums.

    Raises:
      DamagedError, TierError: it is damaged, or cannot be read.
    """
    record = Record(meta)  # takes memory when the first part has come, and its file has the size that it says

    def place(part: Part) -> Planes:
        return record.part(meta.parts.index(part))

    return {part: verified(meta, part, planes) for part, planes in tier.read(meta, meta.parts, place)}


def _add(archive: tarfile.TarFile, meta: Meta, parts: dict[Part, Planes]) -> None:
    content = io.BytesIO(make_header(meta))
    content.seek(0, os.SEEK_END)
    for part in meta.parts:
        for rows in blocks(meta, parts[part]):
            content.write(rows.view(np.uint8).data.cast("B"))
    about = tarfile.TarInfo(f"{FOLDER}/{file_name(meta.name)}")
    about.size, about.mode = content.tell(), 0o600
    content.seek(0)
    archive.addfile(about, content)


def _record(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[Meta, dict[Part, Planes]]:
    """A record of an archive.

    Raises:
      DamagedError: it is not whole, or none.
    """
    folder, _, path = member.name.partition("/")
    name, file = name_of(path), archive.extractfile(member) if member.isfile() else None
    if folder != FOLDER or name is None or file is None:
        raise DamagedError(f"{member.name} is no record of format {FOLDER}")
    with file:
        meta = read_header(take_header(file, name))
        content = np.frombuffer(file.read(meta.nbytes + 1), np.uint8)
    if meta.name != name or len(content) != meta.nbytes:
        raise DamagedError(f"{name}: file is damaged")
    parts = Record(meta).parts
    for planes in parts.values():
        for rows in blocks(meta, planes):
            rows.reshape(-1).view(np.uint8)[:], content = content[: rows.nbytes], content[rows.nbytes :]
    return meta, {part: verified(meta, part, planes) for part, planes in parts.items()}
