"""The life of a serving process: it listens, warms up, serves, is told to end, drains, and ends with a code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.common.checks import is_loopback
from vlcache_jax.common.progress import say
from vlcache_jax.config import EngineConfig
from vlcache_jax.llm import LLM
from vlcache_jax.server.admission import Entrance
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import HEAD_BYTES, HttpProtocol

FAILED = 1
"""Exit code where the engine failed."""
_LOOK = 0.1  # seconds from one look at the engine, or at requests that are to end, to the next
_AGAIN = 1.0  # seconds after which a second signal ends at once; one that comes sooner is the same once more
SMALL: Any = {"kv_cache_bytes": "1GiB"}
"""Of an embedder: queries, and pictures of items."""
_LAST = 10.0  # seconds that requests may take to tell their clients that they were ended


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Opens a model and serves it until a signal comes, or the engine fails.

    Returns:
      The exit code.

    Raises:
      ValueError, OSError, MemoryError: the model cannot be opened, or the address not be listened at.
    """
    with _bound(config) as place:
        if config.uds is None and not config.has_keys and not is_loopback(config.host):
            say(f"warning: every client that reaches {config.host} can send requests; set --api-key to prevent it")
        engine = AsyncLLM(engine_config, max_waiting=config.max_waiting)
        if config.embedder is None:
            return asyncio.run(_Process(Server(engine, config), place).run())
        with LLM(config.embedder, use_tqdm=False, **SMALL) as embedder:
            return asyncio.run(_Process(Server(engine, config, embedder=embedder), place, embedder).run())


async def warm_up(server: Server, embedder: LLM | None = None) -> None:
    """Compiles everything, if the server is to; then it is ready."""
    if server.config.warmup:
        reading = asyncio.wrap_future(server.engine.service.intake.sequences.grammars.prepare())
        await server.engine.warmup()
        if embedder is not None:
            await asyncio.to_thread(embedder.warmup)
        await asyncio.gather(reading, return_exceptions=True)  # what is wrong, requests that need it are told
    server.entrance.is_warm = True


def http_config(server: Server) -> uvicorn.Config:
    """How uvicorn serves it."""
    config = server.config
    return uvicorn.Config(
        server.app, http=HttpProtocol, h11_max_incomplete_event_size=HEAD_BYTES,
        ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
        log_config=None, log_level="error", access_log=False,  # clients send what it warns of
        ws="none", lifespan="off", server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=int(_LAST),
    )  # fmt: skip


@contextlib.contextmanager
def listening(server: Server) -> Iterator[str]:
    """Serves in a thread, for programs that do so beside something else; the engine stays open.

    Yields:
      The base URL, or the path of the socket.
    """
    http = _Uvicorn(http_config(server))
    with _bound(server.config) as place:
        thread = threading.Thread(target=asyncio.run, args=(http.serve(sockets=[place]),), name="vlcache-server")
        thread.start()
        try:
            while not http.started and thread.is_alive():
                time.sleep(_LOOK / 10)
            server.entrance.is_warm = True
            yield server.config.uds or _url(server.config, place)
        finally:
            http.should_exit = True
            thread.join()


class _Process:
    """One serving process.

    Args:
      server: what it serves.
      place: a bound socket.
      embedder: compiled before it is ready, too; None: there is none of its own.
    """

    def __init__(self, server: Server, place: socket.socket, embedder: LLM | None = None):
        self._server, self._place, self._embedder = server, place, embedder
        self._config = server.config
        self._told_at: float | None = None
        self._ends = asyncio.Event()
        self._http = _Uvicorn(http_config(server))

    async def run(self) -> int:
        """Serves; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told)
        if self._server.register is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_keys)
        serving = asyncio.create_task(self._http.serve(sockets=[self._place]))
        warming = asyncio.create_task(self._warm_up())
        watching = asyncio.create_task(self._watch())
        ending = asyncio.create_task(self._ends.wait())
        await asyncio.wait({serving, watching, ending}, return_when=asyncio.FIRST_COMPLETED)
        entrance = self._server.entrance
        if entrance.failure is None:
            await self._drain()
        else:
            say(f"error: {entrance.failure}")
            entrance.ended.set()
            await _is_empty(entrance, _LAST)
        entrance.ended.set()  # also for bodies that nobody reads
        self._http.should_exit = True
        await serving
        watching.cancel()
        if not warming.done():  # it cannot be interrupted, and its programs are of no use any more
            os._exit(FAILED if entrance.failure else 0)
        if entrance.failure is None:
            await asyncio.to_thread(self._server.engine.cache.flush)  # also to the disk
            await self._server.engine.close()
            return 0
        os._exit(FAILED)  # threads of an engine that has failed may never end

    async def _warm_up(self) -> None:
        place = self._config.uds or _url(self._config, self._place)
        if self._config.warmup:
            # Compilation can take minutes, and users would otherwise believe that they have to wait for it.
            say(f"listening at {place}: the server answers requests while it compiles its programs")
        try:
            await warm_up(self._server, self._embedder)
        except Exception as error:
            self._server.entrance.failure = f"it could not be compiled: {error}"
            return
        gc.collect()
        gc.freeze()  # a large body's values would have all that there is looked through, and others wait for that
        say(f"ready: {' '.join(self._server.models)} at {place} (try {_try(self._config, self._place)})")

    async def _watch(self) -> None:
        """Returns when the engine has failed."""
        while self._server.entrance.failure is None:
            await asyncio.sleep(_LOOK)
            await self._server.check_health()

    def _read_keys(self) -> None:
        assert self._server.register is not None
        try:
            self._server.register.reload()
        except ValueError as error:
            say(f"the keys stay as they were: {error}")
        else:
            say("the keys have been read again")

    def _told(self) -> None:
        """A signal came."""
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
            self._ends.set()
        elif now - self._told_at >= _AGAIN:
            os._exit(128 + signal.SIGTERM)

    async def _drain(self) -> None:
        """Nobody comes in any more; who is inside has some time, and is told then."""
        entrance = self._server.entrance
        entrance.is_draining = True
        say(f"shutting down: {entrance.inside} requests in flight")
        if not await _is_empty(entrance, self._config.shutdown_timeout):
            say(f"aborting {entrance.inside} requests")
            entrance.ended.set()
            await _is_empty(entrance, _LAST)


class _Uvicorn(uvicorn.Server):
    """Whose process looks after signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _is_empty(entrance: Entrance, seconds: float) -> bool:
    """Whether nobody is inside any more, within some seconds."""
    end = time.monotonic() + seconds
    while entrance.inside and time.monotonic() < end:
        await asyncio.sleep(_LOOK)
    return not entrance.inside


@contextlib.contextmanager
def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket that is bound, so that a wrong address is told before a model is opened; nobody can connect yet."""
    if config.uds is not None:
        with socket.socket(socket.AF_UNIX) as place:
            _clear(config.uds)
            try:
                place.bind(config.uds)
            except OSError as error:
                raise OSError(f"cannot listen at {config.uds}: {error.strerror}") from error
            try:
                yield place
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(config.uds)
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol by name: of others asyncio does not know that they must not wait to fill a packet.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((config.host, config.port))
        except OSError as error:
            remedy = "; choose another port with --port, 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
            raise OSError(f"cannot listen at {config.host}:{config.port}: {error.strerror}{remedy}") from error
        yield place


def _clear(path: str) -> None:
    """Removes the socket of a server that has ended without doing so itself.

    Raises:
      OSError: somebody listens there.
      ValueError: it is no socket.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ValueError(f"uds must be the path of a socket, got a file: {path}")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as other:
        try:
            other.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(f"cannot listen at {path}: another server does")


def _url(config: ServerConfig, place: socket.socket) -> str:
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{place.getsockname()[1]}{config.root_path}/v1"


def _try(config: ServerConfig, place: socket.socket) -> str:
    key = " -H 'Authorization: Bearer KEY'" if config.has_keys else ""
    if config.uds is not None:
        return f"curl{key} --unix-socket {config.uds} http://localhost/v1/models"
    return f"curl{key} {_url(config, place)}/models"
