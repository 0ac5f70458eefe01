"""What a replica has to do and how it stands, as it reports it several times a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One report; by default that of a replica that has nothing.

    Attributes:
        draining: whether it takes no new requests.
        num_running, num_waiting, num_blocks, num_free_blocks, num_evictable_blocks, num_queued_tokens, num_queued,
            num_decoding, prefill_seconds_per_token: as `EngineStats` has them.
        counters: what its engine has counted, see `radixkv.cluster.counters`.
    """

    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_evictable_blocks: int = 0
    num_queued_tokens: int = 0
    num_queued: int = 0
    num_decoding: int = 0
    prefill_seconds_per_token: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
