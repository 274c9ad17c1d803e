"""What published checkpoints of Qwen2-VL look like, and how their prompts show videos."""

from __future__ import annotations

from vlcache_jax.models.family import Published, PublishedSize, TensorNames, text_fields
from vlcache_jax.models.qwen2_vl.config import FIELDS, ROPE_THETA
from vlcache_jax.models.video import Videos

POSITIONS = 32768
NAMES = TensorNames(
    modules={
        "visual.merger.norm.": "visual.merger.ln_q.",
        "visual.merger.linear_fc1.": "visual.merger.mlp.0.",
        "visual.merger.linear_fc2.": "visual.merger.mlp.2.",
    },
    published={"visual.": "model.visual.", "model.": "model.language_model."},
)
PUBLISHED = Published(
    architecture="Qwen2VLForConditionalGeneration",
    rope={"rope_theta": ROPE_THETA, "mrope_section": [16, 24, 24]},
    image_processor={
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
    },
    sizes={
        "Qwen2-VL-2B": PublishedSize(
            "qwen2_vl", text_fields(1536, 28, 12, 2, 8960, 151936, POSITIONS), FIELDS.vision, True
        ),
        "Qwen2-VL-7B": PublishedSize("qwen2_vl", text_fields(3584, 28, 28, 4, 18944, 152064, POSITIONS), FIELDS.vision),
        "Qwen2-VL-72B": PublishedSize(
            "qwen2_vl", text_fields(8192, 80, 64, 8, 29568, 152064, POSITIONS), FIELDS.vision
        ),
    },
    has_flat=True,
    system_turn="You are a helpful assistant.",
    output_width="hidden_size",
)
# All chunks in one run of placeholders, one position apart.
VIDEO = Videos(
    processor="Qwen2VLVideoProcessor",
    chunk="<|video_pad|>",
    time_step=lambda vision, seconds: 1,
)
