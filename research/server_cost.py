"""What HTTP costs: the same requests asked of `AsyncLLM` and of a server on it, in turns, in one process.

Hits are one client's questions about a picture that the engine knows, one after the other, streamed: seconds to the
first token. Load is several clients that each ask for answers of a fixed length: tokens a second.

    python -m research.server_cost --out benchmarks/results/server_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import pathlib
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from vlcache_jax import AsyncLLM, SamplingParams
from vlcache_jax.assets import PICTURES
from vlcache_jax.files import check_writable
from vlcache_jax.progress import Progress
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import listening
from vlcache_jax.study.report import environment, publish

type Ask = Callable[[int], Awaitable[float]]
"""Answers with so many tokens; seconds to the first of them."""


def measure(model: str, *, hits: int, clients: Sequence[int], requests: int, tokens: int, repeats: int) -> Any:
    """The rows of the table.

    Args:
      hits: of one client, in each turn.
      clients: how many at once.
      requests: of each of these.
      tokens: of an answer.
      repeats: turns.
    """
    picture = "data:image/png;base64," + base64.b64encode((PICTURES / "picture.png").read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is at C2?"}]
    messages = [{"role": "user", "content": parts}]
    engine = AsyncLLM(model, use_tqdm=False)
    engine.service.ahead.stop()

    async def direct(count: int) -> float:
        begin, first = time.perf_counter(), 0.0
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        async for _ in engine.deltas(messages, params):
            first = first or time.perf_counter() - begin
        return first

    async def posted(count: int) -> float:
        body = {"messages": messages, "temperature": 0, "max_tokens": count, "ignore_eos": True, "stream": True}
        return await _post(url, json.dumps(body).encode())

    ways: dict[str, Ask] = {"direct": direct, "HTTP": posted}
    found: dict[tuple[str, str], list[float]] = {}
    with listening(Server(engine, ServerConfig(port=0))) as url, Progress("measuring", 1 + repeats) as bar:
        for turn in range(1 + repeats):
            for way, ask in ways.items():
                firsts = asyncio.run(_one_by_one(ask, hits))
                rates = {count: asyncio.run(_load(ask, count, requests, tokens)) for count in clients}
                if turn:  # it has warmed up
                    found.setdefault(("hits", way), []).extend(firsts)
                    for count, rate in rates.items():
                        found.setdefault((f"{count} clients", way), []).append(rate)
            bar.update()
    asyncio.run(engine.close())
    rows = []
    for what in dict.fromkeys(name for name, _ in found):
        one, other = (statistics.median(found[what, way]) for way in ways)
        scale, unit = (1e3, "ms to the first token") if what == "hits" else (1, "tokens a second")
        rows.append({"what": what, "unit": unit, "direct": scale * one, "HTTP": scale * other, "ratio": other / one})
    return rows


async def _one_by_one(ask: Ask, count: int) -> list[float]:
    return [await ask(1) for _ in range(count)]


async def _load(ask: Ask, clients: int, requests: int, tokens: int) -> float:
    """Tokens a second."""

    async def client() -> None:
        for _ in range(requests):
            await ask(tokens)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return clients * requests * tokens / (time.perf_counter() - begin)


async def _post(url: str, body: bytes) -> float:
    """Seconds to the first piece that has text. A client of its own: the official one takes more than the server."""
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
    parser.add_argument("--model", default="tiny-vqa")
    parser.add_argument("--hits", type=int, default=200, help="of one client, in each turn")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--repeats", type=int, default=5, help="after one that warms up")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    check_writable("out", args.out)
    sizes = {name: getattr(args, name) for name in ("hits", "clients", "requests", "tokens", "repeats")}
    rows = measure(args.model, **sizes)
    publish("What HTTP costs", rows, environment() | {"model": args.model} | sizes, args.out)


if __name__ == "__main__":
    main()
