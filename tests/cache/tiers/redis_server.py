"""A real server of Redis for tests, which keeps nothing on a disk."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import redis

from vlcache_jax.cache.keys import FORMAT_VERSION


class Server:
    """A server on a port of its own, which keeps nothing on a disk."""

    def __init__(self, folder: pathlib.Path):
        self.binary = shutil.which("redis-server")
        assert self.binary, "these tests need redis-server: apt-get install redis-server"
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://:pass%2Fword@127.0.0.1:{self.port}/0"
        self.client = redis.Redis.from_url(self.url, socket_timeout=30)
        self.start()

    def start(self):
        options = {"bind": "127.0.0.1", "port": self.port, "requirepass": "pass/word"}
        options |= {"save": "", "appendonly": "no", "maxmemory": "1gb"}
        command = [self.binary, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        self.process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL)
        for _ in range(3000):
            assert self.process.poll() is None
            with contextlib.suppress(redis.ConnectionError):
                self.client.ping()
                return
            time.sleep(0.01)
        raise AssertionError("the server does not answer")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def chunks(self):
        """Keys of all data."""
        return sorted(self.client.scan_iter(f"vlcache-{FORMAT_VERSION}:*:*:*"))

    @contextlib.contextmanager
    def paused(self):
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def set(self, **options):
        names = {name.replace("_", "-"): value for name, value in options.items()}
        before = {name: self.client.config_get(name)[name] for name in names}
        for name, value in names.items():
            self.client.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                self.client.config_set(name, value)
