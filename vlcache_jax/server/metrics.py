"""Prometheus metrics with the prefix `vlcache:`. If a metric has vLLM's meaning, it has vLLM's name.

Dashboards and autoscalers for vLLM read the prefix `vllm:`. `ServerConfig.metrics_prefix` gives it to these metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.engine.engine import EngineStats
from vlcache_jax.outputs import RequestMetrics
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.protocol.answers import Counts
from vlcache_jax.server.room import Room
from vlcache_jax.server.stored import StoredResponses

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
OURS, VLLM = "vlcache:", "vllm:"
# Metrics of vLLM 0.33 that mean the same here.
AS_VLLM = frozenset({
    "cache_config", "corrupted_requests", "e2e_request_latency_seconds", "generation_tokens",
    "inter_token_latency_seconds", "kv_cache_usage_perc", "mm_cache_hits", "mm_cache_queries", "num_preemptions",
    "num_requests_running", "num_requests_waiting", "prefix_cache_hits", "prefix_cache_queries", "prompt_tokens",
    "request_decode_time_seconds", "request_generation_tokens", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_prompt_tokens", "request_queue_time_seconds", "request_success",
    "request_time_per_output_token_seconds", "time_to_first_token_seconds",
})  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServerMetrics:
    """Metrics of a server.

    Args:
      model: the value of the label `model_name`.
      engine: the engine, whose queue and KV pool are measured.
      room: the counter of requests and bodies.
      stored: the stored responses.
      prefix: see `ServerConfig.metrics_prefix`.

    Attributes:
      requests: number of prompts all answers of which have ended.
    """

    def __init__(self, model: str, engine: AsyncLLM, room: Room, stored: StoredResponses, prefix: str = "vlcache"):
        self._engine, self._registry = engine, prometheus_client.CollectorRegistry()
        self._shown = _Prefixed(self._registry, prefix)
        self._registry.register(_Gauges(model, engine, room, stored))
        counter, histogram = prometheus_client.Counter, prometheus_client.Histogram

        def counting(name: str, about: str) -> prometheus_client.Counter:
            return counter(f"vlcache:{name}", about, ("model_name",), registry=self._registry).labels(model)

        def timing(name: str, about: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
            family = histogram(f"vlcache:{name}", about, ("model_name",), buckets=buckets, registry=self._registry)
            return family.labels(model)

        self._prompt = counting("prompt_tokens", "Number of prompt tokens")
        self._generated = counting("generation_tokens", "Number of generated tokens")
        self._queried = counting("prefix_cache_queries", "Number of prompt tokens looked up in the cache")
        self._cached = counting("prefix_cache_hits", "Number of prompt tokens reused from the cache")
        self._ended = counter(
            "vlcache:request_success", "Number of finished answers by finish reason",
            ("model_name", "finished_reason"), registry=self._registry,
        )  # fmt: skip
        self._corrupted = counting("corrupted_requests", "Number of requests that ended with non-finite logits")
        self._model, self.requests = model, 0
        self._first = timing("time_to_first_token_seconds", "Time to first token in seconds", _FIRST)
        self._between = timing("inter_token_latency_seconds", "Time between deliveries of tokens in seconds", _BETWEEN)
        self._whole = timing("e2e_request_latency_seconds", "End-to-end latency of a request in seconds", _WHOLE)
        self._queue = timing("request_queue_time_seconds", "Time from arrival to the first prefill in seconds", _WHOLE)
        self._prefill = timing("request_prefill_time_seconds", "Time of the prefill in seconds", _WHOLE)
        self._decode = timing("request_decode_time_seconds", "Time from the first to the last token in seconds", _WHOLE)
        self._inference = timing("request_inference_time_seconds", "Time of prefill and decode in seconds", _WHOLE)
        self._each = timing(
            "request_time_per_output_token_seconds", "Time per token after the first of a request in seconds", _BETWEEN
        )
        self._prompts = timing("request_prompt_tokens", "Number of prompt tokens of a request", _TOKENS)
        self._answers = timing("request_generation_tokens", "Number of generated tokens of a request", _TOKENS)

    def gaps(self, metrics: RequestMetrics) -> None:
        """Observe the inter-token latencies of a delta."""
        for seconds in metrics.inter_token:
            self._between.observe(seconds)

    def ended(self, reason: str) -> None:
        """Count a finished answer by its finish reason."""
        self._ended.labels(self._model, reason).inc()

    def corrupted(self) -> None:
        """Count a request that ended with non-finite logits."""
        self._corrupted.inc()

    def answered(self, counts: Counts, metrics: RequestMetrics) -> None:
        """Count the tokens and times of a prompt, all answers of which have ended."""
        self.requests += 1
        self._prompt.inc(counts.prompt)
        self._generated.inc(counts.completion)
        self._queried.inc(counts.prompt)
        self._cached.inc(counts.cached)
        self._first.observe(metrics.ttft)
        self._whole.observe(metrics.e2e)
        self._queue.observe(metrics.queue)
        self._prefill.observe(metrics.prefill)
        self._decode.observe(metrics.decode)
        self._inference.observe(metrics.prefill + metrics.decode)
        if counts.completion > 1:
            self._each.observe(metrics.decode / (counts.completion - 1))
        self._prompts.observe(counts.prompt)
        self._answers.observe(counts.completion)

    def page(self) -> bytes:
        """Return the metrics of the server and of its cache in Prometheus' text format."""
        return b"".join(map(prometheus_client.generate_latest, (self._shown, self._engine.cache.registry)))


class TrafficLog:
    """Maker of lines about the traffic since the line before.

    Args:
      engine: the engine.
      requests: returns the number of requests that have ended.
    """

    def __init__(self, engine: AsyncLLM, requests: Callable[[], int]):
        self._engine, self._requests = engine, requests
        self._before = self._now(engine.stats())

    def line(self, seconds: float) -> str | None:
        """Return a line about the last `seconds`, or None if nothing was computed, runs or waits."""
        stats, before = self._engine.stats(), self._before
        self._before = now = self._now(stats)
        new = {name: now[name] - before[name] for name in now}
        if not (any(new.values()) or stats.running or stats.waiting):
            return None
        hits = new["hits"] / new["images"] if new["images"] else 0
        return (
            f"{new['requests'] / seconds:.1f} requests/s, {new['prompt'] / seconds:.0f} prompt tokens/s computed, "
            f"{new['output'] / seconds:.0f} tokens/s generated; {stats.running} running, {stats.waiting} waiting; "
            f"KV pool {100 * stats.in_use / stats.pages:.0f} % in use, {new['found'] / seconds:.0f} tokens/s found in "
            f"it; {new['images']} images, {100 * hits:.0f} % cached"
        )

    def _now(self, stats: EngineStats) -> dict[str, int]:
        images = self._engine.cache.stats()
        return {
            "requests": self._requests(),
            "prompt": stats.prefill_rows - stats.padded_prefill_rows,
            "output": stats.decode_rows - stats.padded_decode_rows,
            "found": stats.hit_tokens,
            "images": images.lookups,
            "hits": images.encoder_hits,
        }


class _Prefixed(prometheus_client.CollectorRegistry):
    """View of a registry whose metrics have the prefix of vLLM if vLLM has them, or both prefixes."""

    def __init__(self, registry: prometheus_client.CollectorRegistry, prefix: str):
        super().__init__()
        self._inner, self._prefix = registry, prefix

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            is_shared = metric.name.removeprefix(OURS) in AS_VLLM
            if self._prefix != "vllm" or not is_shared:
                yield metric
            if self._prefix != "vlcache" and is_shared:
                renamed = Metric(_vllm(metric.name), metric.documentation, metric.type, metric.unit)
                renamed.samples = [sample._replace(name=_vllm(sample.name)) for sample in metric.samples]
                yield renamed


def _vllm(name: str) -> str:
    return VLLM + name.removeprefix(OURS)


class _Gauges(Collector):
    """Metrics that are read from the engine and the server at each scrape."""

    def __init__(self, model: str, engine: AsyncLLM, room: Room, stored: StoredResponses):
        self._model, self._engine, self._room, self._stored = model, engine, room, stored

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        stats, (responses, response_bytes) = self._engine.stats(), self._stored.counts()
        images = self._engine.cache.stats()
        config = {name: str(value) for name, value in self._config(stats.pages).items()}
        info = InfoMetricFamily(f"{OURS}cache_config", "Configuration of the KV pool and the image cache")
        info.add_metric((), {"model_name": self._model, **config})
        yield info
        gauges = [
            ("num_requests_coming", "Number of requests whose bodies are being received", self._room.coming),
            ("request_body_bytes", "Bytes of bodies that are being received or in flight", self._room.nbytes),
            ("stored_responses", "Number of stored responses", responses),
            ("stored_response_bytes", "Bytes of stored responses as JSON", response_bytes),
            ("num_requests_running", "Number of running sequences", stats.running),
            ("num_requests_waiting", "Number of waiting sequences", stats.waiting),
            ("kv_cache_usage_perc", "Fraction of the KV pool in use (0 to 1)", stats.in_use / stats.pages),
        ]
        counters: list[tuple[str, str, float]] = [
            ("num_preemptions", "Number of preempted sequences", stats.preemptions),
            ("mm_cache_queries", "Number of images looked up in the image cache", images.lookups),
            ("mm_cache_hits", "Number of images whose encoder output was cached", images.encoder_hits),
            ("page_hits", "Number of sequences that found tokens in the KV pool", stats.hits),
            ("page_hit_tokens", "Number of prompt tokens found in the KV pool", stats.hit_tokens),
            ("page_copies", "Number of KV blocks copied to continue in the middle of them", stats.copies),
            ("page_evictions", "Number of kept KV blocks that were evicted", stats.evictions),
        ]
        if stats.max_snapshots:
            gauges.append(("state_snapshots", "Number of snapshots of states on the device", stats.snapshots))
            counters += [
                ("state_snapshot_evictions", "Number of snapshots evicted or not taken", stats.snapshot_evictions),
                ("state_snapshot_returns", "Number of snapshots loaded from host memory", stats.snapshot_returns),
                ("unresumed_tokens", "Prompt tokens with KV that were computed again", stats.unresumed_tokens),
            ]
        if stats.compressed_pages:
            fraction = stats.compressed_in_use / stats.compressed_pages
            gauges += [
                ("compressed_kv_cache_usage_perc", "Fraction of the compressed KV pool in use (0 to 1)", fraction),
                ("compressed_swapped_bytes", "Bytes of swapped-out compressed KV in host memory", stats.swapped_bytes),
            ]
            counters += [
                ("compressed", "Number of answers that decoded with compressed KV", stats.compressed),
                (
                    "uncompressed",
                    "Number of answers with full KV despite compression",
                    stats.uncompressed,
                ),
                ("compressed_swapped_out", "Number of swap-outs of compressed sequences", stats.swapped_out),
                ("compressed_swapped_in", "Number of swap-ins of compressed sequences", stats.swapped_in),
                ("compressed_moved_bytes", "Bytes of compressed KV copied by swapping", stats.moved_bytes),
            ]
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, about, value in values:
                metric = family(f"{OURS}{name}", about, labels=("model_name",))
                metric.add_metric((self._model,), value)
                yield metric

    def _config(self, blocks: int) -> dict[str, object]:
        """Return the labels of `cache_config_info`, under vLLM's names where it has them."""
        config, runner = self._engine.service.config, self._engine.service.device.runner
        cache = {name: getattr(config.cache, name) for name in ("host_bytes", "codec", "load", "donors")}
        return {
            "block_size": PAGE,
            "num_gpu_blocks": blocks,
            "cache_dtype": runner.dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            **cache,
        }
