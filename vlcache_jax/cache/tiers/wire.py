"""Limits that a peer and its clients share, and reading from sockets with a deadline."""

from __future__ import annotations

import io
import re
import socket
import struct
import time
from typing import Any

MAX_RECORDS = 64  # records of an image in a response; older ones are left out
WRITTEN = struct.Struct(">Q")  # time of writing before each header, in milliseconds since the epoch
TOKEN = re.compile(r"[!-~]{1,512}")


class Deadline:
    """Deadline a number of seconds after its creation or renewal."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._end = time.monotonic() + self._seconds

    def left(self) -> float:
        """Return the seconds left. Raises TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the exchange with the peer is not complete after {self._seconds} s")
        return left


class Wire(io.RawIOBase):
    """Raw input of a socket. No read waits beyond the deadline, however slowly the bytes arrive."""

    def __init__(self, sock: socket.socket, deadline: Deadline):
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a buffered reader for `http.client`, which reads through `readinto`."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
