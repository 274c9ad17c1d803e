"""Model configurations: `config.json`, checked, in the field names that the modules use.

`config.json` comes in two layouts (`text_config` nested, or the text fields flat at the top) and leaves out keys that
equal the library's defaults. The library's own configuration classes would read it, but they import torch if it is
installed, which takes ten seconds. So their rules for these families are repeated here, and tests compare the two.

Two layouts of FP8 weights are published. Qwen's own has a factor `weight_scale_inv` for each block of 128 x 128 values;
compressed-tensors has `weight_scale`, for each block, or for each output. Either way a weight is its 8 bits (e4m3)
times its factor, whatever the name says. Embeddings, norms, the output head, routers and the vision tower are not in
FP8, nor are matrices of the decoder that the file leaves out by name or pattern. Queries, keys and values are one
product here, as are gate and up, and the experts of a layer: a product of which a matrix is left out is not in FP8.
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
        """How a product's matrix of a layer is stored in 8 bits, one of `PRODUCTS`; None: it is not."""
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


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = np.dtype(np.float32)
GROUP = 128  # inputs of an output that share a factor in memory

_EXPERTS = "experts"
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    _EXPERTS: ("mlp.experts",),
}
"""What a layer multiplies by: the matrices of each product, in the library's names."""

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Names of layers, as the library's modules have them and as older releases had them.
_FOLDERS = ("model.language_model", "language_model.model", "model", "language_model")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
_CLASSES = ("Linear", "Module")  # that matrices are of

_KEY = "quantization_config"
_NAMES = optional(listed(TEXT, 1 << 16))
_SIZE = whole(1, 1 << 16)
_BLOCK = Kind(
    "a list of two integers from 1 to 65536", lambda value: listed(_SIZE, 2).accepts(value) and len(value) == 2
)
_ADVICE = "take the model as it was published in bfloat16, or its FP8"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a checkpoint's matrices are stored in 8 bits.

    Attributes:
      suffix: what a factor's name has behind that of its matrix.
      outputs, inputs: of a block that shares a factor; inputs None are all there are.
      left_out: products that are not in 8 bits, each as its layer and one of `PRODUCTS`.
    """

    suffix: str
    outputs: int
    inputs: int | None
    left_out: frozenset[tuple[int, str]] = frozenset()

    def group(self, inputs: int) -> int:
        """How many inputs share a factor in memory: 128, or what divides both the block's and all `inputs`."""
        return math.gcd(self.inputs or GROUP, inputs)

    def stored_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """The shape of a matrix's factors as they are stored; blocks at the ends may be smaller."""
        return -(-outputs // self.outputs), -(-inputs // (self.inputs or inputs))

    def spread(self, factors: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
        """Stored factors [..., blocks of outputs, blocks of inputs] as they lie in memory: float32 [..., outputs,
        inputs / group], one for each output and group of inputs."""
        group = self.group(inputs)
        by_output = np.repeat(factors.astype(SCALE), self.outputs, axis=-2)[..., :outputs, :]
        by_input = np.repeat(by_output, (self.inputs or inputs) // group, axis=-1)[..., : inputs // group]
        return np.ascontiguousarray(by_input)  # a block may be wider than the matrix


def read_quantization(
    raw: Mapping[str, Any], path: str | os.PathLike[str], layers: int = 0, experts: int = 0
) -> Quantization | None:
    """What the content of a `config.json` says of weights in fewer bits; None: nothing.

    Args:
      layers: of the decoder.
      experts: of a layer.

    Raises:
      ValueError: they are in a format that is not read; the message names it and the file.
    """
    found = [part[_KEY] for part in (raw, raw.get("text_config") or {}) if part.get(_KEY) is not None]
    if not found:
        return None
    config = found[0]
    check_fields({_KEY: config}, {_KEY: OBJECT}, path)
    method = config.get("quant_method")
    if method == "fp8":
        kept, takes = _fine_grained(config, path), _fine_grained_names(config, path)
        modules = PRODUCTS[_EXPERTS]  # the library takes all experts of a layer together
    elif method == "compressed-tensors":
        kept, takes = _compressed(config, path), _compressed_names(config, path)
        modules = tuple(f"mlp.experts.{i}.{name}" for i in range(experts) for name in _OF_EXPERTS)
    else:
        raise _unread(path, f"quant_method {short(method)}")
    left_out = {
        (layer, product)
        for layer in range(layers)
        for product, own in {**PRODUCTS, _EXPERTS: modules}.items()
        for module in own
        if not takes(tuple(f"{folder}.layers.{layer}.{module}" for folder in _FOLDERS))
    }
    return dataclasses.replace(kept, left_out=frozenset(left_out))


def _fine_grained_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """Whether a matrix is in 8 bits, given its names, by `should_convert_module` of transformers."""
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") is not None else "ignored_layers"
    check_fields(config, {key: _NAMES}, path, section=f"{_KEY}.")
    ends = tuple(config.get(key) or ())
    begins = [_pattern(f"(?:{one}){_BOUNDARY}", one, f"{key} of {os.fspath(path)}") for one in ends]
    return lambda names: not any(name.endswith(ends) or any(one.match(name) for one in begins) for name in names)


def _compressed_names(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Callable[[tuple[str, ...]], bool]:
    """The same by compressed-tensors: names, patterns that begin with `re:`, or classes, to be in 8 bits and not."""
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


def _matches(given: list[str], where: str) -> Callable[[str], bool]:
    written = frozenset(given)
    patterns = [_pattern(one[3:], one, where) for one in given if one.startswith("re:")]
    if not written.isdisjoint(_CLASSES):
        return lambda name: True
    return lambda name: name in written or any(one.match(name) for one in patterns)


def _pattern(text: str, written: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{_KEY}.{where} must hold names or patterns, got {short(written)}: {error}") from error


def _fine_grained(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Of Qwen's own FP8."""
    check_fields(config, {"weight_block_size": _BLOCK}, path, section=f"{_KEY}.", required=True)
    for key, wanted in {"fmt": "e4m3", "expert_dtype": "fp8"}.items():
        if config.get(key, wanted) != wanted:
            raise _unread(path, f"{key} {short(config[key])}")
    outputs, inputs = config["weight_block_size"]
    return Quantization("_scale_inv", outputs, inputs)


def _compressed(config: Mapping[str, Any], path: str | os.PathLike[str]) -> Quantization:
    """Of compressed-tensors."""
    check_fields(config, {"config_groups": OBJECT, "format": optional(TEXT)}, path, section=f"{_KEY}.", required=True)
    groups = config["config_groups"]
    check_fields(groups, dict.fromkeys(groups, OBJECT), path, section=f"{_KEY}.config_groups.")
    if config.get("kv_cache_scheme") is not None:
        raise _unread(path, "a kv_cache_scheme")
    found = {_scheme(group, config.get("format"), path) for group in groups.values()}
    if len(found) != 1:
        raise _unread(path, f"{len(found)} config_groups that differ")
    return found.pop()


def _scheme(group: Mapping[str, Any], default: str | None, path: str | os.PathLike[str]) -> Quantization:
    check_fields(group, {"weights": OBJECT}, path, section=f"{_KEY}.config_groups.", required=True)
    weights: dict[str, Any] = group["weights"]
    form = group.get("format") or default
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) != ("float", 8) or form not in (None, "float-quantized", "naive-quantized"):
        raise _unread(path, f"weights of {short(bits)} bits, type {short(kind)}, format {short(form)}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic") not in (None, False):
        raise _unread(path, "weights that are not symmetric and static")
    match weights.get("strategy"):
        case "channel":
            return Quantization("_scale", 1, None)
        case "block":
            section = f"{_KEY}.config_groups.weights."
            check_fields(weights, {"block_structure": _BLOCK}, path, section=section, required=True)
            outputs, inputs = weights["block_structure"]
            return Quantization("_scale", outputs, inputs)
        case strategy:
            raise _unread(path, f"strategy {short(strategy)}")


def _unread(path: str | os.PathLike[str], what: str) -> ValueError:
    return ValueError(
        f"{_KEY} of {os.fspath(path)} must be of weights in FP8, as Qwen publishes them or compressed-tensors by "
        f"channel or block, got {what}: {_ADVICE}"
    )
