"""`vlcache bench serve` against a server that says what it is told to say."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import threading
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vlcache_jax import BucketSizes
from vlcache_jax.benchmarks import SCHEDULE, serving, serving_load
from vlcache_jax.benchmarks.serving_client import Client, ReceivedAnswer
from vlcache_jax.benchmarks.serving_load import KINDS, ServingLoad
from vlcache_jax.commands.cli import app
from vlcache_jax.device import memory_plan
from vlcache_jax.reuse.selection import parse_policy

SMALL = ServingLoad(requests=12, pictures=4, window=3, turns=5, side=32, max_tokens=4)


class FakeServer:
    """Answers on 127.0.0.1. A picture is 10 tokens, and cached when it came before; a message is one.

    Args:
      says: called with the number of a request; gives the status and the events of the stream, None is [DONE].
      chunked: how the body is sent; False: until the connection closes.
    """

    def __init__(self, says, *, chunked=True):
        self.says, self.chunked = says, chunked
        self.requests, self.at_once, self.most_at_once = [], 0, 0
        self.seen = set()
        self.cached = self.prompt = 0

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers["Content-Length"]))
        if head.startswith("GET /v1/models "):
            models = json.dumps({"data": [{"id": "fake"}]}).encode()
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(models)}\r\n\r\n".encode() + models)
        else:
            assert head.startswith("POST /v1/chat/completions ")
            number = len(self.requests)
            self.requests.append((json.loads(body), headers))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            await self.answer(writer, number)
            self.at_once -= 1
        writer.close()

    async def answer(self, writer, number):
        status, events = self.says(number)
        usage = self.count(self.requests[number][0])
        kind = "transfer-encoding: chunked\r\n" if self.chunked else ""
        writer.write(f"HTTP/1.1 {status} X\r\n{kind}\r\n".encode())
        for event in events:
            await asyncio.sleep(0)
            if event is None:
                text = b"data: [DONE]\n\n"
            elif isinstance(event, bytes):
                text = event
            else:
                if "usage" in event:
                    event = event | {"usage": usage | event["usage"]}
                text = b"data: " + json.dumps(event).encode() + b"\n\n"
            for part in (text[:5], text[5:]):  # cut anywhere
                writer.write(b"%x\r\n%s\r\n" % (len(part), part) if self.chunked and part else part)
                await writer.drain()
        if self.chunked:
            writer.write(b"0\r\n\r\n")

    def count(self, asked):
        parts = [part for message in asked["messages"] for part in message["content"] if isinstance(part, dict)]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        cached = 10 * sum(url in self.seen for url in urls)
        self.seen.update(urls)
        prompt = 10 * len(urls) + len(asked["messages"])
        self.cached, self.prompt = self.cached + cached, self.prompt + prompt
        return {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}


@contextlib.contextmanager
def running(says, **options):
    """The server, with its address."""
    server = FakeServer(says, **options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(task):
        return asyncio.run_coroutine_threadsafe(task, loop).result()

    listening = do(asyncio.start_server(server.serve, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    async def close():
        listening.close()
        await listening.wait_closed()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    try:
        yield server
    finally:
        do(close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def piece(**delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}
WHOLE = (
    200,
    [piece(role="assistant", content=""), b": wait\n\n", piece(content="a"), piece(content="b"), END, USAGE, None],
)


def bench(server, *options):
    return CliRunner().invoke(app, ["bench", "serve", "--base-url", server.url, "--side", "32", *map(str, options)])


@pytest.mark.parametrize("chunked", [True, False])
def test_a_server_is_measured(tmp_path, chunked):
    with running(lambda number: WHOLE if number != 8 else (503, []), chunked=chunked) as server:
        out, picture = tmp_path / "serve.json", tmp_path / "serve.png"
        result = bench(
            server, "--rates", "1000,2000", "--requests", 9, "--warmup", 2, "--out", out, "--chart", picture,
            "--api-key", "secret", "--concurrency", 2, "--max-tokens", 7, "--ignore-eos",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    bodies = [body for body, _ in server.requests]
    assert len(bodies) == 2 + 2 * 9
    assert server.most_at_once <= 2
    assert all(headers["Authorization"] == "Bearer secret" for _, headers in server.requests)
    fields = {"model": "fake", "max_tokens": 7, "temperature": 0, "stream": True, "ignore_eos": True}
    for body in bodies:
        assert body == fields | {"messages": body["messages"], "stream_options": {"include_usage": True}}
    report = json.loads(out.read_text())
    assert [(row["rate"], row["requests"], row["whole"], row["refused"]) for row in report["rows"]] == [
        (1000, 9, 8, 1), (2000, 9, 9, 0)
    ]  # fmt: skip
    for row in report["rows"]:
        assert 0 < row["TTFT p50 ms"] <= row["TTFT p90 ms"] <= row["TTFT p99 ms"] <= row["end-to-end p99 ms"]
        assert row["tokens/s"] == pytest.approx(3 * row["requests/s"])
        assert 0 < row["goodput/s"] <= row["requests/s"]
        assert 0 < row["cached %"] < 100
    assert [(kind["kind"], kind["requests"]) for kind in report["kinds"]] == [(kind, 3) for kind in KINDS] * 2
    assert (report["load"]["seed"], report["goal"]) == (0, {"ttft": 1.0, "per_token": 0.1})
    with Image.open(picture) as drawn:
        assert len({*drawn.convert("RGB").resize((64, 64)).get_flattened_data()}) > 10
    assert "TTFT ms p50/p90/p99" in result.output


def streamed(text):
    return 200, [piece(content=text), END, USAGE, None]


def test_policies_take_turns(tmp_path):
    """At each rate all get the same requests, under a salt of their own, and are compared with the first."""
    with running(lambda number: streamed("b" if number == 4 + 2 * 6 - 1 else "a")) as server:
        out, picture = tmp_path / "serve.json", tmp_path / "serve.png"
        result = bench(
            server, "--policies", "mpic-32", "--rates", "1000,2000", "--requests", 6, "--warmup", 0, "--pictures", 2,
            "--warm-cache", "--out", out, "--chart", picture,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    bodies = [body for body, _ in server.requests]
    asked = [(body["reuse"], body["cache_salt"]) for body in bodies]
    off, mpic = ("off", "off"), ("mpic-32", "mpic-32")
    assert asked == 2 * [off] + 2 * [mpic] + 6 * [off] + 6 * [mpic] + 6 * [off] + 6 * [mpic]
    messages = [json.dumps(body["messages"]) for body in bodies]
    assert messages[:2] == messages[2:4]  # what is known
    assert sorted(messages[4:10]) == sorted(messages[10:16]) != sorted(messages[16:22]) == sorted(messages[22:])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["rate"], row["reuse"]) for row in rows] == list(itertools.product((1000, 2000), ("off", "mpic-32")))
    assert [row["equal answers %"] for row in rows] == [100, pytest.approx(100 * 5 / 6), 100, 100]
    assert picture.stat().st_size > 0


def test_runs_are_repeated(tmp_path):
    """Each with requests of its own; told are medians and the spread."""
    with running(lambda number: streamed("a")) as server:
        out, picture = tmp_path / "serve.json", tmp_path / "serve.png"
        result = bench(
            server, "--policies", "full", "--rates", "1000,2000", "--requests", 3, "--repeats", 3, "--warmup", 0,
            "--out", out, "--chart", picture,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    salts = [body["cache_salt"] for body, _ in server.requests]
    assert salts == (3 * ["off"] + 3 * ["full"]) * 6  # ways take turns within a run, and rates too
    messages = [json.dumps(body["messages"]) for body, _ in server.requests]
    assert len(set(messages)) == len(messages) / 2
    found = json.loads(out.read_text())
    assert found["repeats"] == 3
    for row in found["rows"]:
        assert (row["requests"], row["whole"], row["refused"], len(row["runs"])) == (9, 9, 0, 3)
        values = sorted(run["TTFT p50 ms"] for run in row["runs"])
        assert (row["TTFT p50 ms"], serving.spread(row, "TTFT p50 ms")) == (values[1], (values[0], values[2]))
    assert [(row["rate"], row["reuse"]) for row in found["rows"]] == [
        (1000, "off"), (1000, "full"), (2000, "off"), (2000, "full")
    ]  # fmt: skip
    assert {(kind["kind"], kind["requests"]) for kind in found["kinds"]} == {(kind, 3) for kind in KINDS}
    assert "TTFT p50 ms of runs" in result.output
    assert picture.stat().st_size > 0


def test_names_of_policies():
    assert serving.policy_names(None) == ()
    assert serving.policy_names(" full, off,0.1") == ("off", "full", "0.1")
    names = serving.policy_names("all")
    assert names == (serving.COLD, *serving.POLICIES)
    for name in names:
        assert name == SCHEDULE or parse_policy(name)


def test_answers_are_compared_where_both_are_whole():
    whole, other = ReceivedAnswer("reorder", 0.0, text="a"), ReceivedAnswer("reorder", 0.0, text="b")
    cut = ReceivedAnswer("reorder", 0.0, text="a", error="cut")
    assert serving.equal_share([whole, whole, cut], [whole, other, whole]) == 50
    assert serving.equal_share([cut], [whole]) is None


def serve_few_sizes(*given):
    """Runs in the server's process, where a default engine compiles fewer sizes."""
    few = BucketSizes(rows=(64, 1024), patches=(256,), sequences=(8,))
    with mock.patch.object(memory_plan, "default_buckets", return_value=few):
        serving_load._serve(*given)


@pytest.mark.servers
@pytest.mark.parametrize("policies", ["full", pytest.param("full,schedule", marks=pytest.mark.thorough)])
def test_a_server_of_its_own(policies, checkpoints, tmp_path, monkeypatch):
    """What is known is cached, of each policy for itself. A schedule has programs of all sizes that layers may have."""
    monkeypatch.setattr(serving_load, "_serve", serve_few_sizes)
    out = tmp_path / "serve.json"
    small = f"--policies {policies} --warm-cache --rates 50 --requests 6 --pictures 2 --side 64"
    small += " --max-tokens 3 --ignore-eos"
    model = checkpoints("qwen3_vl")
    result = CliRunner().invoke(app, ["bench", "serve", *small.split(), "--model", str(model), "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["model"] == model.name
    off, *others = report["rows"]
    assert [row["reuse"] for row in report["rows"]] == ["off", *policies.split(",")]
    assert (off["cached %"], off["equal answers %"]) == (0, 100)
    assert min(row["cached %"] for row in others) > 0


def test_a_wrong_policy_is_told_before_a_model_is_opened():
    result = CliRunner().invoke(app, ["bench", "serve", "--policies", "fulll", "--model", "nothing"])
    assert (result.exit_code, "did you mean 'full'?" in result.output) == (1, True), result.output


WRONG = {
    "empty": ((200, [piece(content=""), END, USAGE, None]), "the answer has no text"),
    "cut": ((200, [piece(content="a"), USAGE, None]), "the answer has no finish_reason"),
    "no usage": ((200, [piece(content="a"), END, None]), "the answer has no usage"),
    "no end": ((200, [piece(content="a"), END, USAGE]), "the stream ended without [DONE]"),
    "error": ((200, [piece(content="a"), {"error": {"message": "lost"}}, None]), "the stream reports an error: {"),
    "no JSON": ((200, [b"data: {\n\n", None]), "Expecting"),
    "unknown": ((404, [b"no such model"]), "status 404: b'no such model'"),
    "refused": ((429, []), "the server refused all requests: status 429"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail(name):
    says, message = WRONG[name]
    with running(lambda _: says) as server:
        result = bench(server, "--rates", 1000, "--requests", 2, "--warmup", 0)
    assert result.exit_code == 1
    assert message in result.output


def test_who_is_not_there_is_named():
    result = CliRunner().invoke(app, ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--timeout", "5"])
    assert result.exit_code == 1
    for wrong, message in (
        (["--base-url", "here"], "base_url must be an address like http://127.0.0.1:8000, got 'here'"),
        (["--rates", "1,x"], "rates must be numbers above 0 like \"0.5,1,2\", got '1,x'"),
        (["--rates", "0"], 'rates must be numbers above 0 like "0.5,1,2"'),
        (["--kinds", "rest"], "kinds must be some of repeat, reorder, sliding-window, got ('rest',)"),
        (["--arrivals", "late"], "arrivals must be poisson or fixed, got 'late'"),
        (["--zipf", "-1"], "zipf must be a non-negative number, got -1.0"),
    ):
        result = CliRunner().invoke(app, ["bench", "serve", *wrong])
        assert (result.exit_code, message in result.output) == (1, True), result.output


def pictures(chat):
    parts = [part for message in chat.messages for part in message["content"] if isinstance(part, dict)]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def test_requests_repeat_reorder_and_slide_images():
    """Equal loads are equal; runs share no picture."""
    load = ServingLoad(requests=90, pictures=6, window=3, turns=5, side=40)
    chats = load.chats(0)
    assert chats == load.chats(0)
    shown = [set(map(str, (url for chat in load.chats(run) for url in pictures(chat)))) for run in (0, 1)]
    assert not shown[0] & shown[1]
    assert chats != ServingLoad(requests=90, pictures=6, window=3, turns=5, side=40, seed=1).chats(0)
    repeat, reorder, sliding = ([chat for chat in chats if chat.kind == kind] for kind in KINDS)
    drawn = [pictures(chat) for chat in repeat]
    assert {len(one) for one in drawn} == {1}
    counts = sorted(({url: drawn.count([url]) for [url] in drawn}).values(), reverse=True)
    assert counts[0] >= 2 * counts[-1]  # some are frequent
    orders = [pictures(chat) for chat in reorder]
    assert {len(set(one)) for one in orders} == {2, 3, 4}
    assert len({one.index(url) for one in orders for url in one if url == orders[0][0]}) > 1  # in other places
    windows = [pictures(chat) for chat in sliding]
    for i, (before, now) in enumerate(itertools.pairwise(windows)):
        if (i + 1) % 5 == 0:
            assert len(now) == 1  # another agent
            assert now[0] not in before
        else:
            assert now[:-1] == before[-2:]
    for chat in chats:
        assert chat.messages[-1]["role"] == "user"
    url = drawn[0][0]
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
        assert picture.size == (40, 40)


def test_known_pictures_are_shown_and_shared():
    load = ServingLoad(requests=30, kinds=("repeat", "reorder"), pictures=3, known=True, side=40)
    pool = {url for chat in load.shown() for url in pictures(chat)}
    assert len(pool) == len(load.shown()) == 3
    for run in (0, 1):
        assert {url for chat in load.chats(run) for url in pictures(chat)} == pool
    assert load.chats(0) != load.chats(1)
    load = ServingLoad(kinds=("sliding-window",), known=True, side=40)
    slides = [{url for chat in load.chats(run) for url in pictures(chat)} for run in (0, 1)]
    assert not slides[0] & (slides[1] | pool)
    assert ServingLoad().shown() == []


def test_when_requests_come():
    fixed = ServingLoad(requests=5, arrivals="fixed").times(4, 0)
    assert fixed == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    random = ServingLoad(requests=4000).times(4, 0)
    assert random[0] == 0
    assert np.diff(random).mean() == pytest.approx(0.25, rel=0.05)
    assert np.diff(random).std() == pytest.approx(0.25, rel=0.1)


def test_the_figures_of_a_run():
    """Waits count from when a request was due."""
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 25}}
    fast = ReceivedAnswer("reorder", 10.0, [10.1, 10.2, 10.4], 10.5, "abc", usage, 200)
    slow = ReceivedAnswer(
        "reorder", 10.0, [12.0, 12.1, 12.2], 12.5, "abc", {"prompt_tokens": 100, "completion_tokens": 3}, 200
    )
    full = ReceivedAnswer("reorder", 11.0, [], 11.1, "", {}, 503, "full")
    row = serving.summary([fast, slow, full], 2.0, 10.0, serving.Goal(1.0, 0.2))
    assert row == {
        "rate": 2.0, "requests": 3, "whole": 2, "refused": 1, "seconds": 2.5, "requests/s": 0.8, "tokens/s": 2.4,
        "goodput/s": 0.4, "cached %": 12.5,
        "TTFT p50 ms": pytest.approx(1050), "TTFT p90 ms": pytest.approx(1810), "TTFT p99 ms": pytest.approx(1981),
        "inter-token p50 ms": pytest.approx(100), "inter-token p90 ms": pytest.approx(170),
        "inter-token p99 ms": pytest.approx(197),
        "end-to-end p50 ms": pytest.approx(1500), "end-to-end p90 ms": pytest.approx(2300),
        "end-to-end p99 ms": pytest.approx(2480),
    }  # fmt: skip
    none = serving.summary([full], 2.0, 10.0, serving.Goal(1.0, 0.2))
    assert (none["TTFT p50 ms"], none["requests/s"], none["cached %"]) == (None, 0, 0)


def test_a_request_in_vain_is_told():
    async def ask():
        reader_closed = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = reader_closed.sockets[0].getsockname()[1]
        answer = await Client(f"http://127.0.0.1:{port}/v1/").ask("reorder", b"{}", 0.0)
        reader_closed.close()
        return answer

    answer = asyncio.run(ask())
    assert answer.error is not None
    assert (answer.status, answer.is_refused) == (0, False)
