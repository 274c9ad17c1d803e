"""The recipes: what is said to fit is counted, commands exist, and requests are answered."""

from __future__ import annotations

import json
import re

import pytest

from tests.helper import SIZES, with_thinking_tags
from tests.server.helper import running
from tests.test_docs import ROOT, table, understood
from vlcache_jax import AsyncLLM
from vlcache_jax.commands.info import describe
from vlcache_jax.models.registry import SIZES as PUBLISHED
from vlcache_jax.testing import make_checkpoint

PAGE = "docs/guides/recipes.md"
ROWS = table(PAGE, "model | weights in | GPU")
FAMILIES = sorted({PUBLISHED[name].model_type for name, *_ in ROWS})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_recipe_fits_and_has_a_command(row):
    name, bits, gpu, command, tokens, outputs, largest = row
    words = command.strip("`").split()
    understood(words)
    hub = words[-1].removeprefix("Qwen/")
    assert hub == name.removesuffix("-FP8") + "-Instruct" * ("VL" in name) + "-FP8" * (bits == "FP8")
    [fit] = [one for one in describe(name, "auto", 1024, 1024)[1] if (one["GPU"], one["weights in"]) == (gpu, bits)]
    found = [str(fit["tokens"]), str(fit.get("sequences", 64)), fit["largest image"].replace(" million pixels", " MP")]
    assert found == [tokens, outputs, largest]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_is_answered(family, tmp_path):
    bodies = [json.loads(text) for text in re.findall(r"(?ms)^```json\n(.*?)^```$", (ROOT / PAGE).read_text())]
    assert len(bodies) == 5
    directory = with_thinking_tags(make_checkpoint(tmp_path / "made", family), tmp_path / "model")
    template = "qwen3.5" if family.startswith("qwen3_5") else None
    engine = AsyncLLM(directory, use_tqdm=False, **SIZES | {"max_model_len": 4096, "kv_cache_bytes": 2**25})
    try:
        with running(engine, chat_template=template) as served:
            for body in [*bodies, bodies[0]]:
                status, found = served.json("POST", "/v1/chat/completions", body)
                assert status == 200, found
                [choice] = found["choices"]
                assert choice["finish_reason"] in ("stop", "length")
                assert found["usage"]["completion_tokens"] > 0
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert [image["match"] for image in found["cache"]["images"]] == ["exact"]
    finally:
        engine.service.close()
