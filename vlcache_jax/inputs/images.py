"""Images on the host: reading, checks and decoding to RGB.

`read_image` reads an image without decoding it, so that a cache can hash the encoded bytes and skip the rest.
`ImageSource.size` reads the file header and refuses what the header shows to be wrong. `ImageSource.decode` returns the
RGB image and finds all other faults.
"""

from __future__ import annotations

import base64
import math
import re
import string
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from vlcache_jax.common.checks import check_whole, short, shorten
from vlcache_jax.inputs.access import LOCAL_ONLY, Access
from vlcache_jax.inputs.image_headers import Reader, check_parts, end_of

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Accepted file formats. Others that Pillow reads are refused, such as EPS, which runs another program."""

MAX_IMAGE_PIXELS = 50_000_000
"""Default maximum of pixels. Larger images are refused before decoding."""

PILLOW_MAX_PIXELS = 2 * 89_478_485
"""Highest value of that option: the number of pixels at which Pillow refuses."""

MAX_ASPECT_RATIO = 200
_MAX_RUN_PIXELS = 1 << 22  # of run-length BMPs, which Pillow decodes in Python

_ACCEPTED = "a path, bytes, an open binary file, a data:, file: or http(s) URL, a PIL image or a uint8 array"
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]+")
# First characters of PNG, JPEG, GIF, WebP, TIFF, mp4 and Matroska in base64. A string longer than any path needs only
# the base64 alphabet.
_BASE64_BEGINS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkq", "TU0AK", "AAAA", "GkXf")
_LONGEST_PATH = 4096
_PIECE = 1 << 22  # base64 characters decoded in one call
_URL = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_NO_VIDEO = (b"avif", b"avis", b"hei", b"hev", b"mif1", b"msf1")  # brands of images in containers of videos
_ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_filter_lock = threading.Lock()
_loading = threading.Lock()


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Image as given by the caller, not decoded yet.

    Attributes:
        name: name in errors, such as "conversations[2] images[1]".
        value: the encoded file, or a PIL image or array, which must not change before `decode`.
        limits: pixel limits in the image's part of a message (`processor.check_own_limits`).
    """

    name: str
    value: bytes | Image.Image | npt.NDArray[np.uint8] = field(repr=False)
    limits: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def encoded(self) -> bytes | None:
        """The encoded file; None for a PIL image or an array."""
        return self.value if isinstance(self.value, bytes) else None

    @property
    def mark(self) -> bytes | None:
        """Bytes that identify the image without decoding it, or None."""
        return self.value if isinstance(self.value, bytes) else None

    def size(self, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
        """Return height and width from the file header, without decoding pixels.

        It does not read EXIF data after the pixels, as in some PNGs: `decode` may rotate such an image.

        Raises:
            ValueError: see `decode`, except for faults that only the pixels show.
        """
        if isinstance(self.value, np.ndarray):
            height, width = self.value.shape[:2]
            check_picture_size(height, width, self.name, max_pixels)
            return height, width
        image = self._opened(self.value, max_pixels)
        with self._explained():
            width, height = image.size
            return (width, height) if _orientation(lambda: _first_exif(image)) in _ON_ITS_SIDE else (height, width)

    def decode(self, max_pixels: int = MAX_IMAGE_PIXELS) -> npt.NDArray[np.uint8]:
        """Return the image as RGB, uint8 [H, W, 3], in memory of its own.

        The result is what a viewer shows on a white page. Files and PIL images are rotated by their EXIF orientation.
        Alpha and transparent colors are composited over white, as in Qwen's utility; transformers' `load_image` drops
        alpha and leaves the color below. Of a file with several frames or pages, it returns the first one; of a PIL
        image, the current one.

        Raises:
            ValueError: the image is corrupt, truncated, empty, not in `FORMATS`, 16- or 32-bit gray, over
                `max_pixels`, has an aspect ratio over 200, or more metadata than `image_headers.LIMITS` allows.
        """
        if isinstance(self.value, np.ndarray):
            self.size(max_pixels)
            return _array_to_rgb(self.value)
        image = self._opened(self.value, max_pixels)
        with self._explained():
            with _loading if self.encoded is None else nullcontext():
                # Several calls may use the caller's image at once.
                _load(image)
                image = _upright(image)
            return np.asarray(_picture_to_rgb(image))

    def _opened(self, value: bytes | Image.Image, max_pixels: int) -> Image.Image:
        if isinstance(value, bytes):
            check_parts(value, self.name)
        with self._explained():
            image = _open(value) if isinstance(value, bytes) else value
            width, height = image.size
        check_picture_size(height, width, self.name, max_pixels)
        if isinstance(value, bytes):
            _check_work(image, self.name, max_pixels)
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise ValueError(
                f"{self.name} must have 8 bits per channel, got mode {image.mode}: convert it to 8 bits first"
            )
        return image

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Pillow's decoders raise many types of errors on broken files
            unknown = f"unknown format, none of {', '.join(FORMATS)}"
            if isinstance(self.value, bytes) and _is_video_file(self.value):
                unknown = "it is a video; pass it as a video"
            reason = unknown if isinstance(error, UnidentifiedImageError) else str(error) or type(error).__name__
            raise ValueError(
                f"{self.name} must be an image that Pillow can read and convert to RGB, "
                f"got {describe(self.value)}: {reason}"
            ) from error


class LibraryItemRef(NamedTuple):
    """Item of a library (`vlcache_jax.library`).

    Attributes:
        library, id: names of the library and of the item.
    """

    library: str
    id: str


@dataclass(frozen=True, eq=False, kw_only=True)
class LibraryImageRef(ImageSource):
    """Image of a library, without its bytes. Only the recognizer, which has the libraries, can read it.

    Attributes:
        named: library and item.
    """

    value: bytes | Image.Image | npt.NDArray[np.uint8] = field(default=b"", repr=False)
    named: LibraryItemRef

    @property
    def encoded(self) -> None:
        return None

    @property
    def mark(self) -> None:
        return None

    def size(self, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
        raise ValueError(f"{self.name} must be an image, got an item of library {self.named.library!r}")

    def decode(self, max_pixels: int = MAX_IMAGE_PIXELS) -> npt.NDArray[np.uint8]:
        raise ValueError(f"{self.name} must be an image, got an item of library {self.named.library!r}")


def read_image(value: Any, *, access: Access = LOCAL_ONLY, name: str = "image") -> ImageSource:
    """Read or fetch an image, without decoding it.

    Args:
        value: a path ("~" is the home directory), encoded bytes, an open binary file, a base64 `data:` URL, a file://
            or http(s) URL, a PIL image, or a uint8 array [H, W], [H, W, 3] (RGB) or [H, W, 4] (RGBA).
        access: rules for reading files and URLs.
        name: name of the image in errors.

    Raises:
        ValueError: `value` has another type, shape or dtype; the file is missing, empty or unreadable; the URL fails;
            `access` does not allow it, or it exceeds the size limit.
    """
    if isinstance(value, LibraryItemRef):
        return LibraryImageRef(name=name, named=value)
    if isinstance(value, Image.Image):
        return ImageSource(name, value)
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))):
            raise ValueError(
                f"{name} must be an array of uint8 [H, W], [H, W, 3] or [H, W, 4], got {value.dtype} {value.shape}"
            )
        return ImageSource(name, value)
    return ImageSource(name, read_encoded(value, _ACCEPTED, access=access, name=name))


def read_encoded(value: Any, accepted: str, *, access: Access, name: str) -> bytes:
    """Return the bytes of a file that is given as bytes, as an open file, or by its path or URL.

    Args:
        accepted: description of accepted values, for errors.

    Raises:
        ValueError: see `read_image`.
    """
    if isinstance(value, bytes):
        encoded = value
        begin = value[: _LONGEST_PATH + 1].decode("latin-1")  # do not decode megabytes of pixels as text
        if begin[:64].isascii() and is_base64(begin) and is_base64(value.decode("latin-1")):
            raise ValueError(f"{name} must be the bytes of a file, got {len(value)} bytes of base64: decode them first")
    elif isinstance(value, str) and value[:5].lower() == "data:":
        encoded = _decode_data_url(value, access, name)
    elif isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")):
        encoded = access.fetch(value, name)
    elif isinstance(value, str) and value[:7].lower() == "file://":
        encoded = access.read_file(_file_of_url(value, name), name)
    elif isinstance(value, (str, PathLike)):
        try:
            encoded = access.read_file(value, name)
        except ValueError:
            if isinstance(value, str) and is_base64(value):
                raise ValueError(
                    f"{name} must be a data URL, got {len(value)} characters of base64: put "
                    '"data:image/png;base64,", or the prefix of its type, before them'
                ) from None
            if isinstance(value, str) and is_url(value):
                raise ValueError(
                    f"{name} must be a path, or a URL that begins with data:, file://, http:// or https://, "
                    f"got {describe(value)}"
                ) from None
            raise
    elif callable(getattr(value, "read", None)):
        encoded = access.read_open(value, name)
    else:
        raise ValueError(f"{name} must be {accepted}, got {describe(value)}")
    if not encoded:
        raise ValueError(f"{name} must not be empty, got 0 bytes")
    access.check_size(len(encoded), name)
    return encoded


def is_base64(text: str) -> bool:
    """Return whether a text looks like an encoded file rather than a path."""
    begins = text.startswith(_BASE64_BEGINS) and len(text) > 32
    return (begins or len(text) > _LONGEST_PATH) and _BASE64.fullmatch(text) is not None


def is_url(text: str) -> bool:
    """Return whether a text is a URL of any kind rather than a path."""
    return _URL.match(text) is not None


def _is_video_file(encoded: bytes) -> bool:
    """Return whether a file begins like an mp4 or a related format, or like a Matroska file."""
    return encoded.startswith(b"\x1a\x45\xdf\xa3") or (
        encoded[4:8] == b"ftyp" and not encoded[8:12].startswith(_NO_VIDEO)
    )


def _file_of_url(url: str, name: str) -> str:
    """Return the path of a file:// URL."""
    host, slash, path = url[7:].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"{name} must be a file:// URL of this machine, such as file:///tmp/a.png, got {shorten(url)}")
    return unquote(slash + path)


def check_max_pixels(value: Any) -> None:
    """Raise a ValueError unless `value` is a valid limit for an image's pixels."""
    check_whole("max_image_pixels", value, 1, PILLOW_MAX_PIXELS)


def check_picture_size(height: int, width: int, name: str, max_pixels: int | None = None) -> None:
    """Raise a ValueError if an image is empty, has an aspect ratio over 200, or has more than `max_pixels`."""
    if height < 1 or width < 1:
        raise ValueError(f"{name} must have at least 1x1 pixels, got {height}x{width}")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"{name} must have an aspect ratio of at most {MAX_ASPECT_RATIO}, got {height}x{width}")
    if max_pixels is not None and height * width > max_pixels:
        raise ValueError(
            f"{name} must have at most {max_pixels} pixels, got {height}x{width}: "
            "scale it down, or raise max_image_pixels"
        )


def _open(encoded: bytes) -> Image.Image:
    # Pillow warns at half of the size that it refuses. If warnings are errors, that would be another limit.
    with _filter_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(Reader(encoded), formats=FORMATS)


def _check_work(image: Image.Image, name: str, max_pixels: int) -> None:
    """Raise a ValueError if decoding takes far more time or memory than the image's size suggests."""
    area = math.prod(image.size)
    if area > _MAX_RUN_PIXELS and any(tile.codec_name == "bmp_rle" for tile in _tiles(image)):
        raise ValueError(f"{name} must have at most {_MAX_RUN_PIXELS} pixels as a run-length-encoded BMP, got {area}")
    if isinstance(image, TiffImageFile) and (tile := [image.tag_v2.get(tag) for tag in (322, 323)]) != [None, None]:
        # Tiles are decoded in full, even if the image shows little of them. Small ones are harmless.
        area = math.prod(-(-size // side) * side if side else size for size, side in zip(image.size, tile, strict=True))
        if area > max(max_pixels, 1 << 20):
            raise ValueError(f"{name} must have at most {max_pixels} pixels, got tiles of {tile[1]}x{tile[0]}")


def _upright(image: Image.Image) -> Image.Image:
    # `exif_transpose` copies an image that needs no rotation.
    return image if _orientation(image.getexif) == 1 else ImageOps.exif_transpose(image)


def _first_exif(image: Image.Image) -> Image.Exif:
    """Return the EXIF data before the pixels; `image.getexif` may read the full file."""
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    return exif


def _orientation(read_exif: Callable[[], Image.Exif]) -> int:
    """Return the EXIF orientation of an image; 1 if its EXIF data cannot be read."""
    try:
        return read_exif().get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, TypeError, struct.error):
        return 1


def _load(image: Image.Image) -> None:
    """Load the pixels. Pillow converts PNG samples of 2, 4 or 16 bits to 8, but not the transparent color."""
    stored = [tile.args for tile in _tiles(image)[:1]]
    image.load()
    match stored, image.info.get("transparency"):
        case ["L;2" | "L;4"], int(clear):
            image.info["transparency"] = clear * (85 if stored == ["L;2"] else 17)
        case ["RGB;16B"], tuple(clear):
            image.info["transparency"] = tuple(value >> 8 for value in clear)


def _tiles(image: Image.Image) -> Sequence[Any]:
    """Return the layout of the pixels in an image's file; empty once they are loaded."""
    return image.tile if isinstance(image, ImageFile.ImageFile) else ()


def _picture_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # Pillow converts this mode to no other
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _array_to_rgb(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if array.ndim == 2:
        return np.repeat(array[:, :, None], 3, axis=2)
    if array.shape[2] == 4:
        alpha = array[..., 3:] / 255
        return np.round(alpha * array[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    return np.array(array, order="C")


def _decode_data_url(url: str, access: Access, name: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ValueError(f"{name} must be a data URL of the form data:image/png;base64,..., got {describe(url)}")
    characters = len(payload) - sum(map(payload.count, string.whitespace))
    access.check_size(3 * (characters // 4) - 2, name)  # before decoding; up to 2 characters are padding
    try:
        encoded = payload.encode("ascii")
        return _decoded(encoded if characters == len(payload) else encoded.translate(None, string.whitespace.encode()))
    except ValueError as error:
        raise ValueError(f"{name} must be valid base64, got {describe(payload)}: {error}") from error


def _decoded(encoded: bytes) -> bytes:
    """Decode base64 in pieces, so that other threads can run between them."""
    pieces = [base64.b64decode(encoded[i : i + _PIECE], validate=True) for i in range(0, len(encoded), _PIECE)]
    if any(len(piece) < 3 * _PIECE // 4 for piece in pieces[:-1]):
        raise ValueError("Excess data after padding")
    return b"".join(pieces)


def trimmed(url: str) -> str:
    """Return a `data:` URL without the bytes after the end of its image, and any other URL unchanged."""
    try:
        encoded = _decode_data_url(url, LOCAL_ONLY, "image") if url[:5].lower() == "data:" else b""
    except ValueError:
        return url
    if (end := end_of(encoded)) == len(encoded):
        return url
    return f"{url.partition(',')[0]},{base64.b64encode(encoded[:end]).decode()}"


def describe(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, Image.Image):
        return f"a PIL image of mode {value.mode}"
    if isinstance(value, (str, PathLike)):
        return short(str(value), 200)
    return f"{type(value).__name__} {short(value, 200)}"
