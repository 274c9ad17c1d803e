"""From a picture to the uint8 patches that the vision tower reads, bit for bit as transformers' PIL image processor.

Patches stay uint8, an eighth of the float32 rows that hold every pixel twice: `normalization_table` turns bytes into
values later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlcache_jax.common.checks import check_whole, short, shorten
from vlcache_jax.common.json_files import OBJECT, Kind, check_fields, either, optional, read_object, real, whole
from vlcache_jax.inputs.images import check_picture_size

Grid = tuple[int, int, int]
"""Patches of an image: (1, rows, columns)."""

_LIMITS = ("min_pixels", "max_pixels")
_RESIZED = ("resized_height", "resized_width")
OWN_LIMITS = (*_LIMITS, *_RESIZED)
"""What the part of a message may say of its image, in the words of Qwen's `qwen_vl_utils`."""
_RESIZED_TOKENS = (4, 16384)  # between which it keeps such an image, or frame


def _channels(kind: Kind) -> Kind:
    return Kind(
        f"3 values, one a channel, each {kind.words}",
        lambda value: isinstance(value, (list, tuple)) and len(value) == 3 and all(map(kind.accepts, value)),
    )


AREA = whole(1, 1 << 40)
_MEAN, _STD = real(-1e6, 1e6), real(1e-6, 1e6)
_SETTINGS: dict[str, Kind] = {
    "min_pixels": AREA,
    "max_pixels": AREA,
    "patch_size": whole(1, 1 << 10),
    "merge_size": whole(1, 64),
    "temporal_patch_size": whole(1, 64),
    "mean": _channels(_MEAN),
    "std": _channels(_STD),
    "rescale_factor": real(1e-6, 1e6),
    "resample": Kind("one of Pillow's filters 0 to 5", whole(0, 5).accepts),
}
# In the files one value may stand for all channels, and null is the library's default.
_STORED: dict[str, Kind] = {key: optional(kind) for key, kind in _SETTINGS.items()} | {
    "image_mean": optional(either(_MEAN, _SETTINGS["mean"])),
    "image_std": optional(either(_STD, _SETTINGS["std"])),
    "size": optional(OBJECT),
}
_SIZE = dict.fromkeys((*_LIMITS, "shortest_edge", "longest_edge"), optional(AREA))


def check_limits(limits: Mapping[str, int] | None, name: str = "mm_processor_kwargs") -> dict[str, int]:
    """Returns `min_pixels` and `max_pixels`, those that are given, as a dict; None gives an empty one.

    Raises:
        ValueError: another key, or a value that is not a positive integer, or min_pixels above max_pixels.
    """
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise ValueError(
            f"{name} must be a dict with {' and '.join(_LIMITS)}, got {type(limits).__name__} {short(limits)}"
        )
    for key, value in limits.items():
        if key not in _LIMITS:
            raise ValueError(f"{name} must hold only {' and '.join(_LIMITS)}, got {key!r}")
        _check_positive(value, f"{name} {key}")
    checked = dict(limits)
    if len(checked) == len(_LIMITS):
        _check_order(checked["min_pixels"], checked["max_pixels"], f"{name} ")
    return checked


def check_own_limits(part: Mapping[str, Any], name: str) -> dict[str, int]:
    """Returns what the part of a message says of its image: `OWN_LIMITS`, of which height and width outdo the others.

    Raises:
        ValueError: a value that is neither None nor a positive integer; a height without a width, or one of the two
            more than 200 times the other; min_pixels above max_pixels.
    """
    given = {key: part[key] for key in OWN_LIMITS if part.get(key) is not None}
    if not given:
        return {}
    for key, value in given.items():
        _check_positive(value, f"{name} {key}")
    resized = {key: given[key] for key in _RESIZED if key in given}
    if not resized:
        return check_limits(given, name)
    if len(resized) < len(_RESIZED):
        raise ValueError(f"{name} must hold {' and '.join(_RESIZED)}, got {next(iter(resized))} alone")
    height, width = resized.values()
    check_picture_size(height, width, f"{name} {' x '.join(_RESIZED)}")
    return resized


def overrule(limits: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """Limits with others in their place; a limit that contradicts what is said in `own` gives way to it."""
    both = {**limits, **own}
    if both.get("min_pixels", 0) > both.get("max_pixels", math.inf):
        # Pictures grow by whole blocks, beyond the least area; if that were the greatest, too, beyond the greatest.
        both |= {"min_pixels": 1} if "max_pixels" in own else {"max_pixels": own["min_pixels"]}
    return both


def fit_asked(height: int, width: int, block: int) -> tuple[int, int]:
    """Rows and columns of blocks for a height and width that were asked for, in pixels, as Qwen's utility has them."""
    least, most = (count * block**2 for count in _RESIZED_TOKENS)
    return fit_blocks(height, width, block, least, most, fewest=1)


def fit_blocks(
    height: int, width: int, block: int, min_pixels: float, max_pixels: float, *, fewest: int = 0
) -> tuple[int, int]:
    """Rows and columns of blocks, `block` pixels a side, to which a picture is scaled.

    Both sides are rounded to whole blocks, half to even, and to no fewer than `fewest`; then the area is brought within
    the limits.
    """
    rows, columns = (max(fewest, round(side / block)) for side in (height, width))
    if rows * columns * block**2 > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / block)) for side in (height, width))
    elif rows * columns * block**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / block) for side in (height, width))
    return rows, columns


class Patches(NamedTuple):
    """An image cut into patches.

    Attributes:
        pixels: uint8 [P, 3, patch_size * patch_size], or with the frames of a video's chunk [P, 3, F, patch_size *
            patch_size]. Each merge_size x merge_size block of patches lies together, blocks in raster order.
        grid: (1, rows, columns) with P = rows * columns.
    """

    pixels: npt.NDArray[np.uint8]
    grid: Grid


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Resizes and cuts pictures as the checkpoint's image processor does (transformers, PIL, bit for bit).

    Attributes:
        min_pixels, max_pixels: area to which a picture is scaled, in pixels; `with_limits` changes them.
        patch_size: side of a patch, in pixels.
        merge_size: side of the block of patches that becomes one token.
        temporal_patch_size: times each pixel is repeated in `pixel_values`; an image is a video of equal frames.
        mean, std: of each channel, after rescaling.
        rescale_factor: by which bytes are multiplied before normalisation.
        resample: Pillow's number of the resize filter (3 is bicubic).
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float = 1 / 255
    resample: int = int(Image.Resampling.BICUBIC)

    def __post_init__(self) -> None:
        check_fields(vars(self), _SETTINGS)
        _check_order(self.min_pixels, self.max_pixels)

    @classmethod
    def from_pretrained(cls, directory: str | PathLike[str]) -> ImageProcessor:
        """Reads the settings of a checkpoint, from `preprocessor_config.json` or `processor_config.json`.

        Raises:
            ValueError: no such files, a field in them that is out of bounds, an image processor of another kind, or one
                that skips a step.
        """
        if not Path(directory).is_dir():
            raise ValueError(f"directory must be a checkpoint's directory, got {short(str(directory))}")
        return cls.from_settings(_find_settings(Path(directory)), directory)

    @classmethod
    def from_settings(cls, given: Mapping[str, Any], source: str | PathLike[str]) -> ImageProcessor:
        """The content of a `preprocessor_config.json`; `source` is how errors call where it is from.

        Raises:
            ValueError: see `from_pretrained`.
        """
        settings = _complete(given, source)
        for step in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
            if settings[step] is not True:
                raise ValueError(f"{step} of {source} must be true, got {settings[step]}")
        try:
            return cls(
                min_pixels=settings["min_pixels"],
                max_pixels=settings["max_pixels"],
                patch_size=settings["patch_size"],
                merge_size=settings["merge_size"],
                temporal_patch_size=settings["temporal_patch_size"],
                mean=_three_floats(settings["image_mean"]),
                std=_three_floats(settings["image_std"]),
                rescale_factor=float(settings["rescale_factor"]),
                resample=int(settings["resample"]),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"image processor settings of {source} must be usable: {error}") from error

    def with_limits(self, limits: Mapping[str, int] | None) -> ImageProcessor:
        """This processor with `limits`, that is `mm_processor_kwargs`: min_pixels, max_pixels or both.

        One that is given alone is kept: where it contradicts the other one of this processor, that gives way. (With a
        least area above the greatest, the library would scale small pictures beyond the greatest.)

        Raises:
            ValueError: see `check_limits`.
        """
        if not (given := check_limits(limits)):
            return self
        changes: dict[str, Any] = overrule({key: getattr(self, key) for key in _LIMITS}, given)
        return replace(self, **changes)

    def grid(self, height: int, width: int, limits: Mapping[str, int] | None = None, *, name: str = "image") -> Grid:
        """The patches of a picture of `height` x `width` pixels: (1, rows, columns), multiples of merge_size.

        Both sides are rounded to whole blocks, half to even; then the area is brought within the limits. A height and
        width that are asked for (`check_own_limits`) are rounded so in place of the picture's, to 4 to 16384 tokens.

        Raises:
            ValueError: an empty picture, or one more than 200 times as long as wide.
        """
        check_picture_size(height, width, name)
        block = self.patch_size * self.merge_size
        if limits and _RESIZED[0] in limits:
            rows, columns = fit_asked(limits[_RESIZED[0]], limits[_RESIZED[1]], block)
        else:
            bounds = self.with_limits(limits)
            rows, columns = fit_blocks(height, width, block, bounds.min_pixels, bounds.max_pixels)
        return 1, rows * self.merge_size, columns * self.merge_size

    def num_tokens(self, grid: Grid) -> int:
        """Tokens that an image of this patch grid takes in the prompt."""
        return math.prod(grid) // self.merge_size**2

    def patches(self, rgb: npt.NDArray[np.uint8], limits: Mapping[str, int] | None = None) -> Patches:
        """Resizes a picture, uint8 [H, W, 3], to its grid and cuts it into patches."""
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
            raise ValueError(f"rgb must be uint8 [H, W, 3], got {rgb.dtype} {rgb.shape}")
        grid = self.grid(rgb.shape[0], rgb.shape[1], limits)
        return Patches(self.cut(rgb, grid), grid)

    def cut(self, rgb: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[np.uint8]:
        """Resizes a picture, uint8 [H, W, 3], to a grid and cuts it into patches, [P, 3, patch_size**2]."""
        _, rows, columns = grid
        patch, merge = self.patch_size, self.merge_size
        resized = Image.fromarray(rgb).resize((columns * patch, rows * patch), Image.Resampling(self.resample))
        pixels = np.asarray(resized).reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        pixels = pixels.transpose(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row, column, channel, y, x
        return pixels.reshape(rows * columns, 3, patch * patch)

    @cached_property
    def normalization_table(self) -> npt.NDArray[np.float32]:
        """The value of each byte in each channel, float32 [3, 256], rounded step by step as in the library."""
        rescaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (rescaled - mean) / std

    def pixel_values(self, patches: Patches) -> npt.NDArray[np.float32]:
        """The library's `pixel_values` of these patches: float32 [P, 3 * temporal_patch_size * patch_size**2]."""
        values = np.stack([self.normalization_table[c][patches.pixels[:, c]] for c in range(3)], axis=1)
        values = values.reshape(len(values), 3, -1, self.patch_size**2)
        frames = len(values), 3, self.temporal_patch_size, self.patch_size**2
        return np.broadcast_to(values, frames).reshape(len(values), -1)

    def settings(self, limits: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Everything here that changes pixels or their number, as plain values: a part of cache keys."""
        if limits and _RESIZED[0] in limits:
            own = {key: value for key, value in asdict(self).items() if key not in _LIMITS}
            return own | {"resized": self.grid(1, 1, limits)}
        return asdict(self.with_limits(limits))


# What the library's class takes for settings that a checkpoint leaves out. Importing it would import torch, where it is
# installed, which takes seconds.
_KIND = "Qwen2VLImageProcessor"
_DEFAULTS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "resample": int(Image.Resampling.BICUBIC),
}
_DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


def _find_settings(directory: Path) -> dict[str, Any]:
    """The image processor's settings as they stand in a checkpoint, where the library finds them."""
    found: list[dict[str, Any]] = []
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (path := directory / name).exists():
            raw = read_object(path)
            check_fields(raw, {"image_processor": optional(OBJECT)}, path)
            nested = raw.get("image_processor") or {}
            for section, settings in (("", raw), ("image_processor.", nested)):
                check_fields(settings, _STORED, path, section=section)
                check_fields(settings.get("size") or {}, _SIZE, path, section=f"{section}size.")
            found += [settings for settings in ([nested] if name == "processor_config.json" else [raw]) if settings]
    if not found:
        raise ValueError(
            f"{directory} must describe its image processor in preprocessor_config.json or processor_config.json"
        )
    return found[0]


def _complete(settings: Mapping[str, Any], source: str | PathLike[str]) -> dict[str, Any]:
    """The settings, completed as the library does; the limits as min_ and max_pixels."""
    given = {key: value for key, value in settings.items() if value is not None}
    kind = given.get("image_processor_type", _KIND)
    if kind not in (_KIND, f"{_KIND}Fast", f"{_KIND}Pil"):
        raise ValueError(f"image processor of {source} must be {_KIND}, got {shorten(str(kind))}")
    size = given.get("size", _DEFAULT_SIZE)
    limits = dict(zip(_LIMITS, map(size.get, _DEFAULT_SIZE), strict=True))
    limits |= {key: given[key] for key in _LIMITS if key in given}  # how the first checkpoints say it
    if None in limits.values():
        raise ValueError(f"size of {source} must hold shortest_edge and longest_edge, got {given['size']}")
    return {**_DEFAULTS, **given, **limits}


def _check_positive(value: Any, name: str) -> None:
    check_whole(name, value, 1)
    if not AREA.accepts(value):
        raise ValueError(f"{name} must be {AREA.words}, got {short(value)}")


def _check_order(min_pixels: int, max_pixels: int, prefix: str = "") -> None:
    if min_pixels > max_pixels:
        raise ValueError(f"{prefix}min_pixels must be at most max_pixels {max_pixels}, got {min_pixels}")


def _three_floats(value: Any) -> tuple[float, float, float]:
    first, second, third = (value, value, value) if isinstance(value, (int, float)) else value
    return float(first), float(second), float(third)
