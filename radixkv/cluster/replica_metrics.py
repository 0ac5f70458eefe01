"""Each replica in an ingress's `GET /metrics`, under names of their own, so that sums over labels count nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixkv.cluster.replica_set import ReplicaSet

_PREFIX = "radixkv:replica_"


class ReplicaCollector(Collector):
    """Reads at each scrape what each replica has reported last."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        names, available = self._replicas.names, self._replicas.available
        loads = {name: self._replicas.load_of(name) for name in names}
        up = GaugeMetricFamily(_PREFIX + "up", "1 while requests are sent to the replica.", labels=["replica"])
        for name in names:
            up.add_metric([name], int(name in available))
        yield up
        for metric, documentation, field in [
            ("num_requests_running", "Requests with at least one running sequence.", "num_running"),
            ("num_requests_waiting", "Requests waiting to be scheduled.", "num_waiting"),
            ("queued_prompt_tokens", "Prompt tokens that are still to be computed.", "num_queued_tokens"),
        ]:
            gauge = GaugeMetricFamily(_PREFIX + metric, documentation, labels=["replica"])
            for name, load in loads.items():
                if load:
                    gauge.add_metric([name], load[field])
            yield gauge
        blocks = GaugeMetricFamily(
            _PREFIX + "kv_cache_blocks", "Blocks of its cache by state.", labels=["replica", "state"]
        )
        for name, load in loads.items():
            if load:
                free, evictable = load["num_free_blocks"], load["num_evictable_blocks"]
                held = load["num_blocks"] - free - evictable
                for state, number in (("free", free), ("held", held), ("evictable", evictable)):
                    blocks.add_metric([name, state], number)
        yield blocks
        for metric, documentation, field in [
            ("prefix_cache_queries", "Prompt tokens looked up in its cache.", "cache/queried_tokens"),
            ("prefix_cache_hits", "Prompt tokens reused from its cache.", "cache/reused_tokens"),
            ("prompt_tokens_computed", "Prompt tokens computed.", "cache/computed_tokens"),
            ("num_preemptions", "Preemptions of running requests.", "num_preemptions"),
        ]:
            counter = CounterMetricFamily(_PREFIX + metric, documentation, labels=["replica"])
            for name, load in loads.items():
                if load:
                    counter.add_metric([name], load["counters"].get(field, 0))
            yield counter
