"""What published checkpoints of Qwen3-VL look like, and how their prompts show videos."""

from __future__ import annotations

from vlcache_jax.models.family import Published, PublishedSize, TensorNames, text_fields
from vlcache_jax.models.qwen3_vl.config import FIELDS
from vlcache_jax.models.video import Videos

POSITIONS = 262144
OWN = {"head_dim": 128, "attention_bias": False}
VISION = FIELDS.vision  # of 8B and 32B
SMALL_VISION = {
    **VISION, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip

NAMES = TensorNames()  # published as the library has them

PUBLISHED = Published(
    architecture="Qwen3VLForConditionalGeneration",
    rope={"rope_theta": FIELDS.rope_theta, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
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
    video_processor={
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
    },
    sizes={
        "Qwen3-VL-2B": PublishedSize(
            "qwen3_vl", text_fields(2048, 28, 16, 8, 6144, 151936, POSITIONS, **OWN), SMALL_VISION, True
        ),
        "Qwen3-VL-4B": PublishedSize(
            "qwen3_vl", text_fields(2560, 36, 32, 8, 9728, 151936, POSITIONS, **OWN), SMALL_VISION, True
        ),
        "Qwen3-VL-8B": PublishedSize("qwen3_vl", text_fields(4096, 36, 32, 8, 12288, 151936, POSITIONS, **OWN), VISION),
        "Qwen3-VL-32B": PublishedSize(
            "qwen3_vl", text_fields(5120, 64, 64, 8, 25600, 151936, POSITIONS, **OWN), VISION
        ),
    },
    has_fp8=True,
)
# Each chunk stands on its own behind the text that says when it was seen. Each has markers of its own; those that a
# chat template puts around the whole video go, as in the code at the models' release (transformers 4.57). The library
# of today leaves them around the chunks.
VIDEO = Videos(
    processor="Qwen3VLVideoProcessor",
    chunk="<{seconds:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>",
    time_step=lambda vision, seconds: 0,
    markers=("<|vision_start|>", "<|vision_end|>"),
)
