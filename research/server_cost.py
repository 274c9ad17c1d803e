"""Cost of HTTP: the same requests to `AsyncLLM` and to a server on it, interleaved, in one process.

Hits are one client's questions about a cached image, one after the other, streamed: seconds to the first token. Load is
several clients that each request answers of a fixed length: tokens per second. The model is `vlcache bench ttft`'s, a
decoder of 12 layers x 768 with random weights, unless one is named.

    python -m research.server_cost --out benchmarks/results/server_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import pathlib
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from vlcache_jax import AsyncLLM, SamplingParams
from vlcache_jax.assets import PICTURES
from vlcache_jax.benchmarks.random_models import LETTERS
from vlcache_jax.benchmarks.settings import BenchModel
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import listening
from vlcache_jax.study.report import environment, publish

type Ask = Callable[[int], Awaitable[float]]
"""Answers with so many tokens; seconds to the first of them."""


def measure(
    model: str | None, *, hits: int, clients: Sequence[int], requests: int, tokens: int, repeats: int
) -> tuple[str, list[dict[str, Any]]]:
    """Return the name of the model, and the rows of the table.

    Args:
      model: Checkpoint; None: random weights.
      hits: Number of hits of one client, in each repeat.
      clients: Numbers of concurrent clients.
      requests: Requests of each client.
      tokens: Tokens of an answer.
      repeats: Number of repeats.
    """
    picture = "data:image/png;base64," + base64.b64encode((PICTURES / "picture.png").read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is at C2?"}]
    messages = [{"role": "user", "content": parts}]
    # Each token is text, and is sent.
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}
    found: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        path, name = stack.enter_context(BenchModel(model).opened())
        engine = AsyncLLM(path, max_model_len=1024, use_tqdm=False)
        engine.service.ahead.stop()
        stack.callback(lambda: asyncio.run(engine.close()))
        url = stack.enter_context(listening(Server(engine, ServerConfig(port=0))))
        bar = stack.enter_context(Progress("measuring", 1 + repeats))

        async def direct(count: int) -> float:
            begin, first = time.perf_counter(), 0.0
            async for _ in engine.deltas(messages, SamplingParams(max_tokens=count, **fields)):
                first = first or time.perf_counter() - begin
            return first

        async def posted(count: int) -> float:
            body = {"messages": messages, "max_tokens": count, "stream": True, **fields}
            return await _post(url, json.dumps(body).encode())

        ways: list[tuple[str, Ask]] = [("direct", direct), ("HTTP", posted)]
        for turn in range(1 + repeats):
            for way, ask in ways if turn % 2 else ways[::-1]:
                firsts = asyncio.run(_one_by_one(ask, hits))
                rates = {f"{count} clients": asyncio.run(_load(ask, count, requests, tokens)) for count in clients}
                if turn:  # it has warmed up
                    found.setdefault(("hits", way), []).extend(firsts)
                    for what, rate in rates.items():
                        found.setdefault((what, way), []).append(rate)
            bar.update()
    rows = []
    for what in dict.fromkeys(what for what, _ in found):
        one, other = (statistics.median(found[what, way]) for way in ("direct", "HTTP"))
        scale, unit = (1e3, "ms to the first token") if what == "hits" else (1, "tokens a second")
        rows.append({"what": what, "unit": unit, "direct": scale * one, "HTTP": scale * other, "ratio": other / one})
    return name, rows


async def _one_by_one(ask: Ask, count: int) -> list[float]:
    return [await ask(1) for _ in range(count)]


async def _load(ask: Ask, clients: int, requests: int, tokens: int) -> float:
    """Return tokens per second."""

    async def client() -> None:
        for _ in range(requests):
            await ask(tokens)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return clients * requests * tokens / (time.perf_counter() - begin)


async def _post(url: str, body: bytes) -> float:
    """Return the seconds to the first piece that has text. The official client takes more time than the server."""
    begin, first = time.perf_counter(), 0.0
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = f"POST {place.path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    async for line in reader:
        if line.startswith(b"data:"):
            first = first or time.perf_counter() - begin
    writer.close()
    await writer.wait_closed()
    return first


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint; by default random weights, 12 layers x 768")
    parser.add_argument("--hits", type=int, default=50, help="hits of one client, in each repeat")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--requests", type=int, default=2, help="requests of each client")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=4, help="repeats after a warm-up")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    check_writable("out", args.out)
    sizes = {name: getattr(args, name) for name in ("hits", "clients", "requests", "tokens", "repeats")}
    name, rows = measure(args.model, **sizes)
    publish("What HTTP costs", rows, environment("jax") | {"model": name} | sizes, args.out)


if __name__ == "__main__":
    main()
