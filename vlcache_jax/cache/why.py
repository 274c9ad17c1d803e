"""The reasons that reports give."""

from __future__ import annotations

import enum


class Why(enum.Enum):
    """Why an image was computed, or not reused as far as it could have been."""

    reuse_off = "reuse_off"
    unknown_image = "unknown_image"  # never seen, or long forgotten
    other_context = "other_context"  # known, but computed behind something else
    coded = "coded"  # known in this context, but its K, V are kept by a codec that is not exact (`codec`)
    displaced = "displaced"  # known in this context, but it made room for another context of the image (`variants`)
    evicted = "evicted"  # known, but it had to make room (`host_bytes`), or was told to go
    too_large = "too_large"  # the cache has no room for it
    load_failed = "load_failed"  # known, but its record could not be filled or read
    not_finite = "not_finite"  # known, but what was computed of it was not finite, and is not kept
    corrupt = "corrupt"  # known, but its record was found damaged
    cheaper_to_compute = "cheaper_to_compute"  # K, V were found, but not wanted (`load`)
    expired = "expired"  # known, but older than `ttl`
    timeout = "timeout"  # known, but its record did not come in time (`timeout`)
