"""What published checkpoints of Qwen2.5-VL look like."""

from __future__ import annotations

import dataclasses

from vlcache_jax.models import qwen2_vl

NAMES = qwen2_vl.NAMES
PUBLISHED = dataclasses.replace(
    qwen2_vl.PUBLISHED,
    architecture="Qwen2_5_VLForConditionalGeneration",
    image_processor={**qwen2_vl.PUBLISHED.image_processor, "processor_class": "Qwen2_5_VLProcessor"},
    output_width="out_hidden_size",
)
