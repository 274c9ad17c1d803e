"""Attention over one interval of slots per row: `api.py` holds the contract, the other files are implementations."""

from vlcache_jax.pallas_kernels.attention.api import attention as attention
