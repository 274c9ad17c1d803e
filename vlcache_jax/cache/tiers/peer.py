"""Tier that reads the records of another machine from its `PeerServer`.

A peer may be slow, gone or malicious. Every wait has a deadline, every size is checked before use, and the data are
verified like those of a disk.

The client uses `http.client`. The time limits of httpx and urllib3 restart with each byte. In addition, httpx takes
bytes after a response for the next response, and transfers a record at half the rate.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import select
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from vlcache_jax.cache.keys import FORMAT_VERSION
from vlcache_jax.cache.record import (
    Buffers,
    DamagedError,
    EntryGoneError,
    Found,
    Line,
    Meta,
    Outcome,
    Part,
    Place,
    RefusedError,
    Tier,
    TierError,
    blocks,
)
from vlcache_jax.cache.tiers.record_file import LENGTH, MAX_HEADER, file_bytes, file_name, name_of, read_header
from vlcache_jax.cache.tiers.remote import masked
from vlcache_jax.cache.tiers.wire import MAX_RECORDS, TOKEN, WRITTEN, Deadline, Wire
from vlcache_jax.common.checks import check_text, short

_MAX_KEPT = 4  # idle connections
_MAX_JSON = 2**16  # bytes
_MAX_FOUND = MAX_RECORDS * (WRITTEN.size + LENGTH.size + MAX_HEADER)
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?/?", re.ASCII)


class ReadOnlyTier(Tier):
    """Records of peers, which can only be read."""

    label = "peer"
    is_read_only = True

    def write(self, meta: Meta, parts: Mapping[Part, Buffers]) -> Outcome:
        """Refuse: a peer stores only what it computes."""
        return "refused"

    def delete(self, name: str) -> None:
        """Do nothing: the records belong to the peer."""

    def lines(self) -> Iterable[Line]:
        """Return an empty listing: peers do not list their records."""
        return ()


class PeerTier(ReadOnlyTier):
    """Records of another machine.

    Each connection begins with a greeting, in which the peer may refuse access. Connections are reused. A failed call
    has no effect on later ones, which try again.

    Args:
      url: address of the peer, such as "http://10.0.0.7:8600".
      token: token that the peer requires.
      timeout: time limit in seconds for connecting and `find` together, and for each part of a record.
      model: fingerprint of the model, or a function that returns it when it is needed.
      codec: codec of stored KV as in entry keys, or a function that returns it.

    Attributes:
      url: address of the peer.

    Raises:
      ValueError: see `check_peers`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 5.0,
        model: str | Callable[[], str] = "",
        codec: str | Callable[[], str] = "",
    ):
        check_peers([url], token)
        self.url = url.removesuffix("/")
        self._token, self._timeout, self._model, self._codec = token, timeout, model, codec
        self._lock = threading.Lock()
        self._kept: list[_Connection] = []
        self._is_closed = False

    def find(self, entry: str) -> list[Found]:
        with self._reporting(entry), self._requesting(f"/v1/records/{entry}", Deadline(self._timeout)) as response:
            self._check(response, 200)
            return _read_found(entry, _read_body(response, _MAX_FOUND))

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Buffers]]:
        with self._reporting(meta.name):
            numbers = [meta.parts.index(part) for part in parts]
            for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
                yield from self._read(meta, [number for _, number in run], place)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._kept:
                connection.close()
            self._kept.clear()

    # Requests.

    def _read(self, meta: Meta, numbers: list[int], place: Place) -> Iterator[tuple[Part, Buffers]]:
        """Read consecutive parts in one response, which comes from one file even if it is deleted meanwhile."""
        size, whole = meta.part_bytes, file_bytes(meta)
        first = whole - (len(meta.parts) - numbers[0]) * size
        last = first + len(numbers) * size - 1
        deadline = Deadline(self._timeout)
        headers = {"Range": f"bytes={first}-{last}"}
        with self._requesting(f"/v1/files/{file_name(meta.name)}", deadline, headers) as response:
            self._check(response, 206, {404: EntryGoneError, 416: DamagedError})
            got, expected = response.headers.get("Content-Range"), f"bytes {first}-{last}/{whole}"
            if got != expected or response.length != last - first + 1:
                raise DamagedError(f"{self.url}: {meta.name}: expected {expected}, got {short(got)}")
            for number in numbers:
                part = meta.parts[number]
                buffers = place(part)
                views = [rows.view(np.uint8).data.cast("B") for rows in blocks(meta, buffers)]
                if sum(map(len, views)) != size:
                    raise DamagedError(
                        f"{meta.name}: {part} must have {size} bytes, got a buffer of {sum(map(len, views))}"
                    )
                for view in views:
                    _read_into(response, view)
                yield part, buffers
                deadline.renew()  # for the next part; the caller's work on this one does not count

    def _greet(self, connection: _Connection, deadline: Deadline) -> None:
        model = self._model if isinstance(self._model, str) else self._model()
        codec = self._codec if isinstance(self._codec, str) else self._codec()
        query = urllib.parse.urlencode({"format": FORMAT_VERSION, "model": model, "codec": codec})
        with contextlib.closing(connection.get(f"/v1/hello?{query}", deadline)) as response:
            self._check(response, 200)
            has = _read_json(response).get("format")
        if has != FORMAT_VERSION:
            raise RefusedError(f"{self.url}: format must be {FORMAT_VERSION}, got {short(has)}")
        if not connection.is_usable:
            raise TierError(f"{self.url}: the peer closed the connection after the greeting")

    def _check(
        self, response: http.client.HTTPResponse, expected: int, errors: Mapping[int, type[TierError]] | None = None
    ) -> None:
        """Check the status of a response."""
        if response.status in (401, 409):
            body: Mapping[str, Any] = {}
            with contextlib.suppress(TierError):  # a proxy may respond in another format
                body = _read_json(response)
            refusal, has = (short(body.get(name)) for name in ("refusal", "has"))
            raise RefusedError(
                f"{self.url}: status {response.status}: the peer rejects the {refusal} of this engine and has {has}"
            )
        if response.status != expected:
            error = (errors or {}).get(response.status, TierError)
            raise error(f"{self.url}: status {response.status}, expected {expected}")

    # Connections.

    @contextlib.contextmanager
    def _requesting(
        self, path: str, deadline: Deadline, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its response. The connection is reused if the response was read completely."""
        connection, response = self._request(path, deadline, headers or {})
        try:
            with contextlib.closing(response):
                yield response
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if connection.is_usable and len(self._kept) < _MAX_KEPT and not self._is_closed:
                self._kept.append(connection)
            else:
                connection.close()

    def _request(
        self, path: str, deadline: Deadline, headers: Mapping[str, str]
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        while (connection := self._take()) is not None:
            try:
                return connection, connection.get(path, deadline, headers)
            except (ConnectionError, http.client.BadStatusLine):  # the peer has closed it
                connection.close()
            except BaseException:
                connection.close()
                raise
        connection = _Connection(self.url, self._token, deadline)
        try:
            self._greet(connection, deadline)
            return connection, connection.get(path, deadline, headers)
        except BaseException:
            connection.close()
            raise

    def _take(self) -> _Connection | None:
        """Return an idle connection, or None."""
        with self._lock:
            while self._kept:
                connection = self._kept.pop()
                if connection.is_usable:
                    return connection
                connection.close()
            return None

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Convert errors of the connection to TierError."""
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TierError(f"{self.url}: {name}: {type(error).__name__}: {short(str(error))}") from error


class _Connection:
    """Connection to a peer, with one request at a time."""

    def __init__(self, url: str, token: str | None, deadline: Deadline):
        target = urllib.parse.urlsplit(url)
        assert target.hostname is not None
        self._head = f"Host: {target.netloc}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        context = ssl.create_default_context() if target.scheme == "https" else None
        self._sock = _dial(target.hostname, target.port or _PORTS[target.scheme], context, deadline)
        self._response: http.client.HTTPResponse | None = None

    def get(self, path: str, deadline: Deadline, headers: Mapping[str, str] | None = None) -> http.client.HTTPResponse:
        """Send a request and return the response, of which only the head is read."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        request = f"GET {urllib.parse.quote(path, safe='/?&=%+')} HTTP/1.1\r\n{self._head}{lines}\r\n"
        self._sock.settimeout(deadline.left())
        self._sock.sendall(request.encode("ascii"))
        response = http.client.HTTPResponse(Wire(self._sock, deadline))  # type: ignore[arg-type]
        try:
            response.begin()
        except BaseException:
            response.close()
            raise
        self._response = response
        return response

    @property
    def is_usable(self) -> bool:
        """True if the last response was read completely, and the peer has neither closed nor sent more data."""
        if self._response is None or self._response.will_close or self._response.length != 0:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._sock.close()


def check_peers(urls: Iterable[str], token: str | None) -> None:
    """Check addresses of peers and their token.

    Raises:
      ValueError: one is invalid; the message begins with `peers` or `peer_token`.
    """
    if isinstance(urls, str) or not isinstance(urls, Iterable):
        raise ValueError(f"peers must be a list of URLs, got {short(urls)}")
    for url in urls:
        expected = 'URLs like "http://host:port", with nothing after the port'
        check_text(url, "peers", expected)
        if not _URL.fullmatch(url) or not _has_port(url):
            raise ValueError(f"peers must be {expected}, got {short(masked(url))}")
    if token is not None and not (isinstance(token, str) and TOKEN.fullmatch(token)):
        got = f"a string of {len(token)}" if isinstance(token, str) else type(token).__name__  # without the secret
        raise ValueError(f"peer_token must be None or 1 to 512 visible ASCII characters, got {got}")


def _has_port(url: str) -> bool:
    try:
        target = urllib.parse.urlsplit(url)
        return bool(target.hostname) and target.port != 0
    except ValueError:
        return False


def _dial(host: str, port: int, context: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError("its name has no address")
    for left, (family, kind, protocol, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.left() / left)
            sock.connect(address)
            return sock if context is None else context.wrap_socket(sock, server_hostname=host)
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def _read_found(entry: str, body: bytes) -> list[Found]:
    """Return the records of an image in a response of `PeerServer`."""
    found: list[Found] = []
    while body:
        head = WRITTEN.size + LENGTH.size
        if len(body) < head or len(found) == MAX_RECORDS:
            raise DamagedError(
                f"{entry}: the list of cache entries has {len(body)} excess bytes after {len(found)} entries"
            )
        [written], [length] = WRITTEN.unpack_from(body), LENGTH.unpack_from(body, WRITTEN.size)
        if length > MAX_HEADER:
            raise DamagedError(f"{entry}: the peer sent a header of {length} bytes, at most {MAX_HEADER} are allowed")
        meta = read_header(body[WRITTEN.size : head + length])
        if meta.entry != entry or name_of(file_name(meta.name)) != meta.name:
            raise DamagedError(f"{entry}: got the header of {short(meta.name)}")
        found.append(Found(meta, written / 1000))
        body = body[head + length :]
    return sorted(found, key=lambda one: one.written)


def _read_body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Return the body of a response with a Content-Length of at most `max_bytes`."""
    length = response.length
    if length is None or length > max_bytes:
        raise DamagedError(f"Content-Length of the response must be at most {max_bytes}, got {length}")
    body = response.read(length)
    if len(body) != length:
        raise TierError(f"response of {length} bytes ends after {len(body)}")
    return body


def _read_json(response: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        value = json.loads(_read_body(response, _MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"response must be JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise DamagedError(f"response must be a JSON object, got {short(value)}")
    return value


def _read_into(response: http.client.HTTPResponse, buffer: memoryview) -> None:
    while buffer:
        got = response.readinto(buffer)
        if not got:
            raise TierError("response ends early")
        buffer = buffer[got:]
