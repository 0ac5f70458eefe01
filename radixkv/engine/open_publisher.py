"""The publisher of KV events that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.config import EngineConfig

if TYPE_CHECKING:
    from radixkv.observe.kv_events import ZmqEventPublisher


def open_publisher(config: EngineConfig) -> ZmqEventPublisher | None:
    """Listen at the configured addresses; None: events are not to be published.

    Raises:
        ImportError: pyzmq or msgspec is not installed; the message names the extra that brings them.
        ValueError: an address cannot be bound.
    """
    if config.kv_events_endpoint is None:
        return None
    try:
        from radixkv.observe.kv_events import ZmqEventPublisher
    except ImportError as error:
        raise ImportError(
            f"kv_events_endpoint: {error.name} is not installed: pip install 'radixkv[events]'"
        ) from error
    return ZmqEventPublisher(config.kv_events_endpoint, config.kv_events_replay_endpoint)
