"""Admission: keys, room, and sizes of bodies; and the health of the engine after an error.

A request that is refused here has cost nothing yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import hmac
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.background import BackgroundTask
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vlcache_jax.async_llm import AsyncLLM, QueueFullError
from vlcache_jax.calls.groups import NotFiniteError
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import as_api_error, refuse
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.room import AGAIN, ReservedPlace, Room
from vlcache_jax.server.tenants import Register, Tenant


def give_back() -> None:
    """Return freed memory to the system. Other C libraries than glibc do so themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_DOUBTFUL = RuntimeError, NotFiniteError


class Doubt:
    """Hears of the errors of requests.

    Args:
      engine: may have failed.
      entrance: lets nobody in once it has.
      metrics: count answers that were not finite.
    """

    def __init__(self, engine: AsyncLLM, entrance: Entrance, metrics: ServerMetrics):
        self._engine, self._entrance, self._metrics = engine, entrance, metrics
        self._is_asking = False

    def refuse(self, error: Exception) -> Response:
        """What the client is told of an error, behind which somebody looks at the engine."""
        self.count(error)
        response = refuse(as_api_error(error))
        if isinstance(error, _DOUBTFUL):  # others would keep their bodies, by the frames of their tracebacks
            response.background = BackgroundTask(self.look, error)
        return response

    def count(self, error: Exception) -> None:
        """Counts an error, before the client is told."""
        if isinstance(error, NotFiniteError):
            self._metrics.corrupted()

    async def look(self, error: Exception) -> None:
        """After an error of the engine, which ends all that run, one of them finds out: unless a plain text is
        answered, nothing is any more."""
        if self._is_asking or not isinstance(error, _DOUBTFUL):
            return
        self._is_asking = True
        try:
            with contextlib.suppress(QueueFullError):
                async for _ in self._engine.deltas("Hello", SamplingParams(max_tokens=1)):
                    pass
        except (RuntimeError, NotFiniteError) as found:
            self._entrance.failure = f"not even a plain text is answered: {found}"
        finally:
            self._is_asking = False


OPEN = ("/", "/health", "/ready")
"""Paths that need no key."""
ADMIN = ("/cache", "/libraries", "/reset_mm_cache", "/reset_prefix_cache")
"""Beginnings of the paths that need the admin key."""
_OF_ALL = ("/metrics", "/load")
TENANT = "vlcache.tenant"
"""Name in the scope of a request; who has no tenant has the admin key, or there are none."""
_SILENCE = 30.0  # seconds from one piece of a body to the next at most
FIELD_BYTES = 1 << 17
"""Of an upload, beside its file."""
_FREED = 1 << 24  # bytes of bodies after whose end freed memory goes back to the system
_LATER = 1.0  # seconds after that end; until then their requests may still be in memory
_MOST_NAME = 255  # characters of a file's name


class ClientGoneError(Exception):
    """The client went away."""


class Entrance:
    """Says whether there may be more requests.

    Args:
      config: how many, and how large their bodies together.
      register: of the tenants, among whom room is shared; None: there are none.

    Attributes:
      room: counts requests.
      is_warm: everything is compiled.
      is_draining: nobody comes in any more, as the server ends.
      failure: why the engine will not answer any more; None: it will.
      ended: who is inside is not waited for any more.
    """

    def __init__(self, config: ServerConfig, register: Register | None = None):
        self.is_warm = self.is_draining = False
        self.failure: str | None = None
        self.ended = asyncio.Event()
        self._freed = 0  # bytes of bodies that have ended since memory went back
        self._most_body = int(config.max_body_bytes)
        sizes = config.max_waiting, int(config.max_waiting_bytes), self._most_body
        self.room = Room(*sizes, lambda: 0 if register is None else len(register.names()))

    @property
    def inside(self) -> int:
        """Requests whose bodies are coming, and those under way."""
        return self.room.inside

    @contextlib.contextmanager
    def enter(self, scope: Scope) -> Iterator[ReservedPlace]:
        """The place of a request, for as long as it is here. Its body is read within `Place.coming`.

        Raises:
          ApiError: it must come again later.
        """
        if self.failure is not None:
            raise ApiError("the engine has failed", status=503)
        if self.is_draining:
            raise ApiError("the server is shutting down", status=503, retry_after=AGAIN)
        with self.room.place(scope.get(TENANT), _declared(scope, self._most_body)) as place:
            try:
                yield place
            finally:
                self._freed += place.size
                if self._freed >= _FREED:
                    self._freed = 0
                    timer = threading.Timer(_LATER, give_back)
                    timer.daemon = True
                    timer.start()

    def answering(self, tenant: Tenant | None, count: int) -> contextlib.AbstractContextManager[None]:
        """For as long as a request that is under way has so many answers under way.

        Raises:
          ApiError: its tenant may not have so many, or must come again later.
        """
        return self.room.answering(tenant, count)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, and answered at full speed."""
        return self.is_warm and not self.is_draining and self.failure is None


class Keys:
    """Lets those in who have a key, and notes whose tenants they are (middleware)."""

    def __init__(self, app: ASGIApp, config: ServerConfig, register: Register | None):
        self._app, self._register = app, register
        self._keys = [_digest(key) for key in config.api_key]
        self._admin = None if config.admin_key is None else _digest(config.admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self.error(scope)) is not None:
            await refuse(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def error(self, scope: Scope) -> ApiError | None:
        """Why a request is refused; None: it is not, and its scope tells whose it is."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as routes are looked for
        if path in OPEN:
            return None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        digest = _digest(key)
        # All of them, whichever fits: how long it takes tells nothing.
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        is_known = sum(hmac.compare_digest(digest, known) for known in self._keys) > 0
        tenant = None if self._register is None else self._register.of(key)
        # What all tenants do together is not for one of them to see.
        admin = ADMIN if self._register is None else (*ADMIN, *_OF_ALL)
        if any(path == one or path.startswith(f"{one}/") for one in admin):
            if self._admin is None:
                return ApiError("this server was started without an admin key", status=403)
            if is_known or tenant is not None:
                return ApiError(f"{path} needs the admin key", status=403)
            return None if is_admin else _UNKNOWN
        if self._register is not None:
            scope[TENANT] = tenant
            return None if tenant is not None or is_admin else _UNKNOWN
        return None if is_known or is_admin or not self._keys else _UNKNOWN


_UNKNOWN = ApiError("Authorization must be Bearer and a key of this server", status=401, code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _declared(scope: Scope, most: int) -> int:
    """Bytes of a body, as its head says; as many as there may be where it does not."""
    length = Headers(scope=scope).get("content-length", "")
    return min(int(length), most) if length.isdecimal() else most


async def read_body(scope: Scope, receive: Receive, config: ServerConfig, place: ReservedPlace) -> bytes:
    """The body of a request that is JSON; then the request is under way.

    Raises:
      ApiError: it is of another type, too large, or does not come, or there is no room for it.
      GoneError: the client went away.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form that any page may send is none
        raise ApiError(f"Content-Type must be application/json, got {kind or 'none'}", status=415)
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError("Content-Encoding must be left out: a body is read as it comes", status=415)
    return await read_whole(scope, receive, config, int(config.max_body_bytes), place)


async def read_whole(scope: Scope, receive: Receive, config: ServerConfig, most: int, place: ReservedPlace) -> bytes:
    """A body of so many bytes at most.

    Raises:
      ApiError, GoneError: as `read_body`, but for its type.
    """
    length = Headers(scope=scope).get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    async with place.coming(config.body_timeout):
        return await _whole(receive, most, place)


@dataclass(frozen=True)
class Form:
    """What was uploaded.

    Attributes:
      content: of the one file.
      filename: as the client calls it.
      fields: what stands beside it.
    """

    content: bytes
    filename: str
    fields: Mapping[str, str]


async def read_form(request: Request, config: ServerConfig, known: Sequence[str], place: ReservedPlace) -> Form:
    """The form that a request is, with one file; then the request is under way. What comes is written to disk until it
    is whole.

    Args:
      known: names of fields beside `file`.

    Raises:
      ApiError: it is of another type, too large, does not come, a page elsewhere sends it, or there is no room for it.
      GoneError: the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(f"Content-Type must be multipart/form-data, got {kind or 'none'}", status=415)
    _check_origin(request, config)
    most = int(config.max_file_bytes)
    size = request.headers.get("content-length", "")
    if size.isdecimal() and int(size) > most + FIELD_BYTES:
        raise _too_large(most)
    seen = 0

    async def counted() -> AsyncGenerator[bytes]:
        nonlocal seen
        async for chunk in request.stream():
            seen += len(chunk)
            if seen > most + FIELD_BYTES:
                raise _too_large(most)
            place.take(len(chunk))
            yield chunk

    parser = MultiPartParser(request.headers, counted(), max_files=1, max_fields=len(known), max_part_size=FIELD_BYTES)
    try:
        async with place.coming(config.body_timeout):
            form = await parser.parse()
    except ClientDisconnect:
        raise ClientGoneError from None
    except MultiPartException as error:
        raise ApiError(f"body must be a form with one file: {error.message}", "file") from error
    try:
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        if unknown := [name for name in (*fields, *(n for n in form if n != "file")) if name not in known]:
            raise ApiError(f"body must hold only file, {', '.join(known)}, got {unknown[0]!r:.80}", "body")
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError("file must be there, got none", "file")
        content = await file.read()
        if len(content) > most:
            raise _too_large(most)
        if not content:
            raise ApiError("file must not be empty, got 0 bytes", "file")
        return Form(content, (file.filename or "")[:_MOST_NAME], fields)
    finally:
        await form.close()


def _check_origin(request: Request, config: ServerConfig) -> None:
    """A form needs nobody's leave: any page may send one to a server that asks for no key."""
    origin = request.headers.get("origin")
    if origin is None or config.has_keys or {"*", origin} & set(config.allowed_origins):
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(f"Origin must be one of allowed_origins, got {origin!r:.80}", status=403)


async def _whole(receive: Receive, most: int, place: ReservedPlace) -> bytes:
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(_SILENCE):
                message = await receive()
        except TimeoutError:
            raise ApiError(f"nothing of the body came for {_SILENCE:.0f} seconds", status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        if len(body) + len(piece) > most:
            raise _too_large(most)
        place.take(len(piece))
        body += piece
        if not message.get("more_body"):
            return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(f"a body must have at most {most} bytes", status=413)
