"""What a layer does to its rows around attention and the products: norm with residual, and what lies between q|k|v and
attention - norms of heads, rotation, and the pool's new keys and values."""

from vlcache_jax.pallas_kernels.rows.api import adds_partials as adds_partials
from vlcache_jax.pallas_kernels.rows.api import norm_residual as norm_residual
from vlcache_jax.pallas_kernels.rows.api import rotate_write as rotate_write
from vlcache_jax.pallas_kernels.rows.xla import rms_norm as rms_norm
from vlcache_jax.pallas_kernels.rows.xla import rotated as rotated
