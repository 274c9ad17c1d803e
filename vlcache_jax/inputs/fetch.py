"""Images from the network: one deadline over everything, and no address that only this machine can reach.

A URL from outside may point at what its sender cannot reach: this machine, its network, the metadata of its cloud. So
the addresses of a host are looked up once and checked, and what was checked is dialled, at every redirect again. A
server may also be slow on purpose: each read ends at the one deadline, whatever part of the answer it belongs to.
Errors say what kind of thing went wrong, never what a server sent.
"""

from __future__ import annotations

import functools
import http.client
import io
import ipaddress
import queue
import re
import socket
import ssl
import string
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from vlcache_jax.checks import short

FETCH_SECONDS = 20.0
MAX_REDIRECTS = 5
_MAX_URL = 8192  # characters
_MAX_HEAD = 64 * 1024  # bytes of status line and headers
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
# Protocol assignments (a cloud keeps its metadata there), 6to4 relays, and the address of Azure's own services: all
# global by number or, in older releases of Python, by mistake.
_NOT_PUBLIC = [ipaddress.IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")]


class TooLargeError(Exception):
    """More bytes than the limit."""


class _RefusedError(Exception):
    """A reason not to go on, without a word of the server's."""


class _Target(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


class _Deadline:
    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def fetch(url: str, *, domains: Sequence[str] | None, max_bytes: int, name: str) -> bytes:
    """The body of the answer to a GET.

    Args:
        url: http or https.
        domains: the hosts that may be asked, in the form of `domain_name`, or behind a dot for all below one; None is
            all. A host that is an address and stands here may be one that is not public.
        max_bytes: of the body.
        name: what error messages call the image.

    Raises:
        ValueError: the URL is refused, or nothing complete and short enough came within 20 seconds.
    """
    deadline = _Deadline(FETCH_SECONDS)
    here, redirects = url, 0
    try:
        while True:
            location, body = _get(here, domains, max_bytes, deadline)
            if location is None:
                return body
            redirects += 1
            if redirects > MAX_REDIRECTS:
                raise _RefusedError(f"more than {MAX_REDIRECTS} redirects")
            here = _join(here, location)
    except _RefusedError as error:
        reason = str(error)
    except TooLargeError:
        reason = f"more than {max_bytes} bytes"
    except TimeoutError:
        reason = f"not complete after {FETCH_SECONDS} s"
    except ssl.SSLCertVerificationError:
        reason = "its certificate is not valid"
    except ssl.SSLError:
        reason = "no TLS connection"
    except (ValueError, http.client.HTTPException):
        reason = "no complete and valid answer"
    except OSError as error:
        reason = error.strerror or "no connection"
    place = f" (redirect {redirects})" if redirects else ""
    raise ValueError(f"{name} must be a URL that can be fetched, got {short(url, 200)}: {reason}{place}")


def domain_name(text: str) -> str:
    """A host in its one form: an address, or a name in lower-case ASCII without a dot at its end.

    Raises:
        ValueError: neither, or an address in a form such as 0x7f.1, which some resolvers take for 127.0.0.1.
    """
    if ":" in text and "%" not in text:
        return str(ipaddress.IPv6Address(text))
    name = text.removesuffix(".").lower()
    if len(name) <= 253 and not name.isascii():
        name = name.encode("idna").decode()
    if len(name) > 253 or not re.fullmatch(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", name):
        raise ValueError("no host name")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", name.rpartition(".")[2]):  # no domain ends so
        return str(ipaddress.IPv4Address(name))
    return name


def read_at_most(max_bytes: int, read: Callable[[int], bytes | None]) -> bytes:
    """Reads to the end, or raises TooLargeError; `read` takes a number of bytes and returns at most so many."""
    chunks, count = [], 0
    while chunk := read(1 << 20):
        chunks.append(chunk)
        count += len(chunk)
        if count > max_bytes:
            raise TooLargeError
    return b"".join(chunks)


def _get(
    url: str, domains: Sequence[str] | None, max_bytes: int, deadline: _Deadline
) -> tuple[str | None, bytes]:  # fmt: skip
    """Where the answer redirects to, or None, and its body."""
    target = _parse(url, domains)
    addresses = _addresses(target.host, domains, deadline)
    with _dial(addresses, target.port, deadline) as plain, _secured(plain, target, deadline) as sock:
        sock.settimeout(deadline.left())
        sock.sendall(_request(target))
        wire = _Wire(sock, deadline, _MAX_HEAD)
        with closing(http.client.HTTPResponse(wire)) as response:  # type: ignore[arg-type]
            try:
                response.begin()
            except TooLargeError:
                raise _RefusedError(f"more than {_MAX_HEAD} bytes of headers") from None
            if response.status in _REDIRECTS and "Location" in response.headers:
                return response.headers["Location"], b""
            if response.status != 200:
                raise _RefusedError(f"status {response.status}")
            for header, known in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
                if any(value.lower() != known for value in response.headers.get_all(header, [])):
                    raise _RefusedError("an encoding that was not asked for")
            if not all(value.isdecimal() for value in response.headers.get_all("Content-Length", [])):
                raise ValueError("no length")
            if (response.length or 0) > max_bytes:
                raise TooLargeError
            wire.limit += 2 * max_bytes  # chunks have heads of their own
            body = read_at_most(max_bytes, response.read1)
            if response.length:
                raise _RefusedError("an incomplete answer")
            return None, body


def _parse(url: str, domains: Sequence[str] | None) -> _Target:
    if len(url) > _MAX_URL:
        raise _RefusedError(f"longer than {_MAX_URL} characters")
    _check_characters(url)
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _PORTS:
            raise _RefusedError("neither http nor https")
        host, port = domain_name(parts.hostname or ""), parts.port
        if ("[" in parts.netloc) != (":" in host):
            raise ValueError
    except ValueError:
        raise _RefusedError("no valid host and port") from None
    if "@" in parts.netloc:
        raise _RefusedError("a user name or password in it")
    if domains is not None and not any(host == each or (each[0] == "." and host.endswith(each)) for each in domains):
        raise _RefusedError("its host is not in allowed_media_domains")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    path = urllib.parse.quote(path, safe=string.punctuation)
    return _Target(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)


def _join(url: str, location: str) -> str:
    try:
        location = location.strip(" \t").encode("latin-1").decode()  # http.client reads headers as Latin-1
        _check_characters(location)  # urljoin would drop some
        return urllib.parse.urljoin(url, location)
    except ValueError:
        raise _RefusedError("a redirect to no valid URL") from None


def _check_characters(url: str) -> None:
    if any(character.isspace() or not character.isprintable() for character in url):
        raise _RefusedError("blanks or control characters in it")


def _addresses(host: str, domains: Sequence[str] | None, deadline: _Deadline) -> list[Address]:
    """Where to dial, each address checked."""
    try:
        addresses = [ipaddress.ip_address(host)]
    except ValueError:
        addresses = _look_up(host, deadline)
    else:
        if domains is not None and host in domains:  # the operator wrote down this very address
            return addresses
    if not all(_is_public(address) for address in addresses):
        raise _RefusedError("its host has an address that is not public")
    return addresses


def _look_up(host: str, deadline: _Deadline) -> list[Address]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except Exception as error:
            answers.put(error)

    try:  # in a thread, as nothing else ends a slow resolver
        threading.Thread(target=ask, name="vlcache-resolver", daemon=True).start()
    except RuntimeError:
        raise _RefusedError("there is no thread to look up its host") from None
    try:
        answer = answers.get(timeout=deadline.left())
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return list(dict.fromkeys(ipaddress.ip_address(entry[4][0]) for entry in answer))


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
        return address.is_global and address in _PUBLIC_IPV6
    return address.is_global and not address.is_multicast and not any(address in net for net in _NOT_PUBLIC)


def _dial(addresses: Sequence[Address], port: int, deadline: _Deadline) -> socket.socket:
    failure = OSError()
    for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
        try:
            return _connect(address, port, deadline.left() / left)
        except OSError as error:
            failure = error
    raise failure


def _connect(address: Address, port: int, seconds: float) -> socket.socket:
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6)
    try:
        sock.settimeout(seconds)
        sock.connect((str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


def _secured(sock: socket.socket, target: _Target, deadline: _Deadline) -> socket.socket:
    if target.scheme == "http":
        return sock
    sock.settimeout(deadline.left())
    return _tls_context().wrap_socket(sock, server_hostname=target.host)


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _request(target: _Target) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    if target.port != _PORTS[target.scheme]:
        host += f":{target.port}"
    return (
        f"GET {target.path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: vlcache-jax\r\nAccept: */*\r\n"
        "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
    ).encode("ascii")


class _Wire(io.RawIOBase):
    """What comes from a server: no read waits beyond the deadline, and all together bring at most `limit` bytes."""

    def __init__(self, sock: socket.socket, deadline: _Deadline, limit: int):
        self._sock = sock
        self._deadline = deadline
        self.limit = limit

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks of a socket. Its loops over a line or a chunk come back to `readinto`."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._deadline.left())
        count = self._sock.recv_into(buffer)
        self.limit -= count
        if self.limit < 0:
            raise TooLargeError
        return count
