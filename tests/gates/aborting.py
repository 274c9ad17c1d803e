"""A kernel that ends its compiler's process before Hopper: what LLVM has no instruction for, it does not refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def commit(run: Callable[..., None]) -> None:
    def copy_kernel(x_ref: Any, out_ref: Any) -> None:
        def body(buffer: Any) -> None:
            buffer[...] = x_ref[...]
            plgpu.commit_smem()
            out_ref[...] = buffer[...]

        pl.run_scoped(body, plgpu.SMEM((128,), jnp.float32))

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    run(plgpu.kernel(copy_kernel, out_type=x, grid=(1,), grid_names=("i",)), (x,))
