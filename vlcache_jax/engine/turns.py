"""Which sequence comes next: tenants of a server take turns, and the requests of each have an order of their own."""

from __future__ import annotations

from collections import Counter, abc, defaultdict

from vlcache_jax.engine.request import Sequence


class Turns:
    """Gives lanes to tenants in turn.

    A free lane goes to the tenant that has the fewest; of equals, to the one whose last lane was given longest ago.
    `order` decides among the requests of one tenant. All requests without a tenant are those of one, and their
    priorities count beside those of others, whose requests count as 0 there.
    """

    def __init__(self) -> None:
        self._ranked: abc.Collection[str | None] = (None,)
        self._given: dict[str | None, int] = {}
        self._lanes = 0  # given so far

    def rank(self, tenants: abc.Iterable[str]) -> None:
        """Let the priorities of these tenants count beside those of others, and of no others. From any thread."""
        self._ranked = frozenset([None, *tenants])

    def give(self, sequence: Sequence) -> None:
        """Note that a sequence has a lane."""
        self._given[sequence.tenant] = self._lanes = self._lanes + 1

    def first(self, waiting: abc.Iterable[Sequence], running: abc.Iterable[Sequence]) -> Sequence:
        """The one that has the next lane.

        Args:
          waiting: those that want one, each tenant's in its order; not empty.
          running: those that have one.
        """
        heads: dict[str | None, Sequence] = {}
        for sequence in waiting:
            heads.setdefault(sequence.tenant, sequence)
        lanes = Counter(sequence.tenant for sequence in running)

        def turn(head: Sequence) -> tuple[int, int, int, int]:
            tenant = head.tenant
            return self._rank(head), lanes[tenant], self._given.get(tenant, 0), head.progress.arrived

        return min(heads.values(), key=turn)

    def sorted[S: Sequence](self, sequences: abc.Iterable[S]) -> list[S]:
        """Sequences in the order in which they keep what they have: the first of each tenant, then the second of each.

        Of one tenant it is `order`. Equals come as they arrived.
        """
        tenants: dict[str | None, list[S]] = defaultdict(list)
        for sequence in sorted(sequences, key=order):
            tenants[sequence.tenant].append(sequence)
        placed = [(place, one) for group in tenants.values() for place, one in enumerate(group)]
        placed.sort(key=lambda found: (self._rank(found[1]), found[0], found[1].progress.arrived))
        return [one for _, one in placed]

    def _rank(self, sequence: Sequence) -> int:
        return sequence.progress.priority if sequence.tenant in self._ranked else 0


class Fillers:
    """Sequences that are to fill records which others link."""

    def __init__(self) -> None:
        self._found: dict[int, Sequence] = {}  # by id of a record that is not settled yet

    def __len__(self) -> int:
        return len(self._found)

    def add(self, sequence: Sequence) -> None:
        """Note the records that a sequence is to fill."""
        for use in sequence.progress.images:
            if use.captured is not None:
                self._found[id(use.captured)] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
        for use in sequence.progress.images:
            if use.captured is not None and self._found.get(id(use.captured)) is sequence:
                del self._found[id(use.captured)]

    def of(self, sequence: Sequence) -> list[Sequence]:
        """Those that are to fill what a sequence links."""
        found = (self._found.get(id(use.linked)) for use in sequence.progress.images if use.linked is not None)
        return [one for one in found if one is not None]

    def last(self, others: abc.Sequence[Sequence], running: abc.Iterable[Sequence]) -> Sequence:
        """The last of `others` on which none that runs counts, or simply the last.

        Of one tenant, a filler stands before those that wait for it; of several, it may stand last.
        """
        filling = {id(filler) for one in running for filler in self.of(one)}
        return next((one for one in reversed(others) if id(one) not in filling), others[-1])


def order(sequence: Sequence) -> tuple[int, int]:
    """The order of one tenant's requests: by priority, then by arrival."""
    return sequence.progress.priority, sequence.progress.arrived
