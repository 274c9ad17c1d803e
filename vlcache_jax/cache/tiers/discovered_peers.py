"""The tier of peers that come and go: who may hold a record is told while the engine runs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from vlcache_jax.cache.keys import REMEMBERED, Bounded
from vlcache_jax.cache.record import EntryGoneError, Found, Meta, Part, Place, Planes, TierError
from vlcache_jax.cache.tiers.peer import PeerTier, ReadOnlyTier

_MOST = 16  # peers that are asked for a record
_SECONDS = 60.0  # for which one that was named counts: who is gone is not named again
_THREADS = 8


class RecentPeers:
    """Addresses of those that may hold what is asked for next; the last ones that were named count, for a minute.

    It may be called from any thread.

    Args:
      clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._lock, self._clock = threading.Lock(), clock
        self._urls: OrderedDict[str, float] = OrderedDict()

    def note(self, urls: Collection[str]) -> None:
        """They may hold what comes next, the first ones most likely."""
        with self._lock:
            for url in reversed(list(urls)):
                self._urls[url] = self._clock()
                self._urls.move_to_end(url)
            while len(self._urls) > _MOST:
                self._urls.popitem(last=False)

    def __call__(self) -> Collection[str]:
        oldest = self._clock() - _SECONDS
        with self._lock:
            return [url for url, named in self._urls.items() if named >= oldest]

    def __reduce__(self) -> tuple[type[RecentPeers], tuple[()]]:
        """Elsewhere nobody has been named."""
        return RecentPeers, ()


class NeighbourTier(ReadOnlyTier):
    """Records of whichever peers are named when one is asked for.

    Args:
      urls: gives their addresses now; see `PeerTier`.
      connect: makes the tier of one.
    """

    def __init__(self, urls: Callable[[], Collection[str]], connect: Callable[[str], PeerTier]):
        self._urls, self._connect = urls, connect
        self._lock = threading.Lock()
        self._peers: dict[str, PeerTier] = {}
        self._where = Bounded[PeerTier](REMEMBERED)
        self._threads = ThreadPoolExecutor(_THREADS, "vlcache-neighbours")

    def find(self, entry: str) -> list[Found]:
        asked = {self._threads.submit(peer.find, entry): peer for peer in self._current()}
        errors = []
        for answer in as_completed(asked):
            try:
                found = _result(answer)
            except TierError as error:  # it may have gone; the others answer
                errors.append(error)
                continue
            if found:  # the first one that has it: others may be slow, or gone
                for one in found:
                    self._where.put(one.meta.name, asked[answer])
                return found
        if errors and len(errors) == len(asked):
            raise errors[0]
        return []

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Planes]]:
        if (peer := self._where.get(meta.name)) is None:
            raise EntryGoneError(f"{meta.name}: nobody is known to hold it")
        yield from peer.read(meta, parts, place)

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
