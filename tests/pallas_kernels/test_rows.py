"""What is done to rows, as XLA does it, against numpy. test_mosaic_gpu.py runs the same cases through the kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.pallas_kernels import norm_residual, rotate_write
from vlcache_jax.pallas_kernels.cases import relative_error
from vlcache_jax.pallas_kernels.rows_cases import NORM_CASES, ROTATE_CASES, TOLERANCE, NormCase, RotateCase


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*NORM_CASES[:2], NORM_CASES[-1]], ids=lambda case: case.name)
def test_norm(case: NormCase, dtype: str) -> None:
    args = case.inputs(dtype)
    for got, want in zip(case.run(args, "xla"), case.reference(*args), strict=True):
        assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float32") for case in ROTATE_CASES[::2]), (ROTATE_CASES[0], "bfloat16")],
    ids=lambda x: x.name if isinstance(x, RotateCase) else x,
)
def test_rotation_and_writing(case: RotateCase, dtype: str) -> None:
    inputs = case.inputs(dtype)
    found, want = case.run(*inputs, "xla"), case.reference(*inputs)
    for name, got in found._asdict().items():
        if got is None:
            assert not case.return_kv
            continue
        assert relative_error(got, getattr(want, name)) < TOLERANCE[dtype], name
    free = np.isnan(np.asarray(want.v_pool, np.float32)).all((1, 2))
    assert free.any()
    assert np.isnan(np.asarray(found.k_pool, np.float32)[free]).all()  # nothing was written there


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": []}, r"parts must be \[N, 2, G \+ 2, 8\]"),
        ({"parts": [np.zeros((5, 2, 2, 8), np.float32)]}, r"parts must be .* got \[\[5, 2, 2, 8\]\]"),
        ({"parts": [np.zeros((5, 2, 4, 8), np.float16)]}, "parts must be float32 .* got float16"),
        (
            {"cos": np.zeros((5, 1, 8), np.float32)},
            r"cos must have 1 to 4 angles, half the width of a head, got 8",
        ),
        ({"slot": np.zeros(4, np.int32)}, r"slot must be int32 of shape \[5\], got int32 \[4\]"),
        ({"v_pool": np.zeros((9, 2, 8), np.float16)}, "v_pool must be float32"),
        ({"bias": np.zeros((2, 8), np.float32)}, r"bias must be float32 of shape \[2, 4, 8\]"),
        ({"k_norm": np.zeros(4, np.float32)}, r"k_norm must be float32 of shape \[8\]"),
        ({"keep": 6}, "keep must be from 1 to 5, got 6"),
        ({"places": np.zeros((2, 2), np.int32)}, r"places must be int32 of shape \[R\]"),
        ({"implementation": "cudnn"}, r"implementation must be None or one of \('xla', .*\), got 'cudnn'"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    pool, angle = np.zeros((9, 2, 8), np.float32), np.zeros((5, 1, 4), np.float32)
    right = {
        "parts": [np.zeros((5, 2, 4, 8), np.float32)],
        "cos": angle,
        "sin": angle,
        "slot": np.zeros(5, np.int32),
        "k_pool": pool,
        "v_pool": pool,
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(rotate_write, **(right | change)))


@pytest.mark.parametrize(
    ("x", "delta", "scale", "message"),
    [
        ((4, 2, 8), None, (8,), r"x must have shape \[N, M\]"),
        ((4, 8), (1, 8), (8,), r"delta must be bfloat16 of shape \[4, 8\]"),
        ((4, 8), (2, 3, 8), (8,), r"delta must be float32 of shape \[2, 4, 8\], got bfloat16 \[2, 3, 8\]"),
        ((4, 8), (4, 8), (4,), r"scale must be bfloat16 of shape \[8\]"),
    ],
)
def test_wrong_rows_of_a_norm_are_named(x, delta, scale, message) -> None:
    args = [None if shape is None else jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, delta, scale)]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(norm_residual, eps=1e-6), *args)
