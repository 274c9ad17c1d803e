"""Videos as callers pass them, and where their frames come from: images, or a file that FFmpeg reads."""

from __future__ import annotations

import importlib
import io
import mimetypes
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from PIL import Image

from vlcache_jax.common.checks import short
from vlcache_jax.common.json_files import FLAG, Kind, check_fields, listed, optional, real, whole
from vlcache_jax.common.vllm_compat import warn
from vlcache_jax.inputs.access import LOCAL_ONLY, Access
from vlcache_jax.inputs.images import (
    MAX_IMAGE_PIXELS,
    ImageSource,
    check_picture_size,
    describe,
    read_encoded,
    read_image,
)
from vlcache_jax.inputs.processor import AREA

# Demuxers of FFmpeg: none that opens other files or URLs, as playlists do.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif"
MAX_FRAMES = 1 << 20
UNKNOWN_FPS = 2
"""Frames a second where frames come without their rate, as in Qwen's own utility and in the library at the release of
Qwen2.5-VL. (The library of today takes 24, so that all frames are seen at nearly the same time.)"""
_FILM_FPS = 24.0  # of a file that does not say it, as in the library


class VideoHeader(NamedTuple):
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

    def head(self, max_pixels: int = MAX_IMAGE_PIXELS) -> VideoHeader:
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
    """Pictures one by one; `fps`, `numbers` and `total` as in `VideoHeader`."""

    name: str
    pictures: tuple[ImageSource, ...]
    same: Hashable
    fps: float | None
    numbers: tuple[int, ...] | None
    total: float

    @property
    def digest(self) -> str | None:
        return None

    def head(self, max_pixels: int = MAX_IMAGE_PIXELS) -> VideoHeader:
        height, width = self.pictures[0].size(max_pixels)
        for picture in self.pictures:
            if (size := picture.size(max_pixels)) != (height, width):
                raise ValueError(
                    f"{picture.name} must be {height}x{width} like the frames before it, got {size[0]}x{size[1]}"
                )
        return VideoHeader(len(self.pictures), height, width, self.fps, self.numbers, self.total)

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

    def head(self, max_pixels: int = MAX_IMAGE_PIXELS) -> VideoHeader:
        with self._opened() as (container, stream):
            # Some containers do not say it.
            count = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
            rate = stream.average_rate or stream.guessed_rate
            height, width = stream.codec_context.height, stream.codec_context.width
        if not 1 <= count <= MAX_FRAMES:
            raise ValueError(f"{self.name} must have 1 to {MAX_FRAMES} frames, got {count}")
        check_picture_size(height, width, self.name, max_pixels)
        return VideoHeader(count, height, width, float(rate or _FILM_FPS), None, count)

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


_ARRAY = "an array [T, H, W, 3] or [T, 3, H, W] of whole numbers from 0 to 255"
_SENT = "data:video/jpeg;base64,"  # begins a URL of JPEG frames, in vLLM's form
_MOST_SENT = 1 << 16  # frames of such a URL
_FILES = "a path, bytes, a data:, file: or http(s) URL"
_ACCEPTED = f"a list of frames, {_ARRAY}, frames as one URL {_SENT}A,B,C, or a file: {_FILES}"
_COUNT = whole(1, MAX_FRAMES)
_SIDE = whole(1, 1 << 20)
_RATE = real(1e-6, 1e6)
_SECONDS = real(0, 1e9)
SAMPLING: dict[str, Kind] = {
    "fps": _RATE,
    "num_frames": _COUNT,
    "min_frames": _COUNT,
    "max_frames": _COUNT,
    "do_sample_frames": FLAG,
}
"""What may be said of all videos of a request, and what it may be."""
OPTIONS: dict[str, Kind] = SAMPLING | {
    "sample_fps": _RATE,
    "video_start": _SECONDS,
    "video_end": _SECONDS,
    "min_pixels": AREA,
    "max_pixels": AREA,
    "total_pixels": AREA,
    "resized_height": _SIDE,
    "resized_width": _SIDE,
}
"""What a message may say of its video, and what it may be."""
ALIASES = {"nframes": "num_frames"}
"""Other names, of Qwen's utility."""

_METADATA: dict[str, Kind] = {
    "fps": optional(_RATE),
    "frames_indices": optional(listed(whole(0, 1 << 40), MAX_FRAMES)),
    "total_num_frames": optional(real(1, 1 << 40)),  # Qwen's utility computes it from rates
    "do_sample_frames": optional(FLAG),
}
_UNUSED = ("duration", "video_backend", "width", "height")  # that the metadata of others hold, too


@dataclass(frozen=True)
class VideoOptions:
    """What is asked of a video, in the words of the library's video processors and of Qwen's utility; None: what the
    checkpoint says.

    Attributes:
        fps: frames a second to be sampled; of frames whose rate nothing else says, how many a second they are.
        num_frames: frames to be sampled, in place of `fps`.
        min_frames, max_frames: that `fps` may come to.
        do_sample_frames: whether frames are sampled at all. If left out, frames of a file are where the checkpoint
            says so, others are not, and any are where `fps` or `num_frames` is given.
        sample_fps: frames a second of frames.
        video_start, video_end: seconds of a file between which it is seen.
        min_pixels, max_pixels: the area to which each frame is scaled.
        total_pixels: the area of all frames together, each two that are seen together counted once.
        resized_height, resized_width: to which frames are scaled instead, rounded to whole tokens.
    """

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    do_sample_frames: bool | None = None
    sample_fps: float | None = None
    video_start: float | None = None
    video_end: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None

    @classmethod
    def checked(cls, given: Mapping[str, Any], name: str) -> VideoOptions:
        """Of a dict.

        Raises:
            ValueError: a value of another type or out of bounds, a minimum above its maximum, both `fps` and
                `num_frames`, or one side without the other.
        """
        try:
            check_fields(given, {key: optional(kind) for key, kind in OPTIONS.items()})
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        own = cls(**given)
        if own.fps is not None and own.num_frames is not None:
            raise ValueError(f"{name} must hold fps or num_frames, got both")
        for what in ("frames", "pixels"):
            least, most = getattr(own, f"min_{what}"), getattr(own, f"max_{what}")
            check_order(least, most, what, f"{name} ")
        if (own.resized_height is None) != (own.resized_width is None):
            raise ValueError(f"{name} must hold resized_height and resized_width, got one of them")
        if own.video_start is not None and own.video_end is not None and own.video_start > own.video_end:
            raise ValueError(f"{name} video_start must be at most video_end {own.video_end}, got {own.video_start}")
        return own

    def over(self, defaults: VideoOptions) -> VideoOptions:
        """These, and the defaults for what they leave open."""
        own = {key: value for key, value in vars(self).items() if value is not None}
        if "num_frames" in own or "fps" in own:  # one stands in place of the other
            defaults = replace(defaults, num_frames=None, fps=None)
        return replace(defaults, **own)


NO_OPTIONS = VideoOptions()


def check_order(least: float | None, most: float | None, what: str, prefix: str = "") -> None:
    """Raises a ValueError if a minimum of `what` is above its maximum."""
    if least is not None and most is not None and least > most:
        raise ValueError(f"{prefix}min_{what} must be at most max_{what} {most}, got {least}")


@dataclass(frozen=True, eq=False)
class VideoSource:
    """A video as the caller gave it, not decoded yet.

    Attributes:
        name: what error messages call it, such as "conversations[2] videos[1]".
        film: its frames.
        options: what is asked of it.
    """

    name: str
    film: Film = field(repr=False)
    options: VideoOptions = NO_OPTIONS

    @property
    def mark(self) -> tuple[str, ...] | None:
        """What tells its file for sure without decoding it; None: it has none."""
        return None if self.film.digest is None else ("film", self.film.digest)


def is_video(path: str) -> bool:
    """Whether a file is a video, by its name."""
    kind, _ = mimetypes.guess_type(path)
    return kind is not None and kind.startswith("video/")


def read_video(
    value: Any,
    options: VideoOptions = NO_OPTIONS,
    metadata: Mapping[str, Any] | None = None,
    *,
    access: Access = LOCAL_ONLY,
    name: str = "video",
) -> VideoSource:
    """Takes hold of a video: reads or fetches files, decodes nothing.

    Args:
        value: a list of frames, each as `read_image` takes an image; an array or tensor [T, H, W, 3] or [T, 3, H, W] of
            any type that holds whole numbers from 0 to 255; JPEG frames as one URL, `data:video/jpeg;base64,A,B,C`,
            which is the list of these; or a file: a path, bytes, a data:, file:// or http(s) URL.
        options: what is asked of it.
        metadata: of frames, in the library's words: `fps` of the film that they are from, `frames_indices` of each in
            it, its `total_num_frames` (or those of the part of it that the frames were sampled from), and
            `do_sample_frames` as in `options`. Frames whose rate nothing says are taken for 2 a second, with a warning.
        access: what may be read from where.
        name: what error messages call the video.

    Raises:
        ValueError: another type, shape or values, no frames, metadata that do not suit the frames, or what `read_image`
            refuses.
    """
    value = _sent_frames(value, name)
    if hasattr(value, "__array__") and not isinstance(value, str | bytes):  # numpy's own of these have it
        value = _pixels(value, name)
        # The frames keep this memory, not the object that was passed.
        same: Any = (value.__array_interface__["data"], value.shape, value.strides)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        _check_count(len(value), name)
        same = None
    else:
        if isinstance(value, Image.Image):
            raise ValueError(f"{name} must be {_ACCEPTED}, got {describe(value)}")
        encoded = read_encoded(value, _ACCEPTED, access=access, name=name)
        if metadata is not None:
            raise ValueError(f"{name} must have no video_metadata, as a file has its own, got {short(metadata)}")
        if options.sample_fps is not None:
            raise ValueError(f"{name} must have no sample_fps, as a file has its own rate: write fps to sample it")
        return VideoSource(name, FilmFile(name, encoded), options)
    pictures = tuple(read_image(one, access=access, name=f"{name} frames[{i}]") for i, one in enumerate(value))
    if same is None:
        same = tuple(id(one.value) if one.encoded is None else one.encoded for one in pictures)
    if options.video_start is not None or options.video_end is not None:
        raise ValueError(f"{name} must be a file where video_start or video_end is given: leave out frames instead")
    said = _metadata(metadata, len(pictures), name)
    fps, options = _rate(said, options, name)
    numbers, total = said.get("frames_indices"), said.get("total_num_frames") or len(pictures)
    film = Frames(name, pictures, (same, fps, numbers, total), fps, numbers, total)
    return VideoSource(name, film, options.over(VideoOptions(do_sample_frames=said.get("do_sample_frames"))))


def _sent_frames(value: Any, name: str) -> Any:
    """The frames of a URL that a client sampled, as data URLs; any other value as it is."""
    if not isinstance(value, str) or value[: len(_SENT)].lower() != _SENT:
        return value
    count = value.count(",")  # counted before anything is copied or decoded
    if count > _MOST_SENT:
        raise ValueError(f"{name} must have 1 to {_MOST_SENT} frames in one URL, got {count}: send a file instead")
    return [f"data:image/jpeg;base64,{frame}" for frame in value[len(_SENT) :].split(",")]


def _pixels(value: Any, name: str) -> npt.NDArray[np.uint8]:
    """Of an array or tensor, uint8 [T, H, W, 3]; not copied where it holds bytes."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch says how to make one that can be read
        raise ValueError(f"{name} must be {_ARRAY}, got a {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "uif" or array.ndim != 4 or 3 not in (array.shape[1], array.shape[3]):
        raise ValueError(f"{name} must be {_ARRAY}, got {array.dtype} {array.shape}")
    if array.shape[3] != 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype == np.uint8:
        return array
    pixels = np.empty(array.shape, np.uint8)
    for i, frame in enumerate(array):  # one by one, as all of them may be gigabytes
        with np.errstate(invalid="ignore"):
            pixels[i] = frame
        if not np.array_equal(pixels[i], frame):
            raise ValueError(
                f"{name} must be {_ARRAY}, got {array.dtype} from {frame.min():g} to {frame.max():g} in frame {i}: "
                "scale or round them"
            )
    return pixels


def _rate(said: Mapping[str, Any], options: VideoOptions, name: str) -> tuple[float | None, VideoOptions]:
    """Frames a second of frames, and the options that are left.

    Warns where nobody says it.
    """
    rates = said.get("fps"), options.sample_fps, options.fps
    fps = next((rate for rate in rates if rate is not None), None)
    if fps is None:
        warn(f"{name} should have fps beside it: the frames are taken for {UNKNOWN_FPS} a second")
    is_asked = rates[:2] != (None, None)  # else `fps` has said the rate
    return fps, replace(options, sample_fps=None, fps=options.fps if is_asked else None)


def _metadata(given: Any, count: int, name: str) -> dict[str, Any]:
    """What is said of `count` frames, checked."""
    _check_count(count, name)
    name = f"{name} video_metadata"
    if not isinstance(given, Mapping | None):
        raise ValueError(f"{name} must be a dict such as {{'fps': 30}}, got {short(given)}")
    said = {key: plain(one) for key, one in (given or {}).items()}
    for key in said:
        if key not in (*_METADATA, *_UNUSED):
            raise ValueError(f"{name} must hold only {', '.join((*_METADATA, *_UNUSED))}, got {short(key)}")
    try:
        check_fields(said, _METADATA)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    numbers, total = said.get("frames_indices"), said.get("total_num_frames") or count
    if numbers is None and total != count:
        raise ValueError(f"{name} must hold frames_indices where the {count} frames are of {total}")
    if numbers is not None:
        # Of a part of a film, Qwen's utility says how many frames the part has, and numbers them in the whole.
        if len(numbers) != count or numbers != sorted(numbers) or numbers[-1] - numbers[0] >= total:
            raise ValueError(
                f"{name} frames_indices must be {count} ascending numbers within total_num_frames = {total}, "
                f"got {short(numbers)}"
            )
        said["frames_indices"] = tuple(numbers)
    return said


def _check_count(count: int, name: str) -> None:
    if not 1 <= count <= MAX_FRAMES:
        raise ValueError(f"{name} must have 1 to {MAX_FRAMES} frames, got {count}")


def plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's, and other sequences of numbers as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple | range) else value
