"""Each replica in an ingress's `GET /metrics`, under names of their own, so that sums over labels count nothing twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

from prometheus_client.metrics_core import CounterMetricFamily as Counter
from prometheus_client.metrics_core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from radixkv.cluster.replica_set import ReplicaSet

_PREFIX = "radixkv:replica_"


class ReplicaCollector(Collector):
    """Reads at each scrape what each replica has reported last."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        names, available = self._replicas.names, self._replicas.available
        loads = self._replicas.loads

        def of_each(metric: Gauge | Counter, figures: Mapping[str, float]) -> Metric:
            for name, figure in figures.items():
                metric.add_metric([name], figure)
            return metric

        up = Gauge(_PREFIX + "up", "1 while requests are sent to the replica.", labels=["replica"])
        yield of_each(up, {name: int(name in available) for name in names})
        info = Gauge(
            _PREFIX + "info",
            "1; the generation is equal for replicas that run the same.",
            labels=["replica", "generation"],
        )
        for name, generation in self._replicas.generations.by_replica.items():
            info.add_metric([name, generation], 1)
        yield info
        for metric, documentation, figure in [
            ("num_requests_running", "Requests with at least one running sequence.", attrgetter("num_running")),
            ("num_requests_waiting", "Requests waiting to be scheduled.", attrgetter("num_waiting")),
            ("queued_prompt_tokens", "Prompt tokens that are still to be computed.", attrgetter("num_queued_tokens")),
        ]:
            gauge = Gauge(_PREFIX + metric, documentation, labels=["replica"])
            yield of_each(gauge, {name: figure(load) for name, load in loads.items()})
        blocks = Gauge(_PREFIX + "kv_cache_blocks", "Blocks of its cache by state.", labels=["replica", "state"])
        for name, load in loads.items():
            free, evictable = load.num_free_blocks, load.num_evictable_blocks
            blocks.add_metric([name, "free"], free)
            blocks.add_metric([name, "held"], load.num_blocks - free - evictable)
            blocks.add_metric([name, "evictable"], evictable)
        yield blocks
        for metric, documentation, field in [
            ("prefix_cache_queries", "Prompt tokens looked up in its cache.", "cache/queried_tokens"),
            ("prefix_cache_hits", "Prompt tokens reused from its cache.", "cache/reused_tokens"),
            ("prompt_tokens_computed", "Prompt tokens computed.", "cache/computed_tokens"),
            ("num_preemptions", "Preemptions of running requests.", "num_preemptions"),
        ]:
            counter = Counter(_PREFIX + metric, documentation, labels=["replica"])
            yield of_each(counter, {name: load.counters.get(field, 0) for name, load in loads.items()})
