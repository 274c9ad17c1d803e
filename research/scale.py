"""Effect of more engines, by routing rule: `python -m research.scale`.

A trace of requests is played against simulated engines; the router is the real one. An engine answers prompts one after
the other. Images that it has cached are linked, images of another engine may be transferred, all others are computed.
Decoding runs in parallel and delays no prompt. So waiting is only for prompts, and too low if decoding is most of the
work.
"""

from __future__ import annotations

import heapq
import json
import math
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from vlcache_jax.common.checks import is_a, parse_counts, short
from vlcache_jax.common.files import PICTURES, check_writable
from vlcache_jax.common.progress import Progress, say_errors
from vlcache_jax.router.affinity import RULES, Affinity, Rule, SeenImages, look_at, rule_of
from vlcache_jax.study.report import publish, save_figure

INDEX_BYTES = 3900
"""Of a record in a disk tier's index: K and V of 36 layers, or the encoder's rows."""
_LINE = '{"at": seconds, "images": {name: tokens}}'  # of a trace
_MAX_DRAWN = 5_000_000  # requests: about a gigabyte, and ten minutes of a slow core for each rule


@dataclass(frozen=True)
class SimulatedRequest:
    """A request of a trace.

    Attributes:
      at: Seconds from the beginning.
      images: Names of its images, and tokens of each.
    """

    at: float
    images: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Costs:
    """Assumed costs of engines.

    By default an image token takes the time that Qwen3-VL-8B's shape took on an H200 (docs/benchmarks/gpu.md: 4096 of
    them 322 ms cold, 48.5 ms by a schedule); the rest is assumed.

    Attributes:
      request: Seconds of each prompt in addition to its images.
      compute: Seconds of an image token, encoder and decoder.
      link: Seconds of a token that is reused.
      token_bytes: Bytes of an image token in a cache entry: KV of all layers, and encoder rows.
      bandwidth: Bytes per second from one engine to another; the default is 100 Gbit/s.
      answer: Seconds from the first token to the last.
    """

    request: float = 0.010
    compute: float = 79e-6
    link: float = 12e-6
    token_bytes: int = 147456 + 32768
    bandwidth: float = 12.5e9
    answer: float = 1.5


@dataclass
class SimulatedEngine:
    """A simulated engine.

    Attributes:
      capacity: Maximum image tokens in its cache.
      held: Cached images, the most recently used at the end.
      free_at: Time when it has answered all of its prompts.
      in_flight: Requests that are not finished.
      tokens: Image tokens in its cache.
    """

    capacity: float
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    tokens: int = 0
    free_at: float = 0.0
    in_flight: int = 0

    def has(self, image: str) -> bool:
        """Return whether an image is cached, and mark it as used."""
        if image not in self.held:
            return False
        self.held.move_to_end(image)
        return True

    def keep(self, image: str, tokens: int) -> None:
        """Cache an image, and evict the least recently used ones."""
        if tokens > self.capacity:
            return
        self.held[image] = tokens
        self.tokens += tokens
        while self.tokens > self.capacity:
            self.tokens -= self.held.popitem(last=False)[1]


@dataclass(frozen=True)
class SimulationResult:
    """Result of a trace.

    Attributes:
      images: Images of all requests, with repetitions.
      here: Images that the engine had cached.
      elsewhere: Images transferred from another engine.
      seconds: Time from a request's arrival to its first token, for each request.
      waits: Part of it until the engine began the request.
      moved: Bytes between engines.
      requests: Number of requests of each engine.
    """

    images: int
    here: int
    elsewhere: int
    seconds: Sequence[float]
    waits: Sequence[float]
    moved: int
    requests: Sequence[int]

    def row(self, engines: int, rule: str) -> dict[str, Any]:
        """Return a line of the table.

        Raises:
          ValueError: Nothing was played.
        """
        if not self.seconds:
            raise ValueError("trace must have at least one request, got none")
        p50, p99 = np.percentile(self.seconds, (50, 99))
        computed = self.images - self.here - self.elsewhere
        return {
            "engines": engines, "rule": rule,
            "found": self.here / max(1, self.images), "from others": self.elsewhere / max(1, self.images),
            "computed": computed, "mean wait ms": 1e3 * float(np.mean(self.waits)),
            "p50 ms": 1e3 * float(p50), "p99 ms": 1e3 * float(p99), "moved GB": self.moved / 1e9,
            "most over mean": max(self.requests) * len(self.requests) / sum(self.requests),
        }  # fmt: skip


def play(
    trace: Sequence[SimulatedRequest],
    rule: Rule,
    engines: int,
    *,
    capacity: float = math.inf,
    costs: Costs | None = None,
    exchange: bool = True,
) -> SimulationResult:
    """Play a trace.

    Args:
      trace: Requests in the order of arrival.
      rule: Routing rule.
      engines: Number of engines.
      capacity: Maximum image tokens in the cache of each engine.
      costs: Costs of engines; None: the defaults.
      exchange: An engine takes cached images from the others if that is faster than computing them. Only `Affinity`
        tracks which engine has which image.
    """
    own = costs or Costs()
    pool = {f"engine-{i}": SimulatedEngine(capacity) for i in range(engines)}
    ends: list[tuple[float, str]] = []
    here = elsewhere = moved = 0
    seconds, waits, given = [], [], Counter[str]()
    for request in trace:
        while ends and ends[0][0] <= request.at:
            pool[heapq.heappop(ends)[1]].in_flight -= 1
        seen = SeenImages({look_at(name.encode())[0]: tokens for name, tokens in request.images})
        loads = {name: engine.in_flight for name, engine in pool.items()}
        chosen = rule.order(seen, loads)[0]
        rule.sent(seen, chosen)
        engine = pool[chosen]
        holders = [pool[name] for name in rule.holders(seen, pool)] if isinstance(rule, Affinity) else []
        takes = own.request
        for image, tokens in request.images:
            size = tokens * own.token_bytes
            coming = size / own.bandwidth + tokens * own.link
            if engine.has(image):
                here += 1
                takes += tokens * own.link
                continue
            if exchange and coming < tokens * own.compute and any(image in other.held for other in holders):
                elsewhere += 1
                moved += size
                takes += coming
            else:
                takes += tokens * own.compute
            engine.keep(image, tokens)
        begins = max(request.at, engine.free_at)
        engine.free_at = begins + takes
        engine.in_flight += 1
        given[chosen] += 1
        heapq.heappush(ends, (engine.free_at + own.answer, chosen))
        waits.append(begins - request.at)
        seconds.append(engine.free_at - request.at)
    images = sum(len(request.images) for request in trace)
    return SimulationResult(images, here, elsewhere, seconds, waits, moved, [given[name] for name in pool])


def draw(
    requests: int, rate: float, *, pictures: int, zipf: float, tokens: int = 1024, max_images: int = 1, seed: int = 0
) -> list[SimulatedRequest]:
    """Draw random requests.

    Args:
      rate: Requests per second (Poisson).
      pictures: Number of images. The frequency of the k-th is proportional to k^-zipf.
      tokens: Tokens of each image.
      max_images: Maximum images of a request; the number is uniform from 1 on.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, pictures + 1) ** -zipf
    weights /= weights.sum()
    at = np.cumsum(rng.exponential(1 / rate, requests))
    counts = rng.integers(1, max_images, requests, endpoint=True)
    chosen = iter(rng.choice(pictures, counts.sum(), p=weights))
    return [
        SimulatedRequest(float(when), tuple((f"picture-{next(chosen)}", tokens) for _ in range(count)))
        for when, count in zip(at, counts, strict=True)
    ]


def read(path: pathlib.Path) -> list[SimulatedRequest]:
    """Read a trace from a file with lines of the form `_LINE`.

    Raises:
      ValueError: A line has another form, or is earlier than the one before.
    """
    found: list[SimulatedRequest] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path} line {number}"
            try:
                parsed = json.loads(line)
                at, images = parsed["at"], parsed["images"]
                fits = is_a(at, int | float) and 0 <= at < math.inf and isinstance(images, dict)
                fits = fits and all(is_a(tokens, int) and tokens > 0 for tokens in images.values())
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{where} must be {_LINE}, got {short(line)}") from error
            if not fits:
                raise ValueError(
                    f"{where} must have a time `at` in seconds and token counts in `images`, got {short(line)}"
                )
            if found and at < found[-1].at:
                raise ValueError(f"{where} must not be earlier than the line before, got {at}")
            found.append(SimulatedRequest(at, tuple(images.items())))
    if not found:
        raise ValueError(f"{path} must have at least one request, got none")
    return found


def zipf_hits(capacity: int, pictures: int, zipf: float) -> float:
    """Return the fraction of requests with a cached image, if the most frequent images that fit are cached.

    The frequency of the k-th image is proportional to k^-zipf. A least recently used cache has fewer hits.
    """
    weights = np.arange(1, pictures + 1) ** -zipf
    return float(weights[:capacity].sum() / weights.sum())


def compare(
    trace: Sequence[SimulatedRequest], counts: Sequence[int], rules: Sequence[str] = RULES, **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield the table: each rule with each number of engines."""
    for engines in counts:
        for rule in rules:
            yield play(trace, rule_of(rule), engines, **options).row(engines, rule)


@say_errors()
def main(
    trace: Annotated[
        pathlib.Path | None,
        typer.Argument(
            metavar="TRACE",
            help=f"File of requests, on each line {_LINE}.",
            show_default="drawn",
        ),
    ] = None,
    engines: Annotated[str, typer.Option(help="Numbers of engines.")] = "1,2,4,8,16",
    rate: Annotated[float, typer.Option(min=1e-6, help="Drawn requests per second and engine.")] = 8.0,
    requests: Annotated[int, typer.Option(min=1, help="Drawn requests per engine.")] = 2000,
    pictures: Annotated[int, typer.Option(min=1, help="Number of drawn images.")] = 20000,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of the frequencies of images; 0: all equal.")] = 1.1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each drawn image.")] = 1024,
    max_images: Annotated[int, typer.Option(min=1, help="Maximum images of a drawn request.")] = 1,
    capacity: Annotated[int, typer.Option(min=0, help="Maximum image tokens in the cache of an engine.")] = 2**20,
    exchange: Annotated[bool, typer.Option(help="Engines exchange cache entries.")] = True,
    out: Annotated[pathlib.Path | None, typer.Option(help="JSON file to write.", show_default=False)] = None,
    chart: Annotated[pathlib.Path | None, typer.Option(help="Chart to draw.", show_default=False)] = None,
) -> None:
    """Simulate engines under several routing rules.

    The number of drawn requests grows with the engines, so each has the same load; requests of a file are fixed.
    """
    check_writable("out", out)
    check_writable("chart", chart, PICTURES)
    counts = parse_counts(engines, "engines")
    given = None if trace is None else read(trace)
    rows: list[dict[str, Any]] = []
    with Progress("simulating numbers of engines", len(counts)) as bar:
        for count in counts:
            if given is None and count * requests > _MAX_DRAWN:
                raise ValueError(
                    f"engines x requests must be at most {_MAX_DRAWN}, got {count} x {requests}: lower --requests"
                )
            played = given or draw(
                requests * count, rate * count, pictures=pictures, zipf=zipf, tokens=tokens, max_images=max_images
            )
            rows += compare(played, [count], capacity=capacity, exchange=exchange)
            bar.update()
    drawn = {
        "rate": rate,
        "requests": requests,
        "pictures": pictures,
        "zipf": zipf,
        "tokens": tokens,
        "max_images": max_images,
    }
    head = {"trace": trace.name if trace else drawn, "capacity": capacity, "exchange": exchange, "costs": vars(Costs())}
    publish("requests given to engines, simulated", rows, head, out)
    if chart is not None:
        _draw(rows, chart)


def _draw(rows: Sequence[dict[str, Any]], picture: pathlib.Path) -> None:
    """Draw the hit rate and the late first tokens by number of engines and rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    shown = ("found", "hit rate in the engine"), ("p99 ms", "TTFT p99 [ms]")
    for axes, (column, label) in zip(figure.subplots(1, 2), shown, strict=True):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            own = [row for row in rows if row["rule"] == rule]
            axes.plot([row["engines"] for row in own], [row[column] for row in own], marker="o", label=rule)
        axes.set(xlabel="engines", ylabel=label, xscale="log")
        axes.set_xticks(sorted({row["engines"] for row in rows}), sorted({row["engines"] for row in rows}))
        axes.minorticks_off()
    axes.set_yscale("log")
    axes.legend()
    save_figure(figure, picture, dpi=100)


if __name__ == "__main__":
    typer.run(main)
