"""Videos of Qwen3-VL: each chunk stands on its own behind the text that says when it was seen."""

from __future__ import annotations

from vlcache_jax.models.video import Videos

VIDEO = Videos(
    processor="Qwen3VLVideoProcessor",
    chunk="<{seconds:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>",
    time_step=lambda vision, seconds: 0,
)
