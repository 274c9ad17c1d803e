"""Room for requests and their bodies: what each tenant may take of it, and whose slow body is closed for others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator

from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.tenants import Tenant

AGAIN = 1  # seconds after which a client that found no room may send its request again
_BLOCK = 4096  # bytes; of two bodies the slower is the one whose latest block has taken longer so far
_KEPT = 4  # a quarter of the room is kept for tenants that have less than their part of this quarter


class ReservedPlace:
    """The place of one request. Its body comes first; then the request is under way.

    Args:
      room: where it is.
      tenant: whose it is; None: the server has no tenants, or the admin key was sent.
      now: when its head came.

    Attributes:
      since: when its latest block of 4096 bytes began.
      size: bytes of its body that have come.
      error: why the body was closed; None: it was not.
    """

    def __init__(self, room: Room, tenant: Tenant | None, now: float):
        self.tenant, self.since, self.size = tenant, now, 0
        self.error: ApiError | None = None
        self._room = room
        self._timeout: asyncio.Timeout | None = None

    @property
    def who(self) -> str | None:
        """Name of the tenant."""
        return None if self.tenant is None else self.tenant.name

    @contextlib.asynccontextmanager
    async def coming(self, seconds: float) -> AsyncGenerator[None]:
        """The context in which the body is read; then the request is under way.

        Args:
          seconds: that the body may take.

        Raises:
          ApiError: it takes longer, it is closed for others, or there is no room for the request.
        """
        try:
            async with asyncio.timeout(seconds) as self._timeout:
                yield
        except TimeoutError:
            late = ApiError(f"a body must come within {seconds:g} seconds", status=408)
            raise (self.error or late) from None
        self._room.arrived(self)

    def take(self, count: int) -> None:
        """Counts bytes of the body that have come.

        Raises:
          ApiError: there is no room for them.
        """
        self._room.take(self, count)

    def close(self, error: ApiError) -> None:
        """Ends `coming` with an error."""
        self.error = error
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(0)


class Room:
    """Counts requests and bytes of their bodies.

    Bodies that are still coming are counted apart from requests under way. Where there are too many of them, or too
    many bytes, those of the tenant that has most are closed, the slowest first: the one that has waited longest for
    4096 bytes more. So bytes that a head declares take no room, and a client that sends slowly takes room only while no
    other client wants it.

    Requests under way cannot be closed. A quarter of their room is kept for tenants that have less than an equal part
    of this quarter, so that each always has that part.

    Args:
      most: bodies that are coming, and requests under way, each.
      most_bytes: of all these bodies together.
      most_body: bytes of one body.
      tenants: says how many tenants there are; 0: the server has none.
      clock: seconds.
    """

    def __init__(
        self,
        most: int,
        most_bytes: int,
        most_body: int,
        tenants: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._most, self._most_bytes, self._spare = most, most_bytes, most_bytes - most_body
        self._tenants, self._clock = tenants, clock
        self._coming: dict[ReservedPlace, None] = {}
        self._under_way: set[ReservedPlace] = set()
        self._requests: Counter[str | None] = Counter()  # under way
        self._bytes: Counter[str | None] = Counter()  # of these
        self._coming_bytes = 0
        self._answers: Counter[str | None] = Counter()  # under way; of a request that is read, one

    @property
    def coming(self) -> int:
        """Bodies that are still coming."""
        return len(self._coming)

    @property
    def inside(self) -> int:
        """Requests whose bodies are coming, and those under way."""
        return len(self._coming) + len(self._under_way)

    @property
    def nbytes(self) -> int:
        """Bytes of bodies that are coming, and of requests under way."""
        return self._coming_bytes + self._bytes.total()

    @contextlib.contextmanager
    def place(self, tenant: Tenant | None, declared: int) -> Iterator[ReservedPlace]:
        """A place for a request whose head has come.

        Args:
          declared: bytes of its body, as the head says.

        Raises:
          ApiError: there is no room for the request.
        """
        place = ReservedPlace(self, tenant, self._clock())
        self._check(place, declared)
        self._coming[place] = None
        if len(self._coming) > self._most:
            why = f"the server has {self._most} requests whose bodies are coming, of which this was the slowest"
            self._close(Counter(one.who for one in self._coming), why)
        try:
            yield place
        finally:
            self._leave(place)

    def take(self, place: ReservedPlace, count: int) -> None:
        """See `Place.take`."""
        if place not in self._coming:
            return
        if (place.size + count) // _BLOCK > place.size // _BLOCK:
            place.since = self._clock()
        place.size += count
        self._coming_bytes += count
        while self.nbytes > self._most_bytes:
            sizes: Counter[str | None] = Counter()
            for one in self._coming:
                sizes[one.who] += one.size
            why = f"the server has bodies of {self.nbytes - count} bytes, beside which {count} more have no room"
            if self._close(sizes, why) is place:
                raise ApiError(why, status=503, retry_after=AGAIN)

    def arrived(self, place: ReservedPlace) -> None:
        """A body has come, and its request is under way.

        Raises:
          ApiError: there is no room for it.
        """
        if place not in self._coming:
            return
        self._stop(place)
        self._check(place, place.size)
        self._under_way.add(place)
        self._requests[place.who] += 1
        self._bytes[place.who] += place.size
        self._answers[place.who] += 1

    @contextlib.contextmanager
    def answering(self, tenant: Tenant | None, count: int) -> Iterator[None]:
        """See `Entrance.answering`."""
        if tenant is not None and tenant.requests is not None and count > tenant.requests:
            raise ApiError(
                f"n of all prompts together must be at most {tenant.requests} for this key, got {count}", "n"
            )
        self._check_own(tenant, count - 1)
        who = None if tenant is None else tenant.name
        self._answers[who] += count - 1
        try:
            yield
        finally:
            self._answers[who] -= count - 1

    def _check(self, place: ReservedPlace, size: int) -> None:
        """Raises an ApiError unless a request with a body of so many bytes may be under way now."""
        if not self._fits(self._requests, self._most, self._most, place.who, 1):
            why = f"the server has {self._requests.total()} requests under way"
            raise ApiError(why, status=503, retry_after=AGAIN)
        if not self._fits(self._bytes, self._most_bytes, self._spare, place.who, size):
            why = f"the server has requests of {self._bytes.total()} bytes under way, beside which {size} more"
            raise ApiError(f"{why} have no room", status=503, retry_after=AGAIN)
        self._check_own(place.tenant, 1)

    def _check_own(self, tenant: Tenant | None, count: int) -> None:
        if tenant is None or tenant.requests is None:
            return
        taken = self._answers[tenant.name]
        if taken + count > tenant.requests:
            why = f"this key's tenant has {taken} requests under way, of {tenant.requests} that it may have; each"
            raise ApiError(f"{why} answer counts as one", status=429, retry_after=AGAIN)

    def _fits(self, used: Counter[str | None], most: int, shared: int, who: str | None, more: int) -> bool:
        """Whether a tenant may take more beside what is used and what is kept for others, of which is `shared`."""
        others = self._tenants()  # the admin key's requests count as those of a tenant
        kept = shared // (_KEPT * (others + 1))
        taken = sum(min(kept, count) for one, count in used.items() if one != who)
        return used.total() + more + max(0, kept * others - taken) <= most

    def _close(self, used: Counter[str | None], why: str) -> ReservedPlace:
        """Closes the slowest body of the tenants that have most of what is used, and returns its place."""
        most = max(used.values())
        slowest = min((one for one in self._coming if used[one.who] == most), key=lambda one: one.since)
        self._stop(slowest)
        slowest.close(ApiError(why, status=408, retry_after=AGAIN))
        return slowest

    def _stop(self, place: ReservedPlace) -> None:
        """A body is not coming any more."""
        del self._coming[place]
        self._coming_bytes -= place.size

    def _leave(self, place: ReservedPlace) -> None:
        if place in self._coming:
            self._stop(place)
        elif place in self._under_way:
            self._under_way.remove(place)
            self._requests[place.who] -= 1
            self._bytes[place.who] -= place.size
            self._answers[place.who] -= 1
