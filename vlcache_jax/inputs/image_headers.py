"""What a file holds beside its pixels, counted before Pillow reads it.

Pillow goes through segments, chunks, blocks and tags one by one, in Python, and keeps most of them. Pictures have
dozens; a file with millions would take seconds and gigabytes, however few its pixels are.
"""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator

MOST = {
    "scans": 64,  # of a progressive JPEG: each may go through the whole picture. Encoders make about ten
    "segments": 4096,  # of a JPEG; Photoshop's resources count, too
    "fill bytes": 4096,  # between a JPEG's segments, where Pillow reads byte by byte
    "bytes of tables": 1 << 18,
    "bytes of EXIF": 1 << 20,
    "chunks": 1 << 15,  # of a PNG or a WebP; 64 MiB of pixels in pieces of 8 KiB are 8192
    "compressed chunks": 256,  # each may become a MiB
    "tags": 4096,  # of a TIFF
    "numbers in tags": 1 << 18,  # where the strips of a picture lie, one for each row
}
_MOST_READS = 1 << 19

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # neither an escaped 255, nor padding, nor a restart within a scan
_START_OF_SCAN, _END, _EXIF, _PHOTOSHOP, _COMMENT = 0xDA, 0xD9, 0xE1, 0xED, 0xFE
_APPLICATION = range(0xE0, 0xF0)
_BARE = (0x01, 0xC8, 0xD8, 0xD9, *range(0xF0, 0xFE))  # markers that nothing belongs to

_NUMBERS = (3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 16)  # types of tags; others hold bytes or text
_POINTERS = (34665, 34853, 40965)  # tags that lead to more tags: EXIF, GPS, interoperability


class Reader(io.BytesIO):
    """A file in memory that is not read in more than half a million pieces."""

    def __init__(self, encoded: bytes):
        super().__init__(encoded)
        self._left = _MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_MOST_READS} pieces in it")
        return super().read(size)


def check_parts(encoded: bytes, name: str) -> None:
    """Raises a ValueError if a file has more of something than Pillow reads quickly."""
    walk = next((walk for magic, walk in _WALKS.items() if encoded.startswith(magic)), None)
    counts: Counter[str] = Counter()
    for what, count in () if walk is None else walk(encoded):
        counts[what] += count
        if counts[what] > MOST[what]:
            raise ValueError(f"{name} must have at most {MOST[what]} {what}, got at least {counts[what]}")


def _jpeg(data: bytes) -> Iterator[tuple[str, int]]:
    """Up to the end of the picture: behind it may be a film, and a thumbnail within a segment has an end of its own."""
    place, is_begun = 2, False
    while found := _MARKER.search(data, place):
        if not is_begun:
            yield "fill bytes", found.start() - place
        place, marker = found.end(), data[found.end() - 1]
        if marker == _END and is_begun:
            return
        yield "segments", 1
        if marker in _BARE:
            continue
        begin, place = place + 2, place + max(2, int.from_bytes(data[place : place + 2]))
        if marker == _START_OF_SCAN:
            is_begun = True
            yield "scans", 1
        elif marker == _PHOTOSHOP:
            yield "segments", data.count(b"8BIM", begin, place)
        elif marker == _EXIF and data.startswith(b"Exif", begin):
            yield "bytes of EXIF", place - begin
        elif marker not in _APPLICATION and marker != _COMMENT:
            yield "bytes of tables", place - begin


def _png(data: bytes) -> Iterator[tuple[str, int]]:
    place = 8
    while place + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        yield "chunks", 1
        if kind in (b"iCCP", b"zTXt", b"iTXt"):
            yield "compressed chunks", 1
        if kind == b"eXIf" or data.startswith(b"Raw profile type exif", place + 8):
            yield "bytes of EXIF", size
        if kind == b"IEND":
            return
        place += 12 + size


def _webp(data: bytes) -> Iterator[tuple[str, int]]:
    place = 12
    while place + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, place)
        yield "chunks", 1
        if kind == b"EXIF":
            yield "bytes of EXIF", size
        place += 8 + size + size % 2


def _tiff(data: bytes) -> Iterator[tuple[str, int]]:
    """Of the first page, which alone is read."""
    order, is_big = "<>"[data[:2] == b"MM"], 43 in data[2:4]
    count, pointer, entry = (f"{order}{form}" for form in (("Q", "Q", "HHQ8s") if is_big else ("H", "I", "HHI4s")))
    numbers = {3: f"{order}H", 4: f"{order}I", 13: f"{order}I", 16: f"{order}Q"}
    try:
        places = [*struct.unpack_from(pointer, data, 8 if is_big else 4)]
        for place in places:  # which grows
            [tags] = struct.unpack_from(count, data, place)
            yield "tags", tags
            for i in range(tags):
                where = place + struct.calcsize(count) + i * struct.calcsize(entry)
                tag, kind, values, value = struct.unpack_from(entry, data, where)
                if kind in _NUMBERS and values <= len(data):  # Pillow skips what cannot be in the file
                    yield "numbers in tags", values
                if tag in _POINTERS and kind in numbers:
                    [leads] = struct.unpack_from(numbers[kind], value)
                    places += [leads] if leads not in places else []
    except struct.error:  # it was cut off; Pillow says so
        return


_WALKS: dict[bytes, Callable[[bytes], Iterator[tuple[str, int]]]] = {
    b"\xff\xd8": _jpeg,
    b"\x89PNG": _png,
    b"RIFF": _webp,
    b"II": _tiff,
    b"MM": _tiff,
}


# Where a file ends.


def end_of(encoded: bytes) -> int:
    """The number of bytes up to the end of the image: all of them where the format has no end, or it is not found."""
    find = next((find for magic, find in _ENDS.items() if encoded.startswith(magic)), None)
    end = None if find is None else find(encoded)
    return len(encoded) if end is None else min(end, len(encoded))


def _end_of_jpeg(data: bytes) -> int | None:
    place, is_begun = 2, False
    while found := _MARKER.search(data, place):
        place, marker = found.end(), data[found.end() - 1]
        if marker == _END and is_begun:
            return place
        is_begun |= marker == _START_OF_SCAN
        if marker == _IMAGES and data.startswith(b"MPF\0", place + 2):  # Pillow reads of the images after the first
            return None
        place += 0 if marker in _BARE else max(2, int.from_bytes(data[place : place + 2]))
    return None


def _end_of_png(data: bytes) -> int | None:
    place = 8
    while place + 12 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        place += 12 + size
        if kind == b"IEND":
            return place
    return None


def _end_of_gif(data: bytes) -> int | None:
    """Of all frames."""
    place, flags = 13, data[10:11]
    try:
        place += _colors(flags[0])
        for _ in range(_MOST_READS):
            match data[place]:
                case 0x3B:
                    return place + 1
                case 0x21:
                    place += 2
                case 0x2C:
                    place += 11 + _colors(data[place + 9])
                case _:
                    return None
            while size := data[place]:
                place += 1 + size
            place += 1
    except IndexError:  # it was cut off
        pass
    return None


def _colors(flags: int) -> int:
    """Bytes of a table of colors of a GIF."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _end_of_webp(data: bytes) -> int | None:
    size = int.from_bytes(data[4:8], "little")
    return 8 + size + size % 2 if data[8:12] == b"WEBP" else None


def _end_of_bmp(data: bytes) -> int | None:
    """Of one whose pixels are not compressed."""
    if len(data) < 34:
        return None
    offset, header, width, height, _, bits, compression = struct.unpack_from("<IIiiHHI", data, 10)
    if header < 40 or compression not in (0, 3) or not offset:
        return None
    return max(14 + header + _MOST_COLORS, offset + (width * bits + 31) // 32 * 4 * abs(height))


_MOST_COLORS = 4 * (4 + 256)  # bytes of masks and colors of a BMP at most
_IMAGES = 0xE2  # application's marker of a JPEG that holds several images
_ENDS: dict[bytes, Callable[[bytes], int | None]] = {
    b"\xff\xd8": _end_of_jpeg,
    b"\x89PNG": _end_of_png,
    b"GIF8": _end_of_gif,
    b"RIFF": _end_of_webp,
    b"BM": _end_of_bmp,
}
