"""What several of the tests here read."""

from __future__ import annotations

import pytest

from tests.study.tables import write_toy


@pytest.fixture
def tsv(tmp_path):
    return write_toy(tmp_path / "toy.tsv")
