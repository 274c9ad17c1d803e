"""Image libraries: images that are computed once, stored under names, found by their content and named in messages.

A `Library` computes images directly after the system message and stores their cache entries. A message then names an
image without bytes: `{"type": "image", "library": "products", "id": "sku-17"}`. A `Retriever` finds images by the
vectors of an embedder. Both use the public API; requests look up items through `vlcache_jax.cache.items`.
"""

from vlcache_jax.common.renamed import warn_renamed
from vlcache_jax.library.libraries import Added as Added
from vlcache_jax.library.libraries import Library as Library
from vlcache_jax.library.libraries import LibraryStats as LibraryStats
from vlcache_jax.library.retriever import Retriever as Retriever
from vlcache_jax.library.searches import Hit as Hit
from vlcache_jax.library.searches import SearchOptions as SearchOptions


def __getattr__(name: str) -> object:
    if name == "Searches":
        warn_renamed("vlcache_jax.library.Searches", "SearchOptions")
        return SearchOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Added", "Hit", "Library", "LibraryStats", "Retriever", "SearchOptions"]
