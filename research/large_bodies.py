"""Effect of one large body on other requests: the worst `/health` meanwhile, and the CPU seconds of the server.

Each row is one request to a real server, in its own process, with default limits. Meanwhile `/health` is requested
fifty times a second, each time on a new connection. The first row is `/health` only.

    python -m research.large_bodies --out benchmarks/results/large_bodies_cpu.json
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from research.refusals import CHAT, Row, pictures, post, serving
from vlcache_jax.common.files import check_writable
from vlcache_jax.study.report import environment, publish

HELLO = [{"role": "user", "content": "Hello"}]
_PAUSE = 0.02  # seconds from one request of `/health` to the next
_SECONDS = 1.0  # seconds that `/health` is requested before the first body
_PATIENCE = 600.0  # seconds for an answer


def _filled(begin: str, unit: str, end: str, size: int) -> bytes:
    """Return a body of about `size` bytes: units one after the other, without the comma of the last one."""
    units = unit * ((size - len(begin) - len(end)) // len(unit.encode()))
    return (begin + units.removesuffix(",") + end).encode()


def bodies(size: int) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yield the name, the path and the generator of each kind of body."""
    chat = '{"max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}], '

    def of(path: str, begin: str, unit: str, end: str) -> tuple[str, Callable[[], bytes]]:
        return path, lambda: _filled(begin, unit, end, size)

    def picture() -> bytes:
        png = pictures()["PNG of 400 megapixels"]
        encoded = base64.b64encode(png + bytes(3 * size // 4 - len(png) - 300)).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        return json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}).encode()

    yield "a picture", CHAT, picture
    yield "rates of videos", *of(CHAT, chat + '"mm_processor_kwargs": {"fps": [', "1,", "]}}")
    yield "names of settings", *of(CHAT, chat + '"mm_processor_kwargs": {', '"fps":1,', "}}")
    yield "allowed tokens", *of(CHAT, chat + '"allowed_token_ids": [', "5,", "]}")
    yield "biases", *of(CHAT, chat + '"logit_bias": {', '"5":1,', "}}")
    yield "metadata", *of(CHAT, chat + '"metadata": [', '"a",', "]}")
    yield "an unknown field", *of(CHAT, chat + '"unknown": [', "1,", "]}")
    yield "messages", *of(CHAT, '{"messages": [', '{"role":"user","content":"a"},', "]}")
    yield "parts", *of(CHAT, '{"messages": [{"role": "user", "content": [', '{"type":"text","text":"a"},', "]}]}")
    yield "tools", *of(CHAT, chat + '"tools": [', '{"type":"function","function":{"name":"a"}},', "]}")
    yield "a text", *of(CHAT, '{"messages": [{"role": "user", "content": "', "star ", '"}]}')
    yield "a text of escapes", *of(CHAT, '{"messages": [{"role": "user", "content": "', "\\n", '"}]}')
    yield "a text of other letters", *of(CHAT, '{"messages": [{"role": "user", "content": "', "\u4e2d", '"}]}')
    yield "choices", *of(CHAT, chat + '"structured_outputs": {"choice": [', '"a",', "]}}")
    yield "a schema", *of(CHAT, chat + '"structured_outputs": {"json": {"enum": [', "1,", "]}}}")
    yield "lists in a list", *of(CHAT, chat + '"unknown": [', "[],", "]}")
    yield "spaces", *of(CHAT, '{"messages": [', " ", "]}")
    yield "digits", *of(CHAT, chat + '"seed": ', "1", "}")
    yield "no JSON", *of(CHAT, "", "a", "")
    yield "a prompt of ids", *of("/v1/completions", '{"prompt": [', "50,", "]}")
    yield "prompts of ids", *of("/v1/completions", '{"prompt": [', "[5],", "]}")
    yield "items", *of("/v1/responses", '{"input": [', '{"role":"user","content":"a"},', "]}")
    yield "inputs", *of("/v1/embeddings", '{"input": [', '"a",', "]}")
    yield "inputs of ids", *of("/v1/embeddings", '{"input": [', "50,", "]}")
    yield "documents", *of("/v1/rerank", '{"query": "a", "documents": [', '"a",', "]}")
    yield "a text to tokenize", *of("/tokenize", '{"prompt": "', "star ", '"}')
    yield "tokens to read", *of("/detokenize", '{"tokens": [', "5,", "]}")


class Health:
    """A thread that requests `/health` repeatedly; a context manager.

    Attributes:
      worst: Maximum seconds of an answer.
      answers: Number of answers.
    """

    def __init__(self, port: int):
        self.worst, self.answers = 0.0, 0
        self._port, self._ends = port, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.wait(_PAUSE):
            begin = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
            self.worst = max(self.worst, time.perf_counter() - begin)
            self.answers += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process."""
    taken = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(taken[11]) + int(taken[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(port: int, pid: int, size: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Send a body of each kind.

    Args:
      only: Kinds; empty: all.
    """
    rows: list[dict[str, Any]] = []
    post(port, Row("", "", {"messages": HELLO, "max_tokens": 1}), _PATIENCE)  # its compilation counts for no row

    def note(what: str, work: Callable[[], tuple[int, str]], sent: int) -> None:
        before, begin = cpu_seconds(pid), time.perf_counter()
        with Health(port) as health:
            status, why = work()
        row = {"what": what, "MiB": sent / 2**20, "status": status, "s": time.perf_counter() - begin}
        row |= {"CPU s": cpu_seconds(pid) - before, "worst /health, s": health.worst}
        rows.append(row | {"RSS MiB": resident_bytes(pid) / 2**20, "why": why})

    def alone() -> tuple[int, str]:
        time.sleep(_SECONDS)
        return 200, ""

    note("/health alone", alone, 0)
    for what, path, make in bodies(size):
        if only and what not in only:
            continue
        body = make()

        def ask(body: bytes = body, path: str = path) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
            with contextlib.closing(connection):
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                found = json.loads(response.read())
            return response.status, found["error"]["message"][:60] if "error" in found else ""

        note(what, ask, len(body))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-vqa")
    parser.add_argument("--mib", type=float, default=63.0, help="MiB of each body; the server accepts 64")
    parser.add_argument("--only", nargs="*", default=(), help="kinds of bodies")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    check_writable("out", args.out)
    load = os.getloadavg()[0]
    with serving(args.model, "--no-warmup") as (port, pid):
        rows = measure(port, pid, int(args.mib * 2**20), args.only)
    head = environment("uvicorn", "h11") | {"model": args.model, "load before": load, "load after": os.getloadavg()[0]}
    publish("What one large body does to others", rows, head, args.out)


if __name__ == "__main__":
    main()
