"""The base class of programs: sizes, arguments and the computation.

Every shape follows from a program's fields and from `Shapes`, which all programs of an engine share. Plain nested dicts
cross into programs, never modules. The integers of a chunk's tokens are packed into one array, so that they need one
transfer. Each layer takes its rows of it.
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
from vlcache_jax.device.buckets import BucketSizes, cover, round_up
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.mesh import ONE, Devices
from vlcache_jax.device.sampler import FIXED
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.inputs.processor import Patches
from vlcache_jax.models import ModelConfig, Rows, abstract_model, bind
from vlcache_jax.models.decoder import DecoderLayer
from vlcache_jax.models.layer_kinds import BLOCK, Runs
from vlcache_jax.models.model import bind_layer, layer_graphs
from vlcache_jax.pallas_kernels import split
from vlcache_jax.pallas_kernels.split import FIRST, SECOND, THIRD, WHOLE
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import SelectingPolicy
from vlcache_jax.reuse.shift import TOKENS, Moves

FIELDS = 7  # slot, the three of position, k_start, k_end, source


def pack(rows: Rows, size: int) -> npt.NDArray[np.int32]:
    """Pack rows as int32 [FIELDS, size]. Values after the last row are never read."""
    packed = np.zeros((FIELDS, size), np.int32)
    packed[:, : len(rows.slot)] = np.vstack(list(rows))
    return packed


def unpack(packed: Any, size: int) -> Rows:
    """Return the first `size` packed rows."""
    slot, x, y, z, k_start, k_end, source = (packed[i, :size] for i in range(FIELDS))
    return Rows(slot, jnp.stack([x, y, z]), k_start, k_end, source)


def repack(rows: Rows, size: int) -> jax.Array:
    """Pack rows on the device, as `pack` does on the host."""
    packed = jnp.vstack(list(rows))
    return jnp.pad(packed, ((0, 0), (0, size - packed.shape[1])))


def pack_runs(runs: Runs, rows: int, slots: int, has_maps: bool = False) -> tuple[npt.NDArray[np.int32], np.int32]:
    """Pack the runs of a step as int32 [5, rows + slots], and their number. Padding rows follow the others.

    A block has tokens, or copies states to a slot that no other block copies them to. With maps, int32 [8, 3 rows +
    slots]: a block of tokens may also be one of A and one of B.
    """
    packed = np.zeros((8, 3 * rows + slots) if has_maps else (5, rows + slots), np.int32)
    packed[0, :rows] = np.arange(rows)
    packed[0, : len(runs.place)] = runs.place
    fields = runs.start, runs.length, runs.source, runs.target, runs.kind, runs.tail, runs.factor
    for row, field in zip(packed[1:], fields, strict=False):
        row[: len(field)] = field
    return packed, np.int32(runs.count)


def unpack_runs(packed: tuple[Any, Any] | None, size: int) -> Runs | None:
    """Return the runs of a step whose first `size` rows enter a layer."""
    if packed is None:
        return None
    place, start, length, source, target, *kinds = packed[0]
    return Runs(place[:size], start, length, source, target, packed[1], *kinds)


Params = dict[str, Any]
# By layer, what it keeps: K and V, or its states. Or the buffers of the device tier for K and V.
Halves = list[list[jax.Array]]
# Stored KV of a layer's rows, keys before rotation: [N, K, D] twice, or `KVShape.joined`.
Stored = tuple[jax.Array, jax.Array] | jax.Array
Constants = tuple[Any, Any]  # bias [K, D] and weight [D] of keys, or None

LINK_GROUPS = 4  # groups of layers that are linked one after the other; the first layers can run before the last link
LINKED = (16, 4, 1)  # numbers of images that one program links
LINKED_TOKENS = 16384  # limit of the tokens of several images in one program
PAGE_BUCKETS = (16, 64, 256)  # buckets for pages of compressed prompts, besides the largest number of a request
MOVED_PAGES = (16, 64)  # numbers of compressed pages that one program moves to or from the host


@dataclass(frozen=True)
class LinkGroup:
    """Layers that are linked together.

    Attributes:
      layers: the layers.
      paged: those of them that keep KV.
      parts: parts of a cache entry with their KV, and with the states of the others.
    """

    layers: slice
    paged: tuple[int, ...]
    parts: slice

    @property
    def count(self) -> int:
        """Number of layers that keep KV."""
        return len(self.paged)


class Shapes:
    """The sizes of an engine, and the abstract arrays that follow from them.

    Args:
      config, params, normalization, num_slots, max_pages, buckets, implementation, codec, kept_tokens,
        compressed_slots, num_snapshots: see `Runner`. Only the shapes of arrays are used.
      is_host: True if the device is the host's CPU, so that reading a predicate needs no wait.

    Attributes:
      dtype: dtype of KV and hidden states.
      kv: layout of KV in the pool and in cache entries.
      visual, normalization, text, head: abstract weights.
      tower_graph, table_graph, norm_graph: graph definitions of vision tower, embedding table and norm.
      like: by layer, the first layer with weights of the same shapes. Programs have slices of it.
      token_buckets: bucket sizes of an image's tokens.
      moved: largest number of image tokens that a chunk shifts.
      windows: bucket sizes, in pages, of prompts that selecting policies score.
      page_buckets: bucket sizes, in pages, of a compressed prompt, and of its kept tokens and output in a layer.
      link_groups: layers that are linked together, in their order.
      recall_buckets: bucket sizes of the tokens that one program links from the device tier.
      work_config: (rows, decode=False, pages=None) -> the configuration of their attention, the same object every time.
      num_snapshots: maximum number of snapshots of states; None if no layer has states.
      num_states: slots of states: a zero one, one for each sequence and snapshot, and the last one for rows observed
        for compression if there is any; 0 if no layer has states.
      observed_slot: slot of states for rows observed for compression; None if no layer has states.
      block_rows: smallest bucket size that holds the tokens which a layer with a state computes together.
      pool: K or V of a layer.
      compressed: K or V of the compressed KV pool, of all layers.
      encoder_rows: encoder rows of a chunk, [1 + J, max_rows, M].
      packed: packed tokens of a chunk, int32 [FIELDS, max_rows].
      decode_slots: see `vlcache_jax.device.sampler`.
      kept, kept_rows: the device tier: by layer the buffers of its tokens, and encoder rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        normalization: Any,
        *,
        num_slots: int,
        max_pages: int,
        buckets: BucketSizes,
        implementation: str | None,
        codec: kernels.Codec | None = None,
        maps: str = "",
        kept_tokens: int = 0,
        compressed_slots: int = 0,
        num_snapshots: int = 0,
        is_host: bool = True,
        devices: Devices = ONE,
    ):
        self.is_host, self.devices = is_host, devices
        self.config, self.buckets, self.implementation = config, buckets, implementation
        self.num_slots, self.max_pages, self.kept_tokens = num_slots, max_pages, kept_tokens
        self.compressed_slots = compressed_slots
        self.dtype = params["language_model"]["norm"]["scale"].dtype
        self.kv = KVShape.of(config, self.dtype, codec, maps)
        # Weights and their graph definitions.
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
        self.num_snapshots = num_snapshots if text.has_states else None
        observing = bool(compressed_slots)  # a slot for observed rows
        self.num_states = 1 + buckets.max_sequences + num_snapshots + observing if text.has_states else 0
        self.observed_slot = self.num_states - 1 if text.has_states else None
        self.like = tuple(map(text.first_like, range(layers)))
        block = min(BLOCK, buckets.max_rows) if text.has_states else 1
        self.block_rows = round_up(block, buckets.rows)
        self.token_buckets = tuple(size // config.vision.merge_size**2 for size in buckets.patches)
        largest = self.token_buckets[-1]
        self.moved = min(max(TOKENS, largest), num_slots)
        pages = {min(-(-size // kernels.PAGE), max_pages) for size in buckets.rows}
        self.windows = tuple(sorted({*pages, max_pages}))
        self.page_buckets = (*(bucket for bucket in PAGE_BUCKETS if bucket < max_pages), max_pages)
        self.link_groups = _link_groups(text.paged_layers, layers)
        self.recall_buckets = tuple(sorted({*self.token_buckets, *(count * largest for count in self.linked(largest))}))
        self.work_config = functools.cache(self._work_config)  # called for every decoded token
        # Arrays.
        self.pool, self.compressed = self.half(num_slots), self.half(compressed_slots)
        depth = 1 + config.vision.num_deepstack
        self.encoder_rows, self.kept_rows = (
            jax.ShapeDtypeStruct((depth, rows, text.hidden_size), self.dtype)
            for rows in (buckets.max_rows, kept_tokens)
        )
        self.packed = ints(FIELDS, buckets.max_rows)
        self.decode_slots = jax.eval_shape(
            functools.partial(sampler.empty_decode_state, buckets.max_sequences, text.vocab_size)
        )
        self.kept = [[devices.abstract(buffer, THIRD) for buffer in self.kv.stored(2, kept_tokens)]] * self.kv.layers

    def bind_layer(self, params: Params) -> DecoderLayer:
        """Return the decoder layer with these parameters. Called while tracing."""
        return bind_layer(self._layer_graphs, params)

    def logits(self, norm: Params, head: Params, x: jax.Array) -> jax.Array:
        """Compute logits, float32 [N, V], of hidden states [N, M]. Called while tracing."""
        return bind(self.table_graph, head).scores(self.normed(norm, x))

    def normed(self, norm: Params, x: jax.Array) -> jax.Array:
        """Apply the last norm to hidden states [N, M]. Called while tracing."""
        return bind(self.norm_graph, norm)(x)

    # Abstract arrays for a number of rows or layers.

    def hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return abstract hidden states, [rows, M]."""
        return jax.ShapeDtypeStruct((rows, self.config.text.hidden_size), self.dtype)

    def vocabulary(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return abstract logits, float32 [rows, V]."""
        return jax.ShapeDtypeStruct((rows, self.config.text.vocab_size), jnp.float32)

    def half(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return the abstract keys or values of rows, with the placement of the pool."""
        return self.devices.abstract(self.kv.half(rows), SECOND)

    def stored(self, layers: int, tokens: int) -> list[jax.ShapeDtypeStruct]:
        """Return the abstract buffers of an image from the host, in some layers: without copies of heads, by token."""
        kv = dataclasses.replace(self.kv, heads=self.kv.heads // self.devices.copies)
        spec = self.devices.by_token(tokens)
        return [self.devices.abstract(buffer, spec) for buffer in kv.stored(layers, 2, tokens)]

    def pools(self, layers: int) -> list[list[jax.ShapeDtypeStruct]]:
        """Return abstract K and V of some layers that have pages."""
        return [[self.pool] * 2] * layers

    def memory(self, layer: int) -> list[jax.ShapeDtypeStruct]:
        """Return what a layer keeps of tokens, abstract: K and V of the pool, or its states [slots, ...]."""
        kind = self.config.text.kind_of(layer)
        if kind.keeps_kv:
            return [self.pool] * 2
        arrays = (((self.num_states, *one.shape), one.dtype or self.dtype) for one in kind.states)
        return [self.devices.abstract(jax.ShapeDtypeStruct(*array), SECOND) for array in arrays]

    @property
    def states(self) -> list[list[jax.ShapeDtypeStruct]]:
        """Abstract states of the layers that have some."""
        text = self.config.text
        return [self.memory(i) for i in range(text.num_layers) if not text.kind_of(i).keeps_kv]

    def state_parts(self, parts: slice) -> tuple[tuple[int, ...], ...]:
        """Return, for some parts of a cache entry, the layers whose states each holds."""
        return self.config.text.state_layers[parts]

    @property
    def links_kv(self) -> bool:
        """True if KV of images can be linked. In models with states it needs these, in slots of snapshots."""
        is_linked = self.kv.codec is None or self.kv.maps  # coded KV is not linked exactly
        return not self.num_states or bool(is_linked and self.num_snapshots)

    @property
    def depth(self) -> tuple[int, bool]:
        """Number of decoder layers, and whether some have states."""
        return self.config.text.num_layers, bool(self.num_states)

    def pack_runs(self, runs: Runs | None) -> tuple[npt.NDArray[np.int32], np.int32] | None:
        """Pack the runs of a step, see `pack_runs`."""
        return None if runs is None else pack_runs(runs, self.buckets.max_rows, self.num_states, bool(self.kv.maps))

    @property
    def runs(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct] | None:
        """Abstract runs of a step, see `pack_runs`; None if no layer has states."""
        if not self.num_states:
            return None
        rows = self.buckets.max_rows
        return (ints(8, 3 * rows + self.num_states) if self.kv.maps else ints(5, rows + self.num_states)), ints()

    def moves(self, layers: int) -> Moves:
        """Return the abstract moves of some layers."""
        return Moves(ints(self.buckets.max_rows), ints(6, self.moved), ints(layers), ints(layers))

    def constants(self, text: Params | None = None) -> list[Constants]:
        """Return, by layer, the bias and weight that codecs remove from keys before rotation.

        Args:
          text: weights of the decoder. None: abstract ones.
        """
        weights = self.text if text is None else text
        return [self._constants(weights["layers"][i]["self_attn"]) for i in self.config.text.paged_layers]

    def _constants(self, attention: Params) -> Constants:
        if self.kv.codec is None:
            return None, None
        weights = attention["qkv_proj"]
        keys, place = (weights["k_proj"], 0) if "k_proj" in weights else (weights, -2)  # if the product is apart
        bias = keys.get("bias")
        if isinstance(bias, jax.ShapeDtypeStruct):
            bias = jax.ShapeDtypeStruct((self.kv.heads, self.kv.width), bias.dtype)
            bias = self.devices.abstract(bias, FIRST)
        elif bias is not None:
            bias = bias[:, place]
        weight = attention["k_norm"]["scale"] if "k_norm" in attention else None
        if weight is None or not self.config.text.norm_offset:
            return bias, weight
        if isinstance(weight, jax.ShapeDtypeStruct):
            return bias, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=weight.sharding)
        return bias, weight.astype(jnp.float32) + 1  # what normed keys are multiplied by

    def _work_config(self, rows: int, decode: bool = False, pages: int | None = None) -> kernels.WorkConfig:
        """Return the configuration of the attention of `rows` rows. When decoding, each row is a request.

        Args:
          pages: largest number of pages of a request, none shared. None: `max_pages`, which requests may share.
        """
        text, count = self.config.text, self.devices.count
        q = jax.ShapeDtypeStruct((rows, text.num_heads // count, text.head_dim), self.dtype)
        return kernels.work_config(
            rows, min(rows, self.buckets.max_sequences), pages or self.max_pages, q, self.kv.heads // count,
            decode=decode, shared=pages is None, implementation=self.implementation,
        )  # fmt: skip

    # Sizes of the programs that link images.

    def linked(self, size: int) -> tuple[int, ...]:
        """Return the numbers of images of `size` tokens that one program can link, the largest first."""
        return tuple(count for count in LINKED if count == 1 or count * size <= LINKED_TOKENS)

    def split_links(self, size: int, number: int) -> list[int]:
        """Return the number of images per program to link `number` images of `size` tokens."""
        counts = []
        for count in self.linked(size):
            counts += [count] * (number // count)
            number %= count
        return counts

    def split_recalls(self, lengths: abc.Iterable[int]) -> list[int]:
        """Return the number of tokens per program to link images of these lengths from the device tier."""
        tokens = sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)
        return cover(tokens, self.recall_buckets)


def _link_groups(paged: tuple[int, ...], layers: int) -> tuple[LinkGroup, ...]:
    """Return the groups of `layers` layers, of which `paged` keep KV. Each group ends with one of these."""
    size, groups, first = -(-len(paged) // LINK_GROUPS), [], 0
    for begin in range(0, len(paged), size):
        own = paged[begin : begin + size]
        stop = layers if begin + size >= len(paged) else own[-1] + 1
        groups.append(LinkGroup(slice(first, stop), own, slice(begin, begin + len(own))))
        first = stop
    return tuple(groups)


def abstract(tree: Any) -> Any:
    """Return a tree of abstract arrays like those of a tree."""
    return jax.tree.map(_abstract, tree)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding if isinstance(sharding, NamedSharding) else None
    )


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Return an abstract int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


Key = tuple[Any, ...]  # a program's name and its sizes

# Names of the programs in users' disk caches.
_ON_DISK = {
    "pool": "<lambda>", "encoder_rows": "<lambda>", "decode_slots": "empty_decode_state", "copy": "_copy", "slice":
    "<lambda>", "layers": "block", "window": "<unnamed function>", "score_rows": "score", "choose": "chosen", "narrow":
    "narrowed", "take": "<lambda>", "keep_rows": "keep",
}  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """The programs that requests can need besides those of prefill, decoding, sampling and scoring.

    Attributes:
      buckets: bucket sizes of batches.
      linking: True if images are linked.
      shrinking: layers that fewer tokens leave than enter, besides the last one. Any number may leave, because all
        tokens of a chunk that ends inside an image may be dropped early.
      selecting: policy that selects tokens on the device, or None.
      shifting: True if linked KV is shifted.
    """

    buckets: BucketSizes
    linking: bool = False
    shrinking: Collection[int] = ()
    selecting: SelectingPolicy | None = None
    shifting: bool = False

    @classmethod
    def of(cls, policy: Policy, shapes: Shapes) -> Demand:
        """Return the demand of requests under a policy."""
        text = shapes.config.text
        layers = text.num_layers
        image = ImageRef("", (1, 200, 200), 10_000, _no_patches)
        layout = make_layout(np.zeros(10_001, np.int32), [0], [image], 2, ["approximate"])
        plan = policy.plan(layout, layers)
        rows = list(plan.rows(layers))
        selecting = policy if isinstance(policy, SelectingPolicy) else None
        if selecting is not None:
            for layer, kept in enumerate(selecting.keep(layout, layers), selecting.check_layer + 1):
                rows[layer] += kept
        shrinking = {layer for layer in range(layers - 1) if rows[layer + 1] < rows[layer]}
        return cls(shapes.buckets, policy.links and shapes.links_kv, shrinking, selecting, plan.shift)


@dataclass(frozen=True)
class Repeat:
    """The programs that repeated requests need and may not have needed at first.

    Attributes:
      demand: demand with the buckets of their chunks and of the rows with logits.
      linked: (padded tokens of an image, images linked together).
      recalled: numbers of tokens linked together from the device tier.
      copied: numbers of pages copied together.
    """

    demand: Demand
    linked: Collection[tuple[int, int]]
    recalled: Collection[int]
    copied: Collection[int]


def _no_patches() -> Patches:
    raise AssertionError("the patches of a placeholder image must not be read: it only sizes the compiled programs")


@dataclass(frozen=True)
class Program[R](ABC):
    """A program that returns R, and the key of its compiled code.

    Attributes:
      name: name in logs and statistics.
      follows_rows: True if its sizes depend on the tokens of a chunk. A repeated request, whose images are cached, has
        fewer tokens.
    """

    name: ClassVar[str]
    follows_rows: ClassVar[bool] = False

    @property
    def donates(self) -> tuple[int, ...]:
        """Indices of the arguments that are updated in place."""
        return ()

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        """Return the programs of this class that requests can need. By default, the single program without sizes."""
        return [cls()]

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        """Return the programs of this class that repeated requests can need and may not have compiled before."""
        return cls.family(shapes, repeat.demand) if cls.follows_rows else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        """Return the arguments as trees of abstract arrays."""
        return ()

    @abstractmethod
    def compute(self, shapes: Shapes, *arguments: Any, **_: Any) -> R:
        """Compute the result. JAX traces this method."""

    @property
    def gives(self) -> Any:
        """Placement of the results on several devices: a prefix of their tree."""
        return WHOLE

    def function(self, shapes: Shapes) -> Callable[..., R]:
        """Return `compute` for these shapes, under the name of the compiled program."""
        function = functools.partial(self.compute, shapes)
        vars(function)["__name__"] = _ON_DISK.get(self.name, self.name)
        return function

    def jitted(self, shapes: Shapes) -> jax.stages.Wrapped:
        """Return `function` jitted, with donated arguments and the placement of results."""
        devices = shapes.devices
        how = {} if devices.mesh is None else {"out_shardings": devices.shardings(self.gives)}
        return jax.jit(self.function(shapes), donate_argnums=self.donates, **how)

    def lowered(self, shapes: Shapes) -> jax.stages.Lowered:
        """Lower the program for `arguments`. Arguments without a placement are replicated on several devices."""
        with split.over(shapes.devices.mesh):
            return self.jitted(shapes).lower(*shapes.devices.placed(self.arguments(shapes)))

    @property
    def key(self) -> Key:
        """Name and sizes, as statistics report them."""
        return self.name, *(getattr(self, field.name) for field in dataclasses.fields(self))

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.key[1:] if type(size) is int or size in FIXED)
        return f"{self.name}({sizes})" if sizes else self.name
