"""Pages against a model of the pool that knows what every slot holds."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlcache_jax.engine.pages import Chain, Pages, Picture

GRID = (1, 2, 2)
PLACEHOLDER = 99


def chain(tokens, images=(), owner="me"):
    """`images`: (start, length, key) each."""
    ids = np.array(tokens, np.int32)
    for start, length, _ in images:
        ids[start : start + length] = PLACEHOLDER
    return Chain.of(owner, ids, [(Picture(start, key, GRID), length) for start, length, key in images])


def take(pages, tokens, images=(), owner="me", *, keep=None, most=None):
    own = chain(tokens, images, owner)
    most = len(own) - 1 if most is None else most
    lease = pages.take(len(own), own, most=most, keep=len(own) if keep is None else keep)
    return lease, own


def run(pages, tokens, images=(), owner="me", answer=()):
    """A request from its beginning to its end; returns how many tokens it found."""
    lease, own = take(pages, tokens, images, owner)
    found = lease.cached
    pages.computed(lease)
    assert pages.grow(lease, len(tokens) + len(answer))
    pages.end(lease, own.extended(answer))
    return found


def test_the_example_of_the_specification():
    """algorithms.md, A.1.4: pages of 4, an image of 5 tokens behind 5 of text."""
    pages = Pages(20, size=4)
    tokens = range(12)
    assert run(pages, tokens, [(5, 5, "one")]) == 0
    assert run(pages, tokens, [(5, 5, "other")]) == 4  # never beyond the place of an image exchanged under equal text
    assert run(pages, tokens, [(5, 5, "one")]) == 11
    assert run(pages, tokens, [(5, 5, "one")], owner="you") == 0


def test_the_log_of_lmcache():
    """algorithms.md, C.4: hits of a prompt, of the same prompt, and of another image under the same text."""
    pages = Pages(400)
    found = [run(pages, [0] * 16178, [(15, 16150, key)]) for key in ("one", "one", "other")]
    assert found == [0, 16177, 0]


def test_whole_pages_are_shared_and_what_is_alike_in_the_next_is_copied():
    pages = Pages(20, size=8)
    first, _ = take(pages, range(30))
    pages.computed(first)
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
    pages.computed(first)
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
    lease, _ = take(pages, range(30), keep=20)
    pages.computed(lease)
    pages.end(lease)
    assert run(pages, range(30)) == 16


def test_a_fork_shares_all_of_a_prompt():
    pages = Pages(20, size=8)
    first = pages.take(21)
    second = pages.fork(first, 21, 21)
    assert (second.shared, second.cached, second.copy) == (2, 20, (first.table[2], second.table[2]))
    assert second.turn == first.turn + 1
    pages.computed(first)
    pages.end(first)
    assert pages.stats().in_use == 4  # the page to be copied stays until it has been
    pages.computed(second)
    pages.end(second)
    assert pages.stats().in_use == pages.stats().resident == 0


def test_who_counts_on_what_is_not_computed_yet_comes_later():
    pages = Pages(20, size=8)
    first, _ = take(pages, range(30))
    second, _ = take(pages, [*range(24), *range(70, 90)])
    third, _ = take(pages, [*range(24), *range(70, 86), 1])
    other, _ = take(pages, range(40, 60))
    assert [lease.turn for lease in (first, second, third, other)] == [0, 1, 2, 0]
    pages.end(first)  # it failed: what it was to compute is not there
    assert take(pages, range(30))[0].cached == 0


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
    lease = pages.take(17)
    before = pages.stats()
    assert pages.take(9) is None
    assert pages.take(8, spare=1) is None
    assert not pages.grow(lease, 33)
    assert pages.fork(lease, 17, 24, spare=1) is None
    assert pages.stats() == before
    assert pages.grow(lease, 32)


def test_a_page_that_is_to_be_copied_makes_room_if_need_be():
    pages = Pages(3, size=8)
    run(pages, range(20))
    lease, _ = take(pages, range(20))
    assert (lease.cached, lease.copy) == (16, None)


def test_an_image_that_is_dropped_is_found_no_more():
    pages = Pages(40, size=8)
    run(pages, range(30), [(10, 4, "a")])
    run(pages, range(30), [(10, 4, "b")])
    running, own = take(pages, range(30), [(10, 4, "a")])
    assert pages.drop("a") == 3
    pages.computed(running)
    pages.end(running, own)  # what has been told to go does not come back
    assert run(pages, range(30), [(10, 4, "a")]) == 8
    assert run(pages, range(30), [(10, 4, "b")]) == 29
    assert pages.clear() > 0
    assert run(pages, range(30), [(10, 4, "b")]) == 0


def test_what_is_forgotten_while_it_is_forked_stays_forgotten():
    pages = Pages(40, size=8)
    first, own = take(pages, range(16), [(3, 5, "a")])
    pages.computed(first)
    pages.drop("a")
    second = pages.fork(first, 16, 16)
    pages.computed(second)
    for lease in (first, second):
        pages.end(lease, own.extended(range(4)))
    assert pages.stats().resident == 0


def test_nothing_is_kept_behind_what_is_not():
    """One fails whose pages another one goes on with; and one holds the same as others do, and is forked."""
    pages = Pages(40, size=8)
    first, _ = take(pages, range(16))
    pages.computed(first)
    second, own = take(pages, range(30))
    pages.computed(second)
    pages.end(first, failed=True)
    pages.end(second, own)
    assert pages.stats().resident == 0
    run(pages, range(16))
    own = chain(range(16))
    twin = pages.take(16, own, most=0, keep=16, usable=0)
    fork = pages.fork(twin, 16, 16)
    for lease in (twin, fork):
        pages.computed(lease)
        assert pages.grow(lease, 24)
        pages.end(lease, own.extended([7] * 8))
    assert run(pages, [*range(16), *[7] * 8, 1]) == 24


def test_chains_may_be_longer_than_a_stack():
    pages = Pages(3000, size=1)
    run(pages, [1] * 2000)
    assert pages.clear() == 2000
    lease, _ = take(pages, [1] * 2000)
    pages.computed(lease)
    pages.end(lease, failed=True)
    assert pages.stats().in_use == pages.stats().resident == 0


def test_prompts_that_part_in_their_last_page_copy_the_same_one():
    pages = Pages(100, size=32)
    leases = [take(pages, [*range(100), *range(7), i, i, i])[0] for i in range(40, 60)]
    assert [lease.turn for lease in leases] == [0] + [1] * 19
    assert {lease.copy[0] for lease in leases[1:]} == {leases[0].table[3]}
    assert {lease.cached for lease in leases[1:]} == {107}


def test_the_same_key_with_another_grid_is_another_image():
    pages = Pages(10, size=4)
    run(pages, range(12), [(5, 5, "one")])
    ids = np.arange(12, dtype=np.int32)
    ids[5:10] = PLACEHOLDER
    other = Chain.of("me", ids, [(Picture(5, "one", (1, 4, 4)), 5)])
    assert pages.take(12, other, most=11, keep=12).cached == 4


def test_leases_from_before_a_reset_are_of_no_use():
    pages = Pages(4, size=8)
    lease, own = take(pages, range(20))
    pages.reset()
    pages.computed(lease)
    pages.end(lease, own)
    assert pages.stats() == Pages(4, size=8).stats()


class Machine(RuleBasedStateMachine):
    """Requests at random. `holds[page, i]` is everything that the K, V there depend on."""

    SIZE, COUNT = 4, 9

    def __init__(self):
        super().__init__()
        self.pages = Pages(self.COUNT, size=self.SIZE)
        self.holds = {}
        self.running = []  # [lease, owner, identities of the tokens, chain or None, whether it is computed]

    @staticmethod
    def identities(tokens, images):
        known = list(tokens)
        for start, length, key in images:
            known[start : start + length] = [(key, i) for i in range(length)]
        return known

    def write(self, request, first):
        """Slots from `first` on; shared pages are not touched."""
        lease, owner, known, *_ = request
        for i in range(max(first, lease.shared * self.SIZE), len(known)):
            self.holds[lease.table[i // self.SIZE], i % self.SIZE] = (owner, tuple(known[: i + 1]))

    def check(self, request):
        lease, owner, known, *_ = request
        for i in range(len(known)):
            assert self.holds[lease.table[i // self.SIZE], i % self.SIZE] == (owner, tuple(known[: i + 1])), i

    @rule(
        owner=st.sampled_from("xy"),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        image=st.none() | st.tuples(st.integers(0, 12), st.integers(1, 5), st.sampled_from("ab")),
        exact=st.integers(0, 20),
        known=st.booleans(),
    )
    def begin(self, owner, tokens, image, exact, known):
        images = [image] if image is not None and image[0] + image[1] <= len(tokens) else []
        own = chain(tokens, images, owner) if known else None
        lease = self.pages.take(len(tokens), own, most=len(tokens) - 1, keep=min(exact, len(tokens)))
        if lease is None:
            used = {page for request in self.running for page in request[0].table}
            assert -(-len(tokens) // self.SIZE) > self.COUNT - len(used) - len(self.running)
            return
        is_exact = exact >= len(tokens)
        self.running.append([lease, owner, self.identities(tokens, images), own if is_exact else None, False])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        origin = data.draw(st.sampled_from(self.running))
        lease = self.pages.fork(origin[0], len(origin[2]), len(origin[2]))
        if lease is not None and origin[4]:
            self.running.append([lease, origin[1], list(origin[2]), None, False])
        elif lease is not None:
            self.pages.end(lease)

    def next_turn(self):
        waiting = [request for request in self.running if not request[4]]
        return [r for r in waiting if r[0].turn == min(w[0].turn for w in waiting)]

    @precondition(lambda self: self.next_turn())
    @rule()
    def compute(self):
        for request in self.next_turn():
            lease = request[0]
            if lease.copy is not None:
                source, target = lease.copy
                for i in range(self.SIZE):
                    if (source, i) in self.holds:
                        self.holds[target, i] = self.holds[source, i]
            self.write(request, lease.cached)
            self.pages.computed(lease)
            request[4] = True
            lease.turn = -1
            self.check(request)

    @precondition(lambda self: any(request[4] for request in self.running))
    @rule(data=st.data(), token=st.integers(0, 1))
    def answer(self, data, token):
        request = data.draw(st.sampled_from([request for request in self.running if request[4]]))
        if self.pages.grow(request[0], len(request[2]) + 1):
            request[2].append(token)
            self.write(request, len(request[2]) - 1)
            if request[3] is not None:
                request[3] = request[3].extended([token])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data, failed):
        request = data.draw(st.sampled_from(self.running))
        if not request[4]:  # all that count on it, and more, are put back
            for other in [r for r in self.running if not r[4]]:
                self.running.remove(other)
                self.pages.end(other[0])
            return
        self.check(request)
        self.running.remove(request)
        self.pages.end(request[0], request[3], failed=failed)

    @rule(key=st.sampled_from("ab"), everything=st.booleans())
    def drop(self, key, everything):
        if all(request[4] for request in self.running):
            _ = self.pages.clear() if everything else self.pages.drop(key)

    @invariant()
    def every_page_is_accounted_for(self):
        stats = self.pages.stats()
        used = {int(page) for request in self.running for page in request[0].table}
        used |= {r[0].copy[0] for r in self.running if r[0].copy is not None and not r[4]}
        assert 0 not in used
        assert stats.in_use == len(used)
        assert stats.in_use + stats.resident + len(self.pages._free) == self.COUNT
        assert not any(page.children or page.parent for _, page in self.pages._free)
        reachable, below = set(), list(self.pages._roots.values())
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
        for request in self.running:
            if request[4]:
                self.check(request)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
