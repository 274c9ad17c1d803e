"""Linking: stored keys and values of an image go to their slots, the keys turned to their new positions.

What is stored may be coded (`codec`).
"""

from vlcache_jax.pallas_kernels.link.api import check_slots as check_slots
from vlcache_jax.pallas_kernels.link.api import link as link
