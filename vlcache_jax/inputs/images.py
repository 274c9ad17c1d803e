"""Images on the host: from what a caller passes to an RGB picture.

Three phases. `read_image` takes hold of an image without decoding it, so that a cache can hash the encoded bytes and
skip the rest; `ImageSource.size` reads the head of the file and refuses what the head decides; `ImageSource.decode`
makes the RGB picture and finds everything else that can be wrong with it.
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
"""Of files; whatever else Pillow reads stays closed, such as EPS, which runs another program."""

MAX_IMAGE_PIXELS = 50_000_000
"""Larger pictures are refused before their pixels are decoded, unless the engine is told otherwise."""

MOST_IMAGE_PIXELS = 2 * 89_478_485
"""The highest such limit: the size at which Pillow refuses."""

MAX_ASPECT_RATIO = 200
_MAX_RUN_PIXELS = 1 << 22  # which Pillow decodes in Python

_ACCEPTED = "a path, bytes, an open binary file, a data:, file: or http(s) URL, a PIL image or a uint8 array"
_BASE64 = re.compile(r"[A-Za-z0-9+/_=\s-]+")
# How PNG, JPEG, GIF, WebP, TIFF, mp4 and Matroska begin in base64. Of what is longer than any path the letters are
# enough.
_BASE64_BEGINS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkq", "TU0AK", "AAAA", "GkXf")
_LONGEST_PATH = 4096
_PIECE = 1 << 22  # characters of base64 that are decoded in one call
_URL = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_NO_VIDEO = (b"avif", b"avis", b"hei", b"hev", b"mif1", b"msf1")  # brands of pictures in files like those of videos
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations in EXIF that swap height and width
_filter_lock = threading.Lock()
_loading = threading.Lock()


@dataclass(frozen=True, eq=False)
class ImageSource:
    """An image as the caller gave it, not decoded yet.

    Attributes:
        name: what error messages call it, such as "conversations[2] images[1]".
        value: the encoded file, or a PIL image or array, which must not change before `decode`.
        limits: of its pixels, as its part of a message says them (`processor.check_own_limits`).
    """

    name: str
    value: bytes | Image.Image | npt.NDArray[np.uint8] = field(repr=False)
    limits: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def encoded(self) -> bytes | None:
        """The encoded file; None for a PIL image or an array, which have none."""
        return self.value if isinstance(self.value, bytes) else None

    @property
    def mark(self) -> bytes | None:
        """What tells it for sure without decoding it; None: nothing does."""
        return self.value if isinstance(self.value, bytes) else None

    def size(self, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
        """Height and width, as far as the head of the file tells. Decodes no pixel.

        EXIF that stands behind the pixels, as it may in a PNG, is not seen: `decode` may turn such a picture.

        Raises:
            ValueError: see `decode`, but for what only the pixels show.
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
        """Returns the picture as RGB, uint8 [H, W, 3], in memory of its own.

        It is what a viewer shows on a white page: files and PIL images are turned upright by their EXIF orientation,
        and alpha or a transparent colour is composited over white. (Of files, transformers' `load_image` drops alpha,
        which leaves whatever colour is below; Qwen's own utility paints white.) Of a file of several frames or pages it
        is the first one, of such a PIL image the one that it stands at.

        Raises:
            ValueError: corrupt, truncated, empty, of another format than `FORMATS`, 16- or 32-bit grey, over
                `max_pixels`, more than 200 times as long as wide, or with more metadata than `image_headers.MOST`
                allows.
        """
        if isinstance(self.value, np.ndarray):
            self.size(max_pixels)
            return _array_to_rgb(self.value)
        image = self._opened(self.value, max_pixels)
        with self._explained():
            with _loading if self.encoded is None else nullcontext():
                # The caller's own image may be asked about in several calls.
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
            raise ValueError(f"{self.name} must have 8 bits a channel, got mode {image.mode}")
        return image

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Pillow's decoders raise nearly anything on broken files
            unknown = f"unknown format, none of {', '.join(FORMATS)}"
            if isinstance(self.value, bytes) and _is_film(self.value):
                unknown = "it is a video, so give it as one"
            reason = unknown if isinstance(error, UnidentifiedImageError) else str(error) or type(error).__name__
            raise ValueError(
                f"{self.name} must be an image that Pillow can read and convert to RGB, "
                f"got {describe(self.value)}: {reason}"
            ) from error


class Named(NamedTuple):
    """An item of a library (`vlcache_jax.library`).

    Attributes:
        library, id: its name.
    """

    library: str
    id: str


@dataclass(frozen=True, eq=False, kw_only=True)
class NamedImage(ImageSource):
    """An image that stands in a library, which need not have its bytes: only who knows the libraries sees it.

    Attributes:
        named: where.
    """

    value: bytes | Image.Image | npt.NDArray[np.uint8] = field(default=b"", repr=False)
    named: Named

    @property
    def encoded(self) -> None:
        return None

    @property
    def mark(self) -> None:
        return None

    def size(self, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
        raise ValueError(f"{self.name} must be an image itself, got an item of library {self.named.library!r}")

    def decode(self, max_pixels: int = MAX_IMAGE_PIXELS) -> npt.NDArray[np.uint8]:
        raise ValueError(f"{self.name} must be an image itself, got an item of library {self.named.library!r}")


def read_image(value: Any, *, access: Access = LOCAL_ONLY, name: str = "image") -> ImageSource:
    """Takes hold of an image: reads or fetches a file, decodes nothing.

    Args:
        value: a path ("~" is the home directory), encoded bytes, a file that is open for reading bytes, a base64
            `data:` URL, a file:// or http(s) URL, a PIL image, or a uint8 array [H, W], [H, W, 3] (RGB) or [H, W, 4]
            (RGBA).
        access: what may be read from where.
        name: what error messages call the image.

    Raises:
        ValueError: another type, shape or dtype; a file that is missing, empty or unreadable; a URL that fails;
            what `access` does not allow, or more bytes than it allows.
    """
    if isinstance(value, Named):
        return NamedImage(name=name, named=value)
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
    """The bytes of a file: given as such, open, or by its path or URL.

    Args:
        accepted: what the value may be, for errors.

    Raises:
        ValueError: see `read_image`.
    """
    if isinstance(value, bytes):
        encoded = value
        begin = value[: _LONGEST_PATH + 1].decode("latin-1")  # megabytes of pixels are not decoded as text
        if begin[:64].isascii() and is_base64(begin) and is_base64(value.decode("latin-1")):
            raise ValueError(f"{name} must be the bytes of a file, got base64 alone: decode its {len(value)} bytes")
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
                    f'{name} must be a data URL, got base64 alone: put "data:image/png;base64,", or what else it is, '
                    f"before its {len(value)} characters"
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
    """Whether a text is rather an encoded file than the path of one."""
    begins = text.startswith(_BASE64_BEGINS) and len(text) > 32
    return (begins or len(text) > _LONGEST_PATH) and _BASE64.fullmatch(text) is not None


def is_url(text: str) -> bool:
    """Whether a text is a URL of any kind, rather than a path."""
    return _URL.match(text) is not None


def _is_film(encoded: bytes) -> bool:
    """Whether a file begins as an mp4, or what is like it, or a Matroska does."""
    return encoded.startswith(b"\x1a\x45\xdf\xa3") or (
        encoded[4:8] == b"ftyp" and not encoded[8:12].startswith(_NO_VIDEO)
    )


def _file_of_url(url: str, name: str) -> str:
    """The path that a file:// URL names."""
    host, slash, path = url[7:].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"{name} must be a file:// URL of this machine, such as file:///tmp/a.png, got {shorten(url)}")
    return unquote(slash + path)


def check_max_pixels(value: Any) -> None:
    """Raises a ValueError unless it can be the limit of a picture's pixels."""
    check_whole("max_image_pixels", value, 1, MOST_IMAGE_PIXELS)


def check_picture_size(height: int, width: int, name: str, max_pixels: int | None = None) -> None:
    """Raises a ValueError if a picture is empty, too long for its width, or has more than `max_pixels`."""
    if height < 1 or width < 1:
        raise ValueError(f"{name} must have at least 1x1 pixels, got {height}x{width}")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"{name} must have an aspect ratio of at most {MAX_ASPECT_RATIO}, got {height}x{width}")
    if max_pixels is not None and height * width > max_pixels:
        raise ValueError(f"{name} must have at most {max_pixels} pixels, got {height}x{width}")


def _open(encoded: bytes) -> Image.Image:
    # Pillow warns at half of the size that it refuses; where warnings are errors that would be another limit.
    with _filter_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(Reader(encoded), formats=FORMATS)


def _check_work(image: Image.Image, name: str, max_pixels: int) -> None:
    """Refuses what takes far more time or memory to decode than the picture's size says."""
    area = math.prod(image.size)
    if area > _MAX_RUN_PIXELS and any(tile.codec_name == "bmp_rle" for tile in _tiles(image)):
        raise ValueError(f"{name} must have at most {_MAX_RUN_PIXELS} pixels as a BMP of runs, got {area}")
    if isinstance(image, TiffImageFile) and (tile := [image.tag_v2.get(tag) for tag in (322, 323)]) != [None, None]:
        # A tile is decoded whole, however little of it the picture shows. Small ones are no matter.
        area = math.prod(-(-size // side) * side if side else size for size, side in zip(image.size, tile, strict=True))
        if area > max(max_pixels, 1 << 20):
            raise ValueError(f"{name} must have at most {max_pixels} pixels, got tiles of {tile[1]}x{tile[0]}")


def _upright(image: Image.Image) -> Image.Image:
    # Where nothing is to be turned, Pillow would copy it.
    return image if _orientation(image.getexif) == 1 else ImageOps.exif_transpose(image)


def _first_exif(image: Image.Image) -> Image.Exif:
    """What stands before the pixels; for the picture's own, Pillow may go through all of the file."""
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    return exif


def _orientation(read_exif: Callable[[], Image.Exif]) -> int:
    """How a picture lies; EXIF that nobody can read says nothing."""
    try:
        return read_exif().get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, TypeError, struct.error):
        return 1


def _load(image: Image.Image) -> None:
    """Loads the pixels. Of a PNG with 2, 4 or 16 bits a sample Pillow makes 8, but not of the transparent colour's."""
    stored = [tile.args for tile in _tiles(image)[:1]]
    image.load()
    match stored, image.info.get("transparency"):
        case ["L;2" | "L;4"], int(clear):
            image.info["transparency"] = clear * (85 if stored == ["L;2"] else 17)
        case ["RGB;16B"], tuple(clear):
            image.info["transparency"] = tuple(value >> 8 for value in clear)


def _tiles(image: Image.Image) -> Sequence[Any]:
    """How the pixels lie in the file of a picture; nothing once they are loaded."""
    return image.tile if isinstance(image, ImageFile.ImageFile) else ()


def _picture_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # Pillow knows no way from it to others
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
    access.check_size(3 * (characters // 4) - 2, name)  # before it is decoded; 2 characters may be padding
    try:
        encoded = payload.encode("ascii")
        return _decoded(encoded if characters == len(payload) else encoded.translate(None, string.whitespace.encode()))
    except ValueError as error:
        raise ValueError(f"{name} must be valid base64, got {describe(payload)}: {error}") from error


def _decoded(encoded: bytes) -> bytes:
    """Of base64, in pieces: other threads run between them."""
    pieces = [base64.b64decode(encoded[i : i + _PIECE], validate=True) for i in range(0, len(encoded), _PIECE)]
    if any(len(piece) < 3 * _PIECE // 4 for piece in pieces[:-1]):
        raise ValueError("Excess data after padding")
    return b"".join(pieces)


def trimmed(url: str) -> str:
    """A `data:` URL without the bytes after the end of its image; any other URL as it is."""
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
