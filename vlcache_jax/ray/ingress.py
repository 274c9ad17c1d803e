"""Ingress of a service: it reads bodies within their limits, hashes their images, and forwards them to a replica.

It has no model, decodes no image and counts no tokens. The replicas make all answers, including errors. Exceptions are
errors of reading bodies and of replicas that end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import ray.exceptions
import ray.serve.exceptions
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlcache_jax.protocol.schema import ApiError, read_object, write
from vlcache_jax.router.affinity import SeenImages, look
from vlcache_jax.server.admission import FIELD_BYTES, OPEN, AdmissionControl, ClientGoneError, Keys, read_whole
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import MESSAGES_PATH, path_of, refuse, tag_in, until_gone
from vlcache_jax.server.tenants import Register

_log = logging.getLogger(__name__)

# Fields of the ASGI scope that are sent to a replica.
_SCOPE_KEYS = (
    "type", "http_version", "method", "path", "raw_path", "query_string", "headers", "root_path", "scheme", "server",
    "client",
)  # fmt: skip
_PATIENCE = 5.0  # seconds within which a replica must answer /health and the like
_BY_NAME = re.compile(r"/v1/(?:responses|files)/([^/]+)(?:/.*)?")
_FOR_ALL = re.compile(r"/cache(/(?!precompute).*)?|/reset_mm_cache|/reset_prefix_cache|/metrics|/load")
_EVENT = re.compile(rb"^event: ", re.MULTILINE)
_WITH_BODY = ("POST", "PUT", "PATCH")  # methods whose requests have bodies
_TRIES = 3  # attempts with different replicas before the client gets an error
_DEAD = (ray.exceptions.RayActorError, ray.serve.exceptions.DeploymentUnavailableError)


class Ingress:
    """Ingress deployment of a service, in the form that Ray Serve needs.

    Args:
      engines: handle of the engine replicas.
      server: options of the server.
      secret: see `EngineReplica`.
    """

    def __init__(self, engines: DeploymentHandle[Any], server: ServerConfig, secret: bytes):
        self._app = IngressApp(engines, server, secret)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class IngressApp:
    """Ingress of a service (an ASGI application).

    Args:
      engines, server, secret: see `Ingress`.
    """

    def __init__(self, engines: DeploymentHandle[Any], server: ServerConfig, secret: bytes):
        register = None
        if server.api_keys is not None:
            register = Register(server.api_keys, server.admin_key, secret, lambda *_: None)
        self._engines, self._config = engines, server
        self._keys = Keys(_nothing, server, register)
        self._admission = AdmissionControl(server, register)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            path = path_of(scope).removeprefix(self._config.root_path)
            reply = _Reply(send, path)
            try:
                await self._take(path, scope, receive, reply)
            except ClientGoneError:
                pass
            except ApiError as error:
                await reply.fail(error)

    async def _take(self, path: str, scope: Scope, receive: Receive, reply: _Reply) -> None:
        """Read the body of a request, and answer it.

        The body of a request with a wrong key is not read. A replica answers it with the error.
        """
        has_body = scope["method"] in _WITH_BODY and path not in OPEN and self._keys.error(dict(scope)) is None
        if has_body:
            with self._admission.enter(scope) as place:
                config = self._config
                is_form = Headers(scope=scope).get("content-type", "").lower().startswith("multipart/")
                max_bytes = int(config.max_file_bytes) + FIELD_BYTES if is_form else int(config.max_body_bytes)
                body = await read_whole(scope, receive, config, max_bytes, place)
                await until_gone(receive, self._answer(path, scope, body, reply))
            return
        answering = self._answer(path, scope, b"", reply)
        if path not in OPEN:
            await answering
            return
        try:
            async with asyncio.timeout(_PATIENCE):
                await answering
        except TimeoutError:
            raise ApiError("no engine is ready; retry later", status=503, retry_after=1) from None

    async def _answer(self, path: str, scope: Scope, body: bytes, reply: _Reply) -> None:
        sent_scope = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
        if _FOR_ALL.fullmatch(path):
            await reply.send(await self._of_all(path, sent_scope, body))
            return
        seen = await asyncio.to_thread(see, path, body)
        for attempt in range(_TRIES):
            try:
                async with contextlib.aclosing(self._messages(seen, sent_scope, body)) as messages:
                    async for message in messages:
                        await reply.send([message])
                return
            except _DEAD as error:
                _log.warning("a replica ended: %s", error)
                if reply.has_begun or attempt == _TRIES - 1:
                    raise _gone() from None

    async def _messages(self, seen: SeenImages, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
        response = self._engines.options(stream=True).http.remote(seen, scope, body, holders=())
        try:
            async for some in response:
                for message in some:
                    yield message
        finally:
            response.cancel()  # without effect after its end

    async def _of_all(self, path: str, scope: Scope, body: bytes) -> list[Message]:
        """Return the answer to a request that is sent to all replicas, joined from theirs."""
        try:
            answers = await self._engines.broadcast("answer", scope, body).results_async()
        except _DEAD:
            raise _gone() from None
        if not answers:
            raise _gone()
        bad = [messages for _, messages in answers if messages[0]["status"] != 200]
        if bad:
            return bad[0]
        pages = {tag: b"".join(one.get("body", b"") for one in messages) for tag, messages in sorted(answers)}
        first = answers[0][1][0]
        content = _JOINED.get(path, _together)(pages)
        headers = [(name, value) for name, value in first["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(content)).encode()))
        return [{**first, "headers": headers}, {"type": "http.response.body", "body": content}]


def see(path: str, body: bytes) -> SeenImages:
    """Return the routing information of a request. The replica reports its errors.

    Args:
      path: path of the request without the root path.
      body: the body of the request.
    """
    if found := _BY_NAME.fullmatch(path):
        return SeenImages(engine=tag_in(found[1]))
    try:
        request = read_object(body)
        seen = look(request)
    except ValueError:
        return SeenImages()
    earlier = request.get("previous_response_id")
    named = earlier if isinstance(earlier, str) else seen.file
    return seen if named is None else dataclasses.replace(seen, engine=tag_in(named))


class _Reply:
    """Sender of an answer, which records its progress.

    Attributes:
      has_begun: True once the response's head has been sent.
    """

    def __init__(self, send: Send, path: str):
        self._send, self._path = send, path
        self.has_begun = self._is_stream = False
        self._events = 0

    async def send(self, messages: list[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                self.has_begun = True
                self._is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            else:
                self._events += len(_EVENT.findall(message.get("body", b"")))
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error as the response, or as the last event of a stream that has begun.

        Raises:
          ApiError: a response with a fixed length has begun. The server then closes the connection.
        """
        if not self.has_begun:
            response = refuse(error, self._path)
            await self.send([
                {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers},
                {"type": "http.response.body", "body": response.body},
            ])  # fmt: skip
            return
        if not self._is_stream:
            raise error
        name, event, done = b"event: error\n", error.to_dict(), b"data: [DONE]\n\n"
        if self._path == "/v1/responses":
            event = {"type": "error", "sequence_number": self._events} | {
                key: event["error"][key] for key in ("code", "message", "param")
            }
        elif self._path == MESSAGES_PATH:
            event, done = error.to_anthropic(f"req_{uuid.uuid4().hex}"), b""
        else:
            name = b""
        body = name + b"data: " + write(event) + b"\n\n" + done
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


class _Pages:
    """Metrics of all replicas with the label `engine`, the replica's tag.

    Args:
      pages: Prometheus text, by tag.
    """

    def __init__(self, pages: Mapping[str, bytes]):
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for tag, page in self._pages.items():
            for family in text_string_to_metric_families(page.decode()):
                own = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    own.add_sample(sample.name, {**sample.labels, "engine": tag}, sample.value)
        yield from joined.values()


def _metrics(pages: Mapping[str, bytes]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Pages(pages))
    return generate_latest(registry)


def _together(pages: Mapping[str, bytes]) -> bytes:
    """Return the joined JSON answers: sums of numbers, unions of lists, and true if one replica returned true."""
    joined: dict[str, Any] = {}
    for page in filter(None, pages.values()):
        for key, value in json.loads(page).items():
            if isinstance(value, list):
                joined[key] = list(dict.fromkeys([*joined.get(key, []), *value]))
            elif isinstance(value, bool):
                joined[key] = joined.get(key, False) or value
            else:
                joined[key] = joined.get(key, 0) + value
    return write(joined) if joined else b""


def _load(pages: Mapping[str, bytes]) -> bytes:
    return write({"server_load": sum(json.loads(page)["server_load"] for page in pages.values())})


def _stats(pages: Mapping[str, bytes]) -> bytes:
    return write({"engines": {tag: json.loads(page) for tag, page in pages.items()}})


_JOINED: Mapping[str, Callable[[Mapping[str, bytes]], bytes]] = {"/metrics": _metrics, "/load": _load, "/cache": _stats}


async def _live(receive: Receive, send: Send) -> None:
    """Answer ASGI's lifespan messages; there is nothing to do."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("only the keys are checked here")


def _gone() -> ApiError:
    """Return a new error. A raised one keeps its request in memory by the traceback."""
    return ApiError("the engine that answered has ended; send the request again", status=503, retry_after=1)
