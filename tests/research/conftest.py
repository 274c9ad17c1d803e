"""Measurements are no promise to users: their tests run in CI, but for those of the pages that quote them."""

from __future__ import annotations

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before marks choose what runs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.path.name != "test_published.py":
            item.add_marker("ladder")
