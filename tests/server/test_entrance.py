"""Who comes in, who does not, and what is left of those who go."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import importlib.util
import json
import pathlib
import re
import select
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.helper import WITHIN, eventually
from tests.server.helper import data_url, shows
from vlcache_jax.device.sampler import NOT_FINITE
from vlcache_jax.engine.request import Generation
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.server import admission, http_layer, inference, lifecycle
from vlcache_jax.server import admission as admission_module
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import HEAD_BYTES, HttpProtocol
from vlcache_jax.server.lifecycle import listening

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
PEM = pathlib.Path(__file__).parents[1] / "inputs" / "pictures.example.pem"
LONG = {"messages": HELLO, "max_tokens": 800, "ignore_eos": True}


@pytest.fixture
def slow(engine, monkeypatch):
    """Windows take long enough for something to happen meanwhile."""
    window = engine.service.device.runner.window
    monkeypatch.setattr(engine.service.device.runner, "window", lambda *given: (time.sleep(0.02), window(*given))[1])


@pytest.fixture
def decoder(monkeypatch):
    """An event that pictures wait for, and the pictures that do."""
    go_on, decoded = threading.Event(), []
    decode = ImageSource.decode

    def wait(self, *given):
        decoded.append(self)
        assert go_on.wait(WITHIN)
        return decode(self, *given)

    monkeypatch.setattr(ImageSource, "decode", wait)
    yield go_on, decoded
    go_on.set()


@contextlib.contextmanager
def posted(served, body, *, reads=True):
    """A connection that has asked, and goes away in the end without having read all."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(head.encode() + data)
        if reads:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        yield connection


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys(serve, client):
    served = serve(api_key=["first", "second"], admin_key="boss")
    asked = {"messages": HELLO, "max_tokens": 1}
    paths = [("GET", "/metrics"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/v1/models"), ("GET", "/load")]
    paths += [("GET", "/version"), ("GET", "/nowhere"), ("POST", CHAT), ("POST", "/tokenize")]
    for method, path in paths:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}, {"Authorization": ""}):
            status, told, found = served.ask(method, path, asked if method == "POST" else None, **headers)
            assert (status, told["www-authenticate"]) == (401, "Bearer"), path
            assert json.loads(found)["error"]["code"] == "invalid_api_key"
    for key in ("first", "second"):
        assert client(served, key).chat.completions.create(model=served.server.models[0], **asked).choices
    with pytest.raises(openai.AuthenticationError):
        client(served, "third").models.list()
    for path in ("/health", "/ready"):
        assert served.ask("GET", path)[0] == 200
    for key, status in (("first", 403), ("third", 401), ("boss", 200)):
        assert served.ask("GET", "/cache", Authorization=f"Bearer {key}")[0] == status
        assert served.ask("POST", "/reset_prefix_cache", Authorization=f"Bearer {key}")[0] == status


def test_without_an_admin_key_nobody_changes_the_cache(serve):
    served = serve()
    for method, path in (("GET", "/cache"), ("POST", "/cache/evict"), ("POST", "/reset_mm_cache")):
        assert served.ask(method, path, {})[0] == 403
    assert served.ask("GET", "/v1/models")[0] == 200


def test_browsers_ask_from_where_they_may(serve):
    asks = {"Origin": "https://mine.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in serve().ask("OPTIONS", CHAT, None, **asks)[1]
    served = serve(allowed_origins=["https://mine.example"], api_key=["k"])
    status, told, _ = served.ask("OPTIONS", CHAT, None, **asks)
    assert (status, told["access-control-allow-origin"]) == (200, "https://mine.example")
    assert served.ask("OPTIONS", CHAT, None, **asks | {"Origin": "https://other.example"})[0] == 400


def test_behind_a_proxy_it_may_stand_elsewhere(serve):
    served = serve(root_path="/vl", api_key=["k"])
    assert served.ask("GET", "/health")[0] == 200
    for root in ("/vl", ""):  # whether the proxy leaves it in the path or takes it away
        status, told = served.json("GET", f"{root}/openapi.json", Authorization="Bearer k")
        assert (status, told["servers"]) == (200, [{"url": "/vl"}])
        assert served.ask("GET", f"{root}/ready")[0] == 200
        assert served.ask("GET", f"{root}/v1/models")[0] == served.ask("GET", f"{root}/cache")[0] - 2 == 401
    assert served.ask("GET", "/vl/vl/health", Authorization="Bearer k")[0] == 404
    status, told, _ = served.ask("GET", "/vl")  # the page's own addresses begin beside the slash
    assert (status, told["location"], served.ask("GET", "/vl/")[0]) == (307, "/vl/", 200)


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("evil.example", {}, 403), ("evil.example:8000", {}, 403), ("localhost.evil.example", {}, 403),
        ("127.0.0.1.evil.example", {}, 403), ("[::1", {}, 403), ("0x7f.1", {}, 403), ("", {}, 403),
        ("localhost", {}, 200), ("LocalHost.:80", {}, 200), ("127.0.0.1:9", {}, 200), ("[::1]:80", {}, 200),
        ("192.168.1.7", {}, 200), ("gpu.lan:80", {"allowed_hosts": ["GPU.lan"]}, 200),
        ("evil.example", {"allowed_hosts": ["gpu.lan"]}, 403), ("evil.example", {"allowed_hosts": ["*"]}, 200),
        ("evil.example", {"api_key": ["k"]}, 200), ("evil.example", {"admin_key": "boss"}, 403),
    ],
)  # fmt: skip
def test_a_page_elsewhere_cannot_take_the_name_of_this_machine(serve, host, options, status):
    """Where there are no keys: a browser that was led here tells its page's name as Host."""
    served = serve(**options)
    assert served.ask("GET", "/health", Host=host)[0] == status
    if status == 403:
        found = served.json("POST", CHAT, {"messages": HELLO}, Host=host)
        assert found[0] == 403
        assert found[1]["error"]["type"] == "permission_error"
        assert found[1]["error"]["message"].startswith("Host must be an IP address, localhost or one of allowed_hosts")


def test_what_a_page_may_send_unasked_changes_nothing(serve):
    """Bodies of a form's types, which browsers send to any server without asking it before."""
    served = serve(admin_key="boss")
    posts = [route.path for route in served.server.app.routes if "POST" in (route.methods or ("POST",))]
    assert len(posts) > 10
    for path in posts:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
            status = served.ask("POST", path, {"messages": HELLO}, Content_Type=kind, Origin="https://evil.example")[0]
            assert status in (401, 403, 404, 405, 415), (path, status)  # a form of another origin is forbidden


def answer_to(served, sent):
    """What comes back until the connection is closed."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def exchanged(served, head, body=b""):
    """The same, of a request with these headers."""
    return answer_to(served, f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode() + body)


def test_a_body_whose_end_can_be_read_in_two_ways(serve):
    """Else who stands before this server may see another request than it does."""
    served = serve(api_key=["k"])
    head = "Content-Type: application/json\r\nContent-Length: 4\r\nTransfer-Encoding: chunked"
    found = exchanged(served, head, b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 400")
    assert found.count(b"HTTP/1.1") == 1
    assert b"Transfer-Encoding and Content-Length are mutually exclusive" in found


@pytest.mark.parametrize("piece", [b"A: b\r\n", b"a"])
@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"GET /"])
def test_a_head_without_end_is_refused(serve, begin, piece):
    """Also where httptools is installed, as in the tests' environment."""
    assert importlib.util.find_spec("httptools") is not None
    sent, found = 0, b""
    with socket.create_connection(("127.0.0.1", serve().port), timeout=WITHIN) as connection:
        connection.sendall(begin)
        with contextlib.suppress(ConnectionError):
            while sent <= 4 * HEAD_BYTES:
                connection.sendall(piece * (4096 // len(piece)))
                sent += 4096
            while part := connection.recv(4096):
                found += part
    assert not found or b"a head of at most 65536 bytes" in found  # the answer may be lost with the connection
    found = answer_to(serve(), begin + piece * (HEAD_BYTES // len(piece)) + piece)  # which is read before the answer
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("begin", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"])
def test_what_is_no_request_is_refused_in_openais_shape(serve, begin):
    head, _, body = answer_to(serve(), begin).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head.lower()
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_packed(serve):
    served = serve()
    packed = gzip.compress(json.dumps({"messages": HELLO}).encode())
    for kind in ("gzip", "br", "identity, gzip"):
        status, found = served.json("POST", CHAT, packed, Content_Encoding=kind)
        assert (status, found["error"]["message"].split(" must")[0]) == (415, "Content-Encoding")
    assert served.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 1}, Content_Encoding="identity")[0] == 200


def test_answers_do_not_wait_to_fill_a_packet():
    """Which takes 40 ms where a client acknowledges late; asyncio looks at the protocol's name."""
    with lifecycle._bound(ServerConfig(port=0)) as place:
        assert place.proto == socket.IPPROTO_TCP


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_cache_by_json(serve, engine, textured_image):
    engine.service.reset_mm_cache()
    served, picture = serve(admin_key="boss"), data_url(textured_image(64, 64, 1))

    def do(verb, **body):
        return served.json("POST", f"/cache/{verb}", body, Authorization="Bearer boss")

    status, found = do("precompute", images=[picture])
    assert status == 200
    [key] = found["keys"]
    assert do("pin", image=key) == (200, {"records": 2})
    assert do("evict", image=picture) == (200, {"records": 0})
    assert served.json("GET", "/cache", Authorization="Bearer boss")[1]["pinned"] == 2
    assert do("unpin", image=picture) == (200, {"records": 2})
    assert do("delete", image=key) == (200, {"records": 2})
    for wrong in (
        {},
        {"image": 5},
        {"image": "/etc/passwd"},
        {"image": picture, "more": 1},
        {"image": key, "shared": 1},
    ):
        assert do("pin", **wrong)[0] == 400
    for verb, wrong, param in (
        ("precompute", {"images": []}, "images"), ("precompute", {"images": [picture, "/etc/passwd"]}, "images"),
        ("precompute", {"images": [{"a": 1}]}, "images"), ("precompute", {"images": [None]}, "images"),
        ("precompute", {"images": [picture], "system": "<|image_pad|>"}, "system"),
        ("precompute", {"images": [picture], "mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs"),
        ("pin", {"image": "/etc/passwd"}, "image"), ("pin", {"image": {"type": "text"}}, "image"),
        ("pin", {"image": {"type": "video", "video": "/etc/passwd"}}, "image"),
    ):  # fmt: skip
        status, found = do(verb, **wrong)
        assert (status, found["error"]["param"]) == (400, param), found
        assert found["error"]["message"].startswith(param)
        assert "messages" not in found["error"]["message"]
    for path in ("/reset_mm_cache", "/reset_prefix_cache"):
        assert served.ask("POST", path, Authorization="Bearer boss")[0] == 200


def test_metrics(serve):
    served = serve(served_model_name=["tiny"])
    body = {"messages": HELLO, "max_tokens": 6, "ignore_eos": True, "n": 2}
    prompt = served.json("POST", CHAT, body)[1]["usage"]["prompt_tokens"]
    served.ask("POST", CHAT, body | {"stream": True})
    status, headers, found = served.ask("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = dict(line.rsplit(" ", 1) for line in found.decode().splitlines() if not line.startswith("#"))
    name = '{model_name="tiny"}'
    for counted, value in (
        ("prompt_tokens_total", 2 * prompt), ("generation_tokens_total", 24), ("num_requests_running", 0),
        ("num_requests_waiting", 0), ("kv_cache_usage_perc", 0), ("time_to_first_token_seconds_count", 2),
        ("e2e_request_latency_seconds_count", 2), ("compressed_kv_cache_usage_perc", 0), ("compressed_total", 0),
        ("compressed_swapped_out_total", 0), ("compressed_swapped_bytes", 0),
    ):  # fmt: skip
        assert float(lines[f"vlcache:{counted}{name}"]) == value, counted
    assert float(lines['vlcache:request_success_total{finished_reason="length",model_name="tiny"}']) == 4
    assert "vlcache_hits_exact" in lines  # the cache's


# --- room and bodies --------------------------------------------------------------------------------------------------


def test_one_too_many_is_told_at_once(serve, client, decoder, textured_image):
    """Before its body is read: no picture of it is opened."""
    go_on, decoded = decoder
    served = serve(max_waiting=1)
    picture = data_url(textured_image(64, 64, 11))
    with posted(served, {"messages": shows(picture), "max_tokens": 1}, reads=False) as connection:
        assert eventually(lambda: decoded)
        for _ in range(5):
            other = data_url(textured_image(64, 64, 12))
            status, headers, found = served.ask("POST", CHAT, {"messages": shows(other)})
            assert (status, headers["retry-after"]) == (503, "1")
            assert "in flight" in json.loads(found)["error"]["message"]
        assert len(decoded) == 1
        assert served.json("GET", "/load") == (200, {"server_load": 1})
        assert served.ask("GET", "/health")[0] == served.ask("GET", "/ready")[0] == 200
        with pytest.raises(openai.InternalServerError):
            client(served).chat.completions.create(model=served.server.models[0], messages=HELLO)
        threading.Timer(0.3, go_on.set).start()  # until a client that tries again comes again
        again = client(served, max_retries=5).chat.completions
        assert again.create(model=served.server.models[0], messages=HELLO, max_tokens=1).choices
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


def test_whoever_is_refused_sees_the_answer(serve, client):
    """Also behind a large body that nobody reads."""
    served = serve(max_body_bytes="1MiB")
    for size in (2**20 + 1, 2**24):
        status, found = served.json("POST", CHAT, {"messages": [{"role": "user", "content": "a" * size}]})
        assert (status, found["error"]["message"]) == (
            413,
            "a body must have at most 1048576 bytes (--max-body-bytes, for files --max-file-bytes)",
        )
    with pytest.raises(openai.APIStatusError) as told:
        client(served).chat.completions.create(model="m", messages=[{"role": "user", "content": "a" * 2**22}])
    assert told.value.status_code == 413
    served.server.admission.is_draining = True
    assert served.json("POST", CHAT, {"messages": [{"role": "user", "content": "a" * 2**22}]})[0] == 503


REFUSED = [
    ({}, f"POST {CHAT}", "application/json", 413),
    ({}, f"POST {CHAT}", "text/plain", 415),
    ({"api_key": ["k"]}, f"POST {CHAT}", "application/json", 401),
    ({}, "POST /nowhere", "application/json", 404),
    ({}, "GET /health", "application/json", 200),  # whose body nobody reads either
]
ENDLESS = f"Content-Length: {2**40}"


@contextlib.contextmanager
def answered(served, asked, *heads):
    """A connection whose request has its answer before a byte of the body was sent."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall("\r\n".join([f"{asked} HTTP/1.1", "Host: localhost", *heads, "", ""]).encode())
        found = connection.recv(4096)
        assert b"\r\nconnection: close\r\n" in found.lower()
        yield connection, found


def poured(connection, piece, times, wait=0.0):
    for _ in range(times):
        connection.sendall(piece)
        time.sleep(wait)


@pytest.mark.parametrize(("options", "asked", "kind", "status"), REFUSED)
def test_a_refused_body_without_end_is_read_to_a_bound(serve, monkeypatch, options, asked, kind, status):
    sizes, received = [], HttpProtocol.data_received
    noted = lambda own, data: (sizes.append(len(data)), received(own, data))  # noqa: E731
    monkeypatch.setattr(HttpProtocol, "data_received", noted)
    monkeypatch.setattr(http_layer, "_UNREAD_BYTES", 2**22)
    served = serve(max_body_bytes="1MiB", **options)
    with answered(served, asked, f"Content-Type: {kind}", ENDLESS) as (connection, found):
        assert found.startswith(f"HTTP/1.1 {status} ".encode())
        with pytest.raises(ConnectionError):
            poured(connection, bytes(2**18), 2**12)  # that is a GiB
    assert 2**22 <= sum(sizes) < 2**22 + 2**20


def test_a_refused_body_that_comes_byte_by_byte_is_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr(http_layer, "_UNREAD_SECONDS", 0.2)
    with answered(serve(), "POST /nowhere", ENDLESS) as (connection, _), pytest.raises(ConnectionError):
        poured(connection, b" ", 1000, wait=0.01)


def test_a_refused_body_is_not_waited_for_at_the_end(serve, monkeypatch):
    monkeypatch.setattr(http_layer, "_UNREAD_SECONDS", 10 * WITHIN)
    served = serve()
    with answered(served, "POST /nowhere", ENDLESS) as (connection, _):
        served.server.admission.ended.set()
        connection.sendall(b" ")  # which wakes the server's thread
        while connection.recv(4096):  # what is left of the answer, and then the end
            pass


def test_who_asks_before_it_sends_is_not_told_to(serve):
    with answered(serve(), "POST /nowhere", ENDLESS, "Expect: 100-continue") as (_, found):
        assert found.startswith(b"HTTP/1.1 404 ")


def test_behind_a_body_that_was_refused_and_came_the_connection_stays(serve, monkeypatch):
    monkeypatch.setattr(http_layer, "_UNREAD_SOON", WITHIN)
    connection = http.client.HTTPConnection("127.0.0.1", serve().port, timeout=WITHIN)
    with contextlib.closing(connection):
        sockets = []
        for path, status in (("/nowhere", 404), (CHAT, 200)):
            body = json.dumps({"messages": HELLO, "max_tokens": 1})
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
            sockets.append(connection.sock)
    assert sockets[0] is sockets[1] is not None


def test_a_body_without_length_is_bounded(serve):
    served = serve(max_body_bytes="1MiB")
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=WITHIN)
    with contextlib.closing(connection):
        pieces = (b" " * 2**16 for _ in range(32))
        connection.request("POST", CHAT, pieces, {"Content-Type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_a_body_is_json_by_name(serve):
    """A form is what any page may post to a server of this machine."""
    served = serve()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert served.ask("POST", CHAT, {"messages": HELLO}, Content_Type=kind)[0] == 415
    headers = {"Content_Type": "application/json; charset=utf-8"}
    assert served.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 1}, **headers)[0] == 200


def test_a_body_that_does_not_come(serve, monkeypatch):
    monkeypatch.setattr(admission_module, "_SILENCE", 0.05)
    served = serve()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 408")


# --- who goes away ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_who_goes_away_ends_the_answer(serve, engine, slow, streams):
    served = serve()
    with posted(served, LONG | {"stream": streams}, reads=streams):
        assert eventually(lambda: engine.stats().running)
    assert eventually(lambda: not served.server.admission.inside)
    assert eventually(lambda: not engine.stats().running)
    assert engine.stats().in_use == 0


@pytest.mark.parametrize("streams", [True, False])
def test_who_goes_away_while_pictures_are_read(serve, engine, decoder, textured_image, streams):
    go_on, decoded = decoder
    served = serve()
    body = {"messages": shows(data_url(textured_image(64, 64, 21 + streams))), "stream": streams}
    with posted(served, body, reads=False):
        assert eventually(lambda: decoded)
    assert eventually(lambda: not served.server.admission.inside)
    go_on.set()


def test_who_waits_no_longer_is_gone(serve, client, decoder, textured_image):
    served, asked = serve(), shows(data_url(textured_image(64, 64, 23)))
    with pytest.raises(openai.APITimeoutError):
        client(served, timeout=0.3).chat.completions.create(model=served.server.models[0], messages=asked)
    assert eventually(lambda: not served.server.admission.inside)


def test_who_goes_away_while_it_waits_for_a_lane(serve, engine, slow):
    served = serve()
    with contextlib.ExitStack() as stack:
        for _ in range(12):  # of which eight run
            stack.enter_context(posted(served, LONG, reads=False))
        assert eventually(lambda: engine.stats().waiting)
        assert served.server.admission.inside == 12
    assert eventually(lambda: not served.server.admission.inside)
    assert eventually(lambda: not (engine.stats().running or engine.stats().waiting))


def test_a_body_that_comes_byte_by_byte(serve):
    """Each byte within the silence that is borne, for ever."""
    served = serve(body_timeout=0.3)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(head.encode())
        told = threading.Event()

        def trickle():
            with contextlib.suppress(OSError):
                while not told.wait(0.01):
                    connection.sendall(b" ")

        thread = threading.Thread(target=trickle)
        thread.start()
        found = b""
        while b"}}" not in found:
            found += connection.recv(4096)
        told.set()
        thread.join()
    assert found.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in found.lower()
    assert b"a body must arrive within 0.3 seconds" in found


@contextlib.contextmanager
def coming(served, sent=b"{", size=9999, **headers):
    """A connection on which a body has begun."""
    given = {"Content-Type": "application/json", "Content-Length": size} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    room, before = served.server.admission.room, served.server.admission.room.coming
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + sent)
        assert eventually(lambda: room.coming == before + 1)
        yield connection


def refusal(connection):
    """What comes up to the end of an error."""
    found = b""
    while b"}}" not in found:
        piece = connection.recv(4096)
        assert piece, found
        found += piece
    return found


def answered_to(connections):
    """Whether something has come on each that is to be read."""
    return [bool(select.select([one], [], [], 0)[0]) for one in connections]


SHORT = {"messages": HELLO, "max_tokens": 1}


def test_slow_bodies_shut_no_other_client_out(serve):
    """Without keys, too: the slowest gives way to one more, and is answered."""
    served = serve(max_waiting=4)
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(6):
            slow.append(stack.enter_context(coming(served)))
            assert served.ask("POST", CHAT, SHORT)[0] == 200
        assert eventually(lambda: answered_to(slow) == [True] * 3 + [False] * 3)
        for one in slow[:3]:
            found = refusal(one)
            assert found.startswith(b"HTTP/1.1 408")
            assert b"connection: close" in found.lower()
            assert b"retry-after: 1" in found.lower()
            assert b"the server receives at most 4 bodies at a time, and this upload was the slowest" in found
        assert eventually(lambda: served.json("GET", "/load") == (200, {"server_load": 3}))
        page = served.ask("GET", "/metrics")[2].decode()
        for name in ("num_requests_coming", "request_body_bytes"):
            assert re.search(rf"vlcache:{name}\{{.*\}} 3.0", page)


def test_bodies_are_bounded_together(serve):
    """By what has come of them."""
    served = serve(max_body_bytes="1MiB", max_waiting_bytes="2MiB")
    most = bytes(2**20 - 1)
    room = served.server.admission.room
    with coming(served, most, 2**20) as slowest:
        assert eventually(lambda: room.nbytes == len(most))
        with coming(served, most, 2**20) as other:
            assert eventually(lambda: room.nbytes == 2 * len(most))
            assert served.ask("POST", CHAT, SHORT)[0] == 200
            assert b"the server is at capacity: 2097150 bytes of request bodies, " in refusal(slowest)
            assert answered_to([other]) == [False]
    assert eventually(lambda: not room.nbytes)
    # Bytes that a head declares, and that do not come, take no room.
    with coming(served, size=2**20), coming(served, size=2**20), coming(served, size=2**20):
        assert served.ask("POST", CHAT, SHORT)[0] == 200


def test_a_body_for_which_there_is_no_room_is_not_read(serve, decoder, textured_image):
    """Beside those of requests in flight."""
    go_on, decoded = decoder
    served = serve(max_body_bytes="1MiB", max_waiting_bytes="1MiB")
    large = {"messages": shows(data_url(textured_image(64, 64, 27))), "user": "a" * 2**19}
    with posted(served, large | {"max_tokens": 1}, reads=False) as connection:
        assert eventually(lambda: decoded)
        status, headers, found = served.ask("POST", CHAT, large)
        assert (status, headers["retry-after"]) == (503, "1")
        assert f"{served.server.admission.room.nbytes} bytes of requests in flight".encode() in found
        assert served.ask("POST", CHAT, SHORT)[0] == 200
        go_on.set()
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


def test_memory_of_bodies_goes_back_to_the_system(serve, monkeypatch):
    """After so many bytes of them, whatever became of their requests."""
    calls = []
    monkeypatch.setattr(admission_module, "_FREED", 3 * 2**20)
    monkeypatch.setattr(admission_module, "_LATER", 0.0)
    monkeypatch.setattr(admission_module, "give_back", lambda: calls.append(len(calls)))
    served = serve()
    for count in (0, 0, 1, 1, 1, 2):
        large = {"messages": HELLO, "max_tokens": 1, "user": "a" * 2**20, "wrong" if count else "metadata": {}}
        assert served.ask("POST", CHAT, large)[0] == (400 if count else 200)
        assert eventually(lambda: not served.server.admission.inside and len(calls) == count)  # noqa: B023
    admission.give_back()


def test_an_upload_comes_slowly_too(serve, textured_image):
    served = serve(max_waiting=1)
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(f"{head}Content-Length: 9999\r\n\r\n--b\r\n".encode())
        assert eventually(lambda: served.server.admission.room.nbytes == 5)
        assert served.ask("POST", CHAT, SHORT)[0] == 200
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_who_goes_away_in_the_middle_of_a_body(serve):
    served = serve()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as connection:
        connection.sendall(head.encode())
        assert eventually(lambda: served.server.admission.inside)
    assert eventually(lambda: not served.server.admission.inside)


def test_who_does_not_read_is_gone(serve, engine, monkeypatch):
    """Its room is given to others."""
    monkeypatch.setattr(inference, "_STALL", 0.1)
    monkeypatch.setattr(inference, "write", lambda _: b"x" * 2**20)
    served = serve()
    with posted(served, LONG | {"stream": True}):
        assert eventually(lambda: not served.server.admission.inside)
    assert eventually(lambda: not engine.stats().running)


# --- long waits, errors, the end --------------------------------------------------------------------------------------


def test_who_waits_long_is_told_that_somebody_is_there(serve, decoder, monkeypatch, textured_image):
    """By comments, which clients pass over."""
    monkeypatch.setattr(inference, "SILENCE", 0.05)
    go_on, _ = decoder
    served = serve()
    body = {"messages": shows(data_url(textured_image(64, 64, 31))), "stream": True, "max_tokens": 2}
    threading.Timer(0.3, go_on.set).start()
    status, _, found = served.ask("POST", CHAT, body)
    lines = found.decode().split("\n\n")
    assert (status, lines[0], lines[-2]) == (200, ": keep-alive", "data: [DONE]")


def test_what_is_wrong_after_the_first_byte_is_an_event(serve, client, monkeypatch, textured_image):
    def wait(*_):
        time.sleep(0.3)
        raise ValueError("it is torn")

    monkeypatch.setattr(inference, "SILENCE", 0.05)
    monkeypatch.setattr(ImageSource, "decode", wait)
    served = serve()
    body = {"messages": shows(data_url(textured_image(64, 64, 32))), "stream": True}
    status, _, found = served.ask("POST", CHAT, body)
    *_, error, done, rest = found.decode().split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    assert "it is torn" in json.loads(error.removeprefix("data: "))["error"]["message"]
    with pytest.raises(openai.APIError, match="it is torn"):
        list(client(served).chat.completions.create(model=served.server.models[0], **body))


def test_who_hears_nothing_because_no_token_is_text_is_told_too(serve, monkeypatch, slow):
    monkeypatch.setattr(inference, "SILENCE", 0.05)
    end = serve().json("POST", "/tokenize", {"prompt": "<|im_end|>"})[1]["tokens"]
    body = {"messages": HELLO, "max_tokens": 100, "allowed_token_ids": end, "ignore_eos": True, "stream": True}
    found = serve().ask("POST", CHAT, body)[2].decode()
    assert found.count(": keep-alive") > 1


@pytest.mark.parametrize("streams", [True, False])
def test_at_the_end_who_is_inside_is_told(serve, client, engine, slow, streams):
    """An answer that is ended has no end of its own, but an error."""
    served = serve()
    told = []

    def ask():
        try:
            answer = client(served).chat.completions.create(
                model=served.server.models[0], messages=HELLO, max_tokens=800, stream=streams,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            told.append(list(answer))
        except openai.APIError as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert eventually(lambda: engine.stats().running)
    served.server.admission.ended.set()
    thread.join(WITHIN)
    [error] = told
    assert isinstance(error, openai.APIError)
    assert eventually(lambda: not engine.stats().running)
    assert error.body["message"] == "the server is shutting down"


@pytest.fixture
def broken(engine, monkeypatch):
    """(count) -> so many windows and output heads fail from now on."""
    runner, left = engine.service.device.runner, []

    def breaking(work):
        def fails(*given):
            if left:
                left.pop()
                raise RuntimeError("the device is gone")
            return work(*given)

        return fails

    monkeypatch.setattr(runner, "window", breaking(runner.window))
    monkeypatch.setattr(runner, "head", breaking(runner.head))
    yield lambda count: left.extend([True] * count)
    left.clear()


@pytest.mark.parametrize("streams", [False, True])
def test_an_error_of_the_engine_ends_what_runs_and_no_more(serve, slow, broken, engine, streams, monkeypatch):
    served, deltas, plain = serve(), engine.deltas, []

    def noted(prompt, *given, **options):
        plain.extend([prompt] * isinstance(prompt, str))
        return deltas(prompt, *given, **options)

    monkeypatch.setattr(engine, "deltas", noted)
    with ThreadPoolExecutor() as clients:
        asked = [clients.submit(served.ask, "POST", CHAT, LONG | {"stream": streams}) for _ in range(4)]
        assert eventually(lambda: engine.stats().running == 4)
        broken(1)
        found = [one.result()[2].decode() for one in asked]
    assert ["internal server error; see the server's log" in one for one in found] == [True] * 4
    assert "device" not in "".join(found)  # the log says it
    assert "Hello" in plain  # whether the engine still answers is found out once for all that come to it meanwhile
    assert len(plain) < 4
    assert served.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 2})[0] == 200
    assert served.ask("GET", "/health")[0] == 200


def test_an_engine_that_answers_nothing_has_failed(serve, broken):
    served = serve()
    body = {"messages": HELLO, "max_tokens": 2}
    broken(1000)
    assert served.ask("POST", CHAT, body)[0] == 500
    assert eventually(lambda: served.ask("GET", "/health")[0] == 503)
    assert served.ask("GET", "/ready")[0] == 503
    assert served.ask("POST", CHAT, body)[0] == 503


@pytest.mark.parametrize("of_all", [False, True])
def test_logits_that_are_not_finite_are_the_servers_fault(serve, monkeypatch, of_all):
    """They are counted; only where all are so, nothing can be answered any more."""
    served = serve()
    extend = Generation.extend

    def flawed(answer, tokens):
        return extend(answer, [NOT_FINITE] if of_all or answer.params.max_tokens == 3 else tokens)

    monkeypatch.setattr(Generation, "extend", flawed)
    status, _, found = served.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 3})
    assert (status, json.loads(found)["error"]["type"]) == (500, "server_error")
    assert re.search(r"vlcache:corrupted_requests_total\{.*\} 1.0", served.ask("GET", "/metrics")[2].decode())
    if of_all:
        assert eventually(lambda: served.ask("GET", "/health")[0] == 503)
    else:
        assert served.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 2})[0] == 200
        assert served.ask("GET", "/health")[0] == 200


def test_not_ready_before_it_is_warm_nor_at_the_end(serve):
    served = serve()
    admission = served.server.admission
    admission.is_warm = False
    assert served.ask("GET", "/ready")[0] == 503
    assert served.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 1})[0] == 200
    admission.is_warm = admission.is_draining = True
    assert (served.ask("GET", "/ready")[0], served.ask("GET", "/health")[0]) == (503, 200)
    status, headers, _ = served.ask("POST", CHAT, {"messages": HELLO})
    assert (status, headers["retry-after"]) == (503, "1")


def test_a_socket_is_taken_over_from_the_dead_alone(engine, tmp_path):
    path = tmp_path / "socket"
    path.write_text("not to be lost")
    with (
        pytest.raises(ValueError, match="uds must be a new path or the path of a socket, got a file"),
        listening(Server(engine, ServerConfig(uds=str(path)))),
    ):
        pytest.fail("listens")
    assert path.read_text() == "not to be lost"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening(Server(engine, ServerConfig(uds=str(path)))):
        with (
            pytest.raises(OSError, match="another server uses it"),
            listening(Server(engine, ServerConfig(uds=str(path)))),
        ):
            pytest.fail("listens")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
    assert not path.exists()


def test_https(serve):
    served, trusting = serve(ssl_certfile=str(PEM), ssl_keyfile=str(PEM)), ssl.create_default_context(cafile=PEM)
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=WITHIN) as plain,
        trusting.wrap_socket(plain, server_hostname="pictures.example") as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
