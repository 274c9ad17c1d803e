"""Measurements are no promise to users: their tests run in CI, but for those of the pages that quote them."""

from __future__ import annotations

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def _is_measurement(path: pathlib.Path) -> bool:
    return HERE in path.parents and path.suffix == ".py" and path.name != "test_published.py"


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Where marks leave out all tests of a file, it is not imported either: what it imports takes seconds."""
    if "not slow" in config.getoption("markexpr") and _is_measurement(collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before marks choose what runs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_measurement(item.path):
            item.add_marker("slow")
