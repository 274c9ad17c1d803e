"""What this device does in a second: matrix products, copies, and bytes from the host's memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.benchmarks.floor import DeviceRates
from vlcache_jax.device.programs.base import LINK_GROUPS, LINKED

COPIED = 2**28  # bytes; more than caches hold


def seconds(
    step: Callable[..., Any],
    carry: Any,
    *rest: Any,
    times: int,
    repeats: int,
    choose: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Seconds of `carry = step(carry, *rest)`, by default the median; each call of the device runs it `times` times."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry: Any, *rest: Any) -> Any:
        # Behind the barrier nothing looks the same in every turn, and nothing is moved out of the loop.
        return jax.lax.fori_loop(0, times, lambda _, carry: jax.lax.optimization_barrier(step(carry, *rest)), carry)

    carry = jax.block_until_ready(run(carry, *rest))
    measured = []
    for _ in range(repeats):
        start = time.perf_counter()
        carry = jax.block_until_ready(run(carry, *rest))
        measured.append((time.perf_counter() - start) / times)
    return choose(measured)


def measure_rates(dtype: Any, *, size: int | None = None, copied: int = COPIED, repeats: int = 5) -> DeviceRates:
    """The rates of jax's first device, each the best of `repeats`: a floor is what cannot be had faster.

    Args:
      dtype: of the matrices.
      size: their rows and columns; None is 8192 on a GPU and 2048 on a CPU.
      copied: bytes that are read, and as many that are written.

    Returns:
      Of a CPU `host` is infinite: records are read where they lie, and nothing is loaded.
    """
    is_host = jax.devices()[0].platform == "cpu"
    size = size or (2048 if is_host else 8192)
    times = 1 if is_host else 20
    # As the models multiply: float32 is float32 also where a GPU would round it first.
    product = functools.partial(jnp.matmul, precision="highest" if np.dtype(dtype) == np.float32 else None)
    x, w = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    took = seconds(lambda x, w: product(x, w) * size**-0.5, x, w, times=times, repeats=repeats, choose=min)
    words = jnp.zeros(copied // 4, jnp.float32)
    copying = seconds(lambda words: words + 1, words, times=times, repeats=repeats, choose=min)
    # Engines put records in this many parts, none of which waits for the others: in one, a core copies all of it.
    parts = (1, LINK_GROUPS, LINKED[0] * LINK_GROUPS) * repeats
    host = math.inf if is_host else copied / min(_put_seconds(copied, count) for count in parts)
    return DeviceRates(matrix=2 * size**3 / took, memory=2 * copied / copying, host=host)


def _put_seconds(size: int, parts: int) -> float:
    """Seconds until bytes in so many parts are on the device; each is put as some layers of a record are."""
    sources = np.ones((parts, size // parts), np.uint8)
    start = time.perf_counter()
    jax.block_until_ready([jax.device_put([source], may_alias=True) for source in sources])
    return time.perf_counter() - start


def best(measured: Sequence[DeviceRates]) -> DeviceRates:
    """Of each rate the highest: what is shared with others is never faster than it can be."""
    names = (field.name for field in dataclasses.fields(DeviceRates))
    return DeviceRates(**{name: max(getattr(rates, name) for rates in measured) for name in names})


def told(rates: DeviceRates) -> dict[str, float | str]:
    """The rates for the head of a result; what is infinite as a word, as JSON has no such number."""
    known = dataclasses.asdict(rates).items()
    return {name: value if math.isfinite(value) else "read where it lies" for name, value in known}
