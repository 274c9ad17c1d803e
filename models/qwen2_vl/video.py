"""Videos of Qwen2-VL: all chunks in one run of placeholders, one position apart."""

from __future__ import annotations

from vlcache_jax.models.video import Videos

VIDEO = Videos(
    processor="Qwen2VLVideoProcessor",
    chunk="<|video_pad|>",
    time_step=lambda vision, seconds: 1,
)
