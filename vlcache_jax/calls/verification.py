"""Verification: comparison of outputs with those of a cold run."""

from __future__ import annotations

import dataclasses

import numpy as np

from vlcache_jax.engine.engine import Loop
from vlcache_jax.engine.request import Generation, Planned
from vlcache_jax.inputs.layout import ImageRef, ImageSpan
from vlcache_jax.outputs import Verification
from vlcache_jax.preparation.sequences import SequenceBuilder
from vlcache_jax.reuse.policies import full_prefill


def verify(
    loop: Loop, builder: SequenceBuilder, group: list[Planned], answers: list[Generation]
) -> list[Verification | None]:
    """Run requests again without the cache, and both ways with the outputs' tokens forced.

    Returns:
      The comparison of each output; None if there is no output, or if it cannot be compared, which becomes the error of
      the output.
    """
    compared: list[Verification | None] = [None] * len(group)
    good = [
        i
        for i, answer in enumerate(answers)
        if answer.end.is_finished and answer.end.error is None and answer.token_ids
    ]
    for i, found in zip(
        good, _verify(loop, builder, [group[i] for i in good], [answers[i] for i in good]), strict=True
    ):
        if isinstance(found, str):
            answers[i].fail(f"the output cannot be verified: {found}")
        else:
            compared[i] = found
    return compared


def _verify(
    loop: Loop, builder: SequenceBuilder, group: list[Planned], answers: list[Generation]
) -> list[Verification | str]:
    """Return the comparison of each output, or the reason why it failed."""
    cold = [_without_cache(planned, loop.engine.runner.config.text.num_layers) for planned in group]
    again = [
        dataclasses.replace(
            answer,
            planned=planned,
            detokenizer=builder.detokenizer(answer.params),
            matcher=None if answer.matcher is None else answer.matcher.fresh(),
            token_ids=[],
            logprobs=[],
            prompt_logprobs=[],
        )
        for planned, answer in zip(cold, answers, strict=True)
    ]
    loop.run(again)
    # If an entry failed to load, its image was computed instead: compare the plan that ran.
    warm = [
        dataclasses.replace(planned, plan=answer.progress.plan, uses=tuple(answer.progress.images))
        for planned, answer in zip(group, answers, strict=True)
    ]
    forced = [
        [
            builder.scored(one, answer.token_ids, keep_logits=True, save=False)
            for one, answer in zip(way, answers, strict=True)
        ]
        for way in (warm, cold)
    ]
    loop.run([sequence for way in forced for sequence in way])
    found: list[Verification | str] = []
    for answer, other, *both in zip(answers, again, *forced, strict=True):
        error = next((sequence.end.error for sequence in (other, *both) if sequence.end.error is not None), None)
        logits = (np.stack(sequence.logits) for sequence in both if error is None)
        found.append(error or _compare(answer.token_ids, other.token_ids, *logits))
    return found


def _without_cache(planned: Planned, num_layers: int) -> Planned:
    """Return the request with all images decoded, encoded and computed."""
    spans = tuple(
        dataclasses.replace(span, image=_without_records(span.image), state="miss")
        if isinstance(span, ImageSpan)
        else span
        for span in planned.layout.spans
    )
    layout = dataclasses.replace(planned.layout, spans=spans)
    plan = full_prefill(layout, num_layers)
    options = dataclasses.replace(planned.options, compress=None)
    return dataclasses.replace(
        planned, options=options, layout=layout, plan=plan, uses=(), choice=None, owner=None, reservation=None
    )


def _without_records(image: ImageRef) -> ImageRef:
    return ImageRef(image.key, image.grid, image.num_tokens, lambda: image.patches)


def _compare(tokens: list[int], cold_tokens: list[int], logits: np.ndarray, cold_logits: np.ndarray) -> Verification:
    same = [a == b for a, b in zip(tokens, cold_tokens, strict=False)]
    agree = same.index(False) if False in same else len(same)
    difference = float(np.abs(logits - cold_logits).max())
    return Verification(agree, max(len(tokens), len(cold_tokens)), difference)
