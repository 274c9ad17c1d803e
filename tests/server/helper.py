"""A server at a real port, in a thread or in a process of its own."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests import helper
from tests.helper import BUCKETS, WITHIN
from vlcache_jax import AsyncLLM, CacheConfig
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.lifecycle import listening
from vlcache_jax.testing import make_checkpoint

WORDS = [*helper.WORDS, "--buckets", json.dumps(dataclasses.asdict(BUCKETS))]
"""`SIZES`, as the command takes them."""
FEW_WORDS = [
    *helper.WORDS,
    "--buckets",
    json.dumps(dataclasses.asdict(dataclasses.replace(BUCKETS, rows=(64,), patches=(256,)))),
]
"""The same with one size of rows and one of patches: a server of its own compiles its programs again."""


class Running:
    """A server that listens.

    Attributes:
      server: it; None: it is in a process of its own.
      port: where.
    """

    def __init__(self, server: Server | None, port: int):
        self.server, self.port = server, port

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; what is no bytes is sent as JSON."""
        all_headers = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): one for name, one in headers.items()
        }
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)
        with contextlib.closing(connection):
            connection.request(method, path, data, all_headers)
            response = connection.getresponse()
            found = response.read()
            return response.status, {name.lower(): one for name, one in response.getheaders()}, found

    def json(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        status, _, found = self.ask(method, path, body, **headers)
        return status, json.loads(found)


def open_reranker(folder: Path) -> AsyncLLM:
    """An engine whose model knows "yes" and "no"; its checkpoint and its disk lie in the folder."""
    directory = make_checkpoint(
        folder / "model", "qwen3_vl", seed=5, tie_word_embeddings=True, corpus=["yes", "no"] * 50,
    )  # fmt: skip
    cache = CacheConfig(disk=folder / "disk")
    return AsyncLLM(directory, use_tqdm=False, allowed_local_media_path=None, cache=cache, **helper.SIZES)


@contextlib.contextmanager
def running(engine: AsyncLLM, **options: Any) -> Iterator[Running]:
    """Serves an engine, which stays open."""
    server = Server(engine, ServerConfig(port=0, **options))
    with listening(server) as url:
        yield Running(server, int(re.findall(r":(\d+)/", url)[0]))


@contextlib.contextmanager
def serving(*words: str, first: str = "") -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A process that serves, by default the shipped model; its base URL, and what it says.

    Args:
      words: of the command.
      first: Python that it runs before.
    """
    code = f"{first}\nfrom vlcache_jax.commands.cli import main\nmain()"
    asked = [sys.executable, "-c", code, "serve", "--port", "0", "--no-warmup", *words]
    process = subprocess.Popen(asked, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready"):
                ready.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert ready.wait(2 * WITHIN), lines
        [url] = re.findall(r"http://[\d.:]+/v1", next(line for line in lines if line.startswith("ready")))[:1]
        yield process, url, lines
    finally:
        process.kill()
        process.wait()
        thread.join()
        assert process.stderr is not None
        process.stderr.close()


def data_url(pixels: np.ndarray, kind: str = "PNG") -> str:
    """A picture as a URL."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def shows(*urls: str, text: str = "What is it?") -> list[dict[str, Any]]:
    """A question about pictures."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
