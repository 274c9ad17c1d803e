"""What is looked at before anything else: whether a request is meant for this server, and can be read in one way."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlcache_jax.protocol.values import ApiError
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.responses import refuse


class HttpChecks:
    """Refuses requests by their Host and framing, and finds their path, whether a proxy has cut it or not (middleware).

    A server without keys answers whoever reaches it, and so would a page elsewhere whose name leads a browser to this
    machine (DNS rebinding). The Host, which no page can choose, tells it from the server's own.

    Args:
      app: what is behind.
      config: where the server stands.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app, self._root = app, config.root_path
        named = {name.lower() for name in (*config.allowed_hosts, config.host, "localhost")}
        self._hosts = None if config.has_keys or "*" in named else named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if (error := self._host_error(headers.get("host"))) is not None:
                return await refuse(error)(scope, receive, send)
            if "transfer-encoding" in headers and "content-length" in headers:
                told = "Transfer-Encoding must be left out beside Content-Length: what follows can be read in two ways"
                response = refuse(ApiError(told))
                response.headers["Connection"] = "close"
                return await response(scope, receive, send)
            if self._root:
                path = scope["path"]
                if path == self._root:  # what the page asks for lies beside the slash
                    return await RedirectResponse(f"{self._root}/")(scope, receive, send)
                path = path if path.startswith(f"{self._root}/") else self._root + path
                scope = {**scope, "path": path, "root_path": self._root}
        return await self._app(scope, receive, send)

    def _host_error(self, host: str | None) -> ApiError | None:
        if self._hosts is None or host is None:  # as of HTTP/1.0: browsers always name one
            return None
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            name = ""
        if name in self._hosts or _is_address(name):
            return None
        told = f"Host must be an address, localhost or one of allowed_hosts on a server without keys, got {host!r:.100}"
        return ApiError(told, status=403)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
