"""Who runs when, and in which pages (host).

Requests are admitted in their order, as long as there are pages for their prompts. What one links or shares of another
that is computed in the same wave, it waits for in a later *turn*. Pages are taken as answers grow; where there are none
left, the youngest gives its own back and waits, to go on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Listed

import numpy as np

from vlcache_jax.engine.batching import Prefill
from vlcache_jax.engine.pages import Lease, Pages
from vlcache_jax.engine.request import Generation, Sequence


class Scheduler:
    """Admits sequences and gives them pages.

    Args:
      pages: of the pool.
      max_sequences: that run together.
      num_layers: of the decoder.
    """

    def __init__(self, pages: Pages, max_sequences: int, num_layers: int):
        self.pages = pages
        self._max_sequences = max_sequences
        self._num_layers = num_layers

    def admit[S: Sequence](self, waiting: deque[S]) -> tuple[list[S], list[list[S]]]:
        """Takes those that run together from what waits.

        Returns:
          (all of them, and those of each turn). A sequence that had failed before has no turn.

        Raises:
          RuntimeError: nothing runs, and there are not enough pages for the first.
        """
        wave: list[S] = []
        turns: defaultdict[int, list[S]] = defaultdict(list)
        alone: defaultdict[int, list[list[S]]] = defaultdict(list)
        filling: dict[int, Lease] = {}  # id of a record -> who fills it
        answers: dict[int, Lease] = {}  # id of a layout -> pages of the first answer to the request
        spare = 0
        while waiting and len(wave) < self._max_sequences:
            sequence = waiting[0]
            if sequence.error is None:
                lease = self._take(sequence, answers.get(id(sequence.layout)), spare)
                if lease is None and not wave:
                    raise RuntimeError(f"a prompt of {sequence.length} tokens must fit in the KV pool's pages")
                if lease is None:
                    break
                if sequence.ran is None:
                    self.pages.count_hit(lease)
                answers.setdefault(id(sequence.layout), lease)
                for use in sequence.images:
                    is_there = use.span.start + use.span.length <= lease.cached
                    donor = None if is_there or use.linked is None else filling.get(id(use.linked))
                    if donor is not None:
                        lease.turn = max(lease.turn, donor.turn + donor.turns)
                    if use.captured is not None:
                        filling[id(use.captured)] = lease
                sequence.lease = lease
                if sequence.choice is not None and not lease.is_fork:
                    alone[lease.turn].append([sequence])
                else:
                    turns[lease.turn].append(sequence)
                spare += sequence.most > self.pages.size * len(lease.table)
            wave.append(waiting.popleft())
        order = sorted({*turns, *alone})
        return wave, [group for turn in order for group in ([turns[turn]] if turns[turn] else []) + alone[turn]]

    def _take(self, sequence: Sequence, first: Lease | None, spare: int) -> Lease | None:
        length = sequence.length
        if first is not None and not sequence.generated:
            return self.pages.fork(first, len(sequence.layout), length, spare=spare)
        chain = sequence.chain
        if chain is None:
            return self.pages.take(length, spare=spare, turns=_turns(sequence))
        exact = sequence.exact(self._num_layers)
        most = int(np.argmax(sequence.plan.depth > self._num_layers))  # the first token whose logits are wanted
        if sequence.generated:
            most = len(chain) - 1
            if exact == len(chain):
                chain = chain.extended(sequence.generated)
                exact, most = len(chain), len(chain) - 1
        return self.pages.take(
            length,
            chain,
            most=most,
            keep=exact,
            usable=_usable(sequence),
            spare=spare,
            turns=_turns(sequence),
        )

    def prefills[S: Sequence](self, sequence: S) -> list[Prefill[S]]:
        """What an admitted sequence has to compute, one after the other."""
        assert sequence.lease is not None
        lease, layout, layers = sequence.lease, sequence.layout, self._num_layers
        make = functools.partial(Prefill, sequence, table=lease.table, shared=lease.shared, cached=lease.cached)
        if lease.is_fork:  # all of the prompt is there; its last row is computed for its logits alone
            plan = dataclasses.replace(sequence.plan, shift=False)
            return [make(layout, plan.behind(lease.cached), links=False)]
        choice, plan, tokens = sequence.choice, sequence.plan, sequence.generated
        if not tokens:
            return [make(layout, plan.behind(lease.cached), choice=choice)]
        length = len(layout) + len(tokens)
        longer, whole = layout.extended(tokens), plan.extended(len(tokens), layers).wanting([length - 1], layers)
        if choice is None:
            return [make(longer, whole.behind(lease.cached))]
        return [
            make(layout, plan.wanting((), layers).behind(lease.cached), choice=choice),
            make(longer, whole.behind(len(layout)), links=False),
        ]

    def grow(self, active: Listed[Generation]) -> list[Generation]:
        """Gives each the page that its next token needs.

        Returns:
          Those that were put back, the youngest, as there were not enough pages.
        """
        active = sorted(active, key=lambda sequence: sequence.arrived)
        left = list(active)
        for sequence in active:
            while sequence in left and not self._grow(sequence):
                if len(left) == 1:
                    raise RuntimeError(f"{sequence.length} tokens must fit in the KV pool's pages")
                self.finish(left.pop())
        put_back = [sequence for sequence in active if sequence not in left]
        for _ in put_back:
            self.pages.count_preemption()
        return put_back

    def _grow(self, sequence: Sequence) -> bool:
        assert sequence.lease is not None
        return self.pages.grow(sequence.lease, sequence.length)

    def computed(self, sequences: Iterable[Sequence]) -> None:
        """The K, V of these prompts are there."""
        for sequence in sequences:
            if sequence.lease is not None:
                self.pages.computed(sequence.lease)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """These have not been computed, and wait again."""
        for sequence in sequences:
            if sequence.lease is not None:
                self.pages.end(sequence.lease)
                sequence.lease = None

    def finish(self, sequence: Sequence) -> None:
        """It gives its pages up; what is exact in them stays, unless it failed."""
        if sequence.lease is None:
            return
        chain = None
        if sequence.error is None and sequence.exact(self._num_layers) == len(sequence.layout):
            chain = sequence.chain and sequence.chain.extended(sequence.generated[:-1])
        self.pages.end(sequence.lease, chain, failed=sequence.error is not None)
        sequence.lease = None


def _turns(sequence: Sequence) -> int:
    """A prompt that chooses is computed as the first time, and what was generated behind it after that."""
    return 2 if sequence.choice is not None and sequence.generated else 1


def _usable(sequence: Sequence) -> int:
    """How many tokens may come from pages, for the images' sake.

    What links an image approximately does so whatever is in pages, so that memory never changes an answer. One that is
    to be captured is computed whole, as keys before rotation cannot be had back from pages.
    """
    captured = {u.span.start for u in sequence.images if u.captured is not None and not u.captured.is_ready}
    for span in sequence.layout.images:
        if span.state == "approximate" or span.start in captured:
            return span.start
    return sequence.length
