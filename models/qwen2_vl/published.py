"""What published checkpoints of Qwen2-VL look like."""

from __future__ import annotations

from vlcache_jax.models.family import Published, TensorNames

# All but the architecture and the processor's class is so in Qwen2.5-VL, too.
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
    rope={"rope_theta": 1e6, "mrope_section": [16, 24, 24]},
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
    has_flat=True,
    system_turn="You are a helpful assistant.",
    output_width="hidden_size",
)
