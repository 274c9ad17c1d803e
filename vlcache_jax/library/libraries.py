"""A library: adding, changing and removing pictures under names."""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlcache_jax.cache.items import Item, Items
from vlcache_jax.cache.keys import SHARED, Salt, TenantSalt, content_key
from vlcache_jax.cache.store import PictureKey
from vlcache_jax.common.checks import check_flags, check_text, is_a, short
from vlcache_jax.common.progress import Progress
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.messages import read_settings
from vlcache_jax.service import Service

_log = logging.getLogger(__name__)

TIERS = ("disk", "memory", "device")
_MOST_NAME = 256  # characters of a name
_MOST_METADATA = 65536  # bytes of JSON
_TOGETHER = 16  # pictures of `add_many` that are computed together


class LibraryEngine(Protocol):
    """An `LLM` or an `AsyncLLM`."""

    service: Service


class Watcher(Protocol):
    """Who embeds what is added: a `Retriever`."""

    @property
    def embedder_name(self) -> str:
        """Under which vectors are kept."""

    def vectors(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.float32]:
        """Of pictures [H, W, 3]: [N, D].

        Raises:
          ValueError: the embedder makes none.
        """


@dataclass(frozen=True)
class Added:
    """What `Library.add_many` came to.

    Attributes:
      added: ids of the items that are there now.
      failed: by id, what was wrong with the others.
    """

    added: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True)
class LibraryStats:
    """What a library has.

    Attributes:
      items: that there are.
      kept: of these, how many have records of K, V now, in any tier of this machine.
      with_bytes: how many have the bytes of their pictures.
      file_bytes: of these bytes.
      uncleaned: records and files of items that are gone, which are still to be removed: the next change of an item, or
        the next opening, does it.
      damaged: entries of all libraries' index, and files, that were damaged and have been removed since the process
        began.
    """

    items: int
    kept: int
    with_bytes: int
    file_bytes: int
    uncleaned: int = 0
    damaged: int = 0


class _Given(NamedTuple):
    """What is to be added."""

    name: str
    image: Any
    metadata: Mapping[str, Any] | None = None
    expires: float | None = None
    until: float | None = None  # where `expires` says nothing


class _Begun(NamedTuple):
    """What is to be an item.

    Attributes:
      rgb: its pixels.
      encoded: the file that is kept; None: none is.
      loose: number of what belongs to no item yet.
    """

    item: Item
    rgb: npt.NDArray[np.uint8]
    encoded: bytes | None
    loose: int


class Library:
    """Pictures under names, for messages and for a retriever::

        products = Library(llm, "products")
        products.add("shoe.jpg", id="sku-17", metadata={"price": 60})
        shoe = {"type": "image", "library": "products", "id": "sku-17"}
        llm.chat([{"role": "user", "content": [shoe, {"type": "text", "text": "Which colour has it?"}]}])

    What is added is computed at once and written to the disk tier, if there is one. With it, the library outlives the
    process: who opens an engine on the same directory finds it by its name. Every method may be called from any thread,
    and they block: from a coroutine, call them in a thread.

    Args:
      llm: an `LLM` or `AsyncLLM`, whose model sees the pictures.
      name: as messages call it.
      owner: the `cache_salt` of the requests that may name its items; None: all may, whatever their salts.
      system: the system message of the prompts that will show its pictures first. Behind it they are reused exactly,
        elsewhere as `reuse` says.
      tier: where records are pinned: "disk"; "memory", where they take of `CacheConfig.pinned_share`; "device", where
        their copies take as large a share of `device_bytes`, beside memory. None: on the disk if there is a disk tier.
      keep_bytes: also keep the bytes of pictures, which are read where records are gone. It needs a disk tier.
      mm_processor_kwargs: `min_pixels` and `max_pixels` of what is added.

    Attributes:
      salt: under which its records are kept.

    Raises:
      ValueError: an argument is wrong.
    """

    def __init__(
        self,
        llm: LibraryEngine,
        name: str,
        owner: str | TenantSalt | None = None,
        *,
        system: str | None = None,
        tier: str | None = None,
        keep_bytes: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ):
        if not isinstance(getattr(llm, "service", None), Service):
            raise ValueError(f"llm must be an LLM or an AsyncLLM, got {type(llm).__name__}")
        _check_name("name", name)
        if owner is not None and not isinstance(owner, TenantSalt):
            check_text(owner, "owner", "a string or None")
        if system is not None:
            check_text(system, "system")
        check_flags(keep_bytes=keep_bytes)
        service = llm.service
        has_disk = service.config.cache.disk is not None
        if tier is not None and tier not in TIERS:
            raise ValueError(f"tier must be one of {TIERS} or None, got {short(tier)}")
        if not has_disk and (tier == "disk" or keep_bytes):
            told = "tier" if tier == "disk" else "keep_bytes"
            raise ValueError(f"{told} must be left out without a disk tier: give cache=CacheConfig(disk=...)")
        if tier == "device" and not service.cache.tier.num_pages:
            raise ValueError("tier must not be device without a device tier: give cache=CacheConfig(device_bytes=...)")
        self.name, self.owner, self.service = name, owner, service
        self.salt: Salt = SHARED if owner is None else owner
        self._system, self._keep_bytes, self._tier = system, keep_bytes, tier or ("disk" if has_disk else "memory")
        self._settings, self._limits = mm_processor_kwargs, dict(read_settings(mm_processor_kwargs).limits)
        self._items, self._images = service.items, service.images
        self._whose: dict[str, Any] = {"shared": True} if owner is None else {"cache_salt": owner}
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        len(self)  # an index that cannot be used is known now
        self._clean(waits=False)

    def watch(self, watcher: Watcher) -> None:
        """Lets a retriever embed what is added from now on, as long as it lives."""
        self._watchers.add(watcher)

    # Changing.

    def add(self, image: Any, id: str, metadata: Mapping[str, Any] | None = None, expires: float | None = None) -> Item:
        """Computes a picture and keeps it under a new name.

        Args:
          image: what messages take: a path, bytes, a `data:` URL, a PIL image, an array.
          id: its name.
          metadata: what else is to be said of it, as JSON has it.
          expires: seconds after which it is there no more; None or infinity: it stays.

        Raises:
          ValueError: the picture cannot be read, there is an item of that name, or an argument is wrong; or its records
            do not fit. Nothing is kept then.
        """
        _check_name("id", id)
        with self._items.writing():
            if id in self:
                raise ValueError(f"id must be a new one (`update` changes an item), got {short(id)}")
            return self._add_one(_Given(id, image, metadata, expires))

    def update(
        self, image: Any, id: str, metadata: Mapping[str, Any] | None = None, expires: float | None = None
    ) -> Item:
        """Puts another picture in the place of an item's. Requests under way go on with the one they began with, later
        ones see the new one, and none sees something of both.

        Args:
          image, id: see `add`.
          metadata: None: that which it has.
          expires: seconds from now; None: when it would have ended; infinity: it stays.

        Raises:
          ValueError: see `add`; or there is no such item.
        """
        with self._items.writing():
            before = self.get(id)
            said = before.metadata if metadata is None else metadata
            return self._add_one(_Given(id, image, said, expires, before.expires))

    def add_many(self, images: Mapping[str, Any] | Iterable[tuple[Any, ...]], *, use_tqdm: bool = True) -> Added:
        """Adds pictures, some at a time. One that is wrong is told of, and the others are added. Whatever ends it, each
        item is there whole or not at all; called again, it goes on: items that are there are no errors, and stay.

        Args:
          images: by their ids; or pairs (id, image), or triples with metadata.
          use_tqdm: show a progress bar.
        """
        check_flags(use_tqdm=use_tqdm)
        if not isinstance(images, Iterable) or isinstance(images, str | bytes):
            raise ValueError(f"images must be a dict, or a list of (id, image), got {short(images)}")
        rows = images.items() if isinstance(images, Mapping) else images
        total = len(images) if isinstance(images, Mapping | Sequence) else None
        added: list[str] = []
        failed: dict[str, str] = {}
        with Progress(f"adding to {self.name}", total, show=use_tqdm) as bar:
            for some in itertools.batched(enumerate(rows), _TOGETHER):
                with self._items.writing():
                    new: list[_Given] = []
                    for given in (_Given(*_row(row, number)) for number, row in some):
                        if given.name in self:
                            added += [given.name] if given.name not in added else []
                        elif all(given.name != one.name for one in new):  # the first one of a name holds
                            new.append(given)
                    for one, found in zip(new, self._add(new), strict=True):
                        if isinstance(found, Item):
                            added.append(one.name)
                        else:
                            failed[str(one.name)] = str(found)
                for _ in some:
                    bar.update()
        return Added(tuple(added), failed)

    def describe(self, id: str, metadata: Mapping[str, Any], expires: float | None = None) -> Item:
        """Says something else of an item, whose picture stays.

        Args:
          id, metadata: see `add`.
          expires: see `update`.

        Raises:
          ValueError: there is no such item, or an argument is wrong.
        """
        _check_name("id", id)
        _check_said(metadata, expires)
        if not self._items.describe(self.salt, self.name, id, metadata, lambda old: _until(expires, old)):
            raise ValueError(f"id must be that of an item of library {self.name!r}, got {short(id)}")
        return self.get(id)

    def remove(self, id: str) -> bool:
        """Removes an item, its records and its bytes; whether there was one. Requests under way end as they began."""
        _check_name("id", id)
        found = self._items.remove(self.salt, self.name, id)
        self._clean(waits=False)
        return found

    # Looking.

    def get(self, id: str) -> Item:
        """An item.

        Raises:
          ValueError: there is none.
        """
        _check_name("id", id)
        found = self._items.get(self.salt, self.name, id)
        if found is None:
            raise ValueError(f"id must be that of an item of library {self.name!r}, got {short(id)}")
        return found

    def items(self) -> list[Item]:
        """All items, by their ids."""
        return self._items.items(self.salt, self.name)

    def __len__(self) -> int:
        return self._items.count(self.salt, self.name)

    def __contains__(self, id: object) -> bool:
        return _is_name(id) and self._items.get(self.salt, self.name, str(id)) is not None

    def part(self, id: str) -> dict[str, str]:
        """The part of a message that shows an item."""
        _check_name("id", id)
        return {"type": "image", "library": self.name, "id": id}

    def image(self, id: str) -> bytes:
        """The bytes of an item's picture.

        Raises:
          ValueError: there is no such item, or they were not kept.
        """
        return self._items.read(self.get(id), called=f"id {id!r}")

    def stats(self) -> LibraryStats:
        """What there is."""
        items = self.items()
        files = [item.file for item in items if item.file is not None]
        kept = sum(self.service.cache.store.knows(item.entry) for item in items)
        size, uncleaned = sum(map(self._items.file_bytes, files)), len(self._items.loose(self.salt))
        return LibraryStats(len(items), kept, len(files), size, uncleaned, self._items.damaged)

    def state(self) -> Any:
        """Another one whenever an item has changed."""
        return self._items.state(self.salt, self.name)

    def vectors(self, embedder: str) -> dict[str, tuple[str, npt.NDArray[np.float32]]]:
        """By id, of which version an embedder's vector is, and the vector; see `Retriever`."""
        return self._items.vectors(self.salt, self.name, embedder)

    def put_vectors(self, embedder: str, given: Mapping[str, tuple[str, npt.NDArray[np.float32]]]) -> None:
        """Keeps vectors, of versions, by id."""
        self._items.put_vectors(self.salt, self.name, embedder, given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} items)"

    # Inside.

    def _add_one(self, given: _Given) -> Item:
        [found] = self._add([given])
        if isinstance(found, ValueError):
            raise found
        return found

    def _add(self, given: Sequence[_Given]) -> list[Item | ValueError]:
        """Computes pictures, keeps them, and only then names them; of each, the item or what is wrong with it."""
        begun = [self._begun(one) for one in given]
        try:
            pictures = [one.rgb for one in begun if isinstance(one, _Begun)]
            wrong = self._images.computed(pictures, self._system, "image", self._settings, **self._whose)
            self._images.flush()
            for one in begun:
                if isinstance(one, _Begun):
                    self.service.cache.store.write_out(one.item.entry)
            self._images.flush()
            results = iter(zip(wrong, _vectors([*self._watchers], pictures), strict=True))
            return [one if isinstance(one, ValueError) else self._ended(one, *next(results)) for one in begun]
        finally:
            self._clean()

    def _begun(self, given: _Given) -> _Begun | ValueError:
        """What is known before it is computed. From here on what is kept of it is cleaned up unless it is named."""
        try:
            _check_name("id", given.name)
            _check_said(given.metadata, given.expires)
            if given.image is None:
                raise ValueError("image must be an image, got None")
            source = self.service.renderer.image(given.image, "image")
            rgb = source.decode(self.service.config.max_image_pixels)
            encoded = source.encoded or _png(rgb) if self._keep_bytes else None
            picture = PictureKey(content_key(rgb), *rgb.shape[:2])
            [entry] = self._images.keys(rgb, mm_processor_kwargs=self._settings, **self._whose)
        except ValueError as error:
            return error
        file = None if encoded is None else uuid.uuid4().hex
        item = Item(
            self.name, given.name, picture, self._limits, entry, file, given.metadata or {}, time.time(),
            _until(given.expires, given.until), salt=self.salt,
        )  # fmt: skip
        return _Begun(item, rgb, encoded, self._items.begin(self.salt, entry, file))

    def _ended(
        self, begun: _Begun, wrong: ValueError | None, vectors: Mapping[str, Any] | ValueError
    ) -> Item | ValueError:
        """The item, which is named when all that is kept of it is where it stays."""
        item = begun.item
        if wrong is not None:
            return wrong
        if isinstance(vectors, ValueError):
            return vectors
        try:
            _pin(self.service, item.entry, self._tier)
            if item.file is not None and begun.encoded is not None:
                self._items.keep(item.file, begun.encoded)
        except ValueError as error:
            return error
        self._items.put(item, begun.loose, vectors)
        return item

    def _clean(self, *, waits: bool = True) -> None:
        """Gives back what belongs to no item, and to no request under way. What fails is noted, and done later: the
        change that it follows has happened."""
        try:
            with self._items.writing(waits=waits) as is_mine:
                if is_mine:  # else somebody is adding items, and cleans up after that
                    _give_back(self._items, self._images, self.salt, self.name, self._whose)
        except (ValueError, OSError) as error:
            _log.warning("library %r is cleaned later: %s", self.name, error)


def _give_back(items: Items, images: ImageCache, salt: Salt, library: str, whose: Mapping[str, Any]) -> None:
    """Deletes what belongs to no item of an owner's, and to no request under way."""
    for name in items.expired(salt, library):
        items.remove(salt, library, name)
    for loose in items.loose(salt):
        if not items.is_used(salt, loose.entry):
            images.delete(loose.entry, **whose)
        items.forget(loose)


def _vectors(
    watchers: Sequence[Watcher], pictures: Sequence[npt.NDArray[np.uint8]]
) -> Sequence[Mapping[str, Any] | ValueError]:
    """Of each picture its vectors by embedder, or why there are none."""
    found: list[dict[str, Any]] = [{} for _ in pictures]
    try:
        for watcher in watchers if pictures else ():
            for own, vector in zip(found, watcher.vectors(pictures), strict=True):
                own[watcher.embedder_name] = vector
    except ValueError as error:
        return [error] * len(pictures)
    return found


def _pin(service: Service, entry: str, tier: str) -> None:
    """Raises a ValueError if records do not stay where they are to."""
    store = service.cache.store
    if tier != "disk":
        store.keep(entry, True)
        kept = [one for one in store.records(entry) if one.meta.context is not None]
        if not kept:
            raise ValueError("image must fit in memory, but its records did not stay there")
        if tier == "device" and not service.cache.tier.keep(kept, store.config.pinned_share):
            raise ValueError("image must fit in the share of device_bytes that pinned_share leaves, but does not")
    if not store.keep_outside(entry, True) and tier == "disk":
        raise ValueError("image must fit on the disk, but its records could not be written there: see the log")


def _row(row: Any, number: int) -> tuple[str, Any, Mapping[str, Any] | None]:
    if not isinstance(row, Sequence) or isinstance(row, str | bytes) or len(row) not in (2, 3):
        raise ValueError(f"images[{number}] must be (id, image) or (id, image, metadata), got {short(row)}")
    name, image, *rest = row
    return name, image, rest[0] if rest else None


def _check_name(what: str, name: Any) -> None:
    check_text(name, what, "a non-empty string")
    if not name:
        raise ValueError(f"{what} must be a non-empty string, got ''")
    if len(name) > _MOST_NAME or not name.isprintable():
        raise ValueError(f"{what} must be printable, of at most {_MOST_NAME} characters, got {short(name)}")


def _is_name(name: Any) -> bool:
    try:
        _check_name("id", name)
    except ValueError:
        return False
    return True


def _check_said(metadata: Any, expires: Any) -> None:
    if metadata is not None:
        if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
            raise ValueError(f"metadata must be a dict with strings as keys, got {short(metadata)}")
        try:
            size = len(json.dumps(dict(metadata), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"metadata must be what JSON can hold, got {short(metadata)}: {error}") from None
        if size > _MOST_METADATA:
            raise ValueError(f"metadata must have at most {_MOST_METADATA} bytes as JSON, got {size}")
    if not (expires is None or (is_a(expires, int | float) and expires > 0)):
        raise ValueError(f"expires must be a positive number of seconds or None, got {expires!r}")


def _until(expires: float | None, before: float | None) -> float | None:
    """When an item ends that would have ended before."""
    if expires is None:
        return before
    return None if math.isinf(expires) else time.time() + expires


def _png(rgb: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return file.getvalue()
