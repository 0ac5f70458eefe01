"""The format of a store's blocks; blocks of different formats are never in one store."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

from radixkv.cache.arguments import check_count

# Version of records and of the folder. A change of either needs a new number; older stores are then not read any more.
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One model's blocks, as one configuration of the engine lays them out.

    Attributes:
        fingerprint: of everything that the bytes depend on besides tokens; see `radixkv.tiers.block_key`.
        block_size: tokens per block.
        block_bytes: bytes per block.
        dtype: of keys and values, for people: the fingerprint covers it.
        model: the model's name, for people.
    """

    fingerprint: bytes
    block_size: int
    block_bytes: int
    dtype: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, bytes) or not self.fingerprint:
            raise ValueError(f"fingerprint: expected at least one byte, got {self.fingerprint!r:.80}")
        check_count("block_size", self.block_size, 1)
        check_count("block_bytes", self.block_bytes, 1)

    @property
    def digest(self) -> bytes:
        """Names the format in a store: 16 bytes that differ where blocks could be mistaken."""
        sizes = struct.pack("<IQQ", FORMAT_VERSION, self.block_size, self.block_bytes)
        return blake2b(sizes + self.fingerprint, digest_size=16).digest()
