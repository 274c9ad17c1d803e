"""The vision tower, which is Qwen3-VL's."""

from vlcache_jax.models.qwen3_vl.vision import VisionTower as VisionTower
from vlcache_jax.models.qwen3_vl.vision import encoder_tables as encoder_tables
