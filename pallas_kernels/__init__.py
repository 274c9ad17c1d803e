"""The computations that decide the speed, each behind one function with one contract.

A kernel is a folder. Its `api.py` has the public function, whose docstring is the specification, and chooses among the
implementations beside it: `implementation=None` takes the best one for the device, a name takes that one or raises. On
a GPU the best one is what has been checked there (`checks.py`, `vlcache_jax.kernel_selftest`).
One attention serves the whole library: a row sees an interval of key slots, which covers prefill, recomputing a few
rows of a cached image, several requests at once, decoding, and the windows of the vision towers. Where the slots are
those of requests, they lie in pages, and a work list made on the host says who visits which. Attention trusts that
values are finite; `carry_flaws` is how whoever writes them sees to it. Linking writes the stored keys and values of an
image into a request's slots. Statistics of attention tell which keys matter. What a layer does to its rows between its
products and attention is a kernel, too: norm with residual, and rotation with writing into the pool. Rows pass the
experts of a mixture that they have chosen. Matrices that are kept in 8 bits are dequantised where they are
multiplied.
"""

from vlcache_jax.pallas_kernels import dispatch as dispatch
from vlcache_jax.pallas_kernels import split as split
from vlcache_jax.pallas_kernels.attention import PAGE as PAGE
from vlcache_jax.pallas_kernels.attention import Shared as Shared
from vlcache_jax.pallas_kernels.attention import Work as Work
from vlcache_jax.pallas_kernels.attention import WorkConfig as WorkConfig
from vlcache_jax.pallas_kernels.attention import attention as attention
from vlcache_jax.pallas_kernels.attention import make_work as make_work
from vlcache_jax.pallas_kernels.attention import paged_attention as paged_attention
from vlcache_jax.pallas_kernels.attention import shared_prefixes as shared_prefixes
from vlcache_jax.pallas_kernels.attention import work_config as work_config
from vlcache_jax.pallas_kernels.flaws import carry_flaws as carry_flaws
from vlcache_jax.pallas_kernels.grouped_matmul import grouped_matmul as grouped_matmul
from vlcache_jax.pallas_kernels.grouped_matmul import mix_experts as mix_experts
from vlcache_jax.pallas_kernels.link import link as link
from vlcache_jax.pallas_kernels.link.codec import CODECS as CODECS
from vlcache_jax.pallas_kernels.link.codec import Codec as Codec
from vlcache_jax.pallas_kernels.quantized_matmul import float8_matmul as float8_matmul
from vlcache_jax.pallas_kernels.rotation import rotate as rotate
from vlcache_jax.pallas_kernels.rows import adds_partials as adds_partials
from vlcache_jax.pallas_kernels.rows import norm_residual as norm_residual
from vlcache_jax.pallas_kernels.rows import rms_norm as rms_norm
from vlcache_jax.pallas_kernels.rows import rotate_write as rotate_write
from vlcache_jax.pallas_kernels.rows import rotated as rotated
from vlcache_jax.pallas_kernels.statistics import attention_statistics as attention_statistics
