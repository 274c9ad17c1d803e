"""HTTP server that serves the records of a directory to other machines.

It is read-only and lists nothing. A client names the entry key of a record, a digest of the image's pixels, the model
and the salt. Records with a salt are served like others: only clients that know the image and the salt can compute the
key, so the key is the permission. The token authenticates clients. Nothing is encrypted: use it in a network whose
machines trust each other.

It uses `http.server`. With uvicorn, admission and eviction of connections would also be below the application, with as
much code. Its event loop takes three times the CPU time of `sendfile`, and the engine needs that time.

    GET /v1/hello?format=&model=&codec=   200: JSON, {"format": FORMAT_VERSION, "server": "0.1.0"}
    GET /v1/records/<entry>               200: for each record the time of writing (8 bytes, milliseconds since the
                                          epoch, big-endian), and the header of its file with its length prefix
    GET /v1/files/<xx>/<file>             206: the bytes of the Range header

A refusal is 401 or 409 with JSON, {"refusal": "token" | "format" | "model" | "codec", "has": the served values}.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import http.server
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import re
import socket
import socketserver
import stat
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, BinaryIO, Protocol, cast

from vlcache_jax.cache.keys import FORMAT_VERSION
from vlcache_jax.cache.record import Found, TierError
from vlcache_jax.cache.tiers.record_file import make_header, name_of
from vlcache_jax.cache.tiers.wire import MAX_RECORDS, TOKEN, WRITTEN, Deadline, Wire
from vlcache_jax.common.checks import is_loopback

_log = logging.getLogger(__name__)

_POLL = 0.1  # seconds until `close` takes effect
_UNAUTHENTICATED = 5.0  # seconds that an unauthenticated connection keeps its place on a full server
_ENTRY = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})", re.ASCII)
_ONCE = ("Authorization", "Content-Length", "Host", "Range")  # headers that may occur only once
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Directory(Protocol):
    """Tier to serve, whose files are in a directory under the paths of `file_name`."""

    @property
    def directory(self) -> pathlib.Path: ...

    def find(self, entry: str) -> list[Found]: ...


@dataclass(frozen=True)
class _Offer:
    """Served tier and conditions for clients."""

    tier: Directory
    token: str | None
    models: tuple[str, ...]
    codecs: tuple[str, ...]
    idle_timeout: float


class PeerServer:
    """Server of the records of a tier, until it is closed.

    Args:
      tier: tier to serve.
      host, port: address to listen on; port 0 takes a free one.
      token: token that clients must send; optional only on a loopback address.
      max_clients: maximum number of connections. Another one replaces a connection that has not sent a complete request
        with the right token for 5 seconds. If there is none, it gets status 503.
      idle_timeout: seconds after which a client is disconnected that sends no request or reads nothing of a response.
      models: fingerprints of models, or their first digits; others are refused. Empty: all are accepted.
      codecs: full names of codecs of the KV; others are refused. Empty: all are accepted.
      clock: returns monotonic seconds.

    Raises:
      ValueError: the token is invalid, or is missing on an address that other machines can reach.
      OSError: the address is not available.
    """

    def __init__(
        self,
        tier: Directory,
        host: str,
        port: int,
        token: str | None = None,
        max_clients: int = 64,
        idle_timeout: float = 60.0,
        *,
        models: Collection[str] = (),
        codecs: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        if token is None and not is_loopback(host):
            raise ValueError(f"token is required unless host is a loopback address, got host {host!r} without a token")
        if token is not None and not TOKEN.fullmatch(token):
            raise ValueError("token must be 1 to 512 visible ASCII characters")
        self._lock = threading.Lock()
        self._is_serving = self._is_closed = False
        offer = _Offer(tier, token, tuple(sorted(models)), tuple(sorted(codecs)), idle_timeout)
        self._http = _Server(host, port, max_clients, offer, clock)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        return self._http.server_address[:2]  # type: ignore[return-value]

    def serve_forever(self) -> None:
        """Serve until another thread calls `close`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_serving = True
        self._http.serve_forever(_POLL)

    def close(self) -> None:
        """Stop serving and end all connections."""
        with self._lock:
            is_serving, self._is_serving, self._is_closed = self._is_serving, False, True
        if is_serving:
            self._http.shutdown()
        self._http.server_close()
        self._http.hang_up()

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, max_clients: int, offer: _Offer, clock: Callable[[], float]):
        self.offer = offer
        self._max_clients, self._clock = max_clients, clock
        # In the order of arrival; time of arrival, or None if authenticated.
        self._clients: dict[socket.socket, float | None] = {}
        self._changed = threading.Condition()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # http.server would also resolve the host name, which can take long

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            is_full = len(self._clients) >= self._max_clients and not self._drop_unauthenticated()
            if not is_full:
                self._clients[request] = self._clock()
        if is_full:
            with contextlib.suppress(OSError):
                request.sendall(_FULL)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._clients.pop(request, None)
            self._changed.notify_all()

    def know(self, request: Any) -> None:
        """Mark a client as authenticated after a complete request with the token."""
        with self._changed:
            if request in self._clients:
                self._clients[request] = None

    def _drop_unauthenticated(self) -> bool:
        """Disconnect the oldest client that failed to authenticate in time; return whether there was one."""
        for client, since in self._clients.items():
            if since is not None and self._clock() - since >= _UNAUTHENTICATED:
                del self._clients[client]
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        is_theirs = isinstance(error, OSError)  # the client has disconnected
        _log.log(logging.DEBUG if is_theirs else logging.ERROR, "%s: %r", client_address, error, exc_info=not is_theirs)

    def hang_up(self) -> None:
        """Disconnect all clients and wait for their threads."""
        with self._changed:
            for client in self._clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._clients, self.offer.idle_timeout)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # requests without a version also get a status line
    disable_nagle_algorithm = True
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(message)s\n"

    def setup(self) -> None:
        super().setup()
        self._offer = self.server.offer
        self._deadline = Deadline(self._offer.idle_timeout)
        self.rfile.close()
        self.rfile = io.BufferedReader(Wire(self.connection, self._deadline))

    def handle_one_request(self) -> None:
        self._deadline.renew()  # for the full request, which may arrive byte by byte
        super().handle_one_request()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.connection.settimeout(self._offer.idle_timeout)
        if self.command != "GET":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
            return False
        has_body = self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers
        is_clear = not self.headers.defects and all(len(self.headers.get_all(name, ())) < 2 for name in _ONCE)
        if has_body or not is_clear:  # prevents request smuggling: the body would count as the next request
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        super().send_error(code)  # the default message would quote the request

    def do_GET(self) -> None:
        if not self._is_known():
            self._send_json(HTTPStatus.UNAUTHORIZED, {"refusal": "token", "has": None})
            return
        self.server.know(self.connection)
        path, _, query = self.path.partition("?")
        match path.split("/", 3):
            case ["", "v1", "hello"]:
                self._hello(query)
            case ["", "v1", "records", entry] if _ENTRY.fullmatch(entry):
                self._records(entry)
            case ["", "v1", "files", file] if name_of(file) is not None:
                self._file(file)
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    def version_string(self) -> str:
        return f"vlcache-jax/{_version()}"

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s: " + format, self.client_address[0], *args)

    # Routes.

    def _is_known(self) -> bool:
        given = self.headers.get("Authorization", "")
        token = self._offer.token
        return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def _hello(self, query: str) -> None:
        try:
            fields = dict(urllib.parse.parse_qsl(query, max_num_fields=8))
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        offer, model, codec = self._offer, fields.get("model", ""), fields.get("codec", "")
        if fields.get("format") != str(FORMAT_VERSION):
            self._send_json(HTTPStatus.CONFLICT, {"refusal": "format", "has": FORMAT_VERSION})
        elif offer.models and not model.startswith(offer.models):
            self._send_json(HTTPStatus.CONFLICT, {"refusal": "model", "has": offer.models})
        elif offer.codecs and codec not in offer.codecs:
            self._send_json(HTTPStatus.CONFLICT, {"refusal": "codec", "has": offer.codecs})
        else:
            self._send_json(HTTPStatus.OK, {"format": FORMAT_VERSION, "server": _version()})

    def _records(self, entry: str) -> None:
        try:
            found = self._offer.tier.find(entry)[-MAX_RECORDS:]
        except TierError as error:
            self._fail(error)
            return
        content = (WRITTEN.pack(max(round(1000 * one.written), 0)) + make_header(one.meta) for one in found)
        self._send(HTTPStatus.OK, "application/octet-stream", b"".join(content))

    def _file(self, file: str) -> None:
        try:
            content = _open(self._offer.tier.directory, file)
        except OSError as error:
            self._fail(error)
            return
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with content:
            size = os.fstat(content.fileno()).st_size
            wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
            first, last = (int(wanted[1]), min(int(wanted[2] or size), size - 1)) if wanted else (0, -1)
            if first > last:
                self._head(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, Content_Range=f"bytes */{size}")
                return
            count = last - first + 1
            self._head(HTTPStatus.PARTIAL_CONTENT, count, Content_Range=f"bytes {first}-{last}/{size}")
            if self.connection.sendfile(content, first, count) != count:  # the file became shorter
                self.close_connection = True

    # Responses.

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._head(status, len(body), Content_Type=kind)
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _fail(self, error: Exception) -> None:
        _log.warning("a cache entry could not be served: %s", error)
        self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("vlcache-jax")
    except importlib.metadata.PackageNotFoundError:  # it runs from its sources without installation
        return "unknown"


def _open(directory: pathlib.Path, file: str) -> BinaryIO | None:
    """Open the file of a record without following links, also not of its folder; None if it does not exist."""

    folder, name = file.split("/")
    try:
        above = os.open(directory / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        finally:
            os.close(above)
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return cast(BinaryIO, open(descriptor, "rb", buffering=0))
