"""A whole Qwen-VL model: vision tower, decoder, output head."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.decoder import Decoder, DecoderLayer
from vlcache_jax.models.layers import Table
from vlcache_jax.models.registry import FAMILIES

LayerGraphs = dict[Any, nnx.GraphDef[DecoderLayer]]


class QwenVL(nnx.Module):
    """The parameters carry the library's names, so that a checkpoint maps by rule (`params.py`)."""

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.visual = FAMILIES[config.model_type].vision_tower(config.vision, dtype=dtype, rngs=rngs)
        self.language_model = Decoder(config.text, dtype=dtype, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Table(config.text.vocab_size, config.text.hidden_size, dtype=dtype)


@functools.lru_cache(maxsize=16)  # it is asked for twice when a model is opened, and takes a second of a large one
def abstract_model(config: ModelConfig, dtype: Any) -> QwenVL:
    """The model with shapes in the place of arrays; costs no memory at any size. It is shared: do not change it."""
    return nnx.eval_shape(lambda: QwenVL(config, dtype=dtype, rngs=nnx.Rngs(0)))


def bind_layer(graphs: LayerGraphs, params: dict[str, Any]) -> DecoderLayer:
    """The decoder layer of a plain nested dict, whichever of a model's kinds of layers it is of."""
    return bind(graphs[jax.tree.structure(params)], params)


def layer_graphs(model: QwenVL) -> LayerGraphs:
    """Graph definitions of a model's decoder layers, by the structure of their parameters."""
    split = [nnx.split(layer) for layer in model.language_model.layers]
    return {jax.tree.structure(nnx.to_pure_dict(state)): graph for graph, state in split}


def bind[M: nnx.Module](graph: nnx.GraphDef[M], params: dict[str, Any]) -> M:
    """The module of a graph definition with the arrays of a plain nested dict, to be called while tracing."""
    return nnx.merge(graph, params)
