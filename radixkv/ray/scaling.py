"""How many replicas there should be. Serve's controller runs a copy of this module, so that it imports nothing of RadixKV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUESTS = "radixkv_unfinished_requests"
POOL_USAGE = "radixkv_pool_usage"
# Share of a pool's blocks beyond which requests begin to wait for blocks, and to take them from each other.
_FULL = 0.8


class LoadPolicy:
    """Wants as many replicas as the unfinished requests and their tokens need; Serve smoothes the number over time.

    A replica without figures, because it has just started or its machine is busy, does not count as idle: until all replicas
    have figures, none is taken away.

    Args:
        requests_per_replica: how many unfinished requests one replica is for.
    """

    def __init__(self, requests_per_replica: int) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number wanted, and no state.

        Args:
            context: Serve's `AutoscalingContext`.
        """
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics
        requests = metrics.get(REQUESTS, {})
        usage = sum(metrics.get(POOL_USAGE, {}).values())
        wanted = max(sum(requests.values()) / self._requests_per_replica, usage / _FULL)
        if not requests.keys() >= set(context.running_replicas):
            wanted = max(wanted, context.target_num_replicas)
        return wanted, {}
