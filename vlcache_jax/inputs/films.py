"""Where the frames of a video come from: pictures one by one, or a file that FFmpeg reads."""

from __future__ import annotations

import importlib
import io
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from PIL import Image

from vlcache_jax.inputs.images import MAX_IMAGE_PIXELS, ImageSource, check_picture_size

# Demuxers of FFmpeg: none that opens other files or URLs, as playlists do.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif"
MAX_FRAMES = 1 << 20
UNKNOWN_FPS = 2
"""Frames a second where frames come without their rate, as in Qwen's own utility and in the library at the release of
Qwen2.5-VL. (The library of today takes 24, so that all frames are seen at nearly the same time.)"""
_FILM_FPS = 24.0  # of a file that does not say it, as in the library


class Head(NamedTuple):
    """What is known of a video without its pixels.

    Attributes:
        frames: how many it has.
        height, width: of each.
        fps: frames a second of the film; None: nobody knows, and the frames are taken for `UNKNOWN_FPS` a second.
        numbers: of each frame in the film that they are from; None: they are all of it.
        total: frames of that film, or of the part of it that they are sampled from.
    """

    frames: int
    height: int
    width: int
    fps: float | None
    numbers: tuple[int, ...] | None
    total: float


class Film(Protocol):
    """Frames that are not decoded yet."""

    @property
    def digest(self) -> str | None:
        """Of the encoded file; None: there is none."""

    @property
    def same(self) -> Hashable:
        """Equal for films that are the same for sure."""

    def head(self, max_pixels: int = MAX_IMAGE_PIXELS) -> Head:
        """What is known without pixels.

        Raises:
            ValueError: no video, frames of different sizes, larger than `max_pixels`, or more than 200 times as long as
                wide; or PyAV is missing, which files need.
        """

    def decode(self, indices: Sequence[int], max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[npt.NDArray[np.uint8]]:
        """The frames of ascending `indices`, RGB, uint8 [H, W, 3] each.

        Raises:
            ValueError: they are corrupt or missing.
        """

    def names(self, indices: Sequence[Sequence[int]]) -> list[tuple[str | int, ...] | None]:
        """What tells each group of frames for sure without decoding them; None: nothing does."""


@dataclass(frozen=True, eq=False)
class Frames:
    """Pictures one by one; `fps`, `numbers` and `total` as in `Head`."""

    name: str
    pictures: tuple[ImageSource, ...]
    same: Hashable
    fps: float | None
    numbers: tuple[int, ...] | None
    total: float

    @property
    def digest(self) -> str | None:
        return None

    def head(self, max_pixels: int = MAX_IMAGE_PIXELS) -> Head:
        height, width = self.pictures[0].size(max_pixels)
        for picture in self.pictures:
            if (size := picture.size(max_pixels)) != (height, width):
                raise ValueError(
                    f"{picture.name} must be {height}x{width} like the frames before it, got {size[0]}x{size[1]}"
                )
        return Head(len(self.pictures), height, width, self.fps, self.numbers, self.total)

    def decode(self, indices: Sequence[int], max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[npt.NDArray[np.uint8]]:
        for i in indices:
            yield self.pictures[i].decode(max_pixels)

    def names(self, indices: Sequence[Sequence[int]]) -> list[tuple[str | int, ...] | None]:
        chosen = [[self._digests[i] for i in group] for group in indices]
        return [tuple(group) if all(group) else None for group in chosen]

    @cached_property
    def _digests(self) -> list[str]:
        """Of encoded pictures; of others an empty one."""
        encoded = (picture.encoded for picture in self.pictures)
        return ["" if one is None else blake3(one).hexdigest() for one in encoded]


@dataclass(frozen=True, eq=False)
class FilmFile:
    """An encoded file, which PyAV decodes."""

    name: str
    encoded: bytes = field(repr=False)

    @cached_property
    def digest(self) -> str:
        return blake3(self.encoded).hexdigest()

    @property
    def same(self) -> Hashable:
        return self.digest

    def head(self, max_pixels: int = MAX_IMAGE_PIXELS) -> Head:
        with self._opened() as (container, stream):
            # Some containers do not say it.
            count = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
            rate = stream.average_rate or stream.guessed_rate
            height, width = stream.codec_context.height, stream.codec_context.width
        if not 1 <= count <= MAX_FRAMES:
            raise ValueError(f"{self.name} must have 1 to {MAX_FRAMES} frames, got {count}")
        check_picture_size(height, width, self.name, max_pixels)
        return Head(count, height, width, float(rate or _FILM_FPS), None, count)

    def decode(self, indices: Sequence[int], max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[npt.NDArray[np.uint8]]:
        left = list(reversed(indices))
        with self._opened() as (container, stream):
            stream.thread_type = "AUTO"
            # FFmpeg counts whole blocks; what it lets pass is measured here.
            stream.codec_context.options = {"max_pixels": str(4 * max_pixels)}
            for number, frame in enumerate(container.decode(stream)):
                check_picture_size(frame.height, frame.width, self.name, max_pixels)
                while left and left[-1] == number:
                    left.pop()
                    yield frame.to_ndarray(format="rgb24")
                if not left:
                    return
        raise ValueError(f"{self.name} must have as many frames as its head says, got none with the number {left[-1]}")

    def names(self, indices: Sequence[Sequence[int]]) -> list[tuple[str | int, ...] | None]:
        return [(self.digest, *group) for group in indices]

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """FFmpeg's container, and the first video in it."""
        try:
            import av
        except ImportError as error:
            raise ValueError(
                f"{self.name} must be given as frames where PyAV is missing, which decodes files: "
                'install "vlcache-jax[video]", or av'
            ) from error
        try:
            options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": ""}
            try:
                container = av.open(io.BytesIO(self.encoded), options=options)
            except av.error.ArgumentError as error:
                raise ValueError(f"its format is none of {_CONTAINERS.replace(',', ', ')}") from error
            with container:
                if not container.streams.video:
                    raise ValueError("no video in it")
                yield container, container.streams.video[0]
        except Exception as error:  # decoders raise nearly anything on broken files
            if str(error).startswith(self.name):
                raise
            reason = error.strerror if isinstance(error, av.error.FFmpegError) else error
            raise ValueError(
                f"{self.name} must be a video that FFmpeg can read, got {len(self.encoded)} bytes: {reason}"
            ) from error


def import_decoders() -> None:
    """Imports what decodes pictures and videos; the first of each would wait for it."""
    Image.preinit()
    importlib.import_module("PIL.WebPImagePlugin")  # without it, Pillow imports every plugin it has for a WebP
    with suppress(ImportError):  # videos as files are optional
        importlib.import_module("av")
