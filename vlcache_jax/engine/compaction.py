"""Compression of prompts: from the full KV to the part with which outputs continue.

After the first token, some of the prompt's tokens pass through the layers once more and write nothing. Each layer sums
the attention that its keys receive from them. The sums determine how many tokens each layer keeps, and which. When
pages of the pool for compressed prompts are free, the kept KV is copied into them, and the prompt's own pages are
released. The first token does not wait for this. If outputs need more of these pages than there are, one of them is
swapped out to host memory.
"""

from __future__ import annotations

from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from vlcache_jax.compress.budgets import sparsity
from vlcache_jax.compress.policies import Compressor, make_counts, make_observed, make_windows
from vlcache_jax.compress.scores import USUAL, seeds
from vlcache_jax.device.buckets import BucketSizes, round_up
from vlcache_jax.device.programs.base import MOVED_PAGES, pack
from vlcache_jax.device.programs.compress import Compact, EmptySums, Observe, ReadPages, WritePages
from vlcache_jax.device.runner import Clock, Runner
from vlcache_jax.engine.batching import Prefill, Step, prefill_steps
from vlcache_jax.engine.compressed_pages import CompressedBlockTable, Compression
from vlcache_jax.engine.pages import BlockTable
from vlcache_jax.engine.prefilling import Prefiller
from vlcache_jax.engine.request import Generation, Sequence
from vlcache_jax.engine.results import CompressionResult, ObservationResult, Results
from vlcache_jax.engine.runs import PromptStates
from vlcache_jax.engine.scheduler import Scheduler, places
from vlcache_jax.engine.snapshots import Snapshot
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.pallas_kernels import PAGE, make_work
from vlcache_jax.reuse.policies import full_prefill

_AT_ONCE = 2  # maximum prompts whose sums are on the device
_COUNTED = "compressed", "uncompressed", "swapped_out", "swapped_in", "moved_bytes"  # see `EngineStats`


@dataclass(eq=False)
class _Observation:
    """Observation of a prompt.

    Attributes:
      rows: number of tokens that were observed.
      sums: attention received by the keys, see `Observe`; None if nothing was observed.
      took: device times, in seconds.
      compression: the kept part; None while it is not known.
      windows: for each layer, how many of the kept tokens are the prompt's last ones.
    """

    rows: int
    sums: jax.Array | None = None
    took: list[Future[float]] = field(default_factory=list)
    compression: Compression | None = None
    windows: tuple[int, ...] = ()


class Compactor:
    """Compression of prompts after their first token.

    Args:
      runner: runner of the programs.
      scheduler: scheduler that assigns pages.
      prefiller: source of the encoder output of observed image tokens.
      clock: clock of the device times.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, prefiller: Prefiller, clock: Clock):
        self._runner, self._scheduler, self._prefiller, self._clock = runner, scheduler, prefiller, clock
        # Chunks that observe have the smallest compiled size that holds a block of tokens.
        rows = (runner.shapes.block_rows,)
        self._buckets = BucketSizes(rows, runner.buckets.patches, runner.buckets.sequences)
        self._found: dict[Generation, _Observation] = {}
        self._counts = dict.fromkeys(_COUNTED, 0)

    def stats(self) -> dict[str, int]:
        """Return the counters and sizes of `EngineStats` that concern compression."""
        pages, page_bytes = self._scheduler.compressed, self._page_bytes
        return self._counts | {
            "compressed_kv_bytes": pages.count * page_bytes,
            "compressed_pages": pages.count,
            "compressed_in_use": pages.in_use,
            "swapped_bytes": pages.swapped_bytes,
        }

    @property
    def _page_bytes(self) -> int:
        kv = self._runner.shapes.kv
        return PAGE * kv.slot_bytes // kv.layers

    def reset(self) -> None:
        """Discard the observations, and free all pages of the pool."""
        self._found.clear()
        self._scheduler.compressed.reset()

    def forget(self, answer: Sequence) -> None:
        """Discard the observation of an ended sequence."""
        if isinstance(answer, Generation):
            self._found.pop(answer, None)

    def advance(self) -> abc.Iterator[Results]:
        """Launch what is possible; yield the results to read. No output overtakes one that waits for pages."""
        answers = (one for one in self._scheduler.decoding if isinstance(one, Generation))
        lacking = [one for one in answers if one.is_swapped_out or (one.awaits_compression and one.token_ids)]
        for answer in self._scheduler.tenant_order.sorted(lacking):
            if (block_table := answer.progress.compressed) is not None:
                if not self._bring_back(block_table):
                    return
                continue
            if answer not in self._found and len(self._found) < _AT_ONCE:
                yield from self._look(answer)
            found = self._found.get(answer)
            if found is None or found.compression is None or answer.end.error is not None:
                continue
            if not self._has_pages(answer, found.compression):
                return
            yield self._settle(answer, found, found.compression)

    # Observing.

    def _look(self, answer: Generation) -> abc.Iterator[Results]:
        """Start to determine what is kept of a prompt; yield the results to read."""
        compressor, layout = answer.planned.options.compress, answer.layout
        assert compressor is not None
        try:
            rows = 0 if compressor.alpha == 1 else make_observed(compressor, layout)
        except ValueError as error:
            answer.fail(str(error))
            return
        found = self._found[answer] = _Observation(rows)

        def decide(zeros: np.ndarray | None) -> None:
            gamma = None if zeros is None else sparsity(zeros, len(layout), rows)
            try:
                compression = self._compression(compressor, len(layout), gamma)
                self._check(answer, compression)
                found.compression, found.windows = compression, make_windows(compressor, compression.kept)
            except ValueError as error:
                answer.fail(str(error))

        if rows:
            zeros = self._observe(answer, found)
            if zeros is None:
                del self._found[answer]
                self._scheduler.stays_whole(answer)
                self._count(uncompressed=1)
                return
            if compressor.p is not None:
                yield ObservationResult(answer, zeros, decide)
                return
        decide(None)

    def _compression(self, compressor: Compressor, length: int, gamma: np.ndarray | None) -> Compression:
        kv = self._runner.shapes.kv
        counts = make_counts(compressor, length, gamma, kv.layers)
        token_bytes = kv.slot_bytes // self._runner.devices.copies // kv.layers
        sparsities = None if gamma is None else tuple(gamma.tolist())
        return Compression(
            compressor.name, length, counts, sparsities, token_bytes * sum(counts), token_bytes * length * kv.layers
        )  # fmt: skip

    def _check(self, answer: Generation, compression: Compression) -> None:
        """Check that the pool can ever hold a compressed output.

        Raises:
          ValueError: it needs more pages than the pool has.
        """
        pages = self._scheduler.compressed
        needed = pages.needed(compression.kept, answer.new_slots - 1)
        if needed > pages.count and not compression.is_whole:
            raise ValueError(
                "max_tokens must be small enough for the compressed prompt and the output to fit in "
                f"compressed_kv_bytes, got {answer.new_slots}: {compression.policy} needs "
                f"{needed} pages, but the pool has {pages.count}; "
                "reduce max_tokens or increase compressed_kv_bytes"
            )

    def _observe(self, answer: Generation, found: _Observation) -> jax.Array | None:
        """Launch the observation; return counts of near-zero attention, int32 [L, H], or None if pixels are missing."""
        block_table, layout, shapes = answer.progress.block_table, answer.layout, self._runner.shapes
        assert block_table is not None
        assert answer.planned.options.compress is not None
        # The tokens are computed once more with all pages marked as shared, so that nothing is written.
        first = len(layout) - found.rows
        snapshot = self._snapshot(answer, first)
        begin = first if shapes.observed_slot is None else 0 if snapshot is None else snapshot.place
        plan = full_prefill(layout, shapes.depth[0], ()).after(begin)
        plan = replace(plan, slot=answer.progress.plan.slot)
        states = PromptStates(shapes.observed_slot or 0, begin, 0 if snapshot is None else snapshot.slot)
        prefill = Prefill(
            answer, layout, plan, block_table.table, shared=len(block_table.table), links=False, states=states
        )
        group = self._prefiller.begin([prefill], self._buckets)
        group.kept = {image: record for image, record in group.kept.items() if record.is_ready}
        observed = {span.image for span in layout.images if plan.depth[span.tokens].any()}
        if not _are_readable(observed - group.kept.keys() - group.here.keys()):
            self._leave(snapshot)
            return None
        pages = self._bucket(block_table.table)
        sums, threshold = self._runner.run(EmptySums(pages)), np.float32(answer.planned.options.compress.p or 0)
        max_rows = self._runner.buckets.max_rows
        for step in prefill_steps([prefill], self._buckets, self._runner.num_slots, *shapes.depth):
            self._prefiller.stage(step, group)
            paged = self._runner.pool.paged()
            with self._runner.pool.taken_states() as arrays:
                sums, arrays[:] = self._runner.run(
                    Observe(pages), sums, self._runner.text, paged, arrays, self._runner.encoder_rows(),
                    pack(step.rows, max_rows), shapes.pack_runs(step.runs), self._work(step, block_table.table),
                    _table(block_table.table, pages), threshold, np.int32(first),
                )  # fmt: skip
        self._leave(snapshot)
        found.sums, zeros = sums
        found.took.append(self._clock.mark([zeros]))
        return zeros

    def _snapshot(self, answer: Generation, count: int) -> Snapshot[BlockTable] | None:
        """Return a snapshot of states after at most `count` tokens of the prompt; None: they begin with its first."""
        pages = self._scheduler.pages
        if pages.states is None or answer.chain is None:
            return None
        return pages.resume(answer.chain, count, places(answer, self._runner.buckets.max_rows))

    def _leave(self, snapshot: Snapshot[BlockTable] | None) -> None:
        """Note that what reads a snapshot was launched."""
        states = self._scheduler.pages.states
        if snapshot is not None and states is not None:
            states.leave(snapshot)

    def _work(self, step: Step, table: np.ndarray) -> object:
        count = step.active[0]
        end, start = step.rows.k_end[:count], np.zeros(count, np.int32)
        return make_work(start, start, end, [table], self._runner.shapes.work_config(step.bounds[0]))

    def _bucket(self, table: np.ndarray) -> int:
        return round_up(len(table), self._runner.shapes.page_buckets)

    # Compacting.

    def _has_pages(self, answer: Generation, compression: Compression) -> bool:
        """Return whether a compressed output has its pages, after taking them if they are free."""
        return compression.is_whole or self._scheduler.compress(answer, compression.kept)

    def _settle(self, answer: Generation, found: _Observation, compression: Compression) -> Results:
        """Launch the compaction of an output, unless nothing is dropped; the output may then continue."""
        del self._found[answer]
        if compression.is_whole:
            self._scheduler.stays_whole(answer)
        else:
            self._compact(answer, found, compression)
            self._scheduler.compacted(answer)
            self._count(compressed=1)
        return CompressionResult(answer, compression, found.took)

    def _compact(self, answer: Generation, found: _Observation, compression: Compression) -> None:
        """Launch the copy of the kept KV, layer by layer."""
        block_table, compressed = answer.progress.block_table, answer.progress.compressed
        compressor = answer.planned.options.compress
        assert block_table is not None
        assert compressed is not None
        assert compressor is not None
        pages = self._bucket(block_table.table)
        received = self._runner.run(EmptySums(pages))[0] if found.sums is None else found.sums
        usual = USUAL.get(compressor.scores)
        program = Compact(pages, compressor.scores if usual is None else None)
        table = _table(block_table.table, pages)
        seed, pool = seeds(answer.layout, len(compression.kept)), self._runner.pool.paged()
        for layer, (count, window) in enumerate(zip(compression.kept, found.windows, strict=True)):
            numbers = np.array([layer, compression.prompt_tokens, count, window, usual or 0], np.int32)
            target = _table(compressed.tables[layer][:pages], pages)
            with self._runner.compressed.taken() as arrays:
                arrays[:], tokens = self._runner.run(
                    program, arrays, pool[layer], received, numbers, seed[layer], table, target
                )
        found.took.append(self._clock.mark([tokens]))

    # Swapping.

    def swap_out(self) -> None:
        """Swap out the last compressed output, so that others can use its pages.

        Everything launched must have been read.

        Raises:
          RuntimeError: no other output has any pages.
        """
        candidates = [
            one for one in self._scheduler.decoding if one.progress.compressed is not None and not one.is_swapped_out
        ]
        block_table, kept, held = (
            self._scheduler.tenant_order.sorted(candidates)[-1].progress.compressed,
            self._runner.compressed,
            [],
        )
        assert block_table is not None
        if len(candidates) == 1:
            raise RuntimeError(
                f"the compressed KV pool is too small for {block_table.max_pages} pages; increase compressed_kv_bytes"
            )
        for some in _parts(block_table.pages):
            source = _table(some, round_up(len(some), MOVED_PAGES))
            held.append(np.asarray(self._runner.run(ReadPages(len(source)), kept.make(), source)))
        self._scheduler.compressed.swap_out(block_table, held)
        self._count(swapped_out=1, moved_bytes=block_table.count * self._page_bytes)

    def _bring_back(self, block_table: CompressedBlockTable) -> bool:
        """Swap an output in; return False if there is no room."""
        held = self._scheduler.compressed.bring_back(block_table)
        if held is None:
            return False
        for some, own in zip(_parts(block_table.pages), held, strict=True):
            target = np.full(own.shape[1], self._runner.shapes.compressed_slots // PAGE, np.int32)
            target[: len(some)] = some
            with self._runner.compressed.taken() as arrays:
                arrays[:] = self._runner.run(WritePages(len(target)), arrays, own, target)
        self._count(swapped_in=1, moved_bytes=block_table.count * self._page_bytes)
        return True

    def _count(self, **added: int) -> None:
        for name, value in added.items():
            self._counts[name] += value


def _are_readable(images: abc.Iterable[ImageRef]) -> bool:
    """Decode images; return whether all of them could be decoded."""
    try:
        return all(image.patches for image in images)
    except Exception:  # a file of a cached image may have been deleted
        return False


def _parts(pages: np.ndarray) -> list[np.ndarray]:
    """Return the pages split into parts that one program moves."""
    return [pages[first : first + MOVED_PAGES[-1]] for first in range(0, len(pages), MOVED_PAGES[-1])]


def _table(table: np.ndarray, pages: int) -> np.ndarray:
    """Return the table padded to the size of the program."""
    padded = np.zeros(pages, np.int32)
    padded[: len(table)] = table
    return padded
