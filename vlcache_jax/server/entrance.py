"""Who comes in: keys, room, and bodies that are not too large. What is refused here has cost nothing yet."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from vlcache_jax.protocol.values import ApiError
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.responses import refuse
from vlcache_jax.server.tenants import Register, Tenant

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
_MOST_NAME = 255  # characters of a file's name
_AGAIN = 1  # seconds after which who found no room may come again


class GoneError(Exception):
    """The client went away."""


class Entrance:
    """Counts requests under way, and says whether there may be more.

    Args:
      config: how many, and how large their bodies together.

    Attributes:
      inside: requests under way.
      is_warm: everything is compiled.
      is_draining: nobody comes in any more, as the server ends.
      failure: why the engine will not answer any more; None: it will.
      ended: who is inside is not waited for any more.
    """

    def __init__(self, config: ServerConfig):
        self.inside = 0
        self.is_warm = self.is_draining = False
        self.failure: str | None = None
        self.ended = asyncio.Event()
        self._config = config
        self._bytes = 0  # of bodies of those inside, as their heads say
        self._of_tenants: Counter[str] = Counter()  # answers under way; of a request that is read, one

    @contextlib.contextmanager
    def enter(self, scope: Scope) -> Iterator[None]:
        """For as long as a request is under way.

        Raises:
          ApiError: it must come again later.
        """
        most, size = self._config.max_waiting, _declared(scope, int(self._config.max_body_bytes))
        if self.failure is not None:
            raise ApiError("the engine has failed", status=503)
        if self.is_draining:
            raise ApiError("the server is shutting down", status=503, retry_after=_AGAIN)
        if self.inside >= most:
            raise ApiError(f"the server has {most} requests under way", status=503, retry_after=_AGAIN)
        if self._bytes + size > int(self._config.max_waiting_bytes):
            told = f"the server has requests of {self._bytes} bytes under way, beside which {size} more have no room"
            raise ApiError(told, status=503, retry_after=_AGAIN)
        with self._taken(scope.get(TENANT), 1):
            self.inside += 1
            self._bytes += size
            try:
                yield
            finally:
                self.inside -= 1
                self._bytes -= size

    @contextlib.contextmanager
    def answering(self, tenant: Tenant | None, count: int) -> Iterator[None]:
        """For as long as a request that is inside has so many answers under way.

        Raises:
          ApiError: its tenant may not have so many, or must come again later.
        """
        if tenant is not None and tenant.requests is not None and count > tenant.requests:
            raise ApiError(
                f"n of all prompts together must be at most {tenant.requests} for this key, got {count}", "n"
            )
        with self._taken(tenant, count - 1):
            yield

    @contextlib.contextmanager
    def _taken(self, tenant: Tenant | None, count: int) -> Iterator[None]:
        if tenant is None:
            yield
            return
        taken = self._of_tenants[tenant.name]
        if tenant.requests is not None and taken + count > tenant.requests:
            told = f"this key's tenant has {taken} requests under way, of {tenant.requests} that it may have; each"
            raise ApiError(f"{told} answer counts as one", status=429, retry_after=_AGAIN)
        self._of_tenants[tenant.name] += count
        try:
            yield
        finally:
            self._of_tenants[tenant.name] -= count

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, and answered at full speed."""
        return self.is_warm and not self.is_draining and self.failure is None


class Keys:
    """Lets those in who have a key, and notes whose tenants they are (middleware).

    Args:
      app: what is behind.
      config: has the keys.
      register: of the tenants, if there are any.
    """

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


async def read_body(scope: Scope, receive: Receive, config: ServerConfig) -> bytes:
    """The body of a request that is JSON.

    Raises:
      ApiError: it is of another type, too large, or does not come.
      GoneError: the client went away.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form that any page may send is none
        raise ApiError(f"Content-Type must be application/json, got {kind or 'none'}", status=415)
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError("Content-Encoding must be left out: a body is read as it comes", status=415)
    return await read_whole(scope, receive, config, int(config.max_body_bytes))


async def read_whole(scope: Scope, receive: Receive, config: ServerConfig, most: int) -> bytes:
    """A body of so many bytes at most.

    Raises:
      ApiError, GoneError: as `read_body`, but for its type.
    """
    length = Headers(scope=scope).get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(config.body_timeout):
            return await _whole(receive, most)
    except TimeoutError:
        raise ApiError(f"a body must come within {config.body_timeout:g} seconds", status=408) from None


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


async def read_form(request: Request, config: ServerConfig, known: Sequence[str]) -> Form:
    """The form that a request is, with one file. What comes is written to disk until it is whole.

    Args:
      known: names of fields beside `file`.

    Raises:
      ApiError: it is of another type, too large, does not come, or a page elsewhere sends it.
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
            yield chunk

    parser = MultiPartParser(request.headers, counted(), max_files=1, max_fields=len(known), max_part_size=FIELD_BYTES)
    try:
        async with asyncio.timeout(config.body_timeout):
            form = await parser.parse()
    except TimeoutError:
        raise ApiError(f"a body must come within {config.body_timeout:g} seconds", status=408) from None
    except ClientDisconnect:
        raise GoneError from None
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


async def _whole(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(_SILENCE):
                message = await receive()
        except TimeoutError:
            raise ApiError(f"nothing of the body came for {_SILENCE:.0f} seconds", status=408) from None
        if message["type"] == "http.disconnect":
            raise GoneError
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_large(most)
        if not message.get("more_body"):
            return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(f"a body must have at most {most} bytes", status=413)
