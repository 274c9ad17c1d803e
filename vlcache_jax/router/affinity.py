"""Image-affinity routing: a request goes to the engine that holds its images, unless that engine is overloaded.

A router hashes encoded bytes and never decodes images: decoding or tokenizing would cost more than reuse saves. The
digest of an image selects one of 16384 slots. A hash of engine and slot selects the slot's engine (rendezvous hashing,
Thaler and Ravishankar 1998). If an engine joins or leaves, only its share of the slots moves. The assignment is
computed at this time, not per request. The load of an engine relative to the others is bounded, so that a popular image
spreads over several engines (consistent hashing with bounded loads, arXiv 1608.01350).
"""

from __future__ import annotations

import array
import functools
import math
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from vlcache_jax.common.checks import is_a, short

FACTOR = 1.25
"""Maximum requests in flight of an engine, as a factor of the mean over the engines."""
SLACK = 4
"""Requests in flight that an engine may always have. They run together without a loss of speed."""
RULES = ("bounded", "hash", "least-loaded", "round-robin")

_REMEMBERED = 2**16  # openings of conversations
_HEAD = 256  # characters within which the payload of a data URL begins
_PIECE = 1 << 20  # bytes read from a file at a time
_UNKNOWN = 1  # size in bytes of an image that is given by name only
_FILE = "file-id:"  # prefix of a name that stands for an uploaded file
_URLS = ("image_url", "video_url")
_VALUES = ("image", "images", "image_pil", "video", "videos")
_NAMED = ("url", "path", "base64")  # keys next to the type of a part
_TYPES = ("image", "video", "image_url", "video_url", "image_pil", "input_image", "url")
_SLOTS = 2**14  # with 1000 engines, each has about 16
_PLACES = 4  # ranked engines per slot; further engines are chosen by load
_MAPPINGS, _LISTS = (dict, Mapping), (list, tuple)  # `dict` first: isinstance with `Mapping` is slower


@dataclass(frozen=True)
class SeenImages:
    """Routing information of a request.

    Attributes:
      images: encoded size in bytes of each image or video, by its 16-byte digest.
      opening: 16-byte digest of the conversation up to its first answer; None if the request is no conversation.
      goes_on: True if the conversation already has an answer.
      file: id of an uploaded file that the request names; None if it names none.
      engine: name of the engine that stores an object of the request, such as an earlier response; None for any engine.
    """

    images: Mapping[bytes, int] = field(default_factory=dict)
    opening: bytes | None = None
    goes_on: bool = False
    file: str | None = None
    engine: str | None = None

    @property
    def largest(self) -> bytes | None:
        """Digest of the largest image, which costs most to recompute; None without images."""
        return max(zip(self.images.values(), self.images, strict=True), default=(0, None))[1]


class Rule(Protocol):
    """Rule that chooses an engine."""

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        """Return the engines, best first, without those that cannot answer.

        Args:
          seen: routing information of the request.
          loads: number of requests in flight, by engine.
        """

    def sent(self, seen: SeenImages, engine: str) -> None:
        """Note that the request was sent to an engine."""


class Affinity:
    """Rule that prefers the engine that holds the request's images.

    A continued conversation goes to the engine that answered before. A request with several images goes to the engine
    that holds most of their bytes. A request without images goes to the engine with the lowest load.

    Args:
      factor: maximum load of an engine as a factor of the mean load; infinite for no limit. Above it the next engine is
        chosen.
      slack: requests in flight that an engine may always have.

    Raises:
      ValueError: `factor` is below 1, or `slack` is below 0.
    """

    def __init__(self, factor: float = FACTOR, slack: int = SLACK):
        if not (is_a(factor, int | float) and factor >= 1):
            raise ValueError(f"factor must be a number of at least 1, got {short(factor)}")
        if not (is_a(slack, int) and slack >= 0):
            raise ValueError(f"slack must be a non-negative integer, got {short(slack)}")
        self._factor, self._slack = factor, slack
        self._openings: OrderedDict[bytes, str] = OrderedDict()
        self._slots = _Slots()

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        if not loads:
            return []
        self._slots.update(loads)
        if seen.engine is not None and seen.engine in loads:  # no other engine can answer
            return [seen.engine]
        limit = self.limit(loads)
        chosen = [name for name in self._preferred(seen) if loads[name] < limit]
        if len(chosen) == len(loads):
            return chosen
        taken = set(chosen)
        return [*chosen, *sorted((name for name in loads if name not in taken), key=loads.__getitem__)]

    def sent(self, seen: SeenImages, engine: str) -> None:
        if seen.opening is not None:
            self._openings[seen.opening] = engine
            self._openings.move_to_end(seen.opening)
            if len(self._openings) > _REMEMBERED:
                self._openings.popitem(last=False)

    def limit(self, loads: Mapping[str, int]) -> float:
        """Return the number of requests in flight at which an engine counts as overloaded."""
        if math.isinf(self._factor):
            return math.inf
        return max(self._slack, math.ceil(self._factor * (sum(loads.values()) + 1) / len(loads)))

    def holders(self, seen: SeenImages, engines: Collection[str]) -> list[str]:
        """Return the engines that may hold the images: the first and second engine of each image's slot.

        The second one held the image before the first one joined, or while the first one was overloaded.

        Args:
          seen: routing information of the request.
          engines: names of all engines.
        """
        self._slots.update(engines)
        slots = _slots_of(seen.images)
        return list(dict.fromkeys([place[slot] for place in self._slots.places[:2] for slot in slots]))

    def _preferred(self, seen: SeenImages) -> list[str]:
        """Return the engines with an affinity to the request, best first."""
        opening = seen.opening if seen.goes_on else None
        last = self._openings.get(opening) if opening is not None else None
        first = [last] if last is not None and last in self._slots else []
        shown = sorted(zip(seen.images.values(), _slots_of(seen.images), strict=True), reverse=True)
        if shown:
            largest = shown[0][1]
        elif opening is not None:
            [largest] = _slots_of([opening])
        else:
            return first
        # Ties are ordered by the largest image's slot, then by sizes and slots.
        held = {place[largest]: 0 for place in self._slots.places}
        for size, slot in shown:
            engine = self._slots.places[0][slot]
            held[engine] = held.get(engine, 0) + size
        best = sorted(held, key=held.__getitem__, reverse=True)
        return list(dict.fromkeys([*first, *best])) if first else best


class _Slots:
    """Assignment of slots to engines: the engines with the highest scores for a slot.

    Attributes:
      places: engine names by slot, first of the best engines, then of the next best ones. It has one list per engine,
        at most `_PLACES`.
    """

    def __init__(self) -> None:
        self.places: list[list[str]] = []
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []  # numbers of engines that have left
        self._scores = np.zeros((_PLACES, _SLOTS), np.uint64)
        self._engines = np.zeros((_PLACES, _SLOTS), np.int64)  # numbers

    def __contains__(self, engine: str) -> bool:
        return engine in self._numbers

    def update(self, engines: Collection[str]) -> None:
        """Set the engines. New ones take over slots of others; the slots of those that left are reassigned."""
        if len(engines) == len(self._numbers) and all(map(self._numbers.__contains__, engines)):
            return
        new = {name: _hash(name.encode()) for name in engines if name not in self._numbers}
        if gone := self._numbers.keys() - set(engines):
            numbers = [self._numbers.pop(name) for name in gone]
            self._free += numbers
            slots = np.isin(self._engines, numbers).any(0).nonzero()[0]
            self._scores[:, slots] = 0
            for name, number in self._numbers.items():
                self._add(number, _hash(name.encode()), slots)
        for name, seed in new.items():
            self._numbers[name] = number = self._free.pop() if self._free else len(self._numbers)
            self._add(number, seed, slice(None))
        names = {number: name for name, number in self._numbers.items()}
        self.places = [[names[i] for i in place] for place in self._engines[: len(names)].tolist()]

    def _add(self, engine: int, seed: int, slots: Any) -> None:
        # The keys are uniform, so multiplication by an odd number is a sufficient hash (Dietzfelbinger et al. 1997).
        scores = _keys()[slots] * np.uint64(seed | 1)
        engines = np.full(len(scores), engine)
        for place in range(_PLACES):
            at = place, slots
            is_better = scores > self._scores[at]
            worse = np.where(is_better, self._scores[at], scores), np.where(is_better, self._engines[at], engines)
            self._scores[at] = np.where(is_better, scores, self._scores[at])
            self._engines[at] = np.where(is_better, engines, self._engines[at])
            scores, engines = worse


class LeastLoaded:
    """Rule that chooses the engine with the fewest requests in flight."""

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        return sorted(loads, key=lambda name: loads[name])

    def sent(self, seen: SeenImages, engine: str) -> None:
        """Do nothing: the rule has no state."""


class RoundRobin:
    """Rule that chooses the engines in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        names = list(loads)
        first = self._turn % max(1, len(names))
        return names[first:] + names[:first]

    def sent(self, seen: SeenImages, engine: str) -> None:
        self._turn += 1


def rule_of(name: str) -> Rule:
    """Return a rule by its name, one of `RULES`.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {short(name)}")
    made: dict[str, Rule] = {
        "bounded": Affinity(), "hash": Affinity(math.inf), "least-loaded": LeastLoaded(), "round-robin": RoundRobin()
    }  # fmt: skip
    return made[name]


def look(request: Mapping[str, Any], *, reads_files: bool = False) -> SeenImages:
    """Return the routing information of a request.

    Args:
      request: a body of the server, or a conversation for `LLM.chat`.
      reads_files: True to hash the content of files that are given by path, False to hash the paths.
    """
    images: dict[bytes, int] = {}
    opening, has_opening, goes_on = xxhash.xxh3_128(), False, False
    files: list[str] = []
    for key, value in request.items():
        if key not in ("messages", "input") or not isinstance(value, list):
            images |= {digest: size for digest, size in _leaves({key: value}, reads_files, files) if size}
            continue
        for message in value:
            role = message.get("role") if isinstance(message, Mapping) else None
            has_opening = has_opening or role is not None
            goes_on = goes_on or role == "assistant"
            for digest, size in _leaves(message, reads_files, files):
                if size:
                    images[digest] = size
                if not goes_on:
                    opening.update(digest)
    return SeenImages(images, opening.digest() if has_opening else None, goes_on, files[0] if files else None)


def look_at(value: Any, *, reads_files: bool = True) -> tuple[bytes, int]:
    """Return the 16-byte digest of an image or a video and its size in bytes, without decoding it.

    Args:
      value: bytes, a path, a `data:` or another URL, an array or a PIL image.
      reads_files: True to hash the content of a file that is given by path, False to hash the path.
    """
    if isinstance(value, str) and value.startswith("data:"):
        encoded = memoryview(value.encode(errors="surrogateescape"))
        payload = encoded[value.find(",", 0, _HEAD) + 1 :]  # without the media type
        return _digest(payload), max(_UNKNOWN, len(payload) * 3 // 4)
    if isinstance(value, str | os.PathLike):
        name = os.fspath(value)
        text = name if isinstance(name, str) else os.fsdecode(name)
        if reads_files and "://" not in text:
            try:
                return _look_at_file(os.path.expanduser(text))
            except (OSError, ValueError):  # the engine reports the error
                pass
        return _digest(text.encode(errors="surrogateescape")), _UNKNOWN
    if isinstance(value, bytes | bytearray | memoryview):
        return _digest(value), max(_UNKNOWN, len(value))
    if callable(pixels := getattr(value, "tobytes", None)):
        return look_at(pixels())
    return _digest(repr(value)[:4096].encode(errors="surrogateescape")), _UNKNOWN


def _look_at_file(path: str) -> tuple[bytes, int]:
    seen, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            seen.update(piece)
            size += len(piece)
    return seen.digest(), max(_UNKNOWN, size)


def _leaves(value: Any, reads_files: bool, files: list[str]) -> Iterator[tuple[bytes, int]]:
    """Yield the digests of the leaves of a message or a field, with the size of images and videos and 0 for others.

    The ids of uploaded files are appended to `files`.
    """
    pending = [value]  # no recursion: the nesting may be deeper than Python's recursion limit
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield _digest(one.encode(errors="surrogateescape")), 0
        elif isinstance(one, _MAPPINGS):
            rest = dict(one)
            for found in _pictures(rest):
                if isinstance(found, str) and found.startswith(_FILE):
                    files.append(found.removeprefix(_FILE))
                yield look_at(found, reads_files=reads_files)
            pending += reversed(rest.values())
        elif isinstance(one, _LISTS):
            pending += reversed(one)


def _pictures(part: dict[str, Any]) -> Iterator[Any]:
    """Remove images and videos from a message part, and yield them."""
    if part.get("library") is not None and part.get("id") is not None:
        yield f"library:{part.pop('library')}/{part.pop('id')}"
    if part.get("file_id") is not None:
        yield f"{_FILE}{part.pop('file_id')}"
    if part.get("type") == "base64" and isinstance(part.get("data"), str):  # the source of an image in Anthropic's form
        yield f"data:,{part.pop('data')}"
    keys = (*_URLS, *_VALUES, *_NAMED) if part.get("type") in _TYPES else (*_URLS, *_VALUES)
    for key in keys:
        if (given := part.pop(key, None)) is None:
            continue
        for value in given if isinstance(given, _LISTS) else [given]:
            inside = value.get("url") if isinstance(value, _MAPPINGS) else value
            if inside is not None:
                yield inside


def _digest(content: Any) -> bytes:
    return xxhash.xxh3_128_digest(content)


def _slots_of(digests: Collection[bytes]) -> list[int]:
    """Return the slots of 16-byte digests, by their first two bytes."""
    return [number % _SLOTS for number in array.array("H", b"".join(digests))[::8]]


def _hash(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content)


@functools.cache
def _keys() -> npt.NDArray[np.uint64]:
    """Return the hash keys of the slots, which are the same in every router."""
    return np.array([_hash(slot.to_bytes(2, "little")) for slot in range(_SLOTS)], np.uint64)
