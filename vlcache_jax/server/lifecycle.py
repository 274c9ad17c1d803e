"""Life cycle of a server process: listen, warm up, serve, drain after a signal, and exit with a code."""

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
from vlcache_jax.server.admission import AdmissionControl
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import HEAD_BYTES, HttpProtocol

FAILED = 1
"""Exit code if the engine has failed."""
_POLL = 0.1  # seconds between two checks of the engine, or of requests that are to end
_REPEAT = 1.0  # seconds after which a second signal exits at once; an earlier one is a duplicate of the first
SMALL: Any = {"kv_cache_bytes": "1GiB"}
"""Engine options of an embedder. Its inputs are short: queries, and images of library items."""
_LOG = 10.0  # seconds between two lines about the traffic
_LAST = 10.0  # seconds in which aborted requests may send their last message


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Open a model and serve it until SIGTERM or SIGINT arrives or the engine fails.

    Args:
      engine_config: options of the engine.
      config: options of the server.

    Returns:
      The exit code: 0, or `FAILED`.

    Raises:
      ValueError, OSError, MemoryError: the model cannot be opened, or the server cannot listen at the address.
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
    """Compile all programs if `warmup` is set, then mark the server as ready."""
    if server.config.warmup:
        reading = asyncio.wrap_future(server.engine.service.preparation.sequences.grammars.prepare())
        await server.engine.warmup()
        if embedder is not None:
            await asyncio.to_thread(embedder.warmup)
        await asyncio.gather(reading, return_exceptions=True)  # requests that need the grammars report its errors
    server.admission.is_warm = True


async def log_traffic(server: Server) -> None:
    """Print a line every ten seconds while there is traffic, if `log_traffic` is set."""
    while server.config.log_traffic:
        await asyncio.sleep(_LOG)
        if (line := server.traffic.line(_LOG)) is not None:
            say(line)


def http_config(server: Server) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    config = server.config
    return uvicorn.Config(
        server.app, http=HttpProtocol, h11_max_incomplete_event_size=HEAD_BYTES,
        ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
        log_config=None, log_level="error", access_log=False,  # its warnings are about clients' requests
        ws="none", lifespan="off", server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=int(_LAST),
    )  # fmt: skip


@contextlib.contextmanager
def listening(server: Server) -> Iterator[str]:
    """Serve in a thread, for programs that also do other work. The engine stays open at the end.

    Yields:
      The base URL, or the path of the socket.
    """
    http = _Uvicorn(http_config(server))
    with _bound(server.config) as place:
        thread = threading.Thread(target=asyncio.run, args=(http.serve(sockets=[place]),), name="vlcache-server")
        thread.start()
        try:
            while not http.started and thread.is_alive():
                time.sleep(_POLL / 10)
            server.admission.is_warm = True
            yield server.config.uds or _url(server.config, place)
        finally:
            http.should_exit = True
            thread.join()


class _Process:
    """Server process, from warm-up to its exit code.

    Args:
      server: the server.
      place: a bound socket.
      embedder: the model of `file_search`, which is also compiled at warm-up; None if the engine's model is used.
    """

    def __init__(self, server: Server, place: socket.socket, embedder: LLM | None = None):
        self._server, self._place, self._embedder = server, place, embedder
        self._config = server.config
        self._signaled_at: float | None = None
        self._ends = asyncio.Event()
        self._http = _Uvicorn(http_config(server))

    async def run(self) -> int:
        """Serve until the end, and return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if self._server.register is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_keys)
        serving = asyncio.create_task(self._http.serve(sockets=[self._place]))
        warming = asyncio.create_task(self._warm_up())
        watching = asyncio.create_task(self._watch())
        logging = asyncio.create_task(log_traffic(self._server))
        ending = asyncio.create_task(self._ends.wait())
        await asyncio.wait({serving, watching, ending}, return_when=asyncio.FIRST_COMPLETED)
        admission = self._server.admission
        if admission.failure is None:
            await self._drain()
        else:
            say(f"error: {admission.failure}")
            admission.ended.set()
            await _is_empty(admission, _LAST)
        admission.ended.set()  # also ends the reading of unread bodies
        self._http.should_exit = True
        await serving
        watching.cancel()
        logging.cancel()
        if not warming.done():  # compilation cannot be interrupted
            os._exit(FAILED if admission.failure else 0)
        if admission.failure is None:
            await asyncio.to_thread(self._server.engine.cache.flush)  # also to the disk
            await self._server.engine.close()
            return 0
        os._exit(FAILED)  # threads of an engine that has failed may never end

    async def _warm_up(self) -> None:
        place = self._config.uds or _url(self._config, self._place)
        if self._config.warmup:
            # Compilation can take minutes. Without this message users would wait for it.
            say(f"listening at {place}: the server answers requests while it compiles its programs")
        try:
            await warm_up(self._server, self._embedder)
        except Exception as error:
            self._server.admission.failure = f"warm-up failed: {error}"
            return
        gc.collect()
        gc.freeze()  # else large bodies trigger collections of all objects, which block other requests
        say(f"ready: {' '.join(self._server.models)} at {place} (try {_try(self._config, self._place)})")

    async def _watch(self) -> None:
        """Return once the engine has failed."""
        while self._server.admission.failure is None:
            await asyncio.sleep(_POLL)
            await self._server.check_health()

    def _read_keys(self) -> None:
        assert self._server.register is not None
        try:
            self._server.register.reload()
        except ValueError as error:
            say(f"the keys were not reloaded: {error}")
        else:
            say("the keys were reloaded")

    def _on_signal(self) -> None:
        """Begin to drain at the first signal, and exit at once at a later one."""
        now = time.monotonic()
        if self._signaled_at is None:
            self._signaled_at = now
            self._ends.set()
        elif now - self._signaled_at >= _REPEAT:
            os._exit(128 + signal.SIGTERM)

    async def _drain(self) -> None:
        """Refuse new requests, wait for those in flight, and abort them after `shutdown_timeout`."""
        admission = self._server.admission
        admission.is_draining = True
        say(f"shutting down: {admission.inside} requests in flight")
        if not await _is_empty(admission, self._config.shutdown_timeout):
            say(f"aborting {admission.inside} requests")
            admission.ended.set()
            await _is_empty(admission, _LAST)


class _Uvicorn(uvicorn.Server):
    """Uvicorn's server without its signal handlers: `_Process` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _is_empty(admission: AdmissionControl, seconds: float) -> bool:
    """Wait up to `seconds` for all requests to end, and return whether they have."""
    end = time.monotonic() + seconds
    while admission.inside and time.monotonic() < end:
        await asyncio.sleep(_POLL)
    return not admission.inside


@contextlib.contextmanager
def _bound(config: ServerConfig) -> Iterator[socket.socket]:
    """Yield a bound socket that does not listen yet. A wrong address is reported before the model is opened.

    Raises:
      OSError: the address cannot be bound, or another server uses it.
      ValueError: the path of `uds` is not a socket.
    """
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
    # With the protocol given, asyncio sets TCP_NODELAY on the connections.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((config.host, config.port))
        except OSError as error:
            remedy = (
                "; choose another port with --port, where 0 selects a free one"
                if error.errno == errno.EADDRINUSE
                else ""
            )
            raise OSError(f"cannot listen at {config.host}:{config.port}: {error.strerror}{remedy}") from error
        yield place


def _clear(path: str) -> None:
    """Remove the stale socket file of a server that has ended.

    Raises:
      OSError: another server listens at the path.
      ValueError: the path is not a socket.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ValueError(f"uds must be a new path or the path of a socket, got a file: {path}")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as other:
        try:
            other.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(f"cannot listen at {path}: another server uses it; choose another path with --uds")


def _url(config: ServerConfig, place: socket.socket) -> str:
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{place.getsockname()[1]}{config.root_path}/v1"


def _try(config: ServerConfig, place: socket.socket) -> str:
    key = " -H 'Authorization: Bearer KEY'" if config.has_keys else ""
    if config.uds is not None:
        return f"curl{key} --unix-socket {config.uds} http://localhost/v1/models"
    return f"curl{key} {_url(config, place)}/models"
