"""Anthropic's Messages API: chats with other fields, and thinking that is signed."""

from __future__ import annotations

import dataclasses
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlcache_jax.protocol.anthropic_answers import MessageAnswer
from vlcache_jax.protocol.anthropic_requests import MessageRequest
from vlcache_jax.protocol.requests import ChatRequest
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.http_layer import as_api_error
from vlcache_jax.server.inference import Chats
from vlcache_jax.server.tenants import Tenant, salted


class Signatures:
    """Signatures of thinking blocks, by which the server recognizes its own thinking when a client sends it back.

    Args:
      secret: the secret of the server, see `server_secret`. None: a new one, which lasts as long as the process.
    """

    def __init__(self, secret: bytes | None = None):
        self._secret = secrets.token_bytes() if secret is None else secret

    def sign(self, text: str) -> str:
        """Return the signature of a thinking block, 64 hex digits."""
        # The prefix differs from those of `Salts`, which may use the same secret.
        content = b"thinking:" + text.encode(errors="surrogatepass")
        return hmac.new(self._secret, content, "sha256").hexdigest()

    def fits(self, text: str, signature: str) -> bool:
        """Return whether a signature is that of a thinking block."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode(errors="surrogatepass"))


@dataclass(frozen=True)
class MessagesRequest(ChatRequest):
    """Chat request made from a request to `/v1/messages`.

    Attributes:
      request: the request for the message.
    """

    request: MessageRequest = field(kw_only=True)


class Messages(Chats):
    """Handler of `/v1/messages`."""

    prefix = "msg_"
    longest = "send at most this number"
    keep_alive, done = b'event: ping\ndata: {"type": "ping"}\n\n', b""

    def __init__(self, *given: Any, signatures: Signatures):
        super().__init__(*given)
        self._signatures = signatures

    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> MessagesRequest:
        return self._message_request(body)

    def read_prompt(self, body: dict[str, Any], tenant: Tenant | None) -> MessagesRequest:
        """Return the request of a body of `/v1/messages/count_tokens`.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        return self._message_request(body, is_count=True)

    async def count_tokens(self, request: MessagesRequest, tenant: Tenant | None) -> Mapping[str, Any]:
        """Return the number of tokens of a request's prompt. It decodes no image.

        Raises:
          ApiError: the model's name or a message is wrong.
        """
        self.models.resolve(request.options.model)
        options = salted(request.request_options, self._register, tenant)
        try:
            tokens = await self.engine.tokenize(request.messages, options=options, **self._template(request))
        except ValueError as error:
            raise self._error(error, request, self.field) from error
        return {"input_tokens": len(tokens)}

    def _message_request(self, body: dict[str, Any], *, is_count: bool = False) -> MessagesRequest:
        template = self._format.template() or ""
        request = MessageRequest.parse(body, template, self._signatures.fits, is_count=is_count)
        try:
            chat = self._chat_request(request.chat)
        except ValueError as error:
            raise request.error(as_api_error(error)) from error
        given = {own.name: getattr(chat, own.name) for own in dataclasses.fields(ChatRequest)}
        return MessagesRequest(**given, request=request)

    def _error(self, error: ValueError, request: ChatRequest, field: str) -> ApiError:
        assert isinstance(request, MessagesRequest)
        return request.request.error(super()._error(error, request, field))

    def _begin(self, request: ChatRequest, name: str, model: str) -> MessageAnswer:
        return MessageAnswer(self._format.answer(request, name, model), self._signatures.sign)
