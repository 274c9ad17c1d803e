"""Metrics under the names of vLLM, and the dashboard that reads ours."""

import asyncio
import contextlib
import json
import pathlib
import re
import types

import pytest

from tests.server.helper import data_url, shows
from vlcache_jax.server import lifecycle
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.metrics import AS_VLLM

CHAT = "/v1/chat/completions"
DASHBOARD = pathlib.Path(__file__).parents[2] / "deploy" / "grafana.json"


def samples(served):
    """Values of the page by name and labels."""
    page = served.ask("GET", "/metrics")[2].decode()
    return dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))


def names(found):
    return {line.partition("{")[0] for line in found}


def ask(served, textured_image):
    body = {"messages": shows(data_url(textured_image(64, 64, 3))), "max_tokens": 4, "ignore_eos": True}
    for _ in range(2):
        assert served.ask("POST", CHAT, body)[0] == 200


@pytest.mark.parametrize("prefix", ["vlcache", "vllm", "both"])
def test_metrics_that_vllm_has_are_under_its_names(serve, engine, textured_image, prefix):
    engine.service.reset_mm_cache()
    served = serve(served_model_name=["tiny"], metrics_prefix=prefix)
    before = samples(served)
    ask(served, textured_image)
    found = samples(served)
    suffixes = "", "_total", "_bucket", "_info"
    for name in AS_VLLM - {"corrupted_requests"}:
        theirs, ours = (any(f"{one}:{name}{end}" in names(found) for end in suffixes) for one in ("vllm", "vlcache"))
        assert (theirs, ours) == (prefix != "vlcache", prefix != "vllm"), name
    assert "vllm:page_hits_total" not in names(found)
    own = "vlcache" if prefix == "both" else prefix
    grown = {
        name: float(found[f'{own}:{name}{{model_name="tiny"}}']) - float(before[f'{own}:{name}{{model_name="tiny"}}'])
        for name in (
            "mm_cache_queries_total", "mm_cache_hits_total", "num_preemptions_total",
            "request_time_per_output_token_seconds_count", "request_inference_time_seconds_count",
        )
    }  # fmt: skip
    assert list(grown.values()) == [2, 1, 0, 2, 2]
    assert float(found['vlcache:page_hits_total{model_name="tiny"}']) > 0
    [info] = [line for line in found if line.startswith(f"{own}:cache_config_info")]
    assert 'block_size="128"' in info


def test_the_dashboard_reads_metrics_that_there_are(serve, textured_image):
    served = serve(served_model_name=["tiny"])
    ask(served, textured_image)
    known = names(samples(served)) | {  # appear after the first event of a tier
        "vlcache_tier_events_total", "vlcache_tier_bytes_total", "vlcache_tier_seconds_bucket",
    }  # fmt: skip
    board = json.loads(DASHBOARD.read_text())
    [model] = [one for one in board["templating"]["list"] if one["name"] == "model"]
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]] + [model["query"]]
    assert len(texts) > 20
    for text in texts:
        read = set(re.findall(r"vlcache[:_]\w+", text))
        assert read, text
        assert read <= known, read - known
        assert text.count("(") == text.count(")")
        assert text.count("{") == text.count("}")


def test_a_line_about_traffic(engine, textured_image, serve):
    """It counts what came since the line before, and there is none without traffic."""
    engine.service.reset_mm_cache()
    served = serve()
    traffic = served.server.traffic
    traffic.line(10.0)
    assert traffic.line(10.0) is None
    ask(served, textured_image)
    found = traffic.line(10.0)
    assert re.match(
        r"0\.2 requests/s, \d+ prompt tokens/s computed, \d tokens/s generated; 0 running, 0 waiting;", found
    )
    assert found.endswith("; 2 images, 50 % cached")
    assert traffic.line(10.0) is None


@pytest.mark.parametrize("log_traffic", [True, False])
def test_lines_are_printed_unless_turned_off(monkeypatch, capsys, log_traffic):
    lines = iter(["first", None, "second"])
    server = types.SimpleNamespace(
        config=ServerConfig(log_traffic=log_traffic), traffic=types.SimpleNamespace(line=lambda seconds: next(lines))
    )
    monkeypatch.setattr(lifecycle, "_LOG", 0.0)
    with contextlib.suppress(RuntimeError):  # when there are no more lines
        asyncio.run(lifecycle.log_traffic(server))
    printed = capsys.readouterr().err
    assert [line for line in ("first", "second") if line in printed] == (["first", "second"] if log_traffic else [])


def test_another_prefix_is_refused():
    with pytest.raises(ValueError, match=r"metrics_prefix must be vlcache or vllm or both, got 'prometheus'"):
        ServerConfig(metrics_prefix="prometheus")
