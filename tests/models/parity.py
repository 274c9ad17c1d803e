"""One prompt with images per configuration, run through the library's model and through ours."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.models import helper
from vlcache_jax.testing import TOKEN_IDS

# Text before, between and after three images that are not square; the last two are side by side.
PARTS = (10, (3, 4), 5, (5, 3), (2, 7), 7)
NUM_PATCHES = 4 * sum(h * w for h, w in ((3, 4), (5, 3), (2, 7)))


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """What the library's model computes, as float32 arrays; one K, V entry per layer that has them.

    `hidden` are the outputs of all layers, and `states` the states of those that have some, in our layout. `routes` are
    the experts of each row [N, k] in layers that have them.
    """

    prompt: helper.Prompt
    images: list[np.ndarray]
    encoder_rows: np.ndarray
    raw_k: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    logits: np.ndarray
    routes: dict[int, np.ndarray]
    hidden: list[np.ndarray]
    states: list[list[np.ndarray]]


@functools.cache
def reference(
    oracle: Any, directory: pathlib.Path, textured_image: Callable[..., np.ndarray], pinned: Reference | None = None
) -> Reference:
    """`pinned`: rows pass the experts that they pass there."""
    import torch
    from transformers import AutoImageProcessor

    prompt = helper.prompt(3, PARTS)
    vision = oracle.config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    images = [textured_image(h * side, w * side, seed) for seed, (h, w) in enumerate(prompt.grids)]
    pixels = AutoImageProcessor.from_pretrained(directory, backend="pil")(images, return_tensors="pt")
    assert pixels["image_grid_thw"].tolist() == [[1, 2 * h, 2 * w] for h, w in prompt.grids]

    raw_k, hidden, hooks, routes = [], [], [], {}

    def route(layer: int, output: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        scores, weights, experts = output
        if pinned is not None:
            experts = torch.tensor(pinned.routes[layer], dtype=experts.dtype)
            chosen = scores.softmax(-1, dtype=torch.float32).gather(1, experts)
            weights = (chosen / chosen.sum(-1, keepdim=True)).to(weights.dtype)
        routes[layer] = experts.numpy()
        return scores, weights, experts

    for i, layer in enumerate(oracle.model.language_model.layers):
        if hasattr(layer.mlp, "experts"):
            hooks.append(layer.mlp.gate.register_forward_hook(lambda *args, i=i: route(i, args[2])))
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn
            projection = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
            hooks.append(projection.register_forward_hook(lambda *args: raw_k.append(args[2])))
    # DeepStack features are added between layers.
    model = oracle.model.language_model
    for module in (*model.layers[1:], model.norm):
        hooks.append(module.register_forward_pre_hook(lambda _, args: hidden.append(args[0])))
    ids = torch.tensor(prompt.token_ids)[None]
    oracle.model.rope_deltas = None
    with torch.no_grad():
        features = oracle.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"])
        out = oracle(
            input_ids=ids, mm_token_type_ids=(ids == TOKEN_IDS["<|image_pad|>"]).int(), use_cache=True, **pixels
        )
    for hook in hooks:
        hook.remove()
    assert int(oracle.model.rope_deltas) == prompt.delta

    def array(tensor: Any) -> np.ndarray:
        return tensor.float().numpy()

    rows = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
    kept = out.past_key_values.layers
    cache = [layer for layer in kept if not hasattr(layer, "recurrent_states")]
    text = oracle.config.text_config
    num_tokens = len(prompt.token_ids)
    return Reference(
        prompt=prompt,
        images=images,
        encoder_rows=np.stack([array(torch.cat(feature)) for feature in rows]),
        raw_k=[array(k).reshape(num_tokens, cache[0].keys.shape[1], -1) for k in raw_k],
        k=[array(layer.keys[0].transpose(0, 1)) for layer in cache],
        v=[array(layer.values[0].transpose(0, 1)) for layer in cache],
        logits=array(out.logits[0]),
        routes=routes,
        hidden=[array(x[0]) for x in hidden],
        states=[states_of(text, layer) for layer in kept if hasattr(layer, "recurrent_states")],
    )


def states_of(text: Any, layer: Any) -> list[np.ndarray]:
    """The states of the library's layer in our layout, by key head: the convolution's last inputs, and the rule's."""
    heads, width = text.linear_num_key_heads, text.linear_key_head_dim
    inputs = layer.conv_states[0][0].float().numpy().T[1 - text.linear_conv_kernel_dim :]
    parts = np.split(inputs, [heads * width, 2 * heads * width], axis=1)
    tail = np.concatenate([part.reshape(len(part), heads, -1) for part in parts], axis=2).swapaxes(0, 1)
    rule = layer.recurrent_states[0][0].float().numpy()
    return [tail, rule.reshape(heads, -1, *rule.shape[1:])]


def difference(a: Any, b: Any) -> float:
    """Greatest absolute difference of two arrays, or of two lists of arrays."""
    if isinstance(a, list):
        return max(difference(x, y) for x, y in zip(a, b, strict=True))
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    return float(np.abs(a - b).max())


def relative(a: list[Any], b: list[Any], scale: float) -> float:
    """Greatest difference of two lists of arrays, as if the greatest value of each one of `b` were at most `scale`."""
    return max(difference(x, y) / max(1.0, float(np.abs(y).max()) / scale) for x, y in zip(a, b, strict=True))
