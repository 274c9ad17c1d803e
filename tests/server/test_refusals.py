"""What is refused costs nothing: no picture is decoded, nobody is asked, the engine's thread does not see it."""

from __future__ import annotations

import threading

import pytest

from research import refusals
from tests.helper import SIZES, WITHIN
from vlcache_jax import AsyncLLM
from vlcache_jax.engine import grammars
from vlcache_jax.inputs.images import ImageSource


@pytest.fixture(scope="module")
def engine(checkpoints):
    options = SIZES | {"allow_remote_images": True, "allowed_media_domains": list(refusals.DOMAINS)}
    engine = AsyncLLM(checkpoints("qwen3_vl"), use_tqdm=False, allowed_local_media_path=None, **options)
    yield engine
    engine.service.close()


@pytest.mark.ladder
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
    monkeypatch.setattr(refusals.Neighbour, "_ask", lambda self: (200, self.answers + len(self.wrong)))
    with pytest.raises(AssertionError):
        refusals.measure(serve().port, refusals.large()[:3], WITHIN)
