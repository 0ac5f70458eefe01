"""The tiers that a configuration asks for."""

from __future__ import annotations

from radixkv.config import EngineConfig
from radixkv.engine.kv_tiers import KVTiers, block_fingerprint, pinned_memory
from radixkv.memory import KVPool
from radixkv.model.loader import LoadedModel
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.tier import Tier

# Of tiers whose size is not known here.
_MANY_BLOCKS = 1 << 20


def open_tiers(config: EngineConfig, loaded: LoadedModel, pool: KVPool) -> KVTiers:
    """Open all tiers: host memory, and those that were given.

    Raises:
        ValueError: a size does not suffice for one block.
    """
    tiers: list[Tier] = []
    capacity = _MANY_BLOCKS
    if config.host_cache_size is not None:
        host = HostTier(
            int(config.host_cache_size), pool.block_nbytes, pinned_memory if loaded.device.type == "cuda" else None
        )
        tiers.append(host)
        capacity = host.capacity
    tiers += config.tiers
    return KVTiers(pool, tiers, capacity, block_fingerprint(loaded, pool), secret=b"", policy=config.cache_write_policy)
