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
from vlcache_jax.device.ladder import Ladder, cover, round_up
from vlcache_jax.device.programs.answer import OutputHead
from vlcache_jax.device.programs.base import Demand, Program
from vlcache_jax.device.programs.layers import Block, Embed, Layer, Slice
from vlcache_jax.device.programs.link import Link, Recall
from vlcache_jax.device.programs.state import CopyPages
from vlcache_jax.device.programs.table import Programs
from vlcache_jax.engine.batching import Prefill, Step, copied_pages, prefill_steps
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.inputs.layout import Layout, State
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import decide

_CALLS = 2  # groups of requests that wait to be looked at
_log = logging.getLogger(__name__)
# Those that depend on how many rows are left; others have been used.
_KINDS = (Embed, Layer, Block, Slice, OutputHead)


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
    shapes, config, ladder = programs.shapes, programs.shapes.config, programs.shapes.ladder
    layers, patches = config.text.num_layers, config.vision.merge_size**2
    # The same prompts, with the images that were computed as known ones.
    known = {id(use.span) for sequence in answered for use in sequence.progress.images if use.captured is not None}
    layouts: dict[int, Layout] = {}  # answers to one request share theirs
    linked: set[tuple[int, int]] = set()  # tokens that images are padded to, and how many are linked together
    recalled: set[int] = set()  # tokens that are linked together from the device tier
    copied: set[int] = set()  # pages that are copied together
    again: State = "exact" if shapes.kv.codec is None else "approximate" if policy.approximates else "miss"
    for sequence in answered:
        spans = [dataclasses.replace(s, state=again) if id(s) in known else s for s in sequence.layout.spans]
        layout = dataclasses.replace(sequence.layout, spans=tuple(spans))
        layouts.setdefault(id(sequence.layout), layout)

    def note_links(turn: list[Prefill]) -> None:
        spans = (span for one in turn for span in one.layout.images if not span.within(one.cached))
        lengths = [span.length for span in spans if span.state != "miss"]
        pages = {span.image.key: -(-span.length // PAGE_TOKENS) for one in turn for span in one.layout.images}
        if lengths and sum(pages.values()) * PAGE_TOKENS <= shapes.kept_tokens:
            recalled.update(shapes.split_recalls(lengths))
            return
        for size, number in collections.Counter(round_up(n, shapes.token_rungs) for n in lengths).items():
            linked.update((size, count) for count in shapes.split_links(size, number))

    def run(scheduler: Scheduler, owned: bool) -> list[Step]:
        steps = []
        for sequence in answered:
            layout = layouts[id(sequence.layout)]
            plan, choice = decide(policy, layout, layers)
            owner = sequence.owner if owned else None
            scheduler.add(Sequence(layout, plan, sequence.new_slots, choice=choice, owner=owner))
        while scheduler.waiting:
            admitted = scheduler.admit()
            while turn := scheduler.next_turn(scheduler.prefilling):
                copied.update(cover(len(copied_pages(turn)), ladder.sequences))
                note_links(turn)
                steps += prefill_steps(turn, ladder, shapes.num_slots, layers)
                scheduler.launched(turn)
            for sequence in admitted:
                if sequence.progress.lease is not None:
                    scheduler.pages.proven(sequence.progress.lease)
                scheduler.finish(sequence, failed=False)
        return steps

    # Linked as images are elsewhere, and beside what a first run has left in pages.
    scheduler = Scheduler(Pages(shapes.num_slots // PAGE - 1), ladder.max_sequences, ladder.max_rows, layers)
    steps = [*run(scheduler, False), *run(scheduler, True), *run(scheduler, True)]
    # The programs of the sizes that came up, without those that link other sizes.
    rungs = Ladder(
        rows=tuple(sorted({bound for step in steps for bound in step.bounds[:-1]})),
        patches=tuple(sorted({size * patches for size, _ in linked})) or ladder.patches[:1],
        sequences=tuple(sorted({round_up(len(step.wanted), ladder.sequences) for step in steps if step.wanted})),
    )
    shrinking = {layer for step in steps for layer in range(layers - 1) if step.bounds[layer + 1] < step.bounds[layer]}

    def is_wanted(program: Program[Any]) -> bool:
        if isinstance(program, Link):
            return (program.size, program.count) in linked
        if isinstance(program, Recall):
            return program.size in recalled
        return isinstance(program, _KINDS)

    family = programs.family(Demand(rungs, linking=True, shrinking=shrinking))
    return [*filter(is_wanted, family), *map(CopyPages, sorted(copied))]
