"""Qwen3-VL (dense): learned positions and DeepStack in the vision tower, q/k norms, interleaved M-RoPE."""

from vlcache_jax.models.qwen3_vl.config import FIELDS as FIELDS
from vlcache_jax.models.qwen3_vl.config import VisionConfig as VisionConfig
from vlcache_jax.models.qwen3_vl.config import read_config as read_config
from vlcache_jax.models.qwen3_vl.published import NAMES as NAMES
from vlcache_jax.models.qwen3_vl.published import PUBLISHED as PUBLISHED
from vlcache_jax.models.qwen3_vl.published import VIDEO as VIDEO
from vlcache_jax.models.qwen3_vl.vision import VisionTower as VisionTower
from vlcache_jax.models.qwen3_vl.vision import encoder_tables as encoder_tables
