"""Images on the host: from what a caller passes to the uint8 patches that the vision tower reads.

Two phases. `read_image` takes hold of an image without decoding it, so that a cache can hash the encoded bytes and skip
the rest; `ImageSource.decode` makes the RGB picture and finds everything that can be wrong with it. `ImageProcessor`
then resizes and cuts the picture into patches, bit for bit as transformers' PIL image processor does. Patches stay
uint8, an eighth of the float32 rows that hold every pixel twice: `normalization_table` turns bytes into values later.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import math
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_IMAGE_PIXELS = 2 * 89_478_485
"""Larger pictures are refused before their pixels are decoded: the size at which Pillow refuses by default."""

MAX_ASPECT_RATIO = 200
FETCH_SECONDS = 20.0
FETCH_BYTES = 64 * 1024**2

Grid = tuple[int, int, int]
"""Patches of an image: (1, rows, columns)."""

_ACCEPTED = "a path, bytes, a data: or http(s) URL, a PIL image or a uint8 array"
_LIMITS = ("min_pixels", "max_pixels")
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
_filter_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class ImageSource:
    """An image as the caller gave it, not decoded yet.

    Attributes:
        name: what error messages call it, such as "conversations[2] images[1]".
        value: the encoded file, or a PIL image or array, which must not change before `decode`.
    """

    name: str
    value: bytes | Image.Image | npt.NDArray[np.uint8] = field(repr=False)

    @property
    def encoded(self) -> bytes | None:
        """The encoded file; None for a PIL image or an array, which have none."""
        return self.value if isinstance(self.value, bytes) else None

    def decode(self, max_pixels: int = MAX_IMAGE_PIXELS) -> npt.NDArray[np.uint8]:
        """Returns the picture as RGB, uint8 [H, W, 3], in memory of its own.

        Encoded files are turned upright by their EXIF orientation and lose alpha without blending, as in transformers'
        `load_image`. PIL images and arrays are taken as they lie, with alpha or a transparent colour composited over
        white, as in transformers' image processors.

        Raises:
            ValueError: corrupt, truncated, empty, 16- or 32-bit grey, animated, over `max_pixels`, or more than 200
                times as long as wide.
        """
        if isinstance(self.value, np.ndarray):
            _check_size(self.value.shape[0], self.value.shape[1], self.name, max_pixels)
            return _array_to_rgb(self.value)
        with self._explained():
            image = _open(self.value) if isinstance(self.value, bytes) else self.value
            width, height = image.size
            # A camera's MPO file holds previews and gain maps beside the photo: no animation.
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        _check_size(height, width, self.name, max_pixels)
        if frames > 1:
            raise ValueError(f"{self.name} must be a single picture, got an image of {frames} frames")
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise ValueError(f"{self.name} must have 8 bits a channel, got mode {image.mode}")
        with self._explained():
            return np.array(_file_to_rgb(image) if isinstance(self.value, bytes) else _picture_to_rgb(image))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Pillow's decoders raise nearly anything on broken files
            reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error
            raise ValueError(
                f"{self.name} must be an image that Pillow can read and convert to RGB, "
                f"got {_describe(self.value)}: {reason}"
            ) from error


def read_image(value: Any, *, allow_remote: bool = False, name: str = "image") -> ImageSource:
    """Takes hold of an image: reads or fetches a file, decodes nothing.

    Args:
        value: a path, encoded bytes, a base64 `data:` URL, an http(s) URL, a PIL image, or a uint8 array
            [H, W], [H, W, 3] (RGB) or [H, W, 4] (RGBA).
        allow_remote: whether http(s) URLs are fetched.
        name: what error messages call the image.

    Raises:
        ValueError: another type, shape or dtype; a file that is missing, empty or unreadable; a URL that is not
            allowed, fails, or is larger than 64 MiB.
    """
    if isinstance(value, Image.Image):
        return ImageSource(name, value)
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))):
            raise ValueError(
                f"{name} must be an array of uint8 [H, W], [H, W, 3] or [H, W, 4], got {value.dtype} {value.shape}"
            )
        return ImageSource(name, value)
    if isinstance(value, bytes):
        encoded = value
    elif isinstance(value, str) and value[:5].lower() == "data:":
        encoded = _decode_data_url(value, name)
    elif isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")):
        if not allow_remote:
            raise ValueError(f"{name} must be local unless allow_remote_images=True, got {_describe(value)}")
        encoded = _fetch(value, name)
    elif isinstance(value, (str, PathLike)):
        encoded = _read_file(value, name)
    else:
        raise ValueError(f"{name} must be {_ACCEPTED}, got {_describe(value)}")
    if not encoded:
        raise ValueError(f"{name} must not be empty, got 0 bytes")
    return ImageSource(name, encoded)


def decode_base64(text: str, name: str) -> bytes:
    """Decodes base64, line breaks allowed; anything else outside its alphabet is a ValueError."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"{name} must be valid base64, got {_describe(text)}: {error}") from error


def check_limits(limits: Mapping[str, int] | None, name: str = "mm_processor_kwargs") -> dict[str, int]:
    """Returns `min_pixels` and `max_pixels`, those that are given, as a dict; None gives an empty one.

    Raises:
        ValueError: another key, or a value that is not a positive integer, or min_pixels above max_pixels.
    """
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise ValueError(f"{name} must be a dict with {' and '.join(_LIMITS)}, got {_describe(limits)}")
    for key, value in limits.items():
        if key not in _LIMITS:
            raise ValueError(f"{name} must hold only {' and '.join(_LIMITS)}, got {key!r}")
        _check_positive(value, f"{name} {key}")
    checked = dict(limits)
    if len(checked) == len(_LIMITS):
        _check_order(checked["min_pixels"], checked["max_pixels"], f"{name} ")
    return checked


class Patches(NamedTuple):
    """An image cut into patches.

    Attributes:
        pixels: uint8 [P, 3, patch_size * patch_size]. Each merge_size x merge_size block of patches lies together,
            blocks in raster order.
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
        for key in (*_LIMITS, "patch_size", "merge_size", "temporal_patch_size"):
            _check_positive(getattr(self, key), key)
        _check_order(self.min_pixels, self.max_pixels)
        for key in ("mean", "std"):
            if len(getattr(self, key)) != 3:
                raise ValueError(f"{key} must have 3 values, one a channel, got {getattr(self, key)}")
        if 0 in self.std:
            raise ValueError(f"std must not be 0, got {self.std}")
        if self.resample not in set(Image.Resampling):
            raise ValueError(f"resample must be one of Pillow's filters 0 to 5, got {self.resample}")

    @classmethod
    def from_pretrained(cls, directory: str | PathLike[str]) -> ImageProcessor:
        """Reads the settings of a checkpoint, from `preprocessor_config.json` or `processor_config.json`.

        Raises:
            ValueError: no such files, an image processor of another kind, or one that skips a step.
        """
        if not Path(directory).is_dir():
            raise ValueError(f"directory must be a checkpoint's directory, got {_describe(directory)}")
        settings = _read_settings(Path(directory))
        for step in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
            if settings[step] is not True:
                raise ValueError(f"{step} of {directory} must be true, got {settings[step]}")
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
            raise ValueError(f"image processor settings of {directory} must be usable: {error}") from error

    def with_limits(self, limits: Mapping[str, int] | None) -> ImageProcessor:
        """This processor with `limits`, that is `mm_processor_kwargs`: min_pixels, max_pixels or both.

        Raises:
            ValueError: see `check_limits`; also when one given limit contradicts the other one of this processor.
        """
        changes: dict[str, Any] = check_limits(limits)
        return replace(self, **changes) if changes else self

    def grid(self, height: int, width: int, limits: Mapping[str, int] | None = None, *, name: str = "image") -> Grid:
        """The patches of a picture of `height` x `width` pixels: (1, rows, columns), multiples of merge_size.

        Both sides are rounded to whole blocks, half to even; then the area is brought within the limits.

        Raises:
            ValueError: an empty picture, or one more than 200 times as long as wide.
        """
        _check_size(height, width, name)
        bounds = self.with_limits(limits)
        block = self.patch_size * self.merge_size
        rows, columns = round(height / block), round(width / block)
        if rows * columns * block**2 > bounds.max_pixels:
            shrink = math.sqrt((height * width) / bounds.max_pixels)
            rows = max(1, math.floor(height / shrink / block))
            columns = max(1, math.floor(width / shrink / block))
        elif rows * columns * block**2 < bounds.min_pixels:
            grow = math.sqrt(bounds.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / block), math.ceil(width * grow / block)
        return 1, rows * self.merge_size, columns * self.merge_size

    def num_tokens(self, grid: Grid) -> int:
        """Tokens that an image of this patch grid takes in the prompt."""
        return math.prod(grid) // self.merge_size**2

    def patches(self, rgb: npt.NDArray[np.uint8], limits: Mapping[str, int] | None = None) -> Patches:
        """Resizes a picture, uint8 [H, W, 3], to its grid and cuts it into patches."""
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
            raise ValueError(f"rgb must be uint8 [H, W, 3], got {rgb.dtype} {rgb.shape}")
        grid = self.grid(rgb.shape[0], rgb.shape[1], limits)
        _, rows, columns = grid
        patch, merge = self.patch_size, self.merge_size
        resized = Image.fromarray(rgb).resize((columns * patch, rows * patch), Image.Resampling(self.resample))
        pixels = np.asarray(resized).reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        pixels = pixels.transpose(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row, column, channel, y, x
        return Patches(pixels.reshape(rows * columns, 3, patch * patch), grid)

    @cached_property
    def normalization_table(self) -> npt.NDArray[np.float32]:
        """The value of each byte in each channel, float32 [3, 256], rounded step by step as in the library."""
        rescaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (rescaled - mean) / std

    def pixel_values(self, patches: Patches) -> npt.NDArray[np.float32]:
        """The library's `pixel_values` of these patches: float32 [P, 3 * temporal_patch_size * patch_size**2]."""
        values = np.stack([self.normalization_table[c][patches.pixels[:, c]] for c in range(3)], axis=1)
        return np.repeat(values[:, :, None], self.temporal_patch_size, axis=2).reshape(len(values), -1)

    def settings(self, limits: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Everything here that changes pixels or their number, as plain values: a part of cache keys."""
        return asdict(self.with_limits(limits))


def _read_settings(directory: Path) -> dict[str, Any]:
    """The image processor's settings, found and completed as the library does; its limits as min_ and max_pixels."""
    given: Any = None
    try:
        for name in ("processor_config.json", "preprocessor_config.json"):
            if given is None and (directory / name).is_file():
                given = json.loads((directory / name).read_text(encoding="utf-8"))
                if name == "processor_config.json":
                    given = given.get("image_processor")
        if given is None:
            raise ValueError("there is neither")
        kind = given.get("image_processor_type") or _KIND
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{directory} must describe its image processor in preprocessor_config.json or processor_config.json: "
            f"{_short(str(error))}"
        ) from error
    if kind not in (_KIND, f"{_KIND}Fast", f"{_KIND}Pil"):
        raise ValueError(f"image processor of {directory} must be {_KIND}, got {_short(str(kind))}")
    size = given.get("size")
    size = _DEFAULT_SIZE if size is None else size if isinstance(size, dict) else {}
    limits = dict(zip(_LIMITS, map(size.get, _DEFAULT_SIZE), strict=True))
    limits |= {key: given[key] for key in _LIMITS if given.get(key) is not None}  # how the first checkpoints say it
    if None in limits.values():
        raise ValueError(f"size of {directory} must hold shortest_edge and longest_edge, got {given['size']}")
    return {**_DEFAULTS, **given, **limits}


def _check_size(height: int, width: int, name: str, max_pixels: int | None = None) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"{name} must have at least 1x1 pixels, got {height}x{width}")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"{name} must have an aspect ratio of at most {MAX_ASPECT_RATIO}, got {height}x{width}")
    if max_pixels is not None and height * width > max_pixels:
        raise ValueError(f"{name} must have at most {max_pixels} pixels, got {height}x{width}")


def _check_positive(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_order(min_pixels: int, max_pixels: int, prefix: str = "") -> None:
    if min_pixels > max_pixels:
        raise ValueError(f"{prefix}min_pixels must be at most max_pixels {max_pixels}, got {min_pixels}")


def _three_floats(value: Any) -> tuple[float, float, float]:
    first, second, third = (value, value, value) if isinstance(value, (int, float)) else value
    return float(first), float(second), float(third)


def _open(encoded: bytes) -> Image.Image:
    # Pillow warns at half of the size that it refuses; where warnings are errors that would be another limit.
    with _filter_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(encoded))


def _file_to_rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    image.info.pop("transparency", None)  # without effect on RGB, but Pillow warns about it in palettes
    return image.convert("RGB")


def _picture_to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def _array_to_rgb(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if array.ndim == 2:
        return np.repeat(array[:, :, None], 3, axis=2)
    if array.shape[2] == 4:
        alpha = array[..., 3:] / 255
        return np.round(alpha * array[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    return np.array(array, order="C")


def _decode_data_url(url: str, name: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ValueError(f"{name} must be a data URL of the form data:image/png;base64,..., got {_describe(url)}")
    return decode_base64(payload, name)


def _read_file(path: str | PathLike[str], name: str) -> bytes:
    try:
        if Path(path).is_file():
            return Path(path).read_bytes()
        reason = "no such file"
    except (OSError, TypeError, ValueError) as error:
        reason = str(error)
    raise ValueError(f"{name} must be the path of a readable file, got {_describe(path)}: {_short(reason)}")


def _fetch(url: str, name: str) -> bytes:
    opener = urllib.request.OpenerDirector()
    # urllib's default opener would also follow a redirect to ftp.
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    deadline = time.monotonic() + FETCH_SECONDS
    received = bytearray()
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "vlcache-jax"})
        with opener.open(request, timeout=FETCH_SECONDS) as response:
            while chunk := response.read1(1 << 16):
                received += chunk
                if len(received) > FETCH_BYTES:
                    raise ValueError(f"more than {FETCH_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {FETCH_SECONDS} s")
            if response.length:
                raise http.client.IncompleteRead(bytes(received), response.length)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{name} must be a URL that can be fetched, got {_describe(url)}: {error}") from error
    return bytes(received)


def _describe(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, Image.Image):
        return f"a PIL image of mode {value.mode}"
    if isinstance(value, (str, PathLike)):
        return _short(repr(str(value)))
    return _short(f"{type(value).__name__} {value!r}")


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:120]}... ({len(text)} characters)"
