"""What published checkpoints of Qwen3-VL with mixtures of experts look like."""

from __future__ import annotations

import dataclasses

from vlcache_jax.models import qwen3_vl
from vlcache_jax.models.family import TensorNames

NAMES = TensorNames()  # published as the library has them

PUBLISHED = dataclasses.replace(qwen3_vl.PUBLISHED, architecture="Qwen3VLMoeForConditionalGeneration")
