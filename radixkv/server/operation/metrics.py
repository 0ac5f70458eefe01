"""`GET /metrics` for Prometheus, with vLLM's metric names after our prefix where vLLM has the metric."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixkv.engine.stats import EngineStats
from radixkv.outputs import BeamSearchOutput
from radixkv.server.served_model import ServedModel
from radixkv.serving.request_stream import OutputDelta

if TYPE_CHECKING:
    from radixkv.tiers.stats import TierTotals

_PREFIX = "radixkv:"
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ServerMetrics:
    """All metrics of one server, in a registry of their own: a process may have several servers."""

    def __init__(self, llm: ServedModel) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(llm))

        def histogram(name: str, documentation: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
            return Histogram(_PREFIX + name, documentation, buckets=buckets, registry=self.registry)

        def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(_PREFIX + name, documentation, labels, registry=self.registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "From one token of a request to its next; not of beam searches, whose tokens come all at once.",
        )
        self.request_latency = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.finished = counter("request_success", "Choices that ended, by their finish reason.", ("finished_reason",))
        self.batch_sequences = histogram("iteration_sequences", "Sequences in a step.", _BATCH_SIZE_BUCKETS)
        self.batch_tokens = histogram(
            "iteration_tokens", "Tokens computed in a step, draft tokens included.", _BATCH_SIZE_BUCKETS
        )
        self._num_steps = llm.stats.num_steps
        llm.on_step = self._observe_step

    def _observe_step(self, stats: EngineStats) -> None:
        if stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self.batch_sequences.observe(stats.last_batch.num_sequences)
            self.batch_tokens.observe(stats.last_batch.num_tokens)


class RequestTimer:
    """Measures the choices of one prompt as their deltas arrive.

    Args:
        arrival: of its request, by `time.monotonic`.
    """

    def __init__(self, metrics: ServerMetrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last_delta_time: float | None = None
        self._num_choices = 1  # until it is admitted, however many it has
        self._num_finished = 0

    def expect(self, num_choices: int) -> None:
        """So many choices are to end: all, once the engine has taken the prompt, or those that a search has found."""
        self._num_choices = num_choices

    def observe(self, delta: OutputDelta) -> None:
        metrics, times, now = self._metrics, delta.metrics, time.monotonic()
        if self._last_delta_time is None and times.first_token_time is not None:
            metrics.time_to_first_token.observe(times.first_token_time - self._arrival)
        if isinstance(delta, BeamSearchOutput):
            counts = delta.num_generated_tokens
            beams = [] if delta.aborted else delta.sequences
            reasons = {index: beam.finish_reason for index, beam in enumerate(beams)}
            num_prompt_tokens, finished = delta.num_prompt_tokens, True
        else:
            counts = [len(output.token_ids) for output in delta.outputs]
            reasons = {o.index: o.finish_reason for o in delta.outputs if o.finish_reason is not None}
            num_prompt_tokens, finished = len(delta.prompt_token_ids), delta.finished
            # With drafts, or a slow reader, a delta holds several tokens of a choice: the time is divided among them.
            since, num_gaps = self._last_delta_time, max(counts, default=0)
            if since is None:
                since, num_gaps = times.first_token_time or now, num_gaps - 1
            for _ in range(num_gaps):
                metrics.inter_token_latency.observe((now - since) / num_gaps)
        self._last_delta_time = now
        metrics.generation_tokens.inc(sum(counts))
        # There may be more beams than were asked for.
        for choice, reason in reasons.items():
            if choice < self._num_choices:
                self._num_finished += 1
                self._count(reason, 1, (times.finished_time or now) - self._arrival)
        if finished:
            metrics.prompt_tokens.inc(num_prompt_tokens)

    def end(self) -> None:
        """Nothing more arrives: what has not finished never will."""
        num_left = self._num_choices - self._num_finished
        if num_left > 0:
            self._num_choices = self._num_finished
            self._count("abort", num_left, time.monotonic() - self._arrival)

    def _count(self, reason: str, number: int, latency: float) -> None:
        self._metrics.finished.labels(reason).inc(number)
        if self._num_finished == self._num_choices:
            self._metrics.request_latency.observe(latency)


class EngineCollector(Collector):
    """Reads the latest statistics of the engine at each scrape."""

    def __init__(self, llm: ServedModel) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats
        cache = stats.cache
        in_use = stats.num_blocks_in_use
        for name, documentation, value in [
            ("num_requests_running", "Requests with at least one running sequence.", stats.num_running),
            ("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting),
            ("kv_cache_usage_perc", "Blocks in use by requests or pinned, 1 being all.", in_use / stats.num_blocks),
            ("draining", "1 while new requests are refused.", int(self._llm.draining)),
        ]:
            yield GaugeMetricFamily(_PREFIX + name, documentation, value)
        blocks = GaugeMetricFamily(_PREFIX + "kv_cache_blocks", "Blocks of the cache by state.", labels=["state"])
        blocks.add_metric(["free"], stats.num_free_blocks)
        blocks.add_metric(["held"], in_use)
        blocks.add_metric(["evictable"], stats.num_evictable_blocks)
        yield blocks
        for name, documentation, value in [
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", cache.queried_tokens),
            ("prefix_cache_hits", "Prompt tokens reused from the cache.", cache.reused_tokens),
            ("prompt_tokens_computed", "Prompt tokens computed.", cache.computed_tokens),
            ("prefix_cache_lookups", "Prompts looked up in the cache.", cache.opened_tables),
            ("evicted_blocks", "Cached blocks that were evicted.", cache.evicted_blocks),
            ("copied_blocks", "Blocks copied on write, because they had other owners.", cache.copied_blocks),
            ("deduplicated_blocks", "Blocks computed twice, of which one was kept.", cache.deduplicated_blocks),
            ("forked_sequences", "Sequences that were forked from others.", cache.forked_tables),
            ("num_preemptions", "Preemptions of running requests.", stats.num_preemptions),
            ("num_steps", "Batches that the model has run.", stats.num_steps),
        ]:
            yield CounterMetricFamily(_PREFIX + name, documentation, value)
        if stats.tiers is not None:
            yield from _tier_metrics(stats.tiers)
        drafted = CounterMetricFamily(
            _PREFIX + "spec_decode_num_draft_tokens", "Draft tokens that were verified.", labels=["source"]
        )
        accepted = CounterMetricFamily(
            _PREFIX + "spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", labels=["source"]
        )
        for source, counts in stats.drafts.items():
            drafted.add_metric([source], counts.drafted)
            accepted.add_metric([source], counts.accepted)
        yield from (drafted, accepted)


def _tier_metrics(totals: TierTotals) -> Iterator[Metric]:
    """What has happened in tiers below the pool, by medium where a tier counts it."""
    for name, documentation, field in [
        ("tier_hit_blocks", "Blocks read from a tier.", "hit_blocks"),
        ("tier_missed_blocks", "Blocks requested from a tier and not found there.", "missed_blocks"),
        ("tier_corrupt_blocks", "Blocks whose checksum did not match.", "corrupt_blocks"),
        ("tier_read_bytes", "Bytes read from a tier.", "read_bytes"),
        ("tier_read_seconds", "Time spent reading from a tier.", "read_seconds"),
        ("tier_written_blocks", "Blocks written to a tier.", "written_blocks"),
        ("tier_written_bytes", "Bytes written to a tier.", "written_bytes"),
        ("tier_write_seconds", "Time spent writing to a tier, in the background.", "write_seconds"),
        (
            "tier_unwritten_blocks",
            "Blocks that a tier accepted and did not write: its queue was full, or the medium failed.",
            "dropped_blocks",
        ),
        ("tier_evicted_blocks", "Blocks that a tier evicted for others.", "evicted_blocks"),
        ("tier_errors", "Failed calls of a tier's medium.", "errors"),
    ]:
        family = CounterMetricFamily(_PREFIX + name, documentation, labels=["medium"])
        for medium, stats in totals.tiers:
            family.add_metric([medium], getattr(stats, field))
        yield family
    for name, documentation, value in [
        ("tier_loads", "Loads of prefixes from tiers that were started.", totals.loads),
        ("tier_loads_given_up", "Loads abandoned because they took longer than computing.", totals.loads_given_up),
        ("tier_loads_not_worth_it", "Prefixes computed because loading was slower.", totals.loads_not_worth_it),
        ("tier_dropped_blocks", "Blocks not written because the write queue was full.", totals.dropped_blocks),
    ]:
        yield CounterMetricFamily(_PREFIX + name, documentation, value)


def metrics_routes(metrics: ServerMetrics) -> APIRouter:
    """`GET /metrics`."""
    router = APIRouter()

    @router.get("/metrics", tags=["observation"], response_class=Response)
    async def read_metrics() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
