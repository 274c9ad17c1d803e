"""Checks of the kernels on a chip: every corner case against its reference in numpy, by kernel.

`python -m vlcache_jax.pallas_kernels.checks REPORT LIMIT KERNEL...` is the child process of a kernel self-test
(`vlcache_jax.kernel_selftest`), which runs some of them; `benchmarks.gpu check` runs all.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vlcache_jax.kernel_selftest import child
from vlcache_jax.pallas_kernels import (
    attention,
    attention_statistics,
    dispatch,
    experts_cases,
    float8_cases,
    float8_matmul,
    mix_experts,
    paged_attention,
    paged_cases,
    rows_cases,
    statistics_cases,
    work_config,
)
from vlcache_jax.pallas_kernels.cases import (
    CASES,
    CODED_LINK_CASES,
    LINK_CASES,
    TOLERANCE,
    WAYS,
    KernelCase,
    LinkCase,
    link_reference,
    reference,
    relative_error,
    scattered,
)

TOGETHER = 8  # checks of a self-test that run at once


class Check(NamedTuple):
    """One comparison.

    Attributes:
      name: Of its case.
      error: (implementation) -> the largest error; raises ValueError if that is too large.
      first: True if the self-test runs it, too.
    """

    name: str
    error: Callable[[str], float]
    first: bool


def _attention(
    case: KernelCase, implementation: str, *, dtype: str = "bfloat16", flaw: bool = False, **fields: Any
) -> float:
    """Check attention. Slots that no row sees have any content; with `flaw`, so does one that some rows see."""
    args = case.inputs(dtype, poison=True, flaw=flaw)
    run: Callable[..., jax.Array] = functools.partial(_jitted, scale=case.scale, implementation=implementation)
    if fields:
        run = functools.partial(_cut, implementation, scale=case.scale or case.D**-0.5, **fields)
    return _compare([run(*args), run(*args)], reference(*args, case.scale), TOLERANCE[dtype])


_jitted = jax.jit(attention, static_argnames=("scale", "implementation"))


def _cut(implementation: str, *args: jax.Array, scale: float, **fields: Any) -> jax.Array:
    from vlcache_jax.pallas_kernels.attention import mosaic_gpu

    interpret = dispatch.interpreter(dispatch.Choice("attention", "", implementation, "checked"))
    return mosaic_gpu.attention(*args, scale=scale, config=mosaic_gpu.AttentionConfig(**fields), interpret=interpret)


def _paged(
    case: Callable[[np.random.Generator], paged_cases.PagedRows],
    heads: int,
    kv_heads: int,
    width: int,
    implementation: str,
    *,
    dtype: str = "bfloat16",
    decode: bool = False,
    flaw: bool = False,
    count: int = 0,
    programs: int | None = None,
    packed: bool = False,
) -> float:
    """Check paged attention. Some rows see nothing; there are at least `count` rows, and `programs` programs.

    Packed queries are NaN at places without a row.
    """
    rows = case(np.random.default_rng(0))
    count = max(count, -(-max(len(rows.table), 1) // 16) * 16)
    arrays = paged_cases.arrays(rows, count, heads, kv_heads, width, poison=True, flaw=flaw)
    q, k, v = (jax.numpy.asarray(x, dtype) for x in arrays)
    shape = jax.ShapeDtypeStruct(q.shape, dtype)
    config = work_config(count, len(rows.tables) + 1, 40, shape, kv_heads, decode=decode, implementation=implementation)
    if programs is not None and config.programs > 1:
        config = dataclasses.replace(config, programs=programs, pieces=programs + 3)
    work = rows.work(config)
    end = rows.end.copy()
    end[::7] = 0
    ends = jax.numpy.asarray(np.pad(end, (0, count - len(end))), jax.numpy.int32)
    run = jax.jit(functools.partial(paged_attention, packed=packed, implementation=implementation))
    given = q
    if packed:
        places = np.asarray(work.packing())
        given = q.at[places].get(mode="fill", fill_value=np.nan)
    runs = [run(given, k, v, work, end=ends) for _ in range(2)]
    return _compare(runs, paged_cases.reference(dataclasses.replace(rows, end=end), q, k, v), TOLERANCE[dtype])


def _link(case: LinkCase, implementation: str, *, dtype: str = "bfloat16") -> float:
    args = case.inputs(dtype)
    runs = zip(*(case.run(args, implementation) for _ in range(2)), strict=True)
    return max(
        _compare(list(pools), want.astype(np.float64), 0.0)
        for pools, want in zip(runs, link_reference(*args, **case.options()), strict=True)
    )


def _statistics(case: statistics_cases.StatisticsCase, implementation: str, **inputs: Any) -> float:
    """Check attention scores. Weights within a thousandth of the threshold may be counted or not."""
    args = case.inputs(**{"dtype": "bfloat16"} | inputs)
    run = jax.jit(functools.partial(attention_statistics, scale=case.scale, implementation=implementation))
    runs = [run(*args) for _ in range(2)]
    want = statistics_cases.reference(*args, scale=case.scale, within=1e-3)
    for _, zeros in runs:
        if (np.asarray(zeros) < want.least).any() or (np.asarray(zeros) > want.most).any():
            raise ValueError(f"zeros must be from {want.least} to {want.most}, got {zeros}")
    return _compare([received for received, _ in runs], want.received, 1e-3)


def _norm(case: rows_cases.NormCase, implementation: str, *, dtype: str = "bfloat16") -> float:
    args = case.inputs(dtype)
    runs = zip(*(case.run(args, implementation) for _ in range(2)), strict=True)
    compared = zip(runs, case.reference(*args), (0.0, rows_cases.TOLERANCE[dtype]), strict=True)
    return max(_compare(list(pair), want, tolerance) for pair, want, tolerance in compared)


def _rotate(case: rows_cases.RotateCase, implementation: str, *, dtype: str = "bfloat16") -> float:
    """Check rotation. Without norms all results equal the reference to the last bit; values always do."""
    args, options = case.inputs(dtype)
    runs = [case.run(args, options, implementation) for _ in range(2)]
    want = case.reference(args, options)
    tolerance = rows_cases.TOLERANCE[dtype] * case.normed
    tolerances = rows_cases.RotateResult(*[tolerance] * 5)._replace(v_pool=0.0, raw_v=0.0)
    return max(_compare([run[i] for run in runs], want[i], tolerances[i]) for i, x in enumerate(want) if x is not None)


def _experts(case: experts_cases.ExpertsCase, implementation: str, *, dtype: str = "bfloat16") -> float:
    args = case.inputs(dtype)
    run = jax.jit(functools.partial(mix_experts, first=case.first, implementation=implementation))
    want = experts_cases.reference(*args, first=case.first)
    return _compare([run(*args) for _ in range(2)], want, TOLERANCE[dtype])


def _float8(case: float8_cases.Float8Case, implementation: str, *, dtype: str = "bfloat16") -> float:
    args = case.inputs(dtype)
    run = jax.jit(functools.partial(float8_matmul, implementation=implementation))
    return _compare([run(*args) for _ in range(2)], case.reference(args[0]), TOLERANCE[dtype])


def _float8_experts(case: experts_cases.ExpertsCase, implementation: str, *, dtype: str = "bfloat16") -> float:
    args, whole = float8_cases.experts_inputs(case, dtype)
    run = jax.jit(functools.partial(mix_experts, first=case.first, implementation=implementation))
    want = float8_cases.experts_reference(case, args, whole)
    return _compare([run(*args) for _ in range(2)], want, TOLERANCE[dtype])


def _compare(runs: list[jax.Array], want: np.ndarray, tolerance: float) -> float:
    """Return the error of the first run; all runs must be equal to the last bit."""
    if not np.isfinite(want).any():
        raise ValueError("a case must have finite results, because NaN is compared as equal")
    first, *others = (np.asarray(run, np.float64) for run in runs)
    error = relative_error(first, want)
    if error > tolerance:
        raise ValueError(f"error must be at most {tolerance:g}, got {error:.3g}")
    if not all(np.array_equal(first, other, equal_nan=True) for other in others):
        raise ValueError("results must be bit-identical when a case is repeated, got different ones")
    return error


_REAL = KernelCase("scattered, heads of 8B", 200, 1032, 32, 8, 128, scattered)
_FLAWED = [CASES[i] for i in (0, 2, 4)]
_FLOAT16 = [case for case in CASES if case.name in ("packed", "windows")]

_HEADS = ((32, 8, 128), (28, 4, 128), (8, 2, 64), (9, 1, 128), (3, 3, 64))

# The checks of each kernel, by its name in `dispatch`. A kernel without an entry runs only if it is requested. The last
# check of each is small, for rehearsals.
CHECKS: dict[str, tuple[Check, ...]] = {
    "attention": (
        *(Check(case.name, functools.partial(_attention, case), first=True) for case in (*CASES, _REAL)),
        *(
            Check(f"{case.name}, NaN", functools.partial(_attention, case, flaw=True), first=True)
            for case in _FLAWED
        ),
        *(
            Check(f"{case.name}, float16", functools.partial(_attention, case, dtype="float16"), first=True)
            for case in _FLOAT16
        ),
        *(
            Check(f"{case.name}, {fields}", functools.partial(_attention, case, **fields), first=False)
            for case, fields in WAYS
        ),
    ),
    "paged_attention": (
        *(
            Check(f"{case.__name__}, {h}/{k} heads of {d}", functools.partial(_paged, case, h, k, d), first=True)
            for case, (h, k, d) in zip(paged_cases.CASES, itertools.cycle(_HEADS), strict=False)
        ),
        *(
            Check(
                f"{case.__name__}, decoding, {h}/{k} heads of {d}",
                functools.partial(_paged, case, h, k, d, decode=True), first=True,
            )
            for case, (h, k, d) in zip(paged_cases.DECODING, itertools.cycle(_HEADS), strict=False)
        ),
        *(
            Check(f"{case.__name__}, NaN", functools.partial(_paged, case, 8, 2, 64, flaw=True), first=True)
            for case in (paged_cases.requests, paged_cases.two_levels)
        ),
        Check("causal, many rows", functools.partial(_paged, paged_cases.causal, 32, 8, 128, count=2048), first=True),
        *(
            Check(
                f"{case.__name__}, few programs",
                functools.partial(_paged, case, 32, 8, 128, programs=3), first=True,
            )
            for case in (paged_cases.requests, paged_cases.two_levels)
        ),
        Check(
            "two levels, packed", functools.partial(_paged, paged_cases.two_levels, 8, 2, 64, packed=True), first=True
        ),
        Check("decode, float16", functools.partial(_paged, paged_cases.decode, 8, 2, 64, dtype="float16"), first=True),
    ),
    "link": (
        *(Check(case.name, functools.partial(_link, case), first=True) for case in LINK_CASES),
        *(
            Check(f"{case.name}, float16", functools.partial(_link, case, dtype="float16"), first=True)
            for case in LINK_CASES[:2]
        ),
    ),
    "link_coded": (
        *(Check(case.name, functools.partial(_link, case), first=True) for case in CODED_LINK_CASES),
        *(
            Check(f"{case.name}, float16", functools.partial(_link, case, dtype="float16"), first=True)
            for case in CODED_LINK_CASES[:2]
        ),
    ),
    "statistics": (
        *(Check(case.name, functools.partial(_statistics, case), first=True) for case in statistics_cases.CASES),
        *(
            Check(f"{case.name}, {name}", functools.partial(_statistics, case, **inputs), first=True)
            for case in statistics_cases.CASES[1:2]
            for name, inputs in (("NaN", {"flaw": True}), ("float16", {"dtype": "float16"}))
        ),
    ),
    "norm_residual": (
        *(Check(case.name, functools.partial(_norm, case), first=True) for case in rows_cases.NORM_CASES),
        Check("float16", functools.partial(_norm, rows_cases.NORM_CASES[0], dtype="float16"), first=True),
    ),
    "rotate_write": (
        *(Check(case.name, functools.partial(_rotate, case), first=True) for case in rows_cases.ROTATE_CASES),
        Check("float16", functools.partial(_rotate, rows_cases.ROTATE_CASES[0], dtype="float16"), first=True),
    ),
    "experts": (
        *(
            Check(case.name, functools.partial(_experts, case), first=True)
            for case in (*experts_cases.CASES, *experts_cases.REAL)
        ),
        *(
            Check(f"{case.name}, float16", functools.partial(_experts, case, dtype="float16"), first=True)
            for case in experts_cases.CASES[:2]
        ),
    ),
    "float8_matmul": (
        *(
            Check(case.name, functools.partial(_float8, case), first=True)
            for case in (*float8_cases.CASES, *float8_cases.REAL)
        ),
        Check("float16", functools.partial(_float8, float8_cases.CASES[0], dtype="float16"), first=True),
    ),
    "float8_experts": tuple(
        Check(case.name, functools.partial(_float8_experts, case), first=True)
        for case in (*float8_cases.REAL_EXPERTS, *float8_cases.EXPERTS)
    ),
}  # fmt: skip


_HOPPERS_ALONE = ("statistics",)
# The name of each kernel's portable version, which has the same checks.
PORTABLE = {kernel: dispatch.checked_as(kernel, dispatch.PORTABLE) for kernel in CHECKS if kernel not in _HOPPERS_ALONE}
_FORMS = {name: (kernel, dispatch.PORTABLE) for kernel, name in PORTABLE.items()}


def check_kernel(name: str) -> str:
    """Run the self-test of a kernel, or of its portable version; return the result as text.

    Raises:
      ValueError: A result is wrong; the message has the case.
    """
    kernel, implementation = _FORMS.get(name, (name, dispatch.HOPPERS))
    first = [check for check in CHECKS[kernel] if check.first]
    # Most of their time is compiling; each check uses one core if there are several.
    with concurrent.futures.ThreadPoolExecutor(min(TOGETHER, os.cpu_count() or 1)) as pool:
        runs = [pool.submit(check.error, implementation) for check in first]
    errors = []
    for check, run in zip(first, runs, strict=True):
        try:
            errors.append(run.result())
        except Exception as error:
            raise ValueError(f"{check.name}: {error if isinstance(error, ValueError) else repr(error)}") from error
    return f"{len(errors)} cases, largest error {max(errors):.2g}"


def main() -> None:
    report, limit, *kernels = sys.argv[1:]
    child.run(
        report,
        float(limit),
        kernels,
        lambda: dispatch.check_device(_FORMS.get(kernels[0], ("", dispatch.HOPPERS))[1], jax.devices()[0]),
        check_kernel,
    )


if __name__ == "__main__":
    main()
