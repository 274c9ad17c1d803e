"""Tier of peers that change while the engine runs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from vlcache_jax.cache.keys import REMEMBERED, Bounded
from vlcache_jax.cache.record import Buffers, EntryGoneError, Found, Meta, Part, Place, TierError
from vlcache_jax.cache.tiers.peer import PeerTier, ReadOnlyTier

_MAX_PEERS = 16  # peers that a lookup queries
_SECONDS = 60.0  # lifetime of a named peer; peers that are gone are not named again
_THREADS = 8


class RecentPeers:
    """Addresses of the peers named in the last minute, the last 16 of them. Methods may be called from any thread.

    Args:
      clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._lock, self._clock = threading.Lock(), clock
        self._urls: OrderedDict[str, float] = OrderedDict()

    def note(self, urls: Collection[str]) -> None:
        """Add peers that may have the next records, the most likely ones first."""
        with self._lock:
            for url in reversed(list(urls)):
                self._urls[url] = self._clock()
                self._urls.move_to_end(url)
            while len(self._urls) > _MAX_PEERS:
                self._urls.popitem(last=False)

    def __call__(self) -> Collection[str]:
        oldest = self._clock() - _SECONDS
        with self._lock:
            return [url for url, named in self._urls.items() if named >= oldest]

    def __reduce__(self) -> tuple[type[RecentPeers], tuple[()]]:
        """Pickle it without addresses."""
        return RecentPeers, ()


class DiscoveredPeerTier(ReadOnlyTier):
    """Records of the peers that are named at the time of a lookup.

    Args:
      urls: returns their current addresses; see `PeerTier`.
      connect: creates the tier of an address.
    """

    def __init__(self, urls: Callable[[], Collection[str]], connect: Callable[[str], PeerTier]):
        self._urls, self._connect = urls, connect
        self._lock = threading.Lock()
        self._peers: dict[str, PeerTier] = {}
        self._where = Bounded[PeerTier](REMEMBERED)
        self._threads = ThreadPoolExecutor(_THREADS, "vlcache-discovered-peers")

    def find(self, entry: str) -> list[Found]:
        lookups = {self._threads.submit(peer.find, entry): peer for peer in self._current()}
        errors = []
        for answer in as_completed(lookups):
            try:
                found = _result(answer)
            except TierError as error:  # the peer may be gone; the others respond
                errors.append(error)
                continue
            if found:  # use the first peer that has it: others may be slow or gone
                for one in found:
                    self._where.put(one.meta.name, lookups[answer])
                return found
        if errors and len(errors) == len(lookups):
            raise errors[0]
        return []

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Buffers]]:
        if (peer := self._where.get(meta.name)) is None:
            raise EntryGoneError(f"{meta.name}: none of the discovered peers has this cache entry")
        yield from peer.read(meta, parts, place)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _current(self) -> list[PeerTier]:
        """Return the tiers of the peers named now, and close those of other peers."""
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
    except RuntimeError as error:  # closed in the meantime
        raise TierError(str(error)) from error
