"""What a peer and its clients share: bounds, and reading from sockets under a deadline."""

from __future__ import annotations

import io
import re
import socket
import struct
import time
from typing import Any

MOST_RECORDS = 64  # of an image; older ones are not told
WRITTEN = struct.Struct(">Q")  # in front of each header: milliseconds since the epoch
TOKEN = re.compile(r"[!-~]{1,512}")


class Deadline:
    """Ends so many seconds after it was made, or renewed."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._end = time.monotonic() + self._seconds

    def left(self) -> float:
        """Seconds. Raises TimeoutError if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not complete after {self._seconds} s")
        return left


class Wire(io.RawIOBase):
    """What comes from a socket; no read waits beyond the deadline, whatever part of a message it is that is missing."""

    def __init__(self, sock: socket.socket, deadline: Deadline):
        self._sock, self._deadline = sock, deadline
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks of a socket. Its loops come back to `readinto`."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
