"""Request router of a service on Ray Serve, based on `vlcache_jax.router.affinity`.

The interface is alpha in Ray. This module uses it as of Ray 2.60.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vlcache_jax.router.affinity import FACTOR, SLACK, Affinity, SeenImages
from vlcache_jax.server.http_layer import TAG_DIGITS

PEER = "peer"
"""Key of a replica's routing statistics: the URL at which it serves cache entries to other replicas."""


def tag_of(replica: str) -> str:
    """Return the tag of a replica in ids, made from the id that Ray gave it."""
    return hashlib.sha256(replica.encode()).hexdigest()[:TAG_DIGITS]


class ImageRouter(RequestRouter):
    """Router that sends a request to the replica that holds its images.

    It uses the request's first argument, a `SeenImages` with digests. It sets the argument `holders` to the addresses
    of other replicas that may hold the images.
    """

    def initialize_state(self, factor: float = FACTOR, slack: int = SLACK) -> None:
        """Set the parameters of `Affinity`."""
        self._rule = Affinity(factor, slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        seen = _seen(pending_request)
        if seen is None:
            return [candidate_replicas]
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # if all replicas are full
        replicas = {tag_of(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        # A replica without a recent queue length counts as idle. Ray probes it before it sends a request.
        loads = {tag: lengths.get(replica.replica_id) or 0 for tag, replica in replicas.items()}
        order = self._rule.order(seen, loads)
        facts: Mapping[str, Mapping[str, Any]] = {tag: replica.routing_stats for tag, replica in replicas.items()}
        others = [tag for tag in self._rule.holders(seen, replicas) if tag != order[0]]
        pending_request.kwargs["holders"] = [facts[tag][PEER] for tag in others if facts[tag].get(PEER)]
        return [[replicas[tag]] for tag in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (seen := _seen(pending_request)) is not None:
            self._rule.sent(seen, tag_of(replica_id.unique_id))


def _seen(request: PendingRequest | None) -> SeenImages | None:
    """Return the routing information of a request; None if it is not one of the service's requests."""
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, SeenImages) else None
