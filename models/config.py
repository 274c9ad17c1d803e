"""Model configurations: the checked content of `config.json`, under the field names of the modules.

`config.json` has two layouts (`text_config` nested, or the text fields flat at the top) and omits keys that equal the
defaults of transformers, here called the library. The library's configuration classes could read it, but they import
torch if it is installed, which takes ten seconds. So this module repeats their rules for these families, and tests
compare the two.

Two layouts of FP8 weights are published. Qwen's own has a scale `weight_scale_inv` for each block of 128 x 128 values.
compressed-tensors has a `weight_scale` for each block or for each output. In both, a weight is its 8-bit value (e4m3)
times its scale, whatever the name says. Embeddings, norms, the output head, routers and the vision tower are not in
FP8, nor are matrices of the decoder that the file excludes by name or pattern. Queries, keys and values are one product
here, as are gate and up, and the experts of a layer. A product with an excluded matrix is not in FP8.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from vlcache_jax.common.checks import short
from vlcache_jax.common.json_files import FLAG, OBJECT, TEXT, Kind, check_fields, listed, one_of, optional, real, whole
from vlcache_jax.models.layer_kinds import FULL_ATTENTION, LayerKind, LinearAttentionConfig

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
        """Return the FP8 storage of a layer's product, one of `PRODUCTS`, or None if it is not in FP8."""
        kept = self.quantization
        return None if kept is None or (layer, product) in kept.left_out else kept

    def first_like(self, layer: int) -> int:
        """Return the first layer with weights of the same shapes and types."""
        return next(i for i in range(self.num_layers) if self._weights_of(i) == self._weights_of(layer))

    def _weights_of(self, layer: int) -> tuple[Any, ...]:
        in_8_bits = (self.quantization_of(layer, product) is not None for product in PRODUCTS)
        return self.kind_of(layer), self.experts_of(layer), *in_8_bits


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


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = np.dtype(np.float32)
GROUP = 128  # inputs of an output that share a scale in memory

_EXPERTS = "experts"
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    "in_proj_qk": ("linear_attn.in_proj_qkv",),
    "in_proj_vz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "out_proj": ("linear_attn.out_proj",),
    "shared_gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down_proj": ("mlp.shared_expert.down_proj",),
    _EXPERTS: ("mlp.experts",),
}
"""The products of a layer, and the matrices of each one by their names in the library."""

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Prefixes of layers in the library's modules and in older releases.
_FOLDERS = ("model.language_model", "language_model.model", "model", "language_model")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
_CLASSES = ("Linear", "Module")  # classes of the matrices

_KEY = "quantization_config"
_NAMES = optional(listed(TEXT, 1 << 16))
_SIZE = whole(1, 1 << 16)
_BLOCK = Kind(
    "a list of two integers from 1 to 65536", lambda value: listed(_SIZE, 2).accepts(value) and len(value) == 2
)
ADVICE = "use the published bfloat16 or FP8 checkpoint of this model"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The storage of a checkpoint's FP8 matrices.

    Attributes:
      suffix: suffix of a scale's name after the name of its matrix.
      outputs, inputs: size of a block that shares a scale. inputs None: all inputs.
      left_out: products that are not in FP8, each as its layer and one of `PRODUCTS`.
    """

    suffix: str
    outputs: int
    inputs: int | None
    left_out: frozenset[tuple[int, str]] = frozenset()

    def group(self, inputs: int) -> int:
        """Return how many inputs share a scale in memory: the greatest common divisor of the block's and `inputs`."""
        return math.gcd(self.inputs or GROUP, inputs)

    def stored_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the stored shape of a matrix's scales. Blocks at the ends may be smaller."""
        return -(-outputs // self.outputs), -(-inputs // (self.inputs or inputs))

    def spread(self, factors: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
        """Expand stored scales to one for each output and group of inputs.

        Args:
          factors: stored scales, [..., blocks of outputs, blocks of inputs].

        Returns:
          Scales in memory, float32 [..., outputs, inputs / group].
        """
        group = self.group(inputs)
        by_output = np.repeat(factors.astype(SCALE), self.outputs, axis=-2)[..., :outputs, :]
        by_input = np.repeat(by_output, (self.inputs or inputs) // group, axis=-1)[..., : inputs // group]
        return np.ascontiguousarray(by_input)  # a block may be wider than the matrix


def read_quantization(
    raw: Mapping[str, Any], path: str | os.PathLike[str], layers: int = 0, experts: int = 0
) -> Quantization | None:
    """Read the storage of quantized weights from the content of a `config.json`, or None if it has no quantization.

    Args:
      layers: number of decoder layers.
      experts: number of experts of a layer.

    Raises:
      ValueError: the format is not supported. The message names it and the file.
    """
    found = [part[_KEY] for part in (raw, raw.get("text_config") or {}) if part.get(_KEY) is not None]
    if not found:
        return None
    config = found[0]
    check_fields({_KEY: config}, {_KEY: OBJECT}, path)
    method = config.get("quant_method")
    if method == "fp8":
        kept, takes = _fine_grained(config, path), _fine_grained_names(config, path)
        modules = PRODUCTS[_EXPERTS]  # the library treats all experts of a layer as one
    elif method == "compressed-tensors":
        kept, takes = _compressed(config, path), _compressed_names(config, path)
        modules = tuple(f"mlp.experts.{i}.{name}" for i in range(experts) for name in _OF_EXPERTS)
    else:
        raise _unsupported(path, f"quant_method {short(method)}")
    left_out = {
        (layer, product)
        for layer in range(layers)
        for product, own in {**PRODUCTS, _EXPERTS: modules}.items()
        for module in own
        if not takes(tuple(f"{folder}.layers.{layer}.{module}" for folder in _FOLDERS))
    }
    return dataclasses.replace(kept, left_out=frozenset(left_out))


def _fine_grained_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """Return a function: names of a matrix -> True if it is in FP8, by `should_convert_module` of transformers."""
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
    check_fields(config, {key: _NAMES}, path, section=f"{_KEY}.")
    ends = tuple(config.get(key) or ())
    begins = [_pattern(f"(?:{one}){_BOUNDARY}", one, f"{key} of {os.fspath(path)}") for one in ends]
    return lambda names: not any(name.endswith(ends) or any(one.match(name) for one in begins) for name in names)


def _compressed_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """Return a function: names of a matrix -> True if it is in FP8, by the rules of compressed-tensors.

    `targets` and `ignore` contain names, patterns that begin with `re:`, or classes.
    """
    check_fields(config, {"ignore": _NAMES}, path, section=f"{_KEY}.")
    groups = config["config_groups"].values()
    for group in groups:
        check_fields(group, {"targets": _NAMES}, path, section=f"{_KEY}.config_groups.")
    targets = [one for group in groups for one in group.get("targets") or _CLASSES]
    is_target, is_ignored = (
        _matches(given, f"{key} of {os.fspath(path)}")
        for key, given in (("targets", targets), ("ignore", config.get("ignore") or []))
    )
    return lambda names: any(map(is_target, names)) and not any(map(is_ignored, names))


def _matches(entries: list[str], where: str) -> Callable[[str], bool]:
    names = frozenset(entries)
    patterns = [_pattern(one[3:], one, where) for one in entries if one.startswith("re:")]
    if not names.isdisjoint(_CLASSES):
        return lambda name: True
    return lambda name: name in names or any(one.match(name) for one in patterns)


def _pattern(text: str, written: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{_KEY}.{where} must be names or patterns, got {short(written)}: {error}") from error


def _fine_grained(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Read the storage of Qwen's own FP8."""
    check_fields(config, {"weight_block_size": _BLOCK}, path, section=f"{_KEY}.", required=True)
    for key, wanted in {"fmt": "e4m3", "expert_dtype": "fp8"}.items():
        if config.get(key, wanted) != wanted:
            raise _unsupported(path, f"{key} {short(config[key])}")
    outputs, inputs = config["weight_block_size"]
    return Quantization("_scale_inv", outputs, inputs)


def _compressed(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Read the storage of compressed-tensors."""
    check_fields(config, {"config_groups": OBJECT, "format": optional(TEXT)}, path, section=f"{_KEY}.", required=True)
    groups = config["config_groups"]
    check_fields(groups, dict.fromkeys(groups, OBJECT), path, section=f"{_KEY}.config_groups.")
    if config.get("kv_cache_scheme") is not None:
        raise _unsupported(path, "a kv_cache_scheme")
    found = {_scheme(group, config.get("format"), path) for group in groups.values()}
    if len(found) != 1:
        raise _unsupported(path, f"{len(found)} config_groups that differ")
    return found.pop()


def _scheme(group: Mapping[str, Any], default: str | None, path: str | os.PathLike[str]) -> Quantization:
    check_fields(group, {"weights": OBJECT}, path, section=f"{_KEY}.config_groups.", required=True)
    weights: dict[str, Any] = group["weights"]
    form = group.get("format") or default
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) != ("float", 8) or form not in (None, "float-quantized", "naive-quantized"):
        raise _unsupported(path, f"weights of {short(bits)} bits, type {short(kind)}, format {short(form)}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic") not in (None, False):
        raise _unsupported(path, "weights that are not symmetric and static")
    match weights.get("strategy"):
        case "channel":
            return Quantization("_scale", 1, None)
        case "block":
            section = f"{_KEY}.config_groups.weights."
            check_fields(weights, {"block_structure": _BLOCK}, path, section=section, required=True)
            outputs, inputs = weights["block_structure"]
            return Quantization("_scale", outputs, inputs)
        case strategy:
            raise _unsupported(path, f"strategy {short(strategy)}")


def _unsupported(path: str | os.PathLike[str], what: str) -> ValueError:
    return ValueError(
        f"{_KEY} of {os.fspath(path)} must be FP8 in Qwen's format, or in compressed-tensors by channel or block, "
        f"got {what}: {ADVICE}"
    )
