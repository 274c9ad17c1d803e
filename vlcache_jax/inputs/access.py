"""Access rules for image files and URLs, and the reading.

A URL from a client may point at what its sender cannot reach: this machine, its network, the metadata service of its
cloud. Therefore `fetch` resolves a host once, checks the addresses, and connects to a checked address, again at every
redirect. A server may also be slow on purpose, so one deadline applies to all reads. Errors name the kind of failure
and never contain what a server sent.
"""

from __future__ import annotations

import errno
import functools
import http.client
import io
import ipaddress
import os
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
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, NamedTuple, cast

from vlcache_jax.common.checks import check_flags, parse_bytes, short, shorten

FETCH_SECONDS = 20.0
MAX_REDIRECTS = 5
_MAX_URL = 8192  # characters
_MAX_HEAD = 64 * 1024  # bytes of status line and headers
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
# Protocol assignments (including a cloud's metadata service), 6to4 relays, and Azure's internal address. All of them
# count as global, by number or because of errors in older Python releases.
_NOT_PUBLIC = [ipaddress.IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")]


class TooLargeError(Exception):
    """The data has more bytes than the limit."""


class _RefusedError(Exception):
    """Reason to refuse a URL, without text of the server."""


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
    """Return the body of a GET response.

    Args:
        url: an http or https URL.
        domains: allowed hosts in the form of `domain_name`, with a leading dot for all subdomains; None: all. An
            address in this list may be private.
        max_bytes: maximum size of the body.
        name: name of the image in errors.

    Raises:
        ValueError: the URL is refused, or no complete body within the size limit arrived within 20 seconds.
    """
    deadline = _Deadline(FETCH_SECONDS)
    current, redirects = url, 0
    try:
        while True:
            location, body = _get(current, domains, max_bytes, deadline)
            if location is None:
                return body
            redirects += 1
            if redirects > MAX_REDIRECTS:
                raise _RefusedError(f"more than {MAX_REDIRECTS} redirects")
            current = _join(current, location)
    except _RefusedError as error:
        reason = str(error)
    except TooLargeError:
        reason = f"its response has more than {max_bytes} bytes"
    except TimeoutError:
        reason = f"the download took more than {FETCH_SECONDS} s"
    except ssl.SSLCertVerificationError:
        reason = "its TLS certificate is invalid"
    except ssl.SSLError:
        reason = "the TLS handshake failed"
    except (ValueError, http.client.HTTPException):
        reason = "the HTTP response is incomplete or invalid"
    except OSError as error:
        reason = error.strerror or "the connection failed"
    which = f" (redirect {redirects})" if redirects else ""
    raise ValueError(f"{name} must be a URL that can be fetched, got {short(url, 200)}: {reason}{which}")


def domain_name(text: str) -> str:
    """Return the canonical form of a host: an address, or a lower-case ASCII name without a trailing dot.

    Raises:
        ValueError: `text` is neither, or an address in a form such as 0x7f.1, which some resolvers take for 127.0.0.1.
    """
    if ":" in text and "%" not in text:
        return str(ipaddress.IPv6Address(text))
    name = text.removesuffix(".").lower()
    if len(name) <= 253 and not name.isascii():
        name = name.encode("idna").decode()
    if len(name) > 253 or not re.fullmatch(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*", name):
        raise ValueError("no host name")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", name.rpartition(".")[2]):  # no top-level domain is a number
        return str(ipaddress.IPv4Address(name))
    return name


def read_at_most(max_bytes: int, read: Callable[[int], bytes | None]) -> bytes:
    """Read to the end, or raise a TooLargeError. `read` takes a number of bytes and returns at most as many."""
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
    """Return the target of a redirect, or None and the body."""
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
                raise _RefusedError(f"its response has more than {_MAX_HEAD} bytes of headers") from None
            if response.status in _REDIRECTS and "Location" in response.headers:
                return response.headers["Location"], b""
            if response.status != 200:
                raise _RefusedError(f"the server returned status {response.status}")
            for header, known in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
                if any(value.lower() != known for value in response.headers.get_all(header, [])):
                    raise _RefusedError("its response has an encoding that was not requested")
            if not all(value.isdecimal() for value in response.headers.get_all("Content-Length", [])):
                raise ValueError("no length")
            if (response.length or 0) > max_bytes:
                raise TooLargeError
            wire.limit += 2 * max_bytes  # chunks have headers of their own
            body = read_at_most(max_bytes, response.read1)
            if response.length:
                raise _RefusedError("its response is incomplete")
            return None, body


def _parse(url: str, domains: Sequence[str] | None) -> _Target:
    if len(url) > _MAX_URL:
        raise _RefusedError(f"it has more than {_MAX_URL} characters")
    _check_characters(url)
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _PORTS:
            raise _RefusedError("its scheme is neither http nor https")
        host, port = domain_name(parts.hostname or ""), parts.port
        if ("[" in parts.netloc) != (":" in host):
            raise ValueError
    except ValueError:
        raise _RefusedError("its host or port is invalid") from None
    if "@" in parts.netloc:
        raise _RefusedError("it contains a user name or password")
    if domains is not None and not any(host == each or (each[0] == "." and host.endswith(each)) for each in domains):
        raise _RefusedError("its host is not in allowed_media_domains")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    path = urllib.parse.quote(path, safe=string.punctuation)
    return _Target(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)


def _join(url: str, location: str) -> str:
    try:
        location = location.strip(" \t").encode("latin-1").decode()  # http.client reads headers as Latin-1
        _check_characters(location)  # urljoin would drop some of them
        return urllib.parse.urljoin(url, location)
    except ValueError:
        raise _RefusedError("it redirects to an invalid URL") from None


def _check_characters(url: str) -> None:
    if any(character.isspace() or not character.isprintable() for character in url):
        raise _RefusedError("it contains blanks or control characters")


def _addresses(host: str, domains: Sequence[str] | None, deadline: _Deadline) -> list[Address]:
    """Return the checked addresses of a host."""
    try:
        addresses = [ipaddress.ip_address(host)]
    except ValueError:
        addresses = _look_up(host, deadline)
    else:
        if domains is not None and host in domains:  # the operator listed this address
            return addresses
    if not all(_is_public(address) for address in addresses):
        raise _RefusedError("its host has a non-public address")
    return addresses


def _look_up(host: str, deadline: _Deadline) -> list[Address]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            answers.put(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except Exception as error:
            answers.put(error)

    try:  # in a thread, since the resolver has no timeout
        threading.Thread(target=resolve, name="vlcache-resolver", daemon=True).start()
    except RuntimeError:
        raise _RefusedError("its host cannot be looked up, because no thread can be started") from None
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
    """Response of a server. Reads end at the deadline, and return at most `limit` bytes in total."""

    def __init__(self, sock: socket.socket, deadline: _Deadline, limit: int):
        self._sock = sock
        self._deadline = deadline
        self.limit = limit

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the file object that http.client requires. Its reads of lines and chunks call `readinto`."""
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


# O_NONBLOCK: a pipe or terminal that replaces a file between check and open must not block the caller.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


@dataclass(frozen=True)
class Access:
    """Rules for reading images from files and URLs.

    Attributes:
        allow_remote_images: fetch http(s) URLs. Default False.
        allowed_media_domains: hosts that URLs and redirects may name; a leading dot allows all subdomains. Only public
            addresses are contacted, except addresses in this list, such as "127.0.0.1", if the URL has the same number.
            Default None: all hosts.
        allowed_local_media_path: folder that image files must be in, with links resolved; "/" allows all files, None or
            "" none. Default "/".
        max_image_bytes: maximum size of a file, of encoded bytes and of a download, as a number or a string such as
            "64MiB". Default "64MiB".

    Raises:
        ValueError: an argument has another type or form, or the folder does not exist.
    """

    allow_remote_images: bool = False
    allowed_media_domains: Sequence[str] | None = None
    allowed_local_media_path: str | os.PathLike[str] | None = "/"
    max_image_bytes: int | str = "64MiB"

    def __post_init__(self) -> None:
        check_flags(allow_remote_images=self.allow_remote_images)
        for key, value in (
            ("allowed_media_domains", _check_domains(self.allowed_media_domains)),
            ("allowed_local_media_path", _check_folder(self.allowed_local_media_path)),
            ("max_image_bytes", parse_bytes(self.max_image_bytes, "max_image_bytes")),
        ):
            object.__setattr__(self, key, value)

    def check_size(self, count: int, name: str) -> None:
        """Raise a ValueError if `count` bytes exceed the limit."""
        if count > self._max_bytes:
            raise ValueError(f"{name} must have at most {self._max_bytes} bytes, got {count}: raise max_image_bytes")

    def fetch(self, url: str, name: str) -> bytes:
        """Return the content of an http(s) URL.

        Raises:
            ValueError: the URL is not allowed, fails, takes more than 20 seconds, or is too large.
        """
        if not self.allow_remote_images:
            raise ValueError(f"{name} must be local unless allow_remote_images=True, got {_quoted(url)}")
        return fetch(url, domains=self.allowed_media_domains, max_bytes=self._max_bytes, name=name)

    def read_file(self, path: str | os.PathLike[str], name: str) -> bytes:
        """Return the content of a regular file; "~" at the beginning of its path is the home directory.

        Raises:
            ValueError: the path is not allowed, with the same message whether it exists or not; or there is no such
                file, it cannot be read, or it is too large.
        """
        folder = cast(str, self.allowed_local_media_path)
        try:
            resolved = os.path.expanduser(os.fsdecode(path))
            if folder != "/":
                # Remove `..` first: resolved after a link, it would reveal the link's target.
                resolved = os.path.realpath(os.path.abspath(resolved))
                if not folder or not Path(resolved).is_relative_to(folder):
                    raise ValueError("not allowed by allowed_local_media_path")
            with _open(resolved, folder) as file:
                if os.fstat(file.fileno()).st_size > self._max_bytes:
                    raise TooLargeError
                return read_at_most(self._max_bytes, file.read)  # the file may have grown
        except TooLargeError:
            raise self._too_large(name) from None
        except FileNotFoundError:
            reason = "no such file"
        except (OSError, TypeError, ValueError) as error:
            reason = shorten(getattr(error, "strerror", None) or str(error))
        raise ValueError(f"{name} must be the path of a readable file, got {_quoted(path)}: {reason}")

    def read_open(self, file: Any, name: str) -> bytes:
        """Return the content of an open file from its beginning, and restore its position, as Pillow does.

        A file that cannot seek, such as a pipe, is read from its current position.

        Raises:
            ValueError: the file is closed, is a text file, cannot be read, or is too large.
        """

        def read(count: int) -> bytes | None:
            try:
                piece = file.read(count)
            except UnicodeDecodeError:
                piece = ""
            if not isinstance(piece, bytes | None):
                raise TypeError('it returns text; open it in mode "rb"')
            return piece

        try:
            if not (hasattr(file, "seekable") and file.seekable()):
                return read_at_most(self._max_bytes, read)
            position = file.tell()
            file.seek(0)
            try:
                return read_at_most(self._max_bytes, read)
            finally:
                file.seek(position)
        except TooLargeError:
            raise self._too_large(name) from None
        except Exception as error:  # any class may have a method `read`; a closed file raises a ValueError
            raise ValueError(
                f"{name} must be a file that is open for reading bytes, got {short(file)}: {error}"
            ) from error

    def _too_large(self, name: str) -> ValueError:
        return ValueError(f"{name} must have at most {self._max_bytes} bytes, got a larger file: raise max_image_bytes")

    @functools.cached_property
    def _max_bytes(self) -> int:
        return cast(int, self.max_image_bytes)


def _check_domains(domains: object) -> tuple[str, ...] | None:
    if domains is None:
        return None
    if not isinstance(domains, (list, tuple, set, frozenset)):
        raise ValueError(f"allowed_media_domains must be a list of host names, got {short(domains)}")
    return tuple(_check_domain(domain) for domain in domains)


def _check_domain(domain: object) -> str:
    try:
        if isinstance(domain, str):
            return "." + domain_name(domain[1:]) if domain.startswith(".") else domain_name(domain)
    except ValueError:
        pass
    raise ValueError(
        "allowed_media_domains must be host names, without scheme or port, and addresses in their usual form, "
        f"got {short(domain)}"
    )


def _check_folder(path: object) -> str:
    if path is None or path == "":
        return ""
    try:
        if isinstance(path, (str, os.PathLike)) and os.path.isdir(folder := os.path.expanduser(os.fsdecode(path))):
            return os.path.realpath(folder)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"allowed_local_media_path must be a folder or None, got {_quoted(path)}")


def _open(path: str, folder: str) -> FileIO:
    """Open a regular file. Within a folder, it follows no link, since one may have been created after the check."""
    if folder == "/":
        return _open_regular(path)
    *parents, last = Path(path).relative_to(folder).parts or (".",)
    directory = os.open(folder, _FOLDER)
    try:
        for parent in parents:
            outer, directory = directory, os.open(parent, _FOLDER, dir_fd=directory)
            os.close(outer)
        return _open_regular(last, directory)
    finally:
        os.close(directory)


def _open_regular(path: str, directory: int | None = None) -> FileIO:
    mode = os.stat(path, dir_fd=directory, follow_symlinks=directory is None).st_mode
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory")
    if not S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    links = 0 if directory is None else os.O_NOFOLLOW
    return FileIO(os.open(path, _FILE | links, dir_fd=directory))


def _quoted(value: object) -> str:
    return short(str(value), 200)


LOCAL_ONLY = Access()
"""Default access rules: all files, no URLs."""
