"""`GET /metrics`: what Prometheus reads, with vLLM's names after our prefix where vLLM has the metric."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixkv.async_llm import AsyncLLM
from radixkv.engine.request_stream import OutputDelta
from radixkv.engine.stats import EngineStats
from radixkv.outputs import BeamSearchOutput

_PREFIX = "radixkv:"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ServerMetrics:
    """Everything that is measured of one server; a registry of its own, so that a process may have several."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(llm))

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=self.registry)

        self.first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.between_tokens = histogram("inter_token_latency_seconds", "From one token of a request to its next.")
        self.whole_request = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.finished = counter("request_success", "Choices that ended, by their finish reason.", ("finished_reason",))
        self.batch_sequences = histogram("iteration_sequences", "Sequences in a step.", _BATCH_SIZES)
        self.batch_tokens = histogram("iteration_tokens", "Tokens computed in a step.", _BATCH_SIZES)
        self._num_steps = llm.stats.num_steps
        llm.on_step = self._observe_step

    def _observe_step(self, stats: EngineStats) -> None:
        if stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self.batch_sequences.observe(stats.last_batch.num_sequences)
            self.batch_tokens.observe(stats.last_batch.num_tokens)


class RequestTimer:
    """Measures one request as its pieces come."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last: float | None = None

    def observe(self, piece: OutputDelta) -> None:
        metrics, times, now = self._metrics, piece.metrics, time.monotonic()
        if self._last is None and times.first_token_time is not None:
            metrics.first_token.observe(times.first_token_time - times.arrival_time)
        if isinstance(piece, BeamSearchOutput):
            counts = [len(beam.tokens) - piece.num_prompt_tokens for beam in piece.sequences]
            reasons = [beam.finish_reason for beam in piece.sequences]
            num_prompt_tokens, finished = piece.num_prompt_tokens, True
        else:
            counts = [len(output.token_ids) for output in piece.outputs]
            # An ended choice is in the pieces after its last as well, without tokens.
            reasons = [o.finish_reason for o in piece.outputs if o.finish_reason is not None and o.token_ids]
            num_prompt_tokens, finished = len(piece.prompt_token_ids), piece.finished
            # A slow reader's piece holds several tokens of a choice: they share the time between them.
            longest = max(counts, default=0)
            if self._last is not None and longest:
                for _ in range(longest):
                    metrics.between_tokens.observe((now - self._last) / longest)
        self._last = now
        metrics.generation_tokens.inc(sum(counts))
        for reason in reasons:
            metrics.finished.labels(reason).inc()
        if finished:
            metrics.prompt_tokens.inc(num_prompt_tokens)
            metrics.whole_request.observe((times.finished_time or now) - times.arrival_time)

    def observe_abort(self) -> None:
        self._metrics.finished.labels("abort").inc()


class _EngineCollector(Collector):
    """Reads the engine's own numbers, as they were after its latest step, when somebody asks."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        stats, cache = self._llm.stats, self._llm.stats.cache
        in_use = stats.num_blocks_in_use
        for name, text, value in [
            ("num_requests_running", "Requests of which at least one sequence runs.", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            ("kv_cache_usage_perc", "Blocks in use by running requests, 1 being all.", in_use / stats.num_blocks),
            ("draining", "1 while new requests are refused.", int(self._llm.draining)),
        ]:
            yield GaugeMetricFamily(_PREFIX + name, text, value)
        blocks = GaugeMetricFamily(_PREFIX + "kv_cache_blocks", "Blocks of the cache by state.", labels=["state"])
        blocks.add_metric(["free"], stats.num_free_blocks)
        blocks.add_metric(["held"], in_use)
        blocks.add_metric(["evictable"], stats.num_evictable_blocks)
        yield blocks
        for name, text, value in [
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", cache.queried_tokens),
            ("prefix_cache_hits", "Prompt tokens reused from the cache.", cache.reused_tokens),
            ("prompt_tokens_computed", "Prompt tokens computed.", cache.computed_tokens),
            ("prefix_cache_lookups", "Prompts looked up in the cache.", cache.opened_tables),
            ("evicted_blocks", "Cached blocks that gave way to others.", cache.evicted_blocks),
            ("copied_blocks", "Blocks copied because two owners would write different tokens.", cache.copied_blocks),
            ("deduplicated_blocks", "Blocks computed twice, of which one was kept.", cache.deduplicated_blocks),
            ("forked_sequences", "Sequences that began as forks of others.", cache.forked_tables),
            ("num_preemptions", "Times that a running request gave way.", stats.num_preemptions),
            ("num_steps", "Batches through the model.", stats.num_steps),
        ]:
            yield CounterMetricFamily(_PREFIX + name, text, value)


def metrics_routes(metrics: ServerMetrics) -> APIRouter:
    """`GET /metrics`; it needs no key, for it tells of nobody's prompts."""
    router = APIRouter()

    @router.get("/metrics", tags=["observation"], response_class=Response)
    async def read_metrics() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
