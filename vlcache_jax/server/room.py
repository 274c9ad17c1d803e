"""Limits of requests and of their bodies' bytes, shared fairly by tenants. Slow uploads are closed for faster ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator

from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.tenants import Tenant

AGAIN = 1  # seconds after which a refused client may retry
_BLOCK = 4096  # bytes; the slowest body is the one whose latest block has taken longest so far
_RESERVED = 4  # one quarter of the room is reserved for tenants that use less than their part of this quarter


class ReservedPlace:
    """Place of one request in a `Room`. First its body is received, then the request is in flight.

    Args:
      room: the room.
      tenant: the tenant of the request; None if the server has none or the admin key was sent.
      now: time of the request's head, in seconds of the room's clock.

    Attributes:
      since: time at which its latest block of 4096 bytes began.
      size: received bytes of the body.
      error: reason why the upload was closed; None if it was not.
    """

    def __init__(self, room: Room, tenant: Tenant | None, now: float):
        self.tenant, self.since, self.size = tenant, now, 0
        self.error: ApiError | None = None
        self._room = room
        self._timeout: asyncio.Timeout | None = None

    @property
    def who(self) -> str | None:
        """Name of the tenant, or None."""
        return None if self.tenant is None else self.tenant.name

    @contextlib.asynccontextmanager
    async def coming(self, seconds: float) -> AsyncGenerator[None]:
        """Receive the body within this context. The request is in flight afterwards.

        Args:
          seconds: maximum time to receive the body.

        Raises:
          ApiError: the body took longer or was closed for others (status 408), or a limit is reached (503 or 429).
        """
        try:
            async with asyncio.timeout(seconds) as self._timeout:
                yield
        except TimeoutError:
            late = ApiError(f"a body must arrive within {seconds:g} seconds (--body-timeout)", status=408)
            raise (self.error or late) from None
        self._room.arrived(self)

    def take(self, count: int) -> None:
        """Count received bytes of the body.

        Raises:
          ApiError: the limit of bytes is reached, and this upload is the one to close (status 503).
        """
        self._room.take(self, count)

    def close(self, error: ApiError) -> None:
        """End `coming` with an error."""
        self.error = error
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(0)


class Room:
    """Counter of requests and of their bodies' bytes.

    Uploads (bodies that are being received) are counted separately from requests in flight. If there are too many
    uploads or bytes, uploads of the tenant with the highest use are closed. The slowest is closed first: the one that
    has waited longest for its next 4096 bytes. Declared bytes take no room. A slow client uses room only while no other
    client needs it.

    Requests in flight cannot be closed. A quarter of their room is reserved for tenants that use less than an equal
    part of this quarter. Each tenant always has this part.

    Args:
      max_requests: maximum number of uploads, and of requests in flight.
      max_bytes: maximum bytes of all bodies together.
      max_body_bytes: maximum bytes of one body.
      tenants: function that returns the number of tenants; 0 if the server has none.
      clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        max_body_bytes: int,
        tenants: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_requests, self._max_bytes, self._spare = max_requests, max_bytes, max_bytes - max_body_bytes
        self._tenants, self._clock = tenants, clock
        self._coming: dict[ReservedPlace, None] = {}
        self._in_flight: set[ReservedPlace] = set()
        self._requests: Counter[str | None] = Counter()  # in flight, by tenant
        self._bytes: Counter[str | None] = Counter()  # bytes of their bodies
        self._coming_bytes = 0
        self._answers: Counter[str | None] = Counter()  # in flight; one per request until it is parsed

    @property
    def coming(self) -> int:
        """Number of bodies that are being received."""
        return len(self._coming)

    @property
    def inside(self) -> int:
        """Number of requests whose bodies are being received or that are in flight."""
        return len(self._coming) + len(self._in_flight)

    @property
    def nbytes(self) -> int:
        """Received bytes of all bodies, including those of requests in flight."""
        return self._coming_bytes + self._bytes.total()

    @contextlib.contextmanager
    def place(self, tenant: Tenant | None, declared: int) -> Iterator[ReservedPlace]:
        """Yield a place for a request whose head has arrived. The place is freed at the end.

        Args:
          tenant: the tenant of the request; None if it has none.
          declared: bytes of the body by its `Content-Length`.

        Raises:
          ApiError: the server is at a limit (status 503), or the tenant is (429).
        """
        place = ReservedPlace(self, tenant, self._clock())
        self._check(place, declared)
        self._coming[place] = None
        if len(self._coming) > self._max_requests:
            why = f"the server receives at most {self._max_requests} bodies at a time, and this upload was the slowest"
            self._close(Counter(one.who for one in self._coming), why)
        try:
            yield place
        finally:
            self._leave(place)

    def take(self, place: ReservedPlace, count: int) -> None:
        """See `ReservedPlace.take`."""
        if place not in self._coming:
            return
        if (place.size + count) // _BLOCK > place.size // _BLOCK:
            place.since = self._clock()
        place.size += count
        self._coming_bytes += count
        while self.nbytes > self._max_bytes:
            sizes: Counter[str | None] = Counter()
            for one in self._coming:
                sizes[one.who] += one.size
            why = f"the server is at capacity: {self.nbytes - count} bytes of request bodies, {count} more do not fit"
            if self._close(sizes, why) is place:
                raise ApiError(why, status=503, retry_after=AGAIN)

    def arrived(self, place: ReservedPlace) -> None:
        """Count a request as in flight, now that its body has arrived.

        Raises:
          ApiError: the server is at a limit (status 503), or the tenant is (429).
        """
        if place not in self._coming:
            return
        self._stop(place)
        self._check(place, place.size)
        self._in_flight.add(place)
        self._requests[place.who] += 1
        self._bytes[place.who] += place.size
        self._answers[place.who] += 1

    @contextlib.contextmanager
    def answering(self, tenant: Tenant | None, count: int) -> Iterator[None]:
        """See `AdmissionControl.answering`."""
        if tenant is not None and tenant.requests is not None and count > tenant.requests:
            raise ApiError(
                f"n times the number of prompts must be at most {tenant.requests} for this key, got {count}", "n"
            )
        self._check_own(tenant, count - 1)
        who = None if tenant is None else tenant.name
        self._answers[who] += count - 1
        try:
            yield
        finally:
            self._answers[who] -= count - 1

    def _check(self, place: ReservedPlace, size: int) -> None:
        """Raise an `ApiError` unless a request with a body of `size` bytes may be in flight now."""
        if not self._fits(self._requests, self._max_requests, self._max_requests, place.who, 1):
            why = f"the server is at capacity: {self._requests.total()} requests in flight"
            raise ApiError(why, status=503, retry_after=AGAIN)
        if not self._fits(self._bytes, self._max_bytes, self._spare, place.who, size):
            why = (
                f"the server is at capacity: {self._bytes.total()} bytes of requests in flight, {size} more do not fit"
            )
            raise ApiError(why, status=503, retry_after=AGAIN)
        self._check_own(place.tenant, 1)

    def _check_own(self, tenant: Tenant | None, count: int) -> None:
        if tenant is None or tenant.requests is None:
            return
        taken = self._answers[tenant.name]
        if taken + count > tenant.requests:
            why = f"rate limit: this key's tenant has {taken} of {tenant.requests} requests in flight"
            raise ApiError(f"{why} (each of n answers counts)", status=429, retry_after=AGAIN)

    def _fits(self, used: Counter[str | None], total: int, shared: int, who: str | None, count: int) -> bool:
        """Return whether a tenant may use `count` more of `total`.

        Args:
          used: current use of each tenant.
          total: the limit of all tenants together.
          shared: the part of `total` of which a quarter is reserved.
          who: name of the tenant.
          count: additional requests or bytes.
        """
        others = self._tenants()  # the admin key counts as one more tenant
        reserved = shared // (_RESERVED * (others + 1))
        taken = sum(min(reserved, size) for one, size in used.items() if one != who)
        return used.total() + count + max(0, reserved * others - taken) <= total

    def _close(self, used: Counter[str | None], why: str) -> ReservedPlace:
        """Close the slowest upload of the tenants with the highest use, and return its place."""
        highest = max(used.values())
        slowest = min((one for one in self._coming if used[one.who] == highest), key=lambda one: one.since)
        self._stop(slowest)
        slowest.close(ApiError(why, status=408, retry_after=AGAIN))
        return slowest

    def _stop(self, place: ReservedPlace) -> None:
        """Remove a body from those that are being received."""
        del self._coming[place]
        self._coming_bytes -= place.size

    def _leave(self, place: ReservedPlace) -> None:
        if place in self._coming:
            self._stop(place)
        elif place in self._in_flight:
            self._in_flight.remove(place)
            self._requests[place.who] -= 1
            self._bytes[place.who] -= place.size
            self._answers[place.who] -= 1
