"""`vlcache serve`: its options, and the life of its process."""

import contextlib
import dataclasses
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import typer
from typer.testing import CliRunner

from tests.helper import WITHIN, eventually
from tests.server.helper import serving
from vlcache_jax import CacheConfig, EngineConfig
from vlcache_jax.commands.cli import app
from vlcache_jax.commands.serve import command, configs
from vlcache_jax.server.config import ServerConfig

HELLO = [{"role": "user", "content": "Hello"}]
JSON = {"Content-Type": "application/json"}
FEW_SIZES = "--buckets", '{"rows":[64],"patches":[256],"sequences":[8]}'
OWNERS = (EngineConfig, CacheConfig, ServerConfig)


def parsed(*words):
    """The configurations that the command makes of its words."""
    context = command().make_context("serve", list(words))
    given = dict(context.params)
    return configs(given.pop("model") or "tiny-vqa", {name: one for name, one in given.items() if name != "same_model"})


def test_every_option_of_the_engine_is_one_of_the_command():
    names = {own.name for owner in OWNERS for own in dataclasses.fields(owner) if own.init}
    assert names - {"cache", "model", "discovered_peers"} == {one.name for one in command().params} - {
        "model",
        "same_model",
        "help",
    }
    assert sum(len([own for own in dataclasses.fields(owner) if own.init]) for owner in OWNERS) == len(names)
    engine, server = parsed()
    assert engine == EngineConfig("tiny-vqa", allowed_local_media_path=None, cache=CacheConfig(donors="neutral"))
    assert server == ServerConfig()
    assert all(one.help for one in command().params if one.param_type_name == "option" and one.name != "same_model")


def test_system_messages_of_the_operator_may_be_in_files(tmp_path):
    (tmp_path / "system.txt").write_text("You sell shoes.\nBe kind.\n", encoding="utf-8")
    engine, _ = parsed("--neutral-systems", f"@{tmp_path}/system.txt", "--neutral-systems", "Be brief.")
    assert engine.cache.neutral_systems == ("You sell shoes.\nBe kind.", "Be brief.")
    missing = f"@{tmp_path}/none.txt"
    with pytest.raises(ValueError, match=re.escape(f"readable text file after @, got {missing}: ")):
        parsed("--neutral-systems", missing)


def test_options_reach_the_configurations(tmp_path):
    words = (
        "some/model --reuse 0.1 --max-model-len 512 --no-enable-prefix-caching --max-num-seqs 4 --seed 3 --port 0 "
        "--kv-cache-bytes 1GiB --gpu-memory-utilization 0.5 --host-bytes 1GB --ttl 5 --peers http://a:1 "
        "--peers http://b:2 "
        "--api-key k --api-key l --max-body-bytes 1MiB --no-warmup --allow-reuse full --shutdown-timeout 1.5 "
        "--allow-remote-images --allowed-media-domains example.com"
    )
    sizes = {"rows": [64, 512], "window": 4}
    more = [
        "--mm-processor-kwargs", '{"max_pixels": 65536}', "--limit-mm-per-prompt", '{"image": 2}',
        "--buckets", json.dumps(sizes), "--disk", str(tmp_path),
    ]  # fmt: skip
    engine, server = parsed(*words.split(), *more)
    assert (engine.model, engine.reuse, engine.max_model_len, engine.enable_prefix_caching) == (
        "some/model", "0.1", 512, False,
    )  # fmt: skip
    assert (engine.max_num_seqs, engine.seed, engine.kv_cache_bytes, engine.gpu_memory_utilization) == (
        4,
        3,
        2**30,
        0.5,
    )
    assert (engine.settings.limits, engine.limits) == ({"max_pixels": 65536}, {"image": 2})
    assert (engine.buckets.rows, engine.buckets.window) == ((64, 512), 4)
    assert (engine.cache.host_bytes, engine.cache.ttl, engine.cache.disk) == (10**9, 5, str(tmp_path))
    assert engine.cache.peers == ("http://a:1", "http://b:2")
    assert engine.allowed_media_domains == ["example.com"]
    assert (server.port, server.api_key, server.max_body_bytes, server.warmup) == (0, ("k", "l"), 2**20, False)
    assert (server.allow_reuse, server.shutdown_timeout) == (("full",), 1.5)


def test_keys_may_stand_in_the_environment(monkeypatch):
    monkeypatch.setenv("VLCACHE_API_KEY", "k l")
    monkeypatch.setenv("VLCACHE_ADMIN_KEY", "boss")
    monkeypatch.setenv("VLCACHE_REMOTE", "redis://:boss@127.0.0.1:1/0")
    engine, server = parsed()
    assert (server.api_key, server.admin_key) == (("k", "l"), "boss")
    assert engine.cache.remote == "redis://:boss@127.0.0.1:1/0"
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert "boss" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-waiting 0", "max_waiting must be a positive integer"),
        ("--max-body-bytes much", "max_body_bytes must be a non-negative number of bytes"),
        ("--buckets x", "buckets must be JSON"),
        ('--buckets {"x":1}', "buckets must have only the keys rows"),
        ("--mm-processor-kwargs [1]", "mm_processor_kwargs must be a dict"),
        ("--dtype int8", "dtype must be"),
        ("--reuse most", "reuse must be"),
        ("--codec int2", "codec must be one of"),
        ("--allow-remote-images", "allowed_media_domains must name hosts"),
        ("--ssl-certfile a", "ssl_certfile and ssl_keyfile must be set together, got one of them"),
        ("--ssl-certfile a --ssl-keyfile b", "ssl_certfile must be the path of an existing file"),
        ("--api-key a --admin-key a", "admin_key must differ from every api_key: choose another key"),
        ("--root-path v", "root_path must begin with a slash"),
        ("--chat-template nowhere.jinja", "chat_template must be one of qwen3.5, "),
        ("--chat-template {%if%}", "chat_template must be a valid Jinja template: Expected an expression"),
        ("--max-waiting-bytes 1MiB", "max_waiting_bytes must be at least max_body_bytes 67108864, got 1048576"),
        ("--body-timeout=-1", "body_timeout must be a non-negative number of seconds, got -1"),
        (
            "--allowed-hosts gpu.lan:8000",
            "allowed_hosts must be host names without scheme and port, got 'gpu.lan:8000'",
        ),
        ("--shutdown-timeout=-1", "shutdown_timeout must be"),
        ("--uds pyproject.toml", "uds must be a new path or the path of a socket, got a file"),
        ("--host 203.0.113.1", "cannot listen at 203.0.113.1:8000"),
    ],
)
def test_what_is_wrong_is_told_at_once(words, message):
    result = CliRunner().invoke(app, ["serve", *words.split()])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"importing JAX\nerror: {message}"), result.stderr


def test_a_port_in_use_comes_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert result.exit_code == 1
    assert result.stderr == (
        f"importing JAX\nerror: cannot listen at 127.0.0.1:{port}: Address already in use; choose another port with "
        "--port, where 0 selects a free one\n"
    )


# --- the process ------------------------------------------------------------------------------------------------------


def answer(url, told):
    """Asks for a long answer; what comes is told."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        given = {"model": "tiny-vqa", "messages": HELLO, "max_tokens": 1500, "stream": True}
        allowed = {"extra_body": {"ignore_eos": True, "allowed_token_ids": list(range(300, 330))}}
        try:
            for chunk in client.chat.completions.create(**given, **allowed):
                told.append(chunk.choices[0].finish_reason)
        except openai.APIError as error:
            told.append(error)


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=WITHIN) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.servers
def test_the_address_is_logged_before_programs_are_compiled():
    """Requests get answers meanwhile, so users need not wait for the line that starts with "ready"."""
    sizes = '{"rows":[64],"patches":[256],"sequences":[1],"window":1}'
    with serving("--warmup", "--buckets", sizes, "--max-model-len", "64") as (_, url, lines):
        [first] = [line for line in lines if line.startswith("listening at ")]
        assert first == f"listening at {url}: the server answers requests while it compiles its programs\n"
        assert lines.index(first) < next(i for i, line in enumerate(lines) if line.startswith("ready"))


@pytest.mark.servers
@pytest.mark.parametrize("seconds", ["600", "0"])
def test_a_signal_ends_the_server(tmp_path, seconds):
    """Who is inside gets the whole answer, or after some time an error; what was computed is on the disk."""
    with serving(*FEW_SIZES, "--shutdown-timeout", seconds, "--disk", str(tmp_path)) as (process, url, lines):
        root, told = url.removesuffix("/v1"), []
        assert status(f"{root}/ready") == 200
        thread = threading.Thread(target=answer, args=(url, told))
        thread.start()
        assert eventually(lambda: len(told) > 2)
        process.send_signal(signal.SIGTERM)
        if seconds == "600":
            assert eventually(lambda: status(f"{root}/ready") == 503)
            assert status(f"{root}/health") == 200
        thread.join(WITHIN)
        assert process.wait(WITHIN) == 0
        if seconds == "600":
            assert told[-1] == "length"
        else:
            assert told[-1].body["message"] == "the server is shutting down"
        assert any("shutting down: 1 requests in flight" in line for line in lines)


def ask_on(url, number, ends):
    """Asks until nobody listens; how each answer ended is told. One that is half there is an error."""
    rng = random.Random(number)
    port = urllib.parse.urlsplit(url).port
    while True:
        streams, n = rng.random() < 0.5, rng.choice((1, 2))
        allowed = {"ignore_eos": True, "allowed_token_ids": list(range(300, 330))}
        body = {"messages": HELLO, "max_tokens": rng.randrange(1, 100), "stream": streams, "n": n, **allowed}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
                response = connection.getresponse()
            except ConnectionError:  # without a byte of an answer
                return
            told = response.read()
        if response.status == 200 and streams:
            *events, done, rest = told.decode().split("\n\n")
            assert (done, rest) == ("data: [DONE]", ""), told
            pieces = [json.loads(event.removeprefix("data: ")) for event in events if event != ": keep-alive"]
            if "error" in pieces[-1]:
                ends.append("cut")
                continue
            reasons = [choice["finish_reason"] for piece in pieces for choice in piece["choices"]]
            assert reasons.count("length") == n, told
        elif response.status == 200:
            assert len(json.loads(told)["choices"]) == n
        else:
            assert (response.status, json.loads(told)["error"]["message"]) == (503, "the server is shutting down")
        ends.append(response.status)


@pytest.mark.servers
@pytest.mark.parametrize("seconds", [pytest.param("600", marks=pytest.mark.thorough), "0.2"])
def test_a_signal_under_load_leaves_no_half_answer(seconds):
    with ThreadPoolExecutor(32) as clients, serving(*FEW_SIZES, "--shutdown-timeout", seconds) as (process, url, _):
        answer(url, [])
        ends = []
        asking = [clients.submit(ask_on, url, number, ends) for number in range(32)]
        assert eventually(lambda: ends.count(200) > 32)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN) == 0
        for one in asking:
            one.result()
    assert 503 in ends
    assert ("cut" in ends) == (seconds == "0.2")


@pytest.mark.servers
def test_a_second_signal_ends_it_at_once():
    with serving(*FEW_SIZES, "--shutdown-timeout", "600") as (process, url, _):
        told = []
        thread = threading.Thread(target=answer, args=(url, told))
        thread.start()
        assert eventually(lambda: len(told) > 2)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # the same once more, as a terminal and a shell both send it
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN) == 128 + signal.SIGTERM
        thread.join(WITHIN)


@pytest.mark.servers
def test_an_engine_that_has_failed_ends_the_process(tmp_path):
    """With a code, and no answer without an end."""
    dies = f"""
import os
from vlcache_jax import AsyncLLM
async def check_health(self):
    if os.path.exists({str(tmp_path / "dead")!r}):
        raise RuntimeError("the engine's thread has died")
AsyncLLM.check_health = check_health
"""
    with serving(*FEW_SIZES, first=dies) as (process, url, lines):
        told = []
        thread = threading.Thread(target=answer, args=(url, told))
        thread.start()
        assert eventually(lambda: len(told) > 2)
        (tmp_path / "dead").touch()
        assert process.wait(WITHIN) == 1
        thread.join(WITHIN)
        assert told[-1].body["message"] == "the server is shutting down"
        assert "error: the engine's thread has died\n" in lines


@pytest.mark.servers
def test_a_socket_of_the_file_system(tmp_path):
    place = str(tmp_path / "s")
    asked = [sys.executable, "-m", "vlcache_jax.commands.cli", "serve", "--uds", place, "--no-warmup"]
    process = subprocess.Popen(asked, stderr=subprocess.PIPE, text=True)
    try:
        assert any(f"ready: tiny-vqa at {place}" in line for line in iter(process.stderr.readline, ""))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(place)
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            found = b"".join(iter(lambda: client.recv(2**16), b""))
        assert b'"id": "tiny-vqa"' in found
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN) == 0
        assert not (tmp_path / "s").exists()
    finally:
        process.kill()
        process.communicate()


def test_the_command_is_read_when_somebody_asks():
    """Its options take JAX to read, which others need not wait for."""
    code = "import sys; import vlcache_jax.commands.cli; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "serve" in typer.main.get_command(app).commands
