import base64
import contextlib
import io
import itertools
import json
import math
import os
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
import transformers
from PIL import Image, ImageFile, ImageOps

from vlcache_jax.cache.keys import content_key, entry_key
from vlcache_jax.inputs.access import Access
from vlcache_jax.inputs.images import PILLOW_MAX_PIXELS, read_image
from vlcache_jax.inputs.processor import ImageProcessor, Patches, check_limits, check_own_limits, overrule
from vlcache_jax.inputs.videos import read_video
from vlcache_jax.models import qwen2_vl

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
QWEN2_5 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# Numbers that nobody publishes, all different, a filter of another kind.
UNEVEN = {
    **QWEN3,
    "size": {"shortest_edge": 20000, "longest_edge": 30000},
    "patch_size": 6,
    "temporal_patch_size": 3,
    "merge_size": 3,
    "image_mean": [0.1, 0.2, 0.7],
    "image_std": [0.9, 0.3, 0.4],
    "rescale_factor": 0.005,
    "resample": 2,
}
FAMILIES = {
    "qwen2": {**qwen2_vl.FAMILY.published.image_processor},
    "qwen2_5": QWEN2_5,
    "qwen3": QWEN3,
    "uneven": UNEVEN,
}
SIZES = [(300, 200), (70, 70), (10, 10), (331, 517), (17, 950), (801, 9), (28, 56), (640, 480)]


def textured(height, width, channels=3, seed=0):
    """Noise on a slope: every resize filter and every swap of axes shows."""
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, channels))
    y, x = np.mgrid[:height, :width]
    return (noise + (3 * y + 5 * x)[..., None] % 128).astype(np.uint8)


def encode(image, suffix="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, suffix, **options)
    return buffer.getvalue()


def librarys_rgb(picture):
    """What the library makes of a picture. It is imported by who needs it: it imports torch."""
    from transformers.image_transforms import convert_to_rgb

    return convert_to_rgb(picture, return_numpy=True)


def load_with_library(encoded):
    """What the library's processor makes of a file that was opened with Pillow: upright, on white.

    Its own `load_image` takes alpha away before, and with it the ink.
    """
    with Image.open(io.BytesIO(encoded)) as opened:
        return librarys_rgb(ImageOps.exif_transpose(opened))


def pictures():
    """One picture of each mode, with alpha or a transparent colour wherever the mode can have it."""
    rgba = Image.fromarray(textured(40, 50, 4))
    rgb, gray = rgba.convert("RGB"), rgba.convert("L")
    palette = rgb.quantize(50)
    one_clear = palette.copy()
    one_clear.info["transparency"] = 7
    many_clear = palette.copy()
    many_clear.info["transparency"] = bytes(range(0, 250, 5))
    gray_clear = gray.copy()
    gray_clear.info["transparency"] = 90
    bilevel = rgb.convert("1")
    bilevel.info["transparency"] = 255
    rgb_clear = rgb.copy()
    rgb_clear.info["transparency"] = rgb.getpixel((3, 3))
    return {
        "RGB": rgb,
        "RGB transparent": rgb_clear,
        "RGBA": rgba,
        "L": gray,
        "L transparent": gray_clear,
        "LA": rgba.convert("LA"),
        "P": palette,
        "P one clear": one_clear,
        "P many clear": many_clear,
        "PA": palette.convert("PA"),
        "P of RGBA": rgba.quantize(50),
        "RGBa": rgba.convert("RGBa"),
        "La": rgba.convert("LA").convert("La"),
        "CMYK": rgb.convert("CMYK"),
        "YCbCr": rgb.convert("YCbCr"),
        "HSV": rgb.convert("HSV"),
        "1": rgb.convert("1"),
        "1 transparent": bilevel,
    }


OVERLOOKED = ("P of RGBA", "RGBa", "La")
"""Modes whose alpha the library does not see: in a palette, and premultiplied."""


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """Our processor and the library's, from one directory."""
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "preprocessor_config.json").write_text(json.dumps(FAMILIES[request.param]))
    return ImageProcessor.from_pretrained(directory), transformers.AutoImageProcessor.from_pretrained(
        directory, backend="pil"
    )


@pytest.fixture
def qwen3():
    return ImageProcessor(
        min_pixels=65536,
        max_pixels=16777216,
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


# --- reading ---------------------------------------------------------------------------------------------------------


def ways(encoded, tmp_path):
    """Every way to name a file."""
    path = tmp_path / "a picture"
    path.write_bytes(encoded)
    yield from (path, str(path), encoded, io.BytesIO(encoded))
    yield "data:image/png;base64," + base64.b64encode(encoded).decode()
    yield "DATA:image/png;BASE64," + base64.encodebytes(encoded).decode()
    with path.open("rb") as file:
        yield file


def test_every_way_to_name_a_file_gives_the_same_bytes(tmp_path, monkeypatch):
    encoded = encode(Image.fromarray(textured(20, 30)))
    for value in ways(encoded, tmp_path):
        assert read_image(value).encoded == encoded
    monkeypatch.setenv("HOME", str(tmp_path))
    for access in (Access(), Access(allowed_local_media_path="~")):
        assert read_image("~/a picture", access=access).encoded == encoded
        with pytest.raises(ValueError, match=r"must be a file:// URL of this machine"):
            read_image("file://~/a picture", access=access)


def test_an_open_file_is_read_from_its_beginning_and_stays_where_it_stood(tmp_path):
    """As Pillow does: whoever has just written a picture into it stands at its end."""
    file = io.BytesIO()
    Image.fromarray(textured(20, 30)).save(file, "PNG")
    end = file.tell()
    for _ in range(2):
        assert read_image(file).encoded == file.getvalue()
        assert file.tell() == end
    with pytest.raises(ValueError, match="image must have at most 99 bytes, got a larger file"):
        read_image(file, access=Access(max_image_bytes=99))
    assert file.tell() == end
    read, write = os.pipe()
    with open(write, "wb") as sender:
        sender.write(b"a picture")
    with open(read, "rb") as pipe:
        assert read_image(pipe).encoded == b"a picture"


def test_a_file_that_gives_no_bytes_is_named(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(encode(Image.fromarray(textured(20, 30))))
    with path.open() as text, pytest.raises(ValueError, match=r'image must be a file that is open for .*mode "rb"$'):
        read_image(text)
    with pytest.raises(ValueError, match=r'image must be a file that is open for reading bytes, got .*mode "rb"$'):
        read_image(io.StringIO("a"))
    closed = path.open("rb")
    closed.close()
    with pytest.raises(ValueError, match=r"image must be a file that is open for reading bytes, got .* closed file"):
        read_image(closed)


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_base64_alone_is_told_apart_from_a_path(suffix):
    coded = base64.b64encode(encode(Image.fromarray(textured(40, 50)), suffix)).decode()
    with pytest.raises(
        ValueError, match=r'^image must be a data URL, got \d+ characters of base64: put "data:image/png;'
    ) as caught:
        read_image(coded)
    assert coded[:20] not in str(caught.value)
    assert str(len(coded)) in str(caught.value)
    with pytest.raises(
        ValueError, match=f"^image must be the bytes of a file, got {len(coded)} bytes of base64: decode them first$"
    ):
        read_image(coded.encode())


def test_reading_decodes_nothing():
    assert read_image(b"no image at all").encoded == b"no image at all"
    picture = Image.fromarray(textured(20, 30))
    assert read_image(picture).encoded is None
    assert read_image(picture).value is picture


def test_files_may_be_urls(tmp_path):
    (tmp_path / "a b.png").write_bytes(encoded := b"anything")
    for url in (f"file://{tmp_path}/a%20b.png", f"FILE://localhost{tmp_path}/a b.png"):
        assert read_image(url).encoded == encoded
        with pytest.raises(ValueError, match="allowed_local_media_path"):
            read_image(url, access=Access(allowed_local_media_path=None))
    for url in ("file://elsewhere/a.png", "file://a.png"):
        with pytest.raises(
            ValueError, match=r"must be a file:// URL of this machine, such as file:///tmp/a.png, got file"
        ):
            read_image(url)
    with pytest.raises(ValueError, match="no such file"):
        read_image(f"file://{tmp_path}/b.png")


def test_the_repr_of_a_source_holds_no_pixels():
    assert repr(read_image(b"x" * 1000, name="conversations[2] images[1]")) == (
        "ImageSource(name='conversations[2] images[1]')"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "must not be empty, got 0 bytes"),
        ("no/such/file.png", "must be the path of a readable file, got 'no/such/file.png': no such file"),
        ("http://host/image.png", "must be local unless allow_remote_images=True, got 'http://host/image.png'"),
        ("\0", "must be the path of a readable file"),
        ("A." * 2500, r"must be the path of a readable file, got '[A.]+\.\.\. \(5002 characters\)"),
        (
            "ftp://host/a.png",
            "must be a path, or a URL that begins with data:, file://, http://.*, got 'ftp://host/a.png'",
        ),
        ("data:image/png,abc", "must be a data URL of the form data:image/png;base64"),
        ("data:image/png;base64", "must be a data URL of the form data:image/png;base64"),
        ("data:image/png;base64,@@@@", "must be valid base64, got '@@@@'"),
        (
            "data:image/png;base64," + "A" * ((1 << 22) - 1) + "=" + "AAAA",
            "must be valid base64, .*: Excess data after",
        ),
        ("data:image/png;base64,abc", "must be valid base64, got 'abc'"),
        ("data:image/png;base64,", "must not be empty"),
        (None, "must be a path, bytes, an open binary file, a data:, file: or http.s. URL, a PIL .* got NoneType None"),
        ([b"x"], "must be a path, bytes.* got list"),
        (np.zeros((4, 4, 3), np.float32), r"must be an array of uint8 .* got float32 \(4, 4, 3\)"),
        (np.zeros((4, 4), np.uint16), r"must be an array of uint8 .* got uint16 \(4, 4\)"),
        (np.zeros((4, 4, 2), np.uint8), r"must be an array of uint8 .* got uint8 \(4, 4, 2\)"),
        (np.zeros((3, 4, 4, 3), np.uint8), r"must be an array of uint8 .* got uint8 \(3, 4, 4, 3\)"),
        (np.zeros(4, np.uint8), r"must be an array of uint8 .* got uint8 \(4,\)"),
    ],
    ids=lambda value: str(value)[:30].replace("\0", "nul") if isinstance(value, (str, bytes)) else None,
)
def test_reading_refuses(value, message):
    with pytest.raises(ValueError, match=f"^prompts.3. images.0. {message}"):
        read_image(value, name="prompts[3] images[0]")


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [mode for mode in pictures() if mode not in OVERLOOKED])
def test_pil_images_follow_the_librarys_processor(mode):
    picture = pictures()[mode]
    rgb = read_image(picture).decode()
    np.testing.assert_array_equal(rgb, librarys_rgb(picture))
    assert rgb.dtype == np.uint8
    assert rgb.shape == (40, 50, 3)


@pytest.mark.parametrize("mode", OVERLOOKED)
def test_alpha_that_the_library_overlooks(mode):
    picture = pictures()[mode]
    straight = picture.convert("LA" if mode == "La" else "RGBA")
    np.testing.assert_array_equal(read_image(picture).decode(), librarys_rgb(straight))


FILES = [
    *((mode, "PNG") for mode in pictures() if mode not in ("CMYK", "YCbCr", "HSV", "PA", *OVERLOOKED)),
    *(
        ("CMYK", "TIFF"),
        ("CMYK", "JPEG"),
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("P", "GIF"),
        ("RGB", "BMP"),
        ("RGBA", "BMP"),
    ),
    *(("1", "TIFF"), ("YCbCr", "TIFF"), ("RGBA", "TIFF"), ("LA", "TIFF"), ("RGBA", "WEBP"), ("RGB", "WEBP")),
    *(("P one clear", "GIF"), ("L transparent", "GIF"), ("P of RGBA", "GIF"), ("RGBA", "GIF")),
]


@pytest.mark.parametrize(("mode", "suffix"), FILES)
def test_one_picture_has_one_answer(mode, suffix, tmp_path):
    """By every way to name its file, opened with Pillow, and as an array."""
    encoded = encode(pictures()[mode], suffix)
    expected = load_with_library(encoded)
    with Image.open(io.BytesIO(encoded)) as fresh, Image.open(io.BytesIO(encoded)) as loaded:
        loaded.load()
        array = np.asarray(loaded.convert("RGBA") if loaded.has_transparency_data else loaded.convert("RGB"))
        values = itertools.chain(ways(encoded, tmp_path), (fresh, loaded, fresh, array))
        found = [read_image(value).decode() for value in values]
    for rgb in found:
        np.testing.assert_array_equal(rgb, expected)
    assert {content_key(rgb) for rgb in found} == {content_key(expected)}


def png(depth, colour, rows, **chunks):
    """A PNG of 8 pixels a row, by bits a sample and type of colour."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    parts = {"IHDR": struct.pack(">IIBBBBB", 8, len(rows), depth, colour, 0, 0, 0), **chunks}
    parts |= {"IDAT": zlib.compress(b"".join(b"\0" + row for row in rows)), "IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind.encode(), data) for kind, data in parts.items())


def bmp_with_alpha(rows):
    """A BMP of 8 pixels a row that says which byte is alpha."""
    pixels = b"".join(rows)
    head = struct.pack("<IiiHHIIiiII4I52x", 108, 8, -len(rows), 1, 32, 3, len(pixels), 0, 0, 0, 0,
                       0xFF0000, 0xFF00, 0xFF, 0xFF000000)  # fmt: skip
    return struct.pack("<2sIII", b"BM", 14 + len(head) + len(pixels), 0, 14 + len(head)) + head + pixels


# Ink in the first half of a row, ground in the other. Below the ground lies the colour of the ink, or a dark one.
INK = {
    "alpha": (png(8, 6, [b"\0\0\0\xff" * 4 + bytes(16)] * 8), 0),
    "BMP with alpha": (bmp_with_alpha([b"\0\0\0\xff" * 4 + bytes(16)] * 8), 0),
    "grey and alpha": (png(8, 4, [b"\0\xff" * 4 + bytes(8)] * 8), 0),
    "16 bits and alpha": (png(16, 6, [(bytes(6) + b"\xff\xff") * 4 + bytes(32)] * 8), 0),
    "palette with alphas": (png(8, 3, [bytes(4) + b"\1" * 4] * 8, PLTE=bytes(6), tRNS=b"\xff\0"), 0),
    "palette, one clear": (png(1, 3, [b"\x0f"] * 8, PLTE=bytes(6), tRNS=b"\xff\0"), 0),
    "palette, half clear": (png(8, 3, [bytes(4) + b"\1" * 4] * 8, PLTE=bytes(6), tRNS=b"\xfe\0"), 1),
    "1 bit, one clear": (png(1, 0, [b"\x0f"] * 8, tRNS=b"\0\1"), 0),
    "2 bits, one clear": (png(2, 0, [b"\0\x55"] * 8, tRNS=b"\0\1"), 0),
    "4 bits, one clear": (png(4, 0, [b"\0\0\x33\x33"] * 8, tRNS=b"\0\3"), 0),
    "grey, one clear": (png(8, 0, [bytes(4) + b"\7" * 4] * 8, tRNS=b"\0\7"), 0),
    "colour, one clear": (png(8, 2, [bytes(12) + b"\7\1\2" * 4] * 8, tRNS=b"\0\7\0\1\0\2"), 0),
    "16 bits, one clear": (png(16, 2, [bytes(24) + b"\7\7\1\1\2\2" * 4] * 8, tRNS=b"\7\7\1\1\2\2"), 0),
}


@pytest.mark.parametrize("case", INK)
def test_ink_on_transparent_ground_is_seen(case, tmp_path):
    """On white, as a viewer shows it."""
    encoded, ink = INK[case]
    expected = np.repeat(np.array([ink] * 4 + [255] * 4, np.uint8), 3).reshape(1, 8, 3).repeat(8, 0)
    with Image.open(io.BytesIO(encoded)) as opened:
        for value in itertools.chain(ways(encoded, tmp_path), (opened, opened)):
            np.testing.assert_array_equal(read_image(value).decode(), expected)


@pytest.mark.parametrize("suffix", ["PNG", "WEBP", "TIFF", "GIF"])
def test_transparent_ground_is_white_in_every_format(suffix):
    drawn = Image.new("RGBA", (40, 30))
    drawn.paste((0, 0, 0, 255), (10, 10, 30, 20))
    rgb = read_image(encode(drawn, suffix, **({"lossless": True} if suffix == "WEBP" else {}))).decode()
    expected = np.full((30, 40, 3), 255)
    expected[10:20, 10:30] = 0
    np.testing.assert_array_equal(rgb, expected)


def test_what_was_kept_of_a_transparent_file_before_is_not_found():
    """Until it was painted white, a file was what the library's loader makes of it; opaque ones are what they were."""
    from transformers.image_utils import load_image

    kept = {"settings": {}, "fingerprint": "", "codec": "float32"}
    for mode, is_same in (("RGBA", False), ("LA", False), ("P many clear", False), ("RGB", True), ("L", True)):
        encoded = encode(pictures()[mode])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow says that palettes should become RGBA
            before = load_image("data:image/png;base64," + base64.b64encode(encoded).decode())
        before, now = (
            entry_key(content_key(rgb), **kept) for rgb in (np.asarray(before), read_image(encoded).decode())
        )
        assert (before == now) == is_same


@pytest.mark.parametrize("suffix", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_frames_or_pages_the_first_is_taken(suffix):
    """As the library does; of a PIL image that stands at another one, that one."""
    encoded = animated(suffix)
    source = read_image(encoded)
    assert source.size() == (20, 30)
    np.testing.assert_array_equal(source.decode(), load_with_library(encoded))
    with Image.open(io.BytesIO(encoded)) as opened:
        assert opened.n_frames == 3
        np.testing.assert_array_equal(read_image(opened).decode(), source.decode())
        opened.seek(2)
        shown = read_image(opened).decode()
        np.testing.assert_array_equal(shown, librarys_rgb(opened))
        assert not np.array_equal(shown, source.decode())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_files_and_pictures_are_turned_upright(orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(Image.fromarray(textured(20, 30)), suffix, exif=exif)
    rgb = read_image(encoded).decode()
    np.testing.assert_array_equal(rgb, load_with_library(encoded))
    assert rgb.shape == ((20, 30, 3) if orientation <= 4 else (30, 20, 3))
    assert read_image(encoded).size() == rgb.shape[:2]
    with Image.open(io.BytesIO(encoded)) as opened:
        for value in (opened, opened, opened.copy(), ImageOps.exif_transpose(opened)):  # which is turned already
            assert read_image(value).size() == rgb.shape[:2]
            np.testing.assert_array_equal(read_image(value).decode(), rgb)
        assert opened.size == (
            (30, 20) if suffix != "TIFF" or orientation <= 4 else (20, 30)
        )  # Pillow turns TIFF itself


def test_frames_of_a_video_are_pictures_too():
    """Turned, and painted white; so are the frames' heads."""
    exif = Image.Exif()
    exif[0x0112] = 8
    encoded = encode(Image.fromarray(textured(20, 30, 4)), exif=exif)
    with Image.open(io.BytesIO(encoded)) as opened:
        film = read_video([encoded, opened], metadata={"fps": 1}).film
        assert film.head()[1:3] == (30, 20)
        for rgb in film.decode([0, 1]):
            np.testing.assert_array_equal(rgb, load_with_library(encoded))


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0no TIFF", b"Exif\0\0II*\0"])
@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP"])
def test_exif_that_nobody_can_read_turns_nothing(exif, suffix):
    encoded = encode(picture := Image.fromarray(textured(20, 30)), suffix, exif=exif)
    expected = read_image(encode(picture, suffix)).decode()
    with Image.open(io.BytesIO(encoded)) as opened:
        for value in (encoded, opened, opened):
            assert read_image(value).size() == (20, 30)
            np.testing.assert_array_equal(read_image(value).decode(), expected)


def test_exif_behind_the_pixels_is_seen_when_they_are():
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = encode(Image.fromarray(textured(20, 30)), exif=exif)
    size, begin = int.from_bytes(encoded[33:37]), 33
    assert encoded[37:41] == b"eXIf"
    late = encoded[:begin] + encoded[begin + 12 + size : -12] + encoded[begin : begin + 12 + size] + encoded[-12:]
    assert read_image(late).size() == (20, 30)
    np.testing.assert_array_equal(read_image(late).decode(), read_image(encoded).decode())


@pytest.mark.parametrize("channels", [3, 4])
def test_arrays_follow_the_librarys_processor(channels):
    array = textured(40, 50, channels)
    source = read_image(array)
    np.testing.assert_array_equal(source.decode(), librarys_rgb(array))
    np.testing.assert_array_equal(read_image(array[::-1, ::2]).decode(), source.decode()[::-1, ::2])


def test_gray_arrays_are_repeated():
    gray = textured(40, 50, 1)
    expected = librarys_rgb(gray)
    np.testing.assert_array_equal(read_image(gray[..., 0]).decode(), expected)


def test_a_decoded_picture_does_not_change_with_its_source():
    array = textured(4, 5)
    rgb = read_image(array).decode()
    kept = rgb.copy()
    array[:] = 0
    np.testing.assert_array_equal(rgb, kept)


def png_header(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def animated(suffix):
    frames = [Image.fromarray(textured(20, 30, seed=seed)) for seed in range(3)]
    return encode(frames[0], suffix, save_all=True, append_images=frames[1:])


REFUSED = {
    "no image": (
        b"hello, I am a text file",
        "must be an image that Pillow can read and convert to RGB, got 23 bytes: unknown format",
    ),
    "mp4": (b"\0\0\0\x20ftypisom" + bytes(20), "got 32 bytes: it is a video; pass it as a video$"),
    "Matroska": (b"\x1a\x45\xdf\xa3" + bytes(20), "got 24 bytes: it is a video; pass it as a video$"),
    "AVIF": (b"\0\0\0\x20ftypavif" + bytes(20), "unknown format, none of BMP, GIF"),
    "truncated PNG": (encode(Image.fromarray(textured(99, 99)))[:5000], "got 5000 bytes: "),
    "truncated JPEG": (encode(Image.fromarray(textured(99, 99)), "JPEG")[:2000], "got 2000 bytes: .*truncated"),
    "corrupt PNG": (
        encode(Image.fromarray(textured(99, 99))).replace(b"IDAT", b"IDBT"),
        "must be an image that Pillow",
    ),
    "no width": (png_header(0, 5), "must be"),
    "16-bit PNG": (
        encode(Image.fromarray(np.full((4, 5), 999, np.uint16))),
        "must have 8 bits per channel, got mode I;16",
    ),
    "16-bit TIFF": (encode(Image.fromarray(np.full((4, 5), 999, np.uint16)), "TIFF"), "must have 8 bits per channel"),
    "float TIFF": (
        encode(Image.fromarray(np.ones((4, 5), np.float32)), "TIFF"),
        "must have 8 bits per channel, got mode F",
    ),
    "bomb": (png_header(20000, 20000), "must be an image that Pillow can .*exceeds limit of 178956970 pixels"),
    "long": (png_header(2001, 10), "must have an aspect ratio of at most 200, got 10x2001"),
    "PIL int": (Image.new("I", (4, 5)), "must have 8 bits per channel, got mode I"),
    "PIL float": (Image.new("F", (4, 5)), "must have 8 bits per channel, got mode F"),
    "PIL 16 bit": (Image.new("I;16", (4, 5)), "must have 8 bits per channel, got mode I;16"),
    "PIL empty": (Image.new("RGB", (0, 5)), "must have at least 1x1 pixels, got 5x0"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "unknown format, none of BMP, GIF"),
    "PPM": (b"P6 2 2 255 " + bytes(12), "unknown format, none of BMP, GIF"),
    "over the limit": (png_header(10000, 5001), "must have at most 50000000 pixels, got 5001x10000"),
    "PIL long": (Image.new("RGB", (1, 201)), "must have an aspect ratio of at most 200, got 201x1"),
    "PIL truncated": (
        Image.open(io.BytesIO(encode(Image.fromarray(textured(99, 99)))[:5000])),
        "got a PIL image of mode RGB: ",
    ),
    "array empty": (np.zeros((0, 5, 3), np.uint8), "must have at least 1x1 pixels, got 0x5"),
    "array long": (np.zeros((201, 1), np.uint8), "must have an aspect ratio of at most 200, got 201x1"),
}


HEADS = ("EPS", "PPM", "over the limit", "bomb", "long", "no width", "16-bit PNG")


@pytest.mark.parametrize("case", HEADS)
def test_what_the_head_of_a_file_decides_decodes_no_pixel(case, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    value, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^prompts.7. images.0. .*{message}"):
        read_image(value, name="prompts[7] images[0]").size()


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_the_head_tells_the_size(suffix, monkeypatch):
    source = read_image(encode(Image.fromarray(textured(20, 30)), suffix))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    assert source.size() == (20, 30)


@pytest.mark.parametrize("case", REFUSED)
def test_decoding_refuses(case):
    value, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"^conversations.2. images.1. .*{message}"):
        read_image(value, name="conversations[2] images[1]").decode()


def test_tiles_count_as_pixels():
    """A tile is decoded whole, however little of it is in the picture."""
    entries = [(256, 64), (257, 64), (258, 8), (259, 1), (262, 1), (277, 1), (322, 40_000), (323, 40_000), (324, 200)]
    entries.append((325, 64))
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    bomb = struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + fields + bytes(4)
    bomb = bomb.ljust(200, b"\0") + bytes(64)
    with pytest.raises(ValueError, match="image must have at most 50000000 pixels, got tiles of 40000x40000"):
        read_image(bomb).size()


def test_the_pixel_limit_is_our_own(monkeypatch):
    picture = Image.fromarray(textured(20, 30))
    for value in (picture, encode(picture), textured(20, 30)):
        assert read_image(value).decode(max_pixels=600).shape == (20, 30, 3)
        with pytest.raises(ValueError, match="image must have at most 599 pixels, got 20x30"):
            read_image(value).decode(max_pixels=599)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # a caller may lift Pillow's limit
    with pytest.raises(ValueError, match="image must have at most 178956970 pixels, got 20000x20000"):
        read_image(png_header(20000, 20000)).decode(PILLOW_MAX_PIXELS)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)  # 600 pixels: Pillow warns, here an error
    np.testing.assert_array_equal(read_image(encode(picture)).decode(), textured(20, 30))


def test_a_photo_with_hidden_pictures_is_no_animation():
    photo, preview = Image.fromarray(textured(20, 30)), Image.fromarray(textured(10, 15))
    encoded = encode(photo, "MPO", save_all=True, append_images=[preview])
    with Image.open(io.BytesIO(encoded)) as opened:
        assert opened.n_frames == 2
    np.testing.assert_array_equal(read_image(encoded).decode(), load_with_library(encoded))


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_damaged_files_give_a_picture_or_an_explanation(suffix):
    encoded = encode(Image.fromarray(textured(20, 30)), suffix)
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about metadata that it skips
        for _ in range(150):
            damaged = bytearray(encoded[: rng.integers(1, len(encoded) + 1)])
            for place in rng.integers(0, len(damaged), rng.integers(0, 4)):
                damaged[place] = rng.integers(256)
            with contextlib.suppress(ValueError):
                rgb = read_image(bytes(damaged)).decode(max_pixels=10**6)
                assert rgb.dtype == np.uint8
                assert rgb.ndim == 3


# --- preprocessing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_pixel_values_equal_the_librarys_bit_for_bit(both, size):
    ours, library = both
    rgb = textured(*size)
    patches = ours.patches(rgb)
    expected = library(rgb, input_data_format="channels_last", return_tensors="np")
    assert patches.grid == tuple(expected["image_grid_thw"][0])
    assert patches.pixels.dtype == np.uint8
    assert patches.pixels.shape == (patches.grid[1] * patches.grid[2], 3, ours.patch_size**2)
    values = ours.pixel_values(patches)
    assert values.dtype == expected["pixel_values"].dtype == np.float32
    assert values.tobytes() == expected["pixel_values"].tobytes()


@pytest.mark.parametrize("mode", [mode for mode in pictures() if mode not in OVERLOOKED])
def test_pictures_of_every_mode_equal_the_library_bit_for_bit(both, mode):
    ours, library = both
    picture = pictures()[mode]
    values = ours.pixel_values(ours.patches(read_image(picture).decode()))
    assert values.tobytes() == library(picture, return_tensors="np")["pixel_values"].tobytes()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P many clear"])
def test_files_equal_the_library_bit_for_bit(both, mode, tmp_path):
    ours, library = both
    path = tmp_path / "image.png"
    pictures()[mode].save(path)
    values = ours.pixel_values(ours.patches(read_image(path).decode()))
    with Image.open(path) as opened:
        assert values.tobytes() == library(opened, return_tensors="np")["pixel_values"].tobytes()


def test_the_table_is_what_pixel_values_reads(both):
    ours, _ = both
    assert ours.normalization_table.shape == (3, 256)
    assert ours.normalization_table.dtype == np.float32
    patches = ours.patches(textured(60, 90))
    side = ours.patch_size
    values = ours.pixel_values(patches).reshape(-1, 3, ours.temporal_patch_size, side * side)
    for c in range(3):
        for t in range(ours.temporal_patch_size):
            np.testing.assert_array_equal(values[:, c, t], ours.normalization_table[c][patches.pixels[:, c]])


def test_patches_lie_in_blocks(qwen3):
    rgb = textured(256, 320)  # already of its final size
    pixels, grid = qwen3.patches(rgb)
    assert grid == (1, 16, 20)
    row = 0
    for block_y in range(8):
        for block_x in range(10):
            for y in range(2):
                for x in range(2):
                    top, left = 16 * (2 * block_y + y), 16 * (2 * block_x + x)
                    expected = rgb[top : top + 16, left : left + 16].transpose(2, 0, 1).reshape(3, 256)
                    np.testing.assert_array_equal(pixels[row], expected)
                    row += 1


@pytest.mark.parametrize(
    ("size", "block", "limits", "expected"),
    [
        ((70, 70), 28, (3136, 10**9), (56, 56)),
        ((42, 98), 28, (3136, 10**9), (56, 112)),
        ((480, 640), 28, (3136, 12845056), (476, 644)),
        ((1080, 1920), 28, (3136, 12845056), (1092, 1932)),
        ((4000, 6000), 28, (3136, 12845056), (2912, 4368)),
        ((10, 10), 28, (3136, 10**9), (56, 56)),
        ((200, 333), 32, (65536, 16777216), (224, 352)),
        ((1080, 1920), 32, (65536, 16777216), (1088, 1920)),
        ((5000, 7000), 32, (65536, 16777216), (3456, 4832)),
    ],
)
def test_grids_of_known_sizes(qwen3, size, block, limits, expected):
    patch = block // 2
    processor = ImageProcessor(
        **{**qwen3.settings(), "patch_size": patch, "min_pixels": limits[0], "max_pixels": limits[1]}
    )
    grid = processor.grid(*size)
    assert (grid[1] * patch, grid[2] * patch) == expected
    assert processor.num_tokens(grid) == expected[0] * expected[1] // block**2


def test_grids_equal_the_librarys_for_many_sizes(qwen3):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    checked = 0
    while checked < 20000:
        height, width = (int(v) for v in np.exp(rng.uniform(0, 9, 2)))
        patch, merge = int(rng.integers(1, 20)), int(rng.integers(1, 4))
        low, high = sorted(int(v) for v in np.exp(rng.uniform(0, 17, 2)))
        settings = {**qwen3.settings(), "patch_size": patch, "merge_size": merge}
        processor = ImageProcessor(**{**settings, "min_pixels": low, "max_pixels": high})
        try:
            expected = smart_resize(height, width, patch * merge, low, high)
        except ValueError:
            with pytest.raises(ValueError, match="aspect ratio"):
                processor.grid(height, width)
            continue
        _, rows, columns = processor.grid(height, width)
        assert (rows * patch, columns * patch) == expected
        assert rows % merge == columns % merge == 0
        checked += 1


def test_grid_names_what_it_refuses(qwen3):
    with pytest.raises(ValueError, match=r"images\[1\] must have an aspect ratio of at most 200, got 201x1"):
        qwen3.grid(201, 1, name="images[1]")
    with pytest.raises(ValueError, match="image must have at least 1x1 pixels, got 0x1"):
        qwen3.grid(0, 1)


@pytest.mark.parametrize("wrong", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3))])
def test_patches_refuses_other_arrays(qwen3, wrong):
    with pytest.raises(ValueError, match=r"rgb must be uint8 \[H, W, 3\], got"):
        qwen3.patches(wrong)


# --- limits and settings ---------------------------------------------------------------------------------------------


def test_limits_equal_the_librarys(both):
    ours, library = both
    rgb = textured(300, 200)
    limits = {"min_pixels": 100, "max_pixels": 15000}
    size = {"shortest_edge": 100, "longest_edge": 15000}
    expected = library(rgb, size=size, input_data_format="channels_last", return_tensors="np")
    for patches in (ours.patches(rgb, limits), ours.with_limits(limits).patches(rgb)):
        assert patches.grid == tuple(expected["image_grid_thw"][0]) == ours.grid(300, 200, limits)
        assert ours.pixel_values(patches).tobytes() == expected["pixel_values"].tobytes()
    assert ours.patches(rgb).grid != ours.grid(300, 200, limits)


def test_a_request_changes_only_the_limits_it_names(qwen3):
    engine = qwen3.with_limits({"max_pixels": 200000})
    assert engine.settings({"min_pixels": 1000}) == {**qwen3.settings(), "min_pixels": 1000, "max_pixels": 200000}
    assert engine.with_limits(None) is engine.with_limits({}) is engine


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_pixel": 5}, "unknown field 'max_pixel'; expected one of min_pixels, max_pixels; did you mean"),
        ({"min_pixels": 0}, "min_pixels must be a positive integer, got 0"),
        ({"max_pixels": -4}, "max_pixels must be a positive integer, got -4"),
        ({"max_pixels": 4.0}, r"max_pixels must be a positive integer, got 4\.0"),
        ({"max_pixels": True}, "max_pixels must be a positive integer, got True"),
        ({"max_pixels": None}, "max_pixels must be a positive integer, got None"),
        ({"min_pixels": 5, "max_pixels": 4}, "min_pixels must be at most max_pixels 4, got 5"),
        ([5], r"must be a dict with min_pixels and max_pixels, got list \[5\]"),
    ],
)
def test_limits_are_checked(qwen3, limits, message):
    with pytest.raises(ValueError, match=f"^mm_processor_kwargs:? {message}"):
        check_limits(limits)
    for refuse in (qwen3.with_limits, qwen3.settings, lambda limits: qwen3.grid(5, 5, limits)):
        with pytest.raises(ValueError, match=message):
            refuse(limits)


def test_a_limit_that_is_given_alone_is_kept(qwen3):
    """The other one gives way; the library would grow small pictures beyond `max_pixels`."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for limits, expected in (
        ({"max_pixels": 60000}, (1, 60000)),
        ({"max_pixels": 70000}, (65536, 70000)),
        ({"min_pixels": 2**25}, (2**25, 2**25)),
    ):
        settings = qwen3.settings(limits)
        assert (settings["min_pixels"], settings["max_pixels"]) == expected
    for height, width in itertools.product(range(20, 400, 37), repeat=2):
        _, rows, columns = qwen3.grid(height, width, {"max_pixels": 60000})
        assert rows * columns * 16**2 <= 60000
    for size in SIZES:
        assert qwen3.grid(*size, {"max_pixels": 10}) == (1, 2, 2)  # one token, as in the library
        assert smart_resize(*size, 32, 10, 10) == (32, 32)


def fetched(height, width, factor, wish):
    """The size that Qwen's own utility makes of a picture, as it was when this was written."""
    if {"resized_height", "resized_width"} <= wish.keys():
        height, width, least, most = wish["resized_height"], wish["resized_width"], 4 * factor**2, 16384 * factor**2
    else:
        least, most = wish["min_pixels"], wish["max_pixels"]
    rows, columns = (max(1, round(side / factor)) for side in (height, width))
    if rows * columns * factor**2 > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (math.floor(side / scale / factor) for side in (height, width))
    elif rows * columns * factor**2 < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
    return rows * factor, columns * factor


def test_what_a_part_asks_of_its_image_is_what_qwens_utility_makes(both):
    ours, _ = both
    factor, rng = ours.patch_size * ours.merge_size, np.random.default_rng(0)
    for _ in range(500):
        height, width = (int(side) for side in np.exp(rng.uniform(0, 8.5, 2)))
        if max(height, width) > 200 * min(height, width):
            continue
        wish = check_own_limits({"resized_height": height, "resized_width": width, "min_pixels": None}, "part")
        _, rows, columns = ours.grid(300, 200, wish)
        assert (rows * ours.patch_size, columns * ours.patch_size) == fetched(300, 200, factor, wish)
    wish = check_own_limits({"min_pixels": 50 * factor**2, "max_pixels": 60 * factor**2}, "part")
    _, rows, columns = ours.grid(300, 200, wish)
    assert (rows * ours.patch_size, columns * ours.patch_size) == fetched(300, 200, factor, wish)


def test_what_a_part_asks_of_its_image_changes_the_key_where_pixels_change(qwen3):
    def settings(**asked):
        return qwen3.settings(check_own_limits(asked, "part"))

    assert settings() == settings(min_pixels=65536) == settings(max_pixels=None) == qwen3.settings()
    assert settings(max_pixels=70000) != qwen3.settings()
    assert settings(resized_height=280, resized_width=420) == settings(
        resized_height=285, resized_width=415, max_pixels=99999
    )
    different = [settings(resized_height=280, resized_width=420), settings(resized_height=420, resized_width=280)]
    different += [settings(resized_height=280, resized_width=320), qwen3.settings()]
    assert len({json.dumps(one) for one in different}) == 4
    rgb = textured(300, 200)
    asked = check_own_limits({"resized_height": 280, "resized_width": 420}, "part")
    expected = Image.fromarray(rgb).resize((416, 288))
    np.testing.assert_array_equal(qwen3.patches(rgb, asked).pixels, qwen3.cut(np.asarray(expected), (1, 18, 26)))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"resized_height": 280}, "resized_height and resized_width must be set together, got resized_height alone"),
        ({"resized_height": 280, "resized_width": 0}, "resized_width must be a positive integer, got 0"),
        ({"resized_height": 28.0, "resized_width": 28}, r"resized_height must be a positive integer, got 28\.0"),
        ({"resized_height": 1, "resized_width": 300}, "resized_height x resized_width must have an aspect ratio"),
        ({"max_pixels": "5"}, "max_pixels must be a positive integer, got '5'"),
        ({"max_pixels": 10**15}, "max_pixels must be an integer from 1 to"),
        ({"min_pixels": 9, "max_pixels": 5}, "min_pixels must be at most max_pixels 5, got 9"),
    ],
)
def test_what_a_part_asks_of_its_image_is_checked(asked, message):
    with pytest.raises(ValueError, match=f"^part {message}"):
        check_own_limits(asked, "part")


def test_the_limits_of_an_image_come_before_those_of_its_request():
    assert overrule({"min_pixels": 5, "max_pixels": 9}, {}) == {"min_pixels": 5, "max_pixels": 9}
    assert overrule({"min_pixels": 5}, {"max_pixels": 3}) == {"min_pixels": 1, "max_pixels": 3}
    assert overrule({"max_pixels": 5}, {"min_pixels": 7}) == {"min_pixels": 7, "max_pixels": 7}
    assert overrule({"max_pixels": 5}, {"min_pixels": 3}) == {"min_pixels": 3, "max_pixels": 5}


def test_settings_hold_everything_that_changes_pixels(qwen3):
    assert json.loads(json.dumps(qwen3.settings())) == {
        "min_pixels": 65536,
        "max_pixels": 16777216,
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "rescale_factor": 1 / 255,
        "resample": 3,
    }


# --- loading ---------------------------------------------------------------------------------------------------------


def test_both_files_and_both_spellings_load_alike(tmp_path, qwen3):
    flat, nested, old = tmp_path / "flat", tmp_path / "nested", tmp_path / "old"
    for directory in (flat, nested, old):
        directory.mkdir()
    (flat / "preprocessor_config.json").write_text(json.dumps(QWEN3))
    nested_file = {"processor_class": "Qwen3VLProcessor", "image_processor": QWEN3}
    (nested / "processor_config.json").write_text(json.dumps(nested_file))
    limits = {"min_pixels": 65536, "max_pixels": 16777216}
    (old / "preprocessor_config.json").write_text(json.dumps({**QWEN3, "size": limits, **limits}))
    for directory in (flat, nested, str(old)):
        assert ImageProcessor.from_pretrained(directory) == qwen3


@pytest.mark.parametrize("content", [{}, {"min_pixels": 784}, {"size": None, "max_pixels": 10**6}, QWEN3], ids=str)
def test_what_a_checkpoint_leaves_out_is_the_librarys(tmp_path, content):
    """One key after the other."""
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    spellings = [kind | content]
    spellings += [{name: value for name, value in content.items() if name != key} | kind for key in content]
    for number, spelling in enumerate(spellings):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "preprocessor_config.json").write_text(json.dumps(spelling))
        found = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        assert ImageProcessor.from_pretrained(directory) == ImageProcessor(
            min_pixels=found.size.shortest_edge,
            max_pixels=found.size.longest_edge,
            patch_size=found.patch_size,
            merge_size=found.merge_size,
            temporal_patch_size=found.temporal_patch_size,
            mean=tuple(found.image_mean),
            std=tuple(found.image_std),
            rescale_factor=found.rescale_factor,
            resample=int(found.resample),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_resize": False}, "do_resize of .* must be true, got False"),
        ({"do_rescale": False}, "do_rescale of .* must be true, got False"),
        ({"do_normalize": False}, "do_normalize of .* must be true, got False"),
        ({"do_convert_rgb": False}, "do_convert_rgb of .* must be true, got False"),
        ({"resample": 9}, "resample of .* must be one of Pillow's filters 0 to 5 or null, got 9"),
        ({"size": {"shortest_edge": 224}}, "size of .* must have shortest_edge and longest_edge"),
        ({"min_pixels": 10**9}, "min_pixels must be at most max_pixels 16777216"),
        ({"image_processor_type": "NoImageProcessor"}, "must be Qwen2VLImageProcessor, got NoImageProcessor"),
        ({"image_processor_type": "CLIPImageProcessor"}, "must be Qwen2VLImageProcessor, got CLIPImageProcessor"),
    ],
    ids=str,
)
def test_loading_refuses_settings_that_it_does_not_follow(tmp_path, change, message):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**QWEN3, **change}))
    with pytest.raises(ValueError, match=message):
        ImageProcessor.from_pretrained(tmp_path)


NAN, INF = float("nan"), float("inf")
COUNTS = (0, -1, 2.0, True, "16", [16], {}, 10**15, 10**400)
CHANNELS = (NAN, INF, 1e300, "0.5", True, [0.5, 0.5], [0.5] * 4, [NAN] * 3, [0.5, INF, 0.5], ["0.5"] * 3, {})


@pytest.mark.parametrize("nested", [False, True])
def test_loading_refuses_hostile_numbers(tmp_path, nested):
    """By file and key, before the library sees them."""
    table = {
        **dict.fromkeys(("min_pixels", "max_pixels", "patch_size", "merge_size", "temporal_patch_size"), COUNTS),
        **dict.fromkeys(("size.shortest_edge", "size.longest_edge"), COUNTS),
        "size": (5, "x", [1]),
        "image_mean": CHANNELS,
        "image_std": (*CHANNELS, 0, -0.5, [0.5, 0.5, 0.0], [0.5, -0.5, 0.5]),
        "rescale_factor": (NAN, INF, -INF, 0, -1, True, "1", [1]),
        "resample": (-1, 6, 1.5, True, "3"),
    }
    path = tmp_path / ("processor_config.json" if nested else "preprocessor_config.json")
    for key, values in table.items():
        for value in values:
            section, _, field = key.rpartition(".")
            settings = {**QWEN3, section: {**QWEN3["size"], field: value}} if section else {**QWEN3, key: value}
            path.write_text(json.dumps({"image_processor": settings} if nested else settings))
            with pytest.raises(ValueError, match=rf"{re.escape(key)} of {path} must be .*, got "):
                raise AssertionError(f"{key} = {value!r} gave {ImageProcessor.from_pretrained(tmp_path)}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mean", (0.5, NAN, 0.5)),
        ("std", (0.5, INF, 0.5)),
        ("std", (0.5, 0.5, 0.0)),
        ("std", (0.5, 0.5)),
        ("rescale_factor", INF),
        ("patch_size", 0),
        ("max_pixels", 10**400),
        ("resample", 9),
    ],
)
def test_constants_of_a_processor_are_checked(qwen3, field, value):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got "):
        ImageProcessor(**{**qwen3.settings(), field: value})


@pytest.mark.parametrize("content", ["", "null", "[]", "[" * 100_000, '{"image_processor": 5}'])
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_loading_refuses_broken_files(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/{name} must be "):
        ImageProcessor.from_pretrained(tmp_path)


def test_loading_refuses_a_directory_without_settings(tmp_path):
    with pytest.raises(ValueError, match=r"must describe its image processor in preprocessor_config\.json or"):
        ImageProcessor.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="directory must be a checkpoint's directory, got 'Qwen/Qwen3-VL-2B'"):
        ImageProcessor.from_pretrained("Qwen/Qwen3-VL-2B")


def test_one_value_may_stand_for_three_channels(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**QWEN3, "image_mean": 0.25}))
    assert ImageProcessor.from_pretrained(tmp_path).mean == (0.25, 0.25, 0.25)


def test_patches_are_a_pair(qwen3):
    assert isinstance(qwen3.patches(textured(40, 50)), Patches)
