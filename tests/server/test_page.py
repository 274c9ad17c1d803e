"""The page: its source, and in a browser what it shows of a server's answers."""

from __future__ import annotations

import base64
import http.server
import itertools
import json
import pathlib
import re
import threading

import pytest

import vlcache_jax
from tests.server.browser import Browser, ask_twice
from tests.server.helper import serving
from vlcache_jax.assets import PICTURES
from vlcache_jax.reuse.selection import APPROXIMATE

PAGE = pathlib.Path(vlcache_jax.__file__).parent / "server" / "page.html"


def test_the_page_needs_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|<link[^>]*stylesheet|<script[^>]+src", text)
    assert "default-src 'none'" in text
    assert "connect-src 'self'" in text
    for raw in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert raw not in text  # what a model or a file's name says is text
    for element in re.findall(r"<(?:input|textarea)[^>]*id=\"(\w+)\"", text):
        assert f'for="{element}"' in text or element in ("files", "first")  # hidden; inside its label


class FakeServer(http.server.ThreadingHTTPServer):
    """Serves the page, and answers as the server does: a picture is new, then exact, elsewhere approximate."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.key = None
        self.reuse = {None: ["exact"]}  # by key
        self.refuses = None
        self.bodies, self.paths, self.known = [], [], {}
        self.breaks = False

    def cache(self, body):
        urls = [part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"]
        images = []
        for i, url in enumerate(urls):
            before = tuple(urls[:i])
            match = "miss" if url not in self.known else "exact" if self.known[url] == before else "approximate"
            self.known.setdefault(url, before)
            rows = {"miss": [64, 64], "exact": [0, 0], "approximate": [64, 4]}[match]
            kv = "none" if match == "miss" else "host"
            why = {"miss": "unknown_image", "exact": None, "approximate": "other_context"}[match]
            encoder = "computed" if match == "miss" else "none"
            told = {"index": i, "match": match, "kv": kv, "encoder": encoder, "why": why}
            images.append(told | {"tokens": 64, "rows": rows, "video": None})
        return {"images": images, "exact": True}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        server.paths.append(self.path)
        if self.path == "/":
            self.reply(200, "text/html; charset=utf-8", PAGE.read_bytes())
        elif not self.is_let_in():
            return
        elif self.path == "/v1/models":
            _, _, key = (self.headers["Authorization"] or "").partition(" ")
            modes = server.reuse.get(key, server.reuse[None])
            self.reply(200, "application/json", json.dumps({"data": [{"id": "tiny", "reuse": modes}]}).encode())
        else:
            self.reply(200 if self.path == "/docs" else 404, "text/html; charset=utf-8", b"<h1>API</h1>")

    def is_let_in(self):
        key, given = self.server.key, self.headers["Authorization"]
        if key and given not in (f"Bearer {key}", *(f"Bearer {other}" for other in self.server.reuse if other)):
            self.reply(401, "application/json", b'{"error": {"message": "no key"}}')
            return False
        return True

    def reply(self, status, kind, content, **more):
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self):
        server = self.server
        server.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_let_in():
            return
        server.bodies.append(body)
        if server.refuses is not None and body.get("reuse") == server.refuses:
            error = {"message": f"reuse must be exact on this server, got {server.refuses!r}", "param": "reuse"}
            self.reply(400, "application/json", json.dumps({"error": error}).encode())
            return
        if server.breaks:
            full = b'{"error": {"message": "The server is full."}}'
            self.reply(503, "application/json", full, **{"Retry-After": "2"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        pieces = [
            {"role": "assistant", "content": ""},
            {"reasoning": "Hm."},
            {"content": "A <b>red</b> "},
            {"content": "drëieck"},
        ]
        events = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "cache": server.cache(body)})
        events.append({"choices": [], "usage": {"prompt_tokens": 80, "completion_tokens": 3}})
        text = ": wait\n\n" + "".join(f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in events)
        sent = (text + "data: [DONE]\n\n").encode()
        for begin in range(0, len(sent), 7):  # cut anywhere
            self.wfile.write(sent[begin : begin + 7])
            self.wfile.flush()


@pytest.fixture
def server():
    own = FakeServer()
    thread = threading.Thread(target=own.serve_forever)
    thread.start()
    yield own
    own.shutdown()
    thread.join()
    own.server_close()


@pytest.fixture
def browser(tmp_path, server):
    with Browser.open(f"http://127.0.0.1:{server.server_port}/", tmp_path / "profile") as browser:
        yield browser


CAPTIONS = "[...document.querySelector('article').querySelectorAll('figcaption')].map(one => one.innerText)"
FOCUS = """(one => one.id || one.getAttribute('aria-label') || (one.tagName === 'SUMMARY' ? one.innerText : null))(
  document.activeElement)"""
LEFT = PICTURES / "left.png"
RIGHT = PICTURES / "right.png"
PICTURE = PICTURES / "picture.png"


@pytest.mark.servers
def test_pictures_are_dropped_asked_about_and_reused(browser, server, tmp_path):
    browser.drop(LEFT)
    browser.wait("document.querySelectorAll('#images img').length === 1")
    browser.value("document.getElementById('question').focus()")
    browser.type("What is it?")
    browser.press("Enter", "\r")
    browser.answered(1)
    assert browser.value("document.querySelector('.answer').textContent") == "A <b>red</b> drëieck"
    assert browser.value("document.querySelector('.thought').textContent") == "Hm."
    [caption] = browser.value(CAPTIONS)
    assert caption == "computed\n64 of 64 tokens computed\nnot cached yet"
    note = "document.querySelector('.note').innerText"
    assert re.fullmatch(r"Reuse mode: exact\. First token after \d+\.\d\d s\. 80 prompt tokens\.", browser.value(note))
    # Again: reused. Then behind another picture.
    browser.press("Enter", "\r")
    browser.answered(2)
    [caption] = browser.value(CAPTIONS)
    state = r"reused exactly\n0 of 64 tokens computed\nKV from host memory\n"
    assert re.fullmatch(state + r"first token in its first request: \d+\.\d\d s", caption)
    browser.drop(RIGHT)
    browser.wait("document.querySelectorAll('#images img').length === 2")
    browser.value("document.querySelector('[aria-label=\"Move left: right.png\"]').click()")
    browser.value("document.getElementById('question').focus()")
    browser.press("Enter", "\r")
    browser.answered(3)
    captions = browser.value(CAPTIONS)
    assert captions[1].split("\n")[2:4] == ["new context", "KV from host memory"]
    assert [one.split("\n")[:2] for one in captions] == [
        ["computed", "64 of 64 tokens computed"], ["reused approximately", "34 of 64 tokens computed"]
    ]  # fmt: skip
    sent = server.bodies[-1]
    data = [part["image_url"]["url"].partition(",")[2] for part in sent["messages"][0]["content"][:2]]
    assert [base64.b64decode(one) for one in data] == [RIGHT.read_bytes(), LEFT.read_bytes()]
    assert sent == {
        "messages": sent["messages"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_cache_report": True,
    }
    assert sent["messages"][0]["content"][2] == {"type": "text", "text": "What is it?"}
    assert set(server.paths) == {"/", "/v1/models", "/v1/chat/completions"}
    assert browser.errors == []
    # At 400 px nothing sticks out, by light or by dark.
    for scheme in ("light", "dark"):
        browser.do("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
        browser.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert browser.value("document.documentElement.scrollWidth") <= 400
        [red, *_] = re.findall(r"\d+", browser.value("getComputedStyle(document.body).backgroundColor"))
        assert (int(red) > 200) == (scheme == "light")
        shot = base64.b64decode(browser.do("Page.captureScreenshot")["data"])
        (tmp_path / f"{scheme}.png").write_bytes(shot)
    assert browser.errors == []


@pytest.mark.servers
def test_a_keyboard_is_enough(browser, server):
    """Every control is reached by Tab, in the order in which it stands, and works by Enter or Space."""
    browser.drop(LEFT, RIGHT)
    browser.wait("document.querySelectorAll('#images img').length === 2")
    reached = []
    for _ in range(12):
        browser.press("Tab")
        reached.append(browser.value(FOCUS))
    assert reached == [
        "reference", "help", "add", "Move right: left.png", "Remove: left.png",
        "Move left: right.png", "Remove: right.png", "question",
        "ask", "first", "How reuse works", None,
    ]  # fmt: skip
    names = "[...document.querySelectorAll('#images img')].map(one => one.alt)"
    browser.value("document.querySelector('[aria-label=\"Move right: left.png\"]').focus()")
    browser.press("Enter", "\r")
    assert browser.value(names) == ["right.png", "left.png"]
    assert browser.value(FOCUS) == "Move left: left.png"
    browser.value("document.querySelector('[aria-label=\"Remove: right.png\"]').focus()")
    browser.press(" ", " ")
    assert browser.value(names) == ["left.png"]
    assert browser.value(FOCUS) == "Remove: left.png"
    browser.value("document.getElementById('first').focus()")
    browser.press(" ", " ")
    browser.value("document.getElementById('ask').focus()")
    browser.press("Enter", "\r")
    browser.answered(1)
    assert [part["type"] for part in server.bodies[-1]["messages"][0]["content"]] == ["text", "image_url"]
    assert browser.errors == []


MESSAGE = "document.getElementById('message').textContent"
MODES = "[...document.querySelectorAll('#modes label')].map(one => one.innerText)"


@pytest.mark.servers
def test_a_key_is_required_and_errors_are_shown(browser, server, tmp_path):
    assert browser.value("document.getElementById('locked').hidden")
    server.key = "secret"
    browser.go(f"http://127.0.0.1:{server.server_port}/")
    browser.wait("!document.getElementById('locked').hidden")
    browser.value("document.getElementById('question').focus()")
    browser.press("Enter", "\r")
    browser.wait("document.activeElement.id === 'key' && !at('ask').disabled")
    browser.type("wrong")
    browser.press("Enter", "\r")
    browser.wait(f"{MESSAGE} === 'The server rejected this API key.'")
    browser.value("document.getElementById('key').select()")
    browser.type("secret")
    browser.press("Enter", "\r")
    browser.answered(1)
    assert browser.value("document.getElementById('model').innerText") == "Model: tiny"
    # The link to the API's reference sends the key, too.
    browser.value("window.open = url => { window.opened = url; }; document.getElementById('reference').click()")
    browser.wait("!!window.opened")
    assert browser.value("fetch('docs', {headers: headers()}).then(one => one.text())") == "<h1>API</h1>"
    assert browser.value("opened").startswith("blob:")
    server.breaks = True
    browser.value("document.getElementById('key').focus()")
    browser.press("Enter", "\r")
    browser.wait(f"{MESSAGE} === 'The server is full. Try again in 2 s.'")
    (tmp_path / "notes.txt").write_text("no image")
    browser.drop(tmp_path / "notes.txt")
    browser.wait(f"{MESSAGE} === 'Not an image: notes.txt'")
    assert all("Failed to load resource" in error for error in browser.errors)  # the browser's own of 401 and 503


@pytest.mark.servers
def test_the_reuse_mode_is_a_choice_where_the_server_has_several(browser, server):
    """The server's default is not sent, another one is; what the server refuses is shown. Keys have their own lists."""
    browser.wait("document.getElementById('model').innerText === 'Model: tiny'")
    assert browser.value("document.title") == "tiny - VLCache-JAX"
    assert browser.value("document.getElementById('reference').href").endswith("/docs")
    assert browser.value("document.getElementById('modes').hidden")
    only = browser.value("document.getElementById('only').innerText")
    assert only.startswith("Reuse mode: exact. Same answers as")
    assert only.endswith("To choose a mode here, start the server with --allow-reuse.")

    server.reuse = {None: ["exact", "approximate", "full", "0.25", "a/b.json", "mpic-32"], "carl": ["full"]}
    browser.go(f"http://127.0.0.1:{server.server_port}/")
    browser.wait("!document.getElementById('modes').hidden")
    assert browser.value("document.getElementById('only').hidden")
    modes = browser.value(MODES)
    assert [one.partition(":")[0].removesuffix(" (default)") for one in modes] == server.reuse[None]
    assert [" (default): " in one for one in modes] == [True, *[False] * 5]
    assert f"{100 * float(APPROXIMATE.removeprefix('shift-')):g} % of the image tokens are recomputed" in modes[1]
    assert "first 25 %" in modes[3]
    browser.drop(LEFT)
    browser.wait("document.querySelectorAll('#images img').length === 1")
    browser.value("document.querySelector('[name=mode]').focus()")
    browser.press("ArrowDown")
    browser.value("document.getElementById('question').focus()")
    browser.press("Enter", "\r")
    browser.answered(1)
    assert server.bodies[-1]["reuse"] == "approximate"
    assert browser.value("document.querySelector('.note').innerText").startswith("Reuse mode: approximate. First token")
    browser.value("document.querySelector('[value=exact]').click(); document.getElementById('question').focus()")
    browser.press("Enter", "\r")
    browser.answered(2)
    assert "reuse" not in server.bodies[-1]
    assert browser.value("document.querySelector('.note').innerText").startswith("Reuse mode: exact. ")
    server.refuses = "full"
    browser.value("document.querySelector('[value=full]').click(); document.getElementById('question').focus()")
    browser.press("Enter", "\r")
    browser.wait(f"{MESSAGE} === \"reuse must be exact on this server, got 'full'\"")
    server.refuses, server.key = None, "secret"
    # A tenant's own list is shown when its key is entered.
    browser.press("Enter", "\r")
    browser.wait("document.activeElement.id === 'key' && !at('ask').disabled")
    browser.type("carl")
    browser.value("document.getElementById('question').focus()")
    browser.wait("document.getElementById('modes').hidden")
    assert browser.value("document.getElementById('only').innerText").startswith("Reuse mode: full. ")
    browser.press("Enter", "\r")
    browser.answered(3)
    assert "reuse" not in server.bodies[-1]
    assert all("Failed to load resource" in error for error in browser.errors)


# --- a server that answers --------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path):
    """A browser at the page of the real server, each of whose tokens comes alone."""
    with (
        serving("--buckets", '{"window": 1}', "--allow-reuse", "approximate") as (_, url, _),
        Browser.open(url.removesuffix("v1"), tmp_path / "profile") as browser,
    ):
        yield browser


SEEN = """window.seen = [];
new MutationObserver(() => { const one = document.querySelector(".answer"); if (one) seen.push(one.textContent); })
  .observe(document.getElementById("answers"), {subtree: true, childList: true});"""


@pytest.mark.servers
def test_the_real_server_is_asked_twice(real, tmp_path):
    """By dropping, pasting and choosing; in a narrow window nothing sticks out."""
    real.value(SEEN)
    ask_twice(real, PICTURE)
    answer = "star red green blue: 3"
    seen = real.value("seen")
    first = list(dict.fromkeys(seen[: seen.index(answer) + 1]))
    assert len(first) > 3  # it streams
    assert all(after.startswith(before) for before, after in itertools.pairwise(first))
    answers = "[...document.querySelectorAll('.answer')].map(one => one.textContent)"
    assert real.value(answers) == [answer] * 2
    states = "[...document.querySelectorAll('article .state')].map(one => one.textContent)"
    assert real.value(states) == ["reused exactly", "computed"]
    real.shoot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size < 300_000

    # What is pasted has the same pixels.
    real.value("document.querySelector('[aria-label^=Remove]').click()")
    real.paste(PICTURE)
    real.wait("document.querySelectorAll('#images img').length === 1")
    real.value("document.getElementById('question').focus()")
    real.press("Enter", "\r")
    real.answered(3)
    assert real.value(states) == ["reused exactly", "reused exactly", "computed"]
    real.do("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    assert real.value("document.documentElement.scrollWidth") <= 400
    assert real.errors == []


@pytest.mark.servers
def test_the_real_server_is_asked_by_keyboard(real):
    for expected in ("reference", "help", "add"):
        real.press("Tab")
        assert real.value(FOCUS) == expected
    real.press("Enter", "\r")
    real.choose(PICTURE)
    real.wait("document.activeElement.id === 'question'")
    real.type("What is at C2?")
    real.press("Enter", "\r")
    real.answered(1)
    assert real.value("document.querySelector('.answer').textContent") == "red triangle"
    assert real.value("document.querySelector('article figcaption').innerText").startswith("computed\n")
    # The server allows its own mode and "approximate": after other text, each does what it says.
    states = "[...document.querySelectorAll('article .state')].map(one => one.textContent)"
    real.value("document.getElementById('first').click()")
    for mode, state in (("approximate", "reused approximately"), ("exact", "encoder output reused")):
        real.value(f"document.querySelector('[value={mode}]').click(); document.getElementById('question').focus()")
        real.press("Enter", "\r")
        real.answered(2 + (mode == "exact"))
        assert real.value(states)[0] == state
        assert real.value("document.querySelector('.note').innerText").startswith(f"Reuse mode: {mode}. ")
    assert real.value("document.getElementById('model').innerText") == "Model: tiny-vqa"
    assert real.errors == []
