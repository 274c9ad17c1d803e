"""`mm_processor_kwargs`: how large pictures are, and how videos are sampled that do not say it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlcache_jax.checks import short
from vlcache_jax.inputs.processor import check_limits
from vlcache_jax.inputs.videos import NO_OPTIONS, SAMPLING, VideoOptions, plain

_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_KNOWN = (*_PIXELS, "size", *SAMPLING)
_MOST_VIDEOS = 1024  # of a request that asks something of each


@dataclass(frozen=True)
class MediaSettings:
    """What is asked of the images and videos of a request, a call or an engine.

    Attributes:
        limits: min_pixels and max_pixels of images, those that are given.
        videos: of each video, what does not stand beside it.
        each: the same, of one video after the other; None: they are all asked the same.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    videos: VideoOptions = NO_OPTIONS
    each: tuple[VideoOptions, ...] | None = None

    def of_video(self, number: int) -> VideoOptions:
        """What is asked of one of a request's videos."""
        return self.each[number] if self.each is not None and number < len(self.each) else self.videos

    def check_videos(self, count: int, name: str) -> None:
        """Raises a ValueError unless a request with so many videos can be asked this; `name` is the request's."""
        if self.each is not None and len(self.each) != count:
            raise ValueError(
                f"{name} mm_processor_kwargs fps must be one number, or a list with one for each video, "
                f"got {len(self.each)} for {count} videos"
            )


NO_SETTINGS = MediaSettings()


def read_settings(given: Any, name: str = "mm_processor_kwargs", *, of_request: bool = True) -> MediaSettings:
    """Of `mm_processor_kwargs`, in the words of the library's processors; None asks for nothing.

    Args:
        given: min_pixels and max_pixels of images, or size={"shortest_edge": ..., "longest_edge": ...}, which says the
            same; and of videos what `videos.SAMPLING` names, such as fps, which may be a list with one for each video,
            as Qwen's utility returns it.
        name: what error messages call it.
        of_request: whether it is of one request, whose videos can be told apart.

    Raises:
        ValueError: another key, a value of another type or out of bounds, or both spellings of a limit.
    """
    if given is None:
        return NO_SETTINGS
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a dict with {', '.join(_KNOWN)}, got {type(given).__name__} {short(given)}")
    for key in given:
        if key not in _KNOWN:
            raise ValueError(f"{name} must hold only {', '.join(_KNOWN)}, got {short(key)}")
    limits = {key: given[key] for key in _PIXELS if given.get(key) is not None}
    if given.get("size") is not None:
        limits = _size(given["size"], limits, name)
    sampling = {key: plain(given[key]) for key in SAMPLING if key in given}
    each = None
    if of_request and isinstance(rates := sampling.get("fps"), list):
        if len(rates) > _MOST_VIDEOS:
            raise ValueError(f"{name} fps must have at most {_MOST_VIDEOS} entries, got {len(rates)}")
        each = tuple(VideoOptions.checked(sampling | {"fps": fps}, name) for fps in sampling.pop("fps"))
    return MediaSettings(check_limits(limits, name), VideoOptions.checked(sampling, name), each)


def _size(size: Any, limits: Mapping[str, int], name: str) -> dict[str, int]:
    """The limits that `size` says."""
    edges = tuple(_PIXELS.values())
    if not isinstance(size, Mapping) or not size or not set(size) <= set(edges):
        raise ValueError(f"{name} size must be a dict with {' and '.join(edges)}, in pixels of area, got {short(size)}")
    if limits:
        raise ValueError(f"{name} must hold size or {' and '.join(_PIXELS)}, got both")
    return {pixels: size[edge] for pixels, edge in _PIXELS.items() if edge in size}
