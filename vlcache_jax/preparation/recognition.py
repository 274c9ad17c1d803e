"""Recognition of the images in a source: by aliases, without decoding it, or by its pixels."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from PIL import Image

from vlcache_jax.cache.items import Item, Items, Use
from vlcache_jax.cache.keys import SHARED, Salt, alias_key, content_key, entry_key, group_key, owner_key
from vlcache_jax.cache.store import ImageKey, Store
from vlcache_jax.common.checks import short
from vlcache_jax.inputs.images import MAX_IMAGE_PIXELS, ImageSource, LibraryImageRef
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.inputs.processor import Grid, Patches
from vlcache_jax.inputs.prompt import Source
from vlcache_jax.preparation.media import ImageMedium, ImageShape, Media, Medium, Rgb, Settings


class KnownImage(NamedTuple):
    """Known image, found by its alias and its pixel limits. Its cache entries may or may not be in the store.

    Attributes:
      image_key: key of the image that the alias stands for.
      shape: properties of the image with these limits.
      key: entry key, under the salt of the alias.
    """

    image_key: ImageKey
    shape: ImageShape
    key: str


DECODING_BYTES = 512 * 2**20  # memory of images that are being decoded, for all callers together
_KEYS = 65536  # cached entry keys, half a kilobyte each


class Recognizer:
    """Objects that all tasks share.

    Args:
      store: image cache.
      items: items of libraries.
      media: reads headers.
      fingerprint: returns the hash of the weights; called once there is an image.
      codec: name of the codec of KV in entry keys.
    """

    def __init__(self, store: Store, items: Items, media: Media, *, fingerprint: Callable[[], str], codec: str):
        self.store, self.items, self.media, self.fingerprint = store, items, media, fingerprint
        self.decoding = DecodingBudget(DECODING_BYTES)
        self._codec = codec
        self._unsalted_key = functools.lru_cache(_KEYS)(self._make_entry_key)

    def known(self, alias: str, limits: Mapping[str, int], salt: Salt, name: str) -> KnownImage | None:
        """Return the known image of an alias, or None.

        Args:
          alias: key of a file or a trusted uuid, under the salt.
          limits: pixel limits.
          salt: salt of the call.
          name: name of the image in errors.

        Raises:
          ValueError: the image is too large with these limits.
        """
        if (image_key := self.store.image_keys.get(alias)) is None:
            return None
        key = alias, *sorted(limits.items())
        found: KnownImage | None = self.store.described.get(key)
        # The alias may stand for another image by now, such as a uuid that was released.
        if found is None or found.image_key is not image_key:
            shape = self.media.shape(image_key.height, image_key.width, limits, name)
            found = KnownImage(image_key, shape, self.entry_key(image_key, shape.settings, salt))
            self.store.described.put(key, found)
        return found

    def entry_key(self, image_key: ImageKey, settings: Settings, salt: Salt) -> str:
        """Return the entry key of an image."""
        named = image_key.content, settings
        # Keys with a salt are not cached, so that no salt stays in memory.
        return self._unsalted_key(*named) if salt is None else self._make_entry_key(*named, salt)

    def _make_entry_key(self, content: str, settings: Settings, salt: Salt = None) -> str:
        return entry_key(content, settings=dict(settings), fingerprint=self.fingerprint(), codec=self._codec, salt=salt)


class Task:
    """Identification of the images of a source: one, or the chunks of a video.

    Attributes:
      source_id: value that is equal only for identical sources.
      is_known: True if the header identified the images, or the file was not needed.
      medium: properties that the header shows.
      use: keeps the source's library item until the requests have it; None: the source is no item.
      image_key: key of the image that the source's uuid stands for.
      image_keys, images: the result.
      shared: key of each image that is equal for images that may share one object. Images known by a name alone may
        have no pixels at all, so they share none with others.
      lookup, decode, preprocess: time in seconds.
    """

    medium: Medium

    def __init__(
        self,
        recognizer: Recognizer,
        source: Source,
        uuid: str | None,
        limits: Mapping[str, int],
        salt: Salt,
        lookup: bool,
        apart: bool,
    ):
        self.source, self.uuid = source, uuid
        self._recognizer, self._limits = recognizer, limits
        self._salt, self._lookup, self._apart = salt, lookup, apart
        trusts = lookup and recognizer.store.config.trust_uuids and isinstance(source, ImageSource)
        self._trusted = uuid if trusts else None
        self.source_id: Hashable = self._trusted or _same(source)
        self._alias: str | None = None
        self._item: Item | None = None  # of a library
        self.use: Use | None = None
        self.lookup = self.decode = self.preprocess = 0.0
        self.image_keys: list[ImageKey] = []
        self.images: list[ImageRef] = []
        self.shared: list[tuple[str, bool]] = []
        self.is_known = self._is_identified = False
        self._running = threading.Lock()  # two groups of requests may run the task at once
        self._decoding = threading.Lock()  # and so may all images of a video

    @property
    def image_key(self) -> ImageKey:
        first = self.image_keys[0]
        if len(self.image_keys) == 1:
            return first
        return ImageKey(group_key([image_key.content for image_key in self.image_keys]), first.height, first.width)

    def head(self) -> ValueError | None:
        """Find out what is known without pixels; return an error, or None."""
        start = time.perf_counter()
        store = self._recognizer.store
        try:
            if isinstance(self.source, LibraryImageRef):
                self._become_item(self.source)
                return None
            mark = self.source.mark if self._trusted is None else self._trusted
            if self._lookup and mark is not None:
                self._alias = alias_key(mark, self._salt)
            if self._alias is not None and (refused := store.refusals.get(self._alias)) is not None:
                raise ValueError(f"{self.source.name} {refused}")
            if self._become_known():
                return None
            self.medium = self._recognizer.media.look(self.source, self._limits, self._alias, self._alias_of)
            known = [None if alias is None else store.image_keys.get(alias) for alias in self.medium.aliases]
            if all(known):
                for image_key in known:
                    assert image_key is not None
                    self._become(image_key, self.medium.grid)
                self.is_known = True
        except ValueError as error:
            return error
        finally:
            self.lookup = time.perf_counter() - start
        return None

    def _become_known(self) -> bool:
        """Identify an image by its alias, without opening its file; return whether that was possible."""
        recognizer, source = self._recognizer, self.source
        if self._alias is None or not isinstance(source, ImageSource):
            return False
        if (known := recognizer.known(self._alias, self._limits, self._salt, source.name)) is None:
            return False
        self.medium = ImageMedium(recognizer.media, source, self._limits, self._alias, known.shape)
        self._add(known.image_key, known.shape.grid, known.shape.tokens, known.key)
        self.is_known = True
        return True

    def _become_item(self, source: LibraryImageRef) -> None:
        """Use the library's present item, regardless of later changes of the library."""
        items = self._recognizer.items
        item, self.use = items.find(*source.named, self._salt, called=source.name)
        self._item = item
        self.source = LibraryImage(
            name=source.name, item=item, read=lambda: items.read(item, called=source.name),
            lose=lambda: items.lose(item, called=source.name),
        )  # fmt: skip
        media, image_key = self._recognizer.media, item.image_key
        shape = media.shape(image_key.height, image_key.width, item.limits, source.name)
        self.medium = ImageMedium(media, self.source, item.limits, None, shape)
        self._become(image_key, shape.grid)
        self.is_known = True

    def run(self) -> ValueError | None:
        """Identify the images, and prepare the patches that will probably be needed; return an error, or None."""
        with self._running:
            try:
                if not self._is_identified and not self.is_known:
                    self._identify()
                self._is_identified = True
                for image in self.images:
                    if not self._is_kept(image):
                        _ = image.patches
            except ValueError as error:
                return error
            return None

    def is_ready(self) -> bool:
        """Return whether `run` has nothing to do."""
        return (self._is_identified or self.is_known) and all(map(self._is_kept, self.images))

    def error_of(self, source: Source, error: ValueError) -> ValueError:
        """Return an error with the name of the source in one of the requests that have it."""
        return ValueError(str(error).replace(self.source.name, source.name))

    def wrong_uuid(self) -> ValueError:
        return ValueError(
            f"uuid of {self.source.name} must identify one image, but {short(self.uuid)} belongs to another one: "
            "choose another uuid, or release it with cache.release_uuid"
        )

    def aliases(self) -> Iterator[tuple[str, ImageKey]]:
        """Yield the aliases of the images, with the images."""
        for alias, image_key in zip(self.medium.aliases, self.image_keys, strict=True):
            if alias is not None:
                yield alias, image_key

    def _alias_of(self, name: bytes | str | tuple[str | int, ...] | None) -> str | None:
        return alias_key(name, self._salt) if self._lookup and name is not None else None

    def _identify(self) -> None:
        self.image_keys, self.images, self.shared = [], [], []
        for frames in self._decoded():
            image = self._become(_image_key(frames), self.medium.fit(frames))
            if self._lookup:
                self._recognizer.store.look(image.keys)
            if not self._is_kept(image):
                image.patches = self._cut(frames)

    def _become(self, image_key: ImageKey, grid: tuple[int, int, int]) -> ImageRef:
        """Add the next image, whose pixels are identified."""
        key = self._recognizer.entry_key(image_key, self.medium.settings, self._salt)
        return self._add(image_key, grid, self._recognizer.media.processor.num_tokens(grid), key)

    def _add(self, image_key: ImageKey, grid: Grid, tokens: int, key: str) -> ImageRef:
        """Add the next image, whose entry key is known."""
        recognizer, settings, number = self._recognizer, self.medium.settings, len(self.images)
        shared, whose = None, SHARED
        if self._item is not None:
            shared, whose = recognizer.entry_key(image_key, settings, self._item.salt), self._item.salt
        elif not self._apart:
            shared = recognizer.store.shared.get(recognizer.entry_key(image_key, settings, None))
        has_pixels = self._item is None or self._item.file is not None
        image = ImageRef(
            key, grid, tokens, lambda: self._patches(number), shared=shared, has_pixels=has_pixels,
            shared_owner=None if shared is None else owner_key(whose),
        )  # fmt: skip
        self.image_keys.append(image_key)
        self.images.append(image)
        self.shared.append((key, self._trusted is not None or not has_pixels))
        return image

    def _is_kept(self, image: ImageRef) -> bool:
        """Return whether the image has cache entries, so that its pixels will probably not be needed."""
        return self._lookup and any(map(self._recognizer.store.knows, image.keys))

    def _decoded(self) -> Iterator[tuple[Rgb, ...]]:
        """Yield the frames of each image."""
        with self._recognizer.decoding.take(self.medium.decoding_bytes):
            decoding = self.medium.decode()
            while True:
                start = time.perf_counter()
                try:
                    frames = next(decoding)
                except StopIteration:
                    return
                except ValueError as error:
                    # Remember errors of the bytes, but not a lack of memory or file handles.
                    passing = isinstance(error.__cause__, MemoryError) or getattr(error.__cause__, "errno", None)
                    if self._alias is not None and self._trusted is None and not passing:
                        reason = str(error).removeprefix(self.source.name).strip()
                        self._recognizer.store.refusals.put(self._alias, reason)
                    raise
                self.decode += time.perf_counter() - start
                yield frames

    def _cut(self, frames: tuple[Rgb, ...]) -> Patches:
        start = time.perf_counter()
        patches = self.medium.cut(frames)
        self.preprocess += time.perf_counter() - start
        return patches

    def _patches(self, number: int) -> Patches:
        """Return the patches of one image, and set those of the source's other images that will be needed."""
        with self._decoding:
            found: Patches | None = self.images[number].__dict__.get("patches")
            if found is not None:
                return found
            for i, (image, frames) in enumerate(zip(self.images, self._decoded(), strict=True)):
                if self._trusted is not None and _image_key(frames) != self.image_keys[i]:
                    raise self.wrong_uuid()  # entries under the other image's key would be wrong for all its users
                if i == number:
                    found = self._cut(frames)
                elif not image.is_loaded and not self._is_kept(image):
                    image.patches = self._cut(frames)
        assert found is not None
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class LibraryImage(ImageSource):
    """Image of a library.

    Attributes:
      item: item of the library.
      read: returns the encoded file, or raises a ValueError.
      lose: called if the file has another image; returns the error to raise.
    """

    value: bytes | Image.Image | Rgb = field(default=b"", repr=False)
    item: Item
    read: Callable[[], bytes]
    lose: Callable[[], ValueError]

    def size(self, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
        return self.item.image_key.height, self.item.image_key.width

    def decode(self, max_pixels: int = MAX_IMAGE_PIXELS) -> Rgb:
        rgb = ImageSource(self.name, self.read()).decode(max_pixels)
        if _image_key((rgb,)) != self.item.image_key:  # entries under the item's key would be wrong for all its users
            raise self.lose()
        return rgb


class DecodingBudget:
    """Memory budget that admits work in order of arrival while the total stays within `limit` bytes.

    Work that exceeds the limit runs alone.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._used = 0
        self._waiting: list[object] = []
        self._changed = threading.Condition()

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: self._waiting[0] is ticket and (not self._used or self._used + amount <= self._limit)
                )
                self._used += amount
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()


class _EncodedFile:
    """Encoded file for comparison. The hash reads few bytes; only files with equal hashes are compared in full."""

    def __init__(self, encoded: bytes):
        self._encoded, middle = encoded, len(encoded) // 2
        self._hash = hash((len(encoded), encoded[:64], encoded[middle : middle + 64], encoded[-64:]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _EncodedFile) and self._encoded == other._encoded


def _same(source: Source) -> Hashable:
    """Return a value that is equal only for identical sources."""
    if not isinstance(source, ImageSource):
        return source.film.same, source.options
    if isinstance(source, LibraryImageRef):
        return source.named
    encoded = source.encoded
    return id(source.value) if encoded is None else _EncodedFile(encoded)


def _image_key(frames: tuple[Rgb, ...]) -> ImageKey:
    return ImageKey(content_key(*frames), *frames[0].shape[:2])
