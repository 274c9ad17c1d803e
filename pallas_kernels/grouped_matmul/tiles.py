"""The tile table of the experts' products: which rows are multiplied by which expert's matrices.

It is made on the device, because the router's choice is known only there. It takes a few reductions: choices of many
rows are not sorted, and there is no loop. The choices of an expert are packed in *octets*, so that a bulk copy moves
eight rows of one expert; the padding of the last octet is computed in vain. A *tile* is a run of octets of one expert.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BOX = 8  # rows of an octet
CHUNK = 512  # choices that are compared with each other


class ExpertTiles(NamedTuple):
    """Places of the choices and tiles that multiply them, int32.

    Attributes:
      expert, first, octets: `[T]`, expert, first octet and number of octets of each tile.
      used: `[1]`, number of tiles.
      place: `[R]`, the packed row of each choice; one beyond `source` for choices of no expert here.
      source: `[P]`, the choice of each packed row; arbitrary for rows that pad an octet or come after all octets.
    """

    expert: jax.Array
    first: jax.Array
    octets: jax.Array
    used: jax.Array
    place: jax.Array
    source: jax.Array

    @property
    def table(self) -> tuple[jax.Array, ...]:
        """(expert, first, octets, used): the arguments of products."""
        return self.expert, self.first, self.octets, self.used


def make_tiles(expert: jax.Array, count: int, length: int) -> ExpertTiles:
    """Pack choices and cut them into tiles.

    Args:
      expert: Expert of each choice, int32 `[R]`; numbers from `count` on are no expert here.
      count: E.
      length: Maximum number of octets of a tile.
    """
    choices, some = len(expert), min(len(expert), count)
    most = (choices + (BOX - 1) * some) // BOX  # octets
    rows = (most + length) * BOX
    chunk = min(CHUNK, choices)
    ids = jnp.pad(expert, (0, -choices % chunk), constant_values=count).reshape(-1, chunk)
    at, chunks, experts = np.arange(chunk), np.arange(len(ids)), np.arange(count)
    # Number of choices of the same expert before each choice in its chunk, of choices of each expert in each chunk, and
    # of those in the chunks before it. The first two are one reduction.
    who = jnp.concatenate([ids, jnp.broadcast_to(experts, (len(ids), count))], axis=1)
    until = np.append(at, np.full(count, chunk))
    counted = ((who[:, :, None] == ids[:, None, :]) & (at < until[:, None])).sum(2)
    rank, own = counted[:, :chunk], counted[:, chunk:]
    before = jnp.where(chunks[:, None] < chunks[:, None, None], own, 0).sum(1)

    octets = lax.div(own.sum(0) + (BOX - 1), jnp.int32(BOX))
    tiles = lax.div(octets + (length - 1), jnp.int32(length))
    first = jnp.where(experts < experts[:, None], octets, 0).sum(1)
    ends = jnp.where(experts <= experts[:, None], tiles, 0).sum(1)

    place = rank + (before + BOX * first).at[chunks[:, None], ids].get(mode="clip")
    place = place.reshape(-1)[:choices]
    choice = np.arange(choices, dtype=np.int32)
    place = jnp.where(expert < count, place, rows + choice)
    source = jnp.zeros(rows, jnp.int32).at[place].set(choice, mode="drop", unique_indices=True)

    begin = ends - tiles
    tile = np.arange(most // length + some)[:, None]
    is_own = (begin <= tile) & (tile < ends)

    def of_own(x: jax.Array | np.ndarray) -> jax.Array:
        return jnp.where(is_own, x, 0).sum(1, dtype=jnp.int32)

    done = (tile - begin) * length
    taken = of_own(jnp.minimum(octets - done, length))
    return ExpertTiles(of_own(experts), of_own(first + done), taken, tiles.sum(keepdims=True), place, source)


def tiles_of_row(expert: jax.Array, count: int, length: int) -> ExpertTiles:
    """Pack the choices of one row: each choice of an expert here has an octet and a tile, in the order of experts.

    All packed rows are that row, so any choice serves as their source.

    Args:
      expert: Expert of each choice, int32 `[k]`.
      count, length: See `make_tiles`.
    """
    k = len(expert)
    rows = (k + length) * BOX
    choice = np.arange(k, dtype=np.int32)
    is_before = (expert < expert[:, None]) | ((expert == expert[:, None]) & (choice < choice[:, None]))
    place = jnp.where(expert < count, BOX * is_before.sum(1, dtype=jnp.int32), rows + choice)
    own = (expert < count).sum(dtype=jnp.int32, keepdims=True)
    source = jnp.zeros(rows, jnp.int32)
    return ExpertTiles(jnp.sort(expert), jnp.array(choice), jnp.ones_like(expert), own, place, source)
