"""Service of several engines on Ray Serve.

A replica is an engine with the server's ASGI application, which is called without HTTP.
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
from vlcache_jax.ray.engines import EngineResources, placed, warn_of_room
from vlcache_jax.ray.ingress import Ingress
from vlcache_jax.ray.routing import PEER, ImageRouter, tag_of
from vlcache_jax.router.affinity import FACTOR, SLACK, Affinity, SeenImages
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig, served_cache
from vlcache_jax.server.lifecycle import FAILED, SMALL, warm_up
from vlcache_jax.server.tenants import server_secret

_log = logging.getLogger(__name__)

_POLL = 0.2  # seconds between two checks of the engine
_AHEAD = 16  # maximum messages of an answer in the queue


class EngineReplica:
    """Engine replica of a service.

    Args:
      config: options of the engine.
      server: options of the server.
      secret: secret of the tenants' salts, the same for all replicas.
      token: token with which replicas read each other's cache entries.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: EngineConfig, server: ServerConfig, secret: bytes, token: str
    ):
        self._holders = RecentPeers()
        if config.cache.disk is not None:  # without a disk tier, replicas have no cache entries for each other
            cache = dataclasses.replace(config.cache, discovered_peers=self._holders, peer_token=token)
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
        """End the process once its engine has failed. Routers would prefer it, as it refuses requests at once."""
        while self._server.admission.failure is None:
            await asyncio.sleep(_POLL)
            await self._server.check_health()
        _log.error("the engine failed: %s", self._server.admission.failure)
        os._exit(FAILED)  # threads of a failed engine may never end

    async def http(
        self, seen: SeenImages, scope: Scope, body: bytes, *, holders: Collection[str] = ()
    ) -> AsyncGenerator[Sequence[Message]]:
        """Answer a request.

        Args:
          seen: routing information, used by the router only.
          scope: the ASGI scope.
          body: the complete body.
          holders: addresses of replicas that may have cache entries of its images.

        Yields:
          The ASGI messages that are available, one or more at a time.
        """
        self._holders.note(holders)
        async with contextlib.aclosing(respond(self._server.app, scope, body)) as messages:
            async for some in messages:
                yield some

    async def answer(self, scope: Scope, body: bytes) -> tuple[str, list[Message]]:
        """Return the tag of this replica and its ASGI messages, for requests that are sent to all replicas."""
        return self._tag, [one async for some in respond(self._server.app, scope, body) for one in some]

    async def check_health(self) -> None:
        """Raise a `RuntimeError` if the engine has failed. Ray then starts another replica."""
        await self._server.check_health()
        if self._server.admission.failure is not None:
            raise RuntimeError(self._server.admission.failure)

    def record_routing_stats(self) -> Mapping[str, Any]:
        """Return the facts for the routers: the address of the cache entries, or {} without a disk tier."""
        if self._peers is None:
            return {}
        return {PEER: f"http://{ray.util.get_node_ip_address()}:{self._peers.address[1]}"}

    async def __del__(self) -> None:
        """Flush the cache and close the engine, after the last request."""
        self._watching.cancel()
        if self._peers is not None:
            self._peers.close()
        await asyncio.to_thread(self._engine.cache.flush)  # also to the disk
        await self._engine.close()
        if self._embedder is not None:
            await asyncio.to_thread(self._embedder.close)


async def respond(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Sequence[Message]]:
    """Call an ASGI application with a complete request. Closing the generator counts as a disconnect of the client.

    Args:
      app: the application.
      scope: the ASGI scope.
      body: the complete body.

    Yields:
      The messages that are available, one or more at a time.
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
        except Exception:  # the answer has the error
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
    """Start to serve the cache entries on this machine's disk to other replicas; None without a disk tier."""
    config: CacheConfig = engine.service.config.cache
    if config.disk is None:
        return None
    [tier] = [channel.tier for channel in engine.service.cache.store.channels if isinstance(channel.tier, DiskTier)]
    peers = PeerServer(tier, ray.util.get_node_ip_address(), 0, token)
    threading.Thread(target=peers.serve_forever, name="vlcache-records", daemon=True).start()
    return peers


_LISTENING = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile")  # Ray Serve has its own options for these
_STATS_PERIOD = 1.0  # seconds between two updates of the replicas' routing statistics
_LAST = 10.0  # seconds that a replica may take to end after its last request


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
    """Return a service for `ray.serve.run`::

        config = EngineConfig("Qwen/Qwen3-VL-8B-Instruct", cache=CacheConfig(disk="/data/records"))
        ray.serve.run(vlcache_jax.ray.serve.app(config, engines=8))

    The service has the routes of `vlcache serve`, in two parts: an ingress, which reads bodies and hashes their images,
    and engine replicas. A request goes to the engine that holds its images, a conversation to the one that answered
    before, and a text to the one with the lowest load. With `disk`, an engine reads cache entries from the engine that
    holds them if that is faster than computing. Replicas authenticate with a token made from a secret on that disk.
    If you run the service again with other arguments, Ray replaces the engines one after the other. A change of
    `autoscaling` only keeps the running engines.

    Args:
      config: options of each engine, or the model.
      server: options of the server. Address and TLS are options of Ray Serve (`ray.serve.start`).
      engines: number of engine replicas; default: 1.
      autoscaling: Ray Serve's `autoscaling_config` instead of a fixed number: {"min_replicas": 1, "max_replicas": 8,
        "target_ongoing_requests": 16}.
      ingresses: number of ingress replicas.
      num_gpus: GPUs per engine; default: `tensor_parallel_size`. 0 for CPUs.
      num_cpus: CPUs per engine.
      factor, slack: see `Affinity`.

    Raises:
      ValueError: an option is wrong.
    """
    own = config if isinstance(config, EngineConfig) else EngineConfig(config)
    served = server or ServerConfig()
    own = dataclasses.replace(placed(own), use_tqdm=False, cache=served_cache(own.cache, served))
    for name in _LISTENING:
        if getattr(served, name) != getattr(ServerConfig, name):
            raise ValueError(f"{name} is not supported on Ray Serve: set the options of ray.serve.start instead")
    if engines is not None and autoscaling is not None:
        raise ValueError(f"engines and autoscaling are mutually exclusive, got both: engines={engines}")
    Affinity(factor, slack)
    check_whole("ingresses", ingresses, 1)
    resources = EngineResources(
        engines=1 if engines is None else engines,
        num_gpus=own.tensor_parallel_size if num_gpus is None else num_gpus,
        num_cpus=num_cpus,
    )
    warn_of_room(resources.engines, resources.num_gpus)
    shares = own.cache.disk is not None or served.api_keys is not None
    secret = server_secret(own.cache.disk) if shares else b""  # a new secret would replace all replicas on a rerun
    token = hashlib.sha256(b"records " + secret).hexdigest()
    router = RequestRouterConfig(
        request_router_class=ImageRouter,
        request_router_kwargs={"factor": factor, "slack": slack},
        request_routing_stats_period_s=_STATS_PERIOD,
    )
    scaled: dict[str, Any] = {"num_replicas": resources.engines}
    if autoscaling is not None:
        scaled = {"autoscaling_config": dict(autoscaling)}
    replicas = serve.deployment(EngineReplica).options(
        name="engines",
        ray_actor_options={"num_cpus": resources.num_cpus, "num_gpus": resources.num_gpus},
        max_ongoing_requests=served.max_waiting,
        graceful_shutdown_timeout_s=served.shutdown_timeout + _LAST,
        request_router_config=router,
        **scaled,
    )
    admission = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * served.max_waiting,  # leaves room to answer refused requests
        graceful_shutdown_timeout_s=served.shutdown_timeout + _LAST,
    )
    return admission.bind(replicas.bind(own, served, secret, token), served, secret)
