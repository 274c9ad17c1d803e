"""What published checkpoints of Qwen2.5-VL look like: as Qwen2-VL's, but for what is here; and their videos."""

from __future__ import annotations

import dataclasses

from vlcache_jax.models import qwen2_vl
from vlcache_jax.models.family import PublishedSize, text_fields
from vlcache_jax.models.qwen2_5_vl.config import FIELDS
from vlcache_jax.models.video import Videos

POSITIONS = 128000
VISION = {**FIELDS.vision, "hidden_size": 1280, "tokens_per_second": 2}
WIDER_VISION = {**VISION, "intermediate_size": 3456}

NAMES = qwen2_vl.NAMES
PUBLISHED = dataclasses.replace(
    qwen2_vl.PUBLISHED,
    architecture="Qwen2_5_VLForConditionalGeneration",
    image_processor={**qwen2_vl.PUBLISHED.image_processor, "processor_class": "Qwen2_5_VLProcessor"},
    sizes={
        "Qwen2.5-VL-3B": PublishedSize(
            "qwen2_5_vl", text_fields(2048, 36, 16, 2, 11008, 151936, POSITIONS), VISION, True
        ),
        "Qwen2.5-VL-7B": PublishedSize("qwen2_5_vl", text_fields(3584, 28, 28, 4, 18944, 152064, POSITIONS), VISION),
        "Qwen2.5-VL-32B": PublishedSize(
            "qwen2_5_vl", text_fields(5120, 64, 40, 8, 27648, 152064, POSITIONS), WIDER_VISION
        ),
        "Qwen2.5-VL-72B": PublishedSize(
            "qwen2_5_vl", text_fields(8192, 80, 64, 8, 29568, 152064, POSITIONS), WIDER_VISION
        ),
    },
    output_width="out_hidden_size",
)
# All chunks in one run of placeholders, positions by the seconds between them.
VIDEO = Videos(
    processor="Qwen2VLVideoProcessor",
    chunk="<|video_pad|>",
    time_step=lambda vision, seconds: vision.tokens_per_second * seconds,
)
