"""Many engines, by Ray (`pip install "vlcache-jax[ray]"`).

Batches: `generate` answers the rows of a `ray.data.Dataset`, `vlcache run IN OUT --ray` those of a file. A service:
`vlcache_jax.ray.serve.app`. Each image meets one engine, by a hash of its bytes (`vlcache_jax.router.affinity`), and
nothing of it is decoded on the way. No other package imports ray.
"""

import os
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # or what `uv run` runs in is copied to all nodes
try:
    import ray as _ray  # noqa: F401  (it reads that now)
except ImportError as error:
    raise ImportError(
        f'vlcache_jax.ray needs {error.name}, which is not installed: pip install "vlcache-jax[ray]"', name=error.name
    ) from error

if TYPE_CHECKING:
    from vlcache_jax.ray.batch import generate as generate
    from vlcache_jax.ray.batch import shard_by_image as shard_by_image

__all__ = ["generate", "shard_by_image"]


def __getattr__(name: str) -> Any:
    # Imported at first use: actors that hold no model need not wait for JAX.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vlcache_jax.ray import batch

    return getattr(batch, name)


def __dir__() -> list[str]:
    return __all__
