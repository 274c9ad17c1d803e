"""Operations on a layer's rows around attention and products.

These are norm with residual, and the steps between q|k|v and attention: norms of heads, rotation, and writing new keys
and values into the pool.
"""

from vlcache_jax.pallas_kernels.rows.api import adds_partials as adds_partials
from vlcache_jax.pallas_kernels.rows.api import norm_residual as norm_residual
from vlcache_jax.pallas_kernels.rows.api import rotate_write as rotate_write
from vlcache_jax.pallas_kernels.rows.xla import rms_norm as rms_norm
from vlcache_jax.pallas_kernels.rows.xla import rotated as rotated
