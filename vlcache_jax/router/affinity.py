"""Which of several engines gets a request: the one that holds its images, unless that one has too much to do.

A router sees digests of encoded bytes, never pixels: decoding or tokenising pictures would cost it what reuse saves.
Pictures fall into slots by their digests. Which engine has a slot a hash of both says (rendezvous hashing, Thaler and
Ravishankar 1998), so that engines that come and go move only their share. That is worked out when they do, not when a
request comes. How much more than the others an engine may have under way is bounded (consistent hashing with
bounded loads, arXiv 1608.01350): a picture that everybody asks for spreads.
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
"""Of the mean, what an engine may have under way."""
SLACK = 4
"""Requests that an engine may have under way in any case: so many run together at no loss."""
RULES = ("bounded", "hash", "least-loaded", "round-robin")

_REMEMBERED = 2**16  # openings of conversations, and pictures
_HEAD = 256  # characters in which a data URL's payload begins
_PIECE = 1 << 20  # bytes of a file that are read at a time
_UNKNOWN = 1  # bytes of a picture that is only named
_FILE = "file-id:"  # begins a URL that names an uploaded file
_URLS = ("image_url", "video_url")
_VALUES = ("image", "images", "image_pil", "video", "videos")
_NAMED = ("url", "path", "base64")  # beside the type of a part
_TYPES = ("image", "video", "image_url", "video_url", "image_pil", "input_image")
_SLOTS = 2**14  # of a thousand engines each has about 16
_PLACES = 4  # engines that a slot has; who comes next is chosen by its load
_MAPPINGS, _LISTS = (dict, Mapping), (list, tuple)  # the frequent one first: others are asked for more slowly


@dataclass(frozen=True)
class SeenImages:
    """What a router sees of a request.

    Attributes:
      images: digest of each picture or video, of 16 bytes, and how many bytes it has as it came.
      opening: digest, of 16 bytes, of what the conversation begins with, up to its first answer; None: it is none.
      goes_on: it has an answer already.
      file: id of an uploaded file that it names, if it names one.
      engine: the one that has what the request names, such as an earlier response; None: any may have it.
    """

    images: Mapping[bytes, int] = field(default_factory=dict)
    opening: bytes | None = None
    goes_on: bool = False
    file: str | None = None
    engine: str | None = None

    @property
    def largest(self) -> bytes | None:
        """The picture that costs most to compute again."""
        return max(zip(self.images.values(), self.images, strict=True), default=(0, None))[1]


class Rule(Protocol):
    """A way to choose an engine."""

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        """The engines, the best one first; those that cannot answer are left out.

        Args:
          loads: requests that each has under way.
        """

    def sent(self, seen: SeenImages, engine: str) -> None:
        """An engine has been given the request."""


class Affinity:
    """Sends a request to the engine that holds its images; of a conversation that goes on, to the one that answered.

    Of several images the engine counts that holds most of their bytes. A text goes to whom has least to do.

    Args:
      factor: of the mean, what an engine may have under way before the next one is taken; infinite: any number.
      slack: requests that it may have in any case.

    Raises:
      ValueError: the factor is below 1, or slack below 0.
    """

    def __init__(self, factor: float = FACTOR, slack: int = SLACK):
        if not (is_a(factor, int | float) and factor >= 1):
            raise ValueError(f"factor must be a number from 1, got {short(factor)}")
        if not (is_a(slack, int) and slack >= 0):
            raise ValueError(f"slack must be a whole number from 0, got {short(slack)}")
        self._factor, self._slack = factor, slack
        self._openings: OrderedDict[bytes, str] = OrderedDict()
        self._slots = _Slots()

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        if not loads:
            return []
        self._slots.meet(loads)
        if seen.engine is not None and seen.engine in loads:  # nobody else can answer
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
        """Requests under way from which on an engine is passed by."""
        if math.isinf(self._factor):
            return math.inf
        return max(self._slack, math.ceil(self._factor * (sum(loads.values()) + 1) / len(loads)))

    def holders(self, seen: SeenImages, engines: Collection[str]) -> list[str]:
        """The engines that may hold the pictures: of each the one that has its slot, and the second, which held it
        before the first one came, and holds it where that one had too much to do."""
        self._slots.meet(engines)
        slots = _slots_of(seen.images)
        return list(dict.fromkeys([place[slot] for place in self._slots.places[:2] for slot in slots]))

    def _preferred(self, seen: SeenImages) -> list[str]:
        """Those that something speaks for, the best one first."""
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
        # Those that hold as much come as the largest picture's slot has them, then in the order of sizes and slots.
        held = {place[largest]: 0 for place in self._slots.places}
        for size, slot in shown:
            engine = self._slots.places[0][slot]
            held[engine] = held.get(engine, 0) + size
        best = sorted(held, key=held.__getitem__, reverse=True)
        return list(dict.fromkeys([*first, *best])) if first else best


class _Slots:
    """Which engines have each slot: those whose names give the highest scores with it.

    Attributes:
      places: names by slot of the engines that have it; then of those that come next. As many as there are engines, at
        most `_PLACES`.
    """

    def __init__(self) -> None:
        self.places: list[list[str]] = []
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []  # numbers of engines that have gone
        self._scores = np.zeros((_PLACES, _SLOTS), np.uint64)
        self._engines = np.zeros((_PLACES, _SLOTS), np.int64)  # numbers

    def __contains__(self, engine: str) -> bool:
        return engine in self._numbers

    def meet(self, engines: Collection[str]) -> None:
        """Takes note of the engines that there are now. Those that come take slots from others; slots of those that go
        are given anew."""
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
        # Multiplying by an odd number and comparing hashes what is spread evenly already (Dietzfelbinger et al. 1997).
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
    """Sends a request to whom has least to do."""

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        return sorted(loads, key=lambda name: loads[name])

    def sent(self, seen: SeenImages, engine: str) -> None:
        """Nothing depends on it."""


class RoundRobin:
    """Sends requests to one engine after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def order(self, seen: SeenImages, loads: Mapping[str, int]) -> list[str]:
        names = list(loads)
        first = self._turn % max(1, len(names))
        return names[first:] + names[:first]

    def sent(self, seen: SeenImages, engine: str) -> None:
        self._turn += 1


def rule_of(name: str) -> Rule:
    """A rule by its name.

    Raises:
      ValueError: there is no such rule.
    """
    if name not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {short(name)}")
    made: dict[str, Rule] = {
        "bounded": Affinity(), "hash": Affinity(math.inf), "least-loaded": LeastLoaded(), "round-robin": RoundRobin()
    }  # fmt: skip
    return made[name]


def look(request: Mapping[str, Any], *, reads_files: bool = False) -> SeenImages:
    """Sees what speaks for an engine in a request: a body of the server, or what `LLM.chat` takes as a conversation.

    Args:
      reads_files: hash the files that paths name, not the paths.
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
    """The digest of a picture or a video as it came, and its bytes. Nothing is decoded.

    Args:
      value: bytes, a path, a `data:` or another URL, an array or a PIL image.
      reads_files: hash the file that a path names, not the path.
    """
    if isinstance(value, str) and value.startswith("data:"):
        encoded = memoryview(value.encode(errors="surrogateescape"))
        payload = encoded[value.find(",", 0, _HEAD) + 1 :]  # what stands before tells the type
        return _digest(payload), max(_UNKNOWN, len(payload) * 3 // 4)
    if isinstance(value, str | os.PathLike):
        name = os.fspath(value)
        text = name if isinstance(name, str) else os.fsdecode(name)
        if reads_files and "://" not in text:
            try:
                return _look_at_file(os.path.expanduser(text))
            except (OSError, ValueError):  # who opens it tells what is wrong
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
    """Digests of what a message or a field holds; of pictures and videos with their bytes, of all else with 0. Ids of
    files go to `files`."""
    pending = [value]  # not by calls: it may be nested deeper than these may be
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
    """Takes out of a part what is a picture or a video."""
    if part.get("library") is not None and part.get("id") is not None:
        yield f"library:{part.pop('library')}/{part.pop('id')}"
    if part.get("file_id") is not None:
        yield f"{_FILE}{part.pop('file_id')}"
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
    """By the first two of 16 bytes."""
    return [number % _SLOTS for number in array.array("H", b"".join(digests))[::8]]


def _hash(content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content)


@functools.cache
def _keys() -> npt.NDArray[np.uint64]:
    """What slots are hashed by, the same in every router."""
    return np.array([_hash(slot.to_bytes(2, "little")) for slot in range(_SLOTS)], np.uint64)
