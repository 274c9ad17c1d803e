"""Peers, over real sockets: whatever one of them sends, nothing wrong is used, and no call waits beyond its timeout."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import select
import socket
import socketserver
import ssl
import struct
import threading
import types

import numpy as np
import pytest

from tests.cache.records import CASES, assert_whole, found, key, make, verified_read
from vlcache_jax.cache.keys import FORMAT_VERSION
from vlcache_jax.cache.record import DamagedError, EntryGoneError, Found, Record, RefusedError, TierError, blocks
from vlcache_jax.cache.tiers import peer
from vlcache_jax.cache.tiers.peer import PeerTier, check_peers
from vlcache_jax.cache.tiers.peer_server import PeerServer
from vlcache_jax.cache.tiers.record_file import LENGTH, MAX_HEADER, file_name, make_header
from vlcache_jax.cache.tiers.wire import MAX_RECORDS, WRITTEN

PEM = pathlib.Path(__file__).parents[2] / "inputs" / "pictures.example.pem"
SHORT = 0.2  # seconds; the patience of clients whose peer is slow
LONG = 30.0  # of those whose peer need not be
RESET = struct.pack("ii", 1, 0)  # who lingers for no time at all resets the connection when it closes
LARGE = make(context=key(7), tokens=32768, padded=32768)  # more than sockets hold


class Folder:
    """Files of records, as the disk tier keeps them."""

    def __init__(self, directory, *records):
        self.directory, self.kept = directory, []
        for record in records:
            self.add(record)

    def add(self, record, written=1.5):
        self.path(record).parent.mkdir(exist_ok=True)
        self.path(record).write_bytes(file_of(record))
        self.kept.append(Found(record.meta, written))

    def path(self, record):
        return self.directory / file_name(record.meta.name)

    def find(self, entry):
        return [one for one in self.kept if one.meta.entry == entry]


def file_of(record):
    rows = (rows for part in record.parts.values() for rows in blocks(record.meta, part))
    return make_header(record.meta) + b"".join(one.view(np.uint8).tobytes() for one in rows)


@contextlib.contextmanager
def serving(tier, port=0, **options):
    with PeerServer(tier, "127.0.0.1", port, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.close()
            thread.join()


@contextlib.contextmanager
def asking(server, **options):
    tier = PeerTier("http://{}:{}".format(*server.address), **options)
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture(autouse=True)
def _closes_soon(monkeypatch):
    monkeypatch.setattr("vlcache_jax.cache.tiers.peer_server._POLL", 0.005)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


@pytest.fixture
def tier(server):
    with asking(server) as tier:
        yield tier


# What is kept comes as it was written.


@pytest.mark.parametrize("case", CASES)
def test_records_come_as_they_were_written(case, folder, tier):
    folder.add(CASES[case])
    assert_whole(tier, CASES[case])


def test_all_records_of_an_image_are_found_the_newest_last(folder, tier):
    for context, written in ((7, 3.25), (8, 1.5), (None, 2.0)):
        folder.add(make(context=context and key(context)), written)
    folder.add(make(2), 9.0)
    one, two, three = tier.find(key(1))
    assert [one.written, two.written, three.written] == [1.5, 2.0, 3.25]
    assert [one.meta.name, two.meta.name] == [f"kv/{key(1)}/{key(8)}", f"enc/{key(1)}"]
    assert tier.find(key(3)) == []


def test_of_more_records_than_fit_the_newest_are_told(folder, tier):
    for context in range(MAX_RECORDS + 2):
        folder.kept.append(Found(make(context=key(context)).meta, context))
    assert [one.written for one in tier.find(key(1))] == [*range(2, MAX_RECORDS + 2)]


def test_parts_can_be_asked_for_in_any_order(folder, tier):
    record = make(context=key(7), layers=5)
    folder.add(record)
    meta = found(tier, record).with_room(record.meta.padded)
    places = np.zeros(meta.shape, meta.dtype)
    numbers = [3, 4, 0, 2, 1]
    asked = [("kv", number) for number in numbers]
    came = list(tier.read(meta, iter(asked), lambda part: (places[part[1]],)))
    assert [part for part, _ in came] == asked
    np.testing.assert_array_equal(places[:, :, :6], record.data[:, :, :6])


def test_nothing_is_kept_or_deleted_at_a_peer(folder, tier):
    record = CASES["kv"]
    folder.add(record)
    assert tier.write(make(2).meta, {}) == "refused"
    tier.delete(record.meta.name)
    assert list(tier.lines()) == []
    assert_whole(tier, record)


def test_one_connection_serves_many_calls(folder):
    folder.add(CASES["kv"])
    with serving(folder, max_clients=1) as server, asking(server) as tier:
        for _ in range(5):
            assert_whole(tier, CASES["kv"])


def test_a_read_given_up_half_way_leaves_the_tier_usable(folder, tier):
    folder.add(LARGE)
    meta = found(tier, LARGE)
    reading = tier.read(meta, meta.parts, Record(meta).parts.__getitem__)
    assert next(reading)[0] == ("kv", 0)
    reading.close()
    assert_whole(tier, LARGE)


def test_a_few_connections_are_kept(folder, tier, monkeypatch):
    """Connections beyond `_MAX_KEPT`, and all that are in use when the tier closes, are closed after their call."""
    dialed = []
    real = peer._dial

    def dial(*given):
        dialed.append(real(*given))
        return dialed[-1]

    def are_open():
        return sum(sock.fileno() >= 0 for sock in dialed)

    monkeypatch.setattr(peer, "_dial", dial)
    monkeypatch.setattr(peer, "_MAX_KEPT", 2)
    folder.add(CASES["kv"])
    meta = CASES["kv"].meta.with_room(CASES["kv"].meta.tokens)

    def begin():
        readings = [tier.read(meta, meta.parts, Record(meta).parts.__getitem__) for _ in range(4)]
        for reading in readings:
            next(reading)
        return readings

    def finish(readings):
        for reading in readings:
            assert len(list(reading)) == len(meta.parts) - 1

    finish(begin())
    assert (len(dialed), are_open()) == (4, 2)
    readings = begin()  # Two of these take the kept connections.
    assert (len(dialed), are_open()) == (6, 4)
    tier.close()
    finish(readings)
    assert are_open() == 0


def test_what_is_done_with_a_part_takes_nothing_from_the_time_of_the_next(folder, tier, monkeypatch):
    folder.add(LARGE)
    meta = found(tier, LARGE)
    data, later = np.zeros(meta.shape, meta.dtype), [0.0]
    monkeypatch.setattr("vlcache_jax.cache.tiers.wire.time", types.SimpleNamespace(monotonic=lambda: later[0]))
    for _ in tier.read(meta, meta.parts, lambda part: (data[part[1]],)):
        later[0] += 1e6
    np.testing.assert_array_equal(data, LARGE.data)


def test_eight_threads_at_once(folder, tier):
    cases = [*CASES.values(), LARGE]
    cases = [make(number, record.meta.context, tokens=64, padded=64) for number, record in enumerate(cases)]
    for record in cases:
        folder.add(record)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: assert_whole(tier, cases[number % len(cases)]), range(64)))


def test_a_peer_that_was_away_is_found_again(folder):
    folder.add(CASES["kv"])
    with serving(folder) as server, asking(server) as tier:
        assert_whole(tier, CASES["kv"])
        port = server.address[1]
        server.close()
        with pytest.raises(TierError, match=r"Connection|RemoteDisconnected"):
            tier.find(key(1))
        with serving(folder, port):
            assert_whole(tier, CASES["kv"])
        with serving(folder, port):  # its connection was closed between two calls
            assert_whole(tier, CASES["kv"])


def test_a_server_can_be_closed_before_it_serves_and_twice(folder):
    with PeerServer(folder, "127.0.0.1", 0) as server:
        server.close()
        server.serve_forever()


# Damage.


@pytest.mark.parametrize("case", CASES)
def test_no_flipped_bit_is_used(case, folder, tier):
    record = CASES[case]
    folder.add(record)
    path, whole, meta = folder.path(record), file_of(record), found(tier, record)
    first = len(make_header(record.meta))
    for position in range(first, len(whole), max((len(whole) - first) // 20, 1)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(DamagedError):
            verified_read(tier, meta)


def test_no_file_of_another_length_is_read(folder, tier):
    record = CASES["kv"]
    folder.add(record)
    whole, meta = file_of(record), found(tier, record)
    for content in (b"", whole[:100], whole[:-1], whole + b"\0"):
        folder.path(record).write_bytes(content)
        with pytest.raises(DamagedError):
            verified_read(tier, meta)
    folder.path(record).write_bytes(whole)
    assert_whole(tier, record)


def test_a_place_of_another_size_is_noticed(folder, tier):
    folder.add(CASES["kv"])
    meta = found(tier, CASES["kv"])
    with pytest.raises(DamagedError, match="got a buffer of"):
        list(tier.read(meta, meta.parts, lambda part: (np.zeros((2, 5, 2, 8), np.float32),)))


def test_a_record_deleted_after_it_was_found_is_gone(folder, tier):
    folder.add(CASES["kv"])
    meta = found(tier, CASES["kv"])
    folder.path(CASES["kv"]).unlink()
    with pytest.raises(EntryGoneError):
        verified_read(tier, meta)


def test_a_record_deleted_while_it_is_read_comes_whole(folder, tier):
    folder.add(LARGE)
    meta = found(tier, LARGE)
    data = np.zeros(meta.shape, meta.dtype)
    for part, _ in tier.read(meta, meta.parts, lambda part: (data[part[1]],)):
        if part == ("kv", 0):
            folder.path(LARGE).unlink()
    np.testing.assert_array_equal(data, LARGE.data)


# Who is served with what.


def test_a_server_for_other_machines_needs_a_token(folder):
    for host in ("0.0.0.0", "", "10.0.0.7", "example.com", "::"):
        with pytest.raises(ValueError, match=r"^token is required"):
            PeerServer(folder, host, 0)
    for token in ("", "two words", "ä", "a\r\nb"):
        with pytest.raises(ValueError, match=r"^token must be"):
            PeerServer(folder, "127.0.0.1", 0, token)
    PeerServer(folder, "0.0.0.0", 0, "secret").close()


@pytest.mark.parametrize("token", [None, "secre", "secrets", "Secret", "secret,secret"])
def test_a_wrong_token_is_refused(token, folder):
    folder.add(CASES["kv"])
    with serving(folder, token="secret") as server:
        with asking(server, token=token) as tier:
            for _ in range(2):
                with pytest.raises(RefusedError, match="token") as caught:
                    tier.find(key(1))
                assert "secret" not in str(caught.value)
        with asking(server, token="secret") as tier:
            assert_whole(tier, CASES["kv"])


def test_every_route_wants_the_token(folder):
    folder.add(CASES["kv"])
    routes = ("/v1/hello", f"/v1/records/{key(1)}", f"/v1/files/{file_name(CASES['kv'].meta.name)}", "/", "/v1/other")
    with serving(folder, token="secret") as server:
        for route in routes:
            for said in ("", "Authorization: secret\r\n", "Authorization: Basic secret\r\n", "Authorization: \xe4\r\n"):
                assert status(server, f"GET {route} HTTP/1.1\r\n{said}\r\n".encode("latin-1")) == 401


def test_other_models_and_codecs_are_refused(folder):
    folder.add(CASES["kv"])
    with serving(folder, models=("00ab", "77"), codecs=("bfloat16",)) as server:
        for model, codec, refused in (
            ("00aa", "bfloat16", "'model' of this engine and has ['00ab', '77']"),
            ("", "bfloat16", "'model'"),
            ("77", "bfloat16 int8", "'codec' of this engine and has ['bfloat16']"),
            ("00a", "float32", "'model'"),
        ):
            with asking(server, model=model, codec=codec) as tier, pytest.raises(RefusedError) as caught:
                tier.find(key(1))
            assert f"rejects the {refused}" in str(caught.value)
        with asking(server, model=lambda: "00abcd", codec=lambda: "bfloat16") as tier:
            assert_whole(tier, CASES["kv"])


def test_another_format_is_refused_by_both(folder, server, tier, monkeypatch):
    folder.add(CASES["kv"])
    monkeypatch.setattr("vlcache_jax.cache.tiers.peer.FORMAT_VERSION", FORMAT_VERSION + 1)
    with pytest.raises(RefusedError, match=f"'format' of this engine and has {FORMAT_VERSION}"):
        tier.find(key(1))
    monkeypatch.undo()
    assert_whole(tier, CASES["kv"])
    with scripted(hello(format=1)) as url, pytest.raises(RefusedError, match=f"format must be {FORMAT_VERSION}, got 1"):
        PeerTier(url).find(key(1))


@pytest.mark.parametrize(
    "peers",
    [
        "http://a:1", 5, [5], [None], [b"http://a"], [""], ["a:1"], ["ftp://a"], ["http://"], ["http://:1"],
        ["http://a:"], ["http://a:0"], ["http://a:65536"], ["http://a:x"], ["http://a/b"], ["http://a?b"],
        ["http://a#b"], ["http://u:p@a"], ["http://a b"], ["http://a\n"], ["http://a", "http://b\r\nX: y"],
        ["http://[::1"], ["http://[1]"], ["http://\ud800"], ["http://\u0661"],
    ],
)  # fmt: skip
def test_peers_must_be_urls(peers):
    with pytest.raises(ValueError, match=r"^peers must be .*got "):
        check_peers(peers, None)


def test_peer_token_must_be_one():
    for token in ("", "two words", "ä", "a\n", 5, b"secret"):
        with pytest.raises(ValueError, match=r"^peer_token must be .*got ") as caught:
            check_peers([], token)
        assert not token or token == 5 or str(token) not in str(caught.value)
    check_peers(["http://a", "https://a.b-c_d:1/", "http://[::1]:8600", "http://10.0.0.7:65535"], "s3cret!")
    check_peers([], None)


# What strangers send to a server.


def exchange(server, request):
    """All that a server answers until it hangs up."""
    with socket.create_connection(server.address, 10) as client:
        with contextlib.suppress(OSError):  # it may hang up on what it does not want to read
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while got := client.recv(1 << 16):
                answer += got
        return answer


def status(server, request):
    return int(exchange(server, request).split(None, 2)[1])


def test_no_path_leads_out_of_the_directory(folder, tmp_path, server, tier, capfd):
    record = CASES["kv"]
    folder.add(record)
    name = file_name(record.meta.name)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "index.sqlite").write_text("secret")
    paths = [
        "..", "../secret", "%2e%2e/secret", "..%2fsecret", "/etc/passwd", "%2Fetc%2Fpasswd", "index.sqlite", "",
        f"../{tmp_path.name}/{name}", f"./{name}", f"{name}/", f"{name}%00", f"{name}/../../secret", f"00/../{name}",
        f"{name}.part", name.upper(), name.replace("/", "\\"), f"00//{name[3:]}", f"../{name[3:]}", f"01/{name[3:]}",
        f"/{name}", "%s" * 50, f"{name}?x", "00",
    ]  # fmt: skip
    for path in paths:
        expected = 206 if path == f"{name}?x" else 404
        for prefix in ("/v1/files/", "http://127.0.0.1/v1/files/", "/v1/records/../files/"):
            asked = f"GET {prefix}{path} HTTP/1.1\r\nRange: bytes=0-5\r\n\r\n".encode()
            assert status(server, asked) == (expected if prefix == "/v1/files/" else 404), path
    for entry in ("..", "", key(1)[1:], key(1) + "0", key(1)[1:] + "\xb9", key(1)[1:] + "A", f"{key(1)}/x", "*", "%"):
        assert status(server, f"GET /v1/records/{entry} HTTP/1.1\r\n\r\n".encode("latin-1")) == 404
    assert_whole(tier, record)
    assert "".join(capfd.readouterr()) == ""


def test_no_link_is_followed(folder, tmp_path, server, tier):
    linked, inside, pipe = make(1), make(0xAB << 248), make(3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for record in (linked, inside):
        folder.add(record)
        folder.path(record).rename(elsewhere / folder.path(record).name)
    folder.path(linked).symlink_to(elsewhere / folder.path(linked).name)
    folder.path(inside).parent.rmdir()
    folder.path(inside).parent.symlink_to(elsewhere)
    folder.add(pipe)
    folder.path(pipe).unlink()
    os.mkfifo(folder.path(pipe))
    for record in (linked, inside, pipe):
        assert folder.path(record).exists()
        with pytest.raises(EntryGoneError):
            verified_read(tier, found(tier, record))
    folder.path(pipe).unlink()
    folder.path(pipe).mkdir()
    with pytest.raises(EntryGoneError):
        verified_read(tier, found(tier, pipe))


def test_absurd_ranges_are_refused(folder, server):
    record = CASES["kv"]
    folder.add(record)
    whole, path = file_of(record), f"/v1/files/{file_name(record.meta.name)}"
    size = len(whole)
    for said in (
        "", "bytes=", "bytes=-", "bytes=-5", "bytes=5-4", "bytes=a-b", "bytes=0-1,3-4", f"bytes={size}-", "lines=0-5",
        f"bytes={size}-{size + 5}", f"bytes={'9' * 5000}-", f"bytes=0-{'9' * 19}", "bytes=0x0-0x5", "bytes=\xb2-5",
        "bytes=+1-5", "bytes=1 - 5", "bytes=--5",
    ):  # fmt: skip
        assert status(server, f"GET {path} HTTP/1.1\r\nRange: {said}\r\n\r\n".encode("latin-1")) == 416, said
    assert status(server, f"GET {path} HTTP/1.1\r\n\r\n".encode()) == 416
    for said, expected in (("5-9", whole[5:10]), (f"{size - 3}-", whole[-3:]), ("9-" + "9" * 18, whole[9:])):
        answer = exchange(server, f"GET {path} HTTP/1.1\r\nRange: bytes={said}\r\n\r\n".encode())
        head, _, body = answer.partition(b"\r\n\r\n")
        first = size - len(expected) if said != "5-9" else 5
        assert f"Content-Range: bytes {first}-{first + len(expected) - 1}/{size}".encode() in head
        assert body == expected


@pytest.mark.parametrize("method", ["HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get"])
def test_records_can_only_be_read(method, folder, server, tier):
    folder.add(CASES["kv"])
    path = f"/v1/files/{file_name(CASES['kv'].meta.name)}"
    assert status(server, f"{method} {path} HTTP/1.1\r\nContent-Length: 4\r\n\r\nevil".encode()) == 405
    assert_whole(tier, CASES["kv"])


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"\x00\xff\xfe\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / / / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1.1\r\n\r\n",
        b"GET / HTTP/" + b"9" * 5000 + b".1\r\n\r\n",
        b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"x" * 70000,
        b"GET / HTTP/1.1\r\nX: " + b"x" * 70000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 5000 + b"\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n \r\n\x00: \xff\r\n\r\n",
        b"GET /v1/hello?" + b"a=b&" * 5000 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/hello?format=%ff%00&model=%&codec HTTP/1.1\r\n\r\n",
        b"GET /v1/hello HTTP/1.1\r\nContent-Length: 5\r\n\r\nGET /",
        b"GET /v1/hello HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /v1/hello HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\nGET /",
        b"GET /v1/hello HTTP/1.1\r\nContent-Length: 0\r\ncontent-length: 0\r\n\r\n",
        b"GET /v1/hello HTTP/1.1\r\nx\r\nContent-Length: 5\r\n\r\nGET /",
        b"GET /v1/hello HTTP/1.1\r\nContent-Length : 5\r\n\r\nGET /",
        b"GET /v1/hello HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nGET /\r\n0\r\n\r\n",
    ],
)
def test_garbage_is_answered_and_the_server_goes_on(request_, folder, server, tier, capfd):
    folder.add(CASES["kv"])
    answer = exchange(server, request_)
    if request_.strip() and len(request_) < 20000:  # of others the answer may be lost as it hangs up
        code = int(answer.split()[1])
        assert 400 <= code < 500 or code == 505
        assert answer.startswith(f"HTTP/1.1 {code} {http.HTTPStatus(code).phrase}\r\n".encode())  # none of its bytes
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert_whole(tier, CASES["kv"])
    assert "".join(capfd.readouterr()) == ""


def test_one_client_too_many_is_told_so(folder):
    folder.add(CASES["kv"])
    with serving(folder, max_clients=2) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                client = stack.enter_context(socket.create_connection(server.address, 10))
                client.sendall(f"GET /v1/records/{key(1)} HTTP/1.1\r\n\r\n".encode())
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            with socket.create_connection(server.address, 10) as client:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
            with asking(server) as tier, pytest.raises(TierError):
                tier.find(key(1))
        with asking(server) as tier:
            wait_for_room(server, tier)
            assert_whole(tier, CASES["kv"])


def next_status(client):
    """Of the next answer, which is read to its end."""
    with contextlib.closing(http.client.HTTPResponse(client)) as response:
        response.begin()
        response.read()
        return response.status


def test_strangers_keep_nobody_out(folder):
    """They have no token, or do not say it: nothing, half a request, a wrong one, one after the other."""
    folder.add(CASES["kv"])
    now, asked = [0.0], f"GET /v1/records/{key(1)} HTTP/1.1\r\n"
    known = (asked + "Authorization: Bearer secret\r\n\r\n").encode()
    with (
        serving(folder, max_clients=4, token="secret", clock=lambda: now[0]) as server,
        contextlib.ExitStack() as stack,
    ):

        def connect(said):
            client = stack.enter_context(socket.create_connection(server.address, LONG))
            client.sendall(said)
            return client

        friend = connect(known)
        assert next_status(friend) == 200
        strangers = [connect(b""), connect(asked.encode()), connect(f"{asked}\r\n".encode())]
        assert next_status(strangers[2]) == 401
        now[0] += 4.9
        strangers[2].sendall(f"{asked}\r\n".encode())
        assert next_status(strangers[2]) == 401
        assert next_status(connect(b"")) == 503
        now[0] += 0.1
        others = []
        for stranger in strangers:  # each in its turn
            others.append(connect(known))
            assert next_status(others[-1]) == 200
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        now[0] += 60
        assert next_status(connect(known)) == 503  # these are no strangers
        for client in (friend, *others):
            client.sendall(known)
            assert next_status(client) == 200


def test_strangers_may_stay_as_long_as_nobody_needs_their_place(folder):
    now = [0.0]
    with (
        serving(folder, max_clients=2, clock=lambda: now[0]) as server,
        socket.create_connection(server.address, LONG) as client,
        socket.create_connection(server.address, LONG) as other,
    ):
        now[0] += 30
        for late in (client, other):
            late.sendall(f"GET /v1/records/{key(1)} HTTP/1.1\r\n\r\n".encode())
            assert next_status(late) == 200


def wait_for_room(server, tier):
    """Until a server has noticed who went away."""
    for _ in range(10_000):
        with contextlib.suppress(TierError):
            tier.find(key(1))
            return
    pytest.fail("there is no room")


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nX: y\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_clients_that_say_nothing_more_are_cut_off(said, folder):
    with serving(folder, idle_timeout=0.05) as server, socket.create_connection(server.address, 10) as client:
        client.sendall(said)
        while client.recv(1 << 16):
            pass


def test_clients_that_drip_are_cut_off(folder):
    with serving(folder, idle_timeout=0.1) as server, socket.create_connection(server.address, 10) as client:
        client.settimeout(0.01)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                client.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not client.recv(1):
                        return
            pytest.fail("it was not cut off")


def test_clients_that_ask_again_and_again_are_not_cut_off(folder, monkeypatch):
    ticks = itertools.count()  # each look at the clock takes a second
    monkeypatch.setattr("vlcache_jax.cache.tiers.wire.time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    with serving(folder, idle_timeout=30) as server, socket.create_connection(server.address, 10) as client:
        for _ in range(40):
            client.sendall(f"GET /v1/records/{key(1)} HTTP/1.1\r\n\r\n".encode())
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                answer += (got := client.recv(1 << 16))
                assert got
            assert answer.startswith(b"HTTP/1.1 200 ")


def test_clients_that_take_nothing_are_cut_off(folder):
    folder.add(LARGE)
    path = f"/v1/files/{file_name(LARGE.meta.name)}"
    with serving(folder, idle_timeout=0.05, max_clients=1) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall(f"GET {path} HTTP/1.1\r\nRange: bytes=0-\r\n\r\n".encode() * 20)
        with asking(server) as tier:
            wait_for_room(server, tier)


def test_a_directory_that_cannot_be_read_is_an_error_of_the_tier(folder, server, tier, monkeypatch):
    folder.add(CASES["kv"])
    meta = found(tier, CASES["kv"])

    def fail(*_, **__):
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr("vlcache_jax.cache.tiers.peer_server.os.open", fail)
        with pytest.raises(TierError, match="status 500") as caught:
            verified_read(tier, meta)
        assert type(caught.value) is TierError
    with monkeypatch.context() as patch:
        patch.setattr(folder, "find", lambda entry: exec("raise TierError", {"TierError": TierError}))
        with pytest.raises(TierError, match="status 500"):
            tier.find(key(1))
    assert_whole(tier, CASES["kv"])


def test_a_client_that_resets_and_a_fault_of_ours_end_no_server(folder, monkeypatch, capfd, caplog):
    folder.add(LARGE)
    path = f"/v1/files/{file_name(LARGE.meta.name)}"
    with serving(folder, max_clients=1) as server, asking(server, timeout=LONG) as tier:
        with socket.create_connection(server.address, 10) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nRange: bytes=0-\r\n\r\n".encode())
            client.recv(1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        wait_for_room(server, tier)
        assert not caplog.records
        with monkeypatch.context() as patch:
            patch.setattr(folder, "find", lambda entry: 1 / 0)
            with pytest.raises(TierError):
                tier.find(key(1))
        wait_for_room(server, tier)
        assert_whole(tier, LARGE)
    assert {record.exc_info[0] for record in caplog.records} == {ZeroDivisionError}
    assert "".join(capfd.readouterr()) == ""


# What a client is sent.


class Script(socketserver.ThreadingTCPServer):
    """Answers the first requests by `answers`, one each, and then as a peer does that has CASES["kv"].

    An answer is bytes, or pieces of them, or what gives them; None in them waits until the client has hung up, "reset"
    resets.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, answers, context=None):
        self.answers, self.context = [*answers], context
        super().__init__(("127.0.0.1", 0), None)

    def finish_request(self, request, client_address):
        with contextlib.suppress(OSError), self.secured(request) as connection:
            while head := self.head(connection):
                for piece in pieces(self.answers.pop(0) if self.answers else self.honest(head)):
                    if piece is None:
                        while connection.recv(1 << 16):
                            pass
                        return
                    if piece == "reset":
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        return
                    if piece == "close":
                        return
                    connection.sendall(piece() if callable(piece) else piece)

    def secured(self, request):
        return self.context.wrap_socket(request, server_side=True) if self.context else request

    @staticmethod
    def head(connection):
        head = b""
        while not head.endswith(b"\r\n\r\n") and (got := connection.recv(1 << 16)):
            head += got
        return head

    @staticmethod
    def honest(head):
        path = head.split()[1].decode()
        if path.startswith("/v1/hello"):
            return hello()
        if path.startswith("/v1/records"):
            return records(CASES["kv"])
        return part_of(file_of(CASES["kv"]))


def pieces(answer):
    return [answer] if isinstance(answer, bytes) else answer


@contextlib.contextmanager
def scripted(*answers, context=None):
    with Script(answers, context) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def answer(body, status=b"200 OK", length=None, **headers):
    lines = {"Content-Length": len(body) if length is None else length}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    return b"HTTP/1.1 %s\r\n" % status + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode() + b"\r\n" + body


def hello(**values):
    return answer(json.dumps({"format": FORMAT_VERSION, "server": "0"} | values).encode())


def dated_header(header, written=1500):
    return WRITTEN.pack(written) + header


def records(*all_):
    return answer(b"".join(dated_header(make_header(record.meta)) for record in all_))


def part_of(file, first=None, **changed):
    first = len(make_header(CASES["kv"].meta)) if first is None else first
    headers = {"Content_Range": f"bytes {first}-{len(file) - 1}/{len(file)}"}
    return answer(file[first:], b"206 Partial Content", **(headers | changed))


KV, FILE = CASES["kv"], file_of(CASES["kv"])
HEADER = make_header(KV.meta)
BODY = FILE[len(HEADER) :]
OTHER = make(context=key(7), seed=1)
DEEP = b"[" * 60000


def drip(content):
    """So slowly that no part of it is complete in time, and yet something comes always."""
    for byte in content:
        yield bytes([byte])
        threading.Event().wait(SHORT / 8)


class Drip:
    def __init__(self, content, at_once=0):
        self.content, self.at_once = content, at_once

    def __iter__(self):
        yield self.content[: self.at_once]
        yield from drip(self.content[self.at_once :])


@contextlib.contextmanager
def impatient(tier, answer):
    """As long as an answer is awaited that does not come."""
    is_slow = isinstance(answer, Drip) or None in pieces(answer)
    tier._timeout = SHORT if is_slow else LONG
    yield
    tier._timeout = LONG


FINDS = {
    "silence": [None],
    "hangs up": ["close"],
    "resets": ["reset"],
    "drips": Drip(records(KV)),
    "drips after the head": Drip(records(KV), 200),
    "stalls": [records(KV)[:300], None],
    "ends early": [records(KV)[:300], "close"],
    "resets half-way": [records(KV)[:300], "reset"],
    "no status": b"hello\r\n\r\n",
    "half a status": [b"HTTP/1.1 20", "close"],
    "garbage": [os.urandom(5000), None],
    "endless line": [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, None],
    "endless headers": [b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 5000, None],
    "endless continue": [b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, None],
    "no length": [b"HTTP/1.1 200 OK\r\n\r\n" + dated_header(HEADER), "close"],
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "negative length": answer(b"", length=-5),
    "no number": answer(b"", length="many"),
    "too long": [answer(b"", length=10**10), None],
    "absurdly long": [answer(b"", length="9" * 4000), None],
    "not found": answer(b"", b"404 Not Found"),
    "broken": answer(b"", b"500 Broken"),
    "full": answer(b"", b"503 Full"),
    "moved": answer(b"", b"302 Found", Location="http://127.0.0.1:1/"),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "part": part_of(FILE),
    "rubbish": answer(os.urandom(3000)),
    "a few bytes": answer(b"12345"),
    "header too long": answer(WRITTEN.pack(1) + LENGTH.pack(2**62) + b"{}"),
    "header larger than any": records(Record(dataclasses.replace(KV.meta, codec="x" * MAX_HEADER))),
    "ends between records": [answer(dated_header(HEADER), length=2 * len(dated_header(HEADER))), "close"],
    "header ends early": answer(dated_header(HEADER)[:-1]),
    "header goes on": answer(dated_header(HEADER) + b"\0"),
    "changed header": answer(dated_header(HEADER.replace(b'"tokens":"6"', b'"tokens":"5"'))),
    "nested header": answer(WRITTEN.pack(1) + LENGTH.pack(len(DEEP)) + DEEP),
    "another image": records(make(2)),
    "too many": records(*[make()] * (MAX_RECORDS + 1)),
}


@pytest.mark.parametrize("case", FINDS)
def test_whatever_a_peer_answers_a_search_ends_in_time(case):
    with scripted(hello(), FINDS[case]) as url, contextlib.closing(PeerTier(url, timeout=LONG)) as tier:
        with impatient(tier, FINDS[case]), pytest.raises(TierError):
            tier.find(key(1))
        assert_whole(tier, KV)


@pytest.mark.parametrize(
    "case", ["silence", "hangs up", "resets", "garbage", "endless continue", "no length", "too long", "moved", "broken"]
)
def test_whatever_a_peer_greets_with_the_call_ends_in_time(case):
    with scripted(FINDS[case]) as url, contextlib.closing(PeerTier(url, timeout=LONG)) as tier:
        with impatient(tier, FINDS[case]), pytest.raises(TierError):
            tier.find(key(1))
        assert_whole(tier, KV)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"5", b"{", DEEP, b"\xff", b'{"format": "2"}', b'{"format": null}', b'{"format": NaN}']
)
def test_a_greeting_must_name_the_format(body):
    with scripted(answer(body)) as url, contextlib.closing(PeerTier(url)) as tier:
        with pytest.raises(TierError):
            tier.find(key(1))
        assert_whole(tier, KV)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"refusal": 5}', b"[]", DEEP, b'{"refusal": "' + b"x" * 9999 + b'"}']
)
def test_a_refusal_may_be_in_other_words(body):
    with scripted(answer(body, b"401 Unauthorized")) as url, contextlib.closing(PeerTier(url)) as tier:
        with pytest.raises(RefusedError) as caught:
            tier.find(key(1))
        assert len(str(caught.value)) < 400
        assert_whole(tier, KV)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_connection_that_was_ended_between_two_calls_is_made_anew(end):
    with scripted(hello(), records(KV), [end]) as url, contextlib.closing(PeerTier(url, timeout=LONG)) as tier:
        for _ in range(2):
            assert_whole(tier, KV)


RANGE = f"bytes {len(HEADER)}-{len(FILE) - 1}/{len(FILE)}"
READS = {
    "silence": ([None], TierError),
    "drips": (Drip(part_of(FILE)), TierError),
    "drips after a part": (Drip(part_of(FILE), len(part_of(FILE)) - 700), TierError),
    "stalls half-way": ([part_of(FILE)[:-700], None], TierError),
    "ends half-way": ([part_of(FILE)[:-700], "close"], TierError),
    "resets half-way": ([part_of(FILE)[:-700], "reset"], TierError),
    "gone": (answer(b"", b"404 Not Found"), EntryGoneError),
    "too short": (answer(b"", b"416 Range Not Satisfiable"), DamagedError),
    "refused": (answer(b'{"refusal": "token"}', b"401 Unauthorized"), RefusedError),
    "broken": (answer(b"", b"500 Broken"), TierError),
    "moved": (answer(b"", b"307 Moved", Location="/v1/files/x"), TierError),
    "all of it": (answer(FILE), TierError),
    "no range": (answer(BODY, b"206 Partial Content"), DamagedError),
    "another range": (part_of(FILE, Content_Range=f"bytes 0-{len(BODY) - 1}/{len(FILE)}"), DamagedError),
    "another size": (part_of(FILE, Content_Range=RANGE + "0"), DamagedError),
    "says more": (part_of(FILE, length=len(BODY) + 1), DamagedError),
    "says less": (part_of(FILE, length=len(BODY) - 1), DamagedError),
    "says nothing": ([f"HTTP/1.1 206 OK\r\nContent-Range: {RANGE}\r\n\r\n".encode() + BODY, "close"], DamagedError),
    "chunks": (part_of(FILE, Transfer_Encoding="chunked"), DamagedError),
    "another record": (part_of(file_of(OTHER)), DamagedError),
    "shifted": (answer(FILE[64:][: len(BODY)], b"206 Partial Content", Content_Range=RANGE), DamagedError),
    "zeros": (answer(bytes(len(BODY)), b"206 Partial Content", Content_Range=RANGE), DamagedError),
}


@pytest.mark.parametrize("case", READS)
def test_whatever_a_peer_answers_a_read_ends_in_time(case):
    bad, expected = READS[case]
    with scripted(hello(), records(KV), bad) as url, contextlib.closing(PeerTier(url, timeout=LONG)) as tier:
        meta = found(tier, KV)
        with impatient(tier, bad), pytest.raises(expected) as caught:
            verified_read(tier, meta)
        assert type(caught.value) is expected
        assert_whole(tier, KV)


@pytest.mark.parametrize("more", [b"x", b"\r\n\r\n", answer(b"5"), b"HTTP/1.1 200 OK\r\n" * 50])
def test_what_comes_behind_an_answer_is_no_answer(more):
    with scripted(hello(), records(KV) + more) as url, contextlib.closing(PeerTier(url)) as tier:
        meta = found(tier, KV)
        verified_read(tier, meta)
        assert_whole(tier, KV)
    with scripted(hello(), records(KV), part_of(FILE) + more) as url, contextlib.closing(PeerTier(url)) as tier:
        assert_whole(tier, KV)
        assert_whole(tier, KV)


def test_an_answer_that_nobody_asked_for_is_none():
    is_next, unasked = threading.Event(), answer(b"")

    def later():
        is_next.wait()
        return unasked

    with scripted(hello(), [records(KV), later]) as url, contextlib.closing(PeerTier(url, timeout=LONG)) as tier:
        assert len(tier.find(key(1))) == 1
        is_next.set()
        [connection] = tier._kept
        select.select([connection._sock], [], [])
        assert len(tier.find(key(1))) == 1


def test_a_peer_that_cannot_be_reached_is_an_error_of_the_tier(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TierError, match="ConnectionRefusedError"):
        PeerTier(f"http://127.0.0.1:{port}").find(key(1))
    with pytest.raises(TierError):  # no name has labels this long
        PeerTier(f"http://{'a' * 70}.example").find(key(1))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    with pytest.raises(TierError, match="no address"):
        PeerTier("http://peer.example").find(key(1))


def test_nobody_accepts_a_connection():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_connection(listener.getsockname()))
        with pytest.raises(TierError, match="TimeoutError"):  # as it does not answer either
            PeerTier("http://{}:{}".format(*listener.getsockname()), timeout=SHORT).find(key(1))


def test_https(monkeypatch):
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: look_up("127.0.0.1", *rest, **more))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    with scripted(context=context) as url:
        port = url.rpartition(":")[2]
        with pytest.raises(TierError, match="CERTIFICATE_VERIFY_FAILED"):
            PeerTier(f"https://pictures.example:{port}").find(key(1))
        monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
        with contextlib.closing(PeerTier(f"https://pictures.example:{port}", token="secret")) as tier:
            assert_whole(tier, KV)
            assert_whole(tier, KV)
        with pytest.raises(TierError, match="CERTIFICATE_VERIFY_FAILED"):
            PeerTier(f"https://other.example:{port}").find(key(1))
