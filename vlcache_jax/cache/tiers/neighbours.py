"""The tier of peers that come and go: who may hold a record is told while the engine runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from vlcache_jax.cache.record import Meta, Part, Planes
from vlcache_jax.cache.remembered import REMEMBERED, Bounded
from vlcache_jax.cache.tier import Found, GoneError, Line, Outcome, Place, Tier, TierError
from vlcache_jax.cache.tiers.peer import PeerTier

_MOST = 8  # peers that are asked for a record
_THREADS = 8


class Holders:
    """Addresses of those that may hold what is asked for next; the last ones that were named count.

    It may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urls: OrderedDict[str, None] = OrderedDict()

    def note(self, urls: Iterable[str]) -> None:
        """They may hold what comes next."""
        with self._lock:
            for url in urls:
                self._urls[url] = None
                self._urls.move_to_end(url)
            while len(self._urls) > _MOST:
                self._urls.popitem(last=False)

    def __call__(self) -> Collection[str]:
        with self._lock:
            return tuple(self._urls)


class NeighbourTier(Tier):
    """Records of whichever peers are named when one is asked for.

    Args:
      urls: gives their addresses now; see `PeerTier`.
      connect: makes the tier of one.
    """

    label = "peer"
    is_read_only = True

    def __init__(self, urls: Callable[[], Collection[str]], connect: Callable[[str], PeerTier]):
        self._urls, self._connect = urls, connect
        self._lock = threading.Lock()
        self._peers: dict[str, PeerTier] = {}
        self._where = Bounded[PeerTier](REMEMBERED)
        self._threads = ThreadPoolExecutor(_THREADS, "vlcache-neighbours")

    def find(self, entry: str) -> list[Found]:
        asked = [(peer, self._threads.submit(peer.find, entry)) for peer in self._current()]
        found: dict[str, Found] = {}
        errors = []
        for peer, answer in asked:
            try:
                records = _result(answer)
            except TierError as error:  # it may have gone; the others answer
                errors.append(error)
                continue
            for one in records:
                found[one.meta.name] = one
                self._where.put(one.meta.name, peer)
        if errors and len(errors) == len(asked):
            raise errors[0]
        return sorted(found.values(), key=lambda one: one.written)

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Planes]]:
        if (peer := self._where.get(meta.name)) is None:
            raise GoneError(f"{meta.name}: nobody is known to hold it")
        yield from peer.read(meta, parts, place)

    def write(self, meta: Meta, parts: Mapping[Part, Planes]) -> Outcome:
        """A peer keeps what it computes."""
        return "refused"

    def delete(self, name: str) -> None:
        """Does nothing: their records are not ours."""

    def lines(self) -> Iterable[Line]:
        """None: peers do not tell what they have."""
        return ()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _current(self) -> list[PeerTier]:
        """Those that are named now; connections to others are closed."""
        urls = self._urls()
        with self._lock:
            gone = [self._peers.pop(url) for url in self._peers.keys() - set(urls)]
            for url in urls:
                if url not in self._peers:
                    self._peers[url] = self._connect(url)
            current = [self._peers[url] for url in urls]
        for peer in gone:
            peer.close()
        return current


def _result(answer: Future[list[Found]]) -> list[Found]:
    try:
        return answer.result()
    except RuntimeError as error:  # it was closed meanwhile
        raise TierError(str(error)) from error
