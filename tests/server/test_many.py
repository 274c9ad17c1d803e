"""Many clients at once, of which some go away, read slowly or send what is no request: nobody else is harmed."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.helper import WITHIN
from tests.server.helper import data_url, eventually, shows

CHAT = "/v1/chat/completions"
CLIENTS, ROUNDS = 100, 4
MOST_GROWTH = 200 * 2**20  # bytes of memory from the second round to the last


def bodies(textured_image):
    """Requests of all kinds."""
    pictures = [data_url(textured_image(64, 32 * (2 + i), i)) for i in range(3)]
    found = []
    for i in range(12):
        messages = shows(*pictures[: i % 4], text=f"What is {i}?")
        found.append({"messages": messages, "max_tokens": 4 + 5 * (i % 5), "ignore_eos": True, "n": 1 + i % 2})
        if i % 3 == 0:
            found[-1] |= {"temperature": 1, "seed": i}
    return found


def texts(served, body):
    """Of all answers to a request, whole or streamed."""
    status, _, found = served.ask("POST", CHAT, body)
    assert status == 200, found
    if not body.get("stream"):
        return [choice["message"]["content"] for choice in json.loads(found)["choices"]]
    *events, done, rest = found.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    answers = [""] * body["n"]
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            answers[choice["index"]] += choice["delta"].get("content", "")
    return answers


def go_away(served, body, rng):
    """After a part of the answer, or none; or in the middle of the body."""
    data = json.dumps(body | {"stream": rng.random() < 0.5, "max_tokens": 400}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(head.encode() + data[: rng.choice((len(data) // 2, len(data), len(data)))])
        connection.settimeout(rng.choice((0.001, 0.05, 0.3)))
        with contextlib.suppress(TimeoutError):
            connection.recv(rng.choice((1, 400)))


@pytest.mark.servers
def test_many_clients(serve, engine, textured_image):
    served = serve(max_waiting=2 * CLIENTS, allow_reuse=["full"])
    asked = bodies(textured_image)
    expected = [texts(served, body) for body in asked]
    memory = []
    for turn in range(ROUNDS):
        begin = threading.Barrier(CLIENTS)

        def ask(number, turn=turn, begin=begin):
            rng = random.Random(CLIENTS * turn + number)
            body = rng.choice(asked)
            begin.wait(WITHIN)
            match number % 5:
                case 0:
                    go_away(served, body, rng)
                case 1:
                    wrong = rng.choice([b"{", b"\xff", b"[]", b'{"messages": 5}', b'{"messages": [{}]}'])
                    assert served.ask("POST", CHAT, wrong)[0] == 400
                case _:
                    assert texts(served, body | {"stream": number % 2 == 0}) == expected[asked.index(body)]

        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(ask, range(CLIENTS)))
        assert eventually(lambda: not served.server.entrance.inside)
        memory.append(psutil.Process().memory_info().rss)
    assert memory[-1] - memory[1] < MOST_GROWTH
    found = served.ask("GET", "/metrics")[2].decode()
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        [value] = [line.split()[-1] for line in found.splitlines() if line.startswith(f"vlcache:{gauge}")]
        assert float(value) == 0
