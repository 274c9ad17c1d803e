"""Benchmark files for tests."""

from __future__ import annotations

import base64
import csv
import io

import numpy as np
from PIL import Image


def png(seed: int, side: int = 100) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def write_tsv(path, header, *rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([header, *rows])
    return path


def encoded(seed: int) -> str:
    return base64.b64encode(png(seed)).decode()
