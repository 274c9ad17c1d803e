"""What a user can set about the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vlcache_jax.checks import parse_bytes

CODECS = ("int8", "int4")  # of `vlcache_jax.pallas_kernels`, which takes long to import
LOADS = ("auto", "link", "encoder", "compute")


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and rules of the image cache.

    Attributes:
      host_bytes: host memory for records, a number of bytes or a string such as "4GiB" or "500MB". 0 keeps nothing.
      device_bytes: device memory for copies of records, taken before the KV pool, a number of bytes or a string: what
        has just been computed, and what was linked last. A hit there moves nothing over the bus. On a CPU, which reads
        records where they lie, it gains nothing.
      disk: directory for records that outlive the process; several processes may use it. None: there is none. What is
        computed is written there in the background, and what host memory lacks comes from there.
      disk_bytes: of the directory, for all processes that use it.
      variants: how many K, V records of one image are kept, each computed behind another context; None: as many as fit.
      trust_uuids: take a caller's `multi_modal_uuids` for the identity of an image without looking at the image. By
        default an id is bound to the content it first came with, and other content under it is an error.
      codec: of stored K, V: "auto" is the dtype of the model, and alone links exactly; "int8" takes 8.25 bits a value
        and "int4" 5 (of heads of 128). They serve approximate reuse only, whatever stands before an image.
      pinned_share: of `host_bytes` that `pin` can keep, from 0 to 1; the rest is left to new images.
      load: what is done with records that are found. "auto": what takes least by the rates that `vlcache calibrate` has
        measured for the model on this machine, and without any the same as "link"; "link": they are used; "encoder":
        of encoder rows alone, K, V are computed; "compute": neither are used. What is computed is kept in any case.

    Raises:
      ValueError: a value out of range.
    """

    host_bytes: int | str = "4GiB"
    device_bytes: int | str = 0
    disk: str | os.PathLike[str] | None = None
    disk_bytes: int | str = "64GiB"
    variants: int | None = None
    trust_uuids: bool = False
    codec: str = "auto"
    pinned_share: float = 0.5
    load: str = "auto"

    def __post_init__(self) -> None:
        for name in ("host_bytes", "device_bytes", "disk_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        if not (self.disk is None or isinstance(self.disk, (str, os.PathLike))) or self.disk == "":
            raise ValueError(f"disk must be the path of a directory or None, got {self.disk!r}")
        if self.disk is not None and not self.host_bytes:
            raise ValueError("host_bytes must have room for records on their way to and from the disk, got 0")
        is_count = isinstance(self.variants, int) and not isinstance(self.variants, bool) and self.variants > 0
        if not (self.variants is None or is_count):
            raise ValueError(f"variants must be a positive integer or None, got {self.variants!r}")
        if not isinstance(self.trust_uuids, bool):
            raise ValueError(f"trust_uuids must be a bool, got {self.trust_uuids!r}")
        names = ("auto", *CODECS)
        if self.codec not in names:
            raise ValueError(f"codec must be one of {names}, got {self.codec!r}")
        is_number = isinstance(self.pinned_share, (int, float)) and not isinstance(self.pinned_share, bool)
        if not (is_number and 0 <= self.pinned_share <= 1):
            raise ValueError(f"pinned_share must be a number from 0 to 1, got {self.pinned_share!r}")
        if self.load not in LOADS:
            raise ValueError(f"load must be one of {LOADS}, got {self.load!r}")
