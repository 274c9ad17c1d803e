"""What attention's weights sum to by key, and how many of them are small: by this a prompt's K, V are compressed."""

from vlcache_jax.pallas_kernels.statistics.api import attention_statistics as attention_statistics
