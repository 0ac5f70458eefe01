"""Names of blocks that outlive the process: digests of everything that a block's bytes depend on.

::

    fingerprint of the model ─┐
    secret ── namespace ──────┴─> digest ── tokens of block 0 ──> d0 ── tokens of block 1 ──> d1 ...

The tree's 64-bit hashes (`radixkv.cache.block_hash`) only find candidates, whose tokens are then compared. A tier cannot
compare the tokens before a block, so its digests are wide enough that two cannot be made to collide; the block's own tokens
are compared as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 20
_LEAST_FILLED = 1 / 4


@dataclass(frozen=True, slots=True)
class BlockKey:
    """One block of one prefix.

    Attributes:
        namespace: what a tier clears by. An engine uses one for a group of namespaces, such as all of one tenant's (see
            `radixkv.tiers.moves.prefix_keys.PrefixKeys.group`).
        digest: covers the namespace, the fingerprint, and all tokens up to the block's end.
        tokens: the block's own tokens, int32 little-endian.
        is_whole: False: it is partly filled, and the last of its prefix.
        parent: the block before it; None: it is the first, or that is not known. A store of keys
            should not keep it, and so all before it, in memory.
    """

    namespace: bytes
    digest: bytes
    tokens: bytes
    is_whole: bool = True
    parent: BlockKey | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[BlockKey], tuple[bytes, bytes, bytes, bool]]:
        """For pickle and copies: without those before it."""
        return BlockKey, (self.namespace, self.digest, self.tokens, self.is_whole)


def is_filled_enough(num_bytes: int, block_bytes: int) -> bool:
    """Whether a partly filled block, whose encoded tokens have so many bytes, is worth the room of a whole one."""
    return num_bytes > 0 and num_bytes >= _LEAST_FILLED * block_bytes


def namespace_digest(fingerprint: bytes, namespace: str, secret: bytes = b"") -> bytes:
    """The name of a namespace in a tier, which without the secret does not reveal the tenant.

    Args:
        fingerprint: of everything that the bytes of blocks depend on besides tokens.
        namespace: as in `PrefixCache.open`.
        secret: at most 64 bytes.
    """
    return blake2b(fingerprint + namespace.encode(), digest_size=DIGEST_BYTES, key=secret).digest()


def next_digest(before: bytes, tokens: bytes) -> bytes:
    """The digest of a block with these tokens (int32 little-endian), from that of the block or namespace before it."""
    return blake2b(before + tokens, digest_size=DIGEST_BYTES).digest()


def block_keys(
    namespace: bytes, tokens: bytes, block_bytes: int, before: BlockKey | bytes | None = None
) -> Iterator[BlockKey]:
    """The keys of consecutive whole blocks, first to last.

    Args:
        namespace: becomes `BlockKey.namespace` of each key.
        tokens: of the blocks, int32 little-endian.
        block_bytes: length of one block's encoded tokens.
        before: the block before the first one, or the digest of the namespace of a prefix that begins with it; None: that is
            ``namespace`` itself.
    """
    parent = before if isinstance(before, BlockKey) else None
    digest = before.digest if isinstance(before, BlockKey) else before or namespace
    for end in range(block_bytes, len(tokens) + 1, block_bytes):
        block = tokens[end - block_bytes : end]
        digest = next_digest(digest, block)
        parent = BlockKey(namespace, digest, block, parent=parent)
        yield parent
