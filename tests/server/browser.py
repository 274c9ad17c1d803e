"""Chromium, driven by its DevTools protocol over a pair of pipes.

`python -m tests.server.browser PNG` takes a screenshot of the server's page: the shipped model has answered a question
about an image, and again after other text with `reuse="approximate"`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from tests.helper import WITHIN
from tests.server.helper import serving
from vlcache_jax.assets import PICTURES


class Browser:
    """One page.

    Attributes:
      errors: what the browser logs as an error, and what scripts throw.
      chooser: node of the input that last asked for files.
    """

    def __init__(self, process, send, receive):
        self.process, self.send, self.receive = process, send, receive
        self.errors = []
        self.chooser = None
        self.session = None
        self.number = 0

    @classmethod
    @contextlib.contextmanager
    def open(cls, url, profile):
        """The page of a server, without a window; `profile` is an empty directory."""
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        assert program, "chromium must be installed, as .ci/run does"
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        # It reads from 3 and writes to 4.
        line = f'exec "$@" 3<&{to_read} 4>&{from_write}'
        command = ["bash", "-c", line, "bash", program, *flags, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(from_write)
        with open(to_write, "wb", buffering=0) as send, open(from_read, "rb") as receive:
            own = cls(process, send, receive)
            try:
                own.attach()
                own.go(url)
                yield own
                own.do("Browser.close", of_page=False)
                process.wait(30)
            finally:
                process.kill()
                process.wait()

    def attach(self):
        target = self.do("Target.createTarget", of_page=False, url="about:blank")["targetId"]
        self.session = self.do("Target.attachToTarget", of_page=False, targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.do(f"{domain}.enable")
        self.do("Page.setInterceptFileChooserDialog", enabled=True)

    def go(self, url):
        self.do("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !!document.getElementById('ask')")

    def do(self, method, of_page=True, **params):
        """A command, and its result."""
        self.number += 1
        told = {"id": self.number, "method": method, "params": params}
        if of_page:
            told["sessionId"] = self.session
        self.send.write(json.dumps(told).encode() + b"\0")
        while (heard := self.hear()).get("id") != self.number:
            pass
        if "error" in heard:
            raise ValueError(f"{method}: {heard['error']}")
        return heard["result"]

    def hear(self):
        said = bytearray()
        while (byte := self.receive.read(1)) != b"\0":
            if not byte:
                raise EOFError("the browser has ended")
            said += byte
        heard = json.loads(said)
        match heard.get("method"):
            case "Page.fileChooserOpened":
                self.chooser = heard["params"]["backendNodeId"]
            case "Runtime.exceptionThrown":
                self.errors.append(str(heard["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if heard["params"]["type"] in ("error", "warning", "assert"):
                self.errors.append(str(heard["params"]["args"]))
            case "Log.entryAdded" if heard["params"]["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(heard["params"]["entry"]))
        return heard

    def value(self, script):
        """Of an expression, which may be a promise."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script, seconds=WITHIN):
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, (script, self.value("document.body.innerText"), self.errors)
            time.sleep(0.02)

    def press(self, key, text="", **more):
        """A key, as someone presses it."""
        codes = {"Enter": 13, "Tab": 9, " ": 32, "v": 86, "ArrowDown": 40}
        code = {"key": key, "windowsVirtualKeyCode": codes[key], **more}
        self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **code)
        self.do("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text):
        self.do("Input.insertText", text=text)

    def drop(self, *paths):
        """Files onto the middle of the page."""
        for kind in ("dragEnter", "dragOver", "drop"):
            data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
            self.do("Input.dispatchDragEvent", type=kind, x=150, y=150, data=data)

    def choose(self, *paths):
        """Files, as the page has asked for them."""
        while self.chooser is None:
            self.value("1")
        self.do("DOM.setFileInputFiles", files=list(map(str, paths)), backendNodeId=self.chooser)
        self.chooser = None

    def paste(self, path):
        """A PNG, from the clipboard."""
        may = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        self.do("Browser.grantPermissions", of_page=False, permissions=may)
        data = base64.b64encode(path.read_bytes()).decode()
        self.value(
            f"""navigator.clipboard.write([new ClipboardItem({{"image/png": new Blob(
            [Uint8Array.from(atob("{data}"), one => one.charCodeAt(0))], {{type: "image/png"}})}})])"""
        )
        self.press("v", modifiers=2, commands=["paste"])

    def answered(self, count):
        """Waits for the answer to this question."""
        self.wait(f"document.querySelectorAll('article').length === {count} && !at('ask').disabled")

    def shoot(self, path):
        """What is to be seen."""
        height = self.value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.value("innerWidth"), "height": height, "scale": 1}
        shot = self.do("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


def ask_twice(browser, image=PICTURES / "picture.png", question="How many stars are there?"):
    """Drop an image and ask about it twice."""
    browser.drop(image)
    browser.wait("document.querySelectorAll('#images img').length === 1")
    browser.value("document.getElementById('question').focus()")
    browser.type(question)
    for count in (1, 2):
        browser.press("Enter", "\r")
        browser.answered(count)


def main():
    with (
        tempfile.TemporaryDirectory() as profile,
        serving("--warmup", "--allow-reuse", "approximate") as (_, url, _),
        Browser.open(url.removesuffix("v1"), profile) as browser,
    ):
        browser.do("Emulation.setDeviceMetricsOverride", width=720, height=600, deviceScaleFactor=1, mobile=False)
        for image in ("left.png", "picture.png"):  # the first one compiles programs
            browser.go(url.removesuffix("v1"))
            browser.wait("!document.getElementById('modes').hidden")
            ask_twice(browser, PICTURES / image)
            browser.value("document.querySelector('[value=approximate]').click()")
            browser.value("document.getElementById('first').click()")
            browser.value("document.getElementById('question').focus()")
            browser.press("Enter", "\r")
            browser.answered(3)
        browser.shoot(pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
