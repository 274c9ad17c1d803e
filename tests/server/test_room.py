"""Room for requests and their bodies, without a server: what is counted, and which body is closed."""

from __future__ import annotations

import contextlib
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server import admission
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.room import ReservedPlace, Room
from vlcache_jax.server.tenants import Tenant

ALICE, BOB, CARL = map(Tenant, ("alice", "bob", "carl"))
LARGE = 2**30  # as much as no test sends


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Requests:
    """Requests at a room, by the names that a test gives them."""

    def __init__(self, max_requests=4, max_bytes=LARGE, tenants=0, max_body_bytes=0):
        self.clock = Clock()
        self.room = Room(max_requests, max_bytes, max_body_bytes, lambda: tenants, self.clock)
        self.places: dict[str, ReservedPlace] = {}
        self.closed: list[str] = []  # in the order in which they were
        self._open: dict[str, contextlib.ExitStack] = {}

    def enter(self, name, tenant=None, *, declared=0, body=None):
        """One comes in; with a body, that is whole."""
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(self.room.place(tenant, declared))
            if body is not None:
                place.take(body)
                self.room.arrived(place)
            self.places[name], self._open[name] = place, stack.pop_all()
        self._note()

    def leave(self, *names):
        for name in names or [*self._open]:
            self._open.pop(name).close()

    def take(self, name, size):
        """More of its body comes."""
        self.places[name].take(size)
        self._note()

    def _note(self):
        self.closed += [name for name, one in self.places.items() if one.error is not None and name not in self.closed]


def refused(status, work, *given, **options):
    with pytest.raises(ApiError) as caught:
        work(*given, **options)
    assert caught.value.status == status
    return caught.value.message


def test_the_slowest_body_is_closed_where_one_more_comes():
    """That has waited longest for 4096 bytes more, however many came before."""
    requests = Requests()
    for name, size in (("parked", 300_000), ("slow", 4095), ("quick", 0), ("new", 0)):
        requests.enter(name)
        requests.take(name, size)
        requests.clock.now += 1
    requests.take("slow", 1)
    requests.take("quick", 4000)
    for i in range(4):
        assert requests.room.coming == 4
        requests.enter(f"more {i}")
        requests.take("quick", 4096)
        requests.clock.now += 1
    assert requests.closed == ["parked", "new", "slow", "more 0"]
    error = requests.places["parked"].error
    assert (error.status, error.retry_after) == (408, 1)
    assert error.message == "the server receives at most 4 bodies at a time, and this upload was the slowest"
    requests.take("parked", 7)  # what is on its way to a body that was closed does not count
    assert requests.room.nbytes == 4000 + 4 * 4096
    requests.leave()
    assert (requests.room.inside, requests.room.nbytes) == (0, 0)


def test_bodies_that_do_not_come_shut_no_other_out():
    requests = Requests(max_requests=512)
    for i in range(1000):
        requests.enter(f"slow {i}", declared=100_000)
        requests.take(f"slow {i}", 1)
        requests.clock.now += 0.01
    for i in range(100):
        requests.clock.now += 1
        requests.enter(f"whole {i}", body=5000)
        assert requests.places[f"whole {i}"].error is None
    assert requests.room.coming == 511  # the hundred are in flight, and took the place of one
    assert requests.room.inside == 611
    requests.leave()


def test_a_tenants_own_slow_bodies_are_closed_first():
    requests = Requests(max_requests=4, tenants=2)
    requests.enter("bob's", BOB)  # the oldest, and of it no byte has come
    for i in range(6):
        requests.clock.now += 1
        requests.enter(f"alice's {i}", ALICE)
        requests.take("alice's 1" if i else "bob's", 4096 if i else 1)
    assert requests.closed == ["alice's 0", "alice's 2", "alice's 3"]
    requests.enter("bob's second", BOB)
    assert requests.closed[-1] == "alice's 4"
    requests.clock.now += 1
    requests.enter("bob's third", BOB)
    assert requests.closed[-1] == "bob's"  # now it is bob who has most
    requests.leave()


def test_bytes_count_when_they_have_come():
    requests = Requests(max_requests=100, max_bytes=10_000, tenants=2, max_body_bytes=10_000)
    for i in range(50):
        requests.enter(f"alice's {i}", ALICE, declared=9999)
    assert (requests.room.coming, requests.room.nbytes) == (50, 0)
    requests.take("alice's 7", 4000)
    requests.enter("bob's", BOB, body=5000)
    requests.clock.now += 1
    requests.enter("bob's second", BOB, declared=3000)
    requests.take("bob's second", 1000)
    assert requests.closed == []
    requests.clock.now += 1
    message = refused(503, requests.enter, "bob's third", BOB, declared=5001)
    assert message == "the server is at capacity: 5000 bytes of requests in flight, 5001 more do not fit"
    # Those of the tenant that has most bytes give way, the slowest first, until there is room.
    requests.take("bob's second", 2000)
    assert requests.closed == [f"alice's {i}" for i in range(8)]
    assert requests.room.nbytes == 8000
    message = refused(503, requests.take, "bob's second", 2001)
    assert message == "the server is at capacity: 8000 bytes of request bodies, 2001 more do not fit"
    requests.leave()
    assert (requests.room.inside, requests.room.nbytes) == (0, 0)


def test_each_tenant_has_a_part_of_the_room_that_no_other_takes():
    requests = Requests(max_requests=24, max_bytes=24_000, tenants=2)  # and the admin: a part is 2 requests, 2000 bytes
    for i in range(20):
        requests.enter(f"alice's {i}", ALICE, body=1)
    message = refused(503, requests.enter, "alice's last", ALICE)
    assert message == "the server is at capacity: 20 requests in flight"
    for i in range(2):
        requests.enter(f"bob's {i}", BOB, body=1)
        requests.enter(f"admin's {i}", None, body=1)
    refused(503, requests.enter, "bob's last", BOB)
    requests.leave("alice's 0")
    requests.enter("bob's third", BOB, body=1)
    requests.leave()
    requests.enter("alice's large", ALICE, body=20_000)
    message = refused(503, requests.enter, "alice's larger", ALICE, body=1)
    assert message.startswith("the server is at capacity: 20000 bytes of requests in flight")
    requests.enter("bob's large", BOB, body=2000)
    requests.leave()


def test_without_tenants_there_is_one_room():
    requests = Requests(max_requests=3)
    for i in range(3):
        requests.enter(f"{i}", body=1)
    assert refused(503, requests.enter, "last") == "the server is at capacity: 3 requests in flight"
    requests.leave("0")
    requests.enter("coming")
    requests.enter("whole", body=1)
    message = refused(503, requests.room.arrived, requests.places["coming"])
    assert message == "the server is at capacity: 3 requests in flight"
    requests.leave()
    assert requests.room.inside == 0


def test_a_tenant_that_is_gone_makes_no_more_room_than_there_is():
    """Its requests are still in flight when its keys have been taken away."""
    requests, tenants = Requests(), [2]
    requests.room = Room(16, LARGE, 0, lambda: tenants[0], requests.clock)
    requests.enter("alice's", ALICE, body=1)
    tenants[0] = 0
    for i in range(15):
        requests.enter(f"{i}", body=1)
    assert refused(503, requests.enter, "last", body=1) == "the server is at capacity: 16 requests in flight"
    requests.leave()


def test_a_tenants_requests_are_those_under_way():
    few = Tenant("few", requests=2)
    requests = Requests(max_requests=10, tenants=1)
    for i in range(5):
        requests.enter(f"slow {i}", few)
    requests.enter("first", few, body=1)
    with requests.room.answering(few, 2):
        message = refused(429, requests.enter, "second", few)
        assert message.startswith("rate limit: this key's tenant has 2 of 2 requests in flight")
        assert refused(429, requests.room.arrived, requests.places["slow 0"]) == message
    requests.enter("second", few, body=1)
    requests.leave()
    assert refused(400, requests.room.answering(few, 3).__enter__).startswith("n times the number of prompts")


def status_of(work, *given, **options):
    """Of its refusal; None: it is not refused."""
    try:
        work(*given, **options)
    except ApiError as error:
        return error.status
    return None


TENANTS = (None, ALICE, BOB, CARL)
STEPS = st.tuples(st.sampled_from(["enter", "take", "arrive", "leave"]), st.integers(0, 3), st.integers(0, 60))


@given(steps=st.lists(STEPS, max_size=150), max_requests=st.integers(1, 24), has_tenants=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_whatever_comes_is_counted(steps, max_requests, has_tenants):
    max_bytes, max_body_bytes = 400, 60
    requests = Requests(max_requests, max_bytes, 3 if has_tenants else 0, max_body_bytes)
    # Without tenants no part is kept for any of them.
    room, part, byte_part = (
        requests.room,
        max_requests // 16 * has_tenants,
        (max_bytes - max_body_bytes) // 16 * has_tenants,
    )
    coming: list[str] = []
    in_flight: list[str] = []

    def own(names, who):
        return [requests.places[name] for name in names if requests.places[name].tenant is who]

    for number, (step, which, size) in enumerate(steps):
        requests.clock.now += 1
        name, who, names = str(number), TENANTS[which], [*coming, *in_flight]
        counts, before = {one: len(own(coming, one)) for one in TENANTS}, set(coming)
        if step == "enter":
            has_part = len(own(in_flight, who)) < part
            has_part &= sum(one.size for one in own(in_flight, who)) + size <= byte_part or not size
            if status := status_of(requests.enter, name, who, declared=size):
                assert (status, has_part) == (503, False)
            else:
                coming.append(name)
                counts[who] += 1
        elif step == "take" and coming:
            name = coming[size % len(coming)]
            with contextlib.suppress(ApiError):
                requests.places[name].take(min(size, max_body_bytes - requests.places[name].size))
        elif step == "arrive" and coming:
            name = coming.pop(size % len(coming))
            before.discard(name)
            place = requests.places[name]
            has_part = len(own(in_flight, place.tenant)) < part
            has_part &= sum(one.size for one in own(in_flight, place.tenant)) + place.size <= byte_part
            if status := status_of(room.arrived, place):
                assert (status, has_part) == (503, False)
                requests.leave(name)
            else:
                in_flight.append(name)
        elif step == "leave" and names:
            name = names[size % len(names)]
            requests.leave(name)
            (coming if name in coming else in_flight).remove(name)
            before.discard(name)
        gone = [name for name in coming if requests.places[name].error is not None]
        if step == "enter" and gone:
            assert [counts[requests.places[one].tenant] for one in gone] == [max(counts.values())]
        for name in gone:
            coming.remove(name)
            requests.leave(name)
        places = [requests.places[name] for name in (*coming, *in_flight)]
        assert (room.coming, room.inside) == (len(coming), len(places))
        assert room.nbytes == sum(place.size for place in places) <= max_bytes
        assert len(coming) <= max_requests
        assert len(in_flight) <= max_requests
    requests.leave()
    assert (room.coming, room.inside, room.nbytes) == (0, 0, 0)


def test_memory_goes_back_when_so_many_bytes_have_ended(monkeypatch):
    """From the first body on, and to the byte."""
    begun = []

    def timer(late, work):
        return types.SimpleNamespace(start=lambda: begun.append(work))

    monkeypatch.setattr(admission, "_FREED", 10)
    monkeypatch.setattr(admission, "threading", types.SimpleNamespace(Timer=timer))
    control, counts = admission.AdmissionControl(ServerConfig()), []
    for size in (9, 1, 9, 1):
        with control.enter({"headers": []}) as place:
            place.take(size)
        counts.append(len(begun))
    assert counts == [0, 1, 1, 2]
    assert set(begun) == {admission.give_back}
