"""Images and videos before decoding: their replacement in a prompt, found by the file header, and how to get pixels.

A still image is one image, a video one image per chunk. The rest of the package treats both alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import Bounded
from vlcache_jax.inputs.expansion import Inset
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.inputs.layout import Moment
from vlcache_jax.inputs.processor import Grid, ImageProcessor, Patches
from vlcache_jax.inputs.prompt import PromptRenderer, Source
from vlcache_jax.inputs.video_processor import VideoProcessor
from vlcache_jax.inputs.videos import VideoHeader, VideoSource

Rgb = npt.NDArray[np.uint8]
Settings = tuple[tuple[str, Any], ...]

_PIXEL_BYTES = 7  # Pillow's image and an RGB array
_HEADS = 4096  # cached headers of videos, a hundred bytes each


class Medium(Protocol):
    """Image or video, as far as its header shows.

    Attributes:
      aliases: key under which each image is found without decoding, or None.
      grid: patch grid of each image, as far as the header shows.
      inset: replacement of its placeholder.
      settings: settings that determine the model's pixels; part of entry keys.
    """

    aliases: list[str | None]
    grid: Grid
    inset: Inset
    settings: Settings

    @property
    def decoding_bytes(self) -> int:
        """Bytes of memory needed to decode it."""

    @property
    def patch_bytes(self) -> int:
        """Bytes of the patches of all its images."""

    def moments(self, video: int) -> tuple[Moment | None, ...]:
        """Return the position of each image in the request's video with index `video`, or None for an image."""

    def decode(self) -> Iterator[tuple[Rgb, ...]]:
        """Yield the frames of each image, in order.

        Raises:
          ValueError: they cannot be decoded.
        """

    def fit(self, frames: tuple[Rgb, ...]) -> Grid:
        """Return the patch grid of a decoded image."""

    def cut(self, frames: tuple[Rgb, ...]) -> Patches:
        """Return the patches of a decoded image."""


@dataclass(frozen=True, eq=False)
class ImageShape:
    """Properties of an image that its size and its pixel limits determine.

    Attributes:
      grid, inset, settings, patch_bytes: see `Medium`.
      tokens: number of image tokens in a prompt.
    """

    grid: Grid
    inset: Inset
    settings: Settings
    patch_bytes: int
    tokens: int


class Media:
    """Reader of the headers of images and videos.

    Args:
      processor, videos, renderer: parts of the checkpoint.
      max_patches: maximum number of patches of an image.
      max_pixels: maximum number of pixels of an image or a frame, before scaling.
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
        """Return what the header of a source shows.

        Args:
          source: an image or a video.
          limits: pixel limits (`Prompt.limits_of`).
          alias: key of its file, or None.
          alias_of: function from an identity of frames, without decoding, to their key.

        Raises:
          ValueError: the source is not an image or a video, is too large, or contradicts the options.
        """
        if isinstance(source, VideoSource):
            return _Video(self, source, alias, alias_of)
        shape = self.shape(*source.size(self.max_pixels), limits, source.name)
        return ImageMedium(self, source, limits, alias, shape)

    def shape(self, height: int, width: int, limits: Mapping[str, int], name: str) -> ImageShape:
        """Return the properties that an image's size and limits determine.

        Raises:
          ValueError: the image has too many patches.
        """
        grid = self.grid(height, width, limits, name)
        tokens, patch_bytes = self.processor.num_tokens(grid), math.prod(grid) * 3 * self.processor.patch_size**2
        return ImageShape(grid, self.renderer.expander.image_inset(tokens), self.settings(limits), patch_bytes, tokens)

    def head(self, source: VideoSource, key: str | None) -> VideoHeader:
        """Return the header of a video. A file with a cached header is not opened."""
        head = None if key is None else self._heads.get(key)
        if head is None:
            head = source.film.head(self.max_pixels)
            if key is not None:
                self._heads.put(key, head)
        return head

    def settings(self, limits: Mapping[str, int]) -> Settings:
        """Return the settings that determine the pixels of images with these limits."""
        return self._settings(tuple(sorted(limits.items())))

    def grid(self, height: int, width: int, limits: Mapping[str, int], name: str) -> Grid:
        """Return the patch grid of an image.

        Raises:
          ValueError: it has more patches than the engine accepts.
        """
        grid = self.processor.grid(height, width, limits, name=name)
        options = "its max_pixels (or min_pixels), or those of mm_processor_kwargs"
        options = "resized_height or resized_width" if "resized_height" in limits else options
        return self.check_patches(grid, options, name)

    def check_patches(self, grid: Grid, options: str, name: str) -> Grid:
        """Return the grid.

        Args:
          grid: patch grid of an image.
          options: names of the options that set its size, for the error.
          name: name of the image in the error.

        Raises:
          ValueError: it has more patches than the engine accepts.
        """
        if (patches := math.prod(grid)) > self._max_patches:
            raise ValueError(
                f"{name} must have at most {self._max_patches} patches, got {patches}: lower {options}, "
                "or open the engine with a larger max_model_len or buckets.patches"
            )
        return grid


class ImageMedium:
    """Image. `shape` is that of its header, or of the cached image."""

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
        height, width, _ = frames[0].shape  # EXIF data may have rotated it
        return self._media.grid(height, width, self._limits, self._source.name)

    def cut(self, frames: tuple[Rgb, ...]) -> Patches:
        return self._media.processor.patches(frames[0], self._limits)


class _Video:
    """Video, or a part of it."""

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
        frames = self._media.processor.temporal_patch_size + 1  # one more is being decoded
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
                        f"{self._source.name} must have frames of {height}x{width} pixels, as its header says, "
                        f"got {frame.shape[0]}x{frame.shape[1]}"
                    )
            yield own

    def fit(self, frames: tuple[Rgb, ...]) -> Grid:
        return self.grid

    def cut(self, frames: tuple[Rgb, ...]) -> Patches:
        return Patches(self._media.videos.patches(frames, self.grid), self.grid)
