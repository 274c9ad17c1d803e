"""Qwen2.5-VL: window attention in the vision tower, biases on q, k, v, sectioned M-RoPE."""

from vlcache_jax.models.qwen2_5_vl.config import FIELDS as FIELDS
from vlcache_jax.models.qwen2_5_vl.config import VisionConfig as VisionConfig
from vlcache_jax.models.qwen2_5_vl.config import read_config as read_config
from vlcache_jax.models.qwen2_5_vl.published import NAMES as NAMES
from vlcache_jax.models.qwen2_5_vl.published import PUBLISHED as PUBLISHED
from vlcache_jax.models.qwen2_5_vl.published import VIDEO as VIDEO
from vlcache_jax.models.qwen2_5_vl.vision import VisionTower as VisionTower
from vlcache_jax.models.qwen2_5_vl.vision import encoder_tables as encoder_tables
