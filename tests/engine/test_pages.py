"""Pages against a model of the pool that knows what every slot holds."""

from __future__ import annotations

import dataclasses
import hashlib
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlcache_jax.engine.page_tree import Chain, PlacedImage
from vlcache_jax.engine.pages import BlockTable, Pages

GRID = (1, 2, 2)
PLACEHOLDER = 99


def chain(tokens, images=(), owner="me"):
    """`images`: (start, length, key) each."""
    ids = np.array(tokens, np.int32)
    for start, length, _ in images:
        ids[start : start + length] = PLACEHOLDER
    return Chain.of(owner, ids, [(PlacedImage(start, key, GRID), length) for start, length, key in images])


def take(pages, tokens, images=(), owner="me", *, keep=None, max_cached=None):
    own = chain(tokens, images, owner)
    max_cached = len(own) - 1 if max_cached is None else max_cached
    block_table = pages.take(len(own), own, max_cached=max_cached, keep=len(own) if keep is None else keep)
    return block_table, own


def compute(pages, block_table):
    """Launched, and its results are good."""
    pages.computed(block_table)
    pages.proven(block_table)


def run(pages, tokens, images=(), owner="me", answer=()):
    """A request from its beginning to its end; returns how many tokens it found."""
    block_table, own = take(pages, tokens, images, owner)
    found = block_table.cached
    compute(pages, block_table)
    assert pages.grow([block_table], [len(tokens) + len(answer)])
    pages.end(block_table, own.extended(answer))
    return found


def test_the_example_of_the_specification():
    """algorithms.md, A.1.4: pages of 4, an image of 5 tokens behind 5 of text."""
    pages = Pages(20, size=4)
    tokens = range(12)
    assert run(pages, tokens, [(5, 5, "one")]) == 0
    assert run(pages, tokens, [(5, 5, "other")]) == 4  # never beyond the place of an image exchanged under equal text
    assert run(pages, tokens, [(5, 5, "one")]) == 11
    assert run(pages, tokens, [(5, 5, "one")], owner="you") == 0


def test_images_whose_digests_begin_alike_are_told_apart(monkeypatch):
    """Seven bytes of a digest stand for an image among the tokens; others can have the same."""
    monkeypatch.setattr(
        "vlcache_jax.engine.page_tree.hashlib", types.SimpleNamespace(sha256=lambda key: hashlib.sha256())
    )
    pages = Pages(40, size=4)
    tokens = range(20)  # the image begins in the second page, and fills two more
    assert chain(tokens, [(5, 11, "one")]).ids == chain(tokens, [(5, 11, "other")]).ids
    assert run(pages, tokens, [(5, 11, "one")]) == 0
    assert run(pages, tokens, [(5, 11, "other")]) == 4
    assert run(pages, tokens, [(4, 12, "one")]) == 4  # where the page begins
    assert run(pages, tokens, [(5, 11, "one")]) == 19
    pages = Pages(40, size=4)
    assert run(pages, tokens, [(1, 9, "one"), (10, 9, "one")]) == 0
    assert run(pages, tokens, [(1, 9, "one"), (10, 9, "other")]) == 10  # from the middle of a page


def test_the_log_of_lmcache():
    """algorithms.md, C.4: hits of a prompt, of the same prompt, and of another image under the same text."""
    pages = Pages(400)
    found = [run(pages, [0] * 16178, [(15, 16150, key)]) for key in ("one", "one", "other")]
    assert found == [0, 16177, 0]


def test_whole_pages_are_shared_and_what_is_alike_in_the_next_is_copied():
    pages = Pages(20, size=8)
    first, _ = take(pages, range(30))
    compute(pages, first)
    again, _ = take(pages, [*range(29), 77])
    assert again.table[:3].tolist() == first.table[:3].tolist()
    assert (again.shared, again.cached) == (3, 29)
    assert again.copy == (first.table[3], again.table[3])
    little, _ = take(pages, [*range(26), *range(50, 60)])
    assert (little.shared, little.cached, little.copy) == (3, 24, None)  # two tokens of eight are not worth a copy
    more, _ = take(pages, [*range(27), *range(50, 60)])
    assert (more.shared, more.cached) == (3, 27)
    longer, _ = take(pages, [*range(30), 5, 5, 5])  # who continues a page gets all of it
    assert (longer.shared, longer.cached) == (3, 30)
    assert pages.stats().in_use == 4 + 1 + 2 + 2 + 2


def test_a_prompt_of_whole_pages_writes_nothing():
    pages = Pages(8, size=8)
    first, own = take(pages, range(16))
    compute(pages, first)
    pages.end(first, own)
    again, _ = take(pages, range(16))
    assert (again.shared, again.cached, again.copy) == (2, 15, None)
    assert len(again.table) == 2


def test_an_answer_is_found_by_who_goes_on_with_it():
    pages = Pages(20, size=8)
    assert run(pages, range(13), answer=range(50, 60)) == 0
    assert run(pages, [*range(13), *range(50, 60), 7, 7]) == 23
    assert run(pages, range(13)) == 12
    assert run(pages, [*range(13), *range(50, 54), 3, 3, 3]) == 16  # of the third page nothing is left but one token


def test_what_is_not_exact_is_not_found():
    pages = Pages(20, size=8)
    block_table, _ = take(pages, range(30), keep=20)
    compute(pages, block_table)
    pages.end(block_table)
    assert run(pages, range(30)) == 16


def test_a_fork_shares_all_of_a_prompt():
    pages = Pages(20, size=8)
    first = pages.take(21)
    second = pages.fork(first, 21, 21)
    assert (second.shared, second.cached, second.copy) == (2, 20, (first.table[2], second.table[2]))
    assert (second.is_fork, second.sources) == (True, [first])
    compute(pages, first)
    pages.end(first)
    assert second.is_ready
    assert not second.is_lost
    assert pages.stats().in_use == 4  # the page to be copied stays until it has been
    compute(pages, second)
    pages.end(second)
    assert pages.stats().in_use == pages.stats().resident == 0


def test_who_counts_on_what_is_not_computed_yet_comes_later():
    pages = Pages(20, size=8)
    first, _ = take(pages, range(30))
    second, _ = take(pages, [*range(24), *range(70, 90)])
    third, _ = take(pages, [*range(24), *range(70, 86), 1])
    other, _ = take(pages, range(40, 60))
    assert [block_table.sources for block_table in (first, second, third, other)] == [[], [first], [first, second], []]
    assert [block_table.is_ready for block_table in (first, second, third, other)] == [True, False, False, True]
    pages.computed(first)
    assert [block_table.is_ready for block_table in (second, third)] == [True, False]
    pages.proven(first)
    pages.computed(second)
    assert third.is_ready
    fourth, _ = take(pages, [*range(24), *range(70, 86), 2])
    assert fourth.sources == [second]  # what is proven can fail nobody any more
    pages.end(first)
    assert not any(block_table.is_lost for block_table in (second, third, fourth))
    pages.end(second, failed=True)  # though what it shares of the first one stays
    assert [block_table.is_lost for block_table in (second, third, fourth)] == [False, True, True]
    assert take(pages, [*range(24), *range(70, 90)])[0].cached == 24


@pytest.mark.parametrize("is_launched", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_what_is_not_proven_when_its_lease_ends_is_found_by_nobody(is_launched, failed):
    pages = Pages(30, size=8)
    first, _ = take(pages, range(30))
    if is_launched:
        pages.computed(first)
    second, _ = take(pages, range(40))
    fork = pages.fork(first, 30, 30)
    assert (second.cached, second.sources, fork.sources) == (30, [first], [first])
    assert second.is_ready is fork.is_ready is is_launched
    pages.end(first, failed=failed)
    assert second.is_lost
    assert fork.is_lost
    assert take(pages, range(30))[0].cached == 0
    for block_table in (second, fork):
        pages.end(block_table, failed=True)
    again, _ = take(pages, range(40))
    assert (again.shared, again.cached) == (3, 30)  # that of the one that came in between, which still runs
    assert again.is_ready is False


def test_what_was_proven_before_it_failed_is_found_by_nobody_either():
    pages = Pages(20, size=8)
    first, _ = take(pages, range(30))
    compute(pages, first)
    second, _ = take(pages, range(40))
    pages.end(first, failed=True)
    assert second.sources == []
    assert not second.is_lost  # what it counts on was good
    assert take(pages, range(30))[0].cached == 0
    pages.end(second)


def test_a_page_that_is_to_be_copied_is_counted_on_as_those_that_are_shared():
    pages = Pages(20, size=8)
    first, _ = take(pages, range(7))
    second, _ = take(pages, [*range(6), 9])
    assert (second.shared, second.cached) == (0, 6)
    assert second.copy == (first.table[0], second.table[0])
    assert second.sources == [first]
    assert not second.is_ready
    pages.end(first)
    assert second.is_lost
    pages.end(second)
    assert pages.stats().in_use == pages.stats().resident == 0


def test_twins_do_not_count_on_each_other():
    """What others hold already is found as theirs; who computed it again loses nothing when they fail."""
    pages = Pages(20, size=8)
    tokens = chain(range(16))
    first = pages.take(16, tokens, max_cached=15, keep=16)
    twin = pages.take(16, tokens, max_cached=0, keep=16, usable=0)
    third, _ = take(pages, range(20))
    assert (twin.sources, third.sources) == ([], [first])
    compute(pages, twin)
    pages.computed(first)
    pages.end(first, failed=True)
    assert [twin.is_lost, third.is_lost] == [False, True]
    pages.end(third, failed=True)
    pages.end(twin, tokens)
    assert run(pages, range(20)) == 16


def test_the_least_recently_used_leave_first_and_the_end_of_a_chain_before_its_beginning():
    pages = Pages(6, size=8)
    run(pages, range(24))
    run(pages, range(50, 66))
    run(pages, range(50, 66))
    assert pages.stats().resident == 5
    pages.end(pages.take(8 * 2))
    assert pages.stats().evictions == 1
    assert run(pages, range(24)) == 16
    assert run(pages, range(50, 66)) == 15


def test_too_little_room_is_said_and_nothing_changes():
    pages = Pages(4, size=8)
    block_table = pages.take(17)
    before = pages.stats()
    assert pages.take(9) is None
    assert pages.take(8, spare=1) is None
    assert not pages.grow([block_table], [33])
    assert pages.fork(block_table, 17, 24, spare=1) is None
    assert pages.stats() == before
    assert pages.grow([block_table], [32])


def test_a_page_that_is_to_be_copied_makes_room_if_need_be():
    pages = Pages(3, size=8)
    run(pages, range(20))
    block_table, _ = take(pages, range(20))
    assert (block_table.cached, block_table.copy) == (16, None)


def test_an_image_that_is_dropped_is_found_no_more():
    pages = Pages(40, size=8)
    run(pages, range(30), [(10, 4, "a")])
    run(pages, range(30), [(10, 4, "b")])
    running, own = take(pages, range(30), [(10, 4, "a")])
    assert pages.drop("a") == 3
    compute(pages, running)
    pages.end(running, own)  # what has been told to go does not come back
    assert pages.stats().in_use == 0
    assert run(pages, range(30), [(10, 4, "a")]) == 8
    assert run(pages, range(30), [(10, 4, "b")]) == 29
    assert pages.clear() > 0
    assert run(pages, range(30), [(10, 4, "b")]) == 0


def test_what_is_forgotten_while_it_is_forked_stays_forgotten():
    pages = Pages(40, size=8)
    first, own = take(pages, range(16), [(3, 5, "a")])
    compute(pages, first)
    pages.drop("a")
    second = pages.fork(first, 16, 16)
    compute(pages, second)
    for block_table in (first, second):
        pages.end(block_table, own.extended(range(4)))
    assert pages.stats().resident == 0


def test_nothing_is_kept_behind_what_is_not():
    """One fails whose pages another one goes on with; and one holds the same as others do, and is forked."""
    pages = Pages(40, size=8)
    first, _ = take(pages, range(16))
    compute(pages, first)
    second, own = take(pages, range(30))
    compute(pages, second)
    pages.end(first, failed=True)
    pages.end(second, own)
    assert pages.stats().resident == 0
    run(pages, range(16))
    own = chain(range(16))
    twin = pages.take(16, own, max_cached=0, keep=16, usable=0)
    fork = pages.fork(twin, 16, 16)
    for block_table in (twin, fork):
        compute(pages, block_table)
        assert pages.grow([block_table], [24])
        pages.end(block_table, own.extended([7] * 8))
    assert run(pages, [*range(16), *[7] * 8, 1]) == 24


def test_chains_may_be_longer_than_a_stack():
    pages = Pages(3000, size=1)
    run(pages, [1] * 2000)
    assert pages.clear() == 2000
    block_table, _ = take(pages, [1] * 2000)
    compute(pages, block_table)
    pages.end(block_table, failed=True)
    assert pages.stats().in_use == pages.stats().resident == 0


def test_prompts_that_part_in_their_last_page_copy_the_same_one():
    pages = Pages(100, size=32)
    block_tables = [take(pages, [*range(100), *range(7), i, i, i])[0] for i in range(40, 60)]
    assert [block_table.sources for block_table in block_tables] == [[]] + [block_tables[:1]] * 19
    assert {block_table.copy[0] for block_table in block_tables[1:]} == {block_tables[0].table[3]}
    assert {block_table.cached for block_table in block_tables[1:]} == {107}


def test_the_same_key_with_another_grid_is_another_image():
    pages = Pages(10, size=4)
    run(pages, range(12), [(5, 5, "one")])
    ids = np.arange(12, dtype=np.int32)
    ids[5:10] = PLACEHOLDER
    other = Chain.of("me", ids, [(PlacedImage(5, "one", (1, 4, 4)), 5)])
    assert pages.take(12, other, max_cached=11, keep=12).cached == 4


def test_leases_from_before_a_reset_are_of_no_use():
    pages = Pages(4, size=8)
    block_table, own = take(pages, range(20))
    pages.reset()
    compute(pages, block_table)
    pages.end(block_table, own)
    assert block_table.is_ended
    assert pages.stats() == Pages(4, size=8).stats()


@dataclass(eq=False)
class Request:
    """One of the machine's.

    Attributes:
      chain: of all its tokens, its answer's included.
      exact: tokens at its beginning whose K, V are the same for everybody.
      is_kept: whether its chain is told when it ends.
      whose: marks what is not exact.
      is_bad: its results are not good, or those of another one that it read; who looks at them will see that.
    """

    block_table: BlockTable
    chain: Chain
    exact: int
    is_kept: bool
    whose: object = field(default_factory=object)
    is_bad: bool = False

    @property
    def is_sound(self):
        return not (self.is_bad or self.block_table.is_lost)

    def content(self, i):
        """Everything that the K, V of its token i depend on."""
        return content(self.chain, i, None if i < self.exact else self.whose)


def content(chain, i, whose=None):
    return chain.owner, chain.ids[: 8 * (i + 1)], whose


class Machine(RuleBasedStateMachine):
    """Requests at random: taken, launched, and read, when they are proven or failed. What the device does, it does in
    the order of launches. `holds[page, i]` is everything that the K, V there depend on; what is bad is an object.
    """

    SIZE, COUNT = 4, 9

    def __init__(self):
        super().__init__()
        self.pages = Pages(self.COUNT, size=self.SIZE)
        self.holds = {}
        self.running = []
        self.prompts = []  # owner, tokens and images

    def having(self, **states):
        return [r for r in self.running if all(getattr(r.block_table, name) is is_so for name, is_so in states.items())]

    def write(self, request, first):
        """Slots from `first` on; shared pages are not touched."""
        block_table = request.block_table
        for i in range(max(first, block_table.shared * self.SIZE), len(request.chain)):
            self.holds[block_table.table[i // self.SIZE], i % self.SIZE] = (
                object() if request.is_bad else request.content(i)
            )

    def check(self, request, count=None):
        for i in range(len(request.chain) if count is None else count):
            assert self.holds[request.block_table.table[i // self.SIZE], i % self.SIZE] == request.content(i), i

    def end(self, request, *, failed=False):
        block_table = request.block_table
        is_kept = request.is_kept and block_table.is_proven and not failed
        own = set(block_table.table[block_table.shared :].tolist())
        self.running.remove(request)
        self.pages.end(block_table, request.chain if is_kept else None, failed=failed)
        if failed or not block_table.is_proven:
            assert not own & {page.number for page in self.found()}

    def found(self):
        """Pages that can be found."""
        below = [page for root in self.pages._tree._roots.values() for page in root.children]
        for page in below:
            below += page.children
        return below

    @rule(
        owner=st.sampled_from("xy"),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        image=st.none() | st.tuples(st.integers(0, 12), st.integers(1, 5), st.sampled_from("ab")),
        exact=st.integers(0, 20),
        known=st.booleans(),
    )
    def begin(self, owner, tokens, image, exact, known):
        images = [image] if image is not None and image[0] + image[1] <= len(tokens) else []
        self.prompts.append((owner, tokens, images))
        self.take(owner, tokens, images, exact, known)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), count=st.integers(1, 16), more=st.lists(st.integers(0, 1), max_size=4))
    def begin_alike(self, data, count, more):
        owner, tokens, images = data.draw(st.sampled_from(self.prompts[-3:]))
        count = max([count, *(start + length for start, length, _ in images)])
        tokens = [*tokens[:count], *more]
        self.take(owner, tokens, images, len(tokens), True)

    def take(self, owner, tokens, images, exact, known):
        own = chain(tokens, images, owner)
        length, is_kept = len(own), known and exact >= len(own)
        exact = min(exact, length) if known else 0
        block_table = self.pages.take(length, own if known else None, max_cached=length - 1, keep=exact)
        if block_table is None:
            used = {page for request in self.running for page in request.block_table.table}
            assert -(-length // self.SIZE) > self.COUNT - len(used) - len(self.running)
            return
        # What it found is exact, whatever it would have made of it.
        exact = max(exact, block_table.cached, block_table.shared * self.SIZE)
        self.running.append(Request(block_table, own, exact, is_kept))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        origin = data.draw(st.sampled_from(self.running))
        length = len(origin.chain)
        block_table = self.pages.fork(origin.block_table, length, length)
        if block_table is not None:
            assert (origin.block_table in block_table.sources) is not origin.block_table.is_proven
            self.running.append(dataclasses.replace(origin, block_table=block_table, is_kept=False, is_bad=False))

    @precondition(lambda self: self.having(is_computed=False, is_ready=True, is_lost=False))
    @rule(data=st.data(), is_bad=st.sampled_from([False, False, True]))
    def compute(self, data, is_bad):
        request = data.draw(st.sampled_from(self.having(is_computed=False, is_ready=True, is_lost=False)))
        block_table = request.block_table
        if block_table.copy is not None:
            source, target = block_table.copy
            for i in range(self.SIZE):
                if (source, i) in self.holds:
                    self.holds[target, i] = self.holds[source, i]
        request.is_bad = any(other.is_bad for other in self.running if other.block_table in block_table.sources)
        if not request.is_bad:
            self.check(request, block_table.cached)
        request.is_bad |= is_bad
        self.write(request, block_table.cached)
        self.pages.computed(block_table)

    def unread(self):
        """Those whose results are read next: what they count on has been read."""
        return [
            request
            for request in self.having(is_computed=True, is_proven=False)
            if all(source.is_proven or source.is_ended for source in request.block_table.sources)
        ]

    @precondition(lambda self: self.unread())
    @rule()
    def read(self):
        while requests := self.unread():
            for request in requests:
                if request.is_sound:
                    self.check(request)
                    self.pages.proven(request.block_table)
                else:
                    self.end(request, failed=True)

    @precondition(lambda self: self.having(is_lost=True))
    @rule()
    def sweep(self):
        for request in self.having(is_lost=True):
            self.end(request, failed=True)

    @precondition(lambda self: self.having(is_computed=True))
    @rule(data=st.data(), token=st.integers(0, 1))
    def answer(self, data, token):
        request = data.draw(st.sampled_from(self.having(is_computed=True)))
        length = len(request.chain)
        if self.pages.grow([request.block_table], [length + 1]):
            request.exact += request.exact == length
            request.chain = request.chain.extended([token])
            self.write(request, length)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans(), is_early=st.sampled_from([False, False, False, True]))
    def leave(self, data, failed, is_early):
        """Done, failed, or preempted; whoever counts on it and has not seen that it is proven is lost."""
        known = self.running if is_early else self.having(is_proven=True)
        if not known:
            return
        request = data.draw(st.sampled_from(known))
        counting = [r for r in self.running if request.block_table in r.block_table.sources]
        self.end(request, failed=failed)
        assert all(
            r.block_table.is_lost is not request.block_table.is_proven
            for r in counting
            if len(r.block_table.sources) == 1
        )
        assert request.block_table.is_proven or all(r.block_table.is_lost for r in counting)

    @rule(key=st.sampled_from("ab"), everything=st.booleans())
    def drop(self, key, everything):
        _ = self.pages.clear() if everything else self.pages.drop(key)

    @invariant()
    def every_page_is_accounted_for(self):
        stats = self.pages.stats()
        used = {int(page) for request in self.running for page in request.block_table.table}
        used |= {r.block_table.copy[0] for r in self.having(is_computed=False) if r.block_table.copy is not None}
        assert 0 not in used
        assert stats.in_use == len(used)
        assert stats.in_use + stats.resident + len(self.pages._free) == self.COUNT
        assert not any(page.children or page.parent for _, page in self.pages._free)
        reachable, below = set(), list(self.pages._tree._roots.values())
        for node in below:
            reachable.add(node)
            below += node.children
        assert set(self.pages._residents) <= reachable
        assert all(page.parent in reachable for page in reachable if page.number)
        free = {number for number, _ in self.pages._free}
        assert len(free) == len(self.pages._free)
        assert not free & used
        self.holds = {at: held for at, held in self.holds.items() if at[0] not in free}  # what is free is overwritten

    @invariant()
    def nobody_writes_into_what_others_hold(self):
        for request in self.having(is_computed=True):
            if request.is_sound:
                self.check(request)

    @invariant()
    def what_is_found_is_there_or_counted_on(self):
        """A page without a maker holds what it is found by; a maker is not proven yet, and runs."""
        unproven = [request.block_table for request in self.having(is_proven=False)]
        assert all(page.maker is None or page.maker in unproven for page in self.found())
        ways = [(owner, b"", page) for owner, root in self.pages._tree._roots.items() for page in root.children]
        for owner, before, page in ways:
            known = Chain(owner, before + page.piece.ids, ())
            ways += [(owner, known.ids, child) for child in page.children]
            if page.maker is None:
                first = len(before) // 8
                for i in range(page.piece.length):
                    assert self.holds[page.number, i] == content(known, first + i)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)
