"""Many clients at once, of which some go away, read slowly or send what is no request: nobody else is harmed.

`VLCACHE_SOAK` says for how many seconds; with 120, `-n0 -s -m servers` also shows the figures.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.helper import WITHIN, eventually
from tests.server.helper import WORDS, Running, data_url, serving, shows

CHAT = "/v1/chat/completions"
SECONDS = float(os.environ.get("VLCACHE_SOAK", "20"))
CLIENTS = 200
MAX_GROWTH = 64 * 2**20  # bytes that the server may take more in the second half than in the first
BROKEN = [b"{", b"\xff", b"[]", b'{"messages": 5}', b'{"messages": [{}]}', b'{"messages": [{"role": "user"']
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


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


def texts(body, status, found):
    """Of all answers to a request, whole or streamed."""
    assert status == 200, found
    if not body.get("stream"):
        return [choice["message"]["content"] for choice in json.loads(found)["choices"]]
    *events, done, rest = found.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    answers = [""] * body["n"]
    for event in (one for one in events if one != ": keep-alive"):
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            answers[choice["index"]] += choice["delta"].get("content", "")
    return answers


def ask(served, body):
    return texts(body, *served.ask("POST", CHAT, body)[::2])


def read_slowly(served, body, rng):
    """In small pieces, with pauses."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=WITHIN)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        response, found = connection.getresponse(), bytearray()
        while piece := response.read(rng.randrange(50, 500)):
            found += piece
            time.sleep(rng.random() * 0.05)
        return texts(body, response.status, bytes(found))


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


def come_and_go(served, asked, expected, number, end):
    """One client, until the time is over; counts what it did, and how long it waited for whole answers."""
    rng, did, waits = random.Random(number), Counter(), []
    while time.monotonic() < end:
        body = rng.choice(asked)
        what = rng.choices(("whole", "stream", "slow", "gone", "broken"), (3, 3, 1, 2, 1))[0]
        did[what] += 1
        match what:
            case "gone":
                go_away(served, body, rng)
            case "broken":
                assert served.ask("POST", CHAT, rng.choice(BROKEN))[0] == 400
            case "slow":
                more = {"stream": True, "logprobs": True, "top_logprobs": 5}
                assert read_slowly(served, body | more, rng) == expected[asked.index(body)]
            case _:
                begin = time.monotonic()
                assert ask(served, body | {"stream": what == "stream"}) == expected[asked.index(body)]
                waits.append(time.monotonic() - begin)
    return did, waits


@pytest.mark.servers
def test_many_clients(checkpoints, textured_image):
    words = [str(checkpoints("qwen3_vl")), *WORDS, "--max-waiting", str(2 * CLIENTS), "--admin-key", "boss"]
    with ThreadPoolExecutor(CLIENTS) as clients, serving(*words) as (process, url, lines):
        served = Running(None, int(re.findall(r":(\d+)/", url)[0]))
        asked = bodies(textured_image)
        expected = [ask(served, body) for body in asked]
        own = psutil.Process(process.pid)
        files = own.num_fds()

        begin = time.monotonic()
        given = served, asked, expected
        in_flight = [clients.submit(come_and_go, *given, number, begin + SECONDS) for number in range(CLIENTS)]
        memory = []
        while any(not one.done() for one in in_flight):
            memory.append((time.monotonic() - begin, own.memory_info().rss))
            time.sleep(0.1)
        ended = [one.result() for one in in_flight]

        # Nothing is left: no request, no decode slot, no page, no record that somebody holds, no connection.
        assert eventually(lambda: served.json("GET", "/load")[1] == {"server_load": 0})
        told = served.ask("GET", "/metrics")[2].decode()
        for gauge in GAUGES:
            assert re.search(rf"(?m)^vlcache:{gauge}\{{.*\}} 0\.0$", told), gauge
        assert eventually(lambda: own.num_fds() <= files)
        assert [ask(served, body) for body in asked] == expected
        served.ask("POST", "/reset_mm_cache", Authorization="Bearer boss")
        stats = served.json("GET", "/cache", Authorization="Bearer boss")[1]
        assert (stats["bytes"], stats["left_bytes"]) == (0, 0)
        assert "Traceback" not in "".join(lines)

    did, waits = sum((did for did, _ in ended), Counter()), sorted(wait for _, waits in ended for wait in waits)
    first, second = (max(rss for at, rss in memory if (at < SECONDS / 2) == half) for half in (True, False))
    print(f"\n{dict(did)}, median wait {waits[len(waits) // 2]:.2f} s, longest {waits[-1]:.2f} s")
    print(f"memory: {first / 2**20:.0f} MiB in the first half at most, {second / 2**20:.0f} MiB in the second")
    assert set(did) == {"whole", "stream", "slow", "gone", "broken"}
    assert second - first < MAX_GROWTH
