"""Names and sizes of the codecs of stored keys and values.

What they compute is in `vlcache_jax.pallas_kernels.link.codec`, which takes long to import.
"""

GROUP = 32  # values that share a scale of `int4`

SIZES: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, GROUP)}
"""Bits of a code, and how many values share a scale; None: those of a head."""
