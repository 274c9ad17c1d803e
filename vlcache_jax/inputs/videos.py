"""Videos on the host: reading frames from images or from a file that FFmpeg decodes."""

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

from vlcache_jax.common.checks import short, unknown
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

# FFmpeg demuxers that open no other files or URLs, unlike those of playlists.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif"
MAX_FRAMES = 1 << 20
UNKNOWN_FPS = 2
"""Assumed frames per second of frames without a rate, as in Qwen's utility and in the library at the release of
Qwen2.5-VL. Today's library assumes 24, so that all frames seem to be shown at nearly the same time."""
_FILM_FPS = 24.0  # assumed rate of a file without one, as in the library


class VideoHeader(NamedTuple):
    """Properties of a video that are known without decoding it.

    Attributes:
        frames: number of frames.
        height, width: size of each frame in pixels.
        fps: frames per second of the original video; None: unknown, `UNKNOWN_FPS` is assumed.
        numbers: index of each frame in the original video; None: these are all frames of it.
        total: number of frames of the original video, or of the part of it that the frames were sampled from.
    """

    frames: int
    height: int
    width: int
    fps: float | None
    numbers: tuple[int, ...] | None
    total: float


class FrameSource(Protocol):
    """Frames of a video that are not decoded yet."""

    @property
    def digest(self) -> str | None:
        """Digest of the encoded file; None if there is no file."""

    @property
    def same(self) -> Hashable:
        """Value that is equal only for identical videos."""

    def head(self, max_pixels: int = MAX_IMAGE_PIXELS) -> VideoHeader:
        """Return what is known without decoding pixels.

        Raises:
            ValueError: there is no video, frames differ in size, exceed `max_pixels` or an aspect ratio of 200; or PyAV
                is missing, which files need.
        """

    def decode(self, indices: Sequence[int], max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the frames with ascending `indices`, each as RGB, uint8 [H, W, 3].

        Raises:
            ValueError: frames are corrupt or missing.
        """

    def names(self, indices: Sequence[Sequence[int]]) -> list[tuple[str | int, ...] | None]:
        """Return an identity of each group of frames that needs no decoding, or None."""


@dataclass(frozen=True, eq=False)
class FrameList:
    """Video given as single images; `fps`, `numbers` and `total` as in `VideoHeader`."""

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
        """Digest of each encoded image; empty for images that are not encoded."""
        encoded = (picture.encoded for picture in self.pictures)
        return ["" if one is None else blake3(one).hexdigest() for one in encoded]


@dataclass(frozen=True, eq=False)
class VideoFile:
    """Video given as an encoded file, which PyAV decodes."""

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
            # Some containers do not have a frame count.
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
            # FFmpeg applies this limit to whole blocks, so the check below applies the exact one.
            stream.codec_context.options = {"max_pixels": str(4 * max_pixels)}
            for number, frame in enumerate(container.decode(stream)):
                check_picture_size(frame.height, frame.width, self.name, max_pixels)
                while left and left[-1] == number:
                    left.pop()
                    yield frame.to_ndarray(format="rgb24")
                if not left:
                    return
        raise ValueError(
            f"{self.name} must have as many frames as its header declares, but frame {left[-1]} is missing"
        )

    def names(self, indices: Sequence[Sequence[int]]) -> list[tuple[str | int, ...] | None]:
        return [(self.digest, *group) for group in indices]

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """Open the file; yield FFmpeg's container and its first video stream."""
        try:
            import av
        except ImportError as error:
            raise ValueError(
                f'{self.name} requires PyAV to decode video files: install "vlcache-jax[video]" or av, or pass frames'
            ) from error
        try:
            options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": ""}
            try:
                container = av.open(io.BytesIO(self.encoded), options=options)
            except av.error.ArgumentError as error:
                raise ValueError(f"its format is none of {_CONTAINERS.replace(',', ', ')}") from error
            with container:
                if not container.streams.video:
                    raise ValueError("it has no video stream")
                yield container, container.streams.video[0]
        except Exception as error:  # decoders raise many types of errors on broken files
            if str(error).startswith(self.name):
                raise
            reason = error.strerror if isinstance(error, av.error.FFmpegError) else error
            raise ValueError(
                f"{self.name} must be a video that FFmpeg can read, got {len(self.encoded)} bytes: {reason}"
            ) from error


def import_decoders() -> None:
    """Import the decoders of images and videos ahead of their first use."""
    Image.preinit()
    importlib.import_module("PIL.WebPImagePlugin")  # otherwise Pillow imports all of its plugins for a WebP
    with suppress(ImportError):  # videos as files are optional
        importlib.import_module("av")


_ARRAY = "an array [T, H, W, 3] or [T, 3, H, W] of whole numbers from 0 to 255"
_SENT = "data:video/jpeg;base64,"  # prefix of JPEG frames in one URL, as in vLLM
_MAX_SENT = 1 << 16  # maximum frames of such a URL
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
"""Options for all videos of a request, and their types."""
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
"""Options of a video's part of a message, and their types."""
ALIASES = {"nframes": "num_frames"}
"""Other names of options, from Qwen's utility."""

_METADATA: dict[str, Kind] = {
    "fps": optional(_RATE),
    "frames_indices": optional(listed(whole(0, 1 << 40), MAX_FRAMES)),
    "total_num_frames": optional(real(1, 1 << 40)),  # Qwen's utility computes it from rates
    "do_sample_frames": optional(FLAG),
}
_UNUSED = ("duration", "video_backend", "width", "height")  # accepted and ignored


@dataclass(frozen=True)
class VideoOptions:
    """Sampling and size options of a video, named as in the library's video processors and Qwen's utility.

    None, the default of all options, uses the checkpoint's value.

    Attributes:
        fps: sampled frames per second; for frames without a known rate, the rate that they have.
        num_frames: number of sampled frames; replaces `fps`.
        min_frames, max_frames: limits of the number of frames that `fps` gives.
        do_sample_frames: sample frames. None: files are sampled if the checkpoint says so, frames are not, and either
            is if `fps` or `num_frames` is set.
        sample_fps: rate of given frames, in frames per second.
        video_start, video_end: part of a file to use, in seconds.
        min_pixels, max_pixels: limits of the area to which each frame is scaled, in pixels.
        total_pixels: maximum area of all frames, in pixels; two frames of a chunk count once.
        resized_height, resized_width: size to which frames are scaled instead, in pixels, rounded to whole tokens.
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
        """Return the options in a dict; `name` is its name in errors.

        Raises:
            ValueError: a value has another type or is out of bounds, a minimum exceeds its maximum, `fps` and
                `num_frames` are both set, or only one of the two sizes is.
        """
        try:
            check_fields(given, {key: optional(kind) for key, kind in OPTIONS.items()})
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        own = cls(**given)
        if own.fps is not None and own.num_frames is not None:
            raise ValueError(f"{name} fps and num_frames are mutually exclusive, got both")
        for what in ("frames", "pixels"):
            minimum, maximum = getattr(own, f"min_{what}"), getattr(own, f"max_{what}")
            check_order(minimum, maximum, what, f"{name} ")
        if (own.resized_height is None) != (own.resized_width is None):
            raise ValueError(f"{name} resized_height and resized_width must be set together, got one of them")
        if own.video_start is not None and own.video_end is not None and own.video_start > own.video_end:
            raise ValueError(f"{name} video_start must be at most video_end {own.video_end}, got {own.video_start}")
        return own

    def over(self, defaults: VideoOptions) -> VideoOptions:
        """Return these options, completed by `defaults`."""
        own = {key: value for key, value in vars(self).items() if value is not None}
        if "num_frames" in own or "fps" in own:  # they replace each other
            defaults = replace(defaults, num_frames=None, fps=None)
        return replace(defaults, **own)


NO_OPTIONS = VideoOptions()


def check_order(minimum: float | None, maximum: float | None, what: str, prefix: str = "") -> None:
    """Raise a ValueError if the minimum of `what` exceeds its maximum."""
    if minimum is not None and maximum is not None and minimum > maximum:
        raise ValueError(f"{prefix}min_{what} must be at most max_{what} {maximum}, got {minimum}")


@dataclass(frozen=True, eq=False)
class VideoSource:
    """Video as given by the caller, not decoded yet.

    Attributes:
        name: name in errors, such as "conversations[2] videos[1]".
        film: frames of the video.
        options: sampling and size options.
    """

    name: str
    film: FrameSource = field(repr=False)
    options: VideoOptions = NO_OPTIONS

    @property
    def mark(self) -> tuple[str, ...] | None:
        """Identity of the file that needs no decoding; None if there is no file."""
        return None if self.film.digest is None else ("film", self.film.digest)


def is_video(path: str) -> bool:
    """Return whether the name of a file is that of a video."""
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
    """Read or fetch a video, without decoding it.

    Args:
        value: a list of frames, each as `read_image` accepts an image; an array or tensor [T, H, W, 3] or [T, 3, H, W]
            of any type, with whole numbers from 0 to 255; JPEG frames as one URL, `data:video/jpeg;base64,A,B,C`; or a
            file: a path, bytes, a data:, file:// or http(s) URL.
        options: sampling and size options.
        metadata: properties of frames, named as in the library: `fps` of the original video, `frames_indices` of the
            frames in it, its `total_num_frames` (or those of the part that the frames were sampled from), and
            `do_sample_frames` as in `options`. Frames without a rate count as 2 per second, with a warning.
        access: rules for reading files and URLs.
        name: name of the video in errors.

    Raises:
        ValueError: `value` has another type, shape or values, or no frames; the metadata do not match the frames; or
            `read_image` refuses the file.
    """
    value = _sent_frames(value, name)
    if hasattr(value, "__array__") and not isinstance(value, str | bytes):  # numpy's strings and bytes have it, too
        value = _pixels(value, name)
        # The identity of the memory, since the frames reference it rather than the object that was passed.
        same: Any = (value.__array_interface__["data"], value.shape, value.strides)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        _check_count(len(value), name)
        same = None
    else:
        if isinstance(value, Image.Image):
            raise ValueError(f"{name} must be {_ACCEPTED}, got {describe(value)}")
        encoded = read_encoded(value, _ACCEPTED, access=access, name=name)
        if metadata is not None:
            raise ValueError(f"{name} video_metadata applies to frames only, a file has its own, got {short(metadata)}")
        if options.sample_fps is not None:
            raise ValueError(f"{name} sample_fps applies to frames only, a file has its own rate: set fps to sample it")
        return VideoSource(name, VideoFile(name, encoded), options)
    pictures = tuple(read_image(one, access=access, name=f"{name} frames[{i}]") for i, one in enumerate(value))
    if same is None:
        same = tuple(id(one.value) if one.encoded is None else one.encoded for one in pictures)
    if options.video_start is not None or options.video_end is not None:
        raise ValueError(
            f"{name} video_start and video_end require a video file: from a list of frames, remove frames instead"
        )
    properties = _metadata(metadata, len(pictures), name)
    fps, options = _rate(properties, options, name)
    numbers, total = properties.get("frames_indices"), properties.get("total_num_frames") or len(pictures)
    film = FrameList(name, pictures, (same, fps, numbers, total), fps, numbers, total)
    sampling = VideoOptions(do_sample_frames=properties.get("do_sample_frames"))
    return VideoSource(name, film, options.over(sampling))


def _sent_frames(value: Any, name: str) -> Any:
    """Return the frames in a URL of JPEG frames as data URLs, and any other value unchanged."""
    if not isinstance(value, str) or value[: len(_SENT)].lower() != _SENT:
        return value
    count = value.count(",")  # before anything is copied or decoded
    if count > _MAX_SENT:
        raise ValueError(f"{name} must have 1 to {_MAX_SENT} frames in one URL, got {count}: send a file instead")
    return [f"data:image/jpeg;base64,{frame}" for frame in value[len(_SENT) :].split(",")]


def _pixels(value: Any, name: str) -> npt.NDArray[np.uint8]:
    """Return an array or tensor as uint8 [T, H, W, 3], without copying bytes."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's message names the conversion to use
        raise ValueError(f"{name} must be {_ARRAY}, got a {type(value).__name__}: {error}") from error
    if array.dtype.kind not in "uif" or array.ndim != 4 or 3 not in (array.shape[1], array.shape[3]):
        raise ValueError(f"{name} must be {_ARRAY}, got {array.dtype} {array.shape}")
    if array.shape[3] != 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype == np.uint8:
        return array
    pixels = np.empty(array.shape, np.uint8)
    for i, frame in enumerate(array):  # one by one, since all frames together may be gigabytes
        with np.errstate(invalid="ignore"):
            pixels[i] = frame
        if not np.array_equal(pixels[i], frame):
            raise ValueError(
                f"{name} must be {_ARRAY}, got {array.dtype} from {frame.min():g} to {frame.max():g} in frame {i}: "
                "scale or round them"
            )
    return pixels


def _rate(metadata: Mapping[str, Any], options: VideoOptions, name: str) -> tuple[float | None, VideoOptions]:
    """Return the rate of frames, and the options without it. Log a warning if the rate is unknown."""
    rates = metadata.get("fps"), options.sample_fps, options.fps
    fps = next((rate for rate in rates if rate is not None), None)
    if fps is None:
        warn(f"{name} should have fps: {UNKNOWN_FPS} frames per second are assumed")
    is_sampled = rates[:2] != (None, None)  # otherwise `fps` is the rate of the frames
    return fps, replace(options, sample_fps=None, fps=options.fps if is_sampled else None)


def _metadata(given: Any, count: int, name: str) -> dict[str, Any]:
    """Return the checked metadata of `count` frames."""
    _check_count(count, name)
    name = f"{name} video_metadata"
    if not isinstance(given, Mapping | None):
        raise ValueError(f"{name} must be a dict such as {{'fps': 30}}, got {short(given)}")
    metadata = {key: plain(one) for key, one in (given or {}).items()}
    for key in metadata:
        if key not in (*_METADATA, *_UNUSED):
            raise ValueError(f"{name}: {unknown(key, (*_METADATA, *_UNUSED))}")
    try:
        check_fields(metadata, _METADATA)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    numbers, total = metadata.get("frames_indices"), metadata.get("total_num_frames") or count
    if numbers is None and total != count:
        raise ValueError(f"{name} must have frames_indices if total_num_frames = {total} differs from {count} frames")
    if numbers is not None:
        # For a part of a video, Qwen's utility gives the number of frames of the part, and indices in the full video.
        if len(numbers) != count or numbers != sorted(numbers) or numbers[-1] - numbers[0] >= total:
            raise ValueError(
                f"{name} frames_indices must be {count} ascending numbers within total_num_frames = {total}, "
                f"got {short(numbers)}"
            )
        metadata["frames_indices"] = tuple(numbers)
    return metadata


def _check_count(count: int, name: str) -> None:
    if not 1 <= count <= MAX_FRAMES:
        raise ValueError(f"{name} must have 1 to {MAX_FRAMES} frames, got {count}")


def plain(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python's, and other sequences of numbers to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple | range) else value
