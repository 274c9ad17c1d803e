"""Many engines by Ray, in earnest: two of the shipped model on the cores of this machine, one cluster for all tests."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import http.client
import io
import itertools
import json
import os
import pathlib
import re
import socket
import threading
import time

import numpy as np
import openai
import pytest
from PIL import Image
from typer.testing import CliRunner

from research.scale import draw, play
from tests.server.helper import Running
from vlcache_jax import LLM, CacheConfig, EngineConfig, SamplingParams
from vlcache_jax.assets import PICTURES
from vlcache_jax.commands.cli import app as command
from vlcache_jax.router.affinity import Affinity, look
from vlcache_jax.server.config import ServerConfig

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning",
                               "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's own
]  # fmt: skip

SIZES = {"kv_cache_bytes": "96MiB", "max_model_len": 2048, "max_rows": 512, "use_tqdm": False}
GREEDY = SamplingParams(max_tokens=12, temperature=0)
ADMIN = "of the admin"
IDLE = 8  # seconds until an engine goes that is not needed
WITHIN = 120.0  # seconds that anything may take on busy cores


@pytest.fixture(scope="session")
def cluster():
    """A cluster of this machine alone, which nobody else reaches."""
    import vlcache_jax.ray  # noqa: F401  (before ray: it sets what that reads)

    told = ""
    for _ in range(5):  # a node that does not begin within half a minute gives up
        try:
            ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False, _node_ip_address="127.0.0.1")
            break
        except Exception as error:  # Ray raises its base
            told = str(error)
            ray.shutdown()
    else:
        pytest.skip(f"Ray does not begin on this machine: {told}")
    yield
    ray.shutdown()


def test_a_cluster_that_nobody_runs_is_told_at_once(monkeypatch):
    from vlcache_jax.ray.engines import connect

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray tries for minutes"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ConnectionError, match=f"cannot connect to a Ray cluster at {address}: .*refused"):
            connect(address)


@functools.cache
def picture(number):
    """A file of the package, or noise."""
    own = sorted(PICTURES.glob("*.png"))
    if number < len(own):
        return own[number].read_bytes()
    with Image.open(own[0]) as one:
        size = one.size  # for which everything is compiled
    noise = np.random.default_rng(number).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(size).save(file, "PNG")
    return file.getvalue()


def asks(number, question):
    shown = {"type": "image", "image": picture(number)}
    return [{"role": "user", "content": [shown, {"type": "text", "text": question}]}]


ROWS = [(i % 5, f"What is at {column}{row}?") for i in range(5) for column in "AB" for row in "12"]


@pytest.fixture(scope="module")
def alone():
    """What one engine answers to `ROWS`."""
    with LLM("tiny-vqa", **SIZES) as llm:
        outputs = llm.chat([asks(*row) for row in ROWS], GREEDY, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_dataset_is_answered(cluster, alone):
    from vlcache_jax.ray import generate

    rows = [{"number": i, "image": picture(shown), "prompt": question} for i, (shown, question) in enumerate(ROWS)]
    rows += [
        {"number": 20, "image": None, "prompt": "Hello"},
        {"number": 21, "image": b"no picture", "prompt": "What is it?"},
        {"number": 22, "image": picture(0), "prompt": None},
    ]
    dataset = ray.data.from_items(rows).repartition(4)
    answered = generate(
        dataset, "tiny-vqa", GREEDY, num_engines=1, num_gpus=0, columns={"question": "prompt"}, window=4, **SIZES
    ).take_all()
    found = {row["number"]: row for row in answered}
    assert sorted(row["number"] for row in answered) == list(range(23))
    assert [found[i]["answer"] for i in range(20)] == alone
    assert all(found[i]["error"] is None and found[i]["prompt_tokens"] > 16 for i in range(20))
    assert found[20]["error"] is None
    assert found[21]["answer"] is None
    assert "image" in found[21]["error"]
    assert found[22]["error"] == "question must be a string, got None"


def test_rows_are_told_their_engines():
    """In the process of a dataset's actor; `shard_by_image` starts one."""
    import pyarrow as pa

    from vlcache_jax.ray.feeding import Sharder

    shown = [picture(i % 9) for i in range(90)]
    sharder = Sharder(4, "image", "shard")
    table = sharder(pa.table({"image": shown}))
    again = sharder(pa.table({"image": [[picture(1), b"small"], [picture(2)], None]}))
    places = collections.defaultdict(set)
    for content, shard in zip(shown, table.column("shard").to_pylist(), strict=True):
        places[content].add(shard)
    assert all(len(shards) == 1 for shards in places.values())
    assert len({shard for shards in places.values() for shard in shards}) > 1
    assert again.column("shard").to_pylist()[:2] == [min(places[picture(1)]), min(places[picture(2)])]
    often = Sharder(4, "image", "shard")(pa.table({"image": [picture(0)] * 400}))
    counts = collections.Counter(often.column("shard").to_pylist())
    assert max(counts.values()) <= 126  # 1.25 of the mean: a picture that all show spreads
    with pytest.raises(ValueError, match="column must be one of a, got 'image'"):
        sharder(pa.table({"a": [1]}))


def test_each_picture_is_encoded_once_over_both_and_an_engine_may_end(cluster, alone):
    from vlcache_jax.ray.batch import DatasetWorker
    from vlcache_jax.ray.engines import EngineResources, Engines, Packed
    from vlcache_jax.request_options import RequestOptions

    make = Packed(functools.partial(DatasetWorker, EngineConfig("tiny-vqa", **SIZES), GREEDY, RequestOptions()))
    engines = Engines(make, EngineResources(engines=2, num_gpus=0, window=16))

    async def answer_all(kill):
        done = []

        async def one(number, row):
            conversation = asks(*row)
            answer = await engines.answer(look({"messages": conversation}), conversation)
            done.append(number)
            if kill and len(done) == 2:
                engines.kill("engine-0")
            return answer

        found = await asyncio.gather(*(one(i, row) for i, row in enumerate(ROWS)))
        assert sorted(done) == list(range(len(ROWS)))
        return [answer["answer"] for answer in found]

    async def work():
        await engines.ready()
        assert await answer_all(kill=False) == alone
        stats = await engines.call("stats")
        assert sum(one.misses for one in stats) == 5  # pictures
        assert all(one.misses for one in stats)
        assert sum(engines.given.values()) == len(ROWS)
        assert await answer_all(kill=True) == alone
        stats = await engines.call("stats")
        assert sum(one.misses + one.hits_exact for one in stats) < 2 * len(ROWS)  # one has begun to count again

    try:
        asyncio.run(work())
    finally:
        engines.close()


def test_a_row_that_ends_engines_takes_no_other_along(cluster):
    from vlcache_jax.ray.engines import EngineDiedError, EngineResources, Engines, Packed

    def make():
        def answer(number):
            if number == 5:
                os._exit(1)
            return number

        return answer

    async def work():
        asked = (engines.answer(look({"messages": [str(i)]}), i) for i in range(12))
        *others, last = await asyncio.gather(*asked, engines.answer(look({}), 12), return_exceptions=True)
        assert last == 12
        died = others.pop(5)
        assert isinstance(died, EngineDiedError)
        assert "the engine ended 3 times" in str(died)
        assert others == [i for i in range(12) if i != 5]

    engines = Engines(Packed(make), EngineResources(engines=1, num_gpus=0, window=8))
    try:
        asyncio.run(work())
    finally:
        engines.close()


@pytest.mark.thorough
def test_a_file_is_answered_and_gone_on_with(cluster, tmp_path, monkeypatch):
    from vlcache_jax.commands import run

    lines = []
    for i, (shown, question) in enumerate(ROWS[:8]):
        path = tmp_path / f"{shown}.png"
        path.write_bytes(picture(shown))
        lines.append({"id": i, "image": path.name, "question": question, "max_tokens": 8})
    lines[3]["image"] = "missing.png"
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ["--kv-cache-bytes", "96MiB", "--max-model-len", "2048", "--max-rows", "512"]

    def invoke(out, *more):
        return CliRunner().invoke(command, ["run", str(source), str(tmp_path / out), *sizes, *more])

    assert invoke("alone.jsonl").exit_code == 0
    write, count = run.OutputFile.write, 0

    def stops(self, *given):
        nonlocal count
        if (count := count + 1) > 3:
            raise KeyboardInterrupt
        write(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(run.OutputFile, "write", stops)
        assert invoke("ray.jsonl", "--engines", "2", "--ray").exit_code != 0
    assert len((tmp_path / "ray.jsonl").read_text().splitlines()) == 3
    result = invoke("ray.jsonl", "--ray", "--engines", "2")
    assert result.exit_code == 0, result.output
    assert "3 of 8 requests are finished" in result.output

    def read(name):
        answers = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [{key: one.get(key) for key in ("line", "key", "id", "text", "error")} for one in answers]

    assert read("ray.jsonl") == read("alone.jsonl")
    assert "missing.png" in read("ray.jsonl")[3]["error"]


@pytest.mark.thorough
def test_the_guide_runs(cluster, tmp_path, monkeypatch):
    from ray import serve

    monkeypatch.chdir(tmp_path)
    page = (pathlib.Path(__file__).parents[2] / "docs" / "guides" / "scale.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/guides/scale.md", "exec"), {"__name__": "__main__"})
    try:
        answered = Running(None, 8000).json(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
        )
        assert answered[0] == 200
    finally:
        serve.shutdown()


# --- a service --------------------------------------------------------------------------------------------------------


class Service:
    """Two parts, at a port of this machine."""

    def __init__(self, folder):
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            self.port = place.getsockname()[1]
        self.http = Running(None, self.port)
        cache = CacheConfig(disk=folder / "records")
        options = {**SIZES, "max_num_seqs": 4, "enable_prefix_caching": False}
        self._config = EngineConfig("tiny-vqa", cache=cache, allowed_local_media_path=None, **options)
        self._server = ServerConfig(
            warmup=False, max_body_bytes="1MiB", max_file_bytes="64KiB", admin_key=ADMIN, shutdown_timeout=100
        )

    def run(self):
        """Runs one engine, and a second one while anything is asked."""
        from ray import serve

        from vlcache_jax.ray.serve import app

        scaling = {
            "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 0.3, "upscale_delay_s": 0.5,
            "downscale_delay_s": IDLE, "look_back_period_s": 2, "metrics_interval_s": 0.5,
        }  # fmt: skip
        serve.run(app(self._config, self._server, autoscaling=scaling, num_gpus=0), name="vlcache")

    def both(self):
        """Tags of two engines, for which it asks until there are so many."""

        def asked():
            assert text(self.ask(0, "What is at A1?"))
            return len(self.engines()) == 2

        assert eventually(asked)
        return self.engines()

    def engines(self):
        """Tags of those that answer."""
        return set(self.admin("GET", "/cache")["engines"])

    def admin(self, method, path):
        status, _, body = self.http.ask(method, path, Authorization=f"Bearer {ADMIN}")
        assert status == 200, body
        return json.loads(body) if body else None

    def client(self):
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=WITHIN)

    def ask(self, number, question, **more):
        return self.client().chat.completions.create(
            model="tiny-vqa", messages=shows(number, question), max_tokens=12, temperature=0, **more
        )


def shows(number, question):
    import base64

    url = f"data:image/png;base64,{base64.b64encode(picture(number)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def eventually(holds):
    until = time.monotonic() + WITHIN
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException, AssertionError, KeyError, ValueError):
            if holds():
                return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def service(cluster, tmp_path_factory):
    from ray import serve

    found = Service(tmp_path_factory.mktemp("service"))
    serve.start(http_options={"host": "127.0.0.1", "port": found.port})
    found.run()
    yield found
    serve.shutdown()


def replicas():
    """Names of the actors that are engines, which are not asked."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith("SERVE_REPLICA::vlcache#engines#")]


def text(answer):
    return answer.choices[0].message.content


def test_one_engine_answers_as_the_server_does(service, alone):
    for row, expected in list(zip(ROWS, alone, strict=True))[:3]:
        assert text(service.ask(*row)) == expected
        pieces = service.ask(*row, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == expected
    assert [one.id for one in service.client().models.list()] == ["tiny-vqa"]
    assert service.http.ask("GET", "/ready")[0] == 200


def test_what_is_refused(service):
    def post(path, body):
        status, _, told = service.http.ask("POST", path, body)
        return status, told

    assert post("/v1/chat/completions", b"{")[0] == 400
    status, told = post("/v1/chat/completions", json.dumps({"model": "another", "messages": shows(0, "?")}).encode())
    assert (status, json.loads(told)["error"]["code"]) == (404, "model_not_found")
    assert post("/v1/chat/completions", b"x" * (2**20 + 1))[0] == 413
    assert post("/v1/nothing", b"{}")[0] == 404
    assert post("/reset_mm_cache", b"{}")[0] == 401  # which needs the admin key
    assert service.http.ask("GET", "/cache")[0] == 401
    status, body = post("/v1/chat/completions", json.dumps({"messages": shows(0, "?"), "donors": "any"}).encode())
    assert (status, "donors must be neutral" in body.decode()) == (400, True)
    assert text(service.ask(0, "What is at A1?"))


def test_an_engine_comes_and_each_picture_meets_one(service, alone):
    failed, answers, ends = [], [], threading.Event()

    def go_on(first):
        for i in itertools.count(first):
            if ends.is_set():
                return
            try:
                answers.append((i % 20, text(service.ask(*ROWS[i % 20]))))
            except openai.OpenAIError as error:
                failed.append(error)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        going = [threads.submit(go_on, first) for first in (0, 10)]
        try:
            assert eventually(lambda: len(service.engines()) == 2 and len(answers) > 4)
        finally:
            ends.set()
        for one in going:
            one.result()
    assert not failed
    assert all(answer == alone[i] for i, answer in answers)
    # New pictures: computed by one, and found there.
    service.admin("POST", "/reset_mm_cache")
    before = service.admin("GET", "/cache")["engines"]
    answers = [service.ask(number, "What is at B1?") for number in (11, 12, 13, 14, 15, 16, 17, 18) for _ in range(3)]
    assert all(text(answers[i]) == text(answers[i + 1]) == text(answers[i + 2]) for i in range(0, 24, 3))
    after = service.admin("GET", "/cache")["engines"]
    misses = [after[tag]["misses"] - before[tag]["misses"] for tag in before]
    assert sum(misses) == 8
    assert all(misses)
    hits = [after[tag]["hits_exact"] - before[tag]["hits_exact"] for tag in before]
    assert sum(hits) == 16
    for i, row in enumerate(ROWS[:4]):
        assert text(service.ask(*row)) == alone[i]


def test_what_one_engine_remembers_is_found(service):
    service.both()
    client = service.client()
    for i in range(4):
        first = client.responses.create(model="tiny-vqa", input=f"Hello {i}", max_output_tokens=8, temperature=0)
        [tag] = {one for one in service.engines() if first.id.startswith(f"resp_{one}")}
        later = client.responses.create(
            model="tiny-vqa", input="And?", previous_response_id=first.id, max_output_tokens=8, temperature=0
        )
        assert later.id.startswith(f"resp_{tag}")
        assert client.responses.retrieve(first.id).output_text == first.output_text
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    uploaded = client.files.create(file=("a.png", picture(0)), purpose="vision")
    asked = [{"type": "input_image", "file_id": uploaded.id}, {"type": "input_text", "text": "What is at A1?"}]
    by_id = client.responses.create(
        model="tiny-vqa", input=[{"role": "user", "content": asked}], max_output_tokens=12, temperature=0
    )
    assert by_id.output_text == text(service.ask(0, "What is at A1?"))
    assert client.files.content(uploaded.id).read() == picture(0)
    client.files.delete(uploaded.id)


def test_what_all_engines_say(service):
    tags = service.both()
    page = service.http.ask("GET", "/metrics")[2].decode()
    lines = [line for line in page.splitlines() if line.startswith("vlcache:generation_tokens_total{")]
    assert {tag for tag in tags if any(f'engine="{tag}"' in line for line in lines)} == tags
    assert service.http.json("GET", "/load")[1]["server_load"] >= 0


def test_the_simulator_finds_what_two_engines_find(service):
    service.both()
    trace = draw(60, 100.0, pictures=24, zipf=1.1, tokens=49, seed=3)
    service.admin("POST", "/reset_mm_cache")
    before = service.admin("GET", "/cache")["engines"]

    def ask(request):
        [(name, _)] = request.images
        return text(service.ask(100 + int(name.removeprefix("picture-")), "What is at A1?"))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(ask, trace))
    after = service.admin("GET", "/cache")["engines"]
    misses = sum(after[tag]["misses"] - before[tag]["misses"] for tag in before)
    simulated = play(trace, Affinity(), 2)
    found = 1 - misses / 60
    assert found == pytest.approx((simulated.here + simulated.elsewhere) / 60, abs=0.02)


def test_an_engine_ends_under_load(service):
    before, [first, _] = service.both(), replicas()
    begun, outcomes = [], collections.Counter()

    def ask(i):
        try:
            pieces = service.ask(i % 6, f"What is at A{i % 4}?", stream=True)
            for one in pieces:
                begun.append(i)
                if one.choices and one.choices[0].finish_reason:
                    return "answered"
            return "cut off"
        except openai.APIStatusError as error:
            return f"status {error.status_code}"
        except openai.APIError as error:  # an event of the stream
            return "told" if "has ended" in str(error) else repr(error)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, i) for i in range(24)]
        assert eventually(lambda: len(begun) > 4)
        ray.kill(ray.get_actor(first, namespace="serve"))
        for one in asked:
            outcomes[one.result()] += 1
    assert outcomes.keys() <= {"answered", "told"}, outcomes
    assert outcomes["answered"] >= 18, outcomes
    assert service.both() != before
    assert text(service.ask(0, "What is at A1?"))


def test_an_engine_goes_without_a_failed_request(service, alone):
    """Nobody asks for a while, but one who waits for longer than engines must have been idle."""
    service.both()
    for i in range(10):
        assert text(service.ask(*ROWS[i])) == alone[i]
        again = time.monotonic() + 3 * IDLE
        while len(replicas()) == 2 and time.monotonic() < again:
            time.sleep(0.5)
        if len(replicas()) == 1:
            break
    assert len(service.engines()) == 1
    assert text(service.ask(*ROWS[0])) == alone[0]
