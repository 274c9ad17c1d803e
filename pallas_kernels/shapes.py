"""The real cases of the kernels: one table for their tests (in small), the compile tests and the benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.pallas_kernels import CODECS, PAGE, Shared, Work, make_work, work_config


class SeenSlots(NamedTuple):
    """Slots that the rows of a case see.

    Attributes:
      table: The request through whose slots each row looks, `[n]`.
      start, end: The slots start <= s < end of the request that each row sees, `[n]`.
      lengths: Slots of each request, `[T]`.
      prefix: Number of first slots, in full pages, that are the same in all requests.
    """

    table: np.ndarray
    start: np.ndarray
    end: np.ndarray
    lengths: np.ndarray
    prefix: int = 0


class Paged(NamedTuple):
    """A case in pages of 128 slots: arguments of `make_work`.

    Attributes:
      table, start, end: As in `SeenSlots`.
      tables: For each request the pool's page of each of its pages, in random order; page 0 belongs to no request.
      shared: The prefix that they have in common, if there is one.
      pages: Number of pages of the pool, with page 0.
    """

    table: np.ndarray
    start: np.ndarray
    end: np.ndarray
    tables: list[np.ndarray]
    shared: list[Shared]
    pages: int


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """A case of attention by its letters, and the slots that its rows see as a function of (generator, N, S).

    In the plain contract the requests' slots lie one after the other in a pool of S slots, and a shared prefix is
    repeated for each request. In the paged contract it is present once.

    Attributes:
      small: (N, S) of the same case when it is interpreted.
      has_pages: True if it is a case of the paged contract, too.
    """

    name: str
    N: int
    S: int
    H: int
    K: int
    D: int
    seen: Callable[[np.random.Generator, int, int], SeenSlots]
    small: tuple[int, int]
    has_pages: bool = True

    def specs(self, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return abstract arguments of attention."""
        q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((self.N, self.H, self.D), (self.S, self.K, self.D)))
        index = jax.ShapeDtypeStruct((self.N,), jnp.int32)
        return q, k, k, index, index

    def paged_specs(self, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return abstract q, k and v of paged attention."""
        q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((self.N, self.H, self.D), self._pool))
        return q, k, k

    def arrays(self, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return random arguments of attention, on the default device, with the values of `paged_arrays`."""
        q, k, v = self.paged_arrays(dtype, seed)
        slots = jnp.asarray(self._places())
        seen = self.rows(seed)
        first = (np.cumsum(seen.lengths) - seen.lengths)[seen.table]
        return q, k[slots], v[slots], *(jnp.asarray(first * (seen.start < seen.end) + x, jnp.int32) for x in seen[1:3])

    def paged_arrays(self, dtype: Any = jnp.bfloat16, seed: int = 0) -> tuple[jax.Array, ...]:
        """Return random q, k and v of paged attention, on the default device; page 0 is zero."""
        q, k, v = (
            jax.random.normal(key, spec.shape, dtype)
            for key, spec in zip(jax.random.split(jax.random.key(seed), 3), self.paged_specs(), strict=True)
        )
        return q, k.at[:PAGE].set(0), v.at[:PAGE].set(0)

    def rows(self, seed: int = 0) -> SeenSlots:
        """Return the slots that the rows see."""
        return self.seen(np.random.default_rng(seed), self.N, self.S)

    def paged(self, seed: int = 0) -> Paged:
        """Return the case in pages."""
        seen = self.rows(seed)
        common = seen.prefix // PAGE
        own = -(-seen.lengths // PAGE) - common
        count = 1 + common + int(own.sum())
        order = 1 + np.random.default_rng(seed).permutation(count - 1)
        first = np.cumsum(own) - own + common
        tables = [np.concatenate([order[:common], order[a : a + n]]) for a, n in zip(first, own, strict=True)]
        shared = [Shared(range(len(tables)), common)] if common else []
        return Paged(*seen[:3], tables, shared, count)

    def work(self, implementation: str | None = None, *, shared: bool = True, seed: int = 0, **cut: Any) -> Work:
        """Return the work list of paged attention by an implementation.

        Args:
          shared: True if the work list uses a shared prefix.
          cut: Fields of its configuration that differ from the defaults.
        """
        case = self.paged(seed)
        q, *_ = self.paged_specs()
        pages = max(map(len, case.tables))
        usual = work_config(
            self.N, len(case.tables), pages, q, self.K,
            decode=self.is_decode, shared=shared and bool(case.shared), implementation=implementation,
        )  # fmt: skip
        config = dataclasses.replace(usual, **cut)
        return make_work(*case[:3], case.tables, config, shared=case.shared if shared else ())

    @property
    def is_decode(self) -> bool:
        """True if each row is of another request."""
        seen = self.rows()
        return bool(np.bincount(seen.table[seen.start < seen.end]).max() == 1)

    def in_small(self) -> AttentionShape:
        """Return the same case with one key-value head and few rows and slots."""
        N, S = self.small
        return dataclasses.replace(self, N=N, S=S, H=self.H // self.K, K=1)

    def operations(self) -> int:
        """Return the multiplications and additions of both products, for the pairs of rows and slots that are seen."""
        seen = self.rows()
        return 4 * self.H * self.D * int((seen.end - seen.start).clip(0).sum())

    def bytes(self, itemsize: int = 2, *, paged: bool = True) -> int:
        """Return the minimum bytes of traffic: queries and results, and once every slot that some row sees."""
        return itemsize * self.D * 2 * (self.N * self.H + self.seen_slots(paged=paged) * self.K)

    def seen_slots(self, *, paged: bool = True) -> int:
        """Return the number of slots that some row sees; unless `paged`, a shared prefix counts once for each
        request.
        """
        seen = self.rows()
        first = (np.cumsum(seen.lengths) - seen.lengths)[seen.table]
        some = seen.start < seen.end
        change = np.zeros(self.S + 1, np.int64)
        np.add.at(change, (first + seen.start)[some], 1)
        np.add.at(change, (first + seen.end)[some], -1)
        slots = np.flatnonzero(change.cumsum() > 0)
        return len(np.unique(self._places()[slots]) if paged else slots)

    @property
    def _pool(self) -> tuple[int, int, int]:
        return self.paged().pages * PAGE, self.K, self.D

    def _places(self, seed: int = 0) -> np.ndarray:
        """Return for each slot of the plain pool its slot in the paged one; slots of no request are in page 0."""
        places = np.zeros(self.S, np.int64)
        at = 0
        for pages, length in zip(self.paged(seed).tables, self.rows(seed).lengths, strict=True):
            slots = pages[:, None] * PAGE + np.arange(PAGE)
            places[at : at + length] = slots.ravel()[:length]
            at += length
        return places


def _one(start: np.ndarray, end: np.ndarray, s: int) -> SeenSlots:
    return SeenSlots(np.zeros(len(start), int), start, end, np.array([s]))


def cold(rng: np.random.Generator, n: int, s: int) -> SeenSlots:
    """Return a full prefill, or the last chunk of one."""
    return _one(np.zeros(n, int), np.arange(s - n, s) + 1, s)


def stage(rng: np.random.Generator, n: int, s: int) -> SeenSlots:
    """Return a stage of a schedule: the text rows at the end of the prompt, then rows scattered over its images."""
    text = n // 8
    image = np.sort(rng.choice(s - text, n - text, replace=False))
    return _one(np.zeros(n, int), np.concatenate([np.arange(s - text, s), image]) + 1, s)


def text(rng: np.random.Generator, n: int, s: int) -> SeenSlots:
    """Return late layers: the rows of the question only, and padding."""
    end = np.arange(s - n, s) + 1
    end[n - n // 4 :] = 0
    return _one(np.zeros(n, int), end, s)


def requests(rng: np.random.Generator, n: int, s: int, *, count: int, used: float = 0.9) -> SeenSlots:
    """Return synthetic input of attention: `n` rows, the last ones of `count` requests with `s` slots each.

    Requests fill the fraction `used` of their slots; the rest is left for their outputs.
    """
    slots, rows = s // count, n // count
    table, row = np.divmod(np.arange(n), rows)
    end = np.where(table < count, int(slots * used) - rows + row + 1, 0)
    return SeenSlots(np.minimum(table, count - 1), np.zeros(n, int), end, np.full(count, slots))


def decode(rng: np.random.Generator, n: int, s: int) -> SeenSlots:
    """Return one row each of as many requests."""
    return requests(rng, n, s, count=n)


def beside(rng: np.random.Generator, n: int, s: int) -> SeenSlots:
    """Return rows of which an eighth decode, for requests of a fifth of the longest length up to it.

    The other rows are the last rows of a prefill of that length.
    """
    decoding = n // 8
    longest = int(s / (0.6 * decoding + 1))
    lengths = np.append(rng.permutation(np.linspace(longest // 5, longest, decoding).astype(int)), longest)
    table = np.minimum(np.arange(n), decoding)
    end = np.append(lengths[:-1], np.arange(longest - (n - decoding), longest) + 1)
    return SeenSlots(table, np.zeros(n, int), end, lengths)


def questions(rng: np.random.Generator, n: int, s: int, *, rows: int) -> SeenSlots:
    """Return the last rows of several requests with one long prefix, after which each has at least two pages of its
    own.
    """
    count = n // rows
    slots = s // count
    prefix = (slots // PAGE - 2) * PAGE
    table, row = np.divmod(np.arange(n), rows)
    ends = prefix + rng.integers(rows, slots - prefix, count)
    return SeenSlots(table, np.zeros(n, int), ends[table] - rows + row + 1, np.full(count, slots), prefix)


def windows(rng: np.random.Generator, n: int, s: int, *, size: int) -> SeenSlots:
    """Return rows of consecutive windows, or packed images, which see their own."""
    start = np.arange(n) // size * size
    return _one(start, np.minimum(start + size, n), s)


def _shapes(heads: int, kv_heads: int, width: int) -> tuple[AttentionShape, ...]:
    """Return the cases of a text decoder, from cold prefill to decoding."""
    last_rows = functools.partial(requests, count=8)
    one_each, some_each = (functools.partial(questions, rows=rows) for rows in (1, 20))
    H, K, D = heads, kv_heads, width
    return (
        AttentionShape("cold 4096", 4096, 4096, H, K, D, cold, (75, 150)),
        AttentionShape("cold, last chunk of 20480", 8192, 20480, H, K, D, cold, (45, 330)),
        AttentionShape("stage 2048 of 20480", 2048, 20480, H, K, D, stage, (45, 700)),
        AttentionShape("stage 512 of 20480", 512, 20480, H, K, D, stage, (40, 600)),
        AttentionShape("stage 128 of 20480", 128, 20480, H, K, D, stage, (19, 600)),
        AttentionShape("text rows", 64, 20480, H, K, D, text, (9, 600)),
        AttentionShape("8 requests x 20 rows x 20480", 160, 8 * 20480, H, K, D, last_rows, (24, 1600)),
        AttentionShape("decode 1 x 20480", 1, 20480, H, K, D, decode, (1, 600)),
        AttentionShape("decode 8 x 20480", 8, 8 * 20480, H, K, D, decode, (8, 1600)),
        AttentionShape("decode 64 x 4096", 64, 64 * 4096, H, K, D, decode, (9, 1800)),
        AttentionShape("decode 64 beside 448 rows, 4096 to 20480", 512, 806912, H, K, D, beside, (40, 1200)),
        AttentionShape("decode 64 over one prefix of 16384", 64, 64 * 16640, H, K, D, one_each, (6, 6 * 540)),
        AttentionShape("64 x 20 rows over one prefix of 16384", 1280, 64 * 16640, H, K, D, some_each, (60, 3 * 540)),
    )


def _vision(name: str, width: int, size: int) -> AttentionShape:
    seen = functools.partial(windows, size=size)
    return AttentionShape(f"vision, {name}", 16384, 16384, 16, 16, width, seen, (150, 150), has_pages=False)


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
    """A case of linking: T tokens into a pool of S slots; the stored array may have several layers."""

    T: int
    S: int
    K: int
    D: int
    layers: int = 1
    codec: str | None = None

    def specs(self, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
        """Return abstract arguments of link."""
        pool, data, angle = (
            jax.ShapeDtypeStruct(s, dtype)
            for s in ((self.S, self.K, self.D), (self.layers, 2, self.T, self.K, self.D), (self.T, 1, self.D // 2))
        )
        buffers = [data]
        if self.codec is not None:
            sizes = CODECS[self.codec].buffers(self.K, self.D)
            buffers = [jax.ShapeDtypeStruct((*data.shape[:-1], size // self.K), jnp.uint8) for size in sizes]
        return pool, pool, [buffers], jax.ShapeDtypeStruct((self.T,), jnp.int32), angle, angle

    def bytes(self, itemsize: int = 2) -> int:
        """Return the minimum bytes of traffic: keys and values read and written, and the angles."""
        written = itemsize * self.T * self.D * 2 * self.K
        read = written if self.codec is None else 2 * self.T * sum(CODECS[self.codec].buffers(self.K, self.D))
        return read + written + itemsize * self.T * self.D


@dataclasses.dataclass(frozen=True)
class StatisticsShape:
    """A case of attention scores: N rows over a request of B pages."""

    N: int
    B: int
    H: int
    K: int
    D: int

    def specs(self, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return abstract arguments of attention_statistics, with a pool of twice the request's pages."""
        q, k = (jax.ShapeDtypeStruct(s, dtype) for s in ((self.N, self.H, self.D), (2 * self.slots, self.K, self.D)))
        table, place = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (self.B, self.N))
        return q, k, table, place, jax.ShapeDtypeStruct((), jnp.float32)

    @property
    def slots(self) -> int:
        """Slots of the request."""
        return self.B * PAGE


# The text after the images of 20480 tokens, and of 131072; all rows of a step.
STATISTICS: dict[str, tuple[StatisticsShape, ...]] = {
    "Qwen3-VL-8B": tuple(StatisticsShape(*size, 32, 8, 128) for size in ((64, 160), (64, 1024), (4096, 160))),
    "Qwen2.5-VL-7B": (StatisticsShape(64, 160, 28, 4, 128),),
}

LINK: dict[str, tuple[LinkShape, ...]] = {
    "Qwen3-VL-8B": (LinkShape(1024, 20480, 8, 128), LinkShape(16384, 20480, 8, 128)),
    "Qwen2.5-VL-7B": (LinkShape(16384, 20480, 4, 128),),
}


@dataclasses.dataclass(frozen=True)
class RowsShape:
    """A case of the operations on the N rows of a step, with a pool of S slots, by the letters of shapes.

    Attributes:
      has_norms: Heads have norms; a family without has biases.
    """

    N: int
    M: int
    H: int
    K: int
    D: int
    has_norms: bool
    S: int = 20480

    def norm_specs(self, dtype: Any = jnp.bfloat16, partials: int = 0) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return abstract x, delta and weight of norm_residual; `partials` is the number of sums of delta, 0 for
        none.
        """
        x, scale = (jax.ShapeDtypeStruct(s, dtype) for s in ((self.N, self.M), (self.M,)))
        return x, jax.ShapeDtypeStruct((partials, *x.shape), jnp.float32) if partials else x, scale

    def rotate_specs(self, dtype: Any = jnp.bfloat16) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return abstract arguments of rotate_write, and those by name."""
        width = self.H // self.K + 2
        sizes = (self.N, self.K, width, self.D), (self.N, 1, self.D // 2), (self.S, self.K, self.D)
        product, angle, pool = (jax.ShapeDtypeStruct(s, dtype) for s in sizes)
        norm, bias = (jax.ShapeDtypeStruct(s, dtype) for s in ((self.D,), (self.K, width, self.D)))
        options = {"q_norm": norm, "k_norm": norm} if self.has_norms else {"bias": bias}
        return ([product], angle, angle, jax.ShapeDtypeStruct((self.N,), jnp.int32), pool, pool), options


ROWS: dict[str, tuple[RowsShape, ...]] = {
    "Qwen3-VL-8B": tuple(RowsShape(rows, 4096, 32, 8, 128, True) for rows in (1, 64, 4096)),
    "Qwen2.5-VL-7B": tuple(RowsShape(rows, 3584, 28, 4, 128, False) for rows in (64, 8192)),
}


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """A case of a mixture: N rows with k choices each among E experts, of widths M and F."""

    N: int
    k: int
    E: int
    M: int
    F: int

    def specs(self, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return abstract arguments of mix_experts."""
        shapes = (self.N, self.M), (self.N, self.k), (self.E, self.M, 2 * self.F), (self.E, self.F, self.M)
        x, weight, gate_up, down = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
        return x, weight, jax.ShapeDtypeStruct(weight.shape, jnp.int32), gate_up, down

    def float8_specs(self, dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return abstract arguments of mix_experts with FP8 matrices, of which 128 inputs share a factor."""
        *given, _, _ = self.specs(dtype)
        shapes = (self.E, 2 * self.F, self.M), (self.E, self.M, self.F)
        factors = [jax.ShapeDtypeStruct((E, outputs, inputs // 128), jnp.float32) for E, outputs, inputs in shapes]
        return *given, *(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in shapes), *factors

    def sizes(self, seed: int = 0) -> np.ndarray:
        """Return the rows of each expert if all are equally likely, `[E]`."""
        rng = np.random.default_rng(seed)
        return np.bincount(rng.random((self.N, self.E)).argsort(1)[:, : self.k].ravel(), minlength=self.E)


EXPERTS: dict[str, tuple[ExpertsShape, ...]] = {
    "Qwen3-VL-30B-A3B": tuple(ExpertsShape(n, 8, 128, 2048, 768) for n in (1, 16, 64, 512, 8192)),
    "Qwen3-VL-235B-A22B": tuple(ExpertsShape(n, 8, 128, 4096, 1536) for n in (1, 64, 8192)),
}
