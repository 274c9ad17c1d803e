"""Image processor: cuts an image into uint8 patches, bit for bit like transformers' PIL image processor.

Patches stay uint8, an eighth of the float32 rows, which have every pixel twice. `normalization_table` maps bytes to
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

from vlcache_jax.common.checks import check_whole, short, shorten, unknown
from vlcache_jax.common.json_files import OBJECT, Kind, check_fields, either, optional, read_object, real, whole
from vlcache_jax.inputs.images import check_picture_size

Grid = tuple[int, int, int]
"""Patch grid of an image: (1, rows, columns)."""

_LIMITS = ("min_pixels", "max_pixels")
_RESIZED = ("resized_height", "resized_width")
OWN_LIMITS = (*_LIMITS, *_RESIZED)
"""Pixel limits that an image's part of a message may have, named as in Qwen's `qwen_vl_utils`."""
_RESIZED_TOKENS = (4, 16384)  # minimum and maximum tokens of an image or frame with a requested size


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
# In checkpoints, one value may apply to all channels, and null is the library's default.
_STORED: dict[str, Kind] = {key: optional(kind) for key, kind in _SETTINGS.items()} | {
    "image_mean": optional(either(_MEAN, _SETTINGS["mean"])),
    "image_std": optional(either(_STD, _SETTINGS["std"])),
    "size": optional(OBJECT),
}
_SIZE = dict.fromkeys((*_LIMITS, "shortest_edge", "longest_edge"), optional(AREA))


def check_limits(limits: Mapping[str, int] | None, name: str = "mm_processor_kwargs") -> dict[str, int]:
    """Return the given ones of `min_pixels` and `max_pixels` as a dict; None gives an empty one.

    Raises:
        ValueError: a key is unknown, a value is not a positive integer, or min_pixels exceeds max_pixels.
    """
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise ValueError(
            f"{name} must be a dict with {' and '.join(_LIMITS)}, got {type(limits).__name__} {short(limits)}"
        )
    for key, value in limits.items():
        if key not in _LIMITS:
            raise ValueError(f"{name}: {unknown(key, _LIMITS)}")
        _check_positive(value, f"{name} {key}")
    checked = dict(limits)
    if len(checked) == len(_LIMITS):
        _check_order(checked["min_pixels"], checked["max_pixels"], f"{name} ")
    return checked


def check_own_limits(part: Mapping[str, Any], name: str) -> dict[str, int]:
    """Return the `OWN_LIMITS` of an image's part of a message; height and width replace the other two.

    Raises:
        ValueError: a value is not None or a positive integer, only one of height and width is given, their aspect
            ratio exceeds 200, or min_pixels exceeds max_pixels.
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
        raise ValueError(f"{name} {' and '.join(_RESIZED)} must be set together, got {next(iter(resized))} alone")
    height, width = resized.values()
    check_picture_size(height, width, f"{name} {' x '.join(_RESIZED)}")
    return resized


def overrule(limits: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """Return `limits` updated with `own`. A limit that contradicts one in `own` is adjusted to it."""
    both = {**limits, **own}
    if both.get("min_pixels", 0) > both.get("max_pixels", math.inf):
        # Small images grow in whole blocks, beyond min_pixels. If it equaled max_pixels, they would exceed that, too.
        both |= {"min_pixels": 1} if "max_pixels" in own else {"max_pixels": own["min_pixels"]}
    return both


def fit_asked(height: int, width: int, block: int) -> tuple[int, int]:
    """Return rows and columns of blocks for a requested height and width in pixels, as Qwen's utility does."""
    min_pixels, max_pixels = (count * block**2 for count in _RESIZED_TOKENS)
    return fit_blocks(height, width, block, min_pixels, max_pixels, fewest=1)


def fit_blocks(
    height: int, width: int, block: int, min_pixels: float, max_pixels: float, *, fewest: int = 0
) -> tuple[int, int]:
    """Return rows and columns of blocks, `block` pixels a side, to which an image is scaled.

    Both sides are rounded to whole blocks, half to even, and to at least `fewest` blocks. Then the area is brought
    within the limits.
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
    """Image cut into P patches.

    Attributes:
        pixels: uint8 [P, 3, patch_size * patch_size], or with the frames of a video's chunk [P, 3, F, patch_size *
            patch_size]. The patches of each merge_size x merge_size block are adjacent, blocks in raster order.
        grid: (1, rows, columns) with P = rows * columns.
    """

    pixels: npt.NDArray[np.uint8]
    grid: Grid


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Image processor that equals the checkpoint's bit for bit (transformers with PIL).

    Attributes:
        min_pixels, max_pixels: limits of the area to which an image is scaled, in pixels; `with_limits` changes them.
        patch_size: side of a patch, in pixels.
        merge_size: side of the block of patches that becomes one token.
        temporal_patch_size: number of copies of each pixel in `pixel_values`; an image is a video of equal frames.
        mean, std: mean and standard deviation of each channel, after rescaling.
        rescale_factor: factor for bytes before normalization. Default 1/255.
        resample: Pillow's number of the resize filter. Default 3 (bicubic).
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
        """Read a checkpoint's settings from `preprocessor_config.json` or `processor_config.json`.

        Raises:
            ValueError: there is no such file, a field is out of bounds, or the image processor is of another kind or
                skips a step.
        """
        if not Path(directory).is_dir():
            raise ValueError(f"directory must be a checkpoint's directory, got {short(str(directory))}")
        return cls.from_settings(_find_settings(Path(directory)), directory)

    @classmethod
    def from_settings(cls, given: Mapping[str, Any], source: str | PathLike[str]) -> ImageProcessor:
        """Return the processor of the content of a `preprocessor_config.json`; `source` is its name in errors.

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
            raise ValueError(f"image processor settings of {source} must be valid: {error}") from error

    def with_limits(self, limits: Mapping[str, int] | None) -> ImageProcessor:
        """Return the processor with `limits`: min_pixels, max_pixels or both, as in `mm_processor_kwargs`.

        If only one is given and contradicts the processor's other one, the latter is adjusted. With min_pixels above
        max_pixels, the library would scale small images beyond the maximum.

        Raises:
            ValueError: see `check_limits`.
        """
        if not (given := check_limits(limits)):
            return self
        changes: dict[str, Any] = overrule({key: getattr(self, key) for key in _LIMITS}, given)
        return replace(self, **changes)

    def grid(self, height: int, width: int, limits: Mapping[str, int] | None = None, *, name: str = "image") -> Grid:
        """Return the patch grid of an image of `height` x `width` pixels: (1, rows, columns), multiples of merge_size.

        Both sides are rounded to whole blocks, half to even. Then the area is brought within the limits. A requested
        height and width (`check_own_limits`) replace those of the image, limited to 4 to 16384 tokens.

        Raises:
            ValueError: the image is empty, or its aspect ratio exceeds 200.
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
        """Return the number of prompt tokens of an image with this patch grid."""
        return math.prod(grid) // self.merge_size**2

    def patches(self, rgb: npt.NDArray[np.uint8], limits: Mapping[str, int] | None = None) -> Patches:
        """Resize an image, uint8 [H, W, 3], to its grid and cut it into patches."""
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
            raise ValueError(f"rgb must be uint8 [H, W, 3], got {rgb.dtype} {rgb.shape}")
        grid = self.grid(rgb.shape[0], rgb.shape[1], limits)
        return Patches(self.cut(rgb, grid), grid)

    def cut(self, rgb: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[np.uint8]:
        """Resize an image, uint8 [H, W, 3], to a grid and cut it into patches, uint8 [P, 3, patch_size**2]."""
        _, rows, columns = grid
        patch, merge = self.patch_size, self.merge_size
        resized = Image.fromarray(rgb).resize((columns * patch, rows * patch), Image.Resampling(self.resample))
        pixels = np.asarray(resized).reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        pixels = pixels.transpose(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row, column, channel, y, x
        return pixels.reshape(rows * columns, 3, patch * patch)

    @cached_property
    def normalization_table(self) -> npt.NDArray[np.float32]:
        """Value of each byte in each channel, float32 [3, 256], rounded step by step as in the library."""
        rescaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (rescaled - mean) / std

    def pixel_values(self, patches: Patches) -> npt.NDArray[np.float32]:
        """Return the library's `pixel_values` of patches: float32 [P, 3 * temporal_patch_size * patch_size**2]."""
        values = np.stack([self.normalization_table[c][patches.pixels[:, c]] for c in range(3)], axis=1)
        values = values.reshape(len(values), 3, -1, self.patch_size**2)
        frames = len(values), 3, self.temporal_patch_size, self.patch_size**2
        return np.broadcast_to(values, frames).reshape(len(values), -1)

    def settings(self, limits: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return all settings that change pixels or their number, as plain values; they are part of entry keys."""
        if limits and _RESIZED[0] in limits:
            own = {key: value for key, value in asdict(self).items() if key not in _LIMITS}
            return own | {"resized": self.grid(1, 1, limits)}
        return asdict(self.with_limits(limits))


# Defaults of the library's class for settings that a checkpoint leaves out. They are copied here because importing the
# class imports torch, if installed, which takes seconds.
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
    """Return the image processor's settings in a checkpoint, from the file where the library finds them."""
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
    """Return the settings with the library's defaults, and the limits as min_pixels and max_pixels."""
    given = {key: value for key, value in settings.items() if value is not None}
    kind = given.get("image_processor_type", _KIND)
    if kind not in (_KIND, f"{_KIND}Fast", f"{_KIND}Pil"):
        raise ValueError(f"image processor of {source} must be {_KIND}, got {shorten(str(kind))}")
    size = given.get("size", _DEFAULT_SIZE)
    limits = dict(zip(_LIMITS, map(size.get, _DEFAULT_SIZE), strict=True))
    limits |= {key: given[key] for key in _LIMITS if key in given}  # the names in the first checkpoints
    if None in limits.values():
        raise ValueError(f"size of {source} must have shortest_edge and longest_edge, got {given['size']}")
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
