"""Refusals of a server and their times: URLs to internal hosts, large bodies, images and grammars that would grow.

Each row is one request to a real server, in its own process, which may fetch from the names `localhost` and
`images.example`. Meanwhile a neighbor repeats one question, and must always get the same answer. Some of the URLs lead
to a listening socket, to which the server must not connect.

    python -m research.refusals --out benchmarks/results/refusals_cpu.json
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import http.client
import json
import pathlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from vlcache_jax.common.files import check_writable
from vlcache_jax.study.report import environment, publish

CHAT = "/v1/chat/completions"
MAX_BODY = 2**20  # bytes; the limit of the server
DOMAINS = ("localhost", "images.example")
DISCOVERED = {"messages": [{"role": "user", "content": "Where is the star?"}], "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Row:
    """A request that the server must refuse.

    Attributes:
      table: Kind of the request.
      name: Description of the fault.
      body: JSON, or bytes to send unchanged.
      statuses: Allowed statuses of the refusal.
      headers: Headers in addition to those of every request.
      is_chunked: The body is sent without its length.
    """

    table: str
    name: str
    body: Any
    statuses: tuple[int, ...] = (400,)
    headers: dict[str, str] = field(default_factory=dict)
    is_chunked: bool = False


def shows(url: str) -> dict[str, Any]:
    """Return a request about an image."""
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def inside(port: int) -> list[Row]:
    """Return URLs to places that their sender cannot reach (SSRF).

    Args:
      port: Port of a listening socket on this machine.
    """
    urls = {
        "this machine": f"http://127.0.0.1:{port}/a.png", "by an allowed name": f"http://localhost:{port}/a.png",
        "its IPv6": f"http://[::1]:{port}/a.png", "IPv4 in IPv6": f"http://[::ffff:127.0.0.1]:{port}/a.png",
        "decimal": f"http://2130706433:{port}/a.png", "hexadecimal": f"http://0x7f000001:{port}/a.png",
        "octal": f"http://0177.0.0.1:{port}/a.png", "short": f"http://127.1:{port}/a.png",
        "any address": f"http://0.0.0.0:{port}/a.png", "metadata": "http://169.254.169.254/latest/meta-data/",
        "metadata, IPv6": "http://[fd00:ec2::254]/", "private network": "http://10.0.0.1/a.png",
        "user before the host": f"http://images.example@127.0.0.1:{port}/a.png",
        "allowed name as a beginning": "http://images.example.evil.example/a.png",
        "allowed name as a user": "http://images.example:80@evil.example/a.png",
        "fragment": f"http://127.0.0.1:{port}#@images.example/a.png",
        "backslash": f"http://127.0.0.1:{port}\\@images.example/a.png",
        "line break": f"http://images.example\r\nHost: 127.0.0.1:{port}/a.png", "zero byte": "http://localhost\0.a/b.png",
        "another scheme": "gopher://127.0.0.1/_GET", "ftp": "ftp://images.example/a.png",
        "a file": "file:///etc/passwd", "a file of a host": "file://localhost/etc/passwd", "a path": "/etc/passwd",
        "a path that climbs": "../../../etc/passwd", "home": "~/.ssh/id_rsa", "an endless file": "/dev/zero",
        "a long URL": "http://images.example/" + "a" * 10**5,
    }  # fmt: skip
    video = {"type": "video_url", "video_url": {"url": f"http://127.0.0.1:{port}/a.mp4"}}
    return [
        *(Row("SSRF", name, shows(url)) for name, url in urls.items()),
        Row("SSRF", "as a video", {"messages": [{"role": "user", "content": [video]}]}),
    ]


def large() -> list[Row]:
    """Return bodies that are too large, or have too many parts."""
    hello: list[Any] = [{"role": "user", "content": "Hello"}]
    long = json.dumps({"messages": [{"role": "user", "content": "a" * MAX_BODY}]}).encode()
    part = shows("data:image/png;base64,iVBORw0KGgo=")["messages"][0]["content"]
    deep = b'{"messages": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"
    return [
        Row("body size", "by its length", long, (413,)),
        Row("body size", "16 times", long * 16, (413,)),
        Row("body size", "without a length", long, (413,), is_chunked=True),
        Row("body size", "packed", gzip.compress(bytes(2**26)), (415,), {"Content-Encoding": "gzip"}),
        Row("body size", "lists in lists", deep),
        Row("body size", "a number of a million digits", b'{"max_tokens": ' + b"9" * (MAX_BODY - 99) + b"}"),
        Row("body size", "a text beyond the context", {"messages": [{"role": "user", "content": "a " * 2**18}]}),
        Row("body size", "10000 messages", {"messages": hello * 10**4}),
        Row("body size", "10000 pictures", {"messages": [{"role": "user", "content": part * 10**4}]}),
        Row("body size", "200000 answers", {"messages": hello, "n": 200_000}),
        Row("body size", "10000 stops", {"messages": hello, "stop": ["a"] * 10**4}),
        Row("body size", "a stop of half a million characters", {"messages": hello, "stop": "a" * 2**19}),
        Row("body size", "50000 biases", {"messages": hello, "logit_bias": {str(i): 1 for i in range(50_000)}}),
        Row("body size", "50000 unknown fields", {"messages": hello} | {f"x{i}": 1 for i in range(50_000)}),
        Row("body size", "a salt of half a million characters", {"messages": hello, "cache_salt": "a" * 2**19}),
    ]


def pictures() -> dict[str, bytes]:
    """Return files of few bytes that claim to be very large."""
    words = struct.Struct("<HHHH")

    def png(width: int, height: int, *more: bytes) -> bytes:
        head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", head), *((b"iTXt", one) for one in more), (b"IDAT", zlib.compress(bytes(2**20), 9))]
        content = b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in [*chunks, (b"IEND", b"")]
        )
        return b"\x89PNG\r\n\x1a\n" + content

    def webp(width: int, height: int) -> bytes:
        sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        chunk = b"VP8X" + struct.pack("<I", 10) + bytes(4) + sides
        return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk

    def tiff(width: int, height: int) -> bytes:
        entries = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (279, 4, 1)]
        fields = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
        return struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + fields + bytes(64)

    bmp = struct.pack("<2sIHHI", b"BM", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 10**5, 10**5, 1, 24, *[0] * 6)
    jpeg = b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x11\x00\x02\x11\x01\x03\x11\x01\xff\xd9"
    gif = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + bytes(6)
    frame = b"," + words.pack(0, 0, 65535, 65535) + b"\0\x08\x01\0\0"
    packed = b"comment\0\1\0\0\0" + zlib.compress(bytes(2**26), 9)
    return {
        "PNG of 10 gigapixels": png(10**5, 10**5), "PNG of 400 megapixels": png(20_000, 20_000),
        "PNG as wide as can be": png(2**31 - 1, 1), "PNG as high as can be": png(1, 2**31 - 1),
        "PNG with a text that grows": png(20_000, 20_000, packed), "JPEG of 4 gigapixels": jpeg,
        "GIF of 4 gigapixels": gif + frame + b";", "GIF of 10000 such frames": gif + frame * 10**4 + b";",
        "WebP of 281 terapixels": webp(2**24, 2**24), "BMP of 10 gigapixels": bmp,
        "TIFF of 18 exapixels": tiff(2**32 - 1, 2**32 - 1), "a page of 10 gigapixels": b"%!PS-Adobe-3.0 EPSF-3.0\n"
        b"%%BoundingBox: 0 0 100000 100000\n%%EndComments\n",
        "an SVG that names itself": b'<svg xmlns="http://www.w3.org/2000/svg"><use href="#a" id="a"/></svg>',
    }  # fmt: skip


def growing() -> list[Row]:
    """Return images that would grow when they are decoded."""

    def url(data: bytes, kind: str = "image/png") -> str:
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    found = pictures()
    content = [{"type": "video_url", "video_url": {"url": url(found["GIF of 10000 such frames"], "video/mp4")}}]
    return [
        *(Row("decode bomb", name, shows(url(data))) for name, data in found.items()),
        Row("decode bomb", "the frames as a video", {"messages": [{"role": "user", "content": content}]}),
    ]


def grammars() -> list[Row]:
    """Return constraints that would cost much to compile or to apply."""

    def form(**given: Any) -> dict[str, Any]:
        return DISCOVERED | {"structured_outputs": given}

    def schema(given: Any) -> dict[str, Any]:
        return DISCOVERED | {"response_format": {"type": "json_schema", "json_schema": {"schema": given}}}

    def any_of(number: int) -> list[Any]:
        return [{"properties": {f"{name}{number}": {"type": "integer"}}} for name in "abc"]

    ways = {"type": "object", "allOf": [{"anyOf": any_of(i)} for i in range(12)]}
    tool = {"type": "function", "function": {"name": "a", "parameters": ways}}
    doubling = "start: " + "a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"'
    deep = b'{"type": "array", "items": ' * 5000 + b"{}" + b"}" * 5000
    rows = {
        "repetitions of repetitions": form(regex="(((a{100}){100}){100}){100}"),
        "looks ahead": form(regex="a(?=b)"),
        "looks back at what it took": form(regex=r"(a+)\1"),
        "a regular expression of 60000 groups": form(regex="(" * 30_000 + ")" * 30_000),
        "30000 choices": form(choice=[f"choice {i}" for i in range(30_000)]),
        "repetitions of a long repetition": form(regex="(a{1000}){1000}"),
        "a choice too long": form(choice=["a" * 10**5]),
        "a rule that is not there": form(grammar="start: nowhere"),
        "rules that double": form(grammar=doubling + "\n%ignore nowhere"),
        "a grammar too long": form(grammar="start: " + '"a" ' * 20_000),
        "multiples of primes": form(json={"allOf": [{"multipleOf": prime} for prime in (9973, 9967, 9949)]}),
        "a schema that is not there": form(json={"$ref": "#/$defs/a"}),
        "a schema of 5000 levels": form(json=deep.decode()),
        "a schema that holds itself": schema({"allOf": [{"$ref": "#"}, {"type": "object"}]}),
        "properties in all ways": schema({"allOf": [{"anyOf": any_of(i)} for i in range(12)]}),
        "an enum too long": schema({"enum": [f"value {i}" for i in range(8000)]}),
        "a type that is not there": schema({"type": "nonsense"}),
        "a schema from elsewhere": schema({"$ref": "http://127.0.0.1/schema.json"}),
        "tags that do not begin so": form(
            structural_tag={"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<b"]}
        ),
        "arguments in all ways": DISCOVERED | {"tools": [tool], "tool_choice": "required"},
    }
    return [Row("grammar bomb", name, body) for name, body in rows.items()]


def all_rows(port: int) -> list[Row]:
    """Return the rows of all tables."""
    return [*inside(port), *large(), *growing(), *grammars()]


def post(port: int, row: Row, seconds: float = 60) -> tuple[int, Any, float]:
    """Send a row; return the status, the response, and its seconds."""
    data = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    headers = {"Content-Type": "application/json", **row.headers}
    pieces = (data[i : i + 2**16] for i in range(0, len(data), 2**16))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)) as connection:
        begin = time.perf_counter()
        if row.is_chunked:
            connection.request("POST", CHAT, pieces, headers, encode_chunked=True)
        else:
            connection.request("POST", CHAT, data, headers)
        response = connection.getresponse()
        found = response.read()
        return response.status, json.loads(found), time.perf_counter() - begin


class Neighbor:
    """A thread that repeats one request and compares the answers; a context manager.

    Attributes:
      answers: Number of answers equal to the first one.
      wrong: All other answers.
    """

    def __init__(self, port: int):
        self.answers, self.wrong = 0, list[Any]()
        self._port, self._ends = port, threading.Event()
        self._first = self._ask()
        self._thread = threading.Thread(target=self._run)

    def _ask(self) -> tuple[int, Any]:
        status, found, _ = post(self._port, Row("", "", DISCOVERED))
        return status, found.get("choices", found)

    def _run(self) -> None:
        while not self._ends.is_set():
            answer = self._ask()
            if answer == self._first and answer[0] == 200:
                self.answers += 1
            else:
                self.wrong.append(answer)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def measure(port: int, rows: Sequence[Row], within: float) -> list[dict[str, Any]]:
    """Send each row, with a neighbor next to it.

    Args:
      within: Maximum seconds of a refusal.

    Raises:
      AssertionError: A request is answered, or refused with another status or too late, or the neighbor gets a wrong
        answer.
    """
    results = []
    with Neighbor(port) as discovered_peer:
        for row in rows:
            status, found, seconds = post(port, row)
            assert status in row.statuses, (row.table, row.name, status, found)
            assert seconds < within, (row.table, row.name, seconds)
            error = found["error"]
            assert error["message"], (row.table, row.name, found)
            assert not discovered_peer.wrong, (row.table, row.name, discovered_peer.wrong)
            why = error["message"][:60]
            results.append(
                {"table": row.table, "what": row.name, "status": status, "ms": 1e3 * seconds, "param": error["param"]}
                | {"why": why}
            )
    assert not discovered_peer.wrong, discovered_peer.wrong
    assert discovered_peer.answers, "nobody was answered beside"
    return results


@contextlib.contextmanager
def serving(model: str, *more: str) -> Iterator[tuple[int, int]]:
    """Run a server in its own process; yield its port, and the process's id.

    Args:
      more: Further arguments of the command.
    """
    words = ["serve", model, "--port", "0", *more]
    code = "from vlcache_jax.commands.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("ready"):
                    break
            found = re.search(r"http://[\d.]+:(\d+)/", said[-1] if said else "")
            if found is None:
                raise RuntimeError(f"the server did not start: {''.join(said)}")
            # The process must not block on a full pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield int(found[1]), process.pid
        finally:
            process.terminate()


@contextlib.contextmanager
def bait() -> Iterator[tuple[int, socket.socket]]:
    """Yield a socket to which the server must not connect, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener.getsockname()[1], listener


def was_taken(listener: socket.socket) -> bool:
    """Return whether any client has connected."""
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-vqa")
    parser.add_argument("--within", type=float, default=1.0, help="maximum seconds of a refusal")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    check_writable("out", args.out)
    words = ["--max-body-bytes", str(MAX_BODY), "--allow-remote-images"]
    for domain in DOMAINS:
        words += ["--allowed-media-domains", domain]
    with serving(args.model, *words) as (port, _), bait() as (inner, listener):
        rows = measure(port, all_rows(inner), args.within)
        assert not was_taken(listener), "a picture was asked for from inside"
    head = environment("llguidance", "pillow", "uvicorn") | {"model": args.model, "within": args.within}
    publish("What a server refuses", rows, head, args.out)


if __name__ == "__main__":
    main()
