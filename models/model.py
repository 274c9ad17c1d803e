"""The Qwen-VL model: vision tower, decoder and output head."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.decoder import Decoder, DecoderLayer
from vlcache_jax.models.layers import Table
from vlcache_jax.models.registry import FAMILIES

LayerGraphs = dict[Any, nnx.GraphDef[DecoderLayer]]


class QwenVL(nnx.Module):
    """A Qwen-VL model. Its parameters have the library's names, so that a checkpoint maps by rule (`params.py`)."""

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.visual = FAMILIES[config.model_type].vision_tower(config.vision, dtype=dtype, rngs=rngs)
        self.language_model = Decoder(config.text, dtype=dtype, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Table(config.text.vocab_size, config.text.hidden_size, dtype=dtype)


@functools.lru_cache(maxsize=16)  # called twice when a model opens, and takes a second for a large model
def abstract_model(config: ModelConfig, dtype: Any) -> QwenVL:
    """Return the model with abstract arrays, which need no memory. The result is cached: do not change it."""
    return nnx.eval_shape(lambda: QwenVL(config, dtype=dtype, rngs=cast(nnx.Rngs, _NoKeys())))


class _NoKeys:
    """Replacement for random keys. Nothing is drawn, and tracing one key per matrix takes longer than all the rest."""

    def params(self) -> None:
        return None


def bind_layer(graphs: LayerGraphs, params: dict[str, Any]) -> DecoderLayer:
    """Return the decoder layer with the arrays of a plain nested dict, of any of the model's kinds of layers."""
    return bind(graphs[jax.tree.structure(params)], params)


def layer_graphs(model: QwenVL) -> LayerGraphs:
    """Return the graph definitions of a model's decoder layers, by the structure of their parameters."""
    split = [nnx.split(layer) for layer in model.language_model.layers]
    return {jax.tree.structure(nnx.to_pure_dict(state)): graph for graph, state in split}


def bind[M: nnx.Module](graph: nnx.GraphDef[M], params: dict[str, Any]) -> M:
    """Return the module of a graph definition with the arrays of a plain nested dict. Called while tracing."""
    return nnx.merge(graph, params)
