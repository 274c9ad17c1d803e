"""What a user can set about the cache."""

from __future__ import annotations

from dataclasses import dataclass

from vlcache_jax.checks import parse_bytes


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and rules of the image cache.

    Attributes:
      host_bytes: host memory for records, a number of bytes or a string such as "4GiB" or "500MB". 0 keeps nothing.
      variants: how many K, V records of one image are kept, each computed behind another context.
      trust_uuids: take a caller's `multi_modal_uuids` for the identity of an image without looking at the image. By
        default an id is bound to the content it first came with, and other content under it is an error.

    Raises:
      ValueError: a value out of range.
    """

    host_bytes: int | str = "4GiB"
    variants: int = 2
    trust_uuids: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_bytes", parse_bytes(self.host_bytes, "host_bytes"))
        if isinstance(self.variants, bool) or not isinstance(self.variants, int) or self.variants < 1:
            raise ValueError(f"variants must be a positive integer, got {self.variants!r}")
        if not isinstance(self.trust_uuids, bool):
            raise ValueError(f"trust_uuids must be a bool, got {self.trust_uuids!r}")
