"""What the programs of an engine have in common: sizes, and what they take as abstract arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.cache.device import ALIGNMENT
from vlcache_jax.device import sampler
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.ladder import Ladder, cover
from vlcache_jax.device.mesh import ONE, Devices
from vlcache_jax.device.packed import FIELDS
from vlcache_jax.models import ModelConfig, abstract_model, bind
from vlcache_jax.models.decoder import DecoderLayer
from vlcache_jax.models.model import bind_layer, layer_graphs
from vlcache_jax.pallas_kernels.split import FIRST, SECOND, THIRD
from vlcache_jax.reuse.shift import TOKENS, Moves

Params = dict[str, Any]
Halves = list[list[jax.Array]]  # of each layer K and V, or the planes in which the device tier has both
# Of a layer's rows keys before rotation and values as they are stored: [N, K, D] twice, or `KVShape.joined`.
Stored = tuple[jax.Array, jax.Array] | jax.Array
Constants = tuple[Any, Any]  # bias [K, D] and weight [D] of keys, or None

LINK_GROUPS = 4  # in which the layers' K, V are linked one after the other, so that computing need not wait for all
LINKED = (16, 4, 1)  # images that one program links
LINKED_TOKENS = 16384  # of these images together, where they are several
PAGE_RUNGS = (16, 64, 256)  # of programs for compressed prompts, and as many pages as a request can have
MOVED_PAGES = (16, 64)  # of what is kept of prompts, that one program takes to the host or back


class Shapes:
    """The sizes of an engine, and the shapes that follow from them.

    Args:
      config, params, normalization, num_slots, max_pages, ladder, implementation, codec, kept_tokens, compressed_slots:
        see `Runner`; of arrays only the shapes count.
      is_host: whether the device is the host's processor, so that a predicate keeps nobody waiting.

    Attributes:
      dtype: of K, V and hidden states.
      kv: keys and values in the pool, and as they are stored.
      visual, normalization, text, head: abstract weights.
      tower_graph, table_graph, norm_graph: what weights of a vision tower, an embedding table and a norm are bound to.
      like: of each layer the first with weights of the same shapes; programs have slices of it.
      token_rungs: numbers of an image's tokens.
      moved: tokens of images that a step moves at most.
      windows: pages of the prompts that scores look at.
      page_rungs: pages of a prompt that is compressed, and of what one layer has of it and of its answer.
      link_groups: layers whose K, V are linked together, in their order.
      recall_rungs: tokens that one program links from the device tier.
      work_config: (rows, decode=False, pages=None) -> how their attention is cut, the same object every time.
      pool: K or V of a layer.
      compressed: K or V of what is kept of prompts, of all layers.
      encoder_rows, packed: of a step; see `vlcache_jax.device.packed`.
      lanes: see `vlcache_jax.device.sampler`.
      kept, kept_rows: the device tier: of each layer the planes of its tokens, and encoder rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        normalization: Any,
        *,
        num_slots: int,
        max_pages: int,
        ladder: Ladder,
        implementation: str | None,
        codec: kernels.Codec | None = None,
        kept_tokens: int = 0,
        compressed_slots: int = 0,
        is_host: bool = True,
        devices: Devices = ONE,
    ):
        self.is_host, self.devices = is_host, devices
        self.config, self.ladder, self.implementation = config, ladder, implementation
        self.num_slots, self.max_pages, self.kept_tokens = num_slots, max_pages, kept_tokens
        self.compressed_slots = compressed_slots
        self.dtype = params["language_model"]["norm"]["scale"].dtype
        self.kv = KVShape.of(config, self.dtype, codec)
        # Weights, and what they are bound to.
        self.visual, self.normalization = abstract((params["visual"], normalization))
        self.text = abstract(params["language_model"])
        self.head = abstract(params.get("lm_head", params["language_model"]["embed_tokens"]))
        model = abstract_model(config, self.dtype)
        self.tower_graph = nnx.graphdef(model.visual)
        self._layer_graphs = layer_graphs(model)
        self.table_graph = nnx.graphdef(model.language_model.embed_tokens)
        self.norm_graph = nnx.graphdef(model.language_model.norm)
        # Sizes.
        text, layers = config.text, config.text.num_layers
        self.like = tuple(map(text.first_like, range(layers)))
        self.token_rungs = tuple(size // config.vision.merge_size**2 for size in ladder.patches)
        largest = self.token_rungs[-1]
        self.moved = min(max(TOKENS, largest), num_slots)
        pages = {min(-(-size // kernels.PAGE), max_pages) for size in ladder.rows}
        self.windows = tuple(sorted({*pages, max_pages}))
        self.page_rungs = (*(rung for rung in PAGE_RUNGS if rung < max_pages), max_pages)
        group = -(-layers // LINK_GROUPS)
        self.link_groups = tuple(slice(first, min(first + group, layers)) for first in range(0, layers, group))
        self.recall_rungs = tuple(sorted({*self.token_rungs, *(count * largest for count in self.linked(largest))}))
        self.work_config = functools.cache(self._work_config)  # asked for at every token
        # Arrays.
        self.pool, self.compressed = self.half(num_slots), self.half(compressed_slots)
        depth = 1 + config.vision.num_deepstack
        self.encoder_rows, self.kept_rows = (
            jax.ShapeDtypeStruct((depth, rows, text.hidden_size), self.dtype) for rows in (ladder.max_rows, kept_tokens)
        )
        self.packed = ints(FIELDS, ladder.max_rows)
        self.lanes = jax.eval_shape(functools.partial(sampler.empty_lanes, ladder.max_sequences, text.vocab_size))
        self.kept = [[devices.abstract(plane, THIRD) for plane in self.kv.stored(2, kept_tokens)]] * layers

    def bind_layer(self, params: Params) -> DecoderLayer:
        """The decoder layer of these parameters, to be called while tracing."""
        return bind_layer(self._layer_graphs, params)

    def logits(self, norm: Params, head: Params, x: jax.Array) -> jax.Array:
        """Float32 [N, V] of hidden states, while tracing."""
        return bind(self.table_graph, head).scores(self.normed(norm, x))

    def normed(self, norm: Params, x: jax.Array) -> jax.Array:
        """Hidden states [N, M] behind the last norm, while tracing."""
        return bind(self.norm_graph, norm)(x)

    # Arrays of so many rows, or of so many layers.

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        """Hidden states of rows."""
        return jax.ShapeDtypeStruct((rows, self.config.text.hidden_size), self.dtype)

    def vocabulary(self, rows: int) -> jax.ShapeDtypeStruct:
        """Logits of rows."""
        return jax.ShapeDtypeStruct((rows, self.config.text.vocab_size), jnp.float32)

    def half(self, rows: int) -> jax.ShapeDtypeStruct:
        """Keys or values of rows, as they lie in the pool."""
        return self.devices.abstract(self.kv.half(rows), SECOND)

    def stored(self, layers: int, tokens: int) -> list[jax.ShapeDtypeStruct]:
        """The planes of an image in some layers as they come from the host: without copies of heads, by token."""
        kv = dataclasses.replace(self.kv, heads=self.kv.heads // self.devices.copies)
        lies = self.devices.by_token(tokens)
        return [self.devices.abstract(plane, lies) for plane in kv.stored(layers, 2, tokens)]

    def pools(self, layers: int) -> list[list[jax.ShapeDtypeStruct]]:
        """K and V of layers."""
        return [[self.pool] * 2] * layers

    def moves(self, layers: int) -> Moves:
        """What layers move."""
        return Moves(ints(self.ladder.max_rows), ints(6, self.moved), ints(layers), ints(layers))

    def constants(self, text: Params | None = None) -> list[Constants]:
        """Of each layer what its keys before rotation have in common, and codecs take out.

        Args:
          text: weights of the decoder; None: abstract ones.
        """
        weights = self.text if text is None else text
        return [self._constants(weights["layers"][i]["self_attn"]) for i in range(self.config.text.num_layers)]

    def _constants(self, attention: Params) -> Constants:
        if self.kv.codec is None:
            return None, None
        bias = attention["qkv_proj"].get("bias")
        if isinstance(bias, jax.ShapeDtypeStruct):
            bias = jax.ShapeDtypeStruct((self.kv.heads, self.kv.width), bias.dtype)
            bias = self.devices.abstract(bias, FIRST)
        elif bias is not None:
            bias = bias[:, -2]
        return bias, attention["k_norm"]["scale"] if "k_norm" in attention else None

    def _work_config(self, rows: int, decode: bool = False, pages: int | None = None) -> kernels.WorkConfig:
        """How the attention of `rows` rows is cut, of one request each where they decode.

        Args:
          pages: of a request at most, none of which others share; None: as many as any has, which may be shared.
        """
        text, count = self.config.text, self.devices.count
        q = jax.ShapeDtypeStruct((rows, text.num_heads // count, text.head_dim), self.dtype)
        return kernels.work_config(
            rows, min(rows, self.ladder.max_sequences), pages or self.max_pages, q, self.kv.heads // count,
            decode=decode, shared=pages is None, implementation=self.implementation,
        )  # fmt: skip

    # How links are cut into programs.

    def linked(self, size: int) -> tuple[int, ...]:
        """How many images of `size` tokens one program links, the largest number first."""
        return tuple(count for count in LINKED if count == 1 or count * size <= LINKED_TOKENS)

    def split_links(self, size: int, number: int) -> list[int]:
        """How many images each program links where `number` images of `size` tokens are linked."""
        counts = []
        for count in self.linked(size):
            counts += [count] * (number // count)
            number %= count
        return counts

    def split_recalls(self, lengths: abc.Iterable[int]) -> list[int]:
        """How many tokens each program links where images of so many tokens are linked from the device tier."""
        tokens = sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)
        return cover(tokens, self.recall_rungs)


def abstract(tree: Any) -> Any:
    """Abstract arrays like those of a tree."""
    return jax.tree.map(_abstract, tree)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    lies = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies if isinstance(lies, NamedSharding) else None)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract array of int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
