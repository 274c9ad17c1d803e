"""Background compilation of the programs that a repeated request needs, after the request has been answered.

A cold request computes its images. When the images repeat, they are linked and few tokens are computed, which takes
other programs. Without this module the first repeat would wait for their compilation.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import logging
import threading
from collections import abc
from typing import Any

from vlcache_jax.cache.device import PAGE_TOKENS
from vlcache_jax.device.buckets import cover, round_up
from vlcache_jax.device.programs.base import Demand, Program, Repeat, Shapes
from vlcache_jax.device.programs.table import Programs
from vlcache_jax.engine.batching import Prefill, Step, copied_pages, prefill_steps
from vlcache_jax.engine.pages import BlockTable, Pages
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.engine.snapshots import StateSlots
from vlcache_jax.inputs.layout import State
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import decide

_CALLS = 2  # most groups of requests that wait for their programs to be determined
_log = logging.getLogger(__name__)


class Ahead:
    """Background compilation of programs, one after another, in its own thread.

    The thread has no lower priority: it holds Python's lock for parts of the time, and a call may wait for its program.

    Args:
      programs: programs of the engine.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        self._answered: list[tuple[Policy, list[Sequence]]] = []
        self._missing: list[Program[Any]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def expect(self, policy: Policy, answered: abc.Sequence[Sequence]) -> None:
        """Note sequences that may repeat, together with as many others as can run; `start` compiles their programs.

        Args:
          policy: reuse policy of their call.
          answered: the sequences, which have ended.
        """
        if self._stopped or not any(use.saved is not None for sequence in answered for use in sequence.progress.images):
            return
        with self._lock:
            known, together = self._answered[-1] if self._answered else (None, [])
            if known is policy and len(together) < self._programs.shapes.buckets.max_sequences:
                together += answered
            elif len(self._answered) < _CALLS:  # the rest of a long job is ignored
                self._answered.append((policy, [*answered]))

    def start(self) -> None:
        """Start the compile thread if programs may be missing. Called once no request waits."""
        with self._lock:
            if (self._answered or self._missing) and self._thread is None and not self._stopped:
                atexit.register(self.stop)  # the process may crash if it ends during a compilation
                self._thread = threading.Thread(target=self._run, name="vlcache-ahead", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter is shutting down, or the system has no more threads
                    self._thread = None

    def wait(self) -> None:
        """Wait until everything is compiled."""
        if (thread := self._thread) is not None:
            thread.join()

    def stop(self) -> None:
        """Stop for good, after the program in progress."""
        self._stopped = True
        self.wait()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped or not (self._answered or self._missing):
                    self._thread = None
                    atexit.unregister(self.stop)
                    return
                answered, self._answered = self._answered, []
            for policy, sequences in answered:
                try:
                    missing = self._programs.missing(repeat_programs(self._programs, policy, sequences))
                except Exception:  # a repeated request will raise the error
                    _log.debug("planning a repeat failed", exc_info=True)
                else:
                    self._missing = list(dict.fromkeys(missing + self._missing))
            if not self._missing:
                continue
            program = self._missing.pop(0)
            try:
                self._programs.program(program)
            except Exception:  # a request that needs the program will raise the error
                _log.debug("compiling %s ahead failed", program, exc_info=True)


def repeat_programs(programs: Programs, policy: Policy, answered: abc.Sequence[Sequence]) -> list[Program[Any]]:
    """Return the programs that repeated sequences need, except those that select or shift tokens.

    Args:
      programs: programs of the engine.
      policy: reuse policy of the call.
      answered: the sequences, which have ended.
    """
    kv = programs.shapes.kv
    # The same prompts, with the images that were computed now cached.
    computed = {use.span for sequence in answered for use in sequence.progress.images if use.saved is not None}
    again: State = "exact" if kv.codec is None else "approximate" if policy.approximates else "miss"
    # Outputs of one request share their layout.
    layouts = {id(sequence.layout): sequence.layout.marked(computed, again) for sequence in answered}
    rehearsal = _Rehearsal(programs.shapes)
    # The first run links images without any KV in pages; the others also use pages that an earlier run left.
    for has_pages in (False, True, True):
        sequences = []
        for sequence in answered:
            layout = layouts[id(sequence.layout)]
            plan, choice = decide(policy, layout, programs.shapes.config.text.num_layers)
            owner = sequence.planned.owner if has_pages else None
            planned = dataclasses.replace(
                sequence.planned, layout=layout, plan=plan, uses=(), choice=choice, owner=owner, reservation=None
            )
            sequences.append(Sequence(planned, sequence.new_slots))
        rehearsal.run(sequences)
    return programs.repeats(rehearsal.repeat)


class _Rehearsal:
    """Scheduling of sequences without computation, which records the program sizes that they need."""

    def __init__(self, shapes: Shapes):
        self._shapes, buckets = shapes, shapes.buckets
        states = StateSlots[BlockTable].of(buckets.max_sequences, shapes.num_snapshots)
        pages = Pages(shapes.num_slots // PAGE - 1, states=states)
        self._scheduler = Scheduler(pages, buckets.max_sequences, buckets.max_rows, shapes.depth[0])
        self._steps: list[Step] = []
        self._linked: set[tuple[int, int]] = set()
        self._recalled: set[int] = set()
        self._copied: set[int] = set()

    def run(self, sequences: abc.Iterable[Sequence]) -> None:
        """Run sequences together; their pages stay for later calls."""
        scheduler, shapes = self._scheduler, self._shapes
        for sequence in sequences:
            scheduler.add(sequence)
        while scheduler.waiting:
            admitted = scheduler.admit()
            while group := scheduler.next_group(scheduler.prefilling):
                self._copied.update(cover(len(copied_pages(group)), shapes.buckets.sequences))
                self._note_links(group)
                self._steps += prefill_steps(group, shapes.buckets, shapes.num_slots, *shapes.depth)
                scheduler.launched(group)
            for sequence in admitted:
                if sequence.progress.block_table is not None:
                    scheduler.pages.proven(sequence.progress.block_table)
                scheduler.finish(sequence, failed=False)

    def _note_links(self, group: list[Prefill]) -> None:
        """Record what a prefill group links.

        It links from the device tier if that fits all of its images, otherwise from host memory.
        """
        shapes = self._shapes
        spans = (span for one in group for span in one.layout.images if not span.within(one.cached))
        lengths = [span.length for span in spans if span.state != "miss"]
        pages = {span.image.key: -(-span.length // PAGE_TOKENS) for one in group for span in one.layout.images}
        if lengths and sum(pages.values()) * PAGE_TOKENS <= shapes.kept_tokens:
            self._recalled.update(shapes.split_recalls(lengths))
            return
        for size, number in collections.Counter(round_up(n, shapes.token_buckets) for n in lengths).items():
            self._linked.update((size, count) for count in shapes.split_links(size, number))

    @property
    def repeat(self) -> Repeat:
        """Program sizes recorded so far."""
        steps, buckets = self._steps, self._shapes.buckets
        sizes = dataclasses.replace(
            buckets,
            rows=tuple(sorted({bound for step in steps for bound in step.bounds[:-1]})),
            sequences=tuple(sorted({round_up(len(step.wanted), buckets.sequences) for step in steps if step.wanted})),
        )
        layers = range(self._shapes.config.text.num_layers - 1)
        shrinking = {layer for step in steps for layer in layers if step.bounds[layer + 1] < step.bounds[layer]}
        return Repeat(Demand(sizes, linking=True, shrinking=shrinking), self._linked, self._recalled, self._copied)
