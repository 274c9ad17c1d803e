"""Transformers' models, run layer by layer, with images linked from other runs.

At the tokens of a linked image that a layer does not compute, it uses what another run kept there: keys before rotation
and values in a layer of full attention, the inputs of the convolution and of the gated delta rule in a layer of linear
attention. With these inputs, the rule changes a state S to A S + B, where A and B belong to the image alone. So this is
the reference for linking an image by its map, which takes one product instead.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn import functional
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

Kept = Mapping[str, torch.Tensor]  # arrays of a layer, with one entry for each token
Rows = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """Tokens of a prompt and its answer.

    Attributes:
      ids: Token ids `[n]`.
      answer: Number of tokens at the end that are the answer.
      spans: Tokens of each image.
      grids: Patch grid of each image.
      encoded: Encoder output of each image: the rows that replace tokens, then the features of DeepStack.
    """

    ids: list[int]
    answer: int
    spans: tuple[slice, ...]
    grids: torch.Tensor
    encoded: tuple[tuple[torch.Tensor, ...], ...]


@dataclasses.dataclass(frozen=True)
class MapCode:
    """A stored form of an image's map S -> A S + B.

    Attributes:
      bits: 32 for float32, 16 for bfloat16, 8 for integers with a scale for each row.
      least_norm: A head's A counts as zero if its largest singular value is smaller.
    """

    bits: int = 32
    least_norm: float = 0.0

    def applied(self, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the state after an image `[heads, dk, dv]`, from its map and the state before it."""
        is_kept = torch.linalg.matrix_norm(a, ord=2) >= self.least_norm
        return (self._stored(a) * is_kept[:, None, None]) @ state + self._stored(b)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
            return (x / scale).round() * scale
        return x.to({16: torch.bfloat16, 32: torch.float32}[self.bits]).float()


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """An image that is linked from another run.

    Attributes:
      kept: For each layer, what the other run kept at the tokens of the image.
      computed: Whether a layer computes a token of the image `[layers, T]`; later layers compute no further tokens.
      shift: Kinds of layers in which linked values, and keys of full attention, move by the mean difference that the
        computed tokens show: "full", "linear".
      code: Form of the image's maps. None: the inputs of the rule are used, not maps.
    """

    kept: Sequence[Kept]
    computed: Rows
    shift: tuple[str, ...] = ()
    code: MapCode | None = None

    def __post_init__(self) -> None:
        if (self.computed[1:] & ~self.computed[:-1]).any():
            raise ValueError("computed must have no token in a layer that the layer before does not compute")


class Run(NamedTuple):
    """Results of a prompt: logits before each token of the answer `[answer, vocabulary]`, and what layers kept."""

    logits: torch.Tensor
    kept: list[Kept]


class LayerWise:
    """A model of Qwen3-VL or Qwen3.5 in float32.

    Attributes:
      directory: Its folder.
      config: Configuration of its decoder.
      processor: Image processor.
      image_token: Token that stands for a row of encoder output.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        self.directory, self.config = directory, model.config.text_config
        self._model, self._text, self._head = model.model, model.model.language_model, model.lm_head
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self.processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        [self.image_token] = self._tokenizer.encode("<|image_pad|>")
        self._encoded: dict[bytes, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer: "full" or "linear"."""
        return tuple("full" if hasattr(layer, "self_attn") else "linear" for layer in self._text.layers)

    @torch.no_grad()
    def prompt(self, messages: list[dict[str, Any]], answer: str | None = None) -> Prompt:
        """Return the tokens of a conversation with images, and of an answer; None if only the prompt matters."""
        parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
        images = [self._encode(part["image"]) for part in parts if part["type"] == "image"]
        text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        pieces = text.split("<|image_pad|>")
        ids = self._tokenizer.encode(pieces[0])
        spans = []
        for (_, (rows, *_)), piece in zip(images, pieces[1:], strict=True):
            spans.append(slice(len(ids), len(ids) + len(rows)))
            ids += [self.image_token] * len(rows) + self._tokenizer.encode(piece)
        said = [] if answer is None else self._tokenizer.encode(answer)
        grids = torch.stack([grid for grid, _ in images])
        return Prompt(ids + said, len(said), tuple(spans), grids, tuple(encoded for _, encoded in images))

    @torch.no_grad()
    def run(self, prompt: Prompt, links: Mapping[int, Link] | None = None) -> Run:
        """Return the results of a prompt.

        Args:
          prompt: The prompt.
          links: Linked images by their number in the prompt; the others are computed.
        """
        ids = torch.tensor([prompt.ids])
        types = torch.eq(ids, self.image_token).int()
        x = self._text.embed_tokens(ids)[0]
        for span, (rows, *_) in zip(prompt.spans, prompt.encoded, strict=True):
            x[span] = rows
        positions, _ = self._model.get_rope_index(ids, types, image_grid_thw=prompt.grids)
        rotation = self._text.rotary_emb(x[None], positions)
        kept = []
        for i, layer in enumerate(self._text.layers):
            linked = [(prompt.spans[k], link, i) for k, link in (links or {}).items()]
            mixer = self._attention if self.kinds[i] == "full" else self._linear_attention
            mixed, own = mixer(layer, layer.input_layernorm(x), rotation, linked)
            x = x + mixed
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            for span, (_, *features) in zip(prompt.spans, prompt.encoded, strict=True):
                if i < len(features):
                    x[span] += features[i]
            kept.append(own)
        last = x[len(x) - prompt.answer - 1 : -1] if prompt.answer else x[-1:]
        return Run(self._head(self._text.norm(last)), kept)

    def _encode(self, image: bytes) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the patch grid of an image and its encoder output."""
        if image not in self._encoded:
            pixels = self.processor([Image.open(io.BytesIO(image))], return_tensors="pt")
            grid = pixels["image_grid_thw"]
            output = self._model.visual(pixels["pixel_values"], grid_thw=grid)
            features = getattr(output, "deepstack_features", None) or []
            self._encoded[image] = grid[0], (output.pooler_output, *features)
        return self._encoded[image]

    def _attention(
        self, layer: Any, y: torch.Tensor, rotation: Any, linked: Sequence[tuple[slice, Link, int]]
    ) -> tuple[torch.Tensor, Kept]:
        """Return the output of full attention for normed rows `[n, M]`, and what it keeps."""
        attention = layer.self_attn
        heads, width = self.config.num_attention_heads, attention.head_dim
        q, *gate = attention.q_proj(y).view(len(y), heads, -1).split(width, -1)
        q = attention.q_norm(q)
        k = attention.k_norm(attention.k_proj(y).view(len(y), -1, width))
        v = attention.v_proj(y).view(len(y), -1, width)
        kept = {"k": k, "v": v}
        weight = attention.k_norm(torch.ones(width))
        k, v = _linked(kept, linked, "full", moved={"k": functools.partial(moved_keys, weight=weight), "v": torch.add})
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        q, k = rotate(q, k, *rotation)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        if gate:
            out = out * torch.sigmoid(gate[0])
        return attention.o_proj(out.reshape(len(y), -1)), kept

    def _linear_attention(
        self, layer: Any, y: torch.Tensor, _: Any, linked: Sequence[tuple[slice, Link, int]]
    ) -> tuple[torch.Tensor, Kept]:
        """Return the output of linear attention for normed rows `[n, M]`, and what it keeps."""
        attention = layer.linear_attn
        [inputs] = _linked({"inputs": attention.in_proj_qkv(y)}, linked, "linear")
        taps = attention.conv1d.weight
        mixed = functional.conv1d(inputs.T[None], taps, padding=taps.shape[-1] - 1, groups=len(taps))[0]
        mixed = functional.silu(mixed[:, : len(y)].T)
        q, k, v = mixed.split([attention.key_dim, attention.key_dim, attention.value_dim], -1)
        decay = -attention.A_log.exp() * functional.softplus(attention.in_proj_a(y) + attention.dt_bias)
        kept = {"k": k, "v": v, "beta": attention.in_proj_b(y).sigmoid(), "decay": decay}
        k, v, beta, decay = _linked(kept, linked, "linear", moved={"v": torch.add})
        q, k = (x.view(len(y), -1, attention.head_k_dim) for x in (q, k))
        v = v.view(len(y), -1, attention.head_v_dim)
        state = torch.zeros(attention.num_v_heads, attention.head_k_dim, attention.head_v_dim)
        out = torch.zeros_like(v)
        for own, code in _pieces(len(y), linked):
            if code is None:
                out[own], state = _rule(attention, q[own], k[own], v[own], beta[own], decay[own], state)
            else:
                state = code.applied(*_map_of(attention, k[own], v[own], beta[own], decay[own]), state)
        z = attention.in_proj_z(y).reshape(-1, attention.head_v_dim)
        out = attention.norm(out.reshape(-1, attention.head_v_dim), z)
        return attention.out_proj(out.reshape(len(y), -1)), {"inputs": inputs, **kept}

    @torch.no_grad()
    def map_norms(self, kept: Sequence[Kept]) -> dict[int, npt.NDArray[np.float64]]:
        """Return the largest singular value of each value head's A, by linear layer.

        Args:
          kept: For each layer, what a run kept at the tokens of an image.
        """
        norms = {}
        for i in (i for i, kind in enumerate(self.kinds) if kind == "linear"):
            attention, own = self._text.layers[i].linear_attn, kept[i]
            k = own["k"].view(len(own["k"]), -1, attention.head_k_dim)
            v = own["v"].view(len(k), -1, attention.head_v_dim)
            a, _ = _map_of(attention, k, v, own["beta"], own["decay"])
            norms[i] = torch.linalg.matrix_norm(a.double(), ord=2).numpy()
        return norms


def _rule(
    attention: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the gated delta rule `[n, heads, dv]`, and the state after the tokens.

    Args:
      attention: Module of linear attention.
      q, k: `[n, key heads, dk]`.
      v: `[n, heads, dv]`.
      beta, decay: `[n, heads]`.
      state: State before the tokens `[heads, dk, dv]`.
    """
    rule = sys.modules[type(attention).__module__].torch_chunk_gated_delta_rule
    out, after = rule(
        q[None], k[None], v[None], g=decay[None], beta=beta[None],
        initial_state=state[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out[0], after[0]


def _map_of(
    attention: Any, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A `[heads, dk, dk]` and B `[heads, dk, dv]` of tokens, from one scan with wider values; see `_rule`."""
    heads, width = v.shape[1:]
    unit = torch.eye(k.shape[-1]).expand(heads, -1, -1)
    wide = torch.cat([v, torch.zeros(len(v), heads, k.shape[-1])], -1)
    _, after = _rule(attention, k, k, wide, beta, decay, torch.cat([torch.zeros(*unit.shape[:2], width), unit], -1))
    return after[..., width:], after[..., :width]


def _pieces(tokens: int, linked: Sequence[tuple[slice, Link, int]]) -> Iterator[tuple[slice, MapCode | None]]:
    """Yield the tokens in order: those whose rule is computed, and those of maps with their code."""
    first = 0
    for span, link, layer in sorted(linked, key=lambda one: one[0].start):
        left = np.flatnonzero(~link.computed[layer])
        if link.code is None or not len(left):
            continue
        run = slice(span.start + int(left[0]), span.start + int(left[-1]) + 1)
        if run.stop - run.start != len(left):
            raise ValueError(f"tokens of a map must follow each other, got {len(left)} of {run.stop - run.start}")
        yield slice(first, run.start), None
        yield run, link.code
        first = run.stop
    yield slice(first, tokens), None


def image_rows(kept: Sequence[Kept], span: slice) -> list[Kept]:
    """Return what each layer kept at the tokens of an image."""
    return [{name: array[span] for name, array in own.items()} for own in kept]


def _linked(
    new: Kept, linked: Sequence[tuple[slice, Link, int]], kind: str, moved: Mapping[str, Any] | None = None
) -> list[torch.Tensor]:
    """Return the arrays of a layer with those of linked tokens from other runs.

    Args:
      new: Arrays of this run.
      linked: Images: their tokens, their links, and the number of the layer.
      kind: Kind of the layer.
      moved: By name, what adds a mean difference to an array that can be shifted.
    """
    arrays = {name: array.clone() for name, array in new.items()}
    for span, link, layer in linked:
        is_computed = torch.from_numpy(link.computed[layer])
        # In the first layer, computed and linked values are equal but for the convolution.
        shifts = kind in link.shift and layer > 0 and bool(is_computed.any())
        for name, array in arrays.items():
            old = link.kept[layer][name]
            if shifts and moved is not None and name in moved:
                old = moved[name](old, (array[span] - old)[is_computed].mean(0))
            shape = -1, *[1] * (array.ndim - 1)
            array[span] = torch.where(is_computed.view(shape), array[span], old)
    return list(arrays.values())


def moved_keys(keys: torch.Tensor, difference: torch.Tensor, *, weight: torch.Tensor) -> torch.Tensor:
    """Return shifted keys with the lengths that they had, see `vlcache_jax.reuse.shift.length_kept`."""
    after = keys + difference
    had, has = ((x / weight).square().sum(-1, keepdim=True) for x in (keys, after))
    return after * (had / has).sqrt()
