"""Prefill chunks: prompts of one group, cut into chunks of static sizes (host, numpy).

The tokens that the prompts compute are concatenated in order and cut. A cut may fall inside a request or an image: the
tokens of a chunk attend to all slots before them, so cutting is exact. Images whose linked KV is shifted are not cut,
unless more of their tokens are computed than one chunk can hold.
"""

from __future__ import annotations

import functools
import math
from collections import abc
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Record
from vlcache_jax.cache.writer import SavedTokens
from vlcache_jax.device.buckets import BucketSizes, round_up, split_rows
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.runs import NO_STATES, PromptStates, block_ends, make_runs, whole_blocks
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, Layout
from vlcache_jax.models import Rows
from vlcache_jax.models.layer_kinds import Runs
from vlcache_jax.pallas_kernels import PAGE, Work, WorkConfig, make_work, shared_prefixes
from vlcache_jax.reuse.policies import Plan, active_rows
from vlcache_jax.reuse.selection import RowChoice, Selection
from vlcache_jax.reuse.shift import TOKENS, Shift, make_shift, shift_end, shifted_images

Index = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Placement:
    """Tokens of an image in a chunk: row `image_row[i]` of the image is encoder row `place[i]` of the chunk."""

    image: ImageRef
    image_row: Index
    place: Index


@dataclass(frozen=True, eq=False)
class Prefill:
    """Tokens that a sequence has to compute in one go.

    Attributes:
      sequence: the sequence.
      layout, plan: layout and plan of its tokens so far.
      table: page of the pool for each logical page, int32 [B].
      shared: number of leading pages that other sequences use too, so that nothing may be written there.
      cached: number of leading tokens whose KV is in pages.
      choice: rule by which the device selects tokens; None if `plan` fixes them. Such a prefill has chunks of its own.
      links: whether cached images are still to be linked.
      states: what it reads and writes of the states, if the model has some.
    """

    sequence: Sequence
    layout: Layout
    plan: Plan
    table: Index
    shared: int = 0
    cached: int = 0
    choice: RowChoice | None = None
    links: bool = True
    states: PromptStates = NO_STATES

    def slots(self, place: Index) -> Index:
        """Return the pool's slots of logical slots."""
        return self._slots[place]

    @functools.cached_property
    def _slots(self) -> Index:
        """Pool slots of all logical slots."""
        return np.add.outer(PAGE * self.table, np.arange(PAGE, dtype=np.int32)).reshape(-1)

    @functools.cached_property
    def to_link(self) -> Index:
        """Pool slot of each token, int32 [n]; out of bounds for tokens whose KV is there already."""
        place = self.plan.slots
        slots = self.slots(place)
        slots[: self.cached] = np.iinfo(np.int32).max
        slots[place < PAGE * self.shared] = np.iinfo(np.int32).max
        return slots


def copied_pages(prefills: abc.Iterable[Prefill]) -> list[tuple[int, int]]:
    """Return the pages to copy before `prefills` are computed, as pairs (from, to)."""
    block_tables = [
        prefill.sequence.progress.block_table for prefill in prefills if prefill.sequence.progress.prefilled == 0
    ]
    return [
        block_table.copy for block_table in block_tables if block_table is not None and block_table.copy is not None
    ]


@dataclass(frozen=True, eq=False)
class Step:
    """Prefill chunk.

    Its tokens are sorted by the number of layers that compute them, largest first. The tokens of each layer are
    therefore a leading slice of those of the layer before.

    Attributes:
      rows: tokens, padded to a bucket.
      request: index in `tables` for each token, without padding [n].
      tables: block table of each prompt.
      active: number of tokens that each layer computes, [L].
      bounds: buckets of these numbers, and last that of the tokens leaving the last layer, [L + 1]. Both are
        non-increasing.
      placements: images whose tokens are computed.
      saved: tokens whose KV is saved, by image.
      wanted: (sequence, index of the token) for each token whose logits are requested; these come first.
      num_slots: number of slots of the pool.
      selection: selection on the device; `active` and `bounds` count the selected tokens. None if there is none.
      shift: images whose linked KV is shifted; None if there are none.
      runs: order in which its tokens change states; None if the model has none.
    """

    rows: Rows
    request: Index
    tables: tuple[Index, ...]
    active: tuple[int, ...]
    bounds: tuple[int, ...]
    placements: tuple[Placement, ...]
    saved: tuple[SavedTokens, ...]
    wanted: tuple[tuple[Sequence, int], ...]
    num_slots: int
    selection: Selection | None = None
    shift: Shift | None = None
    runs: Runs | None = None

    @functools.cached_property
    def leaving(self) -> tuple[tuple[int, int, bool], ...]:
        """Bucket and number of the attending tokens of each layer, and whether the device selected some of them.

        In the check layer these are the tokens after the selection. For the others, that layer computes only KV.
        """
        check = len(self.active) if self.selection is None else self.selection.policy.check_layer
        counts = (*self.active[1:], len(self.wanted))
        return tuple((self.bounds[i + 1], counts[i], i >= check) for i in range(len(self.active)))

    def work(self, bound: int, is_chosen: bool, config: WorkConfig) -> Work:
        """Return the work list of all layers with this bucket and this value of `is_chosen`.

        Args:
          bound: bucket of the attending tokens.
          is_chosen: whether the device selected some of them.
          config: configuration of the work list.
        """
        count = max(count for own, count, chosen in self.leaving if (own, chosen) == (bound, is_chosen))
        used, table = np.unique(self.request[:count], return_inverse=True)
        min_end = end = self.rows.k_end[:count]
        if is_chosen and self.selection is not None:
            # The rows after the mandatory ones may be any tokens of the prompt.
            must = np.arange(count) < self.selection.must
            end, min_end = np.where(must, end, self.selection.length), np.where(must, end, 0)
        tables = [self.tables[i] for i in used]
        return make_work(table, np.zeros_like(end), end, tables, config, least=min_end, shared=shared_prefixes(tables))


def linked_images(
    prefills: abc.Iterable[Prefill],
) -> list[tuple[Record, list[tuple[Prefill, ImageSpan]]]]:
    """Return the cache entries whose KV is to be linked, each with the prefills and spans that need it."""
    users: dict[int, tuple[Record, list[tuple[Prefill, ImageSpan]]]] = {}
    for prefill in prefills:
        for use in prefill.sequence.progress.images if prefill.links else ():
            if use.linked is not None and use.span.stop > prefill.cached:
                users.setdefault(id(use.linked), (use.linked, []))[1].append((prefill, use.span))
    return list(users.values())


def prefill_steps(
    prefills: abc.Sequence[Prefill],
    buckets: BucketSizes,
    num_slots: int,
    num_layers: int,
    has_states: bool = False,
) -> list[Step]:
    """Cut the tokens that the plans compute into chunks, in the order of the prompts.

    Args:
      prefills: prefills of the group.
      buckets: sizes of the chunks.
      num_slots: number of slots of the pool.
      num_layers: number of decoder layers.
      has_states: whether some layers have states, so that chunks are cut between blocks, see `runs`.
    """
    # All tokens of the prompts, concatenated.
    length = [len(prefill.layout) for prefill in prefills]
    owner = np.repeat(np.arange(len(prefills), dtype=np.int32), length)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in length])  # index of the token in its prompt
    place = np.concatenate([prefill.plan.slots for prefill in prefills])  # its logical slot
    slot = np.concatenate([prefill.slots(prefill.plan.slots) for prefill in prefills])
    is_shared = np.concatenate([prefill.plan.slots < PAGE * prefill.shared for prefill in prefills])
    depth = np.concatenate([prefill.plan.depth for prefill in prefills])
    position = np.concatenate([prefill.layout.positions for prefill in prefills], axis=1)
    token = np.concatenate([prefill.layout.token_ids for prefill in prefills])
    images, image, image_row = _image_rows(prefills, length)
    shifted = shifted_images([(prefill.layout, prefill.plan) for prefill in prefills], num_layers)
    begun = 0  # number of these images whose first rows are in a chunk
    is_end = _block_ends(prefills, buckets.max_rows, depth) if has_states else None

    steps = []
    computed = np.flatnonzero(depth)
    while len(computed):
        choice = prefills[0].choice
        # All tokens to select from must be in one chunk.
        count = len(computed)
        size = split_rows(count, buckets.rows)[0] if choice is None else round_up(count, buckets.rows)
        count = min(size, count)
        end = shift_end(shifted, begun, min(TOKENS, num_slots))
        count = min(count, int(np.argmax(np.append(shifted[computed], end) >= end)))
        if count < len(computed) and (cut := shifted[computed[count]]) == shifted[computed[count - 1]] >= 0:
            # The shift of an image must not depend on where a chunk ends, so its rows stay together. They begin the
            # next chunk or fill this one, up to the largest size.
            inside = shifted[computed] == cut
            count = int(np.argmax(inside)) or min(int(inside.sum()), buckets.max_rows)
        if is_end is not None:
            count = whole_blocks(is_end[computed], count)
        # Tokens that more layers compute come first, so that each layer's tokens are a leading slice.
        in_order, computed = computed[:count], computed[count:]
        order = np.argsort(-depth[in_order], kind="stable")
        rows = in_order[order]
        selection, active = None, active_rows(depth[rows], num_layers)
        if choice is not None:
            selection, active = _select(choice, prefills[0].table, active, index[rows[: active[0]]])
        bounds = [round_up(max(n, 1), buckets.rows) for n in active]
        placements, source = _place(images, image[rows], image_row[rows], token[rows])
        # An image is shifted in the chunk that has its first row.
        moving = range(begun, max(begun, 1 + int(shifted[rows].max())))
        begun = moving.stop
        outputs = rows[depth[rows] > num_layers]
        # The output head takes at most one row per running sequence; if more logits are needed, it takes slices.
        leaving = buckets.outputs(bounds[-1]) if len(outputs) <= buckets.max_sequences else bounds[-1]
        # Shared pages are complete and are never written.
        written = np.where(is_shared[rows], num_slots + np.arange(len(rows), dtype=np.int32), slot[rows])
        seen = place[rows] + 1
        unpadded = Rows(written, position[:, rows], np.zeros_like(seen), seen, source)
        steps.append(
            Step(
                rows=pad_rows(unpadded, bounds[0], num_slots),
                request=owner[rows],
                tables=tuple(prefill.table for prefill in prefills),
                active=active,
                bounds=(*bounds, leaving),
                placements=placements,
                saved=tuple(_saved_tokens(prefills, length, rows)),
                wanted=tuple((prefills[owner[row]].sequence, int(index[row])) for row in outputs),
                num_slots=num_slots,
                selection=selection,
                shift=make_shift(shifted, moving, rows, slot, position, depth),
                runs=None if is_end is None else _runs(prefills, owner, index, is_end, in_order, order),
            )
        )
    return steps


def _select(
    choice: RowChoice, table: Index, active: tuple[int, ...], tokens: Index
) -> tuple[Selection, tuple[int, ...]]:
    """Return the selection on the device, and the number of tokens that each layer then computes.

    All tokens are computed up to the check layer; after it the mandatory ones and a number of the others.
    """
    check = choice.policy.check_layer
    must = active[check + 1]
    among = active[0] - must
    keep = tuple(min(n, among) for n in choice.keep)
    selection = Selection(choice.policy, must, among, keep, table, choice.length, choice.question, tokens)
    return selection, (*active[: check + 1], *(must + n for n in keep))


def _block_ends(prefills: abc.Sequence[Prefill], max_rows: int, depth: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Return for each token of all prompts whether it ends a block, see `block_ends`.

    So does the last one before a linked image. The result of the tokens before it does not depend on those after it.
    """
    is_end = np.concatenate(
        [block_ends(one.layout, len(one.sequence.layout), max_rows, one.sequence.planned.edges) for one in prefills]
    )
    is_end[:-1] |= (depth[:-1] > 0) & (depth[1:] == 0)
    return is_end


def _runs(
    prefills: abc.Sequence[Prefill],
    owner: Index,
    index: Index,
    is_end: npt.NDArray[np.bool_],
    tokens: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
) -> Runs:
    """Return the runs of a chunk, see `make_runs`; `tokens` are indices into all tokens."""
    return make_runs(owner[tokens], index[tokens], is_end[tokens], [one.states for one in prefills], order)


def _saved_tokens(
    prefills: abc.Sequence[Prefill], length: list[int], rows: npt.NDArray[np.int64]
) -> abc.Iterator[SavedTokens]:
    """Yield the entries to be filled with KV of `rows`, which are indices into all tokens."""
    place = np.full(sum(length), -1)
    place[rows] = np.arange(len(rows))
    first = 0
    for prefill, count in zip(prefills, length, strict=True):
        for use in prefill.sequence.progress.images:
            if use.saved is not None and not use.saved.is_settled:
                start = first + use.span.start
                mine = place[start : start + use.span.length]
                tokens = np.flatnonzero(mine >= 0)
                if len(tokens):
                    is_last = tokens[-1] == use.span.length - 1
                    slots = prefill.states.stores.get(use.span.stop) if is_last else None
                    yield SavedTokens(use.saved, tokens, mine[tokens], slots)
        first += count


def pad_rows(rows: Rows, size: int, num_slots: int) -> Rows:
    """Pad `rows` to `size`. Padding writes to distinct slots beyond the pool and attends to nothing."""
    count = len(rows.slot)
    padded = Rows(*[np.zeros((*field.shape[:-1], size), field.dtype) for field in rows])
    for own, field in zip(padded, rows, strict=True):
        own[..., :count] = field
    padded.slot[count:] = num_slots + np.arange(count, size)
    return padded


def encoder_calls(images: abc.Iterable[ImageRef], sizes: tuple[int, ...]) -> list[list[ImageRef]]:
    """Group consecutive images into encoder calls of these sizes, in patches.

    A call has the largest size, or a smaller one if an additional call costs less than the padding that it saves. A
    larger image has a call of its own.
    """
    pairs = [(image, math.prod(image.grid)) for image in images]
    calls: list[list[ImageRef]] = []
    left, used, size = sum(patches for _, patches in pairs), 0, 0
    for image, patches in pairs:
        if used + patches > size:
            calls.append([])
            used, size = 0, split_rows(left, sizes)[0]
        used, left = used + patches, left - patches
        calls[-1].append(image)
    return calls


def _image_rows(prefills: abc.Sequence[Prefill], length: list[int]) -> tuple[list[ImageRef], Index, Index]:
    """Return the images, and for every token the index of its image (-1 for text) and its row in the image."""
    images: list[ImageRef] = []
    image = np.full(sum(length), -1, np.int32)
    image_row = np.zeros(sum(length), np.int32)
    known: dict[int, int] = {}  # by the id of an image, since requests share images
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
    """Number the image tokens of a chunk as its encoder rows; return their placements, and the source of each token.

    Outputs of one prompt share the rows of its images.
    """
    is_image = image >= 0
    first = np.cumsum([0, *[one.num_tokens for one in images]])
    index = first[image[is_image]] + image_row[is_image]  # index among the rows of all images
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
