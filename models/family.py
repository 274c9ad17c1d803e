"""How a family's prompts show videos (host).

A video is a sequence of chunks, as many frames each as a patch has temporal slots. Each chunk is to the model what an
image is; families differ in what stands between chunks, and in how time is told.

What a family's folder says of itself, so that nothing outside it asks for its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from flax import nnx

from vlcache_jax.models.config import Fields, ModelConfig


@dataclasses.dataclass(frozen=True)
class Videos:
    """What a family says of videos.

    Attributes:
      processor: the library's class of its video processor, which samples frames and sets their size.
      chunk: what stands in the prompt for a chunk seen at `seconds`, its one placeholder included.
      markers: the tokens before and behind a video's placeholder that are replaced with it; a placeholder without them
        is replaced alone. None: only placeholders are replaced.
      time_step: (configuration of the tower, seconds from chunk to chunk) -> how far apart chunks that follow each
        other lie on the first axis of positions.
    """

    processor: str
    chunk: str
    time_step: Callable[[Any, float], float]
    markers: tuple[str, str] | None = None

    def text(self, seconds: Sequence[float]) -> str:
        """What stands in the prompt for a video whose chunks were seen at `seconds`."""
        return "".join(self.chunk.format(seconds=one) for one in seconds)

    def times(self, vision: Any, count: int, seconds: float) -> tuple[int, ...]:
        """What is added to the positions of each of `count` chunks on the first axis, in the library's float32."""
        step = np.float32(self.time_step(vision, seconds))
        return tuple((np.arange(count, dtype=np.float32) * step).astype(np.int64).tolist())


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How checkpoints name a family's tensors, where that differs from the modules' paths; all are beginnings.

    Attributes:
      modules: of our paths, and what the library calls them.
      published: of tensors in published checkpoints, and what the library calls them.
    """

    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PublishedSize:
    """A published model, in the words of its `config.json`; what all of a family have is in `Published`.

    The width of the tower's output is the text's, whatever `vision` says.
    """

    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tie_word_embeddings: bool = False


def text_fields(
    width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int, positions: int, **own: Any
) -> dict[str, Any]:
    """`text_config` of a published size; `own` are fields that not every family has."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": positions,
        **own,
    }


@dataclasses.dataclass(frozen=True)
class Published:
    """What the published checkpoints of a family hold beside weights, in the words of their files.

    Attributes:
      architecture: the library's class of the model.
      rope: of the text: base, sections of M-RoPE, and what else stands beside them.
      image_processor: `preprocessor_config.json`.
      video_processor: `video_preprocessor_config.json`; None: they have none.
      sizes: by name.
      has_flat: whether there are old ones, with the text's fields at the top of `config.json`.
      system_turn: what the chat template says first where no message does; None: nothing.
      has_fp8: whether each size is published in 8 bits, too.
      output_width: the key of `vision_config` that holds the width of its output, which is the text's.
    """

    architecture: str
    rope: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    sizes: Mapping[str, PublishedSize]
    video_processor: Mapping[str, Any] | None = None
    has_flat: bool = False
    system_turn: str | None = None
    has_fp8: bool = False
    output_width: str = "out_hidden_size"


class Family(Protocol):
    """A family's package: its description, and the parts of its models that are its own.

    The decoder and the whole model are the same for all; `read_config` returns what they differ in.
    """

    @property
    def FIELDS(self) -> Fields: ...  # noqa: N802 -- a constant of the package

    @property
    def NAMES(self) -> TensorNames: ...  # noqa: N802

    @property
    def PUBLISHED(self) -> Published: ...  # noqa: N802

    @property
    def VIDEO(self) -> Videos: ...  # noqa: N802

    @property
    def VisionTower(self) -> Callable[..., nnx.Module]: ...  # noqa: N802

    def read_config(self, config: Any, raw: dict[str, Any]) -> ModelConfig: ...

    def encoder_tables(
        self, config: Any, grids: Sequence[tuple[int, int, int]], num_patches: int
    ) -> dict[str, np.ndarray]: ...
