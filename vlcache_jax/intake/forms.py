"""The form of a model's records: all that an engine writes of them before their data, by the image and its prefix."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from vlcache_jax.cache.record import Meta
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.inputs.processor import Grid
from vlcache_jax.models import ModelConfig

_CONTEXT = re.compile("[0-9a-f]{64}")
_MOST_TOKENS = 2**31  # of an image; shapes of more are not made


class Forms:
    """Makes what records say of themselves: of those that are reserved, and to compare found ones with.

    Args:
      config: of the model.
      kv: of the model, as they are stored.
      fingerprint: of the weights; asked for when there is a record.
    """

    def __init__(self, config: ModelConfig, kv: KVShape, fingerprint: Callable[[], str]):
        self._config, self._kv, self._fingerprint = config, kv, fingerprint

    def encoder(self, entry: str, owner: str, grid: Grid, room: int) -> Meta:
        """Of encoder rows of an image with this grid, padded to a number of tokens."""
        shape = 1 + self._config.vision.num_deepstack, room, self._config.text.hidden_size
        return Meta(
            entry, owner, None, True, grid, self._tokens(grid), str(self._kv.dtype), shape,
            model=self._fingerprint(), codec=self._kv.stored_as,
        )  # fmt: skip

    def keys_and_values(self, entry: str, owner: str, context: str, canonical: bool, grid: Grid, room: int) -> Meta:
        """Of K, V of an image with this grid, padded to a number of tokens."""
        data = self._kv.record(room)
        return Meta(
            entry, owner, context, canonical, grid, self._tokens(grid), str(data.dtype), data.shape,
            self._kv.code_bytes, model=self._fingerprint(), codec=self._kv.stored_as,
        )  # fmt: skip

    def of(self, found: Meta, grid: Grid) -> Meta:
        """What stands in the place of a found record, if the image has this grid; see `Form`."""
        side = self._config.vision.merge_size
        if min(grid) < 1 or grid[1] % side or grid[2] % side or (tokens := self._tokens(grid)) > _MOST_TOKENS:
            raise ValueError(f"grid must be one of patches in blocks of {side} x {side}, got {grid!r:.80}")
        if found.context is None:
            return self.encoder(found.entry, found.owner, grid, tokens)
        if not _CONTEXT.fullmatch(found.context):
            raise ValueError(f"context must be 64 hexadecimal digits, got {found.context!r:.80}")
        return self.keys_and_values(found.entry, found.owner, found.context, found.canonical, grid, tokens)

    def _tokens(self, grid: Grid) -> int:
        return math.prod(grid) // self._config.vision.merge_size**2
