"""Takes prompts whose first tokens are there to what their answers go on with.

A prompt is observed: some of its rows go through the layers once more, write nothing, and each layer adds up what its
keys receive of their attention. That comes behind the first token, which does not wait for it. From the sums follows
how much each layer keeps, and what; when there are pages for it, it is moved into them, and the prompt's own are given
up. Where answers need more of these pages than there are, one waits in host memory.
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
from vlcache_jax.device.buckets import Ladder, round_up
from vlcache_jax.device.programs.base import MOVED_PAGES, pack
from vlcache_jax.device.programs.compress import Compact, EmptySums, Observe, ReadPages, WritePages
from vlcache_jax.device.runner import Clock, Runner
from vlcache_jax.engine.batching import Prefill, Step, prefill_steps
from vlcache_jax.engine.compressed_pages import CompressedLease, Compression
from vlcache_jax.engine.prefilling import Prefiller
from vlcache_jax.engine.request import Generation, Sequence
from vlcache_jax.engine.results import CompressionResult, Observed, Results
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.pallas_kernels import PAGE, make_work
from vlcache_jax.reuse.policies import full_prefill

_AT_ONCE = 2  # prompts whose sums are on the device
_COUNTED = "compressed", "uncompressed", "put_aside", "brought_back", "moved_bytes"  # see `EngineStats`


@dataclass(eq=False)
class _Observation:
    """What has been found out of a prompt.

    Attributes:
      rows: that were observed.
      sums: what the keys received, see `Observe`; None: nothing was observed.
      took: seconds of the device.
      compression: what is kept; None: it is not known yet.
      windows: of each layer, how many of these tokens are the prompt's last ones.
    """

    rows: int
    sums: jax.Array | None = None
    took: list[Future[float]] = field(default_factory=list)
    compression: Compression | None = None
    windows: tuple[int, ...] = ()


class Compactor:
    """Observes and compacts.

    Args:
      runner: computes.
      scheduler: gives pages.
      prefiller: hands observed rows of images their encoder rows.
      clock: times it.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, prefiller: Prefiller, clock: Clock):
        self._runner, self._scheduler, self._prefiller, self._clock = runner, scheduler, prefiller, clock
        # Of a step that observes: as few rows as there is a program for.
        self._ladder = Ladder(runner.ladder.rows[:1], runner.ladder.patches, runner.ladder.sequences)
        self._found: dict[Generation, _Observation] = {}
        self._counts = dict.fromkeys(_COUNTED, 0)

    def stats(self) -> dict[str, int]:
        """See `EngineStats`."""
        pages, page_bytes = self._scheduler.compressed, self._page_bytes
        return self._counts | {
            "compressed_kv_bytes": pages.count * page_bytes,
            "compressed_pages": pages.count,
            "compressed_in_use": pages.in_use,
            "aside_bytes": pages.aside_bytes,
        }

    @property
    def _page_bytes(self) -> int:
        kv = self._runner.shapes.kv
        return PAGE * kv.slot_bytes // kv.layers

    def reset(self) -> None:
        """What the device held is gone."""
        self._found.clear()
        self._scheduler.compressed.reset()

    def forget(self, answer: Sequence) -> None:
        """It has ended."""
        if isinstance(answer, Generation):
            self._found.pop(answer, None)

    def advance(self) -> abc.Iterator[Results]:
        """Launches what can be launched; yields what is to be read of it. Nobody overtakes who lacks pages."""
        answers = (one for one in self._scheduler.decoding if isinstance(one, Generation))
        lacking = [one for one in answers if one.is_aside or (one.awaits_compression and one.token_ids)]
        for answer in self._scheduler.turns.sorted(lacking):
            if (lease := answer.progress.compressed) is not None:
                if not self._bring_back(lease):
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
        """Finds out what is kept of a prompt, or lets it be found out."""
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
                yield Observed(answer, zeros, decide)
                return
        decide(None)

    def _compression(self, compressor: Compressor, length: int, gamma: np.ndarray | None) -> Compression:
        kv = self._runner.shapes.kv
        counts = make_counts(compressor, length, gamma, kv.layers)
        of_token = kv.slot_bytes // self._runner.devices.copies // kv.layers
        told = None if gamma is None else tuple(gamma.tolist())
        return Compression(
            compressor.name, length, counts, told, of_token * sum(counts), of_token * length * kv.layers
        )  # fmt: skip

    def _check(self, answer: Generation, compression: Compression) -> None:
        """Raises a ValueError if there will never be enough pages."""
        pages = self._scheduler.compressed
        needed = pages.needed(compression.kept, answer.new_slots - 1)
        if needed > pages.count and not compression.is_whole:
            raise ValueError(
                f"max_tokens must be such that what is kept of the prompt and the answer fit in compressed_kv_bytes, "
                f"which holds {pages.count} pages of {PAGE} tokens in a layer, got {answer.new_slots}, for which "
                f"{compression.policy} needs {needed}"
            )

    def _observe(self, answer: Generation, found: _Observation) -> jax.Array | None:
        """Launches it; returns how often attention is next to nothing. None: it lacks pixels."""
        lease, layout, layers = answer.progress.lease, answer.layout, self._runner.shapes.kv.layers
        assert lease is not None
        assert answer.planned.options.compress is not None
        # The rows as if they were computed once more, into pages that nobody writes.
        plan = full_prefill(layout, layers, ()).behind(len(layout) - found.rows)
        plan = replace(plan, slot=answer.progress.plan.slot)
        prefill = Prefill(answer, layout, plan, lease.table, shared=len(lease.table), links=False)
        turn = self._prefiller.begin([prefill], self._ladder)
        turn.kept = {image: record for image, record in turn.kept.items() if record.is_ready}
        looked_at = {span.image for span in layout.images if plan.depth[span.tokens].any()}
        if not _are_readable(looked_at - turn.kept.keys() - turn.here.keys()):
            return None
        pages = self._rung(lease.table)
        sums, threshold = self._runner.run(EmptySums(pages)), np.float32(answer.planned.options.compress.p or 0)
        for step in prefill_steps([prefill], self._ladder, self._runner.num_slots, layers):
            self._prefiller.stage(step, turn)
            sums = self._runner.run(
                Observe(pages), sums, self._runner.text, self._runner.pool.make(), self._runner.encoder_rows(),
                pack(step.rows, self._runner.ladder.max_rows), self._work(step, lease.table),
                _table(lease.table, pages), threshold,
            )  # fmt: skip
        found.sums, zeros = sums
        found.took.append(self._clock.mark([zeros]))
        return zeros

    def _work(self, step: Step, table: np.ndarray) -> object:
        count = step.active[0]
        end, start = step.rows.k_end[:count], np.zeros(count, np.int32)
        return make_work(start, start, end, [table], self._runner.shapes.work_config(step.bounds[0]))

    def _rung(self, table: np.ndarray) -> int:
        return round_up(len(table), self._runner.shapes.page_rungs)

    # Compacting.

    def _has_pages(self, answer: Generation, compression: Compression) -> bool:
        """Whether there are pages for it, if it takes any; then it has them."""
        return compression.is_whole or self._scheduler.compress(answer, compression.kept)

    def _settle(self, answer: Generation, found: _Observation, compression: Compression) -> Results:
        """Lets an answer go on."""
        del self._found[answer]
        if compression.is_whole:
            self._scheduler.stays_whole(answer)
        else:
            self._compact(answer, found, compression)
            self._scheduler.compacted(answer)
            self._count(compressed=1)
        return CompressionResult(answer, compression, found.took)

    def _compact(self, answer: Generation, found: _Observation, compression: Compression) -> None:
        lease, compressed = answer.progress.lease, answer.progress.compressed
        compressor = answer.planned.options.compress
        assert lease is not None
        assert compressed is not None
        assert compressor is not None
        pages = self._rung(lease.table)
        received = self._runner.run(EmptySums(pages))[0] if found.sums is None else found.sums
        usual = USUAL.get(compressor.scores)
        program = Compact(pages, compressor.scores if usual is None else None)
        table = _table(lease.table, pages)
        seed, pool = seeds(answer.layout, len(compression.kept)), self._runner.pool.make()
        for layer, (count, window) in enumerate(zip(compression.kept, found.windows, strict=True)):
            numbers = np.array([layer, compression.prompt_tokens, count, window, usual or 0], np.int32)
            target = _table(compressed.tables[layer][:pages], pages)
            with self._runner.compressed.taken() as arrays:
                arrays[:], tokens = self._runner.run(
                    program, arrays, pool[layer], received, numbers, seed[layer], table, target
                )
        found.took.append(self._clock.mark([tokens]))

    # Where pages are short.

    def put_aside(self) -> None:
        """Lets others have the pages of the last of those that are compressed. All that was launched has been read.

        Raises:
          RuntimeError: no others have any.
        """
        having = [one for one in self._scheduler.decoding if one.progress.compressed is not None and not one.is_aside]
        lease, kept, held = self._scheduler.turns.sorted(having)[-1].progress.compressed, self._runner.compressed, []
        assert lease is not None
        if len(having) == 1:
            raise RuntimeError(f"{lease.most} pages must fit in the compressed KV pool")
        for some in _parts(lease.pages):
            source = _table(some, round_up(len(some), MOVED_PAGES))
            held.append(np.asarray(self._runner.run(ReadPages(len(source)), kept.make(), source)))
        self._scheduler.compressed.put_aside(lease, held)
        self._count(put_aside=1, moved_bytes=lease.count * self._page_bytes)

    def _bring_back(self, lease: CompressedLease) -> bool:
        """Whether there is room for it; then it has its pages as they were."""
        held = self._scheduler.compressed.bring_back(lease)
        if held is None:
            return False
        for some, own in zip(_parts(lease.pages), held, strict=True):
            target = np.full(own.shape[1], self._runner.shapes.compressed_slots // PAGE, np.int32)
            target[: len(some)] = some
            with self._runner.compressed.taken() as arrays:
                arrays[:] = self._runner.run(WritePages(len(target)), arrays, own, target)
        self._count(brought_back=1, moved_bytes=lease.count * self._page_bytes)
        return True

    def _count(self, **more: int) -> None:
        for name, value in more.items():
            self._counts[name] += value


def _are_readable(pictures: abc.Iterable[ImageRef]) -> bool:
    """Whether pictures can be decoded; then they are."""
    try:
        return all(picture.patches for picture in pictures)
    except Exception:  # they were known, and a file may be gone since
        return False


def _parts(pages: np.ndarray) -> list[np.ndarray]:
    """Of some pages those that one program moves, one after the other."""
    return [pages[first : first + MOVED_PAGES[-1]] for first in range(0, len(pages), MOVED_PAGES[-1])]


def _table(table: np.ndarray, pages: int) -> np.ndarray:
    """As long as the program wants it."""
    padded = np.zeros(pages, np.int32)
    padded[: len(table)] = table
    return padded
