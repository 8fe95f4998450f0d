"""Prometheus metrics, with the names that dashboards for vLLM read, under the prefix ``jaxsqueeze:``.

Each app has its own registry. Engine gauges are read from the engine's last statistics when scraped; the rest is
counted on the event loop as answers are delivered, so what is counted is what clients got. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxsqueeze.server.worker import Worker
from jaxsqueeze.types import FinishReason

PREFIX = "jaxsqueeze:"
_LABEL = "model_name"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_LONG = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


class EngineCollector(Collector):
    """The engine's own state, from its statistics after the latest step."""

    def __init__(self, model_name: str, worker: Worker) -> None:
        self._labels, self._worker = [model_name], worker

    def collect(self) -> Iterator[Any]:
        stats, engine = self._worker.stats, self._worker.engine
        if stats is None:
            return
        used, total = sum(stats.pages_used), sum(stats.pages_total)
        gauges = {
            "num_requests_running": ("Requests being computed.", stats.running),
            "num_requests_waiting": ("Requests waiting for a slot or pages.", stats.waiting),
            "kv_cache_usage_perc": ("Share of the KV pages in use; 1 is all of them.", used / total if total else 0.0),
            "page_tail_waste_ratio": ("Unused places at the ends of sequences / live tokens.", stats.page_tail_waste),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=[_LABEL])
            family.add_metric(self._labels, value)
            yield family
        counters = {
            "num_preemptions": ("Requests put back to wait.", stats.preemptions),
            "compilations": ("Programs compiled since ready: more than 0 is a fault.", engine.compiles_since_ready),
        }
        for name, (text, value) in counters.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=[_LABEL])
            family.add_metric(self._labels, value)
            yield family


class Metrics:
    def __init__(self, model_name: str, worker: Worker) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model_name, worker))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, [_LABEL, *labels], registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, text, [_LABEL], buckets=buckets, registry=self._registry)
            return made.labels(model_name)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began.").labels(model_name)
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens not computed.").labels(model_name)
        self.generation_tokens = counter("generation_tokens", "Tokens delivered.").labels(model_name)
        finished = counter("request_success", "Requests finished, by reason.", "finished_reason")
        self.finished = {reason: finished.labels(model_name, str(reason)) for reason in FinishReason}
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SHORT)
        self.inter_token = histogram("inter_token_latency_seconds", "Between tokens of a request.", _SHORT)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after the first.", _SHORT
        )
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.output_length = histogram("request_generation_tokens", "Delivered tokens per request.", _TOKENS)
        self.choices = histogram("request_params_n", "Choices asked for per call.", _CHOICES)

    def exposition(self) -> bytes:
        """Text format of Prometheus."""
        return generate_latest(self._registry)


class RequestTimes:
    """One request's observations, from arrival until it ends; each request ends exactly once."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics, self._prompt_tokens = metrics, prompt_tokens
        self._arrival = time.monotonic()
        self._first = self._last = None
        self._tokens = 0
        self._ended = False

    def tokens(self, count: int, cached: int) -> None:
        """``count`` tokens were delivered together; ``cached`` of the prompt were not computed."""
        if not count:
            return
        now, metrics = time.monotonic(), self._metrics
        metrics.generation_tokens.inc(count)
        if self._last is None:
            self._first = now
            metrics.first_token.observe(now - self._arrival)
            metrics.prompt_tokens.inc(self._prompt_tokens)
            metrics.cached_tokens.inc(cached)
        else:
            for _ in range(count):
                metrics.inter_token.observe((now - self._last) / count)
        self._last = now
        self._tokens += count

    def ended(self, reason: FinishReason) -> None:
        if self._ended:
            return
        self._ended = True
        now, metrics = time.monotonic(), self._metrics
        metrics.finished[reason].inc()
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if self._first is None:  # max_tokens 0: only the prompt was computed
            metrics.prompt_tokens.inc(self._prompt_tokens)
        metrics.latency.observe(now - self._arrival)
        metrics.prompt_length.observe(self._prompt_tokens)
        metrics.output_length.observe(self._tokens)
        if self._tokens > 1:
            metrics.per_token.observe((self._last - self._first) / (self._tokens - 1))
