"""The packages of extras that a configuration needs."""

from __future__ import annotations

import importlib
from pathlib import Path

from radixkv.config import EngineConfig
from radixkv.extras import needing_extra
from radixkv.tiers.disk.namespace_secret import is_server
from radixkv.tiers.encryption import read_key


def import_packages(config: EngineConfig) -> None:
    """Import what a configuration needs beyond the plain installation: a lack is reported before a model is loaded.

    Raises:
        MissingPackageError: events need pyzmq and msgspec, a server redis, a key cryptography, and that is not installed.
        OSError, ValueError: see `store_key`.
    """
    if config.kv_events_endpoint is not None:
        with needing_extra("events", "kv_events_endpoint"):
            importlib.import_module("radixkv.observe.kv_events")
    if config.shared_cache is not None and is_server(config.shared_cache):
        with needing_extra("redis", "shared_cache"):
            importlib.import_module("redis")
    if store_key(config) is not None:
        with needing_extra("encryption", "store_key_file"):
            importlib.import_module("cryptography")


def store_key(config: EngineConfig) -> bytes | None:
    """The key that encrypts what is stored outside this process; None: there is none.

    Raises:
        OSError, ValueError: see `read_key`.
    """
    if config.disk_cache is None and config.shared_cache is None:
        return None
    return read_key(None if config.store_key_file is None else Path(config.store_key_file))
