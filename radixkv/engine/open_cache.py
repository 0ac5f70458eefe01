"""Opens the cache that a configuration describes, the tiers below it, and the publisher of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.cache import POLICIES, EventLog, PrefixCache
from radixkv.config import EngineConfig
from radixkv.drafting.tree_index import TreeIndex
from radixkv.engine.kv_tiers import KVTiers
from radixkv.engine.open_tiers import open_tiers
from radixkv.memory import KVPool
from radixkv.model.loader import LoadedModel
from radixkv.routing import PrefillRate

if TYPE_CHECKING:
    from radixkv.observe.kv_events import ZmqEventPublisher

_MIN_EVENTS = 100_000


@dataclass(slots=True)
class OpenCache:
    """A cache with what belongs to it, in use until it is closed.

    Attributes:
        cache: of the pool's blocks.
        index: of the tokens in its tree, from which drafts are taken; None: there are no drafts.
        tiers: below the pool; None: there are none.
        publisher: of its events; None: there is none, or it is closed.
    """

    cache: PrefixCache
    index: TreeIndex | None
    tiers: KVTiers | None
    publisher: ZmqEventPublisher | None

    def publish_events(self) -> None:
        """Publish what has changed since the last call."""
        if self.publisher is not None and self.cache.events is not None:
            self.publisher.publish(self.cache.events)

    def close(self, grace_seconds: float) -> None:
        """Close the tiers, which may write what is queued for a while, and then the publisher, which gets their last events.

        The cache itself can still be used.
        """
        if self.tiers is not None:
            self.tiers.close(grace_seconds)
        if self.publisher is not None:
            self.publish_events()
            self.publisher.close()
            self.publisher = None


def open_cache(config: EngineConfig, loaded: LoadedModel, pool: KVPool, prefill_rate: PrefillRate) -> OpenCache:
    """Make the cache of a pool's blocks, and open its tiers and its publisher.

    Raises:
        ValueError, OSError, TypeError: as `open_publisher` and `open_tiers`; then nothing is open.
    """
    num_blocks = pool.num_blocks
    publisher = open_publisher(config)
    events = None
    if publisher is not None:
        # Events are published after each step and each clearing, which change a block's state a few times at most: none are
        # dropped.
        max_events = max(_MIN_EVENTS, 8 * num_blocks)
        events = EventLog(max_events, medium="CPU" if loaded.device.type == "cpu" else "GPU")
    index = None if config.speculation is None else TreeIndex(num_blocks, pool.block_size)
    cache = PrefixCache(
        num_blocks,
        pool.block_size,
        POLICIES[config.eviction_policy](),
        remembered_blocks=4 * num_blocks,
        splits_blocks=pool.states is None,
        events=events,
        observers=() if index is None else (index,),
    )
    opened = OpenCache(cache, index, None, publisher)
    if config.has_tiers:
        publish = None if publisher is None else publisher.publish
        try:
            opened.tiers = open_tiers(config, loaded, cache, pool, prefill_rate, publish)
        except BaseException:
            opened.close(0.0)
            raise
    return opened


def open_publisher(config: EngineConfig) -> ZmqEventPublisher | None:
    """Listen at the configured addresses; None: events are not to be published.

    Raises:
        ValueError: an address cannot be bound.
    """
    if config.kv_events_endpoint is None:
        return None
    from radixkv.observe.kv_events import ZmqEventPublisher

    return ZmqEventPublisher(config.kv_events_endpoint, config.kv_events_replay_endpoint)
