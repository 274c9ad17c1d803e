"""A service of many engines, by Ray Serve."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from vlcache_jax.affinity import FACTOR, SLACK, Affinity
from vlcache_jax.checks import check_whole
from vlcache_jax.config import EngineConfig
from vlcache_jax.ray.engines import EngineOrder, placed, warn_of_room
from vlcache_jax.ray.ingress import Ingress
from vlcache_jax.ray.replica import EngineReplica
from vlcache_jax.ray.routing import ImageRouter
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.tenants import server_secret

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
