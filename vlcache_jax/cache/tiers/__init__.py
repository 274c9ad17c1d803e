"""Where records are kept outside host memory: a directory, a store that machines share, other machines.

To everyone else they are a `vlcache_jax.cache.record.Tier`. On a disk (`disk`, with its index) and in object stores a
record is a file that says all about itself (`record_file`), in Redis the same in pieces; a peer (`peer`) gives the
files of its directory over HTTP (`peer_server`). Tiers never decide what is kept or used, and whoever asks checks what
they give.
"""
