"""Video processor: selects and sizes frames like transformers' video processors.

Frames are resized like images (`processor`). This module has the sampling and the sizes of the library's two kinds of
video processors (`KINDS`). The checkpoint or its family names one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.common.checks import short, shorten
from vlcache_jax.common.json_files import FLAG, OBJECT, TEXT, check_fields, optional, read_object, whole
from vlcache_jax.inputs.images import check_picture_size
from vlcache_jax.inputs.processor import Grid, ImageProcessor, fit_asked, fit_blocks
from vlcache_jax.inputs.videos import OPTIONS, UNKNOWN_FPS, VideoHeader, VideoOptions, check_order
from vlcache_jax.models.config import ModelConfig, VisionConfig
from vlcache_jax.models.family import Videos
from vlcache_jax.models.registry import FAMILIES

_SIZE = dict.fromkeys(("shortest_edge", "longest_edge"), optional(OPTIONS["max_pixels"]))
_STORED = {key: optional(kind) for key, kind in OPTIONS.items()} | {
    "size": optional(OBJECT),
    "cap_pixels_per_frame": optional(FLAG),
    "max_video_tokens": optional(whole(1, 1 << 30)),
    "video_processor_type": optional(TEXT),
}


@dataclass(frozen=True)
class SampledVideo:
    """Frames of a video that the model sees, in C chunks of F frames.

    Attributes:
        chunks: frame indices of each chunk, C x F; the last frame is repeated to fill its chunk.
        seconds: time of each chunk in the video, in seconds.
        step: time from one chunk to the next in seconds, as the library counts it.
        grid: patch grid of each chunk.
    """

    chunks: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    step: float
    grid: Grid


@dataclass(frozen=True, kw_only=True)
class VideoProcessor:
    """Video processor: selects the frames of videos and computes their sizes.

    Attributes:
        kind: kind of the processor, see `KINDS`.
        family: format of videos in the family's prompts.
        tower: configuration of the vision tower.
        image: image processor of the checkpoint, which cuts frames.
        min_pixels, max_pixels: default limits of the area to which frames are scaled, in pixels; see `ProcessorKind`.
        fps, num_frames, min_frames, max_frames, do_sample_frames: defaults, see `VideoOptions`.
        cap_pixels_per_frame: also scale frames so that a video has at most `max_video_tokens` tokens, as the library
            counts them.
    """

    kind: ProcessorKind
    family: Videos
    tower: VisionConfig
    image: ImageProcessor
    min_pixels: int
    max_pixels: int
    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    do_sample_frames: bool
    cap_pixels_per_frame: bool
    max_video_tokens: int

    @classmethod
    def from_pretrained(
        cls, directory: str | PathLike[str], config: ModelConfig, image: ImageProcessor
    ) -> VideoProcessor:
        """Read a checkpoint's settings from the files that the library uses.

        These are `processor_config.json`, `video_preprocessor_config.json`, or else the settings of images.

        Args:
            directory: the checkpoint.
            config: configuration of the model; its family has a default kind.
            image: image processor of the checkpoint.

        Raises:
            ValueError: a field is out of bounds, the kind is unknown, or pixels are processed differently from those of
                images.
        """
        given, path = _read_settings(Path(directory))
        family = FAMILIES[config.model_type].video
        name = given.get("video_processor_type", family.processor)
        if name not in KINDS:
            raise ValueError(f"video_processor_type of {path} must be {' or '.join(KINDS)}, got {shorten(str(name))}")
        found = KINDS[name]
        for key, expected in (
            ("image_mean", image.mean),
            ("image_std", image.std),
            *((key, getattr(image, key)) for key in ("patch_size", "merge_size", "temporal_patch_size")),
            *((key, getattr(image, key)) for key in ("rescale_factor", "resample")),
        ):
            got = given.get(key, expected)
            if isinstance(expected, tuple):
                got = tuple(got) if isinstance(got, list | tuple) else (got,) * len(expected)
            if got != expected:
                raise ValueError(f"{key} of {path} must match the image processor's {expected}, got {short(got)}")
        settings = {**found.defaults, **{key: given[key] for key in found.defaults if key in given}}
        size = {**found.size, **given.get("size", {})}
        limits = dict(zip(("min_pixels", "max_pixels"), (size["shortest_edge"], size["longest_edge"]), strict=True))
        limits |= {key: given[key] for key in limits if key in given}
        check_order(limits["min_pixels"], limits["max_pixels"], "pixels", f"size of {path}: ")
        return cls(kind=found, family=family, tower=config.vision, image=image, **limits, **settings)

    def cut(self, head: VideoHeader, options: VideoOptions, *, is_file: bool, name: str = "video") -> SampledVideo:
        """Return the frames of a video that the model sees.

        Args:
            head: properties of the video.
            options: options of the video.
            is_file: True if the frames come from a file.
            name: name of the video in errors.

        Raises:
            ValueError: the options contradict the checkpoint's or the video, or the aspect ratio exceeds 200.
        """
        own = self._with(options, name)
        sets_count = options.fps is not None or options.num_frames is not None
        samples = options.do_sample_frames
        if samples is None:
            samples = sets_count or (is_file and own.do_sample_frames)
        first, head = _part(head, options, name)
        indices = first + (own.kind.sample(own, head, name) if samples else np.arange(head.frames))
        numbers = indices if head.numbers is None else np.asarray(head.numbers)[indices]
        slots = self.image.temporal_patch_size
        padded = np.pad(indices, (0, -len(indices) % slots), mode="edge").reshape(-1, slots)
        seen = np.pad(numbers, (0, -len(numbers) % slots), mode="edge").reshape(-1, slots)
        fps = head.fps or UNKNOWN_FPS
        sampled = len(indices) / head.total * fps
        return SampledVideo(
            chunks=tuple(map(tuple, padded.tolist())),
            seconds=tuple((int(one[0]) / fps + int(one[-1]) / fps) / 2 for one in seen),
            step=slots / sampled,
            grid=own._grid(len(indices), head, options, name),
        )

    def text(self, cut: SampledVideo) -> str:
        """Return the text of a video in the prompt, with one placeholder per chunk."""
        return self.family.text(cut.seconds)

    def times(self, cut: SampledVideo) -> tuple[int, ...]:
        """Return the time offset of each chunk, which is added to its positions on the first axis."""
        return self.family.times(self.tower, len(cut.chunks), cut.step)

    def patches(self, frames: Sequence[npt.NDArray[np.uint8]], grid: Grid) -> npt.NDArray[np.uint8]:
        """Return the pixels of a chunk, uint8 [P, 3, F, patch_size**2], from its frames, uint8 [H, W, 3] each."""
        return np.stack([self.image.cut(frame, grid) for frame in frames], axis=2)

    def settings(self, grid: Grid) -> dict[str, Any]:
        """Return all settings that determine the pixels of a chunk, as plain values; they are part of entry keys."""
        own = self.image.settings()
        return {key: own[key] for key in own if key not in ("min_pixels", "max_pixels")} | {"grid": grid}

    def _with(self, options: VideoOptions, name: str) -> VideoProcessor:
        """Return the processor with the sampling of the options."""
        given = {key: getattr(options, key) for key in ("fps", "num_frames", "min_frames", "max_frames")}
        given = {key: value for key, value in given.items() if value is not None}
        if "fps" in given:
            given["num_frames"] = None
        own = replace(self, **given)
        check_order(own.min_frames, own.max_frames, "frames", f"{name}: ")
        return own

    def _grid(self, frames: int, head: VideoHeader, options: VideoOptions, name: str) -> Grid:
        check_picture_size(head.height, head.width, name)
        merge, block = self.image.merge_size, self.image.patch_size * self.image.merge_size
        if options.resized_height is not None and options.resized_width is not None:
            height, width = options.resized_height, options.resized_width
            check_picture_size(height, width, f"{name} resized_height x resized_width")
            rows, columns = fit_asked(height, width, block)
        elif (options.min_pixels, options.max_pixels, options.total_pixels) != (None, None, None):
            min_pixels, max_pixels = self._area(frames, options)
            rows, columns = fit_blocks(head.height, head.width, block, min_pixels, max_pixels)
        else:
            rows, columns = self.kind.fit(self, frames, head.height, head.width, block)
        return 1, rows * merge, columns * merge

    def _area(self, frames: int, options: VideoOptions) -> tuple[float, float]:
        """Return the minimum and maximum pixels of a frame, as Qwen's utility computes them if an option sets one.

        A limit that no option sets is adjusted to the other one.
        """
        shared, slots = frames if self.kind.counts_all else 1, self.image.temporal_patch_size
        minimum: float = self.min_pixels / shared if options.min_pixels is None else options.min_pixels
        maximum: float = self.max_pixels / shared if options.max_pixels is None else options.max_pixels
        if options.total_pixels is not None:
            maximum = min(maximum, max(options.total_pixels * slots / frames, int(minimum * 1.05)))
        return (min(minimum, maximum), maximum) if options.min_pixels is None else (minimum, max(minimum, maximum))


def _part(head: VideoHeader, options: VideoOptions, name: str) -> tuple[int, VideoHeader]:
    """Return the first frame of the requested part of a file, and the header that the part would have as a file."""
    if options.video_start is None and options.video_end is None:
        return 0, head
    fps = head.fps or UNKNOWN_FPS
    first = math.ceil((options.video_start or 0) * fps)
    last = head.frames - 1 if options.video_end is None else min(math.floor(options.video_end * fps), head.frames - 1)
    if first > last:
        raise ValueError(
            f"{name} must have a frame from video_start to video_end, got {options.video_start} to "
            f"{options.video_end} of {head.frames / fps:g} seconds"
        )
    return first, head._replace(frames=last - first + 1, total=last - first + 1)


def _read_settings(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the settings in the checkpoint, and their file."""
    for file in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        if not (path := directory / file).exists():
            continue
        given = read_object(path)
        if file == "processor_config.json":
            check_fields(given, {"video_processor": optional(OBJECT)}, path)
            given = given.get("video_processor") or {}
        if given:
            check_fields(given, _STORED, path)
            check_fields(given.get("size") or {}, _SIZE, path, section="size.")
            return {key: value for key, value in given.items() if value is not None}, path
    return {}, directory


def _sample_steps(own: VideoProcessor, head: VideoHeader, name: str) -> npt.NDArray[np.int64]:
    """Return frame indices at even steps from the first frame, in whole chunks."""
    slots, total = own.image.temporal_patch_size, head.frames
    if own.num_frames is not None:
        count = round(own.num_frames / slots) * slots
    else:
        max_count = math.floor(min(own.max_frames, total) / slots) * slots
        wanted = head.total / (head.fps or UNKNOWN_FPS) * (own.fps or 2.0)  # the library has no default
        count = math.floor(min(max(wanted, own.min_frames), max_count, total) / slots) * slots
    if count > total:
        raise ValueError(f"{name} num_frames must be at most its {total} frames, got {own.num_frames}")
    step = total / max(count, 1)
    # Like `torch.arange`: float64 steps, rounded to float32.
    return (np.arange(max(count, 1)) * step).astype(np.float32).astype(np.int64)


def _sample_ends(own: VideoProcessor, head: VideoHeader, name: str) -> npt.NDArray[np.int64]:
    """Return frame indices spaced evenly from the first frame to the last."""
    total, count = head.frames, own.num_frames
    if count is None:
        count = int(head.total / (head.fps or UNKNOWN_FPS) * (own.fps or 2.0))
        count = min(max(count, own.min_frames), own.max_frames, total)
    if count > total:
        raise ValueError(f"{name} num_frames must be at most its {total} frames, got {count}")
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def _fit_each(own: VideoProcessor, frames: int, height: int, width: int, block: int) -> tuple[int, int]:
    """Return rows and columns of blocks of a frame. The limits apply to each frame."""
    max_pixels: float = own.max_pixels
    if own.cap_pixels_per_frame:
        all_pixels = int(own.max_video_tokens * block * block * 0.9)
        share = all_pixels * own.image.temporal_patch_size // frames
        max_pixels = max(min(max_pixels, share), int(own.min_pixels * 1.05))
    return fit_blocks(height, width, block, own.min_pixels, max_pixels)


def _fit_all(own: VideoProcessor, frames: int, height: int, width: int, block: int) -> tuple[int, int]:
    """Return rows and columns of blocks of a frame. The limits apply to all frames together."""
    slots, min_pixels, max_pixels = own.image.temporal_patch_size, own.min_pixels, own.max_pixels
    if own.cap_pixels_per_frame:
        share = min(own.max_video_tokens * block * block, max_pixels // frames)
        max_pixels = max(share, int(min_pixels * 1.05)) * frames
    frames = max(frames, slots)
    if height < block or width < block:
        scale = max(block / height, block / width)
        height, width = int(height * scale), int(width * scale)
    rows, columns = round(height / block), round(width / block)
    area = round(frames / slots) * slots * rows * columns * block**2
    # The area that is compared with the limits counts whole chunks, the scale counts the actual frames.
    if min_pixels <= area <= max_pixels:
        return rows, columns
    if area > max_pixels:
        shrink = math.sqrt((frames * height * width) / max_pixels)
        return max(1, math.floor(height / shrink / block)), max(1, math.floor(width / shrink / block))
    grow = math.sqrt(min_pixels / (frames * height * width))
    return math.ceil(height * grow / block), math.ceil(width * grow / block)


@dataclass(frozen=True)
class ProcessorKind:
    """One of the library's video processors.

    Attributes:
        size, defaults: defaults for settings that a checkpoint leaves out.
        counts_all: True if the pixel limits apply to all frames together, rather than to each frame.
        sample: returns the indices of sampled frames.
        fit: returns rows and columns of blocks for `frames` frames of a size.
    """

    size: dict[str, int]
    defaults: dict[str, Any]
    counts_all: bool
    sample: Callable[[VideoProcessor, VideoHeader, str], npt.NDArray[np.int64]]
    fit: Callable[[VideoProcessor, int, int, int, int], tuple[int, int]]


_FRAMES = {"num_frames": None, "min_frames": 4, "max_frames": 768, "cap_pixels_per_frame": False}
KINDS = {
    "Qwen2VLVideoProcessor": ProcessorKind(
        size={"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        defaults={**_FRAMES, "fps": None, "do_sample_frames": False, "max_video_tokens": 128000},
        counts_all=False,
        sample=_sample_steps,
        fit=_fit_each,
    ),
    "Qwen3VLVideoProcessor": ProcessorKind(
        size={"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        defaults={**_FRAMES, "fps": 2, "do_sample_frames": True, "max_video_tokens": 768},
        counts_all=True,
        sample=_sample_ends,
        fit=_fit_all,
    ),
}
"""Video processors by the library's names."""
