"""The declaration of a model family: configuration, tensor names, published sizes, videos and vision tower.

Each family module ends with one `FAMILY`, and the registry finds it by model type. Code outside a family's module reads
these fields and never compares model types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from vlcache_jax.models.config import Fields, ModelConfig


@dataclasses.dataclass(frozen=True)
class Videos:
    """The representation of videos in a family's prompts.

    A video is a sequence of chunks, each with as many frames as a patch has temporal slots. The model treats each chunk
    as an image; families differ in the text between chunks and in how positions encode time.

    Attributes:
      processor: the library's class of the video processor, which samples frames and sets their size.
      chunk: the prompt's text for a chunk at `seconds`, with its one placeholder.
      markers: the tokens before and after a video's placeholder that are replaced with it; a placeholder without them
        is replaced alone. None: only placeholders are replaced.
      time_step: (configuration of the tower, seconds from chunk to chunk) -> the distance of consecutive chunks on the
        first axis of positions.
    """

    processor: str
    chunk: str
    time_step: Callable[[Any, float], float]
    markers: tuple[str, str] | None = None

    def text(self, seconds: Sequence[float]) -> str:
        """Return the prompt's text for a video whose chunks are at `seconds`."""
        return "".join(self.chunk.format(seconds=one) for one in seconds)

    def times(self, vision: Any, count: int, seconds: float) -> tuple[int, ...]:
        """Return the offsets of `count` chunks on the first axis of positions, in float32 as in the library."""
        step = np.float32(self.time_step(vision, seconds))
        return tuple((np.arange(count, dtype=np.float32) * step).astype(np.int64).tolist())


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Prefixes of tensor names that differ from the modules' paths.

    Attributes:
      modules: prefix of our path -> the library's prefix.
      published: prefix in published checkpoints -> the library's prefix.
      ignored: prefixes of tensors that are not used.
    """

    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    published: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PublishedSize:
    """A published model, in the keys of its `config.json`; `Published` has what a family's sizes share.

    The width of the tower's output is the text's, whatever `vision` has.
    """

    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tie_word_embeddings: bool = False


def text_fields(
    width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int, positions: int, **own: Any
) -> dict[str, Any]:
    """Return `text_config` of a published size; `own` are fields that not every family has."""
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
    """The published checkpoints of a family: sizes, and settings under the keys of their files.

    Attributes:
      architecture: the library's class of the model.
      rope: `rope_parameters` of the text: base, sections of M-RoPE, and the family's own keys.
      image_processor: `preprocessor_config.json`.
      video_processor: `video_preprocessor_config.json`; None: there is none.
      sizes: by name.
      has_flat: True if old checkpoints have the text's fields at the top of `config.json`.
      system_turn: the chat template's system message if the conversation has none; None: no message.
      experts_by_output: True if the matrices of experts are published [E, out, in], as the library saves them, and not
        [E, in, out].
      has_fp8: True if each size is also published in FP8.
      has_thinking_tags: True if `<think>` and `</think>` are tokens of every checkpoint.
      output_width: the key of `vision_config` that holds the width of its output, which is the text's.
    """

    architecture: str
    rope: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    sizes: Mapping[str, PublishedSize]
    video_processor: Mapping[str, Any] | None = None
    has_flat: bool = False
    system_turn: str | None = None
    experts_by_output: bool = False
    has_fp8: bool = False
    has_thinking_tags: bool = False
    output_width: str = "out_hidden_size"


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family. The decoder and the whole model are shared; `read_config` returns what differs in them.

    Attributes:
      fields: the keys of `config.json` and their defaults.
      names: names of tensors in checkpoints.
      published: the published sizes and the files next to their weights.
      video: representation of videos in prompts.
      vision_tower: the module's class, called with (configuration of the tower, dtype=, rngs=).
      read_config: (the library's configuration, content of `config.json`) -> our configuration.
      encoder_tables: (configuration of the tower, grids of the packed images, number of patches after padding) -> the
        index tables of a call of the tower, by name (host).
    """

    fields: Fields
    names: TensorNames
    published: Published
    video: Videos
    vision_tower: Callable[..., nnx.Module]
    read_config: Callable[[Any, dict[str, Any]], ModelConfig]
    encoder_tables: Callable[[Any, Sequence[tuple[int, int, int]], int], dict[str, np.ndarray]]
