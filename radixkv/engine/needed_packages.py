"""The packages of extras that a configuration needs."""

from __future__ import annotations

import importlib

from radixkv.config import EngineConfig
from radixkv.extras import needing_extra
from radixkv.tiers.disk.namespace_secret import is_server
from radixkv.tiers.encryption import names_key


def import_packages(config: EngineConfig) -> None:
    """Import what a configuration needs beyond the plain installation: a lack is reported before a model is loaded.

    Raises:
        MissingPackageError: events need pyzmq and msgspec, a server redis, a key cryptography, and that is not installed.
    """
    if config.kv_events_endpoint is not None:
        with needing_extra("events", "kv_events_endpoint"):
            importlib.import_module("radixkv.observe.kv_events")
    if config.shared_cache is not None and is_server(config.shared_cache):
        with needing_extra("redis", "shared_cache"):
            importlib.import_module("redis")
    # The key is read later: it may come from a pipe, which can be read only once.
    has_store = config.disk_cache is not None or config.shared_cache is not None
    if has_store and names_key(config.store_key_file):
        with needing_extra("encryption", "store_key_file"):
            importlib.import_module("cryptography")
