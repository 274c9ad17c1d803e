"""Products of rows with the matrices of their groups, and the mixture of experts that uses them."""

from vlcache_jax.pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from vlcache_jax.pallas_kernels.grouped_matmul.api import mix_experts as mix_experts
