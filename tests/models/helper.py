"""Runs the modules without the engine: loads a checkpoint, lays out prompts, loops over the layers."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from vlcache_jax.models import ModelConfig, Rows, abstract_model, bind, decoder, load_config
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.decoder import embed
from vlcache_jax.models.layer_kinds import BLOCK, Runs, TokenStates
from vlcache_jax.models.model import LayerGraphs, layer_graphs
from vlcache_jax.models.params import Parameter, Part, library_name, parameters, pieces
from vlcache_jax.models.registry import FAMILIES
from vlcache_jax.models.rope import mrope_positions
from vlcache_jax.testing import TOKEN_IDS

# By layer, K and V or the states. Arrays between the steps are numpy's: slicing a jax array would compile a program for
# each shape.
Pool = list[list[np.ndarray]]

STATES = 5  # slots of states
BLOCKS = 24  # of a step's runs, so that steps of different prompts compile once

# The settings of the image processors; a byte's value is made as the library makes it.
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MEAN_STD = {
    "qwen2_vl": _CLIP,
    "qwen2_5_vl": _CLIP,
    "qwen3_vl": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))),
}


@dataclasses.dataclass(frozen=True)
class Model:
    config: ModelConfig
    graph: Any
    layer_graphs: LayerGraphs  # few, so that a step compiles once
    params: dict[str, Any]
    dtype: Any


def from_tensors(parameter: Parameter, *tensors: np.ndarray) -> np.ndarray:
    """The parameter of the stored tensors of its parts."""
    made = [from_tensor(part, tensor) for part, tensor in zip(parameter.parts, tensors, strict=True)]
    if len(made) == 1:
        return made[0].reshape(parameter.shape)
    # Queries, keys, values of a KV head stand together; of gate and up, one follows the other.
    *others, _, width = parameter.shape
    return np.concatenate([one.reshape(*others, -1, width) for one in made], axis=-2)


def from_tensor(part: Part, tensor: np.ndarray) -> np.ndarray:
    """A part of a parameter, of its stored tensor."""
    if part.is_transposed:
        return tensor.swapaxes(1, 2)
    return tensor.reshape(len(tensor), -1).T if part.is_kernel else tensor


@functools.cache
def load(directory: pathlib.Path, dtype: str = "float32") -> Model:
    """A checkpoint as the nested dict that the modules take; every tensor must be used, and once."""
    config = load_config(directory)
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= {library_name(name): tensor for name, tensor in load_file(file).items()}
    divide(config, tensors)
    params: dict[str, Any] = {}
    for parameter in parameters(config):
        node = params
        for key in parameter.path[:-1]:
            node = node.setdefault(key, {})
        found = [tensors.pop(part.tensor) for part in parameter.parts]
        if [tensor.shape for tensor in found] != [part.tensor_shape for part in parameter.parts]:
            parameter = parameter.transposed()
        value = from_tensors(parameter, *found)
        assert value.shape == parameter.shape
        node[parameter.path[-1]] = jax.device_put(value.astype(parameter.dtype_in(jnp.dtype(dtype))))
    assert not tensors
    model = abstract_model(config, jnp.dtype(dtype))
    return Model(config, nnx.graphdef(model), layer_graphs(model), params, jnp.dtype(dtype))


def divide(config: ModelConfig, tensors: dict[str, np.ndarray]) -> None:
    """Replaces each tensor of queries, keys and values by three."""
    for module, outputs in pieces(config).items():
        for name in [name for name in tensors if f".{module}." in name]:
            parts = np.split(tensors.pop(name), np.cumsum(list(outputs.values()))[:-1])
            folder = module.partition(".")[0]
            tensors |= {name.replace(module, f"{folder}.{own}"): part for own, part in zip(outputs, parts, strict=True)}


def patches(config: ModelConfig, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """uint8 [P, C, patch * patch] in block order, and the grid; the image's sides are multiples of patch * merge."""
    patch, merge = config.vision.patch_size, config.vision.merge_size
    h, w = image.shape[0] // patch, image.shape[1] // patch
    x = image.reshape(h // merge, merge, patch, w // merge, merge, patch, 3)
    return x.transpose(0, 3, 1, 4, 6, 2, 5).reshape(h * w, 3, patch * patch), (1, h, w)


def encode(model: Model, images: Sequence[np.ndarray], num_patches: int) -> np.ndarray:
    """The images packed in one call and padded to `num_patches`: [1 + J, tokens, M], padding cut off."""
    config = model.config
    parts, grids = zip(*(patches(config, image) for image in images), strict=True)
    pixels = np.concatenate(parts)
    # Garbage in the padding must not matter.
    padding = np.full((num_patches - len(pixels), *pixels.shape[1:]), 201, np.uint8)
    tables = FAMILIES[config.model_type].encoder_tables(config.vision, grids, num_patches)
    mean, std = np.array(MEAN_STD[config.model_type], np.float32)[:, :, None]
    normalization = ((np.arange(256) / 255).astype(np.float32) - mean) / std
    rows = _encode(model.graph, model.params, np.concatenate([pixels, padding]), normalization, tables)
    return np.asarray(rows).astype(np.float32)[:, : len(pixels) // config.vision.merge_size**2]


@functools.partial(jax.jit, static_argnames="graph")
def _encode(graph: Any, params: Any, pixels: jax.Array, normalization: jax.Array, tables: Any) -> jax.Array:
    return bind(graph, params).visual(pixels, normalization, tables)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids with images in place, merged grids and positions."""

    token_ids: np.ndarray
    grids: tuple[tuple[int, int], ...]
    positions: np.ndarray
    delta: int


def prompt(seed: int, parts: Sequence[int | tuple[int, int]]) -> Prompt:
    """Numbers stand for that many random text tokens, pairs for an image of that merged grid in its vision tokens."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    starts, grids = [], []
    for part in parts:
        if isinstance(part, int):
            ids.extend(rng.integers(0, 256, part).tolist())
        else:
            starts.append(len(ids) + 1)
            grids.append(part)
            image = [TOKEN_IDS["<|image_pad|>"]] * (part[0] * part[1])
            ids.extend([TOKEN_IDS["<|vision_start|>"], *image, TOKEN_IDS["<|vision_end|>"]])
    positions, delta = mrope_positions(len(ids), starts, grids)
    return Prompt(np.array(ids), tuple(grids), positions, delta)


def rows_of(prompt: Prompt, *, base: int = 0, first_encoder_row: int = 0) -> Rows:
    """The rows of a full prefill into the slots from `base` on."""
    n = len(prompt.token_ids)
    slot = np.arange(base, base + n, dtype=np.int32)
    is_image = prompt.token_ids == TOKEN_IDS["<|image_pad|>"]
    encoder_row = np.cumsum(is_image) - 1 + first_encoder_row
    source = np.where(is_image, -1 - encoder_row, prompt.token_ids).astype(np.int32)
    return Rows(slot, prompt.positions, np.full(n, base, np.int32), slot + 1, source)


def padding_rows(count: int, num_slots: int) -> Rows:
    zeros = np.zeros(count, np.int32)
    slot = np.arange(num_slots, num_slots + count, dtype=np.int32)
    return Rows(slot, np.zeros((3, count), np.int32), zeros, zeros, zeros)


def join(*parts: Rows) -> Rows:
    return Rows(*(np.concatenate(fields, axis=-1) for fields in zip(*parts, strict=True)))


def take(rows: Rows, index: Any) -> Rows:
    return Rows(*(field[..., index] for field in rows))


def empty_pool(model: Model, num_slots: int, fill: float = 0.0, states: int = STATES) -> Pool:
    """What all layers keep. The first of the slots of states is zero."""
    text = model.config.text
    pool = []
    for kind in map(text.kind_of, range(text.num_layers)):
        half = (num_slots, text.num_kv_heads, text.head_dim), model.dtype
        arrays = [((states, *one.shape), one.dtype or model.dtype) for one in kind.states] or [half, half]
        pool.append([np.full(shape, fill, dtype) for shape, dtype in arrays])
        for state in pool[-1] if kind.states else ():
            state[0] = 0
    return pool


def state_layers(text: TextConfig) -> tuple[int, ...]:
    """The layers that keep a state of each sequence."""
    return tuple(layer for layer in range(text.num_layers) if text.kind_of(layer).states)


def kept_by(model: Model, pool: Pool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """K and V of all layers that have them."""
    k, v = zip(*(pool[i] for i in model.config.text.paged_layers), strict=True)
    return list(k), list(v)


def runs_of(
    model: Model,
    *lengths: Sequence[int],
    slots: Sequence[int] = (1, 2, 3),
    done: Sequence[int] = (0, 0, 0),
    order: np.ndarray | None = None,
    size: int | None = None,
) -> Runs | None:
    """The runs of a step, None for a model without states.

    Args:
      lengths: of each sequence, the numbers of tokens of its blocks.
      slots: slot of each sequence's states.
      done: whether it has tokens before these.
      order: index of each row in the order of the sequences; None: the rows have this order.
      size: number of rows, of which the last ones are padding.
    """
    if not model.config.text.has_states:
        return None
    found, first = [], 0
    for own, slot, before in zip(lengths, slots, done, strict=False):
        for i, length in enumerate(own):
            found.append((first, length, slot if before or i else 0, slot))
            first += length
    start, length, source, target = np.array(found, np.int32).T
    place = (np.arange(first) if order is None else np.asarray(order)).astype(np.int32)
    return padded_runs(Runs(place, start, length, source, target, len(found)), size or first)


def padded_runs(runs: Runs, size: int) -> Runs:
    """The runs of a step of `size` rows."""
    place = np.arange(size, dtype=np.int32)
    place[: len(runs.place)] = runs.place
    start, length, source, target = (np.pad(field, (0, BLOCKS - len(field))) for field in runs[1:5])
    return Runs(place, start, length, source, target, np.int32(runs.count))


def blocks_of(prompt: Prompt) -> list[int]:
    """The numbers of tokens of the prompt's blocks, as the engine cuts them."""
    images = np.diff(np.pad(prompt.token_ids == TOKEN_IDS["<|image_pad|>"], 1).astype(int))
    ends = {*np.flatnonzero(images < 0).tolist(), *range(BLOCK, len(prompt.token_ids), BLOCK)}
    cuts = sorted({0, *ends, len(prompt.token_ids) - 1, len(prompt.token_ids)})
    return np.diff(cuts).tolist()


def forward(
    model: Model,
    rows: Rows,
    encoder_rows: np.ndarray,
    pool: Pool,
    bounds: Sequence[int] | None = None,
    *,
    runs: Runs | TokenStates | None = None,
    routes: Mapping[int, np.ndarray] | None = None,
    hidden: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, Pool, list[np.ndarray]]:
    """All layers: float32 logits of the last bound's rows, the pool, and the raw K of each layer that has some.

    `bounds[i]` rows enter layer i, and the last bound's rows get logits; by default all rows go all the way.
    `routes[i]` are the experts that rows pass in layer i; by default the router's choice. `hidden` receives the output
    of each layer.
    """
    bounds = bounds or (len(rows.slot),) * (model.config.text.num_layers + 1)
    layers = model.params["language_model"]["layers"]
    x, deepstack = map(np.asarray, _embed(model.graph, model.params, encoder_rows.astype(model.dtype), rows.source))
    new_pool, new_kv = [], []
    for i, memory in enumerate(pool):
        n, keep = bounds[i], bounds[i + 1]
        feature = deepstack[i, :n] if i < len(deepstack) else None
        run = layer(model, layers[i]) if routes is None or i not in routes else pinned(model, layers[i], routes[i])
        x, memory, raw = run(x, list(memory), take(rows, slice(n)), feature, None, runs, keep=keep)
        new_pool.append([np.asarray(array) for array in memory])
        if raw is not None:
            new_kv.append(np.asarray(raw[0], np.float32))
        if hidden is not None:
            hidden.append(np.asarray(x, np.float32))
    logits = _logits(model.graph, model.params, x)
    return np.asarray(logits), new_pool, new_kv


@functools.partial(jax.jit, static_argnames="graph")
def _embed(graph: Any, params: Any, encoder_rows: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array]:
    return embed(bind(graph, params).language_model.embed_tokens, encoder_rows, source)


def layer(model: Model, params: Any) -> Any:
    """A layer of these parameters, to be called."""
    return functools.partial(_layer, model.layer_graphs[jax.tree.structure(params)], params)


def pinned(model: Model, params: Any, route: np.ndarray) -> Any:
    """The same of a layer whose rows pass the experts of `route`, [N, k]."""

    def pin(logits: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
        probability = jnp.take_along_axis(jax.nn.softmax(logits.astype(jnp.float32)), route, axis=1)
        return (probability / probability.sum(1, keepdims=True)).astype(logits.dtype), jnp.asarray(route)

    def run(*args: Any, keep: int) -> Any:
        with mock.patch.object(decoder, "route", pin):
            graph = model.layer_graphs[jax.tree.structure(params)]
            return jax.jit(functools.partial(bind(graph, params), keep=keep, return_kv=True))(*args)

    return run


@functools.partial(jax.jit, static_argnames=("graph", "keep"))
def _layer(graph: Any, params: Any, *args: Any, keep: int) -> Any:
    return bind(graph, params)(*args, keep=keep, return_kv=True)


@functools.partial(jax.jit, static_argnames="graph")
def _logits(graph: Any, params: Any, x: jax.Array) -> jax.Array:
    model = bind(graph, params)
    head = model.lm_head if hasattr(model, "lm_head") else model.language_model.embed_tokens
    return head.scores(model.language_model.norm(x))
