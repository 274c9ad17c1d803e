"""Image libraries: adding, changing and removing images under names."""

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
from vlcache_jax.cache.store import ImageKey
from vlcache_jax.common.checks import check_flags, check_text, is_a, short
from vlcache_jax.common.progress import Progress
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.messages import read_settings
from vlcache_jax.service import Service

_log = logging.getLogger(__name__)

TIERS = ("disk", "memory", "device")
_MAX_NAME = 256  # characters of a name
_MAX_METADATA = 65536  # bytes of JSON
_BATCH = 16  # images of `add_many` that are computed together


class LibraryEngine(Protocol):
    """An `LLM` or an `AsyncLLM`."""

    service: Service


class VectorSource(Protocol):
    """Source of vectors for added images: a `Retriever`."""

    @property
    def embedder_name(self) -> str:
        """Name under which the vectors are stored."""

    def vectors(self, images: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.float32]:
        """Return the vectors float32 [N, D] of images uint8 [H, W, 3].

        Raises:
          ValueError: the embedder cannot embed them.
        """


@dataclass(frozen=True)
class Added:
    """Result of `Library.add_many`.

    Attributes:
      added: ids of the items that now exist.
      failed: error message by id of the other images.
    """

    added: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True)
class LibraryStats:
    """Statistics of a library.

    Attributes:
      items: number of items.
      kept: number of items whose KV is cached in any tier of this machine.
      with_bytes: number of items whose image bytes are stored.
      file_bytes: size of these files in bytes.
      uncleaned: removed items whose cache entries and files are still to be deleted, which happens at the next change
        of an item or the next opening.
      damaged: damaged index rows and files of all libraries that were deleted since the process started.
    """

    items: int
    kept: int
    with_bytes: int
    file_bytes: int
    uncleaned: int = 0
    damaged: int = 0


class _NewItem(NamedTuple):
    """Arguments of an item to add. `until` is the expiration time if `expires` is None."""

    name: str
    image: Any
    metadata: Mapping[str, Any] | None = None
    expires: float | None = None
    until: float | None = None


class _PendingItem(NamedTuple):
    """Item that is being computed.

    Attributes:
      item: the item.
      rgb: its pixels, uint8 [H, W, 3].
      encoded: content of the file to store; None: no file is stored.
      loose: number of the `OrphanData` row that deletes its data if it is not completed.
    """

    item: Item
    rgb: npt.NDArray[np.uint8]
    encoded: bytes | None
    loose: int


class Library:
    """Named images for messages and retrievers::

        products = Library(llm, "products")
        products.add("shoe.jpg", id="sku-17", metadata={"price": 60})
        shoe = {"type": "image", "library": "products", "id": "sku-17"}
        llm.chat([{"role": "user", "content": [shoe, {"type": "text", "text": "Which colour has it?"}]}])

    Added images are computed at once and written to the disk tier, if there is one. The library is then available by
    its name to every engine that opens the same directory. Methods block and may be called from any thread. From a
    coroutine, call them in a thread.

    Args:
      llm: an `LLM` or `AsyncLLM`, whose model computes the images.
      name: name of the library in messages.
      owner: `cache_salt` of the requests that may use its items; None: all requests may.
      system: system message of the prompts that begin with its images. Directly after it images are reused exactly,
        elsewhere in the mode `reuse`.
      tier: tier in which cache entries are pinned: "disk"; "memory" (counts toward `CacheConfig.pinned_share`);
        "device" (memory, and copies within the same fraction of `device_bytes`). None: "disk" if there is a disk tier,
        else "memory".
      keep_bytes: also store the image bytes, which are used if the cache entries are lost. Needs a disk tier.
      mm_processor_kwargs: `min_pixels` and `max_pixels` of added images.

    Attributes:
      salt: salt of its cache entries.

    Raises:
      ValueError: an argument is invalid.
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
            argument = "tier='disk'" if tier == "disk" else "keep_bytes=True"
            raise ValueError(f"{argument} needs a disk tier: set cache=CacheConfig(disk=...)")
        if tier == "device" and not service.cache.tier.num_pages:
            raise ValueError("tier='device' needs a device tier: set cache=CacheConfig(device_bytes=...)")
        self.name, self.owner, self.service = name, owner, service
        self.salt: Salt = SHARED if owner is None else owner
        self._system, self._keep_bytes, self._tier = system, keep_bytes, tier or ("disk" if has_disk else "memory")
        self._settings, self._limits = mm_processor_kwargs, dict(read_settings(mm_processor_kwargs).limits)
        self._items, self._images = service.items, service.images
        self._whose: dict[str, Any] = {"shared": True} if owner is None else {"cache_salt": owner}
        self._embedders: weakref.WeakSet[VectorSource] = weakref.WeakSet()
        len(self)  # raises now if the index cannot be used
        self._clean(waits=False)

    def watch(self, embedder: VectorSource) -> None:
        """Embed images added from now on with this retriever, as long as it exists. The reference is weak."""
        self._embedders.add(embedder)

    def add(self, image: Any, id: str, metadata: Mapping[str, Any] | None = None, expires: float | None = None) -> Item:
        """Compute an image and store it under a new name; return the item.

        Args:
          image: an image as in messages: a path, bytes, a `data:` URL, a PIL image or an array.
          id: name of the item.
          metadata: JSON-serializable description.
          expires: lifetime in seconds; None or infinity: no limit.

        Raises:
          ValueError: the image cannot be read, the id exists, an argument is invalid, or the cache entries do not fit.
            Nothing is stored then.
        """
        _check_name("id", id)
        with self._items.writing():
            if id in self:
                raise ValueError(f"id must be new (`update` replaces an item), got {short(id)}")
            return self._add_one(_NewItem(id, image, metadata, expires))

    def update(
        self, image: Any, id: str, metadata: Mapping[str, Any] | None = None, expires: float | None = None
    ) -> Item:
        """Replace the image of an item; return the new item. Requests in flight continue with the old image.

        Args:
          image, id: see `add`.
          metadata: new metadata; None: unchanged.
          expires: new lifetime in seconds from now; None: unchanged; infinity: no limit.

        Raises:
          ValueError: see `add`; or the item does not exist.
        """
        with self._items.writing():
            before = self.get(id)
            new_metadata = before.metadata if metadata is None else metadata
            return self._add_one(_NewItem(id, image, new_metadata, expires, before.expires))

    def add_many(self, images: Mapping[str, Any] | Iterable[tuple[Any, ...]], *, use_tqdm: bool = True) -> Added:
        """Add images in batches. Invalid images are reported, and the others are added.

        After an interruption each item exists completely or not at all. Another call skips existing items without an
        error.

        Args:
          images: images by id; or pairs (id, image) or triples (id, image, metadata).
          use_tqdm: show a progress bar.

        Raises:
          ValueError: `images` or an entry of it has another type.
        """
        check_flags(use_tqdm=use_tqdm)
        if not isinstance(images, Iterable) or isinstance(images, str | bytes):
            raise ValueError(f"images must be a dict, or a list of (id, image), got {short(images)}")
        rows = images.items() if isinstance(images, Mapping) else images
        total = len(images) if isinstance(images, Mapping | Sequence) else None
        added: list[str] = []
        failed: dict[str, str] = {}
        with Progress(f"adding to {self.name}", total, show=use_tqdm) as bar:
            for some in itertools.batched(enumerate(rows), _BATCH):
                with self._items.writing():
                    new: list[_NewItem] = []
                    for given in (_NewItem(*_row(row, number)) for number, row in some):
                        if given.name in self:
                            added += [given.name] if given.name not in added else []
                        elif all(given.name != one.name for one in new):  # the first image of an id counts
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
        """Replace the metadata of an item and return the item; its image is unchanged.

        Args:
          id, metadata: see `add`.
          expires: see `update`.

        Raises:
          ValueError: the item does not exist, or an argument is invalid.
        """
        _check_name("id", id)
        _check_metadata(metadata, expires)
        if not self._items.describe(self.salt, self.name, id, metadata, lambda old: _until(expires, old)):
            raise ValueError(f"id must be an item of library {self.name!r}, got {short(id)}")
        return self.get(id)

    def remove(self, id: str) -> bool:
        """Remove an item and return whether it existed. Requests in flight keep its data until they end."""
        _check_name("id", id)
        found = self._items.remove(self.salt, self.name, id)
        self._clean(waits=False)
        return found

    def get(self, id: str) -> Item:
        """Return an item.

        Raises:
          ValueError: it does not exist.
        """
        _check_name("id", id)
        found = self._items.get(self.salt, self.name, id)
        if found is None:
            raise ValueError(f"id must be an item of library {self.name!r}, got {short(id)}")
        return found

    def items(self) -> list[Item]:
        """Return all items, ordered by id."""
        return self._items.items(self.salt, self.name)

    def __len__(self) -> int:
        return self._items.count(self.salt, self.name)

    def __contains__(self, id: object) -> bool:
        return _is_name(id) and self._items.get(self.salt, self.name, str(id)) is not None

    def part(self, id: str) -> dict[str, str]:
        """Return the message part that names an item."""
        _check_name("id", id)
        return {"type": "image", "library": self.name, "id": id}

    def image(self, id: str) -> bytes:
        """Return the encoded image bytes of an item.

        Raises:
          ValueError: the item does not exist, or its bytes are not stored.
        """
        return self._items.read(self.get(id), called=f"id {id!r}")

    def stats(self) -> LibraryStats:
        """Return the current statistics."""
        items = self.items()
        files = [item.file for item in items if item.file is not None]
        kept = sum(self.service.cache.store.knows(item.entry) for item in items)
        size, uncleaned = sum(map(self._items.file_bytes, files)), len(self._items.loose(self.salt))
        return LibraryStats(len(items), kept, len(files), size, uncleaned, self._items.damaged)

    def state(self) -> Any:
        """Return a value that changes whenever an item changes."""
        return self._items.state(self.salt, self.name)

    def vectors(self, embedder: str) -> dict[str, tuple[str, npt.NDArray[np.float32]]]:
        """Return an embedder's vectors by id, each with the version of the item it belongs to; see `Retriever`."""
        return self._items.vectors(self.salt, self.name, embedder)

    def put_vectors(self, embedder: str, given: Mapping[str, tuple[str, npt.NDArray[np.float32]]]) -> None:
        """Store vectors by id, each with the version of its item."""
        self._items.put_vectors(self.salt, self.name, embedder, given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} items)"

    def _add_one(self, given: _NewItem) -> Item:
        [found] = self._add([given])
        if isinstance(found, ValueError):
            raise found
        return found

    def _add(self, given: Sequence[_NewItem]) -> list[Item | ValueError]:
        """Compute and store images, then publish them as items. Return the item or the error of each."""
        pending = [self._begin(one) for one in given]
        try:
            images = [one.rgb for one in pending if isinstance(one, _PendingItem)]
            errors = self._images.computed(images, self._system, "image", self._settings, **self._whose)
            self._images.flush()
            for one in pending:
                if isinstance(one, _PendingItem):
                    self.service.cache.store.write_out(one.item.entry)
            self._images.flush()
            results = iter(zip(errors, _vectors([*self._embedders], images), strict=True))
            return [one if isinstance(one, ValueError) else self._finish(one, *next(results)) for one in pending]
        finally:
            self._clean()

    def _begin(self, given: _NewItem) -> _PendingItem | ValueError:
        """Return the item to compute, or its error. From now on its data are deleted unless it is published."""
        try:
            _check_name("id", given.name)
            _check_metadata(given.metadata, given.expires)
            if given.image is None:
                raise ValueError("image must be an image, got None")
            source = self.service.renderer.image(given.image, "image")
            rgb = source.decode(self.service.config.max_image_pixels)
            encoded = source.encoded or _png(rgb) if self._keep_bytes else None
            image_key = ImageKey(content_key(rgb), *rgb.shape[:2])
            [entry] = self._images.keys(rgb, mm_processor_kwargs=self._settings, **self._whose)
        except ValueError as error:
            return error
        file = None if encoded is None else uuid.uuid4().hex
        item = Item(
            self.name, given.name, image_key, self._limits, entry, file, given.metadata or {}, time.time(),
            _until(given.expires, given.until), salt=self.salt,
        )  # fmt: skip
        return _PendingItem(item, rgb, encoded, self._items.begin(self.salt, entry, file))

    def _finish(
        self, pending: _PendingItem, error: ValueError | None, vectors: Mapping[str, Any] | ValueError
    ) -> Item | ValueError:
        """Publish an item once all of its data are stored; return it or its error."""
        item = pending.item
        if error is not None:
            return error
        if isinstance(vectors, ValueError):
            return vectors
        try:
            _pin(self.service, item, self._tier)
            if item.file is not None and pending.encoded is not None:
                self._items.keep(item.file, pending.encoded)
        except ValueError as failure:
            return failure
        self._items.put(item, pending.loose, vectors)
        return item

    def _clean(self, *, waits: bool = True) -> None:
        """Delete data that belong to no item and no request in flight. Errors are logged, and the next call tries
        again.
        """
        try:
            with self._items.writing(waits=waits) as is_mine:
                if is_mine:  # else another thread or process is adding items, and cleans up afterwards
                    _give_back(self._items, self._images, self.salt, self.name, self._whose)
        except (ValueError, OSError) as error:
            _log.warning("cleanup of library %r failed and will be retried: %s", self.name, error)


def _give_back(items: Items, images: ImageCache, salt: Salt, library: str, whose: Mapping[str, Any]) -> None:
    """Delete an owner's data that belong to no item and no request in flight."""
    for name in items.expired(salt, library):
        items.remove(salt, library, name)
    for loose in items.loose(salt):
        if not items.is_used(salt, loose.entry):
            images.delete(loose.entry, **whose)
        items.forget(loose)


def _vectors(
    embedders: Sequence[VectorSource], images: Sequence[npt.NDArray[np.uint8]]
) -> Sequence[Mapping[str, Any] | ValueError]:
    """Return each image's vectors by embedder name, or the error."""
    found: list[dict[str, Any]] = [{} for _ in images]
    try:
        for embedder in embedders if images else ():
            for own, vector in zip(found, embedder.vectors(images), strict=True):
                own[embedder.embedder_name] = vector
    except ValueError as error:
        return [error] * len(images)
    return found


def _pin(service: Service, item: Item, tier: str) -> None:
    """Pin an item's cache entries in a tier. Raises ValueError if they do not fit there."""
    store, entry = service.cache.store, item.entry
    kind = "kv/" if service.preparation.planner.stores_kv(service.preparation.tokens(item)) else "enc/"
    if tier != "disk":
        store.keep(entry, True)
        kept = [one for one in store.records(entry) if one.meta.name.startswith(kind)]
        if not kept:
            raise ValueError("image must fit in host memory, but its cache entries were evicted: raise host_bytes")
        if tier == "device" and not service.cache.tier.keep(kept, store.config.pinned_share):
            raise ValueError("image must fit in the part of device_bytes that pinned_share allows: raise one of them")
    outside = [name for name in store.keep_outside(entry, True) if name.startswith(kind)]
    if not outside and tier == "disk":
        raise ValueError("image must fit on the disk, but its cache entries could not be written there: see the log")


def _row(row: Any, number: int) -> tuple[str, Any, Mapping[str, Any] | None]:
    if not isinstance(row, Sequence) or isinstance(row, str | bytes) or len(row) not in (2, 3):
        raise ValueError(f"images[{number}] must be (id, image) or (id, image, metadata), got {short(row)}")
    name, image, *rest = row
    return name, image, rest[0] if rest else None


def _check_name(what: str, name: Any) -> None:
    check_text(name, what, "a non-empty string")
    if not name:
        raise ValueError(f"{what} must be a non-empty string, got ''")
    if len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(f"{what} must be at most {_MAX_NAME} printable characters, got {short(name)}")


def _is_name(name: Any) -> bool:
    try:
        _check_name("id", name)
    except ValueError:
        return False
    return True


def _check_metadata(metadata: Any, expires: Any) -> None:
    if metadata is not None:
        if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
            raise ValueError(f"metadata must be a dict with strings as keys, got {short(metadata)}")
        try:
            size = len(json.dumps(dict(metadata), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"metadata must be JSON-serializable, got {short(metadata)}: {error}") from None
        if size > _MAX_METADATA:
            raise ValueError(f"metadata must have at most {_MAX_METADATA} bytes as JSON, got {size}")
    if not (expires is None or (is_a(expires, int | float) and expires > 0)):
        raise ValueError(f"expires must be a positive number of seconds or None, got {expires!r}")


def _until(expires: float | None, before: float | None) -> float | None:
    """Return the new expiration time of an item that expires at `before`."""
    if expires is None:
        return before
    return None if math.isinf(expires) else time.time() + expires


def _png(rgb: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return file.getvalue()
