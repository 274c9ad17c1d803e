"""Linking: writes stored keys and values of an image to their slots, with the keys rotated to their new positions.

Stored keys and values may be coded (`codec`).
"""

from vlcache_jax.pallas_kernels.link.api import check_slots as check_slots
from vlcache_jax.pallas_kernels.link.api import link as link
