"""Which programs a turn calls for, before anything of it is launched, and which sizes of steps do without those that a
warm-up has still to compile."""

from __future__ import annotations

import collections
import dataclasses
from collections import abc
from typing import Any

from vlcache_jax.device.ladder import Ladder, cover
from vlcache_jax.device.programs.base import Program
from vlcache_jax.device.programs.layers import BLOCK, Block, Embed, Layer, Slice
from vlcache_jax.device.programs.link import Link
from vlcache_jax.device.programs.state import CopyPages, EmptyEncoderRows, EmptyLanes, EmptyPool, HoldLanes, OpenLane
from vlcache_jax.device.runner import Runner
from vlcache_jax.engine.batching import Prefill, Step, copied_pages, encoder_calls, linked_images, prefill_steps
from vlcache_jax.engine.passage import is_block
from vlcache_jax.engine.request import Generation
from vlcache_jax.inputs.layout import ImageRef


def usable_ladder(
    runner: Runner, prefills: abc.Sequence[Prefill], calls: tuple[int, ...], encoded: abc.Container[ImageRef]
) -> Ladder | None:
    """The sizes for a turn's steps, for which all programs are there; None: they are coming, and the turn waits.

    While the programs of a step are coming, rungs that are there serve: several smaller ones, or a larger one. Cutting
    is exact. Steps that choose rows or move images keep their sizes.

    Args:
      calls: sizes of encoder calls.
      encoded: images that were encoded ahead.
    """
    ladder, fitting = runner.ladder, runner.fitting
    if not runner.programs.is_warming:
        return ladder
    other = [*_other_programs(runner, prefills)]
    steps = prefill_steps(prefills, ladder, runner.num_slots, runner.shapes.kv.layers)
    encoding = [*_encoding(runner, prefills, steps, calls, encoded)]
    best = [*other, *encoding, *_layers(runner, steps)]
    if not fitting.is_coming(best):
        return ladder
    if all(step.selection is None and step.shift is None for step in steps):
        there = tuple(rows for rows in ladder.rows if fitting.is_there(_plain(runner, rows)))
        if there and fitting.is_there([*other, *encoding]):
            fewer = dataclasses.replace(ladder, rows=there)
            steps = prefill_steps(prefills, fewer, runner.num_slots, runner.shapes.kv.layers)
            if fitting.is_there(_layers(runner, steps)):
                return fewer
    return None


def _plain(runner: Runner, rows: int) -> abc.Iterator[Program[Any]]:
    """What takes a step of which all layers compute `rows` rows through them."""
    return _through(runner, (*[rows] * runner.shapes.kv.layers, runner.ladder.outputs(rows)), False, False)


def _through(runner: Runner, bounds: abc.Sequence[int], shifts: bool, selects: bool) -> abc.Iterator[Program[Any]]:
    """What takes a step with these bounds through the layers, but for what chooses rows."""
    like, deepstack = runner.shapes.like, runner.shapes.config.vision.num_deepstack
    yield Embed(bounds[0])
    layer = 0
    while layer < len(bounds) - 1:
        size, leaving = bounds[layer], bounds[layer + 1]
        if is_block(bounds, layer, deepstack, selects):
            yield Block(size, shifts, like[layer : layer + BLOCK])
            layer += BLOCK
            continue
        if layer < deepstack and size != bounds[0] and not selects:
            yield Slice(bounds[0], size)
        yield Layer(size, leaving, layer < deepstack, shifts, like[layer : layer + 1])
        layer += 1


def _layers(runner: Runner, steps: abc.Iterable[Step]) -> abc.Iterator[Program[Any]]:
    """What takes steps through the layers, and chooses tokens."""
    for step in steps:
        yield from _through(runner, step.bounds, step.shift is not None, step.selection is not None)
        rows = step.bounds[-1]
        answers = [one for one, i in step.wanted if isinstance(one, Generation) and i == one.length - 1]
        if answers and len(answers) == len(step.wanted):
            yield from runner.fitting.choosing(rows, runner.fitting.head(rows, len(answers)))


def _encoding(
    runner: Runner,
    prefills: abc.Iterable[Prefill],
    steps: abc.Iterable[Step],
    calls: tuple[int, ...],
    encoded: abc.Container[ImageRef],
) -> abc.Iterator[Program[Any]]:
    """What encodes the new images of steps."""
    uses = (use for prefill in prefills for use in prefill.sequence.progress.images)
    kept = {use.span.image for use in uses if use.encoder is not None and use.encoder.is_ready}
    seen: set[ImageRef] = set()
    for step in steps:
        images = [one.image for one in step.placements if one.image not in kept and one.image not in encoded]
        new = [image for image in dict.fromkeys(images) if image not in seen]
        seen.update(new)
        for call in encoder_calls(new, calls):
            patches = sum(image.num_tokens for image in call) * runner.config.vision.merge_size**2
            yield from runner.fitting.encoding(runner.fitting.encoder(patches))


def _other_programs(runner: Runner, prefills: abc.Sequence[Prefill]) -> abc.Iterator[Program[Any]]:
    """What makes the arrays that all need, opens lanes, copies pages and links images."""
    shapes = runner.shapes
    yield from (EmptyPool(), EmptyEncoderRows(), EmptyLanes(), OpenLane())
    held = sum(isinstance(one.sequence, Generation) and one.sequence.matcher is not None for one in prefills)
    if held:
        yield HoldLanes(runner.fitting.held(held))
    yield from (CopyPages(size) for size in cover(len(copied_pages(prefills)), runner.ladder.sequences))
    linked = collections.Counter(record.meta.padded for record, users in linked_images(prefills) for _ in users)
    for size, number in linked.items():
        for count in shapes.split_links(size, number):
            yield from (Link(size, count, part.stop - part.start) for part in shapes.link_groups)
