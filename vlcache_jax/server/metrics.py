"""What Prometheus is told: vLLM's names where the meaning is the same, under the prefix `vlcache:`."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.outputs import RequestMetrics
from vlcache_jax.protocol.answers import Counts
from vlcache_jax.server.room import Room
from vlcache_jax.server.stored import StoredResponses

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServerMetrics:
    """Counts what a server answers.

    Args:
      model: as clients call it.
    """

    def __init__(self, model: str, engine: AsyncLLM, room: Room, stored: StoredResponses):
        self._engine, self._registry = engine, prometheus_client.CollectorRegistry()
        self._registry.register(_Gauges(model, engine, room, stored))
        counter, histogram = prometheus_client.Counter, prometheus_client.Histogram

        def counting(name: str, about: str) -> prometheus_client.Counter:
            return counter(f"vlcache:{name}", about, ("model_name",), registry=self._registry).labels(model)

        def timing(name: str, about: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
            told = histogram(f"vlcache:{name}", about, ("model_name",), buckets=buckets, registry=self._registry)
            return told.labels(model)

        self._prompt = counting("prompt_tokens", "Tokens of prompts")
        self._generated = counting("generation_tokens", "Tokens of answers")
        self._asked = counting("prefix_cache_queries", "Tokens of prompts that were looked for")
        self._cached = counting("prefix_cache_hits", "Tokens of prompts that were reused")
        self._ended = counter(
            "vlcache:request_success", "Answers that ended", ("model_name", "finished_reason"), registry=self._registry
        )
        self._corrupted = counting("corrupted_requests", "Requests that ended by logits that were not finite")
        self._model = model
        self._first = timing("time_to_first_token_seconds", "From the beginning to the first token", _FIRST)
        self._between = timing("inter_token_latency_seconds", "From one delivery of tokens to the next", _BETWEEN)
        self._whole = timing("e2e_request_latency_seconds", "From the beginning to the end", _WHOLE)
        self._queue = timing("request_queue_time_seconds", "From arrival until it ran", _WHOLE)
        self._prefill = timing("request_prefill_time_seconds", "That computed the prompt", _WHOLE)
        self._decode = timing("request_decode_time_seconds", "From the first token to the last", _WHOLE)
        self._prompts = timing("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._answers = timing("request_generation_tokens", "Tokens of the answers to a request", _TOKENS)

    def gaps(self, metrics: RequestMetrics) -> None:
        """More of an answer came."""
        for seconds in metrics.inter_token:
            self._between.observe(seconds)

    def ended(self, reason: str) -> None:
        """One answer ended."""
        self._ended.labels(self._model, reason).inc()

    def corrupted(self) -> None:
        """A request ended by logits that were not finite."""
        self._corrupted.inc()

    def answered(self, counts: Counts, metrics: RequestMetrics) -> None:
        """All answers to a prompt ended."""
        self._prompt.inc(counts.prompt)
        self._generated.inc(counts.completion)
        self._asked.inc(counts.prompt)
        self._cached.inc(counts.cached)
        self._first.observe(metrics.ttft)
        self._whole.observe(metrics.e2e)
        self._queue.observe(metrics.queue)
        self._prefill.observe(metrics.prefill)
        self._decode.observe(metrics.decode)
        self._prompts.observe(counts.prompt)
        self._answers.observe(counts.completion)

    def page(self) -> bytes:
        """What has been counted, and what the cache counts."""
        return b"".join(map(prometheus_client.generate_latest, (self._registry, self._engine.cache.registry)))


class _Gauges(Collector):
    """What the engine does now, and what the server holds."""

    def __init__(self, model: str, engine: AsyncLLM, room: Room, stored: StoredResponses):
        self._model, self._engine, self._room, self._stored = model, engine, room, stored

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        stats, (responses, response_bytes) = self._engine.stats(), self._stored.counts()
        gauges = [
            ("num_requests_coming", "Requests whose bodies are still coming", self._room.coming),
            ("request_body_bytes", "Of requests under way, and of bodies that are coming", self._room.nbytes),
            ("stored_responses", "Responses that are kept", responses),
            ("stored_response_bytes", "Of these, as JSON", response_bytes),
            ("num_requests_running", "Answers that run", stats.running),
            ("num_requests_waiting", "Answers that wait for room", stats.waiting),
            ("kv_cache_usage_perc", "Share of the KV pool that requests use, 1 is all", stats.in_use / stats.pages),
        ]
        counters: list[tuple[str, str, float]] = []
        if stats.compressed_pages:
            share = stats.compressed_in_use / stats.compressed_pages
            gauges += [
                ("compressed_kv_cache_usage_perc", "The same of the pool for compressed prompts", share),
                ("compressed_aside_bytes", "Of compressed answers that wait in host memory", stats.aside_bytes),
            ]
            counters = [
                ("compressed", "Answers that went on with a part of their prompts", stats.compressed),
                ("uncompressed", "Answers that were to, and went on with the whole", stats.uncompressed),
                ("compressed_put_aside", "Times that one gave up its pages", stats.put_aside),
                ("compressed_brought_back", "Times that one had them again", stats.brought_back),
                ("compressed_moved_bytes", "That were copied there and back", stats.moved_bytes),
            ]
        for family, told in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, about, value in told:
                metric = family(f"vlcache:{name}", about, labels=("model_name",))
                metric.add_metric((self._model,), value)
                yield metric
