"""Which replica of a service gets a request: Ray Serve's side of `vlcache_jax.router.affinity`.

Ray calls this interface alpha; it is used as of Ray 2.60.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vlcache_jax.router.affinity import FACTOR, SLACK, Affinity, SeenImages
from vlcache_jax.server.http_layer import TAG_DIGITS

PEER = "peer"
"""Among the facts that a replica tells routers: where others may ask for its records."""


def tag_of(replica: str) -> str:
    """What ids call a replica, by the id that Ray gave it."""
    return hashlib.sha256(replica.encode()).hexdigest()[:TAG_DIGITS]


class ImageRouter(RequestRouter):
    """Sends a request to the replica that holds its images. Of a request it sees the digests alone, which are the first
    argument; who else may hold the images it writes into the argument `holders`."""

    def initialize_state(self, factor: float = FACTOR, slack: int = SLACK) -> None:
        """See `Affinity`."""
        self._rule = Affinity(factor, slack)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        seen = _seen(pending_request)
        if seen is None:
            return [candidate_replicas]
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # where all are full
        replicas = {tag_of(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        # Of whom nothing has been heard for seconds counts as idle; Ray asks it before it gives it anything.
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
    """What a request shows; None: it is none of the service's."""
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, SeenImages) else None
