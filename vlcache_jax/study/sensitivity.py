"""Sensitivity of the layers: the gain of each layer from recomputation, for the search of schedules (VLCache, eq. 5).

S_i(r) is the error of the logits relative to a cold run, if the KV of images comes from another prompt in every layer,
and only layer i recomputes the first floor(r T) tokens of each image. Up to layer i, image tokens are computed with the
donor's KV in all layers before. Layer i writes the KV of the resulting hidden states.

The measurement is fast and exact. One run with the donor's KV in all layers returns the hidden states of text tokens
and the computed KV of image tokens of each layer. S_i(r) then needs only the text tokens in layers i and later, for
many ratios at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.models import Rows, rope
from vlcache_jax.reuse.schedule import UNITS
from vlcache_jax.study.probe import Placed, Probe, Trace, Values
from vlcache_jax.study.report import WorkLog
from vlcache_jax.study.search import MAX_LEVEL, LayerScores

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM
    from vlcache_jax.study.accuracy import Protocol
    from vlcache_jax.study.questions import Sample

_CANDIDATES = 32  # ratios that run together
_ROUND = 32  # text tokens are padded to a multiple of this


@dataclass(frozen=True, eq=False)
class ProfileCase:
    """Sample of the profile.

    Attributes:
      formal: the conversation that is answered.
      donors: conversations that fill the cache, with the same images in the same order, in one or in several prompts.
      answer: token ids of the cold run's greedy answer.
    """

    formal: Any
    donors: Sequence[Any]
    answer: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CaseRuns:
    """Runs of a case from which every measurement starts.

    Attributes:
      placed: the formal prompt with the cold answer.
      donor: KV of images from the donors, at their positions in the formal prompt.
      cold: the run without reuse.
      overridden: the run with the donor's KV of images in every layer.
    """

    placed: Placed
    donor: Values
    cold: Trace
    overridden: Trace


def prepare(probe: Probe, case: ProfileCase) -> CaseRuns:
    """Run the donor prompts, the formal prompt, and the formal prompt with the donor's KV of images in every layer.

    Raises:
      ValueError: the images of the prompts differ, or there are none.
    """
    placed = probe.place(case.formal, case.answer)
    if not placed.images:
        raise ValueError("formal prompt of a case must have at least one image, got none")
    others = [probe.place(donor) for donor in case.donors]
    donor = probe.transplant([(other, probe.run(other)) for other in others], placed)
    return CaseRuns(placed, donor, probe.run(placed), probe.run(placed, probe.text_only(placed), donor))


def direct(probe: Probe, runs: CaseRuns, layer: int, level: int) -> float:
    """Return S_i(r) of a case at r = `level` / 500 by a full run, as a reference for tests."""
    write = probe.text_only(runs.placed)
    write[layer] |= probe.first_tokens(runs.placed, lambda tokens: level * tokens // UNITS)
    trace = probe.run(runs.placed, write, runs.donor)
    return squared_error(trace.logits, runs.cold.logits)


def cases_of(llm: LLM, samples: Sequence[Sample], protocol: Protocol, *, max_tokens: int) -> list[ProfileCase]:
    """Return the cases of samples, with answers without reuse and the auxiliary prompts of the protocol as donors.

    Raises:
      ValueError: a sample has no image.
    """
    from vlcache_jax.sampling import SamplingParams

    for sample in samples:
        if not sample.images:
            raise ValueError(f"sample {sample.index} must have at least one image, got none")
    formal = [protocol.formal(samples, i) for i in range(len(samples))]
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    outputs = llm.chat(formal, params, reuse="off")
    donors = [protocol.donor_prompts(samples, i) for i in range(len(samples))]
    return [
        ProfileCase(conversation, prompts, output.outputs[0].token_ids)
        for conversation, prompts, output in zip(formal, donors, outputs, strict=True)
    ]


class Profiler:
    """Fast measurement of S_i(r).

    Args:
      llm: an open engine.
      max_level: largest ratio in units of 1/500. Smaller ones are measured too.

    Raises:
      ValueError: `max_level` is out of range, or the engine uses several devices.
    """

    def __init__(self, llm: LLM, max_level: int = MAX_LEVEL):
        if not 1 <= max_level <= UNITS:
            raise ValueError(f"max_level must be from 1 to {UNITS}, got {max_level}")
        self.probe = Probe(llm)
        self.max_level = max_level
        self._layer = jax.jit(self._text_layer)

    def measure(self, case: ProfileCase) -> npt.NDArray[np.float64]:
        """Return S_i(n / 500) of a case, [L, max_level + 1]."""
        return self.scores(prepare(self.probe, case))

    def scores(self, runs: CaseRuns) -> npt.NDArray[np.float64]:
        """Return S_i(n / 500), [L, max_level + 1], from the runs of a case."""
        probe, placed = self.probe, runs.placed
        lengths = [span.length for span in placed.images]
        counts = [tuple(level * length // UNITS for length in lengths) for level in range(self.max_level + 1)]
        distinct = list(dict.fromkeys(counts))  # small images have few different counts
        base = squared_error(runs.overridden.logits, runs.cold.logits)
        size = len(placed.x)
        masks = np.zeros((len(distinct), size), bool)
        for mask, count in zip(masks, distinct, strict=True):
            for span, tokens in zip(placed.images, count, strict=True):
                mask[span.start : span.start + tokens] = True
        values = np.full((probe.num_layers, len(distinct)), base)
        fresh = [k for k in range(len(distinct)) if any(distinct[k])]
        for layer in range(1, probe.num_layers):  # KV of layer 0 does not depend on the context (P4)
            for first in range(0, len(fresh), _CANDIDATES):
                chosen = fresh[first : first + _CANDIDATES]
                for k, logits in zip(chosen, self._candidates(runs, layer, masks[chosen]), strict=True):
                    values[layer, k] = squared_error(logits, runs.cold.logits)
        where = {count: k for k, count in enumerate(distinct)}
        return values[:, [where[count] for count in counts]]

    def _candidates(self, runs: CaseRuns, layer: int, masks: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
        """Return the logits [R, c, V] if only layer `layer` recomputes the tokens of each mask [R, N]."""
        probe, placed = self.probe, runs.placed
        n, size = len(placed.layout), len(placed.x)
        # Text before the first image does not attend to images: its KV is the same in every run.
        first = placed.images[0].start
        text = np.flatnonzero(~placed.is_image)
        text = text[text >= first]
        rows = np.full(-(-len(text) // _ROUND) * _ROUND, size, np.int32)
        rows[: len(text)] = text
        padded = np.zeros((_CANDIDATES, size), bool)
        padded[: len(masks)] = masks
        position = np.zeros((3, size), np.int32)
        position[:, :n] = placed.layout.positions
        overridden = runs.overridden
        before = np.zeros(size, bool)
        before[:first] = True
        x = jnp.tile(overridden.inputs[layer][np.minimum(rows, size - 1)], (_CANDIDATES, 1))
        nothing = np.zeros_like(padded)
        for i in range(layer, probe.num_layers):
            own, donor = ((part[0][i], part[1][i]) for part in (overridden.values, runs.donor))
            x = self._layer(
                probe.runner.text["layers"][i],
                x,
                own,
                donor,
                padded if i == layer else nothing,
                before,
                rows,
                position,
            )
        wanted = np.searchsorted(text, np.arange(placed.prompt_length - 1, n - 1))
        hidden = x.reshape(_CANDIDATES, len(rows), -1)[: len(masks), wanted]
        return probe.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*hidden.shape[:2], -1)

    def _text_layer(
        self,
        params: Any,
        x: jax.Array,
        own: tuple[jax.Array, jax.Array],
        donor: tuple[jax.Array, jax.Array],
        masks: jax.Array,
        before: jax.Array,
        rows: jax.Array,
        position: jax.Array,
    ) -> jax.Array:
        """Run a layer over the text tokens of all candidates, each with a KV pool of its own.

        Args:
          x: hidden states of the n text tokens of each of R candidates, [R x n, M].
          own, donor: computed KV and the donor's KV of all tokens, keys before rotation, each [N, K, D].
          masks: image tokens with their computed KV, [R, N].
          before: text tokens before the images, [N].
          rows: indices of the n text tokens in the prompt, N for padding.
          position: M-RoPE positions of all tokens, [3, N].

        Returns:
          The hidden states after the layer, [R x n, M].
        """
        probe = self.probe
        config, size, candidates = probe.config.text, position.shape[1], len(masks)
        cos, sin = rope.text_rotation(
            position, config.rope_theta, config.mrope_section, config.mrope_interleaved, x.dtype
        )
        is_own = (masks | before)[:, :, None, None]
        k, v = (
            jnp.where(is_own, mine, other).reshape(candidates * size, *mine.shape[1:])
            for mine, other in (
                (rope.rotate(own[0], cos, sin), rope.rotate(donor[0], cos, sin)),
                (own[1], donor[1]),
            )
        )
        start = (size * jnp.arange(candidates, dtype=jnp.int32))[:, None]
        real = rows < size
        beyond = candidates * size + jnp.arange(candidates * len(rows), dtype=jnp.int32)
        slot = jnp.where(real, start + rows, beyond.reshape(candidates, -1)).reshape(-1)
        end = jnp.where(real, start + rows + 1, 0).reshape(-1)
        begin = jnp.where(real, start, 0).reshape(-1)
        places = jnp.tile(position[:, jnp.minimum(rows, size - 1)], (1, candidates))
        layer = probe.runner.shapes.bind_layer(params)
        x, _, _ = layer(
            x,
            [k, v],
            Rows(slot, places, begin, end, slot),
            keep=len(x),
            implementation=probe.runner.implementation,
        )
        return x


def squared_error(logits: npt.NDArray[np.float32], cold: npt.NDArray[np.float32]) -> float:
    """Return the mean squared difference of logits over positions and vocabulary."""
    return float(np.mean(np.square(logits.astype(np.float64) - cold)))


def profile(
    llm: LLM,
    cases: Sequence[ProfileCase],
    *,
    max_level: int = MAX_LEVEL,
    work: str | os.PathLike[str] | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> LayerScores:
    """Return the scores of a model: S_i(r), averaged over cases.

    Args:
      llm: an open engine.
      cases: samples of equal weight.
      max_level: largest ratio in units of 1/500.
      work: file of finished cases, which a later call resumes; None (default): no file.
      progress: called with the number of finished cases.

    Raises:
      ValueError: there are no cases, or one has no images.
    """
    if not cases:
        raise ValueError("cases must not be empty")
    profiler = Profiler(llm, max_level)
    fingerprint = llm.service.checkpoint.source_digest
    log = WorkLog(work, f"profile {fingerprint} {llm.service.device.runner.dtype} {max_level}")
    total = np.zeros((profiler.probe.num_layers, max_level + 1))
    for number, case in enumerate(cases):
        key = hashlib.sha256(repr((case.formal, case.donors, case.answer)).encode()).hexdigest()
        if (values := log.get(key)) is None:
            values = profiler.measure(case).tolist()
            log.add(key, values)
        total += values
        progress(number + 1)
    model_type = llm.service.device.runner.config.model_type
    return LayerScores(total / len(cases), model_type, fingerprint, len(cases))
