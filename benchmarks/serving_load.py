"""The requests of `vlcache bench serve`, and a server in a process of its own for `--policies`.

Requests are seeded chats whose images repeat, move and slide.
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
from vlcache_jax.benchmarks.ttft import TtftSetup, falling_schedule
from vlcache_jax.common.checks import short
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import listening

KINDS = ("repeat", "move", "slide")
WORDS = ("amber", "bridge", "cloud", "delta", "ember", "field", "grove", "harbor", "island", "jetty", "kernel", "lamp")
_CELL = 16  # pixels of a picture's squares, so that its file is small


class RequestLoad(Protocol):
    """What a server is asked: `ServingLoad`, or other requests that come at a rate."""

    @property
    def requests(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    def times(self, rate: float, run: int) -> np.ndarray: ...
    def chats(self, run: int, count: int | None = None) -> list[Chat]: ...
    def shown(self) -> list[Chat]: ...
    def told(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ServingLoad:
    """What is asked of a server. Equal loads have equal requests.

    Three kinds take turns. repeat: a question behind one picture of the pool, which is often one that came before (the
    i-th most frequent has a share as 1 / i ** zipf). move: two to four such pictures behind new text, in any order, so
    that a known one has another place among others. slide: the next turn of an agent that sees the last `window`
    screenshots; each turn adds one and drops the oldest. Answers in histories are given, so that no request waits for
    another one.

    Attributes:
      requests: so many.
      kinds: of `KINDS`.
      pictures: of the pool.
      known: whether all runs draw of one pool, which the server is shown before. Else each run has a pool of its own.
      zipf: how often the frequent ones are met; 0: all alike.
      window: screenshots that an agent sees.
      turns: of an agent, before another one begins.
      side: of pictures, in pixels.
      max_tokens: of an answer at most.
      arrivals: "poisson", or "fixed": one as long after the other.
      seed: of everything.

    Raises:
      ValueError: one is out of range.
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
            raise ValueError(f"kinds must be of {', '.join(KINDS)}, got {short(self.kinds)}")
        if not 0 <= self.zipf < math.inf:
            raise ValueError(f"zipf must be a number of at least 0, got {self.zipf}")
        if self.arrivals not in ("poisson", "fixed"):
            raise ValueError(f"arrivals must be poisson or fixed, got {short(self.arrivals)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer at most, where a token is 28 x 28 pixels or more, or a letter or more."""
        return (max(4, self.window) + 1) * ((-(-self.side // 28)) ** 2 + 128) + self.max_tokens

    def times(self, rate: float, run: int) -> np.ndarray:
        """When requests come, in seconds from the beginning [requests]; the first comes at once."""
        return arrival_times(self.requests, rate, self.arrivals, [self.seed, run, 0])

    def chats(self, run: int, count: int | None = None) -> list[Chat]:
        """The requests of a run, or so many. Runs share no picture but those that are `known`, so that each meets a
        server that has seen none of its own."""
        rng = np.random.default_rng([self.seed, run, 1])
        each = {kind: getattr(self, f"_{kind}")(rng, run) for kind in dict.fromkeys(self.kinds)}
        return [next(each[self.kinds[i % len(self.kinds)]]) for i in range(self.requests if count is None else count)]

    def shown(self) -> list[Chat]:
        """What makes the pool known: each picture once."""
        if not self.known:
            return []
        pool = (self._pooled(0, picture) for picture in range(self.pictures))
        return [Chat("known", [{"role": "user", "content": [picture, _text("Look.")]}]) for picture in pool]

    def told(self) -> dict[str, Any]:
        """What a table says of it."""
        return dataclasses.asdict(self)

    def _repeat(self, rng: np.random.Generator, run: int) -> Iterator[Chat]:
        while True:
            [picture] = self._drawn(rng, 1)
            asked = [self._pooled(run, picture), _text(f"What is shown here, {_words(rng)}?")]
            yield Chat("repeat", [{"role": "user", "content": asked}])

    def _move(self, rng: np.random.Generator, run: int) -> Iterator[Chat]:
        while True:
            pictures = self._drawn(rng, min(self.pictures, int(rng.integers(2, 5))))
            shown = [self._pooled(run, picture) for picture in pictures]
            asked = [_text(f"Compare these, {_words(rng)}."), *shown, _text(f"Which one is {_words(rng)}?")]
            yield Chat("move", [{"role": "user", "content": asked}])

    def _slide(self, rng: np.random.Generator, run: int) -> Iterator[Chat]:
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
                yield Chat("slide", messages[:-1])

    def _drawn(self, rng: np.random.Generator, count: int) -> list[int]:
        """Different pictures of the pool, in any order."""
        weights = 1 / np.arange(1, self.pictures + 1) ** self.zipf
        return [int(one) for one in rng.choice(self.pictures, count, replace=False, p=weights / weights.sum())]

    def _pooled(self, run: int, picture: int) -> dict[str, Any]:
        return self._picture(0 if self.known else run, 0, picture)

    def _picture(self, *name: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": _picture(self.side, self.seed, *name)}}


def arrival_times(requests: int, rate: float, arrivals: str, seed: Sequence[int]) -> np.ndarray:
    """When requests come, in seconds from the beginning [requests]: evenly, or at random; the first comes at once."""
    gaps = np.full(requests, 1 / rate)
    if arrivals == "poisson":
        gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
    return np.cumsum(gaps) - gaps[0]


@dataclass(frozen=True)
class Chat:
    """A request: of which kind, and its messages."""

    kind: str
    messages: list[dict[str, Any]]

    def body(self, model: str, load: RequestLoad, more: dict[str, Any]) -> bytes:
        """As it is sent."""
        asked = {"model": model, "messages": self.messages, "max_tokens": load.max_tokens, "temperature": 0}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**asked, **streamed, **more}).encode()


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _words(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, 3))


@functools.lru_cache(4096)
def _picture(side: int, *name: int) -> str:
    """A picture of coloured squares as a data URL; its name is its seed."""
    cells = -(-side // _CELL)
    noise = np.random.default_rng([2, *name]).integers(0, 256, (cells, cells, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.repeat(_CELL, 0).repeat(_CELL, 1)[:side, :side]).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


_PATIENCE = 30.0  # seconds that a server may take to end


@contextlib.contextmanager
def own_server(model: str | None, policies: Sequence[str], longest: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Serves within, everything compiled.

    Args:
      model: checkpoint or hub id; None: random weights, 12 layers x 768.
      policies: that requests may ask for, or `SCHEDULE`.
      longest: tokens of prompt and answer at most.

    Yields:
      The base URL, and what requests call each policy.

    Raises:
      ValueError, OSError, MemoryError: the model cannot be opened, or one is no policy.
    """
    for name in policies:
        if name != SCHEDULE:
            parse_policy(name)  # before a model is opened
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
                told: str | Exception = here.recv()
            except EOFError as error:
                raise OSError("the server ended before it was ready") from error
            if isinstance(told, Exception):
                raise told
            yield told, reuses
        finally:
            here.close()
            process.join(_PATIENCE)
            process.kill()  # where it compiles, as nobody waits any more


def _serve(parent: Connection, model: str | None, reuses: dict[str, str], longest: int) -> None:
    """Tells the base URL, or what is wrong, and serves until the other end of the pipe is closed."""
    try:
        with TtftSetup(model=model).opened() as (path, name):
            rows = max(1024, longest)  # policies that choose want a prompt in one step
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
