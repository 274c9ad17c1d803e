"""Files that cost more than their pixels say, by what they hold; no test looks at a clock."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from vlcache_jax.inputs.image_headers import LIMITS, end_of
from vlcache_jax.inputs.images import read_image, trimmed

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def encode(suffix, picture=PICTURE, **options):
    buffer = io.BytesIO()
    picture.save(buffer, suffix, **options)
    return buffer.getvalue()


JPEG, PNG, GIF, WEBP = (encode(suffix) for suffix in ("JPEG", "PNG", "GIF", "WEBP"))


def segment(marker, data=b""):
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(data)) + data


def in_jpeg(*segments, picture=JPEG):
    return picture[:2] + b"".join(segments) + picture[2:]


def chunk(kind, data=b""):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def in_png(*chunks, end=False):
    place = PNG.index(b"IEND") - 4 if end else 33
    return PNG[:place] + b"".join(chunks) + PNG[place:]


def in_gif(data):
    place = 13 + (3 << ((GIF[10] & 7) + 1))
    return GIF[:place] + data + GIF[place:]


def tiff(extra, *, big=False, exif=()):
    """A picture of 8 x 8 with more tags: (tag, type, count, value or offset)."""
    form, size, head = ("<HHQQ", "<Q", 16) if big else ("<HHII", "<H", 8)

    def directory(entries):
        return struct.pack(size, len(entries)) + b"".join(struct.pack(form, *one) for one in entries) + bytes(head // 2)

    known = [(256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, head)]
    known += [(277, 3, 1, 1), (278, 3, 1, 8), (279, 4, 1, 64), *extra]
    first = head + 64
    if exif:
        second = first + len(directory([*known, (34665, 4, 1, 0)]))
        known.append((34665, 4, 1, second))
    begin = struct.pack("<2sHHHQ", b"II", 43, 8, 0, first) if big else struct.pack("<2sHI", b"II", 42, first)
    return begin + bytes(64) + directory(known) + (directory(exif) if exif else b"")


NUMBERS = LIMITS["numbers in tags"]
REFUSED = {
    "empty comments": (in_jpeg(segment(0xFE) * (1 << 16)), "4096 segments"),
    "comments behind an end": (in_jpeg(b"\xff\xd9" + segment(0xFE) * (1 << 16)), "4096 segments"),
    "bare markers": (in_jpeg(b"\xff\xf0" * (1 << 16)), "4096 segments"),
    "Photoshop's resources": (
        in_jpeg(segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\0\0\0\0\0\0\0" * 5000)),
        "4096 segments",
    ),
    "fill bytes": (in_jpeg(b"\xff" * 5000), "4096 fill bytes"),
    "fill bytes, by and by": (in_jpeg(*[b"\xff" * 1000, segment(0xFE)] * 5), "4096 fill bytes"),
    "bytes between segments": (in_jpeg(segment(0xFE), bytes(1 << 20)), "4096 fill bytes"),
    "tables": (in_jpeg(segment(0xDB, bytes(65 * 1000)) * 5), "262144 bytes of tables"),
    "EXIF": (in_jpeg(segment(0xE1, b"Exif\0\0".ljust(65000)) * 17), "1048576 bytes of EXIF"),
    "scans": (JPEG[:-2] + segment(0xDA, bytes(10)) * 100 + JPEG[-2:], "64 scans"),
    "private chunks": (in_png(chunk(b"prVt") * (1 << 16)), "32768 chunks"),
    "private chunks behind the pixels": (in_png(chunk(b"prVt") * (1 << 16), end=True), "32768 chunks"),
    "empty pixels": (in_png(chunk(b"IDAT") * (1 << 16), end=True), "32768 chunks"),
    "colour profiles": (in_png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(99))) * 300), "256 compressed chunks"),
    "compressed text": (in_png(chunk(b"zTXt", b"a\0\0") * 300, end=True), "256 compressed chunks"),
    "EXIF in a PNG": (in_png(chunk(b"eXIf", bytes(1 << 21))), "1048576 bytes of EXIF"),
    "EXIF as text": (in_png(chunk(b"tEXt", b"Raw profile type exif\0" + b"0" * (1 << 21))), "1048576 bytes of EXIF"),
    "chunks of a WebP": (WEBP[:12] + b"prVt\0\0\0\0" * (1 << 16) + WEBP[12:], "32768 chunks"),
    "EXIF in a WebP": (WEBP + b"EXIF" + struct.pack("<I", 1 << 21) + bytes(1 << 21), "1048576 bytes of EXIF"),
    "tags": (tiff([(40000 + i, 3, 1, 0) for i in range(5000)]), "4096 tags"),
    "tags of a big TIFF": (tiff([(40000, 3, 1, 0)] * 5000, big=True), "4096 tags"),
    "numbers": (tiff([(40000, 5, NUMBERS + 1, 0)]) + bytes(8 * NUMBERS), "262144 numbers in tags"),
    "numbers, by and by": (tiff([(40000, 3, NUMBERS // 2, 0)] * 3) + bytes(NUMBERS), "262144 numbers in tags"),
    "numbers in EXIF": (tiff([], exif=[(40000, 5, NUMBERS + 1, 0)]) + bytes(8 * NUMBERS), "262144 numbers in tags"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_costs_more_than_pixels_is_refused_before_pillow_opens_it(case, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    encoded, limit = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^images\[0\] must have at most {limit}, got at least \d+$"):
        read_image(encoded, name="images[0]").size()


@pytest.mark.parametrize(
    "encoded",
    [
        in_gif(b"\1" * (1 << 20)),
        in_gif(b"!\1\0\0" * (1 << 18)),
        in_gif(b"!\xfe" + b"\1a" * (1 << 18) + b"\0"),
    ],
    ids=["bytes between blocks", "empty blocks", "comments"],
)
def test_what_pillow_reads_byte_by_byte_ends(encoded):
    with pytest.raises(
        ValueError, match=r"^image must be an image that Pillow can .* it takes more than 524288 reads$"
    ):
        read_image(encoded).size()


def test_runs_of_a_bmp_are_limited():
    """Pillow makes pixels of them in Python, each on its own where a row ends early."""
    body = b"\1\1\0\0" * 3000
    head = struct.pack("<IiiHHIIiiII", 40, 3000, 3000, 1, 8, 1, len(body), 0, 0, 256, 0)
    encoded = struct.pack("<2sIII", b"BM", 54 + 1024 + len(body), 0, 54 + 1024) + head + bytes(1024) + body
    with pytest.raises(
        ValueError, match="image must have at most 4194304 pixels as a run-length-encoded BMP, got 9000000"
    ):
        read_image(encoded).size()


def test_tags_that_name_the_same_bytes_are_no_copies():
    """Pillow from version 13 on takes as many bytes as the file has; older ones kept 900 MB of this."""
    encoded = tiff([(40000 + i, 7, 900_000, 64) for i in range(1000)]) + bytes(900_000)
    with pytest.warns(UserWarning, match="Tag data larger than file"):
        image = Image.open(io.BytesIO(encoded))
    assert sum(tag >= 40000 for tag in image.tag_v2) == 1


FILM = np.random.default_rng(1).bytes(8 << 20)  # holds the mark of a scan 126 times
THUMBNAIL = encode("JPEG", PICTURE.resize((16, 12)), progressive=True)
SCANS = b"\xff\xda" * 100
TAKEN = {
    "a film behind the picture": JPEG + FILM,
    "a film behind a progressive one": encode("JPEG", progressive=True) + FILM,
    "a thumbnail with an end": in_jpeg(segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + THUMBNAIL)),
    "scans in a comment": in_jpeg(segment(0xFE, SCANS)),
    "preview and gain map": encode("MPO", save_all=True, append_images=[PICTURE.resize((16, 12))]) + SCANS,
    "a depth map in 500 segments": in_jpeg(segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0".ljust(65000)) * 500),
    "restarts": encode("JPEG", restart_marker_blocks=1),
    "padding": in_jpeg(b"\xff" * 100),
    "text and profile": in_png(chunk(b"iTXt", b"a\0\0\0\0\0b") * 20, chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x"))),
    "an animation of 300": encode("PNG", save_all=True, append_images=[PICTURE.rotate(i) for i in range(1, 300)]),
    "a comment": in_gif(b"!\xfe" + (b"\xff" + bytes(255)) * 4000 + b"\0"),
    "layers of Photoshop": tiff([(37724, 7, 1 << 22, 64)]) + bytes(1 << 22),
    "strips of one row": encode("TIFF", PICTURE.resize((64, 8000)), strip_size=1),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_belongs_to_a_picture_is_taken(case):
    encoded = TAKEN[case]
    with Image.open(io.BytesIO(encoded)) as opened:
        np.testing.assert_array_equal(read_image(encoded).decode(), np.asarray(opened.convert("RGB")))


def test_scans_of_a_jpeg_are_limited():
    encoded = encode("JPEG", progressive=True)
    assert read_image(encoded).decode().shape == (48, 64, 3)
    scan = encoded[encoded.rindex(b"\xff\xda") : -2]
    with pytest.raises(ValueError, match="image must have at most 64 scans, got at least 65"):
        read_image(encoded[:-2] + 100 * scan + encoded[-2:]).size()


def animated(suffix):
    return encode(suffix, save_all=True, append_images=[PICTURE.rotate(180)])


ENDS = {
    "PNG": PNG, "APNG": animated("PNG"), "JPEG": JPEG, "progressive": encode("JPEG", progressive=True), "GIF": GIF,
    "films": animated("GIF"), "WebP": WEBP, "lossless": encode("WEBP", lossless=True), "BMP": encode("BMP"),
    "thumbnail": in_jpeg(segment(0xE1, b"Exif\0\0" + JPEG)),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_file_is_found(name):
    """Whatever stands after it; of a file that was cut off nothing is dropped."""
    file = ENDS[name]
    for rest in (b"", b"\0" * 1000, b"\xff\xd9" * 10, file):
        assert end_of(file + rest) == len(file)
    for size in range(0, len(file), 97):
        assert end_of(file[:size]) == size
    url = f"data:image/x;base64,{base64.b64encode(file).decode()}"
    padded = f"data:image/x;base64,{base64.b64encode(file + bytes(1000)).decode()}"
    assert trimmed(padded) == trimmed(url) == url


@pytest.mark.parametrize("file", [encode("TIFF"), animated("MPO"), b"RIFF1234WAVE", b"BM", b"GIF89a", b"no image", b""])
def test_where_no_end_is_known_all_is_kept(file):
    for rest in (b"", bytes(1000)):
        assert end_of(file + rest) == len(file + rest)


@pytest.mark.parametrize(
    "url", ["https://a/b.png", "data:image/png;base64,%", "data:,a", "data:image/png;base64,", "a"]
)
def test_what_is_no_image_stays_as_it_is(url):
    assert trimmed(url) is url
