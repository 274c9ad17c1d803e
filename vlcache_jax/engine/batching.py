"""How prompts are put together: the steps that prefill those which are computed in one turn (host, numpy).

The rows that prompts compute follow each other in their order and are cut into steps of static sizes. A cut may fall
inside a request or an image: a step's rows see all slots before them, so cutting is exact. Images whose linked K, V are
moved are not cut, unless more of their tokens are computed than one step can.
"""

from __future__ import annotations

import functools
import math
from collections import abc
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Record
from vlcache_jax.cache.writer import Captured
from vlcache_jax.device.buckets import Ladder, round_up, split_rows
from vlcache_jax.engine.request import Sequence
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, Layout
from vlcache_jax.models import Rows
from vlcache_jax.pallas_kernels import PAGE, Work, WorkConfig, make_work, shared_prefixes
from vlcache_jax.reuse.policies import Plan, active_rows
from vlcache_jax.reuse.selection import RowChoice, Selection
from vlcache_jax.reuse.shift import TOKENS, Shift, make_shift, most_moved, shifted_images

Index = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Placement:
    """Rows of an image that a step computes: row `image_row[i]` of the image is encoder row `place[i]` of the step."""

    image: ImageRef
    image_row: Index
    place: Index


@dataclass(frozen=True, eq=False)
class Prefill:
    """What a sequence has to compute at once.

    Attributes:
      sequence: whose it is.
      layout, plan: of the tokens up to here.
      table: the pool's page of each logical page [B].
      shared: pages, the first ones, that others use too, so that nobody writes into them.
      cached: tokens at the beginning that are in pages.
      choice: how rows are chosen on the device; such a prefill has steps of its own.
      links: whether stored images are still to be linked.
    """

    sequence: Sequence
    layout: Layout
    plan: Plan
    table: Index
    shared: int = 0
    cached: int = 0
    choice: RowChoice | None = None
    links: bool = True

    def slots(self, place: Index) -> Index:
        """The pool's slots of logical slots."""
        return self._slots[place]

    @functools.cached_property
    def _slots(self) -> Index:
        """Of all logical slots."""
        return np.add.outer(PAGE * self.table, np.arange(PAGE, dtype=np.int32)).reshape(-1)

    @functools.cached_property
    def to_link(self) -> Index:
        """The pool's slot of each token, beyond any pool where its K, V are there already [n]."""
        place = self.plan.slots
        slots = self.slots(place)
        slots[: self.cached] = np.iinfo(np.int32).max
        slots[place < PAGE * self.shared] = np.iinfo(np.int32).max
        return slots


def copied_pages(prefills: abc.Iterable[Prefill]) -> list[tuple[int, int]]:
    """The pages that are copied before anything of `prefills` is computed: from, to."""
    leases = [prefill.sequence.progress.lease for prefill in prefills if prefill.sequence.progress.prefilled == 0]
    return [lease.copy for lease in leases if lease is not None and lease.copy is not None]


@dataclass(frozen=True, eq=False)
class Step:
    """One prefill step.

    Its rows are sorted by the layer at which they drop out, those that stay longest first, so that the rows of every
    layer are a slice of those before it.

    Attributes:
      rows: padded to a rung.
      request: which of the tables each row sees through, without padding [n].
      tables: pages of each prompt.
      active: rows that each layer computes, [L].
      bounds: rungs that hold them, and last the rows leaving the last layer, [L + 1]; both non-increasing.
      placements: the images whose rows are computed.
      captured: rows whose K, V are kept, by image.
      wanted: (sequence, index of the token) of each row whose logits are wanted; they come first.
      num_slots: of the pool.
      selection: what is chosen on the device; `active` and `bounds` count the rows that are.
      shift: the images whose linked K, V are moved; None: there are none.
    """

    rows: Rows
    request: Index
    tables: tuple[Index, ...]
    active: tuple[int, ...]
    bounds: tuple[int, ...]
    placements: tuple[Placement, ...]
    captured: tuple[Captured, ...]
    wanted: tuple[tuple[Sequence, int], ...]
    num_slots: int
    selection: Selection | None = None
    shift: Shift | None = None

    @functools.cached_property
    def leaving(self) -> tuple[tuple[int, int, bool], ...]:
        """Of each layer how many rows attend: their bound, how many there are, whether some were chosen on the device.

        They are in the check layer, of whose other rows nothing but K, V is computed.
        """
        check = len(self.active) if self.selection is None else self.selection.policy.check_layer
        counts = (*self.active[1:], len(self.wanted))
        return tuple((self.bounds[i + 1], counts[i], i >= check) for i in range(len(self.active)))

    def work(self, bound: int, is_chosen: bool, config: WorkConfig) -> Work:
        """The attention of all layers that agree in their bound, and in whether some rows were chosen."""
        count = max(count for own, count, chosen in self.leaving if (own, chosen) == (bound, is_chosen))
        used, table = np.unique(self.request[:count], return_inverse=True)
        least = end = self.rows.k_end[:count]
        if is_chosen and self.selection is not None:
            # Those that follow the rows that must go on may be any of the prompt's.
            must = np.arange(count) < self.selection.must
            end, least = np.where(must, end, self.selection.length), np.where(must, end, 0)
        tables = [self.tables[i] for i in used]
        return make_work(table, np.zeros_like(end), end, tables, config, least=least, shared=shared_prefixes(tables))


def linked_images(
    prefills: abc.Iterable[Prefill],
) -> list[tuple[Record, list[tuple[Prefill, ImageSpan]]]]:
    """The records whose K, V are to be linked, each with the places that it comes to."""
    users: dict[int, tuple[Record, list[tuple[Prefill, ImageSpan]]]] = {}
    for prefill in prefills:
        for use in prefill.sequence.progress.images if prefill.links else ():
            if use.linked is not None and use.span.stop > prefill.cached:
                users.setdefault(id(use.linked), (use.linked, []))[1].append((prefill, use.span))
    return list(users.values())


def prefill_steps(prefills: abc.Sequence[Prefill], ladder: Ladder, num_slots: int, num_layers: int) -> list[Step]:
    """The steps that compute what the plans ask for, in the order of the prompts."""
    # All tokens of the prompts, one behind the other.
    length = [len(prefill.layout) for prefill in prefills]
    owner = np.repeat(np.arange(len(prefills), dtype=np.int32), length)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in length])  # of the token in its prompt
    place = np.concatenate([prefill.plan.slots for prefill in prefills])  # its logical slot
    slot = np.concatenate([prefill.slots(prefill.plan.slots) for prefill in prefills])
    is_shared = np.concatenate([prefill.plan.slots < PAGE * prefill.shared for prefill in prefills])
    depth = np.concatenate([prefill.plan.depth for prefill in prefills])
    position = np.concatenate([prefill.layout.positions for prefill in prefills], axis=1)
    token = np.concatenate([prefill.layout.token_ids for prefill in prefills])
    images, image, image_row = _image_rows(prefills, length)
    shifted = shifted_images([(prefill.layout, prefill.plan) for prefill in prefills], num_layers)
    begun = 0  # of these images, those whose first rows are in a step

    steps = []
    computed = np.flatnonzero(depth)
    while len(computed):
        choice = prefills[0].choice
        # What is chosen from must lie in one step.
        count = len(computed)
        size = split_rows(count, ladder.rows)[0] if choice is None else round_up(count, ladder.rows)
        count = min(size, count)
        end = most_moved(shifted, begun, min(TOKENS, num_slots))
        count = min(count, int(np.argmax(np.append(shifted[computed], end) >= end)))
        if count < len(computed) and (cut := shifted[computed[count]]) == shifted[computed[count - 1]] >= 0:
            # What moves an image must not depend on where a step ends, so its rows stay together: they begin the next
            # step, or are this one, if need be the most that a step holds.
            inside = shifted[computed] == cut
            count = int(np.argmax(inside)) or min(int(inside.sum()), ladder.max_rows)
        # Within a step those that stay longest come first, so that each layer's rows are the first ones.
        rows, computed = computed[:count], computed[count:]
        rows = rows[np.argsort(-depth[rows], kind="stable")]
        selection = None
        active = active_rows(depth[rows], num_layers)
        if choice is not None:
            # Up to the check layer all are computed; behind it those that must be, and so many of the others.
            check = choice.policy.check_layer
            must = active[check + 1]
            among = active[0] - must
            keep = tuple(min(n, among) for n in choice.keep)
            tokens = index[rows[: active[0]]]
            selection = Selection(
                choice.policy, must, among, keep, prefills[0].table, choice.length, choice.question, tokens
            )
            active = (*active[: check + 1], *(must + n for n in keep))
        bounds = [round_up(max(n, 1), ladder.rows) for n in active]
        placements, source = _place(images, image[rows], image_row[rows], token[rows])
        # An image is moved in the step that has its first row.
        moving = range(begun, max(begun, 1 + int(shifted[rows].max())))
        begun = moving.stop
        outputs = rows[depth[rows] > num_layers]
        # The output head takes as many rows as sequences run; where more logits are wanted, it takes slices of all.
        leaving = ladder.outputs(bounds[-1]) if len(outputs) <= ladder.max_sequences else bounds[-1]
        # What is in a shared page is there already, and never written.
        written = np.where(is_shared[rows], num_slots + np.arange(len(rows), dtype=np.int32), slot[rows])
        seen = place[rows] + 1
        mine = Rows(written, position[:, rows], np.zeros_like(seen), seen, source)
        steps.append(
            Step(
                rows=pad_rows(mine, bounds[0], num_slots),
                request=owner[rows],
                tables=tuple(prefill.table for prefill in prefills),
                active=active,
                bounds=(*bounds, leaving),
                placements=placements,
                captured=tuple(_captured(prefills, length, rows)),
                wanted=tuple((prefills[owner[row]].sequence, int(index[row])) for row in outputs),
                num_slots=num_slots,
                selection=selection,
                shift=make_shift(shifted, moving, rows, slot, position, depth),
            )
        )
    return steps


def _captured(
    prefills: abc.Sequence[Prefill], length: list[int], rows: npt.NDArray[np.int64]
) -> abc.Iterator[Captured]:
    """Which of `rows`, indices into all tokens, belong to records to be filled."""
    place = np.full(sum(length), -1)
    place[rows] = np.arange(len(rows))
    first = 0
    for prefill, count in zip(prefills, length, strict=True):
        for use in prefill.sequence.progress.images:
            if use.captured is not None and not use.captured.is_settled:
                start = first + use.span.start
                mine = place[start : start + use.span.length]
                tokens = np.flatnonzero(mine >= 0)
                if len(tokens):
                    yield Captured(use.captured, tokens, mine[tokens])
        first += count


def pad_rows(rows: Rows, size: int, num_slots: int) -> Rows:
    """Padding rows write nowhere (distinct slots beyond the pool) and see nothing."""
    count = len(rows.slot)
    padded = Rows(*[np.zeros((*field.shape[:-1], size), field.dtype) for field in rows])
    for own, field in zip(padded, rows, strict=True):
        own[..., :count] = field
    padded.slot[count:] = num_slots + np.arange(count, size)
    return padded


def encoder_calls(images: abc.Iterable[ImageRef], rungs: tuple[int, ...]) -> list[list[ImageRef]]:
    """Consecutive images that share an encoder call of one of these sizes: the last, or a smaller one where a call more
    costs less than the padding that it saves. A larger image has a call of its own."""
    given = [(image, math.prod(image.grid)) for image in images]
    calls: list[list[ImageRef]] = []
    left, used, size = sum(patches for _, patches in given), 0, 0
    for image, patches in given:
        if used + patches > size:
            calls.append([])
            used, size = 0, split_rows(left, rungs)[0]
        used, left = used + patches, left - patches
        calls[-1].append(image)
    return calls


def _image_rows(prefills: abc.Sequence[Prefill], length: list[int]) -> tuple[list[ImageRef], Index, Index]:
    """The images, and for every row which image it belongs to (-1: text) and which row of it it is."""
    images: list[ImageRef] = []
    image = np.full(sum(length), -1, np.int32)
    image_row = np.zeros(sum(length), np.int32)
    known: dict[int, int] = {}  # requests share images
    first = 0
    for prefill in prefills:
        for span in prefill.layout.images:
            number = known.setdefault(id(span.image), len(images))
            if number == len(images):
                images.append(span.image)
            place = slice(first + span.start, first + span.stop)
            image[place] = number
            image_row[place] = np.arange(span.length)
        first += len(prefill.layout)
    return images, image, image_row


def _place(images: list[ImageRef], image: Index, image_row: Index, token: Index) -> tuple[tuple[Placement, ...], Index]:
    """Numbers a step's image rows as its encoder rows; returns where they come from, and each row's source.

    Answers to one prompt share the rows of its images.
    """
    is_image = image >= 0
    first = np.cumsum([0, *[one.num_tokens for one in images]])
    index = first[image[is_image]] + image_row[is_image]  # among the rows of all images
    is_there = np.zeros(first[-1], bool)
    is_there[index] = True
    place = np.cumsum(is_there, dtype=np.int32) - 1
    source = token.copy()
    source[is_image] = -1 - place[index]
    placements = []
    for number in np.flatnonzero(np.bincount(image[is_image], minlength=len(images))):
        own = slice(first[number], first[number + 1])
        mine = np.flatnonzero(is_there[own]).astype(np.int32)
        placements.append(Placement(images[number], mine, place[own][mine]))
    return tuple(placements), source
