"""Many engines, by Ray (`pip install "vlcache-jax[ray]"`).

Batches: `generate` answers the rows of a `ray.data.Dataset`, `vlcache run IN OUT --ray` those of a file. A service:
`vlcache_jax.ray.serve.app`. Each picture meets one engine, by a hash of its bytes (`vlcache_jax.affinity`), and nothing
of it is decoded on the way. No other wing imports ray.
"""

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError(
        f'vlcache_jax.ray needs {error.name}, which is not installed: pip install "vlcache-jax[ray]"', name=error.name
    ) from error

from vlcache_jax.ray.batch import generate, shard_by_image
from vlcache_jax.ray.engines import EngineOrder, Engines

__all__ = ["EngineOrder", "Engines", "generate", "shard_by_image"]
