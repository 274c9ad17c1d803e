"""Kernels that decide the speed; each is one function with one contract.

A kernel is a folder. Its `api.py` has the public function, whose docstring is the specification, and chooses an
implementation. `implementation=None` selects the best one for the device; a name selects that one or raises. On a GPU
the best one is the fastest that has passed its self-test there (`checks.py`, `vlcache_jax.kernel_selftest`).

- `attention`: one kernel serves the whole library. A row sees an interval of key slots, which covers prefill, partial
  recomputation of a cached image, batches of requests, decoding, and the windows of the vision towers. The slots of
  requests lie in pages; a work list made on the host states which rows visit which pages. Attention assumes that
  values are finite; writers of the pool ensure it with `propagate_nonfinite`.
- `link` writes the stored keys and values of an image into a request's slots.
- `attention_statistics` computes attention scores, which show which keys matter.
- `norm_residual` and `rotate_write` do what a layer does to its rows between its products and attention: norm with
  residual, and rotation with writing into the pool.
- `mix_experts` and `grouped_matmul` multiply rows by the experts of a mixture that they have chosen.
- `float8_matmul` multiplies by FP8 matrices, which are dequantized in the kernel.
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
from vlcache_jax.pallas_kernels.grouped_matmul import grouped_matmul as grouped_matmul
from vlcache_jax.pallas_kernels.grouped_matmul import mix_experts as mix_experts
from vlcache_jax.pallas_kernels.link import link as link
from vlcache_jax.pallas_kernels.link.codec import CODECS as CODECS
from vlcache_jax.pallas_kernels.link.codec import Codec as Codec
from vlcache_jax.pallas_kernels.nonfinite import propagate_nonfinite as propagate_nonfinite
from vlcache_jax.pallas_kernels.quantized_matmul import float8_matmul as float8_matmul
from vlcache_jax.pallas_kernels.rotation import rotate as rotate
from vlcache_jax.pallas_kernels.rows import adds_partials as adds_partials
from vlcache_jax.pallas_kernels.rows import norm_residual as norm_residual
from vlcache_jax.pallas_kernels.rows import rms_norm as rms_norm
from vlcache_jax.pallas_kernels.rows import rotate_write as rotate_write
from vlcache_jax.pallas_kernels.rows import rotated as rotated
from vlcache_jax.pallas_kernels.statistics import attention_statistics as attention_statistics
