"""Model configurations: what `config.json` says, checked, in the field names that the modules use.

`config.json` comes in two layouts (`text_config` nested, or the text fields flat at the top) and leaves out keys that
equal the library's defaults. The library's own configuration classes would read it, but they import torch where it is
installed, which takes ten seconds; so what they do for these families stands here, and tests compare the two.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.fields import FLAG, OBJECT, TEXT, Kind, check_fields, listed, one_of, optional, real, whole
from vlcache_jax.models.quantization import PRODUCTS, Quantization

_BLOCKS = whole(1, 1024)
INDICES = listed(whole(0, 1023), 1024)  # of blocks
WIDTH = whole(1, 1 << 20)
_HEADS = whole(1, 1 << 12)
_PIXELS = whole(1, 1 << 10)
_TOKEN = whole(0, 1 << 24)
_LABELS = optional(whole(0, 1 << 16))  # no model here has any, but the library makes a table of them
_ROPE_TYPE = one_of("default", "mrope")

_TOP: dict[str, Kind] = {
    "text_config": optional(OBJECT),
    "vision_config": optional(OBJECT),
    "image_token_id": _TOKEN,
    "video_token_id": _TOKEN,
    "tie_word_embeddings": FLAG,
    "dtype": optional(TEXT),
    "torch_dtype": optional(TEXT),
    "num_labels": _LABELS,
}
_TEXT: dict[str, Kind] = {
    "vocab_size": whole(1, 1 << 24),
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": _BLOCKS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": optional(_HEADS),
    "head_dim": optional(whole(1, 1 << 16)),
    "max_position_embeddings": whole(1, 1 << 30),
    "rms_norm_eps": real(1e-12, 1),
    "rope_theta": real(1, 1e12),
    "rope_parameters": optional(OBJECT),
    "rope_scaling": optional(OBJECT),
    "tie_word_embeddings": FLAG,
    "dtype": optional(TEXT),
    "torch_dtype": optional(TEXT),
    "num_labels": _LABELS,
}
_ROPE: dict[str, Kind] = {
    "rope_type": _ROPE_TYPE,
    "type": _ROPE_TYPE,
    "rope_theta": _TEXT["rope_theta"],
    "mrope_section": optional(listed(whole(0, 1 << 16), 3)),
}
_VISION: dict[str, Kind] = {
    "depth": _BLOCKS,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "out_hidden_size": WIDTH,
    "num_heads": _HEADS,
    "num_hidden_layers": _BLOCKS,  # other names that the library has for `depth` and `num_heads`
    "num_attention_heads": _HEADS,
    "in_channels": Kind("3", lambda value: isinstance(value, int) and value == 3),
    "patch_size": _PIXELS,
    "spatial_merge_size": whole(1, 64),
    "temporal_patch_size": whole(1, 64),
    "rope_parameters": optional(OBJECT),
    "num_labels": _LABELS,
}
_VISION_ROPE = {"rope_theta": Kind("10000", lambda value: value == 10000)}
_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}  # of the vision towers' fields


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """MLPs of which each row passes a few.

    Attributes:
      count: E, of a layer.
      chosen: k, that a row passes.
      intermediate_size: of an expert.
      layers: those that have experts; the others have a plain MLP.
    """

    count: int
    chosen: int
    intermediate_size: int
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The decoder.

    `mrope_section` counts the rotary frequencies of the T, H and W axes; `intermediate_size` is that of plain MLPs.
    `quantization` says how matrices are stored in 8 bits, which they stay in, and which are left out; None: none is.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    mrope_interleaved: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    experts: ExpertsConfig | None = None
    quantization: Quantization | None = None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Those of a layer; None: it has a plain MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def quantization_of(self, layer: int, product: str) -> Quantization | None:
        """How a product's matrix of a layer is stored in 8 bits, one of `quantization.PRODUCTS`; None: it is not."""
        kept = self.quantization
        return None if kept is None or (layer, product) in kept.left_out else kept

    def first_like(self, layer: int) -> int:
        """The first layer with weights of the same shapes and types."""
        return next(i for i in range(self.num_layers) if self._kind_of(i) == self._kind_of(layer))

    def _kind_of(self, layer: int) -> tuple[Any, ...]:
        return self.experts_of(layer), *(self.quantization_of(layer, product) is None for product in PRODUCTS)


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The part of a vision tower that all families share; each adds its own fields."""

    depth: int
    hidden_size: int
    intermediate_size: int
    out_hidden_size: int
    num_heads: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    in_channels: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Values in one patch, both temporal slots counted."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def num_deepstack(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A whole model. `dtype` is the one the checkpoint was saved in, or None if the file does not say."""

    model_type: str
    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int
    tie_word_embeddings: bool
    dtype: str | None


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 means float32: without this an accelerator multiplies float32 in a shorter format."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@dataclasses.dataclass(frozen=True)
class Fields:
    """What a family's `config.json` holds.

    Attributes:
      text, vision: what the library takes for keys that are left out.
      rope_theta: likewise, at the release of the family's models.
      own_text, own_vision: the keys that this family alone reads, and what they may hold.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    rope_theta: float
    own_text: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    own_vision: Mapping[str, Kind] = dataclasses.field(default_factory=dict)


def check_config(raw: dict[str, Any], fields: Fields, path: str | os.PathLike[str]) -> None:
    """Checks `config.json` as it stands, before anything is made of it.

    Raises:
      ValueError: a field is of another type or out of bounds; the message names it and the file.
    """
    check_fields(raw, _TOP, path)
    nested = raw.get("text_config") is not None
    section, text = ("text_config.", raw["text_config"]) if nested else ("", raw)
    check_fields(text, {**_TEXT, **fields.own_text}, path, section=section)
    for key in ("rope_parameters", "rope_scaling"):
        check_fields(text.get(key) or {}, _ROPE, path, section=f"{section}{key}.")
    vision = raw.get("vision_config") or {}
    check_fields(vision, {**_VISION, **fields.own_vision}, path, section="vision_config.")
    check_fields(vision.get("rope_parameters") or {}, _VISION_ROPE, path, section="vision_config.rope_parameters.")


def library_config(raw: Mapping[str, Any], fields: Fields) -> Any:
    """The content of a `config.json` with the attributes that the library's configuration has."""
    given = raw if raw.get("text_config") is None else raw["text_config"]
    text = {**fields.text, **given}
    if text["num_key_value_heads"] is None:
        text["num_key_value_heads"] = text["num_attention_heads"]
    rope = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", given.get("rope_theta", fields.rope_theta))
    vision = {_ALIASES.get(key, key): value for key, value in (raw.get("vision_config") or {}).items()}
    config = {"image_token_id": 151655, "video_token_id": 151656, "tie_word_embeddings": False, **raw}
    config["text_config"] = types.SimpleNamespace(**text | {"rope_parameters": rope})
    config["vision_config"] = types.SimpleNamespace(**{**fields.vision, **vision})
    return types.SimpleNamespace(**config)


def read_text(config: Any, *, head_dim: int, mrope_section: tuple[int, int, int], **own: Any) -> TextConfig:
    """The decoder of the library's `config`.

    Args:
      mrope_section: where the file does not say it.
      own: the fields in which families differ.
    """
    text = config.text_config
    rope = text.rope_parameters
    expect("text hidden_act", text.hidden_act, "silu")
    if getattr(text, "use_sliding_window", False):
        raise ValueError("use_sliding_window must be false: sliding windows are not supported")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"width of a text head must be even, got {head_dim}")
    section = tuple(rope.get("mrope_section") or mrope_section)
    if len(section) != 3 or sum(section) != head_dim // 2:
        # The library takes a wrong section for Qwen3 and silently rotates with the wrong axes.
        raise ValueError(f"mrope_section must hold three counts that sum to {head_dim // 2}, got {list(section)}")
    if text.num_attention_heads % text.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads = {text.num_key_value_heads}, "
            f"got {text.num_attention_heads}"
        )
    return TextConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=text.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        mrope_section=section,
        max_position_embeddings=text.max_position_embeddings,
        **own,
    )


def read_model(
    config: Any, raw: dict[str, Any], text: TextConfig, vision: VisionConfig, *, tie_word_embeddings: bool
) -> ModelConfig:
    """The whole of the library's `config`; `raw` is the file."""
    if vision.out_hidden_size != text.hidden_size:
        raise ValueError(f"out_hidden_size must equal hidden_size = {text.hidden_size}, got {vision.out_hidden_size}")
    if vision.hidden_size % (4 * vision.num_heads):
        raise ValueError(f"vision head width must be a multiple of 4, got {vision.hidden_size} / {vision.num_heads}")
    levels = (raw, raw.get("text_config") or {})
    dtype = next((one[key] for one in levels for key in ("dtype", "torch_dtype") if one.get(key)), None)
    return ModelConfig(
        model_type=config.model_type,
        text=text,
        vision=vision,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        tie_word_embeddings=tie_word_embeddings,
        dtype=dtype,
    )


def read_vision(vision: Any, hidden_act: str, **sizes: int) -> dict[str, int]:
    """The shared fields of the library's vision configuration, under our names.

    `sizes` are the widths, if the family calls them otherwise.
    """
    expect("vision hidden_act", vision.hidden_act, hidden_act)
    widths = ("hidden_size", "intermediate_size", "out_hidden_size")
    return {
        "depth": vision.depth,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "in_channels": vision.in_channels,
        **(sizes or {name: getattr(vision, name) for name in widths}),
    }


def expect(name: str, got: object, expected: object) -> None:
    """Raises ValueError unless a field has the one value that is implemented."""
    if got != expected:
        raise ValueError(f"{name} must be {expected!r}, got {got!r}")
