"""What published checkpoints of Qwen3-VL look like."""

from __future__ import annotations

from vlcache_jax.models.family import Published, TensorNames

NAMES = TensorNames()  # published as the library has them

PUBLISHED = Published(
    architecture="Qwen3VLForConditionalGeneration",
    rope={"rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    image_processor={
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    },
)
