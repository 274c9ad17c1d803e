"""One engine for all tests of a module, and clients of the official library."""

from __future__ import annotations

import openai
import pytest

from tests.helper import SIZES, assert_nothing_left, eventually
from tests.server.helper import running
from vlcache_jax import AsyncLLM


@pytest.fixture(scope="module")
def engine(checkpoints):
    engine = AsyncLLM(
        checkpoints("qwen3_vl"), use_tqdm=False, allowed_local_media_path=None, compressed_kv_bytes=2**22, **SIZES
    )
    yield engine
    engine.service.close()


@pytest.fixture
def serve(engine):
    """(options) -> a server; nothing may be left behind in the end."""
    import contextlib

    with contextlib.ExitStack() as stack:
        opened = []

        def make(**options):
            opened.append(stack.enter_context(running(engine, **options)))
            return opened[-1]

        yield make
        assert eventually(lambda: not any(one.server.admission.inside for one in opened))
    assert_nothing_left(engine)


@pytest.fixture
def client():
    """(a server) -> OpenAI's client of it, which holds every answer against its types."""
    opened = []

    def make(served, key="none", *, strict=True, **options):
        url = f"http://127.0.0.1:{served.port}/v1"
        given = {"max_retries": 0, "timeout": 60} | options
        opened.append(openai.OpenAI(base_url=url, api_key=key, _strict_response_validation=strict, **given))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
