"""Image libraries: pictures that are computed once, kept under names, found by what they show, and named in messages.

A `Library` computes pictures behind the system message alone and keeps what messages need of them: a message then holds
`{"type": "image", "library": "products", "id": "sku-17"}` and no bytes. A `Retriever` finds pictures of a library by
vectors of their embeddings. Both stand on the public API; what requests ask of libraries is `vlcache_jax.cache.items`.
"""

from vlcache_jax.library.libraries import Added as Added
from vlcache_jax.library.libraries import Library as Library
from vlcache_jax.library.libraries import LibraryStats as LibraryStats
from vlcache_jax.library.retriever import Retriever as Retriever
from vlcache_jax.library.searches import Hit as Hit
from vlcache_jax.library.searches import Searches as Searches

__all__ = ["Added", "Hit", "Library", "LibraryStats", "Retriever", "Searches"]
