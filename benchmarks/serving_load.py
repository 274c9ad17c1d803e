"""The requests of `vlcache bench serve`, and a server in its own process for `--policies`.

Requests are seeded chats that repeat images, reorder them, or slide a window of screenshots.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import io
import json
import math
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from PIL import Image

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.benchmarks import ALLOCATOR, SCHEDULE
from vlcache_jax.benchmarks.settings import BenchModel
from vlcache_jax.benchmarks.ttft import falling_schedule
from vlcache_jax.common.checks import short
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import listening

KINDS = ("repeat", "reorder", "sliding-window")
WORDS = ("amber", "bridge", "cloud", "delta", "ember", "field", "grove", "harbor", "island", "jetty", "kernel", "lamp")
_CELL = 16  # side in pixels of an image's squares, so that its file is small


class RequestLoad(Protocol):
    """Requests to a server: `ServingLoad`, or other requests that come at a rate."""

    @property
    def requests(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    def times(self, rate: float, run: int) -> np.ndarray: ...
    def chats(self, run: int, count: int | None = None) -> list[Chat]: ...
    def shown(self) -> list[Chat]: ...
    def settings(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ServingLoad:
    """The requests to a server. Equal loads have equal requests.

    Three kinds alternate:

    - repeat: a question after one image of the pool, which often repeats (the i-th most frequent image has a
      probability proportional to 1 / i ** zipf).
    - reorder: two to four such images after new text, in any order, so that a cached image has another place among
      others.
    - sliding-window: the next turn of an agent that sees the last `window` screenshots; each turn adds one and drops
      the oldest.

    The answers in histories are fixed, so no request waits for another one.

    Attributes:
      requests: Number of requests.
      kinds: Some of `KINDS`.
      pictures: Number of images of the pool.
      known: True if all runs use one pool, which the server sees before. Otherwise each run has its own pool.
      zipf: Exponent of the frequencies of images; 0: all are equal.
      window: Screenshots that an agent sees.
      turns: Turns of an agent, before another one begins.
      side: Side of images, in pixels.
      max_tokens: Maximum tokens of an answer.
      arrivals: "poisson", or "fixed" for constant intervals.
      seed: Seed of everything.

    Raises:
      ValueError: A setting is out of range.
    """

    requests: int = 100
    kinds: tuple[str, ...] = KINDS
    pictures: int = 20
    known: bool = False
    zipf: float = 1.0
    window: int = 4
    turns: int = 10
    side: int = 448
    max_tokens: int = 32
    arrivals: str = "poisson"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "pictures", "window", "turns", "side", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, got {short(self.kinds)}")
        if not 0 <= self.zipf < math.inf:
            raise ValueError(f"zipf must be a non-negative number, got {self.zipf}")
        if self.arrivals not in ("poisson", "fixed"):
            raise ValueError(f"arrivals must be poisson or fixed, got {short(self.arrivals)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt and its answer, if a token is at least 28 x 28 pixels, or at least a letter."""
        return (max(4, self.window) + 1) * ((-(-self.side // 28)) ** 2 + 128) + self.max_tokens

    def times(self, rate: float, run: int) -> np.ndarray:
        """Return the arrival times of requests, in seconds from the beginning `[requests]`; the first is 0."""
        return arrival_times(self.requests, rate, self.arrivals, [self.seed, run, 0])

    def chats(self, run: int, count: int | None = None) -> list[Chat]:
        """Return the requests of a run, or the first `count`.

        Runs share only images that are `known`, so each run finds a server that has seen none of its own.
        """
        rng = np.random.default_rng([self.seed, run, 1])
        each = {kind: getattr(self, f"_{kind.replace('-', '_')}")(rng, run) for kind in dict.fromkeys(self.kinds)}
        return [next(each[self.kinds[i % len(self.kinds)]]) for i in range(self.requests if count is None else count)]

    def shown(self) -> list[Chat]:
        """Return requests that put the pool into the cache: each image once."""
        if not self.known:
            return []
        pool = (self._pooled(0, picture) for picture in range(self.pictures))
        return [Chat("known", [{"role": "user", "content": [picture, _text("Look.")]}]) for picture in pool]

    def settings(self) -> dict[str, Any]:
        """Return the settings of the load for a table."""
        return dataclasses.asdict(self)

    def _repeat(self, rng: np.random.Generator, run: int) -> Iterator[Chat]:
        while True:
            [picture] = self._drawn(rng, 1)
            content = [self._pooled(run, picture), _text(f"What is shown here, {_words(rng)}?")]
            yield Chat("repeat", [{"role": "user", "content": content}])

    def _reorder(self, rng: np.random.Generator, run: int) -> Iterator[Chat]:
        while True:
            pictures = self._drawn(rng, min(self.pictures, int(rng.integers(2, 5))))
            shown = [self._pooled(run, picture) for picture in pictures]
            content = [_text(f"Compare these, {_words(rng)}."), *shown, _text(f"Which one is {_words(rng)}?")]
            yield Chat("reorder", [{"role": "user", "content": content}])

    def _sliding_window(self, rng: np.random.Generator, run: int) -> Iterator[Chat]:
        agent = 0
        while True:
            agent += 1
            steps = [_words(rng) for _ in range(self.turns)]
            for turn in range(self.turns):
                messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are agent {agent}: {steps[0]}."}]
                for shot in range(max(0, turn + 1 - self.window), turn + 1):
                    seen = [_text(f"Step {shot}:"), self._picture(run, agent, shot)]
                    messages += [
                        {"role": "user", "content": seen},
                        {"role": "assistant", "content": f"I click on {steps[shot]}."},
                    ]
                yield Chat("sliding-window", messages[:-1])

    def _drawn(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return different images of the pool, in random order."""
        weights = 1 / np.arange(1, self.pictures + 1) ** self.zipf
        return [int(one) for one in rng.choice(self.pictures, count, replace=False, p=weights / weights.sum())]

    def _pooled(self, run: int, picture: int) -> dict[str, Any]:
        return self._picture(0 if self.known else run, 0, picture)

    def _picture(self, *name: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": _picture(self.side, self.seed, *name)}}


def arrival_times(requests: int, rate: float, arrivals: str, seed: Sequence[int]) -> np.ndarray:
    """Return the arrival times of requests, in seconds from the beginning `[requests]`: evenly, or at random; the first
    is 0.
    """
    gaps = np.full(requests, 1 / rate)
    if arrivals == "poisson":
        gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
    return np.cumsum(gaps) - gaps[0]


@dataclass(frozen=True)
class Chat:
    """A request: its kind, and its messages."""

    kind: str
    messages: list[dict[str, Any]]

    def body(self, model: str, load: RequestLoad, more: dict[str, Any]) -> bytes:
        """Return the body of the request."""
        fields = {"model": model, "messages": self.messages, "max_tokens": load.max_tokens, "temperature": 0}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**fields, **streamed, **more}).encode()


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _words(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, 3))


@functools.lru_cache(4096)
def _picture(side: int, *name: int) -> str:
    """Return an image of colored squares as a data URL; its name is its seed."""
    cells = -(-side // _CELL)
    noise = np.random.default_rng([2, *name]).integers(0, 256, (cells, cells, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.repeat(_CELL, 0).repeat(_CELL, 1)[:side, :side]).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


_PATIENCE = 30.0  # maximum seconds until a server ends


@contextlib.contextmanager
def own_server(model: str | None, policies: Sequence[str], longest: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Serve within, with all programs compiled.

    Args:
      model: Checkpoint or hub id; None: random weights, 12 layers x 768.
      policies: Policies that requests may use, or `SCHEDULE`.
      longest: Maximum tokens of prompt and answer.

    Yields:
      The base URL, and the value of each policy in requests.

    Raises:
      ValueError, OSError, MemoryError: The model cannot be opened, or a name is no policy.
    """
    for name in policies:
        if name != SCHEDULE:
            parse_policy(name)  # fails before a model is opened
    os.environ.update(ALLOCATOR)  # read when a process starts
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as folder:
        reuses = {name: f"{folder}/schedule.json" if name == SCHEDULE else name for name in policies}
        process = context.Process(target=_serve, args=(there, model, reuses, longest))
        process.start()
        there.close()
        try:
            try:
                message: str | Exception = here.recv()
            except EOFError as error:
                raise OSError("the server ended before it was ready") from error
            if isinstance(message, Exception):
                raise message
            yield message, reuses
        finally:
            here.close()
            process.join(_PATIENCE)
            process.kill()  # it may still compile, and no client waits


def _serve(parent: Connection, model: str | None, reuses: dict[str, str], longest: int) -> None:
    """Send the base URL, or an error, and serve until the other end of the pipe is closed."""
    try:
        with BenchModel(model).opened() as (path, name):
            rows = max(1024, longest)  # policies that select tokens need a prompt in one step
            engine = AsyncLLM(path, max_model_len=longest, max_rows=rows, use_tqdm=False)
            if SCHEDULE in reuses:
                checkpoint = engine.service.checkpoint
                falling = falling_schedule(checkpoint.config.model_type, checkpoint.config.text.num_layers)
                dataclasses.replace(falling, fingerprint=checkpoint.source_digest).save(reuses[SCHEDULE])
            config = ServerConfig(port=0, allow_reuse=tuple(reuses.values()), served_model_name=(name,))
            with listening(Server(engine, config)) as url:
                for reuse in reuses.values():
                    asyncio.run(engine.warmup(reuse=reuse))
                parent.send(url)
                with contextlib.suppress(EOFError):
                    parent.recv()
            asyncio.run(engine.close())
    except (ValueError, OSError, MemoryError) as error:
        parent.send(error)
