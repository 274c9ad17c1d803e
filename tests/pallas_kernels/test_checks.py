"""The checks of kernels on a chip: whether they find what is wrong, tried on the CPU."""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.pallas_kernels import attention, checks
from vlcache_jax.pallas_kernels.cases import KernelCase, packed, relative_error
from vlcache_jax.pallas_kernels.checks import CHECKS


@pytest.fixture
def flawed():
    """A small check of attention with NaN in what some rows see, and empty rows."""
    return functools.partial(checks._attention, KernelCase("packed", 30, 120, 4, 2, 24, packed), flaw=True)


def test_names_are_unique():
    for kernel, found in CHECKS.items():
        assert len({check.name for check in found}) == len(found), kernel
        assert any(check.first for check in found)


def test_a_right_kernel_passes(flawed):
    assert flawed("xla") < 0.04


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, start, end: (q, k, v, start, end - 1), "error must be at most 0.04, got"),
        (lambda q, k, v, start, end: (q, jnp.nan_to_num(k), v, start, end), "got inf"),  # the flaw is lost
        (lambda q, k, v, start, end: (q, k, v, start, end.at[-1].set(9)), "got inf"),  # that of an empty row
    ],
)
def test_a_wrong_kernel_is_found(flawed, monkeypatch, change, message):
    monkeypatch.setattr(checks, "_jitted", lambda *args, **options: attention(*change(*args), **options))
    with pytest.raises(ValueError, match=message):
        flawed("xla")


def test_a_kernel_that_differs_from_run_to_run_is_found(flawed, monkeypatch):
    right, runs = checks._jitted, itertools.count()
    monkeypatch.setattr(checks, "_jitted", lambda *args, **options: right(*args, **options) * (1 + next(runs) * 0.01))
    with pytest.raises(ValueError, match="must be bit-identical when a case is repeated"):
        flawed("xla")


def test_linking_is_compared_to_the_last_bit():
    check = CHECKS["link"][0]
    with pytest.raises(ValueError, match=r"error must be at most 0, got 0\.0"):
        check.error("xla")  # which rounds more often than once


def test_what_is_found_is_told_by_the_case(monkeypatch):
    def fails(implementation):
        raise AssertionError(f"no {implementation}")

    right = checks.Check("a", lambda implementation: 0.0123, first=True)
    monkeypatch.setitem(CHECKS, "attention", (right, checks.Check("b", fails, first=False)))
    assert checks.check_kernel("attention") == "1 cases, largest error 0.012"
    monkeypatch.setitem(CHECKS, "attention", (right, checks.Check("b", fails, first=True)))
    with pytest.raises(ValueError, match=r"b: AssertionError\('no mosaic_gpu'\)"):
        checks.check_kernel("attention")


def test_the_error_is_relative_to_the_row():
    want = np.array([[1.0, -1.0], [0.01, 0.01], [0.0, 0.0], [np.nan, 1.0]])
    assert relative_error(want, want) == 0

    def error(row, column, by):
        out = want.copy()
        out[row, column] += by
        return relative_error(out, want)

    assert [error(0, 0, 0.1), error(1, 1, 0.001)] == pytest.approx([0.1, 0.1])
    assert error(2, 1, 1e-9) == np.inf  # an empty row is exactly 0
    assert error(0, 0, np.nan) == np.inf
    assert relative_error(np.nan_to_num(want), want) == np.inf
