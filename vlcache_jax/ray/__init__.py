"""Several engines on Ray (`pip install "vlcache-jax[ray]"`).

Batches: `generate` answers the rows of a `ray.data.Dataset`, and `vlcache run IN OUT --ray` those of a file. Service:
`vlcache_jax.ray.serve.app`. A hash of an image's bytes selects its engine (`vlcache_jax.router.affinity`), and images
are not decoded before. No other package imports ray.
"""

import os
from typing import TYPE_CHECKING, Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else `uv run` copies its environment to all nodes
try:
    import ray as _ray  # noqa: F401  (it reads the variable at import)
except ImportError as error:
    raise ImportError(
        f'vlcache_jax.ray needs {error.name}, which is not installed: pip install "vlcache-jax[ray]"', name=error.name
    ) from error

if TYPE_CHECKING:
    from vlcache_jax.ray.batch import generate as generate
    from vlcache_jax.ray.batch import shard_by_image as shard_by_image

__all__ = ["generate", "shard_by_image"]


def __getattr__(name: str) -> Any:
    # Imported at first use: actors without a model do not need JAX.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vlcache_jax.ray import batch

    return getattr(batch, name)


def __dir__() -> list[str]:
    return __all__
