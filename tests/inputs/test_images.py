import base64
import contextlib
import io
import json
import re
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers import AutoImageProcessor
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from vlcache_jax.inputs.access import Access
from vlcache_jax.inputs.images import MOST_IMAGE_PIXELS, read_image
from vlcache_jax.inputs.processor import ImageProcessor, Patches, check_limits
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
FAMILIES = {"qwen2": {**qwen2_vl.PUBLISHED.image_processor}, "qwen2_5": QWEN2_5, "qwen3": QWEN3, "uneven": UNEVEN}
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


def load_with_library(encoded):
    """What the library's processor makes of a file: it loads it, and then makes it RGB."""
    loaded = load_image("data:image/png;base64," + base64.b64encode(encoded).decode())
    return convert_to_rgb(loaded, return_numpy=True)


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
        "CMYK": rgb.convert("CMYK"),
        "YCbCr": rgb.convert("YCbCr"),
        "HSV": rgb.convert("HSV"),
        "1": rgb.convert("1"),
    }


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """Our processor and the library's, from one directory."""
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "preprocessor_config.json").write_text(json.dumps(FAMILIES[request.param]))
    return ImageProcessor.from_pretrained(directory), AutoImageProcessor.from_pretrained(directory, backend="pil")


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


def test_every_way_to_name_a_file_gives_the_same_bytes(tmp_path):
    encoded = encode(Image.fromarray(textured(20, 30)))
    path = tmp_path / "a picture.png"
    path.write_bytes(encoded)
    url = "data:image/png;base64," + base64.b64encode(encoded).decode()
    wrapped = "DATA:image/png;BASE64," + base64.encodebytes(encoded).decode()
    for value in (path, str(path), encoded, url, wrapped):
        assert read_image(value).encoded == encoded


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
        ("A" * 5000, r"must be the path of a readable file, got 'A+\.\.\. \(5002 characters\)"),
        ("ftp://host/image.png", "must be the path of a readable file"),
        ("data:image/png,abc", "must be a data URL of the form data:image/png;base64"),
        ("data:image/png;base64", "must be a data URL of the form data:image/png;base64"),
        ("data:image/png;base64,@@@@", "must be valid base64, got '@@@@'"),
        ("data:image/png;base64,abc", "must be valid base64, got 'abc'"),
        ("data:image/png;base64,", "must not be empty"),
        (None, "must be a path, bytes, a data:, file: or http.s. URL, a PIL image or a uint8 array, got NoneType None"),
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


@pytest.mark.parametrize("mode", pictures())
def test_pil_images_follow_the_librarys_processor(mode):
    picture = pictures()[mode]
    rgb = read_image(picture).decode()
    np.testing.assert_array_equal(rgb, convert_to_rgb(picture, return_numpy=True))
    assert rgb.dtype == np.uint8
    assert rgb.shape == (40, 50, 3)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # the library warns, we need not
@pytest.mark.parametrize(
    ("mode", "suffix"),
    [(mode, "PNG") for mode in pictures() if mode not in ("CMYK", "YCbCr", "HSV", "PA")]
    + [("CMYK", "TIFF"), ("CMYK", "JPEG"), ("RGB", "JPEG"), ("L", "JPEG"), ("P", "GIF"), ("RGB", "BMP"), ("1", "TIFF")]
    + [("YCbCr", "TIFF"), ("RGBA", "WEBP"), ("LA", "TIFF"), ("P one clear", "GIF")]
    + [("L transparent", "GIF")],
)
def test_files_follow_the_librarys_loader(mode, suffix):
    encoded = encode(pictures()[mode], suffix)
    np.testing.assert_array_equal(read_image(encoded).decode(), load_with_library(encoded))


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("RGB transparent", "PNG"), ("L transparent", "PNG"), ("P one clear", "PNG"), ("P one clear", "GIF")],
)
def test_one_transparent_colour_of_a_file_is_painted_white(mode, suffix, tmp_path):
    picture = pictures()[mode]
    encoded = encode(picture, suffix)
    path = tmp_path / "image"
    path.write_bytes(encoded)
    with Image.open(path) as opened:
        clear = np.array(opened.convert("RGBA"))[..., 3] == 0
    assert 0 < clear.sum() < clear.size
    for value in (path, encoded, "data:image/png;base64," + base64.b64encode(encoded).decode()):
        rgb = read_image(value).decode()
        assert (rgb[clear] == 255).all()
        np.testing.assert_array_equal(rgb, load_with_library(encoded))


def test_of_an_animated_gif_the_first_frame_is_taken():
    encoded = animated("GIF")
    rgb = read_image(encoded).decode()
    np.testing.assert_array_equal(rgb, load_with_library(encoded))
    with Image.open(io.BytesIO(encoded)) as opened:
        assert opened.n_frames == 3
        np.testing.assert_array_equal(read_image(opened).decode(), rgb)


def test_files_and_pictures_differ_where_the_library_differs(tmp_path):
    picture = pictures()["RGBA"]
    path = tmp_path / "image.png"
    picture.save(path)
    assert not np.array_equal(read_image(path).decode(), read_image(picture).decode())
    with Image.open(path) as opened:  # the same file, opened by the caller, is a picture
        np.testing.assert_array_equal(read_image(opened).decode(), read_image(picture).decode())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_files_are_turned_upright_and_pictures_are_not(orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(Image.fromarray(textured(20, 30)), suffix, exif=exif)
    rgb = read_image(encoded).decode()
    np.testing.assert_array_equal(rgb, load_with_library(encoded))
    assert rgb.shape == ((20, 30, 3) if orientation <= 4 else (30, 20, 3))
    with Image.open(io.BytesIO(encoded)) as opened:
        expected = convert_to_rgb(opened, return_numpy=True)  # Pillow itself turns TIFF, and only TIFF
        np.testing.assert_array_equal(read_image(opened).decode(), expected)
        assert expected.shape == (rgb.shape if suffix == "TIFF" else (20, 30, 3))


@pytest.mark.parametrize("channels", [3, 4])
def test_arrays_follow_the_librarys_processor(channels):
    array = textured(40, 50, channels)
    source = read_image(array)
    np.testing.assert_array_equal(source.decode(), convert_to_rgb(array, return_numpy=True))
    np.testing.assert_array_equal(read_image(array[::-1, ::2]).decode(), source.decode()[::-1, ::2])


def test_gray_arrays_are_repeated():
    gray = textured(40, 50, 1)
    expected = convert_to_rgb(gray, return_numpy=True)
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
    "truncated PNG": (encode(Image.fromarray(textured(99, 99)))[:5000], "got 5000 bytes: "),
    "truncated JPEG": (encode(Image.fromarray(textured(99, 99)), "JPEG")[:2000], "got 2000 bytes: .*truncated"),
    "corrupt PNG": (
        encode(Image.fromarray(textured(99, 99))).replace(b"IDAT", b"IDBT"),
        "must be an image that Pillow",
    ),
    "no width": (png_header(0, 5), "must be"),
    "16-bit PNG": (
        encode(Image.fromarray(np.full((4, 5), 999, np.uint16))),
        "must have 8 bits a channel, got mode I;16",
    ),
    "16-bit TIFF": (encode(Image.fromarray(np.full((4, 5), 999, np.uint16)), "TIFF"), "must have 8 bits a channel"),
    "float TIFF": (
        encode(Image.fromarray(np.ones((4, 5), np.float32)), "TIFF"),
        "must have 8 bits a channel, got mode F",
    ),
    "animated PNG": (animated("PNG"), "must be a single picture, got an image of 3 frames"),
    "animated WebP": (animated("WEBP"), "must be a single picture, got an image of 3 frames"),
    "TIFF of pages": (animated("TIFF"), "must be a single picture, got an image of several pages"),
    "bomb": (png_header(20000, 20000), "must be an image that Pillow can .*exceeds limit of 178956970 pixels"),
    "long": (png_header(2001, 10), "must have an aspect ratio of at most 200, got 10x2001"),
    "PIL int": (Image.new("I", (4, 5)), "must have 8 bits a channel, got mode I"),
    "PIL float": (Image.new("F", (4, 5)), "must have 8 bits a channel, got mode F"),
    "PIL 16 bit": (Image.new("I;16", (4, 5)), "must have 8 bits a channel, got mode I;16"),
    "PIL empty": (Image.new("RGB", (0, 5)), "must have at least 1x1 pixels, got 5x0"),
    "PIL animated": (Image.open(io.BytesIO(animated("WEBP"))), "must be a single picture, got an image of 3 frames"),
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


HEADS = ("EPS", "PPM", "over the limit", "bomb", "long", "no width", "16-bit PNG", "animated PNG", "TIFF of pages")


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


def test_scans_of_a_jpeg_are_limited():
    encoded = encode(Image.fromarray(textured(20, 30)), "JPEG", progressive=True)
    assert read_image(encoded).decode().shape == (20, 30, 3)
    scan = encoded[encoded.rindex(b"\xff\xda") : -2]
    with pytest.raises(ValueError, match="image must have at most 64 scans, got"):
        read_image(encoded[:-2] + 100 * scan + encoded[-2:]).size()


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
        read_image(png_header(20000, 20000)).decode(MOST_IMAGE_PIXELS)
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


@pytest.mark.parametrize("mode", pictures())
def test_pictures_of_every_mode_equal_the_library_bit_for_bit(both, mode):
    ours, library = both
    picture = pictures()[mode]
    values = ours.pixel_values(ours.patches(read_image(picture).decode()))
    assert values.tobytes() == library(picture, return_tensors="np")["pixel_values"].tobytes()


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P many clear"])
def test_files_equal_the_library_bit_for_bit(both, mode, tmp_path):
    ours, library = both
    path = tmp_path / "image.png"
    pictures()[mode].save(path)
    values = ours.pixel_values(ours.patches(read_image(path).decode()))
    assert values.tobytes() == library(str(path), return_tensors="np")["pixel_values"].tobytes()


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
        ({"max_pixel": 5}, "must hold only min_pixels and max_pixels, got 'max_pixel'"),
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
    with pytest.raises(ValueError, match=f"^mm_processor_kwargs {message}"):
        check_limits(limits)
    for refuse in (qwen3.with_limits, qwen3.settings, lambda limits: qwen3.grid(5, 5, limits)):
        with pytest.raises(ValueError, match=message):
            refuse(limits)


def test_a_limit_is_checked_against_the_other_one(qwen3):
    assert check_limits({"max_pixels": 60000}) == {"max_pixels": 60000}
    with pytest.raises(ValueError, match="min_pixels must be at most max_pixels 60000, got 65536"):
        qwen3.with_limits({"max_pixels": 60000})


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
        found = AutoImageProcessor.from_pretrained(directory, backend="pil")
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
        ({"size": {"shortest_edge": 224}}, "size of .* must hold shortest_edge and longest_edge"),
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


def test_torch_is_not_needed(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN3))
    script = f"""
import sys
sys.modules["torch"] = sys.modules["torchvision"] = None
import numpy as np
from vlcache_jax.inputs.images import read_image
from vlcache_jax.inputs.processor import ImageProcessor
import vlcache_jax.cache.keys
import vlcache_jax.inputs.prompt
processor = ImageProcessor.from_pretrained({str(tmp_path)!r})
rgb = read_image(np.zeros((40, 50), np.uint8)).decode()
print(processor.pixel_values(processor.patches(rgb)).shape)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "(288, 1536)\n"


def test_patches_are_a_pair(qwen3):
    assert isinstance(qwen3.patches(textured(40, 50)), Patches)
