"""Limits on the parts of image files, checked before Pillow reads them.

Pillow iterates over segments, chunks, blocks and tags in Python, and stores most of them. Ordinary images have dozens.
A file with millions would take seconds and gigabytes, even if it has few pixels.
"""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator

LIMITS = {
    "scans": 64,  # of a progressive JPEG: each may cover the full image. Encoders write about ten
    "segments": 4096,  # of a JPEG, including Photoshop resources
    "fill bytes": 4096,  # between segments of a JPEG, which Pillow reads one by one
    "bytes of tables": 1 << 18,
    "bytes of EXIF": 1 << 20,
    "chunks": 1 << 15,  # of a PNG or a WebP; 64 MiB of pixels in chunks of 8 KiB are 8192
    "compressed chunks": 256,  # each may expand to 1 MiB
    "tags": 4096,  # of a TIFF
    "numbers in tags": 1 << 18,  # such as offsets of strips, one per pixel row
}
_MAX_READS = 1 << 19

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # no escaped 255, no padding, no restart marker within a scan
_START_OF_SCAN, _END, _EXIF, _PHOTOSHOP, _COMMENT = 0xDA, 0xD9, 0xE1, 0xED, 0xFE
_APPLICATION = range(0xE0, 0xF0)
_BARE = (0x01, 0xC8, 0xD8, 0xD9, *range(0xF0, 0xFE))  # markers without data

_NUMBERS = (3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 16)  # numeric tag types; others are bytes or text
_POINTERS = (34665, 34853, 40965)  # tags that point to more tags: EXIF, GPS, interoperability


class Reader(io.BytesIO):
    """File in memory that raises a ValueError after half a million reads."""

    def __init__(self, encoded: bytes):
        super().__init__(encoded)
        self._left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it takes more than {_MAX_READS} reads")
        return super().read(size)


def check_parts(encoded: bytes, name: str) -> None:
    """Raise a ValueError if a file has more parts of one kind than Pillow reads quickly."""
    walk = next((walk for magic, walk in _WALKS.items() if encoded.startswith(magic)), None)
    counts: Counter[str] = Counter()
    for what, count in () if walk is None else walk(encoded):
        counts[what] += count
        if counts[what] > LIMITS[what]:
            raise ValueError(f"{name} must have at most {LIMITS[what]} {what}, got at least {counts[what]}")


def _jpeg(data: bytes) -> Iterator[tuple[str, int]]:
    """Count up to the end of the image: a video may follow it, and a thumbnail in a segment has its own end marker."""
    offset, is_begun = 2, False
    while found := _MARKER.search(data, offset):
        if not is_begun:
            yield "fill bytes", found.start() - offset
        offset, marker = found.end(), data[found.end() - 1]
        if marker == _END and is_begun:
            return
        yield "segments", 1
        if marker in _BARE:
            continue
        begin, offset = offset + 2, offset + max(2, int.from_bytes(data[offset : offset + 2]))
        if marker == _START_OF_SCAN:
            is_begun = True
            yield "scans", 1
        elif marker == _PHOTOSHOP:
            yield "segments", data.count(b"8BIM", begin, offset)
        elif marker == _EXIF and data.startswith(b"Exif", begin):
            yield "bytes of EXIF", offset - begin
        elif marker not in _APPLICATION and marker != _COMMENT:
            yield "bytes of tables", offset - begin


def _png(data: bytes) -> Iterator[tuple[str, int]]:
    offset = 8
    while offset + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, offset)
        yield "chunks", 1
        if kind in (b"iCCP", b"zTXt", b"iTXt"):
            yield "compressed chunks", 1
        if kind == b"eXIf" or data.startswith(b"Raw profile type exif", offset + 8):
            yield "bytes of EXIF", size
        if kind == b"IEND":
            return
        offset += 12 + size


def _webp(data: bytes) -> Iterator[tuple[str, int]]:
    offset = 12
    while offset + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, offset)
        yield "chunks", 1
        if kind == b"EXIF":
            yield "bytes of EXIF", size
        offset += 8 + size + size % 2


def _tiff(data: bytes) -> Iterator[tuple[str, int]]:
    """Count the parts of the first page, the only one that is read."""
    order, is_big = "<>"[data[:2] == b"MM"], 43 in data[2:4]
    count, pointer, entry = (f"{order}{form}" for form in (("Q", "Q", "HHQ8s") if is_big else ("H", "I", "HHI4s")))
    numbers = {3: f"{order}H", 4: f"{order}I", 13: f"{order}I", 16: f"{order}Q"}
    try:
        offsets = [*struct.unpack_from(pointer, data, 8 if is_big else 4)]
        for offset in offsets:  # the list grows during the loop
            [tags] = struct.unpack_from(count, data, offset)
            yield "tags", tags
            for i in range(tags):
                entry_at = offset + struct.calcsize(count) + i * struct.calcsize(entry)
                tag, kind, values, value = struct.unpack_from(entry, data, entry_at)
                if kind in _NUMBERS and values <= len(data):  # Pillow skips values that cannot fit in the file
                    yield "numbers in tags", values
                if tag in _POINTERS and kind in numbers:
                    [target] = struct.unpack_from(numbers[kind], value)
                    offsets += [target] if target not in offsets else []
    except struct.error:  # the file is truncated; Pillow reports it
        return


_WALKS: dict[bytes, Callable[[bytes], Iterator[tuple[str, int]]]] = {
    b"\xff\xd8": _jpeg,
    b"\x89PNG": _png,
    b"RIFF": _webp,
    b"II": _tiff,
    b"MM": _tiff,
}


# End of the image in a file.


def end_of(encoded: bytes) -> int:
    """Return the number of bytes up to the end of the image, or of the full file if the end is not found."""
    find = next((find for magic, find in _ENDS.items() if encoded.startswith(magic)), None)
    end = None if find is None else find(encoded)
    return len(encoded) if end is None else min(end, len(encoded))


def _end_of_jpeg(data: bytes) -> int | None:
    offset, is_begun = 2, False
    while found := _MARKER.search(data, offset):
        offset, marker = found.end(), data[found.end() - 1]
        if marker == _END and is_begun:
            return offset
        is_begun |= marker == _START_OF_SCAN
        if marker == _IMAGES and data.startswith(b"MPF\0", offset + 2):  # Pillow also reads the images after the first
            return None
        offset += 0 if marker in _BARE else max(2, int.from_bytes(data[offset : offset + 2]))
    return None


def _end_of_png(data: bytes) -> int | None:
    offset = 8
    while offset + 12 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, offset)
        offset += 12 + size
        if kind == b"IEND":
            return offset
    return None


def _end_of_gif(data: bytes) -> int | None:
    """Return the end of the last frame."""
    offset, flags = 13, data[10:11]
    try:
        offset += _colors(flags[0])
        for _ in range(_MAX_READS):
            match data[offset]:
                case 0x3B:
                    return offset + 1
                case 0x21:
                    offset += 2
                case 0x2C:
                    offset += 11 + _colors(data[offset + 9])
                case _:
                    return None
            while size := data[offset]:
                offset += 1 + size
            offset += 1
    except IndexError:  # the file is truncated
        pass
    return None


def _colors(flags: int) -> int:
    """Return the size of a GIF's color table in bytes."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _end_of_webp(data: bytes) -> int | None:
    size = int.from_bytes(data[4:8], "little")
    return 8 + size + size % 2 if data[8:12] == b"WEBP" else None


def _end_of_bmp(data: bytes) -> int | None:
    """Return the end of a BMP without compression."""
    if len(data) < 34:
        return None
    offset, header, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", data, 10)
    if header < 40 or compression not in (0, 3) or not offset:
        return None
    return max(14 + header + _MAX_COLORS, offset + (width * bits + 31) // 32 * 4 * abs(height))


_MAX_COLORS = 4 * (4 + 256)  # maximum bytes of masks and colors of a BMP
_IMAGES = 0xE2  # application marker of a JPEG that contains several images
_ENDS: dict[bytes, Callable[[bytes], int | None]] = {
    b"\xff\xd8": _end_of_jpeg,
    b"\x89PNG": _end_of_png,
    b"GIF8": _end_of_gif,
    b"RIFF": _end_of_webp,
    b"BM": _end_of_bmp,
}
