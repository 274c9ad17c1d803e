"""Flax NNX models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and with mixtures of experts.

A family is one file (`qwen2_vl.py`, `qwen3_vl.py` and others) and a line in `registry.py`. The file reads
`config.json`, defines the vision tower and its tables, and ends with `FAMILY`, whose fields `family.py` documents.
`registry.py` also finds published sizes by name. Code outside a family's file never compares model types.

All families share the decoder, up to flags of its config. `decoder.py` defines it once, with the mixtures of experts.
`params.py` maps parameters to the tensors of a checkpoint.

Modules define the mathematics and the shapes. They are split once, at load, into a graph definition and a plain nested
dict of arrays. Only such dicts cross a jit boundary. `bind` merges them into the module again while tracing.

Letters: N rows, S slots, L layers, H query heads, K KV heads, G = H / K, D head width, M model width, F MLP width,
T image tokens, P patches, V vocabulary.
"""

from vlcache_jax.models.config import ModelConfig as ModelConfig
from vlcache_jax.models.decoder import Rows as Rows
from vlcache_jax.models.model import QwenVL as QwenVL
from vlcache_jax.models.model import abstract_model as abstract_model
from vlcache_jax.models.model import bind as bind
from vlcache_jax.models.registry import load_config as load_config
