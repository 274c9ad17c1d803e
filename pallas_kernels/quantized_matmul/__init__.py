"""Products of rows with an FP8 matrix."""

from vlcache_jax.pallas_kernels.quantized_matmul.api import check_float8 as check_float8
from vlcache_jax.pallas_kernels.quantized_matmul.api import float8_matmul as float8_matmul
from vlcache_jax.pallas_kernels.quantized_matmul.xla import TILE as TILE
from vlcache_jax.pallas_kernels.quantized_matmul.xla import dequantized as dequantized
