"""Prompts show videos as Qwen3-VL's do."""

from vlcache_jax.models.qwen3_vl.video import VIDEO as VIDEO
