"""The engine, which runs one pass of its loop after another, and the thread that drives it.

A pass admits sequences, launches prefill and a multi-step decode, and reads what was launched before. The engine knows
sequences, tokens and slots, but no messages, files or names of users. `Loop` is its thread and takes orders from other
threads. Each program that a pass launches takes the pool from the program before it, so pages may change owners between
launches. Memory outside the pool, such as cache entries, is released when everything launched until then has been read.
"""

from __future__ import annotations

import contextvars
import dataclasses
import queue
import threading
import time
from collections import abc
from concurrent.futures import Executor
from dataclasses import dataclass

from vlcache_jax.cache.device import DeviceTier
from vlcache_jax.cache.record import TierError
from vlcache_jax.cache.writer import Writer
from vlcache_jax.device.runner import Clock, Runner
from vlcache_jax.engine.batching import Step
from vlcache_jax.engine.compaction import Compactor
from vlcache_jax.engine.decode_slots import DecodeSlots
from vlcache_jax.engine.pages import Pages, PageStats
from vlcache_jax.engine.prefilling import Prefiller, PrefillGroup
from vlcache_jax.engine.readiness import PATIENCE, Readiness
from vlcache_jax.engine.request import Generation, Sequence
from vlcache_jax.engine.results import (
    InFlightResults,
    WriterMark,
    after_prefill,
    decodable,
    decode,
    free,
    held,
    note_admitted,
    note_arrival,
    note_ended,
    note_launched,
    note_ready,
    run_on,
)
from vlcache_jax.engine.scheduler import Scheduler, is_needed
from vlcache_jax.engine.uploads import DeviceCopies

Select = abc.Callable[[abc.Iterable[Sequence]], list[Generation]]  # from the sequences whose prompts are launched

_MASK_PATIENCE = 0.002  # seconds that a pass waits for the tokens that grammars allow


@dataclass(frozen=True)
class EngineStats(PageStats):
    """Current use of the KV pool, and counters since the start of the engine.

    Attributes:
      kv_cache_bytes: bytes of the KV pool that requests can use.
      compressed_kv_bytes, compressed_pages, compressed_in_use: bytes of the pool for compressed prompts, its pages (128
        tokens in one layer each), and the pages of running outputs.
      compressed: outputs that continued with a part of their prompt's KV.
      uncompressed: outputs that could not be compressed and continued with the full KV.
      swapped_out, swapped_in: how often a compressed output moved to host memory and back.
      swapped_bytes: host memory of the swapped-out pages, in bytes.
      moved_bytes: bytes copied by swapping, in both directions.
      waiting, running: outputs that wait and that run now.
      steps: passes of the loop.
      prefill_steps: prefill chunks, including chunks of tokens that a grammar forces.
      prefill_rows, padded_prefill_rows: tokens in the first layers of these chunks, padding included, and the padding
        among them.
      windows: launched decode programs.
      decode_steps: consecutive tokens that these programs decode.
      decode_rows, padded_decode_rows: tokens launched for decoding, padding included, and the padding among them.
      generated_tokens: tokens of finished outputs.
      launches: programs launched on the device.
      programs: programs compiled or loaded from disk so far.
      compiled_programs: programs among them that this process compiled.
      compile_seconds, load_seconds: seconds for which requests waited for programs to be compiled and to be loaded from
        disk. Compilation without a waiting request does not count.
      host_prefill_seconds, host_window_seconds: CPU seconds of the host for launching prefill chunks and decode
        programs.
    """

    kv_cache_bytes: int = 0
    compressed_kv_bytes: int = 0
    compressed_pages: int = 0
    compressed_in_use: int = 0
    compressed: int = 0
    uncompressed: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swapped_bytes: int = 0
    moved_bytes: int = 0
    waiting: int = 0
    running: int = 0
    steps: int = 0
    prefill_steps: int = 0
    prefill_rows: int = 0
    padded_prefill_rows: int = 0
    windows: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    padded_decode_rows: int = 0
    generated_tokens: int = 0
    launches: int = 0
    programs: int = 0
    compiled_programs: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    host_prefill_seconds: float = 0.0
    host_window_seconds: float = 0.0


class Engine:
    """Engine that runs sequences on a runner.

    Args:
      writer: writer that fills cache entries with computed KV and encoder output.
      threads: threads that decode images.

    Attributes:
      trace: for each decode program its rows, the sum of their contexts and its tokens; None (default) records nothing.
    """

    def __init__(self, runner: Runner, writer: Writer, pages: Pages, threads: Executor, tier: DeviceTier):
        self.runner, self.writer, self.pages = runner, writer, pages
        self.trace: list[tuple[int, int, int]] | None = None
        shapes, sizes = runner.shapes, (runner.buckets.max_sequences, runner.buckets.max_rows)
        self.scheduler = Scheduler(pages, *sizes, shapes.depth[0], compressed_slots=shapes.compressed_slots)
        self._clock = Clock()
        self._decode_slots = DecodeSlots(runner)
        self._prefiller = Prefiller(runner, writer, self._clock, DeviceCopies(runner, tier), pages.states)
        self._compactor = Compactor(runner, self.scheduler, self._prefiller, self._clock)
        self._readiness = Readiness(shapes.depth[0], shapes.link_groups[0].count, threads)
        self._counts = EngineStats(pages.count)
        self._group: PrefillGroup | None = None  # the group whose chunks are being launched
        self._in_flight = InFlightResults()
        self._is_held_up = False  # whether a pass skipped work whose programs are being compiled

    # For the thread that drives it.

    def prepare(self) -> None:
        """Allocate the KV pool, decode slots and device tier early. Call it from the driving thread if there is one."""
        self._prefiller.prepare()

    @property
    def is_idle(self) -> bool:
        """True if nothing is left to do."""
        return not (self.has_requests or self._in_flight.is_in_flight)

    @property
    def has_requests(self) -> bool:
        """True if any sequence runs or waits."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> None:
        """Run one pass.

        Raises:
          RuntimeError: there is something to do, but nothing can make progress.
        """
        self._count(steps=1)
        self._is_held_up = False
        launched, unread = self._in_flight.launched, self._in_flight.unread
        self._sweep()
        self._admit()
        requeue = self._prefill()
        for results in self._compactor.advance() if self.scheduler.compressed.count else ():
            self._in_flight.add(results)
        window = self.runner.buckets.window
        self._decode(free, window)
        while self._in_flight.read < launched:  # `_decode` may have read some of them already
            self._read_next()
        # Outputs with a grammar come after the others' decode program, which runs while the host finds the allowed
        # tokens. The host checks once per pass, so that an output does not depend on timing.
        known = held(self.scheduler.decoding, until=time.perf_counter() + _MASK_PATIENCE)
        # During the warm-up, forced tokens are decoded one by one, because their chunks may have no programs yet.
        if known and not self.runner.programs.is_warming:
            start = time.thread_time()
            for forced, tokens in run_on(self.runner, self._decode_slots, self.scheduler.runs(known)):
                if tokens is not None:
                    self._in_flight.add(tokens)
                self._count(**_counts_of(forced, start))
                start = time.thread_time()
        while window and self._decode(lambda decoding: [one for one in held(decoding) if one in known], 1):
            window -= 1
        self._in_flight.let_leave()
        if not (unread or self._in_flight.launched > launched or requeue or self.is_idle):
            self._wait()

    def fail(self, error: BaseException) -> None:
        """Drop the device state and end what runs, or else the next waiting sequence, with an error of `step`."""
        self.pages.reset()  # first, so that nothing is found in a lost pool
        self._compactor.reset()
        self._prefiller.reset()
        self._decode_slots.reset()
        if self._group is not None:
            self._group.upload.cancel()
        self._group = None
        self.writer.begin()
        waiting = [self.scheduler.upcoming()] if self.scheduler.waiting else []
        for sequence in [*self.scheduler.running] or waiting:
            sequence.end.fault = error
            self._end(sequence, failed=True)
        self._in_flight.clear()

    # For any thread.

    def stats(self) -> EngineStats:
        """Return the counters and the current use."""
        return dataclasses.replace(
            self._counts,
            **dataclasses.asdict(self.pages.stats()),
            **self._compactor.stats(),
            kv_cache_bytes=self.pages.count * self.pages.size * self.runner.shapes.kv.slot_bytes,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            **self.runner.programs.stats(),
        )

    def close(self) -> None:
        """Stop the threads of the engine and of its parts."""
        self._clock.close()
        self._prefiller.close()
        self.runner.programs.close()

    # Parts of a pass.

    def _sweep(self) -> None:
        """End sequences that failed or were aborted, and requeue those that depend on failed ones."""
        for sequence in self.scheduler.running:
            block_table = sequence.progress.block_table
            if block_table is not None and block_table.is_lost and not _has(self._group, sequence):
                self.scheduler.requeue(sequence, failed=True)
        for sequence in self.scheduler.waiting:
            group = sequence.end.group
            if group is not None and group.has_failed and sequence.progress.attempt == 0:
                sequence.abort()
        # The last ones end first: earlier ones may run only because the last ones depend on them.
        for one in sorted([*self.scheduler.waiting, *self.scheduler.running], key=lambda one: -one.progress.arrived):
            self._end_if_done(one)

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            if sequence.progress.attempt == 0:
                note_admitted(sequence, self._counts.steps - 1)

    def _prefill(self) -> bool:
        """Launch what is possible of the next prefill chunk; return whether sequences were requeued instead."""
        start, programs = time.thread_time(), self.runner.programs
        programs.first_launched = None
        if self._group is None:
            ready = [one for one in self.scheduler.prefilling if self._is_ready(one)]
            if not ready:
                self._encode_ahead(self.scheduler.prefilling)
                return False
            if (found := self._prefiller.next_group(self.scheduler, ready)) is None:
                self._is_held_up = True
                return False
            self._group = self._prefiller.begin(*found)
            for prefill, images in zip(self._group.prefills, self._group.images, strict=True):
                self.scheduler.replan(prefill.sequence, prefill.sequence.progress.plan, images)
        group = self._group
        try:
            launched = self._prefiller.launch(group)
        except TierError:  # the KV to link did not arrive and is computed instead
            group.upload.cancel()
            self._group = None
            self.writer.begin()
            for sequence in {prefill.sequence: None for prefill in group.prefills}:
                self.scheduler.requeue(sequence, failed=True)
            return True
        if programs.first_launched is not None:
            for prefill in group.prefills:
                note_launched(prefill.sequence, programs.first_launched)
        if launched is None:
            self._count(host_prefill_seconds=time.thread_time() - start)
            return False
        self._in_flight.add(after_prefill(self.runner, self._decode_slots, launched))
        if not group.steps:
            self.scheduler.launched(group.prefills)
            self._group = None
            self._in_flight.add(WriterMark(self.writer))
        self._count(**_counts_of(launched.step, start))
        return False

    def _encode_ahead(self, waiting: abc.Iterable[Sequence]) -> None:
        """Encode images that the first waiting sequence must encode in any case, while no sequence is ready."""
        sequence = None if self.runner.programs.is_warming else next(iter(waiting), None)
        if sequence is not None and self._prefiller.encode_ahead(sequence, self._readiness.encodable(sequence)):
            self._in_flight.add(WriterMark(self.writer))  # other sequences may wait for the encoder output

    def _is_ready(self, sequence: Sequence) -> bool:
        """Return whether a sequence can be computed now; if so, fix what it computes."""
        found = self._readiness.look(sequence, self._prefiller.ahead(sequence))
        if found is not None:
            note_ready(sequence, found)
            self.scheduler.replan(sequence, found.plan, found.images)
        return found is not None

    def _decode(self, select: Select, max_tokens: int) -> bool:
        """Launch decode programs of up to `max_tokens` tokens for selected outputs; return whether there are any."""
        done: list[Generation] = []
        for compressed in (False, True):  # compressed outputs have decode programs of their own
            # While the program for all of them is being compiled, several smaller programs run.
            while some := self._decode_alike(select, max_tokens, done, compressed):
                done += some
                if not self.runner.programs.is_warming:
                    break
        return bool(done)

    def _decode_alike(
        self, select: Select, max_tokens: int, done: list[Generation], compressed: bool
    ) -> list[Generation]:
        """Launch a decode program for selected outputs that this pass has not decoded yet; return these outputs."""
        start = time.thread_time()
        while True:
            alike = (one for one in self.scheduler.decoding if (one.progress.compressed is not None) == compressed)
            active = [one for one in select(alike) if one not in done]
            if not active:
                return []
            active = active[: decodable(self.runner, self._decode_slots, active, max_tokens)]
            if not active:
                self._is_held_up = True
                return []
            left = [sequence.max_length - sequence.progress.scheduled for sequence in active]
            # On a CPU padding costs as much as tokens, so a decode program ends where a smaller bucket suffices.
            longest = self.runner.buckets.until_fewer(left) if self.runner.is_host else max(left)
            if tokens := self.scheduler.grow(active, min(max_tokens, longest)):
                break
            if self._in_flight.unread:
                while self._in_flight.unread:
                    self._read_next()  # some outputs may have ended, and a preempted one needs all of its tokens
            elif compressed:
                self._compactor.swap_out()
            elif not self.scheduler.preempt([p.sequence for p in self._group.prefills] if self._group else ()):
                return []
        if self.trace is not None:
            self.trace.append((len(active), sum(sequence.progress.scheduled for sequence in active), tokens))
        launched = decode(self.runner, self._decode_slots, active, tokens)
        self._in_flight.add(launched)
        self.scheduler.decoded(active, tokens)
        self._count(**_counts_of_window(launched.size, len(active), tokens, start))
        return active

    def _wait(self) -> None:
        """Wait for something that another thread does for the sequences."""
        if self._is_held_up:
            self.runner.programs.wait_for_some(PATIENCE)
            return
        if not all(one.end.error is None and one.may_go_on(PATIENCE) for one in self.scheduler.decoding):
            return
        if self._group is not None:
            self._group.upload.wait()
            return
        # What a sequence lacked may have arrived meanwhile, and it may lack something else now: a cache entry, the
        # tokens that its grammar allows, or pixels.
        for _ in range(3):
            if any(one.progress.block_table and self._readiness.wait(one) for one in self.scheduler.prefilling):
                return
            if any(self._is_ready(one) or one.end.error is not None for one in self.scheduler.prefilling):
                return
        if held(self.scheduler.decoding):
            return
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        raise RuntimeError(
            f"the engine is stuck: {waiting} requests wait and {running} run, but none can continue; "
            "please report this bug"
        )

    # Results.

    def _read_next(self) -> None:
        for sequence in self._in_flight.oldest.read():
            block_table = sequence.progress.block_table
            if sequence.end.error is None and block_table is not None and (sequence.generated or sequence.is_done):
                self.pages.proven(block_table)
            self._end_if_done(sequence)
            if not sequence.end.is_finished:
                sequence.tell()
        self._in_flight.pass_oldest()

    def _end_if_done(self, sequence: Sequence) -> None:
        is_over = sequence.end.is_aborted and not is_needed(sequence, self.scheduler.running)
        if (is_over or sequence.is_done or sequence.end.error is not None) and not _has(self._group, sequence):
            self._end(sequence, failed=sequence.end.error is not None)

    def _end(self, sequence: Sequence, *, failed: bool) -> None:
        # If everything launched for its prompt has been read, no program reads its cache entries any more.
        block_table = sequence.progress.block_table
        is_settled = block_table is None or block_table.is_proven or sequence.end.fault is not None
        if self.scheduler.compressed.count:
            self._compactor.forget(sequence)
        self._prefiller.forget(sequence)
        self.scheduler.finish(sequence, failed=failed)
        if failed and sequence.end.group is not None:
            sequence.end.group.has_failed = True
        # Sequences that wait for entries which it did not fill compute their content instead.
        made = [r for u in sequence.progress.images for r in (u.saved, None if u.has_encoder else u.encoder)]
        self.writer.end([record for record in made if record is not None], failed=failed)
        self._count(generated_tokens=len(sequence.generated))
        note_ended(sequence)
        if failed and sequence.planned.reservation is not None:
            sequence.planned.reservation.fail()  # before the listener is called
        sequence.finish()
        self._in_flight.leave(sequence, now=is_settled)
        sequence.tell()
        sequence.end.listener = None  # breaks a reference cycle that would keep the memory of its cache entries

    def _count(self, **added: float) -> None:
        self._counts = dataclasses.replace(
            self._counts, **{name: getattr(self._counts, name) + value for name, value in added.items()}
        )


def _has(group: PrefillGroup | None, sequence: Sequence) -> bool:
    """Return whether a prefill group computes something of a sequence."""
    return group is not None and any(prefill.sequence is sequence for prefill in group.prefills)


def _counts_of_window(rows: int, used: int, tokens: int, start: float) -> dict[str, float]:
    """Return what a decode program adds to the counters; `used` of its rows are not padding. See `_counts_of`."""
    seconds = time.thread_time() - start
    decoded = {"decode_rows": tokens * rows, "padded_decode_rows": tokens * (rows - used)}
    return {"windows": 1, "decode_steps": tokens, "host_window_seconds": seconds} | decoded


def _counts_of(step: Step, start: float) -> dict[str, float]:
    """Return what a prefill chunk adds to the counters. `start` is the thread's CPU time before it, in seconds."""
    rows, used = step.bounds[0], step.active[0]
    seconds = time.thread_time() - start
    return {
        "prefill_steps": 1,
        "prefill_rows": rows,
        "padded_prefill_rows": rows - used,
        "host_prefill_seconds": seconds,
    }


CLOSED = "this LLM is closed"


class Loop:
    """Thread that runs an engine's passes while there is something to do.

    Args:
      engine: engine to run; no other thread may drive it. The attribute is deleted when the loop is closed.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._changed = threading.Condition()
        self._arriving: list[Sequence] = []
        self._has_begun = False  # whether arriving sequences may start although nothing runs
        self._thread: threading.Thread | None = None
        self._passes = 0
        self._is_closed = self._has_died = False

    def prepare(self) -> None:
        """Allocate the memory that the first request would otherwise wait for, if nothing runs yet.

        Requests that are submitted meanwhile wait.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._changed:
            self.check_open()
            if self._thread is None:
                self.engine.prepare()

    def submit(self, sequences: abc.Iterable[Sequence], called_at: float | None = None) -> None:
        """Queue sequences in this order, after all that were submitted before.

        If nothing runs, they start at `begin`, so that sequences submitted together start together.

        Args:
          called_at: clock time of the call that they belong to, in seconds.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._changed:
            self.check_open()
            for sequence in sequences:
                note_arrival(sequence, called_at)
                self._arriving.append(sequence)

    def begin(self) -> None:
        """Start the sequences that were submitted."""
        with self._changed:
            self._has_begun = bool(self._arriving)
            if self._thread is None and self._arriving:
                # The thread shows progress with the settings of the first caller.
                run = contextvars.copy_context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name="vlcache-engine", daemon=True)
                self._thread.start()

    def run(self, sequences: abc.Sequence[Sequence]) -> None:
        """Run sequences and return when all have ended.

        Raises:
          RuntimeError: the loop is closed. Other errors of the engine are raised unchanged.
        """
        ended: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        for sequence in sequences:
            sequence.listen(lambda sequence: ended.put(sequence) if sequence.end.is_finished else None)
        self.submit(sequences)
        self.begin()
        try:
            for _ in sequences:
                if (fault := ended.get().end.fault) is not None:
                    raise fault
        finally:
            self.abort(sequence for sequence in sequences if not sequence.end.is_finished)

    def abort(self, sequences: abc.Iterable[Sequence]) -> None:
        """Abort sequences. Return when none of them has pages, unless other sequences depend on what it computes."""
        for sequence in sequences:
            sequence.abort()
        self.begin()
        with self._changed:
            passes = self._passes
            self._changed.wait_for(lambda: self._thread is None or self._passes > passes + 1)

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """End everything that runs or waits with an error. Later submissions fail."""
        with self._changed:
            self._is_closed = True
        self.begin()  # sequences that were submitted but not begun end as well
        self.wait()
        engine = vars(self).pop("engine", None)  # releases the weights
        if engine is not None:
            engine.close()

    def check_open(self) -> None:
        """Raise a RuntimeError if the loop is closed."""
        if self._is_closed:
            raise RuntimeError(CLOSED)

    def check_alive(self) -> None:
        """Raise a RuntimeError if submitted sequences would never run: the loop is closed, or its thread has died."""
        self.check_open()
        # The thread sets this flag. Whether it is alive says nothing, since it also ends when the engine is idle, and
        # `prepare` may hold the lock for long.
        if self._has_died:
            raise RuntimeError("the engine's thread has died; see the log for its error, and open a new LLM")

    def _run(self) -> None:
        try:
            self._pass_on()
        except BaseException:
            self._has_died = True
            raise

    def _pass_on(self) -> None:
        """Run passes while there is something to do."""
        engine = self.engine
        while True:
            with self._changed:
                self._passes += 1
                arriving: list[Sequence] = []
                if self._has_begun or engine.has_requests:
                    arriving, self._arriving, self._has_begun = self._arriving, [], False
                if not arriving and engine.is_idle:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._changed.notify_all()
            for sequence in arriving:
                engine.scheduler.add(sequence)
            try:
                if self._is_closed:
                    raise RuntimeError(CLOSED)
                engine.step()
            except BaseException as error:  # `fail` passes it to the listeners
                engine.fail(error)
