"""Which images a source shows: by aliases, without decoding it, else by its pixels.

The head of a file gives an image's place in a prompt and the way to its pixels (`Media`). A still image is one image, a
video as many as it has chunks; the rest of the package makes no difference between them.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlcache_jax.cache.items import Item, Items, Use
from vlcache_jax.cache.keys import SHARED, Bounded, Salt, alias_key, content_key, entry_key, group_key, owner_key
from vlcache_jax.cache.store import PictureKey, Store
from vlcache_jax.common.checks import short
from vlcache_jax.inputs.expansion import Inset
from vlcache_jax.inputs.images import MAX_IMAGE_PIXELS, ImageSource, NamedImage
from vlcache_jax.inputs.layout import ImageRef, Moment
from vlcache_jax.inputs.processor import Grid, ImageProcessor, Patches
from vlcache_jax.inputs.prompt import PromptRenderer, Source
from vlcache_jax.inputs.video_processor import VideoProcessor
from vlcache_jax.inputs.videos import VideoHeader, VideoSource

Rgb = npt.NDArray[np.uint8]
Settings = tuple[tuple[str, Any], ...]

_PIXEL_BYTES = 7  # Pillow's picture and ours beside it
_HEADS = 4096  # of videos; a hundred bytes apiece


class Medium(Protocol):
    """What is known of an image or a video before its pixels.

    Attributes:
      aliases: keys under which the picture of each image is found without decoding; None: there is none.
      grid: patches of each image, as far as the head tells.
      inset: what comes in the place of its placeholder.
      settings: what makes the pixels of the model of those of the picture; a part of entry keys.
    """

    aliases: list[str | None]
    grid: Grid
    inset: Inset
    settings: Settings

    @property
    def decoding_bytes(self) -> int:
        """Memory that it takes while it is decoded."""

    @property
    def patch_bytes(self) -> int:
        """Memory of the patches of all its images."""

    def moments(self, video: int) -> tuple[Moment | None, ...]:
        """Of each image, where in the video it stands that is the request's `video`-th."""

    def decode(self) -> Iterator[tuple[Rgb, ...]]:
        """The frames of each image, in order.

        Raises:
          ValueError: they cannot be decoded.
        """

    def fit(self, frames: tuple[Rgb, ...]) -> Grid:
        """The patches of an image."""

    def cut(self, frames: tuple[Rgb, ...]) -> Patches:
        """The pixels of an image."""


@dataclass(frozen=True, eq=False)
class ImageShape:
    """What the size of a picture and the limits of its pixels decide.

    Attributes:
      grid, inset, settings, patch_bytes: see `Medium`.
      tokens: image tokens that it takes in a prompt.
    """

    grid: Grid
    inset: Inset
    settings: Settings
    patch_bytes: int
    tokens: int


class KnownImage(NamedTuple):
    """What follows from an alias that the cache knows, and from limits of pixels. The store decides what is kept of it.

    Attributes:
      picture: for which the alias stands.
      shape: of the picture with these limits.
      key: entry key, under the salt of the alias.
    """

    picture: PictureKey
    shape: ImageShape
    key: str


class Media:
    """Looks at the heads of images and videos.

    Args:
      processor, videos, renderer: of the checkpoint.
      max_patches: of an image.
      max_pixels: of a picture or a frame, before it is scaled.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        videos: VideoProcessor,
        renderer: PromptRenderer,
        *,
        max_patches: int,
        max_pixels: int,
    ):
        self.processor, self.videos, self.renderer = processor, videos, renderer
        self.max_pixels = max_pixels
        self._max_patches = max_patches
        self._heads = Bounded[VideoHeader](_HEADS)
        self._settings = functools.lru_cache(256)(lambda limits: tuple(processor.settings(dict(limits)).items()))

    def look(
        self,
        source: Source,
        limits: Mapping[str, int],
        alias: str | None,
        alias_of: Callable[[Any], str | None],
    ) -> Medium:
        """What the head of a source tells.

        Args:
          limits: of its pixels (`Prompt.limits_of`).
          alias: key of its file; None: it has none.
          alias_of: key of what tells frames for sure without decoding them.

        Raises:
          ValueError: it is none, too large, or contradicts the options.
        """
        if isinstance(source, VideoSource):
            return _Video(self, source, alias, alias_of)
        shape = self.shape(*source.size(self.max_pixels), limits, source.name)
        return PictureMedium(self, source, limits, alias, shape)

    def shape(self, height: int, width: int, limits: Mapping[str, int], name: str) -> ImageShape:
        """What the size of a picture and its limits decide.

        Raises:
          ValueError: it is too large.
        """
        grid = self.grid(height, width, limits, name)
        tokens, patch_bytes = self.processor.num_tokens(grid), math.prod(grid) * 3 * self.processor.patch_size**2
        return ImageShape(grid, self.renderer.expander.image_inset(tokens), self.settings(limits), patch_bytes, tokens)

    def head(self, source: VideoSource, key: str | None) -> VideoHeader:
        """Of a video; a file that is known is not opened."""
        head = None if key is None else self._heads.get(key)
        if head is None:
            head = source.film.head(self.max_pixels)
            if key is not None:
                self._heads.put(key, head)
        return head

    def settings(self, limits: Mapping[str, int]) -> Settings:
        """What makes the pixels of images with these limits."""
        return self._settings(tuple(sorted(limits.items())))

    def grid(self, height: int, width: int, limits: Mapping[str, int], name: str) -> Grid:
        """The patches of a picture.

        Raises:
          ValueError: it has more than the engine takes.
        """
        grid = self.processor.grid(height, width, limits, name=name)
        said = "max_pixels (or min_pixels) beside it or in mm_processor_kwargs"
        return self.check_patches(grid, "resized_height or resized_width" if "resized_height" in limits else said, name)

    def check_patches(self, grid: Grid, said: str, name: str) -> Grid:
        """The grid.

        Args:
          said: what asks for so many.

        Raises:
          ValueError: it has more patches than the engine takes.
        """
        if (patches := math.prod(grid)) > self._max_patches:
            raise ValueError(
                f"{name} must have at most {self._max_patches} patches, got {patches}: lower {said}, "
                "or open the engine with a larger max_model_len or ladder.patches"
            )
        return grid


class PictureMedium:
    """A picture; `shape` is that of its head, or of the picture if it is known."""

    def __init__(
        self, media: Media, source: ImageSource, limits: Mapping[str, int], alias: str | None, shape: ImageShape
    ):
        self._media, self._source, self._limits = media, source, limits
        self.aliases = [alias]
        self.grid, self.inset, self.settings = shape.grid, shape.inset, shape.settings
        self.patch_bytes = shape.patch_bytes

    @property
    def decoding_bytes(self) -> int:
        height, width = self._source.size(self._media.max_pixels)
        return height * width * _PIXEL_BYTES

    def moments(self, video: int) -> tuple[Moment | None, ...]:
        return (None,)

    def decode(self) -> Iterator[tuple[Rgb, ...]]:
        yield (self._source.decode(self._media.max_pixels),)

    def fit(self, frames: tuple[Rgb, ...]) -> Grid:
        height, width, _ = frames[0].shape  # EXIF may have turned it
        return self._media.grid(height, width, self._limits, self._source.name)

    def cut(self, frames: tuple[Rgb, ...]) -> Patches:
        return self._media.processor.patches(frames[0], self._limits)


class _Video:
    """A video."""

    def __init__(self, media: Media, source: VideoSource, alias: str | None, alias_of: Callable[[Any], str | None]):
        self._media, self._source = media, source
        videos, film = media.videos, source.film
        self._head = media.head(source, alias)
        cut = self._cut = videos.cut(self._head, source.options, is_file=film.digest is not None, name=source.name)
        self.aliases = [alias_of(name) for name in film.names(cut.chunks)]
        self.grid = media.check_patches(cut.grid, "max_pixels in the options of the video", source.name)
        tokens = media.processor.num_tokens(cut.grid)
        self.inset = media.renderer.expander.video_inset(videos.text(cut), tokens, videos.family.markers)
        self.settings = tuple(videos.settings(cut.grid).items())

    @property
    def decoding_bytes(self) -> int:
        frames = self._media.processor.temporal_patch_size + 1  # and one that is being decoded
        return self._head.height * self._head.width * _PIXEL_BYTES * frames

    @property
    def patch_bytes(self) -> int:
        slots = self._media.processor.temporal_patch_size
        return len(self.aliases) * slots * math.prod(self.grid) * 3 * self._media.processor.patch_size**2

    def moments(self, video: int) -> tuple[Moment | None, ...]:
        times = self._media.videos.times(self._cut)
        return tuple(Moment(video, chunk, time) for chunk, time in enumerate(times))

    def decode(self) -> Iterator[tuple[Rgb, ...]]:
        height, width = self._head.height, self._head.width
        frames = self._source.film.decode([i for chunk in self._cut.chunks for i in chunk], self._media.max_pixels)
        for chunk in self._cut.chunks:
            own = tuple(next(frames) for _ in chunk)
            for frame in own:
                if frame.shape != (height, width, 3):
                    raise ValueError(
                        f"{self._source.name} must have frames of {height}x{width} pixels, as its head says, "
                        f"got {frame.shape[0]}x{frame.shape[1]}"
                    )
            yield own

    def fit(self, frames: tuple[Rgb, ...]) -> Grid:
        return self.grid

    def cut(self, frames: tuple[Rgb, ...]) -> Patches:
        return Patches(self._media.videos.patches(frames, self.grid), self.grid)


DECODING_BYTES = 512 * 2**20  # of pictures that are being decoded, whoever asked for them
_KEYS = 65536  # of images; half a kilobyte apiece


class Recognizer:
    """What tasks share.

    Args:
      store: knows pictures.
      items: of libraries.
      media: looks at heads.
      fingerprint: of the weights; asked for when there is an image.
      codec: of K, V, as keys name it.
    """

    def __init__(self, store: Store, items: Items, media: Media, *, fingerprint: Callable[[], str], codec: str):
        self.store, self.items, self.media, self.fingerprint = store, items, media, fingerprint
        self.decoding = Budget(DECODING_BYTES)
        self._codec = codec
        self._unsalted_key = functools.lru_cache(_KEYS)(self._make_entry_key)

    def known(self, alias: str, limits: Mapping[str, int], salt: Salt, name: str) -> KnownImage | None:
        """What follows from an alias; None: it stands for no picture.

        Args:
          alias: key of a file or a trusted uuid, under the salt.
          limits: of the pixels.
          name: what error messages call the image.

        Raises:
          ValueError: the image is too large with these limits.
        """
        if (picture := self.store.pictures.get(alias)) is None:
            return None
        place = alias, *sorted(limits.items())
        found: KnownImage | None = self.store.described.get(place)
        # The alias may stand for another picture by now, as a uuid that was released may.
        if found is None or found.picture is not picture:
            shape = self.media.shape(picture.height, picture.width, limits, name)
            found = KnownImage(picture, shape, self.entry_key(picture, shape.settings, salt))
            self.store.described.put(place, found)
        return found

    def entry_key(self, picture: PictureKey, settings: Settings, salt: Salt) -> str:
        """Key of what is kept for a picture."""
        named = picture.content, settings
        # A salt is kept nowhere.
        return self._unsalted_key(*named) if salt is None else self._make_entry_key(*named, salt)

    def _make_entry_key(self, content: str, settings: Settings, salt: Salt = None) -> str:
        return entry_key(content, settings=dict(settings), fingerprint=self.fingerprint(), codec=self._codec, salt=salt)


class Task:
    """Finds out which images a source shows: one, or of a video its chunks.

    Attributes:
      source_id: equal for sources that are the same for sure.
      is_known: whether its head has told which images they are.
      medium: what its head told.
      use: lets the item of a library stay that it shows, until requests have it; None: it shows none.
      picture: the one that its uuid stands for.
      pictures, images: the result.
      shared: of each image, equal for those that may be one. What is known by a name alone may have no pixels at all.
      lookup, decode, preprocess: seconds.
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
        self.pictures: list[PictureKey] = []
        self.images: list[ImageRef] = []
        self.shared: list[tuple[str, bool]] = []
        self.is_known = self._is_identified = False
        self._running = threading.Lock()  # two windows may ask at once
        self._decoding = threading.Lock()  # and all images of a video

    @property
    def picture(self) -> PictureKey:
        first = self.pictures[0]
        if len(self.pictures) == 1:
            return first
        return PictureKey(group_key([picture.content for picture in self.pictures]), first.height, first.width)

    def head(self) -> ValueError | None:
        """What is known without pixels; returns what is wrong with it."""
        start = time.perf_counter()
        store = self._recognizer.store
        try:
            if isinstance(self.source, NamedImage):
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
            known = [None if alias is None else store.pictures.get(alias) for alias in self.medium.aliases]
            if all(known):
                for picture in known:
                    assert picture is not None
                    self._become(picture, self.medium.grid)
                self.is_known = True
        except ValueError as error:
            return error
        finally:
            self.lookup = time.perf_counter() - start
        return None

    def _become_known(self) -> bool:
        """Whether it is an image that is known by its alias; then its file is not opened."""
        recognizer, source = self._recognizer, self.source
        if self._alias is None or not isinstance(source, ImageSource):
            return False
        if (known := recognizer.known(self._alias, self._limits, self._salt, source.name)) is None:
            return False
        self.medium = PictureMedium(recognizer.media, source, self._limits, self._alias, known.shape)
        self._add(known.picture, known.shape.grid, known.shape.tokens, known.key)
        self.is_known = True
        return True

    def _become_item(self, source: NamedImage) -> None:
        """It is what a library says now, whatever the library says later."""
        items = self._recognizer.items
        item, self.use = items.find(*source.named, self._salt, called=source.name)
        self._item = item
        self.source = KeptImage(
            name=source.name, item=item, read=lambda: items.read(item, called=source.name),
            lose=lambda: items.lose(item, called=source.name),
        )  # fmt: skip
        media, picture = self._recognizer.media, item.picture
        shape = media.shape(picture.height, picture.width, item.limits, source.name)
        self.medium = PictureMedium(media, self.source, item.limits, None, shape)
        self._become(picture, shape.grid)
        self.is_known = True

    def run(self) -> ValueError | None:
        """Identifies the images, and has their patches ready if they will be needed as far as one can tell now."""
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
        """Whether `run` has nothing to do."""
        return (self._is_identified or self.is_known) and all(map(self._is_kept, self.images))

    def error_of(self, source: Source, error: ValueError) -> ValueError:
        """An error of this source, in the words of one of the requests that show it."""
        return ValueError(str(error).replace(self.source.name, source.name))

    def wrong_uuid(self) -> ValueError:
        return ValueError(
            f"uuid of {self.source.name} must stay with one picture, but {short(self.uuid)} came with another one "
            "before; cache.release_uuid sets it free"
        )

    def aliases(self) -> Iterator[tuple[str, PictureKey]]:
        """What the pictures are found by without decoding them."""
        for alias, picture in zip(self.medium.aliases, self.pictures, strict=True):
            if alias is not None:
                yield alias, picture

    def _alias_of(self, name: bytes | str | tuple[str | int, ...] | None) -> str | None:
        return alias_key(name, self._salt) if self._lookup and name is not None else None

    def _identify(self) -> None:
        self.pictures, self.images, self.shared = [], [], []
        for frames in self._decoded():
            image = self._become(_picture(frames), self.medium.fit(frames))
            if self._lookup:
                self._recognizer.store.look(image.keys)
            if not self._is_kept(image):
                image.patches = self._cut(frames)

    def _become(self, picture: PictureKey, grid: tuple[int, int, int]) -> ImageRef:
        """The next image is known."""
        key = self._recognizer.entry_key(picture, self.medium.settings, self._salt)
        return self._add(picture, grid, self._recognizer.media.processor.num_tokens(grid), key)

    def _add(self, picture: PictureKey, grid: Grid, tokens: int, key: str) -> ImageRef:
        """The next image is known, and so is its entry key."""
        recognizer, settings, number = self._recognizer, self.medium.settings, len(self.images)
        shared, whose = None, SHARED
        if self._item is not None:
            shared, whose = recognizer.entry_key(picture, settings, self._item.salt), self._item.salt
        elif not self._apart:
            shared = recognizer.store.shared.get(recognizer.entry_key(picture, settings, None))
        has_pixels = self._item is None or self._item.file is not None
        image = ImageRef(
            key, grid, tokens, lambda: self._patches(number), shared=shared, has_pixels=has_pixels,
            shared_owner=None if shared is None else owner_key(whose),
        )  # fmt: skip
        self.pictures.append(picture)
        self.images.append(image)
        self.shared.append((key, self._trusted is not None or not has_pixels))
        return image

    def _is_kept(self, image: ImageRef) -> bool:
        """Whether the pixels will not be needed, as far as one can tell now."""
        return self._lookup and any(map(self._recognizer.store.knows, image.keys))

    def _decoded(self) -> Iterator[tuple[Rgb, ...]]:
        """The frames of each image."""
        with self._recognizer.decoding.take(self.medium.decoding_bytes):
            decoding = self.medium.decode()
            while True:
                start = time.perf_counter()
                try:
                    frames = next(decoding)
                except StopIteration:
                    return
                except ValueError as error:
                    # Memory or file handles that run out say nothing of the picture; other bytes need no second try.
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
        """Of one image. As the source is decoded for it, so are those of all others that will be needed."""
        with self._decoding:
            found: Patches | None = self.images[number].__dict__.get("patches")
            if found is not None:
                return found
            for i, (image, frames) in enumerate(zip(self.images, self._decoded(), strict=True)):
                if self._trusted is not None and _picture(frames) != self.pictures[i]:
                    raise self.wrong_uuid()  # kept under the other picture's key, it would mislead everyone
                if i == number:
                    found = self._cut(frames)
                elif not image.is_loaded and not self._is_kept(image):
                    image.patches = self._cut(frames)
        assert found is not None
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class KeptImage(ImageSource):
    """An image of a library.

    Attributes:
      item: the library's.
      read: gives the encoded file, or raises a ValueError.
      lose: called if that file shows another picture; returns what is to be raised.
    """

    value: bytes | Image.Image | Rgb = field(default=b"", repr=False)
    item: Item
    read: Callable[[], bytes]
    lose: Callable[[], ValueError]

    def size(self, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
        return self.item.picture.height, self.item.picture.width

    def decode(self, max_pixels: int = MAX_IMAGE_PIXELS) -> Rgb:
        rgb = ImageSource(self.name, self.read()).decode(max_pixels)
        if _picture((rgb,)) != self.item.picture:  # kept under the item's key, it would mislead all that name it
            raise self.lose()
        return rgb


class Budget:
    """Lets work begin in its order, as long as all that is under way stays within a number of bytes.

    Alone, a piece of work may be larger.
    """

    def __init__(self, most: int):
        self._most = most
        self._used = 0
        self._waiting: list[object] = []
        self._changed = threading.Condition()

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                self._changed.wait_for(
                    lambda: self._waiting[0] is me and (not self._used or self._used + amount <= self._most)
                )
                self._used += amount
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()


class _Same:
    """Equal for encoded files of the same bytes, told apart by few of them where they differ."""

    def __init__(self, encoded: bytes):
        self._encoded, middle = encoded, len(encoded) // 2
        self._hash = hash((len(encoded), encoded[:64], encoded[middle : middle + 64], encoded[-64:]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._encoded == other._encoded


def _same(source: Source) -> Hashable:
    """Equal for sources that are the same for sure."""
    if not isinstance(source, ImageSource):
        return source.film.same, source.options
    if isinstance(source, NamedImage):
        return source.named
    encoded = source.encoded
    return id(source.value) if encoded is None else _Same(encoded)


def _picture(frames: tuple[Rgb, ...]) -> PictureKey:
    return PictureKey(content_key(*frames), *frames[0].shape[:2])
