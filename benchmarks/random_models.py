"""Models with random weights: published shapes, full or with fewer layers, and a small one."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from vlcache_jax import service
from vlcache_jax.convert.plan import as_dtype
from vlcache_jax.device.checkpoint import Checkpoint
from vlcache_jax.models.params import parameters
from vlcache_jax.models.registry import SIZES, find_name, load_config
from vlcache_jax.testing import make_checkpoint

# Of the small model.
TEXT = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
VISION = {
    "depth": 8,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_heads": 6,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [2, 4, 6],
}

# The small model with linear attention in three of four layers.
HYBRID = "hybrid"
HYBRID_TEXT = {
    **TEXT,
    "head_dim": 128,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

# Token ids of these models that are text: the tokenizer knows single bytes, and most ids spell nothing.
LETTERS = (*b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",)


def make_random_model(
    directory: str | pathlib.Path, shape: str | None = None, layers: int | None = None
) -> tuple[pathlib.Path, str]:
    """Write a checkpoint without weights; within `drawn_weights` it opens with random ones.

    Args:
      directory: It is created if it does not exist.
      shape: A published model, such as "qwen3-vl-8b"; None is 12 decoder layers x 768, 8 encoder layers x 384, and
        "hybrid" the same with linear attention in three of four decoder layers.
      layers: Layers of the decoder; None is all.

    Returns:
      The directory, and the model's name for tables.

    Raises:
      ValueError: There is no such shape, or it has fewer layers.
    """
    text: dict[str, Any]
    vision: dict[str, Any]
    if shape is None or shape == HYBRID:
        model_type, text, vision, tied = "qwen3_vl", {**TEXT}, {**VISION}, True
        if shape == HYBRID:
            model_type, text = "qwen3_5", {**HYBRID_TEXT}
            del vision["deepstack_visual_indexes"]
        most = text["num_hidden_layers"]
        title = f"{text['hidden_size']} wide, {'linear attention, ' * (shape == HYBRID)}random weights"
    else:
        name = find_name(shape)
        if name is None:
            names = ", ".join((HYBRID, *map(str.lower, SIZES)))
            raise ValueError(f"random_weights must be one of {names}, got {shape!r}")
        size = SIZES[name]
        model_type, text, vision, tied = size.model_type, {**size.text}, {**size.vision}, size.tie_word_embeddings
        most = text["num_hidden_layers"]
        title = f"shape of {name}, random weights"
    # One layer without DeepStack, and one with full attention.
    least = max(1 + len(vision.get("deepstack_visual_indexes", ())), text.get("full_attention_interval", 1))
    if layers is not None and not least <= layers <= most:
        raise ValueError(f"layers must be from {least} to {most}, the layers of the model, got {layers}")
    count = most if layers is None else layers
    path = make_checkpoint(
        directory, model_type, dtype="bfloat16", text={**text, "num_hidden_layers": count}, vision=vision,
        tie_word_embeddings=tied, weights=False,
    )  # fmt: skip
    return path, f"{title}, {count} layers" if count == most else f"{title}, {count} of {most} layers"


class _RandomCheckpoint(Checkpoint):
    """A checkpoint whose weights are drawn on the device, because writing the files would take minutes."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the shape, so that disk entries are found only by models of this shape."""
        return f"drawn {self.config!r}"

    source_digest = fingerprint

    def load(self, device: Any = None, loaded: Callable[[], object] = lambda: None) -> dict[str, Any]:
        import jax

        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        tree: dict[Any, Any] = {}
        for i, parameter in enumerate(parameters(self.config)):
            *folders, leaf = parameter.path
            branch = tree
            for folder in folders:
                branch = branch.setdefault(folder, {})
            # Layers preserve the magnitude of their inputs.
            axis = {"kernel": 0, "gate_up_proj": 1, "down_proj": 1, "embedding": 0}.get(str(leaf))
            scale = 1.0 if axis is None else parameter.shape[axis] ** -0.5
            dtype = parameter.dtype_in(self.dtype)
            branch[leaf] = draw(jax.random.key(i), parameter.shape, dtype) * np.asarray(scale, dtype)
            loaded()
        return tree


@contextlib.contextmanager
def drawn_weights() -> Iterator[None]:
    """Let models open without weights, which are drawn at random."""

    def open_drawn(directory: str | pathlib.Path, *, dtype: Any = None, verify_weights: bool = False) -> Checkpoint:
        return _RandomCheckpoint(pathlib.Path(directory), load_config(pathlib.Path(directory)), as_dtype(dtype), None)

    with mock.patch.object(service, "open_checkpoint", open_drawn):
        yield
