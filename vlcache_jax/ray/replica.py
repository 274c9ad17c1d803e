"""A replica of a service: an engine behind the server's own routes, which are called without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any

import ray.util
from ray import serve
from starlette.types import ASGIApp, Message, Scope

from vlcache_jax.affinity import Seen
from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.tiers.neighbours import Holders
from vlcache_jax.cache.tiers.peer_server import PeerServer
from vlcache_jax.config import EngineConfig
from vlcache_jax.llm import LLM
from vlcache_jax.ray.routing import PEER, tag_of
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import FAILED, SMALL, warm_up

_log = logging.getLogger(__name__)

_LOOK = 0.2  # seconds from one look at the engine to the next
_AHEAD = 16  # messages that are read before whoever waits for them takes them


class EngineReplica:
    """An engine of a service.

    Args:
      config: of the engine.
      server: of the routes.
      secret: of tenants' salts, the same for all replicas.
      token: that replicas tell each other.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: EngineConfig, server: ServerConfig, secret: bytes, token: str
    ):
        self._holders = Holders()
        if config.cache.disk is not None:  # else there is nothing that others could read
            cache = dataclasses.replace(config.cache, neighbours=self._holders, peer_token=token)
            config = dataclasses.replace(config, cache=cache)
        tag = tag_of(serve.get_replica_context().replica_id.unique_id)
        self._engine = await asyncio.to_thread(AsyncLLM, config, max_waiting=server.max_waiting)
        self._embedder = None
        if server.embedder is not None:
            self._embedder = await asyncio.to_thread(lambda: LLM(server.embedder or "", use_tqdm=False, **SMALL))
        self._server = Server(self._engine, server, embedder=self._embedder, secret=secret, tag=tag)
        self._tag = tag
        self._peers = _serve_records(self._engine, token)
        await warm_up(self._server, self._embedder)
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Ends the process when its engine has failed: what refuses at once would be given all that comes."""
        while self._server.entrance.failure is None:
            await asyncio.sleep(_LOOK)
            await self._server.check_health()
        _log.error("the engine failed: %s", self._server.entrance.failure)
        os._exit(FAILED)  # its threads may never end

    async def http(
        self, seen: Seen, scope: Scope, body: bytes, *, holders: Collection[str] = ()
    ) -> AsyncGenerator[Sequence[Message]]:
        """Answers a request; yields the messages that ASGI sends, as many as there are.

        Args:
          seen: for the router.
          scope: of the request.
          body: of it, whole.
          holders: addresses of replicas that may have records of its images.
        """
        self._holders.note(holders)
        async with contextlib.aclosing(respond(self._server.app, scope, body)) as messages:
            async for some in messages:
                yield some

    async def told(self, scope: Scope, body: bytes) -> tuple[str, list[Message]]:
        """What this replica answers to a request that all have; its tag stands before."""
        return self._tag, [one async for some in respond(self._server.app, scope, body) for one in some]

    async def check_health(self) -> None:
        """Raises a RuntimeError where the engine will not answer any more; Ray then starts another replica."""
        await self._server.check_health()
        if self._server.entrance.failure is not None:
            raise RuntimeError(self._server.entrance.failure)

    def record_routing_stats(self) -> Mapping[str, Any]:
        """What routers know of this replica."""
        if self._peers is None:
            return {}
        return {PEER: f"http://{ray.util.get_node_ip_address()}:{self._peers.address[1]}"}

    async def __del__(self) -> None:
        """Requests have ended by now."""
        self._watching.cancel()
        if self._peers is not None:
            self._peers.close()
        await asyncio.to_thread(self._engine.cache.flush)  # also to the disk
        await self._engine.close()
        if self._embedder is not None:
            await asyncio.to_thread(self._embedder.close)


async def respond(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Sequence[Message]]:
    """Calls an ASGI application with a request that is there as a whole; yields what it sends, as much as there is.

    Who stops asking has gone away.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
    is_read, gone = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await app(scope, receive, sent.put)
        except Exception:  # what it answered says so
            _log.exception("a request failed")
        await sent.put(None)

    working = asyncio.ensure_future(work())
    try:
        while True:
            some = [await sent.get()]
            while not sent.empty():
                some.append(sent.get_nowait())
            if messages := [one for one in some if one is not None]:
                yield messages
            if None in some:
                return
    finally:
        gone.set()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _serve_records(engine: AsyncLLM, token: str) -> PeerServer | None:
    """Gives the records on this machine's disk to other replicas; None: there is no disk."""
    config: CacheConfig = engine.service.config.cache
    if config.disk is None:
        return None
    [tier] = [channel.tier for channel in engine.service.cache.store.channels if isinstance(channel.tier, DiskTier)]
    peers = PeerServer(tier, ray.util.get_node_ip_address(), 0, token)
    threading.Thread(target=peers.serve_forever, name="vlcache-records", daemon=True).start()
    return peers
