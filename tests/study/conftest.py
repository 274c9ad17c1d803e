"""What several of the tests here read."""

from __future__ import annotations

import json

import pytest

from tests.study.tables import encoded, write_tsv


@pytest.fixture
def tsv(tmp_path):
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
    return write_tsv(tmp_path / "toy.tsv", header, *rows)
