"""Videos of Qwen2.5-VL: all chunks in one run of placeholders, positions by the seconds between them."""

from __future__ import annotations

from vlcache_jax.models.video import Videos

VIDEO = Videos(
    processor="Qwen2VLVideoProcessor",
    chunk="<|video_pad|>",
    time_step=lambda vision, seconds: vision.tokens_per_second * seconds,
)
