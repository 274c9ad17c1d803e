"""What a program is: its sizes, its arguments, and what it computes.

Every shape follows from a program's fields and from `Shapes`, which all programs of an engine share. Plain nested dicts
cross into programs, never modules. The integers of a step's tokens are packed into one array: they travel together, and
every layer takes its part.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import NamedSharding

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.cache.device import ALIGNMENT
from vlcache_jax.device import sampler
from vlcache_jax.device.buckets import Ladder, cover
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.mesh import ONE, Devices
from vlcache_jax.device.sampler import FIXED
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.models import ModelConfig, Rows, abstract_model, bind
from vlcache_jax.models.decoder import DecoderLayer
from vlcache_jax.models.model import bind_layer, layer_graphs
from vlcache_jax.pallas_kernels import split
from vlcache_jax.pallas_kernels.split import FIRST, SECOND, THIRD, WHOLE
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import SelectingPolicy
from vlcache_jax.reuse.shift import TOKENS, Moves

FIELDS = 7  # slot, the three of position, k_start, k_end, source


def pack(rows: Rows, size: int) -> npt.NDArray[np.int32]:
    """Rows as int32 [FIELDS, size]; what lies behind them is never looked at."""
    packed = np.zeros((FIELDS, size), np.int32)
    packed[:, : len(rows.slot)] = np.vstack(list(rows))
    return packed


def unpack(packed: Any, size: int) -> Rows:
    """The first `size` rows."""
    slot, x, y, z, k_start, k_end, source = (packed[i, :size] for i in range(FIELDS))
    return Rows(slot, jnp.stack([x, y, z]), k_start, k_end, source)


def repack(rows: Rows, size: int) -> jax.Array:
    """Rows of the device as `pack` makes them of the host's."""
    packed = jnp.vstack(list(rows))
    return jnp.pad(packed, ((0, 0), (0, size - packed.shape[1])))


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
      encoder_rows, packed: of a step; see `vlcache_jax.device.programs.base`.
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


Key = tuple[Any, ...]  # a program's name and its sizes

# Programs on users' disks are found by these names, too.
_ON_DISK = {
    "pool": "<lambda>", "encoder_rows": "<lambda>", "lanes": "empty_lanes", "copy": "_copy", "slice": "<lambda>",
    "layers": "block", "window": "<unnamed function>", "score_rows": "score", "choose": "chosen", "narrow": "narrowed",
    "take": "<lambda>", "keep_rows": "keep",
}  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """What requests can call for, besides what all do: prefill, decoding, sampling and scoring.

    Attributes:
      ladder: rungs that batches have.
      linking: images are linked.
      shrinking: layers that fewer rows leave than enter, besides the last one. Any number may leave: a step that ends
        inside an image may hold nothing but rows that drop out early.
      selecting: rows are chosen on the device.
      shifting: linked K, V are moved.
    """

    ladder: Ladder
    linking: bool = False
    shrinking: Collection[int] = ()
    selecting: SelectingPolicy | None = None
    shifting: bool = False

    @classmethod
    def of(cls, policy: Policy, shapes: Shapes) -> Demand:
        """That of requests under a policy."""
        layers = shapes.config.text.num_layers
        image = ImageRef("", (1, 200, 200), 10_000, _no_patches)
        layout = make_layout(np.zeros(10_001, np.int32), [0], [image], 2, ["approximate"])
        plan = policy.plan(layout, layers)
        rows = list(plan.rows(layers))
        selecting = policy if isinstance(policy, SelectingPolicy) else None
        if selecting is not None:
            for layer, kept in enumerate(selecting.keep(layout, layers), selecting.check_layer + 1):
                rows[layer] += kept
        shrinking = {layer for layer in range(layers - 1) if rows[layer + 1] < rows[layer]}
        return cls(shapes.ladder, policy.links, shrinking, selecting, plan.shift)


@dataclass(frozen=True)
class Repeat:
    """What requests call for when they come again, and may not have called for before.

    Attributes:
      demand: rows of their steps, and how many of these have logits.
      linked: tokens that images are padded to, and how many of them are linked together.
      recalled: tokens that are linked together from the device tier.
      copied: pages that are copied together.
    """

    demand: Demand
    linked: Collection[tuple[int, int]]
    recalled: Collection[int]
    copied: Collection[int]


def _no_patches() -> Patches:
    raise AssertionError("this image has no pixels")


@dataclass(frozen=True)
class Program[R](ABC):
    """A program that returns R, and the key of what is compiled of it.

    Attributes:
      name: as users are told of it.
      follows_rows: whether its sizes depend on how many rows a step has: a repeat, whose images are known, has fewer.
    """

    name: ClassVar[str]
    follows_rows: ClassVar[bool] = False

    @property
    def donates(self) -> tuple[int, ...]:
        """Numbers of the arguments that are updated in place."""
        return ()

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        """Those of this kind that requests can call for; what has no sizes, they always do."""
        return [cls()]

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        """Those of this kind that a repeat can call for; what depends on nothing that changes has been used."""
        return cls.family(shapes, repeat.demand) if cls.follows_rows else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        """What it takes: trees of abstract arrays."""
        return ()

    @abstractmethod
    def compute(self, shapes: Shapes, *arguments: Any, **_: Any) -> R:
        """What is traced."""

    @property
    def gives(self) -> Any:
        """How results lie on several devices: a tree that begins as theirs does."""
        return WHOLE

    def function(self, shapes: Shapes) -> Callable[..., R]:
        """`compute` as it is compiled."""
        function = functools.partial(self.compute, shapes)
        vars(function)["__name__"] = _ON_DISK.get(self.name, self.name)
        return function

    def jitted(self, shapes: Shapes) -> jax.stages.Wrapped:
        """What is lowered for `arguments`."""
        devices = shapes.devices
        how = {} if devices.mesh is None else {"out_shardings": devices.shardings(self.gives)}
        return jax.jit(self.function(shapes), donate_argnums=self.donates, **how)

    def lowered(self, shapes: Shapes) -> jax.stages.Lowered:
        """The program for `arguments`; those of which nothing else is said are whole on each of several devices."""
        with split.over(shapes.devices.mesh):
            return self.jitted(shapes).lower(*shapes.devices.placed(self.arguments(shapes)))

    @property
    def key(self) -> Key:
        """Name and sizes, as users are told of them."""
        return self.name, *(getattr(self, field.name) for field in dataclasses.fields(self))

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.key[1:] if type(size) is int or size in FIXED)
        return f"{self.name}({sizes})" if sizes else self.name
