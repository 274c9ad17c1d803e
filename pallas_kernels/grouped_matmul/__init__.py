"""Products of rows with the matrices of their groups: the experts of a mixture."""

from vlcache_jax.pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
