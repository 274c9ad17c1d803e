"""Benchmark files for tests."""

from __future__ import annotations

import base64
import csv
import io
import json

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


def write_toy(path):
    """Six questions about eight pictures; the third one's picture is the first one's."""
    header = ["index", "category", "question", "answer", "image"]
    rows = [
        ["0", "one", "What?", "a cat", encoded(0)],
        ["1", "one", "Where?", "there", encoded(1)],
        ["2", "one", "Who?", "me", "0"],
        ["3", "two", "Which?", "image 1", str([encoded(3), encoded(4)])],
        ["4", "two", "More?", "image 2", json.dumps([encoded(5), encoded(6)])],
        ["5", "two", "How?", "so", json.dumps([encoded(7), encoded(8)])],
    ]
    return write_tsv(path, header, *rows)
