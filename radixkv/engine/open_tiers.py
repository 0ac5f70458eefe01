"""Opens the tiers that a configuration names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from radixkv.cache import CacheEvent, PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.block_fingerprint import block_fingerprint
from radixkv.engine.kv_tiers import MANY_BLOCKS, KVTiers, TierSet
from radixkv.memory import KVPool
from radixkv.model.loader import LoadedModel
from radixkv.routing import PrefillRate
from radixkv.sizes import parse_size
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.disk.namespace_secret import find_secret, is_server
from radixkv.tiers.disk.other_stores import OtherStores
from radixkv.tiers.disk.slot_reader import slot_bytes_of
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.encryption import read_key
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.record import RecordCodec
from radixkv.tiers.redis_blobs import RedisBlobs
from radixkv.tiers.shared_tier import BlobStore, SharedTier
from radixkv.tiers.tier import Tier
from radixkv.tiers.tier_events import TierEvents
from radixkv_cpu import library, read_records

_log = logging.getLogger(__name__)

# Names of tiers in events, as in vLLM and Dynamo. Where the pool is in host memory, it takes the name "CPU" itself.
_HOST_MEDIUM = "CPU"
_HOST_MEDIUM_BELOW_CPU = "CPU_PINNED"
_DISK_MEDIUM = "DISK"
# In the order in which `Tier` has them.
_PARTS_OF_TIERS = tuple(name for name in (*Tier.__annotations__, *vars(Tier)) if not name.startswith("_"))


def open_tiers(
    config: EngineConfig,
    loaded: LoadedModel,
    cache: PrefixCache,
    pool: KVPool,
    prefill_rate: PrefillRate,
    publish: Callable[[Sequence[CacheEvent]], None] | None,
) -> KVTiers:
    """Open all tiers, the nearest first: host memory, the disk, the shared store, and those that were given.

    Args:
        publish: takes events of what host memory and the disk hold; any thread calls it. None: none are recorded.

    Raises:
        OSError: a file of a key or a secret cannot be read.
        StoreInUseError: another process writes to the folder.
        TypeError: one of ``tiers`` is not a `Tier`.
        ValueError: a folder is a file, a size is too small for one block, a file holds no key, or a server is shared without
            a secret.
    """
    _check_tiers(config)
    fingerprint = block_fingerprint(loaded, pool)
    dtype = str(pool.dtype).removeprefix("torch.")
    block_format = BlockFormat(fingerprint, pool.block_size, pool.block_nbytes, dtype, loaded.name)
    key = _store_key(config)
    secret = find_secret(
        None if config.cache_secret_file is None else Path(config.cache_secret_file),
        None if config.disk_cache is None else Path(config.disk_cache),
        config.shared_cache,
        read_only=config.disk_cache_read_only,
    )
    opened = TierSet(events=None if publish is None else TierEvents(pool.block_size, publish))
    with ExitStack() as stack:  # if a tier cannot be opened, those before it are closed
        opener = _TierOpener(config, block_format, key, secret, opened, stack)
        if config.host_cache_size is not None:
            opener.open_host(config.host_cache_size, on_gpu=loaded.device.type == "cuda")
        if config.disk_cache is not None:
            opener.open_disk(Path(config.disk_cache))
        if config.shared_cache is not None:
            opener.open_shared(config.shared_cache)
        opened.tiers += config.tiers
        if opened.lasting_capacity < pool.num_blocks:
            _log.warning(
                "disk_cache_size or shared_cache_size: there is room for %d blocks, fewer than the %d in memory: they are "
                "written again and again, and most are not found after a restart",
                opened.lasting_capacity,
                pool.num_blocks,
            )
        policy = config.cache_write_policy
        kv_tiers = KVTiers(cache, pool, opened, fingerprint, secret or b"", policy, prefill_rate)
        stack.pop_all()
        return kv_tiers


def _store_key(config: EngineConfig) -> bytes | None:
    """The key that encrypts what is stored outside this process; None: there is none."""
    if config.disk_cache is None and config.shared_cache is None:
        return None
    return read_key(None if config.store_key_file is None else Path(config.store_key_file))


def _check_tiers(config: EngineConfig) -> None:
    """Refuse objects that are not tiers, and folders that are files."""
    for tier in config.tiers:
        lacks = [name for name in _PARTS_OF_TIERS if not (hasattr(type(tier), name) or hasattr(tier, name))]
        if lacks or isinstance(tier, type):
            without = f", which has no {', '.join(lacks)}" if lacks else ""
            raise TypeError(f"tiers: expected objects like radixkv.tiers.tier.Tier, got {tier!r:.80}{without}")
    _check_folder("disk_cache", config.disk_cache)
    if config.shared_cache is not None and not is_server(config.shared_cache):
        _check_folder("shared_cache", config.shared_cache)


@dataclass(frozen=True, slots=True)
class _TierOpener:
    """Opens the tiers of one configuration.

    Attributes:
        block_format: of the blocks in all of them.
        key: encrypts them outside this process; None: they are stored as they are.
        secret: of the hash of namespaces; None: no store needs one.
        opened: gets the tiers, in the order in which they are opened, and what is known of them together.
        stack: closes them, if another one cannot be opened.
    """

    config: EngineConfig
    block_format: BlockFormat
    key: bytes | None
    secret: bytes | None
    opened: TierSet
    stack: ExitStack

    def open_host(self, size: str | int, *, on_gpu: bool) -> None:
        opened, block_bytes = self.opened, self.block_format.block_bytes
        num_bytes = _size("host_cache_size", size, block_bytes)
        try:
            tier = HostTier(num_bytes, block_bytes)
        except MemoryError as error:
            raise MemoryError(f"host_cache_size: expected as much as there is memory for, got {size!r}") from error
        if opened.events is not None:
            tier.observer = opened.events.of(_HOST_MEDIUM if on_gpu else _HOST_MEDIUM_BELOW_CPU)
        opened.tiers.append(tier)
        opened.capacity = min(opened.capacity, tier.capacity)

    def open_disk(self, folder: Path) -> None:
        config, opened, secret = self.config, self.opened, self.secret or b""
        codec = RecordCodec(self.block_format, self.key)
        num_bytes = _size("disk_cache_size", config.disk_cache_size, slot_bytes_of(codec))
        tier = DiskTier(
            folder,
            self.block_format,
            capacity_bytes=num_bytes,
            key=self.key,
            secret=secret if config.cache_secret_file is None and config.shared_cache is None else None,
            read_only=config.disk_cache_read_only,
            read_records=None if library() is None else read_records,
        )
        self.stack.callback(tier.close)
        if opened.events is not None:
            tier.table.observer = opened.events.of(_DISK_MEDIUM)
        opened.tiers.append(tier)
        num_blocks = num_bytes // slot_bytes_of(codec)
        opened.capacity = min(opened.capacity, num_blocks)
        if config.disk_cache_read_only:
            opened.num_stored = MANY_BLOCKS
        else:
            opened.lasting_capacity = num_blocks
            opened.num_stored, opened.pins = len(tier), tier.pins
            opened.other_stores = OtherStores(folder, codec.name, secret)
            self.stack.callback(opened.other_stores.stop, 0.0)

    def open_shared(self, store: str) -> None:
        config, opened = self.config, self.opened
        if is_server(store):
            blobs: BlobStore = RedisBlobs(store)
        else:
            codec = RecordCodec(self.block_format, self.key)
            record_bytes = codec.header_bytes + codec.body_bytes
            num_bytes = _size("shared_cache_size", config.shared_cache_size, record_bytes)
            kept_there = self.secret if config.cache_secret_file is None else None
            blobs = FolderBlobs(Path(store), capacity_bytes=num_bytes, secret=kept_there)
            num_blocks = num_bytes // record_bytes
            opened.lasting_capacity = min(opened.lasting_capacity, num_blocks)
            opened.capacity = min(opened.capacity, num_blocks)
        tier = SharedTier(blobs, self.block_format, key=self.key)
        self.stack.callback(tier.close)
        opened.tiers.append(tier)
        opened.num_stored = MANY_BLOCKS


def _check_folder(name: str, folder: str | Path | None) -> None:
    """A medium that fails may recover, and engines go on without it; a file in place of the folder is a mistake."""
    if folder is not None and os.path.isfile(folder):  # False where the medium fails, unlike `Path.is_file`
        raise ValueError(f"{name}: expected a folder, got the file {folder}")


def _size(name: str, size: str | int, least: int) -> int:
    num_bytes = parse_size(name, size)
    if num_bytes < least:
        raise ValueError(f"{name}: expected at least the {least} bytes that one block takes, got {size!r}")
    return num_bytes
