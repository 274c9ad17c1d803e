"""Attention scores: sums of the weights by key, and counts of small weights; the compression of a prompt's KV uses
them.
"""

from vlcache_jax.pallas_kernels.statistics.api import attention_statistics as attention_statistics
