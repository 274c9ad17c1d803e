"""Chromium, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time


class Browser:
    """One page. What the browser logs as an error, and what scripts throw, stands in `errors`."""

    def __init__(self, process, send, receive):
        self.process, self.send, self.receive = process, send, receive
        self.errors = []
        self.session = None
        self.number = 0

    @classmethod
    @contextlib.contextmanager
    def open(cls, program, profile):
        """A browser without a window; `profile` is an empty directory."""
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

    def wait(self, script, seconds=20):
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, (script, self.value("document.body.innerText"), self.errors)
            time.sleep(0.02)

    def press(self, key, text=""):
        """A key, as someone presses it."""
        codes = {"Enter": 13, "Tab": 9, " ": 32}
        code = {"key": key, "windowsVirtualKeyCode": codes[key]}
        self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **code)
        self.do("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text):
        self.do("Input.insertText", text=text)

    def drop(self, *paths):
        """Files onto the middle of the page."""
        for kind in ("dragEnter", "dragOver", "drop"):
            data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
            self.do("Input.dispatchDragEvent", type=kind, x=150, y=150, data=data)
