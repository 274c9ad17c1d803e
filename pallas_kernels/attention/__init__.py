"""Attention over one interval of slots per row: `api.py` holds the contracts, the other files are implementations.

`packing.py` makes the work list (`work.py`) of attention over pages.
"""

from vlcache_jax.pallas_kernels.attention.api import attention as attention
from vlcache_jax.pallas_kernels.attention.api import paged_attention as paged_attention
from vlcache_jax.pallas_kernels.attention.api import work_config as work_config
from vlcache_jax.pallas_kernels.attention.packing import Shared as Shared
from vlcache_jax.pallas_kernels.attention.packing import make_work as make_work
from vlcache_jax.pallas_kernels.attention.packing import shared_prefixes as shared_prefixes
from vlcache_jax.pallas_kernels.attention.work import PAGE as PAGE
from vlcache_jax.pallas_kernels.attention.work import Work as Work
from vlcache_jax.pallas_kernels.attention.work import WorkConfig as WorkConfig
