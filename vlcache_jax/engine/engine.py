"""The engine: one pass of the loop after the other, and the thread that runs it.

A pass admits sequences, launches prefill and a multi-step decode, and reads what was launched before. The engine knows
sequences, tokens and slots; it does not know messages, files or names of users. `Loop` is its thread and takes orders
from other threads. What a pass launches takes the pool from program to program, so pages may change hands between
launches. Memory outside the pool, such as records, is released when everything launched until then has been read.
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
from vlcache_jax.engine.request import Generation, Sequence
from vlcache_jax.engine.results import (
    Flight,
    Recorded,
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
from vlcache_jax.engine.scheduler import PATIENCE, Readiness, Scheduler
from vlcache_jax.engine.uploads import DeviceCopies

Find = abc.Callable[[abc.Iterable[Sequence]], list[Generation]]  # some of those whose prompts have been launched

_MASK_PATIENCE = 0.002  # seconds that a pass waits to know what may come next


@dataclass(frozen=True)
class EngineStats(PageStats):
    """What the KV pool's pages hold now, and counters since the engine began.

    Attributes:
      kv_cache_bytes: of the pages that requests can use.
      compressed_kv_bytes, compressed_pages, compressed_in_use: of the pool for compressed prompts: its bytes, its
        pages, each of 128 tokens in one layer, and those of answers that run.
      compressed: answers that went on with a part of their prompts.
      uncompressed: answers that were to, and could not be: they went on with the whole.
      put_aside, brought_back: how often one of them gave its pages to others, and had as many again.
      aside_bytes: of host memory that what these pages held takes now.
      moved_bytes: that were copied there and back.
      waiting, running: requests now, each answer counted.
      steps: passes of the loop.
      prefill_steps: steps that computed prompts, or many tokens of answers that a grammar forces.
      prefill_rows, padded_prefill_rows: rows of their first layers, and how many of these are padding.
      windows: programs that decoded.
      decode_steps: tokens after each other for which they were launched.
      decode_rows, padded_decode_rows: rows launched for these, and how many of these are padding.
      generated_tokens: of answers, as returned.
      launches: programs handed to the device.
      programs: compiled so far, or read from disk.
      compiled_programs: of these, those that this process compiled.
      compile_seconds, load_seconds: that requests waited for programs to be compiled, and to be read from disk; what is
        compiled while no request waits is not in it.
      host_prefill_seconds, host_window_seconds: of the host's processor, to launch prefill steps and windows.
    """

    kv_cache_bytes: int = 0
    compressed_kv_bytes: int = 0
    compressed_pages: int = 0
    compressed_in_use: int = 0
    compressed: int = 0
    uncompressed: int = 0
    put_aside: int = 0
    brought_back: int = 0
    aside_bytes: int = 0
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
    """Runs sequences on a runner.

    Args:
      runner: computes.
      writer: fills records with what was computed.
      pages: of the runner's pool.
      threads: decode pictures.
      tier: says which records are kept on the device.

    Attributes:
      trace: a list, of every window the rows, the sum of their contexts, and its tokens after each other; None: nobody
        wants it.
    """

    def __init__(self, runner: Runner, writer: Writer, pages: Pages, threads: Executor, tier: DeviceTier):
        self.runner, self.writer, self.pages = runner, writer, pages
        self.trace: list[tuple[int, int, int]] | None = None
        layers, ladder, slots = runner.config.text.num_layers, runner.ladder, runner.shapes.compressed_slots
        self.scheduler = Scheduler(pages, ladder.max_sequences, ladder.max_rows, layers, slots)
        self._clock = Clock()
        self._lanes = DecodeSlots(runner)
        self._prefiller = Prefiller(runner, writer, self._clock, DeviceCopies(runner, tier))
        self._compactor = Compactor(runner, self.scheduler, self._prefiller, self._clock)
        self._readiness = Readiness(layers, runner.shapes.link_groups[0].stop, threads)
        self._counts = EngineStats(pages.count)
        self._turn: PrefillGroup | None = None  # whose steps are being launched
        self._flight = Flight()
        self._is_held_up = False  # whether a pass passed over something whose programs are being compiled

    # From the thread that drives it.

    def prepare(self) -> None:
        """Takes the device's memory for pool, lanes and copies, as the first request would. Or while nobody drives."""
        self._prefiller.prepare()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.has_requests or self._flight.is_under_way)

    @property
    def has_requests(self) -> bool:
        """Whether any run or wait."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> None:
        """One pass.

        Raises:
          RuntimeError: there is something to do, but nothing of it can be done.
        """
        self._count(steps=1)
        self._is_held_up = False
        launched, unread = self._flight.launched, self._flight.unread
        self._sweep()
        self._admit()
        put_back = self._prefill()
        for results in self._compactor.advance() if self.scheduler.compressed.count else ():
            self._flight.add(results)
        window = self.runner.ladder.window
        self._decode(free, window)
        while self._flight.read < launched:  # `_decode` may have read some of these already
            self._read_next()
        # Behind the others' window, which runs while the host finds out what may come next. Forced tokens follow. The
        # host looks once: how an answer goes on must not hang on the time.
        known = held(self.scheduler.decoding, until=time.perf_counter() + _MASK_PATIENCE)
        # While programs are compiled, they come token by token: their steps may have no programs yet.
        if known and not self.runner.programs.is_warming:
            start = time.thread_time()
            for forced, tokens in run_on(self.runner, self._lanes, self.scheduler.runs(known)):
                if tokens is not None:
                    self._flight.add(tokens)
                self._count(**_counts_of(forced, start))
                start = time.thread_time()
        while window and self._decode(lambda decoding: [one for one in held(decoding) if one in known], 1):
            window -= 1
        self._flight.let_leave()
        if not (unread or self._flight.launched > launched or put_back or self.is_idle):
            self._wait()

    def fail(self, error: BaseException) -> None:
        """After an error in `step`: what the device held is gone, and everything that ran, or was to run next."""
        self.pages.reset()  # first: nothing may be found in a pool that is gone
        self._compactor.reset()
        self._prefiller.reset()
        self._lanes.reset()
        if self._turn is not None:
            self._turn.upload.cancel()
        self._turn = None
        self.writer.begin()
        waiting = [self.scheduler.upcoming()] if self.scheduler.waiting else []
        for sequence in [*self.scheduler.running] or waiting:
            sequence.end.fault = error
            self._end(sequence, failed=True)
        self._flight.clear()

    # From any thread.

    def stats(self) -> EngineStats:
        """Counters, and what there is now."""
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
        """It runs nothing any more."""
        self._clock.close()
        self._prefiller.close()
        self.runner.programs.close()

    # Parts of a pass.

    def _sweep(self) -> None:
        """Ends what failed before it ran and what nobody wants any more, and puts back what counts on what failed."""
        for sequence in self.scheduler.running:
            lease = sequence.progress.lease
            if lease is not None and lease.is_lost and not _has(self._turn, sequence):
                self.scheduler.put_back(sequence, failed=True)
        for sequence in self.scheduler.waiting:
            group = sequence.end.group
            if group is not None and group.has_failed and sequence.progress.attempt == 0:
                sequence.abort()
        # The last ones first: they may be the only ones that count on earlier ones.
        for one in sorted([*self.scheduler.waiting, *self.scheduler.running], key=lambda one: -one.progress.arrived):
            self._end_if_done(one)

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            if sequence.progress.attempt == 0:
                note_admitted(sequence, self._counts.steps - 1)

    def _prefill(self) -> bool:
        """Launches of the next prefill step what can be launched; whether sequences were put back instead."""
        start, programs = time.thread_time(), self.runner.programs
        programs.first_launched = None
        if self._turn is None:
            ready = [one for one in self.scheduler.prefilling if self._is_ready(one)]
            if not ready:
                self._encode_ahead(self.scheduler.prefilling)
                return False
            if (found := self._prefiller.next_turn(self.scheduler, ready)) is None:
                self._is_held_up = True
                return False
            self._turn = self._prefiller.begin(*found)
            for prefill, images in zip(self._turn.prefills, self._turn.images, strict=True):
                self.scheduler.replan(prefill.sequence, prefill.sequence.progress.plan, images)
        turn = self._turn
        try:
            launched = self._prefiller.launch(turn)
        except TierError:  # what it was to link is computed
            turn.upload.cancel()
            self._turn = None
            self.writer.begin()
            for sequence in {prefill.sequence: None for prefill in turn.prefills}:
                self.scheduler.put_back(sequence, failed=True)
            return True
        if programs.first_launched is not None:
            for prefill in turn.prefills:
                note_launched(prefill.sequence, programs.first_launched)
        if launched is None:
            self._count(host_prefill_seconds=time.thread_time() - start)
            return False
        self._flight.add(after_prefill(self.runner, self._lanes, launched))
        if not turn.steps:
            self.scheduler.launched(turn.prefills)
            self._turn = None
            self._flight.add(Recorded(self.writer))
        self._count(**_counts_of(launched.step, start))
        return False

    def _encode_ahead(self, waiting: abc.Iterable[Sequence]) -> None:
        """While nobody's records are there: the first one's images that it will have to encode in any case."""
        sequence = None if self.runner.programs.is_warming else next(iter(waiting), None)
        if sequence is not None and self._prefiller.encode_ahead(sequence, self._readiness.encodable(sequence)):
            self._flight.add(Recorded(self.writer))  # others may wait for what records hold of it

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether a sequence can be computed now; then what it computes is settled."""
        found = self._readiness.look(sequence, self._prefiller.ahead(sequence))
        if found is not None:
            note_ready(sequence, found)
            self.scheduler.replan(sequence, found.plan, found.images)
        return found is not None

    def _decode(self, find: Find, most: int) -> bool:
        """Launches windows of up to `most` tokens of those that `find` finds; whether there are any. Those that go on
        with a part of their prompts have one of their own."""
        done: list[Generation] = []
        for compressed in (False, True):
            # While the program for all of them is coming, there are several windows.
            while some := self._decode_alike(find, most, done, compressed):
                done += some
                if not self.runner.programs.is_warming:
                    break
        return bool(done)

    def _decode_alike(self, find: Find, most: int, done: list[Generation], compressed: bool) -> list[Generation]:
        """Launches a window of those that are not done in this pass; returns its rows."""
        start = time.thread_time()
        while True:
            alike = (one for one in self.scheduler.decoding if (one.progress.compressed is not None) == compressed)
            active = [one for one in find(alike) if one not in done]
            if not active:
                return []
            active = active[: decodable(self.runner, self._lanes, active, most)]
            if not active:
                self._is_held_up = True
                return []
            left = [sequence.most - sequence.progress.scheduled for sequence in active]
            # A CPU computes padding as slowly as rows, so that a window ends where fewer rows will do.
            longest = self.runner.ladder.until_fewer(left) if self.runner.is_host else max(left)
            if tokens := self.scheduler.grow(active, min(most, longest)):
                break
            if self._flight.unread:
                while self._flight.unread:
                    self._read_next()  # some may have ended; and who is put back must know its tokens
            elif compressed:
                self._compactor.put_aside()
            elif not self.scheduler.preempt([p.sequence for p in self._turn.prefills] if self._turn else ()):
                return []
        if self.trace is not None:
            self.trace.append((len(active), sum(sequence.progress.scheduled for sequence in active), tokens))
        launched = decode(self.runner, self._lanes, active, tokens)
        self._flight.add(launched)
        self.scheduler.decoded(active, tokens)
        self._count(**_counts_of_window(launched.size, len(active), tokens, start))
        return active

    def _wait(self) -> None:
        """Waits for something that others do for those that run."""
        if self._is_held_up:
            self.runner.programs.wait_for_some(PATIENCE)
            return
        if not all(one.end.error is None and one.may_go_on(PATIENCE) for one in self.scheduler.decoding):
            return
        if self._turn is not None:
            self._turn.upload.wait()
            return
        # What one lacked may have come since it was looked at, and then it may lack something else: a record, what its
        # grammar allows, a picture.
        for _ in range(3):
            if any(one.progress.lease and self._readiness.wait(one) for one in self.scheduler.prefilling):
                return
            if any(self._is_ready(one) or one.end.error is not None for one in self.scheduler.prefilling):
                return
        if held(self.scheduler.decoding):
            return
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        raise RuntimeError(f"nothing can go on: {waiting} requests wait and {running} run")

    # Results.

    def _read_next(self) -> None:
        for sequence in self._flight.oldest.read():
            lease = sequence.progress.lease
            if sequence.end.error is None and lease is not None and (sequence.generated or sequence.is_done):
                self.pages.proven(lease)
            self._end_if_done(sequence)
            if not sequence.end.is_finished:
                sequence.tell()
        self._flight.pass_oldest()

    def _end_if_done(self, sequence: Sequence) -> None:
        is_over = sequence.end.is_aborted and not self.scheduler.is_needed(sequence)
        if (is_over or sequence.is_done or sequence.end.error is not None) and not _has(self._turn, sequence):
            self._end(sequence, failed=sequence.end.error is not None)

    def _end(self, sequence: Sequence, *, failed: bool) -> None:
        # What was launched for its prompt has been read, or nothing was: nobody reads its records any more.
        lease = sequence.progress.lease
        is_settled = lease is None or lease.is_proven or sequence.end.fault is not None
        if self.scheduler.compressed.count:
            self._compactor.forget(sequence)
        self._prefiller.forget(sequence)
        self.scheduler.finish(sequence, failed=failed)
        if failed and sequence.end.group is not None:
            sequence.end.group.has_failed = True
        # Who waits for what it did not fill, or damaged, computes instead.
        made = [r for u in sequence.progress.images for r in (u.captured, None if u.has_encoder else u.encoder)]
        self.writer.end([record for record in made if record is not None], failed=failed)
        self._count(generated_tokens=len(sequence.generated))
        note_ended(sequence)
        if failed and sequence.planned.hold is not None:
            sequence.planned.hold.fail()  # before anyone is told
        sequence.finish()
        self._flight.leave(sequence, now=is_settled)
        sequence.tell()
        sequence.end.listener = None  # no circle keeps its records' memory

    def _count(self, **more: float) -> None:
        self._counts = dataclasses.replace(
            self._counts, **{name: getattr(self._counts, name) + value for name, value in more.items()}
        )


def _has(turn: PrefillGroup | None, sequence: Sequence) -> bool:
    """Whether a turn computes something of a sequence."""
    return turn is not None and any(prefill.sequence is sequence for prefill in turn.prefills)


def _counts_of_window(rows: int, used: int, tokens: int, start: float) -> dict[str, float]:
    """What a window of so many rows, of which some are used, adds to the counts; `start` as in `_counts_of`."""
    seconds = time.thread_time() - start
    decoded = {"decode_rows": tokens * rows, "padded_decode_rows": tokens * (rows - used)}
    return {"windows": 1, "decode_steps": tokens, "host_window_seconds": seconds} | decoded


def _counts_of(step: Step, start: float) -> dict[str, float]:
    """What a prefill step adds to the counts; `start` is when the thread began with it."""
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
    """Runs an engine's passes in a thread of its own, as long as there is something to do.

    Args:
      engine: is driven by nobody else; gone when the loop is closed.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._changed = threading.Condition()
        self._arriving: list[Sequence] = []
        self._has_begun = False  # whether these may run although nothing does
        self._thread: threading.Thread | None = None
        self._passes = 0
        self._is_closed = self._has_died = False

    def prepare(self) -> None:
        """Takes the memory that the first request would wait for. What runs has taken it; what is submitted waits.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._changed:
            self.check_open()
            if self._thread is None:
                self.engine.prepare()

    def submit(self, sequences: abc.Iterable[Sequence], called_at: float | None = None) -> None:
        """These run when there is room, in this order, behind all that were submitted before.

        Where nothing runs, nothing does before `begin`, so that what is submitted together begins together.

        Args:
          called_at: when the call came that brings them.

        Raises:
          RuntimeError: the loop is closed.
        """
        with self._changed:
            self.check_open()
            for sequence in sequences:
                note_arrival(sequence, called_at)
                self._arriving.append(sequence)

    def begin(self) -> None:
        """What has been submitted runs."""
        with self._changed:
            self._has_begun = bool(self._arriving)
            if self._thread is None and self._arriving:
                # Progress is shown as whoever asks first wants it.
                run = contextvars.copy_context().run
                self._thread = threading.Thread(target=run, args=(self._run,), name="vlcache-engine", daemon=True)
                self._thread.start()

    def run(self, sequences: abc.Sequence[Sequence]) -> None:
        """Runs these and returns when all have ended.

        Raises:
          RuntimeError: the loop is closed. Other errors of the engine are raised as they are.
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
        """Nobody wants these any more; returns when none of them has pages, unless others count on what it computes."""
        for sequence in sequences:
            sequence.abort()
        self.begin()
        with self._changed:
            passes = self._passes
            self._changed.wait_for(lambda: self._thread is None or self._passes > passes + 1)

    def wait(self) -> None:
        """Returns when nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def close(self) -> None:
        """Ends everything that runs or waits, with an error; nothing can be submitted any more."""
        with self._changed:
            self._is_closed = True
        self.begin()  # what has been submitted, and nobody has begun, ends too
        self.wait()
        engine = vars(self).pop("engine", None)  # who is closed needs no weights
        if engine is not None:
            engine.close()

    def check_open(self) -> None:
        """Raises a RuntimeError if the loop is closed."""
        if self._is_closed:
            raise RuntimeError(CLOSED)

    def check_alive(self) -> None:
        """Raises a RuntimeError if nothing that is submitted will run: it is closed, or its thread has died."""
        self.check_open()
        # The thread tells: it also begins and ends in good order, and the lock is held by `prepare` for long.
        if self._has_died:
            raise RuntimeError("the engine's thread has died")

    def _run(self) -> None:
        try:
            self._pass_on()
        except BaseException:
            self._has_died = True
            raise

    def _pass_on(self) -> None:
        """Pass after pass, as long as there is something to do."""
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
            except BaseException as error:  # whoever waits for what it ended is told
                engine.fail(error)
