"""A service of many engines, by Ray Serve.

A replica is an engine behind the server's own routes, which are called without HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any

import ray.util
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp, Message, Scope

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.tiers.discovered_peers import RecentPeers
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.tiers.peer_server import PeerServer
from vlcache_jax.common.checks import check_whole
from vlcache_jax.config import EngineConfig
from vlcache_jax.llm import LLM
from vlcache_jax.ray.engines import EngineOrder, placed, warn_of_room
from vlcache_jax.ray.ingress import Ingress
from vlcache_jax.ray.routing import PEER, ImageRouter, tag_of
from vlcache_jax.router.affinity import FACTOR, SLACK, Affinity, SeenImages
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import FAILED, SMALL, warm_up
from vlcache_jax.server.tenants import server_secret

_log = logging.getLogger(__name__)

_LOOK = 0.2  # seconds from one look at the engine to the next
_AHEAD = 16  # messages that are read before whoever waits for them takes them


class EngineReplica:
    """An engine of a service.

    Args:
      secret: of tenants' salts, the same for all replicas.
      token: that replicas tell each other.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: EngineConfig, server: ServerConfig, secret: bytes, token: str
    ):
        self._holders = RecentPeers()
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
        self, seen: SeenImages, scope: Scope, body: bytes, *, holders: Collection[str] = ()
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


_RAYS = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile")  # options of which Ray Serve has its own
_FACTS = 1.0  # seconds from one look at what replicas tell routers to the next
_LAST = 10.0  # seconds that a replica may take to end behind its requests


def app(
    config: EngineConfig | str | os.PathLike[str],
    server: ServerConfig | None = None,
    *,
    engines: int | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    ingresses: int = 1,
    num_gpus: float | None = None,
    num_cpus: float = 0,
    factor: float = FACTOR,
    slack: int = SLACK,
) -> Application:
    """A service, for `ray.serve.run`::

        config = EngineConfig("Qwen/Qwen3-VL-8B-Instruct", cache=CacheConfig(disk="/data/records"))
        ray.serve.run(vlcache_jax.ray.serve.app(config, engines=8))

    It has the routes of `vlcache serve`, in two parts: an entrance, which reads bodies and sees their images' digests,
    and engines. A request goes to the engine that holds its images, a conversation to the one that answered before, a
    text to the one that has least to do. With `disk`, an engine takes records of images from the one that holds them
    where that is quicker than computing; replicas tell each other a token that is made of a secret on that disk.
    Run again with other arguments, Ray replaces engines one after the other; `autoscaling` leaves those that run.

    Args:
      config: of each engine, or its model.
      server: of the routes. Where it listens and TLS are Ray Serve's (`ray.serve.start`).
      engines: replicas; by default 1.
      autoscaling: in place of that number, Ray Serve's `autoscaling_config`: {"min_replicas": 1, "max_replicas": 8,
        "target_ongoing_requests": 16}.
      ingresses: replicas of the entrance.
      num_gpus: of each engine; by default `tensor_parallel_size`. 0 is for CPUs.
      num_cpus: of each engine.
      factor, slack: see `Affinity`.

    Raises:
      ValueError: an option is wrong.
    """
    own = config if isinstance(config, EngineConfig) else EngineConfig(config)
    own = dataclasses.replace(placed(own), use_tqdm=False)
    served = server or ServerConfig()
    for name in _RAYS:
        if getattr(served, name) != getattr(ServerConfig, name):
            raise ValueError(f"{name} must be left out: Ray Serve listens, see ray.serve.start")
    if engines is not None and autoscaling is not None:
        raise ValueError(f"engines must be left out beside autoscaling, got {engines}")
    Affinity(factor, slack)
    check_whole("ingresses", ingresses, 1)
    order = EngineOrder(
        engines=1 if engines is None else engines,
        num_gpus=own.tensor_parallel_size if num_gpus is None else num_gpus,
        num_cpus=num_cpus,
    )
    warn_of_room(order.engines, order.num_gpus)
    shares = own.cache.disk is not None or served.api_keys is not None
    secret = server_secret(own.cache.disk) if shares else b""  # another one would end all replicas when it is run again
    token = hashlib.sha256(b"records " + secret).hexdigest()
    router = RequestRouterConfig(
        request_router_class=ImageRouter,
        request_router_kwargs={"factor": factor, "slack": slack},
        request_routing_stats_period_s=_FACTS,
    )
    scaled: dict[str, Any] = {"num_replicas": order.engines}
    if autoscaling is not None:
        scaled = {"autoscaling_config": dict(autoscaling)}
    replicas = serve.deployment(EngineReplica).options(
        name="engines",
        ray_actor_options={"num_cpus": order.num_cpus, "num_gpus": order.num_gpus},
        max_ongoing_requests=served.max_waiting,
        graceful_shutdown_timeout_s=served.shutdown_timeout + _LAST,
        request_router_config=router,
        **scaled,
    )
    entrance = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * served.max_waiting,  # refusals, too, are answers
        graceful_shutdown_timeout_s=served.shutdown_timeout + _LAST,
    )
    return entrance.bind(replicas.bind(own, served, secret, token), served, secret)
