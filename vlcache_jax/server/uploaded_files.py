"""Pictures that clients upload once and name afterwards, and the operator's libraries, over HTTP.

A file is an item of the library `files` of its tenant; without tenants, of the operator's, whom all clients are then.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.cache.items import Item
from vlcache_jax.cache.keys import SHARED
from vlcache_jax.common.checks import short
from vlcache_jax.inputs.messages import FILES
from vlcache_jax.library import Library
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.admission import TENANT, ClientGoneError, Entrance, Form, read_form
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import IdMaker, answer_json
from vlcache_jax.server.tenants import Register, Tenant, owner_of

_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_ITEM_FIELDS = ("id", "metadata", "expires")
_LEAST, _MOST = 3600, 2592000  # seconds that OpenAI lets a file have


class Files:
    """Keeps what clients upload."""

    def __init__(
        self, engine: AsyncLLM, config: ServerConfig, entrance: Entrance, register: Register | None, names: IdMaker
    ):
        self._engine, self._config, self._entrance, self._register = engine, config, entrance, register
        self._names = names
        # Who uploads waits for the engine, and for each other; nobody else should.
        self._threads, self._uploads = (ThreadPoolExecutor(2, f"vlcache-{name}") for name in ("files", "uploads"))

    # Files.

    async def files(self, request: Request) -> Response:
        """Uploads one, or lists them."""
        if request.method == "GET":
            return answer_json(await self._run(self._list, request, await self._library(request)))
        return await self._uploaded(request, self._create, _FIELDS)

    async def file(self, request: Request) -> Response:
        """What is said of a file, or its end."""
        library, name = await self._library(request), request.path_params["name"]
        if request.method == "DELETE":
            if not await self._run(library.remove, _known(name)):
                raise _no_file(name)
            return answer_json({"id": name, "object": "file", "deleted": True})
        return answer_json(_described(await self._run(self._found, library, name)))

    async def content(self, request: Request) -> Response:
        """The bytes of a file."""
        library, name = await self._library(request), request.path_params["name"]
        item = await self._run(self._found, library, name)
        if item.file is None:
            raise ApiError("the bytes of files are not kept, as this server has no disk tier", status=404)
        try:
            found = await self._run(library.image, name)
        except ValueError as error:
            raise ApiError(str(error), status=404) from error
        return Response(found, media_type="application/octet-stream")

    # The operator's libraries.

    async def libraries(self, _: Request) -> Response:
        """Their names."""
        names = await self._run(self._engine.service.items.libraries, SHARED)
        return answer_json({"object": "list", "data": [{"object": "library", "name": name} for name in names]})

    async def library(self, request: Request) -> Response:
        """Its items, or one more; or another picture for one."""
        if request.method == "GET":
            library = await self._named(request)
            items = await self._run(library.items)
            return answer_json({"object": "list", "data": list(map(_item, items))})
        return await self._uploaded(request, self._put, _ITEM_FIELDS)

    async def item(self, request: Request) -> Response:
        """What is said of an item, or its end."""
        library, name = await self._named(request), request.path_params["name"]
        if request.method == "DELETE":
            if not await self._run(library.remove, name):
                raise ApiError(f"library {short(library.name)} has no item {short(name)}", status=404)
            return answer_json({"id": name, "object": "library.item", "deleted": True})
        try:
            return answer_json(_item(await self._run(library.get, name)))
        except ApiError as error:
            raise ApiError(error.message, status=404) from error

    # Inside.

    async def _uploaded(
        self, request: Request, work: Callable[[Request, Form], Mapping[str, Any]], fields: tuple[str, ...]
    ) -> Response:
        try:
            with self._entrance.enter(request.scope) as place:
                form = await read_form(request, self._config, fields, place)
                return answer_json(await self._run(work, request, form, threads=self._uploads))
        except ClientGoneError:
            return Response(status_code=499)
        except ValueError as error:
            raise error if isinstance(error, ApiError) else _error(error) from error

    def _create(self, request: Request, form: Form) -> Mapping[str, Any]:
        if form.fields.get("purpose") != "vision":
            raise ApiError(f"purpose must be vision, got {short(form.fields.get('purpose'))}", "purpose")
        anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if (anchor, seconds) != (None, None) and anchor != "created_at":
            raise ApiError(f"expires_after.anchor must be created_at, got {short(anchor)}", "expires_after")
        library = files_of(self._engine, self._register, request.scope.get(TENANT))
        if len(library) >= self._config.max_files:
            raise ApiError(
                f"files must be at most {self._config.max_files}; delete some, or let them expire", status=429
            )
        said = {"filename": form.filename, "bytes": len(form.content)}
        name = self._names.new("file-", 24)
        return _described(library.add(form.content, name, said, _seconds(seconds, "expires_after", _LEAST, _MOST)))

    def _put(self, request: Request, form: Form) -> Mapping[str, Any]:
        library = Library(
            self._engine, request.path_params["library"], keep_bytes=self._engine.service.items.keeps_files
        )
        name = form.fields.get("id")
        if name is None:
            raise ApiError("id must be there, got none", "id")
        try:
            metadata = json.loads(form.fields["metadata"]) if "metadata" in form.fields else None
        except (ValueError, RecursionError) as error:
            raise ApiError(f"metadata must be JSON, got {short(form.fields['metadata'])}", "metadata") from error
        seconds = _seconds(form.fields.get("expires"), "expires", 0, float("inf"))
        return _item(
            (library.update if request.method == "PUT" else library.add)(form.content, name, metadata, seconds)
        )

    def _list(self, request: Request, library: Library) -> Mapping[str, Any]:
        asked = request.query_params
        limit, order = asked.get("limit", "10000"), asked.get("order", "desc")
        if not (limit.isdecimal() and 1 <= int(limit) <= 10000):
            raise ApiError(f"limit must be from 1 to 10000, got {short(limit)}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(f"order must be asc or desc, got {short(order)}", "order")
        items = sorted(library.items(), key=lambda item: (item.added, item.id), reverse=order == "desc")
        if asked.get("purpose", "vision") != "vision":
            items = []
        if (after := asked.get("after")) is not None:
            places = [i for i, item in enumerate(items) if item.id == after]
            if not places:
                raise _no_file(after)
            items = items[places[0] + 1 :]
        shown = list(map(_described, items[: int(limit)]))
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
        return {"object": "list", "data": shown, "has_more": len(items) > len(shown), **ends}

    def _found(self, library: Library, name: str) -> Item:
        if _known(name) not in library:
            raise _no_file(name)
        return library.get(name)

    async def _library(self, request: Request) -> Library:
        return await self._run(files_of, self._engine, self._register, request.scope.get(TENANT))

    async def _named(self, request: Request) -> Library:
        return await self._run(functools.partial(Library, self._engine, request.path_params["library"]))

    async def _run[T](self, work: Callable[..., T], *given: Any, threads: Executor | None = None) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads or self._threads, work, *given)
        except ValueError as error:
            raise error if isinstance(error, ApiError) else _error(error) from error


def files_of(engine: AsyncLLM, register: Register | None, tenant: Tenant | None) -> Library:
    """What a client has uploaded."""
    return Library(engine, FILES, owner_of(register, tenant), keep_bytes=engine.service.items.keeps_files)


def _known(name: str) -> str:
    """The name of a file, if it can be one."""
    if not re.fullmatch("file-[0-9a-f]{24}", name):
        raise _no_file(name)
    return name


def _no_file(name: str) -> ApiError:
    return ApiError(f"there is no file {short(name)}", status=404)


def _seconds(given: str | None, field: str, least: float, most: float) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = float("nan")
    if not least <= seconds <= most:
        raise ApiError(f"{field} must be from {least} to {most} seconds, got {short(given)}", field)
    return seconds


def _error(error: ValueError) -> ApiError:
    """What is wrong with what was uploaded, which clients call file."""
    message = re.sub(r"^image\b", "file", str(error))
    return ApiError(message, re.split(r"\W", message, maxsplit=1)[0])


def _described(item: Item) -> dict[str, Any]:
    """A file, as OpenAI has it."""
    expires = {} if item.expires is None else {"expires_at": int(item.expires)}
    return {
        "id": item.id, "object": "file", "bytes": item.metadata.get("bytes", 0), "created_at": int(item.added),
        "filename": item.metadata.get("filename", ""), "purpose": "vision", "status": "processed", **expires,
    }  # fmt: skip


def _item(item: Item) -> dict[str, Any]:
    return {
        "id": item.id, "object": "library.item", "library": item.library, "metadata": item.metadata,
        "created_at": int(item.added), "expires_at": None if item.expires is None else int(item.expires),
        "height": item.picture.height, "width": item.picture.width, "has_bytes": item.file is not None,
    }  # fmt: skip
