"""Qwen2-VL: the whole image is seen in every block of the vision tower, biases on q, k, v, sectioned M-RoPE."""

from vlcache_jax.models.qwen2_vl.config import FIELDS as FIELDS
from vlcache_jax.models.qwen2_vl.config import read_config as read_config
from vlcache_jax.models.qwen2_vl.published import NAMES as NAMES
from vlcache_jax.models.qwen2_vl.published import PUBLISHED as PUBLISHED
from vlcache_jax.models.qwen2_vl.published import VIDEO as VIDEO
from vlcache_jax.models.qwen2_vl.vision import VisionTower as VisionTower
from vlcache_jax.models.qwen2_vl.vision import encoder_tables as encoder_tables
