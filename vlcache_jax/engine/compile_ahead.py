"""What the repeat of a request will call for is compiled when the request has been answered, while nobody waits.

A cold request computes its images; when they come again they are linked, and few rows are left: other programs. The
first repeat would wait for them.
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
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.inputs.layout import State
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import decide

_CALLS = 2  # groups of requests that wait to be looked at
_log = logging.getLogger(__name__)


class Ahead:
    """Compiles programs one after the other in a thread of its own.

    The thread has no lower priority: it holds Python's lock in turns, and a call may wait for its program.

    Args:
      programs: those of the engine.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        self._answered: list[tuple[Policy, list[Sequence]]] = []
        self._missing: list[Program[Any]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def expect(self, policy: Policy, answered: abc.Sequence[Sequence]) -> None:
        """The same sequences may come again, as many together as can run; `start` compiles what they will call for.

        Args:
          policy: of their call.
        """
        if self._stopped or not any(
            use.captured is not None for sequence in answered for use in sequence.progress.images
        ):
            return
        with self._lock:
            known, together = self._answered[-1] if self._answered else (None, [])
            if known is policy and len(together) < self._programs.shapes.ladder.max_sequences:
                together += answered
            elif len(self._answered) < _CALLS:  # a long job is not remembered as a whole
                self._answered.append((policy, [*answered]))

    def start(self) -> None:
        """Begins, where something is to be compiled; called when nobody waits any more."""
        with self._lock:
            if (self._answered or self._missing) and self._thread is None and not self._stopped:
                atexit.register(self.stop)  # what ends while a program is being compiled may crash
                self._thread = threading.Thread(target=self._run, name="vlcache-ahead", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter ends, or there are no more threads
                    self._thread = None

    def wait(self) -> None:
        """Returns when everything is compiled."""
        if (thread := self._thread) is not None:
            thread.join()

    def stop(self) -> None:
        """Ends it for good, after the program under way."""
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
                except Exception:  # whoever repeats the request will meet the error
                    _log.debug("planning a repeat failed", exc_info=True)
                else:
                    self._missing = list(dict.fromkeys(missing + self._missing))
            if not self._missing:
                continue
            program = self._missing.pop(0)
            try:
                self._programs.program(program)
            except Exception:  # whoever needs the program will meet the error
                _log.debug("compiling %s ahead failed", program, exc_info=True)


def repeat_programs(programs: Programs, policy: Policy, answered: abc.Sequence[Sequence]) -> list[Program[Any]]:
    """The programs that sequences call for when they come again, those that choose or move rows aside."""
    kv = programs.shapes.kv
    # The same prompts, with the images that were computed as known ones.
    computed = {use.span for sequence in answered for use in sequence.progress.images if use.captured is not None}
    again: State = "exact" if kv.codec is None else "approximate" if policy.approximates else "miss"
    # Answers to one request share their layout.
    layouts = {id(sequence.layout): sequence.layout.marked(computed, again) for sequence in answered}
    rehearsal = _Rehearsal(programs.shapes)
    # Linked as images are elsewhere, and beside what a first run has left in pages.
    for has_pages in (False, True, True):
        sequences = []
        for sequence in answered:
            layout = layouts[id(sequence.layout)]
            plan, choice = decide(policy, layout, kv.layers)
            owner = sequence.planned.owner if has_pages else None
            planned = dataclasses.replace(
                sequence.planned, layout=layout, plan=plan, uses=(), choice=choice, owner=owner, hold=None
            )
            sequences.append(Sequence(planned, sequence.new_slots))
        rehearsal.run(sequences)
    return programs.repeats(rehearsal.repeat)


class _Rehearsal:
    """Runs sequences one call after the other without computing anything, and notes what would be called for."""

    def __init__(self, shapes: Shapes):
        self._shapes, ladder = shapes, shapes.ladder
        pages = Pages(shapes.num_slots // PAGE - 1)
        self._scheduler = Scheduler(pages, ladder.max_sequences, ladder.max_rows, shapes.kv.layers)
        self._steps: list[Step] = []
        self._linked: set[tuple[int, int]] = set()
        self._recalled: set[int] = set()
        self._copied: set[int] = set()

    def run(self, sequences: abc.Iterable[Sequence]) -> None:
        """They run together, and leave their pages to those that come after."""
        scheduler, shapes = self._scheduler, self._shapes
        for sequence in sequences:
            scheduler.add(sequence)
        while scheduler.waiting:
            admitted = scheduler.admit()
            while turn := scheduler.next_turn(scheduler.prefilling):
                self._copied.update(cover(len(copied_pages(turn)), shapes.ladder.sequences))
                self._note_links(turn)
                self._steps += prefill_steps(turn, shapes.ladder, shapes.num_slots, shapes.kv.layers)
                scheduler.launched(turn)
            for sequence in admitted:
                if sequence.progress.lease is not None:
                    scheduler.pages.proven(sequence.progress.lease)
                scheduler.finish(sequence, failed=False)

    def _note_links(self, turn: list[Prefill]) -> None:
        """What a turn links: from the device tier, if that holds all of its images."""
        shapes = self._shapes
        spans = (span for one in turn for span in one.layout.images if not span.within(one.cached))
        lengths = [span.length for span in spans if span.state != "miss"]
        pages = {span.image.key: -(-span.length // PAGE_TOKENS) for one in turn for span in one.layout.images}
        if lengths and sum(pages.values()) * PAGE_TOKENS <= shapes.kept_tokens:
            self._recalled.update(shapes.split_recalls(lengths))
            return
        for size, number in collections.Counter(round_up(n, shapes.token_rungs) for n in lengths).items():
            self._linked.update((size, count) for count in shapes.split_links(size, number))

    @property
    def repeat(self) -> Repeat:
        """All that has come up."""
        steps, ladder = self._steps, self._shapes.ladder
        rungs = dataclasses.replace(
            ladder,
            rows=tuple(sorted({bound for step in steps for bound in step.bounds[:-1]})),
            sequences=tuple(sorted({round_up(len(step.wanted), ladder.sequences) for step in steps if step.wanted})),
        )
        layers = range(self._shapes.kv.layers - 1)
        shrinking = {layer for step in steps for layer in layers if step.bounds[layer + 1] < step.bounds[layer]}
        return Repeat(Demand(rungs, linking=True, shrinking=shrinking), self._linked, self._recalled, self._copied)
