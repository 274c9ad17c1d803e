"""Hostile URLs, names, addresses and servers. No name is really looked up; what is dialled is a server of the test."""

import itertools
import pathlib
import socket
import socketserver
import ssl
import threading
import time
import traceback
from contextlib import contextmanager

import pytest

from vlcache_jax.inputs import access
from vlcache_jax.inputs.access import Access

PUBLIC = "93.184.216.34"
PEM = pathlib.Path(__file__).with_name("pictures.example.pem")  # key and certificate of pictures.example, to 2120
OK = b"HTTP/1.1 200 OK\r\n"


class Server(socketserver.ThreadingTCPServer):
    """Records requests and sends what `answer(path)` yields, until it ends or the client goes away."""

    def __init__(self, answer, context=None):
        super().__init__(("127.0.0.1", 0), None)
        self.answer, self.context = answer, context
        self.requests, self.sent = [], 0

    def finish_request(self, request, client_address):
        try:
            with self.context.wrap_socket(request, server_side=True) if self.context else request as connection:
                head = b""
                while not head.endswith(b"\r\n\r\n") and (received := connection.recv(1 << 16)):
                    head += received
                self.requests.append(head.decode("latin-1"))
                for piece in self.answer(head.split()[1].decode()):
                    connection.sendall(piece)
                    self.sent += len(piece)
        except OSError:
            pass

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(answer, context=None):
    """Behind the block all requests have been served to their end."""
    with Server(answer, context) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def whole(body):
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


def moved(location):
    return b"HTTP/1.1 302 Found\r\nLocation: " + location.encode("latin-1") + b"\r\n\r\n"


def get(url, domains=("127.0.0.1",), **limits):
    return Access(True, domains, **limits).fetch(url, "images[3]")


def refused(url, domains=("127.0.0.1",), **limits):
    """Why; the rest of the error names the image and the URL."""
    with pytest.raises(ValueError, match=r"^images.3. must be a URL that can be fetched, got ") as caught:
        get(url, domains, **limits)
    shown = repr(url) if len(url) < 200 else f"{url!r:.120}... ({len(url) + 2} characters)"
    assert f"got {shown}: " in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None  # nothing of the peer's stands in a traceback
    return str(caught.value).partition(f"{shown}: ")[2]


@pytest.fixture
def names(monkeypatch):
    """The addresses of every host, changeable; what was looked up is in `resolved`."""

    class Names:
        addresses, resolved = [PUBLIC], []

        def look_up(self, host, port, **_):
            self.resolved.append(host)
            return [(None, None, 0, "", (address, port)) for address in self.addresses]

    names = Names()
    names.resolved = []
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    return names


@pytest.fixture
def dialled(monkeypatch, names):
    """Addresses that were dialled. They refuse, or `dialled.server` answers in their place."""

    class Dialled(list):
        server = None

    dialled, connect = Dialled(), access._connect

    def dial(address, port, seconds):
        dialled.append(str(address))
        if dialled.server is None:
            raise ConnectionRefusedError(111, "Connection refused")
        return connect(access.ipaddress.ip_address("127.0.0.1"), dialled.server.server_address[1], seconds)

    monkeypatch.setattr(access, "_connect", dial)
    return dialled


# --- what is fetched -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        whole(b"picture"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"picture"),
        b"HTTP/1.0 200\r\n\r\npicture",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\npic\r\n4;x=y\r\nture\r\n0\r\nTrailer: z\r\n\r\n",
        OK + b"Content-Encoding: identity\r\n\r\npicture",
    ],
)
def test_bodies(answer):
    with serving(lambda path: [answer]) as server:
        assert get(f"{server.url}/image.png") == b"picture"


def test_a_request_says_what_is_asked_and_no_more(dialled):
    with serving(lambda path: [whole(b"picture")]) as dialled.server:
        get("HTTP://Bücher.EXAMPLE.:8080/ä b.png?q=ö#fragment".replace(" ", "%20"), domains=[".EXAMPLE"])
    assert dialled.server.requests == [
        "GET /%C3%A4%20b.png?q=%C3%B6 HTTP/1.1\r\nHost: xn--bcher-kva.example:8080\r\nUser-Agent: vlcache-jax\r\n"
        "Accept: */*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
    ]


def test_no_proxy_of_the_environment_is_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(lambda path: [whole(b"picture")]) as server:
        assert get(f"{server.url}/a") == b"picture"


def test_redirects_are_followed(dialled):
    path_of = {"/a": moved("b"), "/b": moved("//other.example/ä".encode().decode("latin-1")), "/%C3%A4": whole(b"x")}
    with serving(lambda path: [path_of[path]]) as dialled.server:
        assert get("http://pictures.example/a", None) == b"x"
    assert [head.split()[4] for head in dialled.server.requests] == ["pictures.example"] * 2 + ["other.example"]


# --- where nothing is dialled ----------------------------------------------------------------------------------------

PRIVATE = [
    "0.0.0.0", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.0.1", "169.254.169.254",
    "168.63.129.16", "172.16.0.1", "192.0.0.192", "192.88.99.1", "192.168.1.1", "198.18.0.1", "224.0.0.1", "239.1.1.1",
    "240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1", "::ffff:7f00:1", "::ffff:169.254.169.254", "fe80::1",
    "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "ff0e::1", "2001::1", "2001:db8::1", "2002:7f00:1::",
    "2002:a9fe:a9fe::1", "64:ff9b::127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::808:808", "5f00::1",
]  # fmt: skip


@pytest.mark.parametrize("address", [*PRIVATE, "fe80::1%eth0"])
@pytest.mark.parametrize("also", [[], [PUBLIC]])
def test_a_name_of_a_private_address_is_not_dialled(names, dialled, address, also):
    names.addresses = [*also, address]
    assert refused("http://pictures.example/a", None) == "its host has a non-public address"
    assert not dialled


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_not_dialled(names, dialled, address):
    url = f"http://[{address}]/a" if ":" in address else f"http://{address}/a"
    assert refused(url, None) == "its host has a non-public address"
    assert not names.resolved
    assert not dialled


@pytest.mark.parametrize("host", ["8.8.8.8", "[2606:4700::1111]", "[::ffff:8.8.8.8]", "[64:ff9b::8.8.8.8]"])
def test_a_public_address_is_dialled(dialled, host):
    assert refused(f"http://{host}/a", None) == "Connection refused"
    assert dialled == [str(access.ipaddress.ip_address(host.strip("[]")))]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *((f"http://{host}/a", "its host or port is invalid")
          for host in ("2130706433", "0x7f.1", "0x7f000001", "0177.0.0.1", "127.1", "127.0.0.0x1", "1.2.3.4.5", "a.08",
                       "[fe80::1%25eth0]", "[v1.x]", "[a]", "[::1", "::1", "a..b", ".a", "a\\b", "a%2eb", "a" * 64,
                       "a." * 127 + "a", "ä" * 300, "host:port", "host:65536", "host:-1", ":80", "", "a'b", "*.a",
                       "a\u2100b")),
        ("http://127.0.0.1./a", "its host has a non-public address"),
        ("http://\uff11\uff12\uff17.0.0.1/a", "its host has a non-public address"),
        ("http://[::ffff:7f00:1]:80/a", "its host has a non-public address"),
        ("http://user:secret@pictures.example/a", "it contains a user name or password"),
        ("http://@pictures.example/a", "it contains a user name or password"),
        ("http://pictures.example\\@other.example/a", "it contains a user name or password"),
        *((f"http://pictures.example/a{character}b", "it contains blanks or control characters")
          for character in " \r\n\t\0\x7f\x85\xa0\u2028\u200b\ud800"),
        ("http://pictures.example\r\n/", "it contains blanks or control characters"),
        ("http://pictures.example/" + "a" * 9000, "it has more than 8192 characters"),
    ],
    ids=lambda value: ascii(value)[:50],
)  # fmt: skip
def test_a_bad_url_is_not_dialled(names, dialled, url, reason):
    assert refused(url, None) == reason
    assert not names.resolved
    assert not dialled


@pytest.mark.parametrize(
    ("domains", "host", "allowed"),
    [
        (["pictures.example"], "pictures.example", True),
        (["Pictures.Example."], "PICTURES.example.", True),
        (["pictures.example"], "a.pictures.example", False),
        (["pictures.example"], "pictures.example.evil.example", False),
        (["pictures.example"], "evilpictures.example", False),
        ([".pictures.example"], "a.b.pictures.example", True),
        ([".pictures.example"], "pictures.example", False),
        ([".pictures.example"], "evilpictures.example", False),
        (("a.example", "b.example"), "b.example", True),
        (["bücher.example"], "xn--bcher-kva.example", True),
        ([PUBLIC], PUBLIC, True),
        ([PUBLIC], "pictures.example", False),
        ([], "pictures.example", False),
    ],
)
def test_domains(names, dialled, domains, host, allowed):
    reason = refused(f"http://{host}/a", domains)
    assert reason == ("Connection refused" if allowed else "its host is not in allowed_media_domains")
    assert bool(dialled) == allowed
    assert allowed or not names.resolved


@pytest.mark.parametrize(
    ("entry", "host", "address"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3", "10.1.2.3"),
        ("::1", "[0:0::1]", "::1"),
        ("127.0.0.1", "[::ffff:127.0.0.1]", None),
        ("localhost", "localhost", None),
        (".example", "pictures.example", None),
    ],
)
def test_only_a_number_may_be_private_and_only_by_that_number(names, dialled, entry, host, address):
    names.addresses = ["127.0.0.1"]
    reason = refused(f"http://{host}/a", [entry])
    assert (reason == "Connection refused") == (address is not None)
    assert dialled == ([address] if address else [])


def test_the_address_that_was_checked_is_dialled(names, dialled, monkeypatch):
    answers = iter([[PUBLIC], ["127.0.0.1"]])

    def changing(host, port, **_):
        names.addresses = next(answers)
        return names.look_up(host, port)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    with serving(lambda path: [whole(b"x")]) as dialled.server:
        assert get("http://pictures.example/a", None) == b"x"
    assert names.resolved == ["pictures.example"]
    assert dialled == [PUBLIC]


def test_all_addresses_are_tried(names, dialled):
    names.addresses = ["8.8.8.8", "2606:4700::1111", "8.8.8.8"]
    assert refused("http://pictures.example/a", None) == "Connection refused"
    assert dialled == ["8.8.8.8", "2606:4700::1111"]


def test_a_name_without_addresses(names):
    names.addresses = []
    assert refused("http://pictures.example/a", None) == "the connection failed"


def test_names_that_are_not_found(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert refused("http://pictures.example/a", None) == "Name or service not known"


# --- redirects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://127.0.0.1/a", "its host has a non-public address"),
        ("//[::1]/a", "its host has a non-public address"),
        ("http://169.254.169.254/latest/meta-data/", "its host has a non-public address"),
        ("http://2130706433/a", "its host or port is invalid"),
        ("file:///etc/passwd", "its scheme is neither http nor https"),
        ("file://pictures.example/etc/passwd", "its scheme is neither http nor https"),
        ("ftp://pictures.example/a", "its scheme is neither http nor https"),
        ("gopher://pictures.example/a", "its scheme is neither http nor https"),
        ("data:image/png;base64,AAAA", "its scheme is neither http nor https"),
        ("http://user@pictures.example/a", "it contains a user name or password"),
        ("http://pictures.example/a b", "it contains blanks or control characters"),
        ("http://pictures.example/\0", "it contains blanks or control characters"),
        ("/a\tb", "it contains blanks or control characters"),
        ("\xff", "it redirects to an invalid URL"),
        ("http://[", "it redirects to an invalid URL"),
        ("/" + "a" * 9000, "it has more than 8192 characters"),
    ],
)
def test_a_redirect_is_checked_as_the_url_was(dialled, location, reason):
    with serving(lambda path: [moved(location)]) as dialled.server:
        assert refused("http://pictures.example/a", None) == f"{reason} (redirect 1)"
    assert len(dialled.server.requests) == len(dialled) == 1


def test_a_redirect_stays_in_the_domains(dialled):
    with serving(lambda path: [moved("http://other.example/a")]) as dialled.server:
        reason = refused("http://pictures.example/a", ["pictures.example"])
    assert reason == "its host is not in allowed_media_domains (redirect 1)"
    assert len(dialled) == 1


def test_a_name_is_looked_up_again_at_a_redirect(names, dialled):
    def answer(path):
        names.addresses = ["10.0.0.1"]
        return [moved("/b")]

    with serving(answer) as dialled.server:
        assert refused("http://pictures.example/a", None).startswith("its host has a non-public address")
    assert dialled == [PUBLIC]


def test_redirects_end():
    with serving(lambda path: [moved(f"{path}a")]) as server:
        assert refused(f"{server.url}/a") == "more than 5 redirects (redirect 6)"
    assert [head.split()[1] for head in server.requests] == ["/" + "a" * i for i in range(1, 7)]


# --- slow servers ----------------------------------------------------------------------------------------------------


def drip(start, slow, end=b""):
    """A valid answer, but for its slow part, which comes byte by byte."""
    yield start
    for i in range(len(slow)):
        time.sleep(0.02)
        yield slow[i : i + 1]
    yield end


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "status line": (b"HTTP/1.1 200 ", b"O" * 100, b"\r\nContent-Length: 1\r\n\r\nx"),
    "header": (OK + b"A: ", b"b" * 100, b"\r\nContent-Length: 1\r\n\r\nx"),
    "headers": (OK, b"A: b\r\n" * 20, b"Content-Length: 1\r\n\r\nx"),
    "continue": (b"HTTP/1.1 100 Continue\r\n", b"A: b\r\n" * 20, b"\r\n" + whole(b"x")),
    "body": (OK + b"Content-Length: 100\r\n\r\n", b"x" * 100),
    "chunk size": (CHUNKED, b"0" * 100, b"1\r\nx\r\n0\r\n\r\n"),
    "chunks": (CHUNKED, b"1\r\nx\r\n" * 20, b"0\r\n\r\n"),
    "trailer": (CHUNKED + b"1\r\nx\r\n0\r\nA: ", b"b" * 100, b"\r\n\r\n"),
}


@pytest.mark.parametrize("part", DRIPS)
def test_a_slow_answer_ends_at_the_deadline(monkeypatch, part):
    monkeypatch.setattr(access, "FETCH_SECONDS", 0.3)
    with serving(lambda path: drip(*DRIPS[part])) as server:
        assert refused(f"{server.url}/a") == "the download took more than 0.3 s"
    assert len(server.requests) == 1
    assert server.sent < sum(map(len, DRIPS[part]))


def test_slow_tls_ends_at_the_deadline(monkeypatch):
    record = b"\x16\x03\x03\x40\x00"

    class Slow:
        def wrap_socket(self, connection, server_side):
            for piece in drip(record, b"\0" * 100):
                connection.sendall(piece)
                slow.append(piece)
            return connection

    slow = []
    monkeypatch.setattr(access, "FETCH_SECONDS", 0.3)
    with serving(None, Slow()) as server:
        assert refused(server.url.replace("http", "https") + "/a") == "the download took more than 0.3 s"
    assert len(slow) < 100


def test_redirects_share_the_deadline(monkeypatch):
    def answer(path):
        time.sleep(0.2)
        yield moved(path + "a")

    monkeypatch.setattr(access, "FETCH_SECONDS", 0.3)
    with serving(answer) as server:
        assert refused(f"{server.url}/a").startswith("the download took more than 0.3 s (redirect ")
    assert len(server.requests) < 4


def test_a_slow_resolver_ends_at_the_deadline(monkeypatch, dialled):
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(10) and [])
    monkeypatch.setattr(access, "FETCH_SECONDS", 0.1)
    assert refused("http://pictures.example/a", None) == "the download took more than 0.1 s"
    assert not released.is_set()
    released.set()
    assert not dialled


def test_an_address_that_does_not_answer_leaves_time_for_the_next(names, monkeypatch):
    given = []

    def dial(address, port, seconds):
        given.append(seconds)
        raise TimeoutError

    monkeypatch.setattr(access, "_connect", dial)
    names.addresses = [f"8.8.8.{i}" for i in range(4)]
    assert refused("http://pictures.example/a", None) == "the download took more than 20.0 s"
    assert all(seconds <= share for seconds, share in zip(given, (5, 20 / 3, 10, 20), strict=True))


# --- bad answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.0 secret\r\n", "the HTTP response is incomplete or invalid"),
        (b"secret", "the HTTP response is incomplete or invalid"),
        (b"", "the HTTP response is incomplete or invalid"),
        (b"HTTP/1.1 2000 secret\r\n\r\n", "the HTTP response is incomplete or invalid"),
        (b"HTTP/7 200 secret\r\n\r\n", "the HTTP response is incomplete or invalid"),
        (b"HTTP/1.1 404 secret\r\nA: secret\r\n\r\nsecret", "the server returned status 404"),
        (b"HTTP/1.1 204 secret\r\n\r\n", "the server returned status 204"),
        (b"HTTP/1.1 206 secret\r\nContent-Length: 6\r\n\r\nsecret", "the server returned status 206"),
        (b"HTTP/1.1 302 secret\r\n\r\n", "the server returned status 302"),
        (b"HTTP/1.1 300 secret\r\nLocation: /secret\r\n\r\n", "the server returned status 300"),
        (
            OK + b"Content-Encoding: gzip\r\nContent-Length: 6\r\n\r\nsecret",
            "its response has an encoding that was not requested",
        ),
        (
            OK + b"Transfer-Encoding: secret, chunked\r\n\r\n0\r\n\r\n",
            "its response has an encoding that was not requested",
        ),
        (OK + b"Content-Length: 7\r\n\r\nsecret", "its response is incomplete"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n7\r\nsecret", "the HTTP response is incomplete or invalid"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n", "the HTTP response is incomplete or invalid"),
        (OK + b"secret: " + b"s" * 70_000, "its response has more than 65536 bytes of headers"),
        (OK + b"secret: secret\r\n" * 101, "the HTTP response is incomplete or invalid"),
        (OK + (b"secret: " + b"s" * 1000 + b"\r\n") * 99, "its response has more than 65536 bytes of headers"),
        (b"HTTP/1.1 100 secret\r\n\r\n" * 4000, "its response has more than 65536 bytes of headers"),
        (OK + b"Content-Length: 101\r\n\r\n", "its response has more than 100 bytes"),
        (OK + b"Content-Length: -1\r\n\r\nsecret", "the HTTP response is incomplete or invalid"),
        (OK + b"Content-Length: secret\r\n\r\nsecret", "the HTTP response is incomplete or invalid"),
        (OK + b"\r\n" + b"s" * 101, "its response has more than 100 bytes"),
        (CHUNKED + b"65\r\n" + b"s" * 101 + b"\r\n0\r\n\r\n", "its response has more than 100 bytes"),
        (CHUNKED + b"1\r\ns\r\n" * 101 + b"0\r\n\r\n", "its response has more than 100 bytes"),
        (CHUNKED + b"0\r\n" + b"A: secret\r\n" * 10_000, "its response has more than 100 bytes"),
    ],
    ids=itertools.count(),
)
def test_bad_answers_are_refused_without_a_word_of_theirs(answer, reason):
    with serving(lambda path: [answer]) as server:
        with pytest.raises(ValueError, match=r"^images.3. must be a URL that can be fetched, got ") as caught:
            get(f"{server.url}/a", max_image_bytes=100)
        assert refused(f"{server.url}/a", max_image_bytes=100) == reason
    told = "".join(traceback.format_exception(caught.value)).lower()
    assert "secret" not in told
    assert "ssh" not in told


def test_an_endless_body_ends_at_the_limit():
    with serving(lambda path: itertools.chain([OK, b"\r\n"], itertools.repeat(b"x" * 100_000))) as server:
        assert refused(f"{server.url}/a", max_image_bytes="1MB") == "its response has more than 1000000 bytes"


def test_a_body_of_exactly_the_limit_is_taken():
    with serving(lambda path: [whole(b"x" * 100)]) as server:
        assert get(f"{server.url}/a", max_image_bytes=100) == b"x" * 100


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secure(dialled):
    """A server of pictures.example, which notes the names that clients ask for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    context.sni_callback = lambda connection, name, _: dialled.server.names.append(name)
    with serving(lambda path: [whole(b"x")], context) as dialled.server:
        dialled.server.names = []
        yield dialled.server


def test_tls_asks_for_the_name_of_the_url(secure, monkeypatch):
    trusting = ssl.create_default_context(cafile=PEM)
    monkeypatch.setattr(access, "_tls_context", lambda: trusting)
    assert get("https://pictures.example/a", ["pictures.example"]) == b"x"
    assert secure.names == ["pictures.example"]
    assert refused("https://other.example/a", None) == "its TLS certificate is invalid"
    assert refused("https://8.8.8.8/a", None) == "its TLS certificate is invalid"
    assert len(secure.requests) == 1


def test_tls_needs_a_certificate_that_is_trusted(secure):
    assert refused("https://pictures.example/a", None) == "its TLS certificate is invalid"
    assert not secure.requests


def test_tls_with_a_server_that_has_none():
    class Plain:
        def wrap_socket(self, connection, server_side):
            connection.sendall(b"HTTP/1.1 400 secret\r\n\r\n")
            connection.recv(1 << 16)
            return connection

    with serving(lambda path: [], Plain()) as server:
        assert refused(server.url.replace("http", "https")) in ("the TLS handshake failed", "Connection reset by peer")
