"""Products in 8 bits that write nothing dequantised: what a compiled program keeps beside its results is small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from research.architectures import IMPLEMENTATION
from vlcache_jax.pallas_kernels import float8_matmul, mix_experts
from vlcache_jax.pallas_kernels.shapes import ExpertsShape


def products(run: Callable[..., Any]) -> None:
    for rows in (1, 64, 4096):
        inputs, outputs = 4096, 12288
        args = (
            jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16),
            jax.ShapeDtypeStruct((outputs, inputs), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((outputs, inputs // 128), jnp.float32),
        )
        compiled = run(lambda *args: float8_matmul(*args, implementation=IMPLEMENTATION), args)
        # Padded rows, what is made of them, and shares of that: a quarter of the weights' 8 bits at most.
        most = 2 * (rows + 64) * (inputs + outputs) + inputs * outputs // 4 + 2**16
        _expect(compiled, most)


def experts(run: Callable[..., Any]) -> None:
    E, M, F, k = 128, 2048, 768, 8
    for rows in (1, 64, 8192):
        args = ExpertsShape(rows, k, E, M, F).float8_specs()
        compiled = run(lambda *args: mix_experts(*args, implementation=IMPLEMENTATION), args)
        packed = rows * k + 7 * min(E, rows * k) + 256
        shares = min(E, rows * k) * 3 * M * F // 4
        _expect(compiled, 2 * packed * (2 * M + F) + 4 * 16 * packed + shares + 2**21)


def _expect(compiled: jax.stages.Compiled, most: int) -> None:
    found = compiled.memory_analysis()
    if found is None or found.temp_size_in_bytes > most:
        raise AssertionError(f"temporaries must be at most {most} bytes, got {found}")
