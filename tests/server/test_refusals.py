"""What is refused costs nothing: no picture is decoded, nobody is asked, the engine's thread does not see it."""

from __future__ import annotations

import threading

import pytest

from research import refusals
from tests.helper import SIZES, WITHIN
from vlcache_jax import AsyncLLM
from vlcache_jax.engine import grammars
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import refuse
from vlcache_jax.server.uploaded_files import _error


@pytest.fixture(scope="module")
def engine(checkpoints):
    options = SIZES | {"allow_remote_images": True, "allowed_media_domains": list(refusals.DOMAINS)}
    engine = AsyncLLM(checkpoints("qwen3_vl"), use_tqdm=False, allowed_local_media_path=None, **options)
    yield engine
    engine.service.close()


@pytest.mark.slow
def test_rows_are_refused_and_nobody_else_is_harmed(serve, monkeypatch):
    touched, threads = [], set()

    def fill(*given):
        threads.add(threading.current_thread().name.rsplit("_", 1)[0])
        return real(*given)

    real = grammars._fill
    monkeypatch.setattr(grammars, "_fill", fill)
    monkeypatch.setattr(ImageSource, "decode", lambda *given: touched.append(given))
    served = serve(max_body_bytes=refusals.MAX_BODY)
    with refusals.bait() as (port, listener):
        rows = refusals.all_rows(port)
        told = refusals.measure(served.port, rows, WITHIN)
        assert not refusals.was_taken(listener)
    assert touched == []
    assert threads <= {"vlcache-grammars", "vlcache-masks"}
    assert [(one["table"], one["what"]) for one in told] == [(row.table, row.name) for row in rows]
    assert {row.table for row in rows} == {"SSRF", "body size", "decode bomb", "grammar bomb"}
    assert len({row.name for row in rows}) == len(rows) > 70


def test_an_answer_beside_that_differs_is_found(serve, monkeypatch):
    monkeypatch.setattr(refusals.Neighbor, "_ask", lambda self: (200, self.answers + len(self.wrong)))
    with pytest.raises(AssertionError):
        refusals.measure(serve().port, refusals.large()[:3], WITHIN)


@pytest.mark.parametrize("status", [400, 401, 402, 403, 503])
def test_who_may_show_a_key_is_told_so(status):
    headers = refuse(ApiError("no", status=status)).headers
    assert headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_what_is_wrong_with_a_file_is_said_of_the_field():
    """Clients call it file, and not image."""
    error = _error(ValueError("image must be an image that Pillow can read, got 5 bytes"))
    assert (error.message, error.param) == ("file must be an image that Pillow can read, got 5 bytes", "file")
    assert (_error(ValueError("metadata must be JSON")).param, error.status) == ("metadata", 400)


@pytest.mark.parametrize(("name", "known"), [("allow_reuse", "full"), ("allow_compress", "random-0.5")])
def test_what_no_request_could_ask_for_is_not_allowed(name, known):
    with pytest.raises(ValueError, match=f"^{name} must be .*'most'"):
        ServerConfig(**{name: [known, "most"]})
    assert getattr(ServerConfig(**{name: [known]}), name) == (known,)
