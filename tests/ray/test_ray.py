"""Many engines by Ray, in earnest: two of the shipped model on the cores of this machine, one cluster for all tests."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import io
import json
import socket
import time

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from typer.testing import CliRunner

from vlcache_jax import LLM, CacheConfig, EngineConfig, SamplingParams
from vlcache_jax.affinity import Affinity, look
from vlcache_jax.assets import PICTURES
from vlcache_jax.benchmarks.scale import draw, play
from vlcache_jax.commands.cli import app as command
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
WITHIN = 120.0  # seconds that anything may take on busy cores


@pytest.fixture(scope="session")
def cluster():
    """A cluster of this machine alone."""
    from vlcache_jax.ray.engines import connect

    for _ in range(3):  # a node that does not begin within half a minute gives up
        with contextlib.suppress(ConnectionError):
            connect()
            break
    assert ray.is_initialized()
    yield
    ray.shutdown()


@functools.cache
def picture(number):
    """A file of the package, or noise."""
    own = sorted(PICTURES.glob("*.png"))
    if number < len(own):
        return own[number].read_bytes()
    noise = np.random.default_rng(number).integers(0, 256, (14, 14, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.repeat(16, axis=0).repeat(16, axis=1)).save(file, "PNG")
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
    import pyarrow as pa

    from vlcache_jax.ray import generate, shard_by_image

    rows = [{"number": i, "image": picture(shown), "prompt": question} for i, (shown, question) in enumerate(ROWS)]
    rows += [
        {"number": 20, "image": None, "prompt": "Hello"},
        {"number": 21, "image": b"no picture", "prompt": "What is it?"},
        {"number": 22, "image": picture(0), "prompt": None},
    ]
    dataset = ray.data.from_items(rows).repartition(4)
    sharded = shard_by_image(dataset, 2).take_all()
    places = collections.defaultdict(set)
    for row in sharded:
        places[row["image"]].add(row["shard"])
    assert all(len(shards) == 1 for shards in places.values())
    assert {shard for shards in places.values() for shard in shards} == {0, 1}

    answered = generate(
        dataset, "tiny-vqa", GREEDY, num_engines=2, num_gpus=0, columns={"question": "prompt"}, window=4, **SIZES
    ).take_all()
    found = {row["number"]: row for row in answered}
    assert sorted(row["number"] for row in answered) == list(range(23))
    assert [found[i]["answer"] for i in range(20)] == alone
    assert all(found[i]["error"] is None and found[i]["prompt_tokens"] > 16 for i in range(20))
    assert found[20]["error"] is None
    assert found[21]["answer"] is None
    assert "image" in found[21]["error"]
    assert found[22]["error"] == "question must be a string, got None"
    assert pa.table({"a": [1]}).num_rows == 1


def test_each_picture_is_encoded_once_over_both_and_an_engine_may_end(cluster, alone):
    from vlcache_jax.ray import EngineOrder, Engines
    from vlcache_jax.ray.batch import Answers

    make = functools.partial(Answers, EngineConfig("tiny-vqa", **SIZES), GREEDY, None)
    engines = Engines(make, EngineOrder(engines=2, num_gpus=0, window=4))

    async def answer_all(kill):
        done = []

        async def one(number, row):
            conversation = asks(*row)
            answer = await engines.answer(look({"messages": conversation}), conversation)
            done.append(number)
            if kill and len(done) == 4:
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
        stats = await engines.call("stats")  # of one that has begun anew
        assert any(one.misses == 0 or one.hits_exact + one.hits_approximate < 8 for one in stats)

    try:
        asyncio.run(work())
    finally:
        engines.close()


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
    write, count = run.Sheet.write, 0

    def stops(self, *given):
        nonlocal count
        if (count := count + 1) > 3:
            raise KeyboardInterrupt
        write(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(run.Sheet, "write", stops)
        assert invoke("ray.jsonl", "--engines", "2", "--ray").exit_code != 0
    assert len((tmp_path / "ray.jsonl").read_text().splitlines()) == 3
    result = invoke("ray.jsonl", "--ray", "--engines", "2")
    assert result.exit_code == 0, result.output
    assert "3 of 8 rows are answered" in result.output

    def read(name):
        answers = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [{key: one.get(key) for key in ("line", "key", "id", "text", "error")} for one in answers]

    assert read("ray.jsonl") == read("alone.jsonl")
    assert "missing.png" in read("ray.jsonl")[3]["error"]


# --- a service --------------------------------------------------------------------------------------------------------


class Service:
    """Two parts, at a port of this machine."""

    def __init__(self, folder):
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            self.port = place.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        cache = CacheConfig(disk=folder / "records")
        options = {**SIZES, "max_num_seqs": 4, "enable_prefix_caching": False}
        self._config = EngineConfig("tiny-vqa", cache=cache, allowed_local_media_path=None, **options)
        self._server = ServerConfig(
            warmup=False, max_body_bytes="1MiB", max_file_bytes="64KiB", admin_key=ADMIN, shutdown_timeout=20
        )

    def run(self, engines):
        """Runs so many, and waits until it is so."""
        from ray import serve

        from vlcache_jax.ray.serve import app

        serve.run(app(self._config, self._server, engines=engines, num_gpus=0), name="vlcache")
        assert eventually(lambda: len(self.engines()) == engines), self.engines()

    def engines(self):
        """Tags of those that answer."""
        return set(self.admin("GET", "/cache")["engines"])

    def admin(self, method, path, **json):
        answer = httpx.request(
            method, self.url + path, json=json or None, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=WITHIN
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WITHIN)

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
        with contextlib.suppress(httpx.HTTPError, AssertionError, KeyError):
            if holds():
                return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def service(cluster, tmp_path_factory):
    from ray import serve

    found = Service(tmp_path_factory.mktemp("service"))
    serve.start(http_options={"host": "127.0.0.1", "port": found.port})
    found.run(1)
    yield found
    serve.shutdown()


def text(answer):
    return answer.choices[0].message.content


def test_one_engine_answers_as_the_server_does(service, alone):
    for row, expected in list(zip(ROWS, alone, strict=True))[:3]:
        assert text(service.ask(*row)) == expected
        pieces = service.ask(*row, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == expected
    assert [one.id for one in service.client().models.list()] == ["tiny-vqa"]
    assert httpx.get(f"{service.url}/ready", timeout=WITHIN).status_code == 200


def test_what_is_refused(service):
    def post(path, body, **headers):
        told = {"Content-Type": "application/json", **headers}
        answer = httpx.post(service.url + path, content=body, headers=told, timeout=WITHIN)
        return answer.status_code, answer.text

    assert post("/v1/chat/completions", b"{")[0] == 400
    status, told = post("/v1/chat/completions", json.dumps({"model": "another", "messages": shows(0, "?")}).encode())
    assert (status, json.loads(told)["error"]["code"]) == (404, "model_not_found")
    assert post("/v1/chat/completions", b"x" * (2**20 + 1))[0] == 413
    assert post("/v1/nothing", b"{}")[0] == 404
    assert post("/reset_mm_cache", b"{}")[0] == 403  # which needs the admin key
    assert httpx.get(f"{service.url}/cache", timeout=WITHIN).status_code == 403
    assert text(service.ask(0, "What is at A1?"))


def test_more_engines_come_and_each_picture_meets_one(service, alone):
    failed, count, ends = [], 0, False

    def go_on():
        nonlocal count
        while not ends:
            try:
                count += bool(text(service.ask(count % 5, "What is at A1?")))
            except openai.OpenAIError as error:
                failed.append(error)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        going = [threads.submit(go_on) for _ in range(2)]
        try:
            service.run(2)
        finally:
            ends = True
        for one in going:
            one.result()
    assert not failed
    assert count > 2
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
    tags = service.engines()
    page = httpx.get(f"{service.url}/metrics", timeout=WITHIN).text
    lines = [line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total{")]
    assert {tag for tag in tags if any(f'engine="{tag}"' in line for line in lines)} == tags
    assert httpx.get(f"{service.url}/load", timeout=WITHIN).json()["server_load"] >= 0


def test_the_simulator_finds_what_two_engines_find(service):
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
    from ray.util.state import list_actors

    before = service.engines()
    names = [one.name for one in list_actors(filters=[("state", "=", "ALIVE")]) if one.name]
    replicas = [name for name in names if name.startswith("SERVE_REPLICA::vlcache#engines#")]
    assert len(replicas) == 2
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
        ray.kill(ray.get_actor(replicas[0], namespace="serve"))
        for one in asked:
            outcomes[one.result()] += 1
    assert outcomes.keys() <= {"answered", "told"}, outcomes
    assert outcomes["answered"] >= 18, outcomes
    assert eventually(lambda: len(service.engines()) == 2)
    assert service.engines() != before
    assert text(service.ask(0, "What is at A1?"))


def test_engines_go_without_a_failed_request(service, alone):
    failed, answers = [], []

    def ask(i):
        try:
            answers.append((i % 20, text(service.ask(*ROWS[i % 20]))))
        except openai.OpenAIError as error:
            failed.append(error)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, i) for i in range(40)]
        service.run(1)
        for one in asked:
            one.result()
    assert not failed
    assert len(answers) == 40
    assert all(answer == alone[i] for i, answer in answers)
