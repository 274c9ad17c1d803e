"""Time of a router for a request of many images: `python -m research.routing`.

A client's body is read, its images are hashed, and an engine is chosen; each part is timed separately. The hashing time
is next to the time of a hash of the same bytes, so the difference is the router's. Every request shows new images, and
engines have some requests in flight.
"""

from __future__ import annotations

import base64
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
import xxhash

from vlcache_jax.common.checks import parse_counts
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import say_errors
from vlcache_jax.protocol.schema import read_object
from vlcache_jax.router.affinity import SLACK, Affinity, SeenImages, look
from vlcache_jax.study.report import environment, publish


def body_of(rng: np.random.Generator, pictures: int, size: int) -> bytes:
    """Return a request to /v1/chat/completions with images of `size` bytes each, which cannot be decoded."""
    urls = [f"data:image/jpeg;base64,{base64.b64encode(rng.bytes(size)).decode()}" for _ in range(pictures)]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What do these have in common?"}]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


def measure(engines: int, *, pictures: int, size: int, requests: int, seed: int = 0) -> dict[str, Any]:
    """Return a line of the table: milliseconds of each step, as the median and (for choosing) the 99th percentile."""
    rng = np.random.default_rng(seed)
    rule = Affinity()
    names = [f"engine-{i}" for i in range(engines)]
    steps: dict[str, list[float]] = {"read JSON": [], "hash": [], "hash alone": [], "choose": []}

    def timed(step: str, do: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        found = do()
        steps[step].append(1e3 * (time.perf_counter() - begun))
        return found

    for _ in range(requests):
        body = body_of(rng, pictures, size)
        loads = dict(zip(names, rng.integers(0, SLACK, engines).tolist(), strict=True))
        request = timed("read JSON", functools.partial(read_object, body))
        urls = [part["image_url"]["url"] for part in request["messages"][0]["content"][:-1]]
        timed("hash alone", functools.partial(_hash, [url.partition(",")[2].encode() for url in urls]))
        seen = timed("hash", functools.partial(look, request))
        if len(seen.images) != pictures:
            raise ValueError(f"a request must show {pictures} images, got {len(seen.images)}")
        timed("choose", functools.partial(_choose, rule, seen, loads))
    medians = {f"{step} ms": statistics.median(found) for step, found in steps.items()}
    return {"engines": engines, **medians, "choose p99 ms": float(np.percentile(steps["choose"], 99))}


def _hash(payloads: Sequence[bytes]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(payload) for payload in payloads]


def _choose(rule: Affinity, seen: SeenImages, loads: Mapping[str, int]) -> None:
    """Choose an engine as a service's router does."""
    chosen = rule.order(seen, loads)[0]
    rule.holders(seen, loads)
    rule.sent(seen, chosen)


@say_errors()
def main(
    engines: Annotated[str, typer.Option(help="Numbers of engines.")] = "2,16,128,1000",
    pictures: Annotated[int, typer.Option(min=1, help="Images of a request.")] = 20,
    size: Annotated[int, typer.Option(min=1, help="Bytes of an image.")] = 250_000,
    requests: Annotated[int, typer.Option(min=1, help="Requests for each number of engines.")] = 200,
    out: Annotated[pathlib.Path | None, typer.Option(help="JSON file to write.", show_default=False)] = None,
) -> None:
    """Time the work of a router on a request."""
    check_writable("out", out)
    counts = parse_counts(engines, "engines")
    measure(counts[0], pictures=pictures, size=size, requests=3)  # the first requests warm up
    rows = [measure(count, pictures=pictures, size=size, requests=requests) for count in counts]
    head = {"pictures": pictures, "size": size, "requests": requests, **environment("numpy", "xxhash")}
    publish("a request at the router", rows, head, out)


if __name__ == "__main__":
    typer.run(main)
