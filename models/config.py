"""Model configurations: the checked content of `config.json`, under the field names of the modules.

`config.json` has two layouts (`text_config` nested, or the text fields flat at the top) and omits keys that equal the
defaults of transformers, here called the library. The library's configuration classes could read it, but they import
torch if it is installed, which takes ten seconds. So this module repeats their rules for these families, and tests
compare the two.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.common.json_files import FLAG, OBJECT, TEXT, Kind, check_fields, listed, one_of, optional, real, whole
from vlcache_jax.models.layer_kinds import FULL_ATTENTION, LayerKind, LinearAttentionConfig
from vlcache_jax.models.quantization import PRODUCTS, Quantization

_BLOCKS = whole(1, 1024)
INDICES = listed(whole(0, 1023), 1024)  # indices of blocks
WIDTH = whole(1, 1 << 20)
_HEADS = whole(1, 1 << 12)
_PIXELS = whole(1, 1 << 10)
_TOKEN = whole(0, 1 << 24)
_LABELS = optional(whole(0, 1 << 16))  # unused by these models, but the library makes a table of labels
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
    "partial_rotary_factor": real(1e-6, 1),
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
_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}  # other names of vision fields


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts of a decoder.

    Attributes:
      count: experts of a layer, E.
      chosen: experts that a token uses, k.
      intermediate_size: MLP width of an expert.
      layers: layers with experts. The others have a plain MLP.
      shared_size: width of the MLP that every token uses beside its experts; 0: there is none.
    """

    count: int
    chosen: int
    intermediate_size: int
    layers: tuple[int, ...]
    shared_size: int = 0


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The configuration of the decoder.

    Attributes:
      intermediate_size: width of plain MLPs.
      mrope_section: number of rotary frequencies of the T, H and W axes. Twice their sum is how many leading values of
        a head rotate.
      experts: the mixture of experts, or None.
      quantization: storage of FP8 matrices, which stay in FP8, and the excluded ones. None: no matrix is in FP8.
      layer_kinds: kind of each layer. Empty: all layers have full attention.
      linear_attention: sizes of the layers with linear attention, or None.
      output_gate: True if the output of full attention is multiplied by the sigmoid of a gate.
      norm_offset: True if norms multiply by 1 + w in float32, and False if by w in the model's dtype.
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
    layer_kinds: tuple[LayerKind, ...] = ()
    linear_attention: LinearAttentionConfig | None = None
    output_gate: bool = False
    norm_offset: bool = False

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else FULL_ATTENTION

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """Layers that keep K,V in pages."""
        return tuple(layer for layer in range(self.num_layers) if self.kind_of(layer).keeps_kv)

    @property
    def state_layers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer with K,V, the layers with states after the one before it; the last has the rest, too."""
        ends = self.paged_layers
        parts = [list(range(a + 1, b)) for a, b in itertools.pairwise((-1, *ends))]
        if parts:
            parts[-1] += range(ends[-1] + 1, self.num_layers)
        return tuple(map(tuple, parts))

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state of each sequence, so that K,V alone do not continue a prompt."""
        return len(self.paged_layers) < self.num_layers

    def sequence_bytes(self, dtype: Any) -> int:
        """Return the bytes of the states that all layers keep of a sequence, in a model of `dtype`."""
        return sum(self.kind_of(layer).sequence_bytes(dtype) for layer in range(self.num_layers))

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of a layer, or None if it has a plain MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def quantization_of(self, layer: int, product: str) -> Quantization | None:
        """Return the FP8 storage of a layer's product, one of `PRODUCTS`, or None if some of its matrices have none."""
        kept = self.quantizations_of(layer, product)
        return None if None in kept else kept[0]

    def quantizations_of(self, layer: int, product: str) -> tuple[Quantization | None, ...]:
        """Return the FP8 storage of each matrix of a layer's product, or None for those that are not in FP8."""
        kept = self.quantization
        plain = frozenset() if kept is None else kept.plain
        return tuple(None if (layer, matrix) in plain else kept for matrix in PRODUCTS[product])

    def first_like(self, layer: int) -> int:
        """Return the first layer with weights of the same shapes and types."""
        return next(i for i in range(self.num_layers) if self._weights_of(i) == self._weights_of(layer))

    def _weights_of(self, layer: int) -> tuple[Any, ...]:
        kept = (self.quantizations_of(layer, product) for product in PRODUCTS)
        return self.kind_of(layer), self.experts_of(layer), *kept


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The configuration of a vision tower. Families add their own fields."""

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
        """Number of values in a patch, including all temporal slots."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def num_deepstack(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model. `dtype` is the one in `config.json`, or None if the file has none."""

    model_type: str
    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int
    tie_word_embeddings: bool
    dtype: str | None


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """Return the precision that multiplies float32 in float32. By default, accelerators use a shorter format."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@dataclasses.dataclass(frozen=True)
class Fields:
    """The keys of a family's `config.json`.

    Attributes:
      text, vision: the library's defaults for missing keys.
      rope_theta: the default at the release of the family's models.
      own_text, own_vision: keys that only this family reads, and their valid values.
      tokens: the library's defaults of the ids of image and video tokens.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    rope_theta: float
    own_text: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    own_vision: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    tokens: Mapping[str, int] = types.MappingProxyType({"image_token_id": 151655, "video_token_id": 151656})


def check_config(raw: dict[str, Any], fields: Fields, path: str | os.PathLike[str]) -> None:
    """Check the raw content of `config.json`.

    Raises:
      ValueError: a field has a wrong type or is out of bounds. The message names it and the file.
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
    """Return the content of a `config.json` as an object with the attributes of the library's configuration."""
    given = raw if raw.get("text_config") is None else raw["text_config"]
    text = {**fields.text, **given}
    if text["num_key_value_heads"] is None:
        text["num_key_value_heads"] = text["num_attention_heads"]
    rope = dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", given.get("rope_theta", fields.rope_theta))
    vision = {_ALIASES.get(key, key): value for key, value in (raw.get("vision_config") or {}).items()}
    config = {"tie_word_embeddings": False, **fields.tokens, **raw}
    config["text_config"] = types.SimpleNamespace(**text | {"rope_parameters": rope})
    config["vision_config"] = types.SimpleNamespace(**{**fields.vision, **vision})
    return types.SimpleNamespace(**config)


def read_text(
    config: Any,
    *,
    head_dim: int,
    mrope_section: tuple[int, int, int],
    intermediate_size: int | None = None,
    rotary_width: int | None = None,
    **own: Any,
) -> TextConfig:
    """Return the configuration of the decoder for the library's `config`.

    Args:
      mrope_section: default of the file's value.
      intermediate_size: width of plain MLPs. None: the file's value.
      rotary_width: number of leading values of a head that rotate. None: all.
      own: the fields in which families differ.

    Raises:
      ValueError: a value is not supported.
    """
    text = config.text_config
    rope = text.rope_parameters
    expect("text hidden_act", text.hidden_act, "silu")
    if getattr(text, "use_sliding_window", False):
        raise ValueError("use_sliding_window must be false, got true: sliding-window attention is not supported")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim of the text model must be even, got {head_dim}")
    section = tuple(rope.get("mrope_section") or mrope_section)
    half = (rotary_width or head_dim) // 2
    if len(section) != 3 or sum(section) != half:
        # With a wrong section for Qwen3, the library silently rotates with the wrong axes.
        raise ValueError(f"mrope_section must be three counts that sum to {half}, got {list(section)}")
    if text.num_attention_heads % text.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads = {text.num_key_value_heads}, "
            f"got {text.num_attention_heads}"
        )
    return TextConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size if intermediate_size is None else intermediate_size,
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
    """Return the configuration of the model.

    Args:
      config: the library's configuration.
      raw: content of `config.json`.

    Raises:
      ValueError: a width is not supported.
    """
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
    """Return the shared fields of the library's vision configuration, under our names.

    Args:
      sizes: the widths, if the family has other names for them.

    Raises:
      ValueError: `hidden_act` is not the given one.
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
    """Check that a field has the only supported value.

    Raises:
      ValueError: it has another value.
    """
    if got != expected:
        raise ValueError(f"{name} must be {expected!r}, got {got!r}")
