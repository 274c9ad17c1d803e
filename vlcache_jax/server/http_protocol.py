"""HTTP below the application: the parser of requests, and how it refuses them."""

from __future__ import annotations

import contextlib

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlcache_jax.protocol.values import ApiError
from vlcache_jax.server.responses import refuse

HEAD_BYTES = 1 << 16
"""Of a request's head at most. h11 holds to it; httptools, which uvicorn prefers where it is, has no limit."""


class HttpProtocol(H11Protocol):
    """Reads requests by h11, whatever else is installed, and refuses them with OpenAI's error object."""

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request, and closes the connection."""
        response = refuse(ApiError(f"the request must be HTTP/1.1 with a head of at most {HEAD_BYTES} bytes: {msg}"))
        headers = [*response.raw_headers, (b"connection", b"close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun: nothing can be said any more
            for event in (
                h11.Response(status_code=response.status_code, headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
