"""Uploaded image files and the operator's libraries over HTTP.

A file is an item of its tenant's library `files`. Without tenants, all clients share the operator's library `files`.
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
from vlcache_jax.server.admission import TENANT, AdmissionControl, ClientGoneError, Form, read_form
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import IdMaker, answer_json
from vlcache_jax.server.tenants import Register, Tenant, owner_of

_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_ITEM_FIELDS = ("id", "metadata", "expires")
_MIN_SECONDS, _MAX_SECONDS = 3600, 2592000  # OpenAI's limits of a file's lifetime


class Files:
    """Handler of `/v1/files` and `/libraries`.

    Args:
      engine: the engine, which has the libraries.
      config: options of the server.
      admission: admission control.
      register: the tenants; None if the server has none.
      names: generator of the files' ids.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServerConfig,
        admission: AdmissionControl,
        register: Register | None,
        names: IdMaker,
    ):
        self._engine, self._config, self._admission, self._register = engine, config, admission, register
        self._names = names
        # Uploads wait for the engine. With threads of their own they do not block other requests.
        self._threads, self._uploads = (ThreadPoolExecutor(2, f"vlcache-{name}") for name in ("files", "uploads"))

    # Files

    async def files(self, request: Request) -> Response:
        """Upload a file (POST), or list the files (GET)."""
        if request.method == "GET":
            return answer_json(await self._run(self._list, request, await self._library(request)))
        return await self._uploaded(request, self._create, _FIELDS)

    async def file(self, request: Request) -> Response:
        """Return the metadata of a file (GET), or delete it (DELETE)."""
        library, name = await self._library(request), request.path_params["name"]
        if request.method == "DELETE":
            if not await self._run(library.remove, _known(name)):
                raise _no_file(name)
            return answer_json({"id": name, "object": "file", "deleted": True})
        return answer_json(_described(await self._run(self._found, library, name)))

    async def content(self, request: Request) -> Response:
        """Return the bytes of a file."""
        library, name = await self._library(request), request.path_params["name"]
        item = await self._run(self._found, library, name)
        if item.file is None:
            raise ApiError("the bytes of files are not stored: start the server with --disk", status=404)
        try:
            found = await self._run(library.image, name)
        except ValueError as error:
            raise ApiError(str(error), status=404) from error
        return Response(found, media_type="application/octet-stream")

    # The operator's libraries

    async def libraries(self, _: Request) -> Response:
        """Return the names of the libraries."""
        names = await self._run(self._engine.service.items.libraries, SHARED)
        return answer_json({"object": "list", "data": [{"object": "library", "name": name} for name in names]})

    async def library(self, request: Request) -> Response:
        """List the items of a library (GET), add one (POST), or replace the image of one (PUT)."""
        if request.method == "GET":
            library = await self._named(request)
            items = await self._run(library.items)
            return answer_json({"object": "list", "data": list(map(_item, items))})
        return await self._uploaded(request, self._put, _ITEM_FIELDS)

    async def item(self, request: Request) -> Response:
        """Return the metadata of an item (GET), or remove it (DELETE)."""
        library, name = await self._named(request), request.path_params["name"]
        if request.method == "DELETE":
            if not await self._run(library.remove, name):
                raise ApiError(f"library {short(library.name)} has no item {short(name)}", status=404)
            return answer_json({"id": name, "object": "library.item", "deleted": True})
        try:
            return answer_json(_item(await self._run(library.get, name)))
        except ApiError as error:
            raise ApiError(error.message, status=404) from error

    async def _uploaded(
        self, request: Request, work: Callable[[Request, Form], Mapping[str, Any]], fields: tuple[str, ...]
    ) -> Response:
        try:
            with self._admission.enter(request.scope) as place:
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
                f"at most {self._config.max_files} files can be stored; delete some, or let them expire", status=429
            )
        metadata = {"filename": form.filename, "bytes": len(form.content)}
        name = self._names.new("file-", 24)
        lifetime = _seconds(seconds, "expires_after", _MIN_SECONDS, _MAX_SECONDS)
        return _described(library.add(form.content, name, metadata, lifetime))

    def _put(self, request: Request, form: Form) -> Mapping[str, Any]:
        library = Library(
            self._engine, request.path_params["library"], keep_bytes=self._engine.service.items.keeps_files
        )
        name = form.fields.get("id")
        if name is None:
            raise ApiError("id is required", "id")
        try:
            metadata = json.loads(form.fields["metadata"]) if "metadata" in form.fields else None
        except (ValueError, RecursionError) as error:
            raise ApiError(f"metadata must be JSON, got {short(form.fields['metadata'])}", "metadata") from error
        seconds = _seconds(form.fields.get("expires"), "expires", 0, float("inf"))
        return _item(
            (library.update if request.method == "PUT" else library.add)(form.content, name, metadata, seconds)
        )

    def _list(self, request: Request, library: Library) -> Mapping[str, Any]:
        query = request.query_params
        limit, order = query.get("limit", "10000"), query.get("order", "desc")
        if not (limit.isdecimal() and 1 <= int(limit) <= 10000):
            raise ApiError(f"limit must be from 1 to 10000, got {short(limit)}", "limit")
        if order not in ("asc", "desc"):
            raise ApiError(f"order must be asc or desc, got {short(order)}", "order")
        items = sorted(library.items(), key=lambda item: (item.added, item.id), reverse=order == "desc")
        if query.get("purpose", "vision") != "vision":
            items = []
        if (after := query.get("after")) is not None:
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
    """Return the library of a client's uploaded files."""
    return Library(engine, FILES, owner_of(register, tenant), keep_bytes=engine.service.items.keeps_files)


def _known(name: str) -> str:
    """Return the id of a file; raise an `ApiError` (status 404) if no file can have it."""
    if not re.fullmatch("file-[0-9a-f]{24}", name):
        raise _no_file(name)
    return name


def _no_file(name: str) -> ApiError:
    return ApiError(f"no file has the id {short(name)}", status=404)


def _seconds(given: str | None, field: str, min_seconds: float, max_seconds: float) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = float("nan")
    if not min_seconds <= seconds <= max_seconds:
        raise ApiError(f"{field} must be from {min_seconds} to {max_seconds} seconds, got {short(given)}", field)
    return seconds


def _error(error: ValueError) -> ApiError:
    """Return the error of an image with the form's name of it, `file`."""
    message = re.sub(r"^image\b", "file", str(error))
    return ApiError(message, re.split(r"\W", message, maxsplit=1)[0])


def _described(item: Item) -> dict[str, Any]:
    """Return a file as OpenAI's file object."""
    expires = {} if item.expires is None else {"expires_at": int(item.expires)}
    return {
        "id": item.id, "object": "file", "bytes": item.metadata.get("bytes", 0), "created_at": int(item.added),
        "filename": item.metadata.get("filename", ""), "purpose": "vision", "status": "processed", **expires,
    }  # fmt: skip


def _item(item: Item) -> dict[str, Any]:
    return {
        "id": item.id, "object": "library.item", "library": item.library, "metadata": item.metadata,
        "created_at": int(item.added), "expires_at": None if item.expires is None else int(item.expires),
        "height": item.image_key.height, "width": item.image_key.width, "has_bytes": item.file is not None,
    }  # fmt: skip
