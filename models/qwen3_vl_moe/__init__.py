"""Qwen3-VL with mixtures of experts: a decoder whose rows pass a few of many MLPs; all else is as in Qwen3-VL."""

from vlcache_jax.models.qwen3_vl import VIDEO as VIDEO
from vlcache_jax.models.qwen3_vl import VisionTower as VisionTower
from vlcache_jax.models.qwen3_vl import encoder_tables as encoder_tables
from vlcache_jax.models.qwen3_vl_moe.config import FIELDS as FIELDS
from vlcache_jax.models.qwen3_vl_moe.config import VisionConfig as VisionConfig
from vlcache_jax.models.qwen3_vl_moe.config import read_config as read_config
from vlcache_jax.models.qwen3_vl_moe.published import NAMES as NAMES
from vlcache_jax.models.qwen3_vl_moe.published import PUBLISHED as PUBLISHED
