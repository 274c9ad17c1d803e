"""Storage of cache entries outside host memory: a directory, a store that machines share, and other machines.

Every tier implements `vlcache_jax.cache.record.Tier`. On disk (`disk`, with an index) and in object stores a record is
a self-describing file (`record_file`); Redis stores the same content in pieces. A peer (`peer`) serves the files of its
directory over HTTP (`peer_server`). Tiers do not decide what is stored or used, and callers verify what they return.
"""
