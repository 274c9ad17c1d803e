"""The real cases of the kernels: one table for their tests (in small), the compile gates and the benchmarks.

    python -m vlcache_jax.benchmarks.shapes --out benchmarks/results/shapes.json

prints it, with counted operations and bytes, and with what the tiles of the Mosaic GPU kernel load: rows that see much
the same slots share their loads, and a tile whose rows belong to two requests loads the slots of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Intervals = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """A case of attention by its letters, and its intervals as a function of (generator, N, S).

    Attributes:
      small: (N, S) of the same case where it is interpreted.
    """

    name: str
    N: int
    S: int
    H: int
    K: int
    D: int
    intervals: Callable[[np.random.Generator, int, int], Intervals]
    small: tuple[int, int]

    def specs(self, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract arguments of attention."""
        q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((self.N, self.H, self.D), (self.S, self.K, self.D)))
        index = jax.ShapeDtypeStruct((self.N,), jnp.int32)
        return q, k, k, index, index

    def arrays(self, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[jax.Array, ...]:
        """Random arguments of attention, on the default device."""
        keys = jax.random.split(jax.random.key(seed), 3)
        values = (jax.random.normal(key, spec.shape, dtype) for key, spec in zip(keys, self.specs(), strict=False))
        return *values, *(jnp.asarray(x, jnp.int32) for x in self._intervals(seed))

    def in_small(self) -> AttentionShape:
        """The same case with one key-value head and few rows and slots."""
        N, S = self.small
        return dataclasses.replace(self, N=N, S=S, H=self.H // self.K, K=1)

    def operations(self) -> int:
        """Multiplications and additions of both products, of the pairs of rows and slots that are seen."""
        start, end = self._intervals(0)
        return 4 * self.H * self.D * int((end - start).clip(0).sum())

    def bytes(self, itemsize: int = 2) -> int:
        """Least traffic: queries and results, and once every slot that some row sees."""
        return itemsize * self.D * 2 * (self.N * self.H + self.seen_slots() * self.K)

    def seen_slots(self) -> int:
        """Slots that some row sees."""
        start, end = self._intervals(0)
        change = np.zeros(self.S + 1, np.int64)
        np.add.at(change, start[start < end], 1)
        np.add.at(change, end[start < end], -1)
        return int((change.cumsum() > 0).sum())

    def loaded_slots(self) -> int:
        """Slots that the tiles of the Mosaic GPU kernel load, all together."""
        from vlcache_jax.pallas_kernels.attention import mosaic_gpu

        config = mosaic_gpu.default_config(self.N, self.S, self.H, self.K, self.D)
        start, end = (jnp.asarray(x, jnp.int32) for x in self._intervals(0))
        bounds, _ = mosaic_gpu._visits(start, end, self.H // self.K, config)
        return config.block * int(bounds[:, 1].sum())

    def _intervals(self, seed: int) -> Intervals:
        return self.intervals(np.random.default_rng(seed), self.N, self.S)


def cold(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """A whole prefill, or the last chunk of one."""
    return np.zeros(n, int), np.arange(s - n, s) + 1


def stage(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """A stage of a schedule: the text rows at the end of the prompt, then rows scattered over its images."""
    text = n // 8
    image = np.sort(rng.choice(s - text, n - text, replace=False))
    return np.zeros(n, int), np.concatenate([np.arange(s - text, s), image]) + 1


def text(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Late layers: the rows of the question only, and padding."""
    start, end = cold(rng, n, s)
    end[n - n // 4 :] = 0
    return start, end


def requests(rng: np.random.Generator, n: int, s: int, *, count: int, used: float = 0.9) -> Intervals:
    """The last rows of several requests; part of each one's slots waits for its answer."""
    slots, rows = s // count, n // count
    start = np.repeat(np.arange(count) * slots, rows)
    end = start + int(slots * used) - rows + np.tile(np.arange(rows), count) + 1
    rest = n - len(start)
    return np.pad(start, (0, rest)), np.pad(end, (0, rest))


def aligned(rng: np.random.Generator, n: int, s: int, *, count: int) -> Intervals:
    """`requests`, every one's rows at the boundary of a tile, with empty rows between them."""
    rows = n // count * 5 // 8
    start, end = (x.reshape(count, rows) for x in requests(rng, count * rows, s, count=count))
    empty = ((0, 0), (0, n // count - rows))
    return np.pad(start, empty).ravel(), np.pad(end, empty).ravel()


def decode(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """One row each of as many requests."""
    return requests(rng, n, s, count=n)


def windows(rng: np.random.Generator, n: int, s: int, *, size: int) -> Intervals:
    """Rows of consecutive windows, or packed images, which see their own."""
    start = np.arange(n) // size * size
    return start, np.minimum(start + size, n)


def _shapes(heads: int, kv_heads: int, width: int) -> tuple[AttentionShape, ...]:
    """What a text decoder asks for, from cold prefill to decoding."""
    last_rows = functools.partial(requests, count=8)
    at_tiles = functools.partial(aligned, count=8)
    H, K, D = heads, kv_heads, width
    return (
        AttentionShape("cold 4096", 4096, 4096, H, K, D, cold, (75, 150)),
        AttentionShape("cold, last chunk of 20480", 8192, 20480, H, K, D, cold, (45, 330)),
        AttentionShape("stage 2048 of 20480", 2048, 20480, H, K, D, stage, (45, 700)),
        AttentionShape("stage 512 of 20480", 512, 20480, H, K, D, stage, (40, 600)),
        AttentionShape("stage 128 of 20480", 128, 20480, H, K, D, stage, (19, 600)),
        AttentionShape("text rows", 64, 20480, H, K, D, text, (9, 600)),
        AttentionShape("8 requests x 20 rows x 20480", 160, 8 * 20480, H, K, D, last_rows, (24, 1600)),
        AttentionShape("8 requests x 20 rows x 20480, aligned", 256, 8 * 20480, H, K, D, at_tiles, (64, 1600)),
        AttentionShape("decode 1 x 20480", 1, 20480, H, K, D, decode, (1, 600)),
        AttentionShape("decode 8 x 20480", 8, 8 * 20480, H, K, D, decode, (8, 1600)),
        AttentionShape("decode 64 x 4096", 64, 64 * 4096, H, K, D, decode, (9, 1800)),
    )


def _vision(name: str, width: int, size: int) -> AttentionShape:
    seen = functools.partial(windows, size=size)
    return AttentionShape(f"vision, {name}", 16384, 16384, 16, 16, width, seen, (150, 150))


ATTENTION: dict[str, tuple[AttentionShape, ...]] = {
    "Qwen3-VL-8B": (*_shapes(32, 8, 128), _vision("images of 4096 patches", 72, 4096)),
    "Qwen3-VL-32B": _shapes(64, 8, 128),
    "Qwen2.5-VL-7B": (
        *_shapes(28, 4, 128),
        _vision("images of 4096 patches", 80, 4096),
        _vision("windows", 80, 64),
    ),
}


@dataclasses.dataclass(frozen=True)
class LinkShape:
    """A case of linking: T tokens into a pool of S slots."""

    T: int
    S: int
    K: int
    D: int

    def specs(self, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Abstract arguments of link."""
        pool, stored, angle = (
            jax.ShapeDtypeStruct(s, dtype)
            for s in ((self.S, self.K, self.D), (self.T, self.K, self.D), (self.T, 1, self.D // 2))
        )
        return pool, pool, stored, stored, jax.ShapeDtypeStruct((self.T,), jnp.int32), angle, angle

    def bytes(self, itemsize: int = 2) -> int:
        """Least traffic: keys and values read and written, and the angles."""
        return itemsize * self.T * self.D * (4 * self.K + 1)


LINK: dict[str, tuple[LinkShape, ...]] = {
    "Qwen3-VL-8B": (LinkShape(1024, 20480, 8, 128), LinkShape(16384, 20480, 8, 128)),
    "Qwen2.5-VL-7B": (LinkShape(16384, 20480, 4, 128),),
}


def main() -> None:
    import argparse
    import pathlib

    from vlcache_jax.study import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    rows = [
        {
            "model": model,
            "case": shape.name,
            "N": shape.N,
            "H/K x D": f"{shape.H}/{shape.K} x {shape.D}",
            "GFLOP": shape.operations() / 1e9,
            "MB": shape.bytes() / 1e6,
            "slots seen": shape.seen_slots(),
            "loads of a slot": shape.loaded_slots() / shape.seen_slots(),
        }
        for model, shapes in ATTENTION.items()
        for shape in shapes
    ]
    report.publish("Shapes of attention", rows, report.environment("jax"), parser.parse_args().out)


if __name__ == "__main__":
    main()
