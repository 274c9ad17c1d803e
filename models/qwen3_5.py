"""Qwen3.5, 3.6 and 3.8 (dense): three of four layers have linear attention, one has gated full attention.

The models of the three releases have the same architecture. The vision tower is that of Qwen3-VL without DeepStack.
Norms multiply by 1 + w, a quarter of each head rotates, and the output of full attention has a gate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vlcache_jax.common.json_files import FLAG, TEXT, listed, one_of, optional, real, whole
from vlcache_jax.models import config as base
from vlcache_jax.models import qwen3_vl
from vlcache_jax.models.family import PublishedSize, TensorNames, text_fields
from vlcache_jax.models.layer_kinds import FULL_ATTENTION, LayerKind, LinearAttentionConfig
from vlcache_jax.models.linear_attention import NAME as LINEAR_ATTENTION
from vlcache_jax.models.linear_attention import layer_kind

_HEADS, _WIDTH = whole(1, 1 << 12), whole(1, 1 << 16)
_VISION = {name: value for name, value in qwen3_vl.FIELDS.vision.items() if name != "deepstack_visual_indexes"}
PARTIAL_ROTARY_FACTOR = 0.25  # the library's default

FIELDS = base.Fields(
    text={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": None,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    vision={**_VISION, "deepstack_visual_indexes": []},
    rope_theta=1e7,
    own_text={
        "attn_output_gate": FLAG,
        "full_attention_interval": whole(1, 1024),
        "layer_types": optional(listed(one_of(FULL_ATTENTION.name, LINEAR_ATTENTION), 1024)),
        "linear_conv_kernel_dim": whole(2, 64),
        "linear_key_head_dim": _WIDTH,
        "linear_value_head_dim": _WIDTH,
        "linear_num_key_heads": _HEADS,
        "linear_num_value_heads": _HEADS,
        "mamba_ssm_dtype": TEXT,
        "partial_rotary_factor": real(1e-6, 1),
    },
    own_vision=qwen3_vl.FIELDS.own_vision,
    tokens={"image_token_id": 248056, "video_token_id": 248057},
)


def read_config(config: Any, raw: dict[str, Any], **own: Any) -> base.ModelConfig:
    """Return our configuration for the library's `config`; `raw` is the content of `config.json`.

    Args:
      own: arguments of `read_text` of a family that differs in them.
    """
    given, text = config.vision_config, config.text_config
    base.expect("attention_bias", text.attention_bias, False)
    # The library's classes keep these three keys only if the file has them.
    base.expect("attn_output_gate", getattr(text, "attn_output_gate", True), True)
    base.expect("mamba_ssm_dtype", getattr(text, "mamba_ssm_dtype", "float32"), "float32")
    base.expect("deepstack_visual_indexes", getattr(given, "deepstack_visual_indexes", []), [])
    tower = qwen3_vl.Qwen3VLVisionConfig(
        **base.read_vision(given, "gelu_pytorch_tanh"),
        num_position_embeddings=given.num_position_embeddings,
        deepstack_blocks=(),
    )
    linear = _read_linear(text)
    rotary_width = _read_rotary_width(text)
    decoder = base.read_text(
        config,
        head_dim=text.head_dim,
        mrope_section=(11, 11, 10),
        mrope_interleaved=True,
        qkv_bias=False,
        qk_norm=True,
        rotary_width=rotary_width,
        output_gate=True,
        norm_offset=True,
        linear_attention=linear,
        layer_kinds=_read_kinds(text, linear),
        **own,
    )
    return base.read_model(config, raw, decoder, tower, tie_word_embeddings=config.tie_word_embeddings)


def _read_rotary_width(text: Any) -> int:
    factor = text.rope_parameters.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None))
    factor = PARTIAL_ROTARY_FACTOR if factor is None else factor
    width = int(text.head_dim * factor)
    if width < 2 or width % 2:
        raise ValueError(
            f"partial_rotary_factor must give an even number of values of a head of {text.head_dim}, "
            f"got {width} for {factor}"
        )
    return width


def _read_linear(text: Any) -> LinearAttentionConfig:
    key_heads, value_heads = text.linear_num_key_heads, text.linear_num_value_heads
    if value_heads % key_heads:
        raise ValueError(
            f"linear_num_value_heads must be a multiple of linear_num_key_heads = {key_heads}, got {value_heads}"
        )
    return LinearAttentionConfig(
        key_heads,
        value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
    )


def _read_kinds(text: Any, linear: LinearAttentionConfig) -> tuple[LayerKind, ...]:
    layers = text.num_hidden_layers
    names = text.layer_types
    if names is None:
        interval = text.full_attention_interval
        names = [LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION.name for i in range(layers)]
    if len(names) != layers:
        raise ValueError(f"layer_types must have num_hidden_layers = {layers} entries, got {len(names)}")
    if FULL_ATTENTION.name not in names:
        raise ValueError(f"layer_types must have at least one {FULL_ATTENTION.name}, got none")
    kinds = {FULL_ATTENTION.name: FULL_ATTENTION, LINEAR_ATTENTION: layer_kind(linear)}
    return tuple(kinds[name] for name in names)


POSITIONS = 262144
VISION = _VISION  # tower of 9B and larger
MIDDLE_VISION = {**_VISION, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
SMALL_VISION = {**_VISION, "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}


def size_of(
    width: int, layers: int, heads: int, kv_heads: int, value_heads: int, mlp_width: int, **own: Any
) -> dict[str, Any]:
    """Return `text_config` of a published size; all have 16 key heads and heads of 256 and 128."""
    return text_fields(
        width, layers, heads, kv_heads, mlp_width, 248320, POSITIONS,
        head_dim=256, attention_bias=False, attn_output_gate=True, full_attention_interval=4,
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=value_heads, mamba_ssm_dtype="float32", **own,
    )  # fmt: skip


_27B = PublishedSize("qwen3_5", size_of(5120, 64, 24, 4, 48, 17408), VISION)

FAMILY = dataclasses.replace(
    qwen3_vl.FAMILY,
    fields=FIELDS,
    # These predict several tokens at once, which is not supported.
    names=TensorNames(ignored=("mtp.",)),
    published=dataclasses.replace(
        qwen3_vl.FAMILY.published,
        architecture="Qwen3_5ForConditionalGeneration",
        has_thinking_tags=True,
        rope={
            "rope_theta": 1e7,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
            "partial_rotary_factor": PARTIAL_ROTARY_FACTOR,
        },
        sizes={
            "Qwen3.5-0.8B": PublishedSize("qwen3_5", size_of(1024, 24, 8, 2, 16, 3584), SMALL_VISION, True),
            "Qwen3.5-2B": PublishedSize("qwen3_5", size_of(2048, 24, 8, 2, 16, 6144), MIDDLE_VISION, True),
            "Qwen3.5-4B": PublishedSize("qwen3_5", size_of(2560, 32, 16, 4, 32, 9216), MIDDLE_VISION, True),
            "Qwen3.5-9B": PublishedSize("qwen3_5", size_of(4096, 32, 16, 4, 32, 12288), VISION),
            **{f"Qwen{release}-27B": _27B for release in ("3.5", "3.6", "3.8")},
        },
    ),
    read_config=read_config,
)
