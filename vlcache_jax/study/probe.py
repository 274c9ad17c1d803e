"""Probe: forward passes of single prompts that return all intermediate values, for sensitivities and error analysis.

All tokens of a prompt pass through all layers. For each layer, a mask selects the tokens with their own KV; the others
have the KV of a donor prompt. The probe is slow, and does not use the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.device.buckets import round_up
from vlcache_jax.inputs.layout import ImageSpan, Layout, make_layout
from vlcache_jax.models import Rows, bind, decoder, rope

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM

Values = tuple[jax.Array, jax.Array]  # keys before rotation and values, each [L, N, K, D]


@dataclass(frozen=True, eq=False)
class Placed:
    """Embedded prompt with a continuation.

    Attributes:
      layout: layout of both, n tokens.
      prompt_length: number of tokens before the continuation.
      x: input of the first layer, [N, M]; N is n rounded up to a bucket.
      deepstack: DeepStack features that are added to the outputs of the first J layers, [J, N, M].
    """

    layout: Layout
    prompt_length: int
    x: jax.Array
    deepstack: jax.Array

    @property
    def images(self) -> list[ImageSpan]:
        return self.layout.images

    @property
    def is_image(self) -> npt.NDArray[np.bool_]:
        """Mask of the image tokens, [n]."""
        mask = np.zeros(len(self.layout), bool)
        for span in self.images:
            mask[span.tokens] = True
        return mask


@dataclass(frozen=True, eq=False)
class Trace:
    """Intermediate values of a run of n tokens, padded to N.

    Attributes:
      inputs: hidden states that enter each layer, [L, N, M].
      values: KV that each token computes, also if the run uses that of the donor; see `Values`.
      attended: output of the attention in each layer, [L, N, M].
      logits: logits that predict the continuation's c tokens, float32 [c, V].
    """

    inputs: jax.Array
    values: Values
    attended: jax.Array
    logits: npt.NDArray[np.float32]


class Probe:
    """Dense forward passes with the model of an engine.

    Args:
      llm: an open engine. The probe uses its weights, tokenizer and image processor, but not its cache.

    Raises:
      ValueError: the engine uses several devices, or some layers of its model keep no K,V.
    """

    def __init__(self, llm: LLM):
        if (count := llm.service.device.runner.devices.count) > 1:
            raise ValueError(f"llm must be on one device, got an engine on {count}; use tensor_parallel_size=1")
        llm.service.policy_of("approximate")  # raises for a model whose images cannot be linked
        self._llm = llm
        self.runner = llm.service.device.runner
        self.config = llm.service.device.runner.config
        self._layer = jax.jit(self._through)
        self._stack = jax.jit(lambda *layers: [jnp.stack(part) for part in zip(*layers, strict=True)])
        self._move = jax.jit(_moved)
        self._embed = jax.jit(self._embedded)
        self._project = jax.jit(self._projected)
        self._head = jax.jit(lambda norm, head, x: self.runner.shapes.logits(norm, head, x))

    @property
    def num_layers(self) -> int:
        return self.config.text.num_layers

    def place(self, conversation: Any, continuation: Sequence[int] = ()) -> Placed:
        """Return a conversation with encoded images and the token ids `continuation` after it."""
        llm, runner = self._llm, self.runner
        prompt = llm.service.renderer.from_conversation(conversation)
        [request] = llm.service.preparation.identifier.identify([prompt], None, lookup=False)
        merge_size = self.config.vision.merge_size
        layout = make_layout(request.token_ids, request.starts, request.images, merge_size, moments=request.moments)
        prompt_length = len(layout)
        if len(continuation):
            layout = layout.extended(continuation)
        size = round_up(len(layout), runner.buckets.rows)
        source = np.zeros(size, np.int32)
        source[: len(layout)] = layout.token_ids
        width = self.config.text.hidden_size
        encoded = np.zeros((1 + self.config.vision.num_deepstack, size, width), runner.dtype)
        first = 0
        for span in layout.images:
            patches = span.image.patches
            rows = np.asarray(runner.encode([patches.pixels], [patches.grid]))[:, : span.length]
            encoded[:, first : first + span.length] = rows
            source[span.tokens] = -1 - first - np.arange(span.length)
            first += span.length
        x, deepstack = self._embed(runner.text["embed_tokens"], encoded, source)
        return Placed(layout, prompt_length, x, deepstack)

    def run(self, placed: Placed, write: npt.NDArray[np.bool_] | None = None, donor: Values | None = None) -> Trace:
        """Run all tokens through all layers.

        Args:
          placed: the prompt.
          write: mask of the tokens with their own KV, [L, n]; None (default): all, which is a cold run.
          donor: KV of the other tokens, at their positions in this prompt (`transplant`).

        Returns:
          All intermediate values.
        """
        size, n = len(placed.x), len(placed.layout)
        masks = np.ones((self.num_layers, size), bool)
        if write is not None:
            masks[:, :n] = write
        if donor is None:
            zeros = self._zeros(size)
            donor = (zeros, zeros)
        position = np.zeros((3, size), np.int32)
        position[:, :n] = placed.layout.positions
        weights, x, layers = self.runner.text["layers"], placed.x, []
        for i in range(self.num_layers):  # layers with the same structure share a program
            inputs = x
            x, *found = self._layer(weights[i], np.int32(i), x, placed.deepstack, position, masks, donor, np.int32(n))
            layers.append((inputs, *found))
        inputs, raw_k, v, attended = self._stack(*layers)
        wanted = np.arange(placed.prompt_length - 1, n - 1)
        return Trace(inputs, (raw_k, v), attended, self.logits(np.asarray(x)[wanted]))

    def logits(self, hidden: jax.Array | npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the logits of outputs of the last layer, float32 [N, V] of [N, M]."""
        runner = self.runner
        count = len(hidden)
        size = max(64, 1 << max(0, count - 1).bit_length())
        padded = np.zeros((size, hidden.shape[1]), hidden.dtype)
        padded[:count] = hidden
        logits = self._head(runner.text["norm"], runner.head_weights, padded)
        return np.asarray(logits)[:count]

    def project(self, placed: Placed, trace: Trace, layer: int) -> tuple[jax.Array, ...]:
        """Return (q, k, keys before rotation, v) of all tokens in a layer, q [N, H, D] and the others [N, K, D]."""
        position = np.zeros((3, len(placed.x)), np.int32)
        position[:, : len(placed.layout)] = placed.layout.positions
        return self._project(self.runner.text["layers"][layer], trace.inputs[layer], position)

    def transplant(self, donors: Sequence[tuple[Placed, Trace]], target: Placed) -> Values:
        """Return the donors' KV of images, at the positions of the same images in the target.

        Raises:
          ValueError: the target's images are not those of the donors, in their order.
        """
        images = [(span, trace) for donor, trace in donors for span in donor.images]
        found = [(span.image.key, span.length) for span, _ in images]
        if found != [(span.image.key, span.length) for span in target.images]:
            raise ValueError(f"donors must have the same images as the target in the same order, got {found}")
        k = v = self._zeros(len(target.x))
        for mine, (span, trace) in zip(target.images, images, strict=True):
            source = np.full(len(target.x), -1, np.int32)
            source[mine.tokens] = np.arange(span.start, span.stop)
            k, v = (self._move(whole, part, source) for whole, part in zip((k, v), trace.values, strict=True))
        return k, v

    def text_only(self, placed: Placed) -> npt.NDArray[np.bool_]:
        """Return the mask of text tokens, [L, n], with which all images have the donor's KV in every layer."""
        return np.tile(~placed.is_image, (self.num_layers, 1))

    def first_tokens(self, placed: Placed, count: Callable[[int], int]) -> npt.NDArray[np.bool_]:
        """Return the mask of the first `count(T)` of the T tokens of each image, [n]."""
        mask = np.zeros(len(placed.layout), bool)
        for span in placed.images:
            mask[span.start : span.start + count(span.length)] = True
        return mask

    def _zeros(self, rows: int) -> jax.Array:
        half = self.runner.shapes.kv.half(rows)
        return jnp.zeros((self.num_layers, *half.shape), half.dtype)

    # Programs.

    def _embedded(self, table: Any, encoded: jax.Array, source: jax.Array) -> Any:
        return decoder.embed(bind(self.runner.shapes.table_graph, table), encoded, source)

    def _projected(self, params: Any, x: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
        layer, nowhere = self.runner.shapes.bind_layer(params), jnp.zeros(len(x), jnp.int32)
        rows = Rows(nowhere, position, nowhere, nowhere, nowhere)
        projected: tuple[jax.Array, ...] = layer.self_attn.project(layer.input_layernorm(x), rows, keep=len(x))
        return projected

    def _through(
        self,
        params: Any,
        i: jax.Array,
        x: jax.Array,
        deepstack: jax.Array,
        position: jax.Array,
        write: jax.Array,
        donor: Values,
        n: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Run layer `i` and return (output, keys before rotation, values, output of the attention)."""
        config, size = self.config.text, len(x)
        index = jnp.arange(size, dtype=jnp.int32)
        cos, sin = rope.text_rotation(
            position, config.rope_theta, config.mrope_section, config.mrope_interleaved, x.dtype
        )
        layer = self.runner.shapes.bind_layer(params)
        # Tokens with the donor's KV do not write their own: their slots are outside of the pool.
        slot = jnp.where(write[i] & (index < n), index, size + index)
        rows = Rows(slot, position, jnp.zeros_like(index), jnp.where(index < n, index + 1, 0), index)
        k, v = rope.rotate(donor[0][i], cos, sin), donor[1][i]
        out, _, _, new_kv = layer.self_attn(
            layer.input_layernorm(x), k, v, rows, keep=size, return_kv=True, implementation=self.runner.implementation
        )
        assert new_kv is not None
        raw_k, new_v = new_kv
        x = layer.transform(x, out, index < n, implementation=self.runner.implementation)
        if len(deepstack):
            x = x + jnp.where(i < len(deepstack), deepstack[i], 0)
        return x, raw_k, new_v, out


def _moved(whole: jax.Array, part: jax.Array, source: jax.Array) -> jax.Array:
    """Return `whole`, [L, N, ...], with token `source[i]` of `part` at i; -1 leaves the token unchanged."""
    return jnp.where((source >= 0)[:, None, None], part[:, source], whole)
