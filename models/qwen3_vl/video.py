"""Videos of Qwen3-VL: each chunk stands on its own behind the text that says when it was seen.

Each has markers of its own; those that a chat template puts around the whole video go, as in the code at the models'
release (transformers 4.57). The library of today leaves them around the chunks.
"""

from __future__ import annotations

from vlcache_jax.models.video import Videos

VIDEO = Videos(
    processor="Qwen3VLVideoProcessor",
    chunk="<{seconds:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>",
    time_step=lambda vision, seconds: 0,
    markers=("<|vision_start|>", "<|vision_end|>"),
)
