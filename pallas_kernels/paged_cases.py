"""Cases of paged attention: rows of several requests over pages in any order, and a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from vlcache_jax.pallas_kernels.attention import PAGE, Shared, Work, WorkConfig, make_work

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """A case: table and interval of logical slots of each row; tables; prefixes that tables share."""

    table: np.ndarray
    start: np.ndarray
    end: np.ndarray
    tables: list[np.ndarray]
    shared: tuple[Shared, ...] = ()

    @property
    def num_pages(self) -> int:
        """Number of pages of a pool that holds them."""
        return 1 + max((int(table.max()) for table in self.tables if len(table)), default=0)

    def work(self, config: WorkConfig, least: np.ndarray | None = None) -> Work:
        return make_work(self.table, self.start, self.end, self.tables, config, least=least, shared=self.shared)

    def slots(self, row: int) -> np.ndarray:
        """Return the pool's slots that a row sees, in their order."""
        table = self.tables[self.table[row]]
        pages = np.add.outer(np.asarray(table) * PAGE, np.arange(PAGE)).ravel()
        return pages[max(self.start[row], 0) : max(self.start[row], self.end[row], 0)]


def tables(rng: np.random.Generator, *lengths: int) -> list[np.ndarray]:
    """Return the pages of requests in no order; page 0 belongs to no request."""
    pages = 1 + rng.permutation(sum(lengths))
    return np.split(pages, np.cumsum(lengths)[:-1])


def causal(rng: np.random.Generator) -> PagedRows:
    """Return the last rows of one request."""
    return PagedRows(np.zeros(300, int), np.zeros(300, int), np.arange(401, 701), tables(rng, 6))


def scattered(rng: np.random.Generator) -> PagedRows:
    end = 1 + rng.permutation(9 * PAGE)[:100]
    return PagedRows(np.zeros(100, int), np.zeros(100, int), end, tables(rng, 9))


def requests(rng: np.random.Generator) -> PagedRows:
    """Return rows of several requests, mixed, some of which see nothing, and a request without rows."""
    count = 90
    table = rng.choice([0, 1, 3, 4], count)
    end = rng.integers(0, 3 * PAGE, count)
    start = np.where(rng.random(count) < 0.3, rng.integers(0, 2 * PAGE, count), 0)
    return PagedRows(table, start, end, tables(rng, 3, 3, 3, 3, 3))


def decode(rng: np.random.Generator) -> PagedRows:
    lengths = rng.integers(1, 9, 11)
    end = rng.integers(1, lengths * PAGE + 1)
    end[3] = 0
    return PagedRows(np.arange(11), np.zeros(11, int), end, tables(rng, *lengths))


def decode_beside_prefill(rng: np.random.Generator) -> PagedRows:
    lengths = (12, 1, 2, 7, 4)
    table = np.array([0, 1, 2, 3, *[4] * 40])
    end = np.array([12 * PAGE - 3, 5, 200, 7 * PAGE, *range(400, 440)])
    return PagedRows(table, np.zeros(44, int), end, tables(rng, *lengths))


def one_page(rng: np.random.Generator) -> PagedRows:
    return PagedRows(np.zeros(3, int), np.zeros(3, int), np.array([128, 1, 64]), tables(rng, 1))


def nothing(rng: np.random.Generator) -> PagedRows:
    return PagedRows(np.zeros(5, int), np.zeros(5, int), np.zeros(5, int), tables(rng, 2))


def no_rows(rng: np.random.Generator) -> PagedRows:
    return PagedRows(np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), [])


def one_long(rng: np.random.Generator) -> PagedRows:
    """Return rows of requests of which one is far longer than the others."""
    return PagedRows(np.arange(8), np.zeros(8, int), np.array([40 * PAGE, *[70] * 7]), tables(rng, 40, *[1] * 7))


def shared(rng: np.random.Generator, each: int = 1, count: int = 12) -> PagedRows:
    """Return questions over one document; rows of some of them lie in it."""
    prefix, tails = np.arange(1, 7), np.arange(7, 7 + 2 * count).reshape(count, 2)
    table = np.repeat(np.arange(count), each)
    end = rng.integers(6 * PAGE, 8 * PAGE, len(table)) + 1
    end[::9] = rng.integers(1, 6 * PAGE, len(end[::9]))
    both = [np.concatenate([prefix, tail]) for tail in tails]
    return PagedRows(table, np.zeros_like(table), end, both, (Shared(range(count), 6),))


def shared_by_prefill(rng: np.random.Generator) -> PagedRows:
    return shared(rng, each=11, count=7)


def two_levels(rng: np.random.Generator) -> PagedRows:
    """Return documents after one system prompt, questions after each document, and separate requests."""
    count, documents = 16, 4
    system, text = np.arange(1, 5), np.arange(5, 5 + 5 * documents).reshape(documents, 5)
    tails = np.arange(30, 30 + count + 2).reshape(-1, 1)
    both = [np.concatenate([system, text[i % documents], tails[i]]) for i in range(count)]
    both += [tails[count], np.concatenate([system, tails[count + 1]])]
    table = rng.permutation(len(both))
    end = np.array([len(both[t]) for t in table]) * PAGE - rng.integers(0, PAGE, len(table))
    groups = [Shared([i for i in range(count) if i % documents == d], 9) for d in range(documents)]
    start = np.where(table == 2, 60, 0)  # sees a part of the system prompt
    return PagedRows(table, start, end, both, (*groups, Shared([*range(count), count + 1], 4)))


CASES: tuple[Callable[[np.random.Generator], PagedRows], ...] = (
    causal,
    scattered,
    requests,
    decode,
    decode_beside_prefill,
    one_page,
    nothing,
    no_rows,
    one_long,
    shared,
    shared_by_prefill,
    two_levels,
)


DECODING = (decode, one_long, shared, two_levels, nothing)


def reference(rows: PagedRows, q: Any, k: Any, v: Any, scale: float | None = None) -> np.ndarray:
    """Compute attention row by row in float64, from the slots that a row sees; rows of q beyond the case see
    nothing.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    kv_heads, width = k.shape[1:]
    out = np.zeros(q.shape)
    for n in range(len(rows.table)):
        slots = rows.slots(n)
        if len(slots):
            keys, values = k[slots], v[slots]
            scores = np.einsum("kgd,skd->kgs", q[n].reshape(kv_heads, -1, width), keys)
            weights = np.exp((scores - scores.max(-1, keepdims=True)) * (width**-0.5 if scale is None else scale))
            weights /= weights.sum(-1, keepdims=True)
            out[n] = np.einsum("kgs,skd->kgd", weights, values).reshape(-1, width)
    return out


def arrays(
    rows: PagedRows, count: int, heads: int, kv_heads: int, width: int, *, poison: bool = False, flaw: bool = False
) -> Inputs:
    """Return q of `count` rows, and a pool.

    `poison` puts NaN into K and huge values into V at slots that no row sees. `flaw` puts NaN into a key of one head
    that some rows see.
    """
    rng = np.random.default_rng(count)
    shape = rows.num_pages * PAGE, kv_heads, width
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((count, heads, width), shape, shape))
    if poison:
        unseen = np.ones(len(k), bool)
        for n in range(len(rows.table)):
            unseen[rows.slots(n)] = False
        k[unseen] = rng.choice([np.nan, np.inf, -np.inf], k[unseen].shape)
        v[unseen] = 60_000  # finite in all dtypes
    if flaw:
        seen = np.concatenate([rows.slots(n) for n in range(len(rows.table))])
        k[seen[len(seen) // 2], 0, 0] = np.nan
    return q, k, v
