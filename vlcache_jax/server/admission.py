"""Admission control: API keys, limits on requests and bodies, and the engine's health check after an error.

Requests are refused here before they cost engine time.
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
from vlcache_jax.common.checks import unknown
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import as_api_error, path_of, refuse
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.room import AGAIN, ReservedPlace, Room
from vlcache_jax.server.tenants import Register, Tenant


def give_back() -> None:
    """Return freed memory to the system. Only glibc needs the call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_SUSPECT = RuntimeError, NotFiniteError


class HealthCheck:
    """Check of the engine after an error of a request.

    Args:
      engine: the engine to check.
      admission: refuses all requests once the engine has failed.
      metrics: count requests that ended with non-finite logits.
    """

    def __init__(self, engine: AsyncLLM, admission: AdmissionControl, metrics: ServerMetrics):
        self._engine, self._admission, self._metrics = engine, admission, metrics
        self._is_checking = False

    def refuse(self, error: Exception, scope: Scope) -> Response:
        """Return the response to an error. If the engine may have failed, the check runs after the response is sent.

        Args:
          error: the error.
          scope: the ASGI scope of the request, whose path determines the form of the error.
        """
        self.count(error)
        response = refuse(as_api_error(error), path_of(scope))
        if isinstance(error, _SUSPECT):  # a task keeps the error, and so the body in the frames of its traceback
            response.background = BackgroundTask(self.look, error)
        return response

    def count(self, error: Exception) -> None:
        """Count an error in the metrics. Call it before the response is sent."""
        if isinstance(error, NotFiniteError):
            self._metrics.corrupted()

    async def look(self, error: Exception) -> None:
        """Check with a short text prompt whether the engine still answers, and set `admission.failure` if not.

        Other errors than those of the engine are ignored, and at most one check runs at a time.
        """
        if self._is_checking or not isinstance(error, _SUSPECT):
            return
        self._is_checking = True
        try:
            with contextlib.suppress(QueueFullError):
                async for _ in self._engine.deltas("Hello", SamplingParams(max_tokens=1)):
                    pass
        except (RuntimeError, NotFiniteError) as found:
            self._admission.failure = f"the health check failed: {found}"
        finally:
            self._is_checking = False


OPEN = ("/", "/health", "/ready")
"""Paths that need no key."""
ADMIN = ("/cache", "/libraries", "/reset_mm_cache", "/reset_prefix_cache")
"""Prefixes of the paths that need the admin key."""
_SERVER_WIDE = ("/metrics", "/load")
TENANT = "vlcache.tenant"
"""Key of the tenant in the ASGI scope. It is None for requests with the admin key and on servers without tenants."""
_SILENCE = 30.0  # maximum seconds between two chunks of a body
FIELD_BYTES = 1 << 17
"""Maximum bytes of an upload's fields and headers, in addition to its file."""
_FREED = 1 << 24  # bytes of finished bodies after which freed memory is returned to the system
_LATER = 1.0  # delay in seconds: until then the requests of the bodies may still be in memory
_MAX_NAME = 255  # characters of a file name


class ClientGoneError(Exception):
    """The client has disconnected, or reads and sends nothing."""


class AdmissionControl:
    """Admission control of a server.

    Args:
      config: limits of requests in flight and of the bytes of their bodies.
      register: the tenants, which share the limits; None if the server has none.

    Attributes:
      room: counter of requests and bytes.
      is_warm: True once warm-up has finished.
      is_draining: True once the server shuts down and refuses new requests.
      failure: reason why the engine has failed; None while it works.
      ended: event that aborts the requests in flight.
    """

    def __init__(self, config: ServerConfig, register: Register | None = None):
        self.is_warm = self.is_draining = False
        self.failure: str | None = None
        self.ended = asyncio.Event()
        self._freed = 0  # bytes of bodies that have ended since memory was last returned
        self._max_body = int(config.max_body_bytes)
        sizes = config.max_waiting, int(config.max_waiting_bytes), self._max_body
        self.room = Room(*sizes, lambda: 0 if register is None else len(register.names()))

    @property
    def inside(self) -> int:
        """Number of requests whose bodies are being received or that are in flight."""
        return self.room.inside

    @contextlib.contextmanager
    def enter(self, scope: Scope) -> Iterator[ReservedPlace]:
        """Admit a request and yield its place, which is freed at the end. Read its body within `ReservedPlace.coming`.

        Args:
          scope: the ASGI scope of the request.

        Raises:
          ApiError: the engine has failed, the server shuts down, or a limit is reached (status 503 or 429).
        """
        if self.failure is not None:
            raise ApiError("the engine has failed; restart the server", status=503)
        if self.is_draining:
            raise ApiError("the server is shutting down", status=503, retry_after=AGAIN)
        with self.room.place(scope.get(TENANT), _declared(scope, self._max_body)) as place:
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
        """Count the answers of a request while they are in flight.

        Args:
          tenant: the tenant of the request; None if it has none.
          count: number of answers, with all prompts of the request.

        Raises:
          ApiError: the tenant's limit is smaller than `count` (status 400), or is used up now (status 429).
        """
        return self.room.answering(tenant, count)

    @property
    def is_ready(self) -> bool:
        """True if the server accepts requests and warm-up has finished."""
        return self.is_warm and not self.is_draining and self.failure is None


class Keys:
    """Check of API keys, which also sets the tenant of a request (ASGI middleware)."""

    def __init__(self, app: ASGIApp, config: ServerConfig, register: Register | None):
        self._app, self._register = app, register
        self._keys = [_digest(key) for key in config.api_key]
        self._admin = None if config.admin_key is None else _digest(config.admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self.error(scope)) is not None:
            await refuse(error, path_of(scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def error(self, scope: Scope) -> ApiError | None:
        """Return why a request is refused, or None if it is allowed. It sets `scope[TENANT]` if there are tenants."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as the router matches paths
        if path in OPEN:
            return None
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        key = key or headers.get("x-api-key", "").strip()  # Anthropic's header
        digest = _digest(key)
        # All keys are compared, so that the time does not depend on which one matches.
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        is_known = sum(hmac.compare_digest(digest, known) for known in self._keys) > 0
        tenant = None if self._register is None else self._register.of(key)
        # A tenant must not see the load of the others.
        admin = ADMIN if self._register is None else (*ADMIN, *_SERVER_WIDE)
        if any(path == one or path.startswith(f"{one}/") for one in admin):
            if self._admin is None:
                return ApiError(f"{path} requires an admin key: start the server with --admin-key", status=403)
            if is_known or tenant is not None:
                return ApiError(f"{path} requires the admin key: send it as 'Authorization: Bearer KEY'", status=403)
            return None if is_admin else _UNKNOWN
        if self._register is not None:
            scope[TENANT] = tenant
            return None if tenant is not None or is_admin else _UNKNOWN
        return None if is_known or is_admin or not self._keys else _UNKNOWN


_UNKNOWN = ApiError(
    "Authorization must be 'Bearer KEY', or x-api-key KEY, with a valid key of this server",
    status=401,
    code="invalid_api_key",
)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _declared(scope: Scope, max_bytes: int) -> int:
    """Return the `Content-Length` of a body, at most `max_bytes`; without the header, `max_bytes`."""
    length = Headers(scope=scope).get("content-length", "")
    return min(int(length), max_bytes) if length.isdecimal() else max_bytes


async def read_body(scope: Scope, receive: Receive, config: ServerConfig, place: ReservedPlace) -> bytes:
    """Return the JSON body of a request, which is in flight afterwards.

    Args:
      config: limits of size and time.
      place: the place of the request.

    Raises:
      ApiError: the content type or encoding is wrong (status 415). The body is too large (413) or too slow (408). A
        limit is reached (503 or 429).
      ClientGoneError: the client has disconnected.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers let any page send a form, but not JSON
        raise ApiError(f"Content-Type must be application/json, got {kind or 'none'}", status=415)
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError("Content-Encoding must be identity: send the body uncompressed", status=415)
    return await read_whole(scope, receive, config, int(config.max_body_bytes), place)


async def read_whole(
    scope: Scope, receive: Receive, config: ServerConfig, max_bytes: int, place: ReservedPlace
) -> bytes:
    """Return a body of any type.

    Args:
      config: limit of time.
      max_bytes: limit of size.
      place: the place of the request.

    Raises:
      ApiError, ClientGoneError: as `read_body`, except for the type.
    """
    length = Headers(scope=scope).get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    async with place.coming(config.body_timeout):
        return await _whole(receive, max_bytes, place)


@dataclass(frozen=True)
class Form:
    """Parsed multipart form with one file.

    Attributes:
      content: bytes of the file.
      filename: the client's name of the file, at most 255 characters.
      fields: the other fields.
    """

    content: bytes
    filename: str
    fields: Mapping[str, str]


async def read_form(request: Request, config: ServerConfig, known: Sequence[str], place: ReservedPlace) -> Form:
    """Return the multipart form of a request, which is in flight afterwards. Large files are spooled to disk.

    Args:
      config: limits of size and time.
      known: names of the allowed fields in addition to `file`.
      place: the place of the request.

    Raises:
      ApiError: the content type (status 415), the origin (403) or the form (400) is wrong. The body is too large (413)
        or too slow (408). A limit is reached (503 or 429).
      ClientGoneError: the client has disconnected.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(f"Content-Type must be multipart/form-data, got {kind or 'none'}", status=415)
    _check_origin(request, config)
    max_bytes = int(config.max_file_bytes)
    size = request.headers.get("content-length", "")
    if size.isdecimal() and int(size) > max_bytes + FIELD_BYTES:
        raise _too_large(max_bytes)
    received = 0

    async def counted() -> AsyncGenerator[bytes]:
        nonlocal received
        async for chunk in request.stream():
            received += len(chunk)
            if received > max_bytes + FIELD_BYTES:
                raise _too_large(max_bytes)
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
        if others := [name for name in (*fields, *(n for n in form if n != "file")) if name not in known]:
            raise ApiError(unknown(others[0], ("file", *known), where="body"), "body")
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError("file is required", "file")
        content = await file.read()
        if len(content) > max_bytes:
            raise _too_large(max_bytes)
        if not content:
            raise ApiError("file must not be empty, got 0 bytes", "file")
        return Form(content, (file.filename or "")[:_MAX_NAME], fields)
    finally:
        await form.close()


def _check_origin(request: Request, config: ServerConfig) -> None:
    """Refuse forms of pages of other origins: browsers send them without a CORS check to a server without keys."""
    origin = request.headers.get("origin")
    if origin is None or config.has_keys or {"*", origin} & set(config.allowed_origins):
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(
            f"Origin must be one of allowed_origins, got {origin!r:.80}; add it with --allowed-origins", status=403
        )


async def _whole(receive: Receive, max_bytes: int, place: ReservedPlace) -> bytes:
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(_SILENCE):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                f"no data of the body arrived for {_SILENCE:.0f} seconds; send the request again", status=408
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        if len(body) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        place.take(len(piece))
        body += piece
        if not message.get("more_body"):
            return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"a body must have at most {max_bytes} bytes (--max-body-bytes, for files --max-file-bytes)", status=413
    )
