"""How many replicas there should be. Serve's controller runs a copy of this module, so that it imports nothing of RadixKV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUESTS = "radixkv_unfinished_requests"
POOL_USAGE = "radixkv_pool_usage"
# Of a pool's blocks; beyond, requests begin to wait for blocks, and to take them from each other.
_FULL = 0.8


class LoadPolicy:
    """As many replicas as the unfinished requests need, and as have room for their tokens; Serve smoothes it over time.

    A replica of which there are no figures, since it has just started or its machine is busy, is not thought idle:
    until there are, none is taken away.

    Args:
        requests_per_replica: for which there is to be a replica.
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
