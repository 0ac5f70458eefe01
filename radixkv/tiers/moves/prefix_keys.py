"""Makes the keys of an engine's prefixes in tiers, from namespaces and tokens."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.namespaces import namespace_group
from radixkv.tiers.block_key import BlockKey, block_keys, is_filled_enough, namespace_digest, next_digest
from radixkv.tiers.tier_events import TierEvents

# Prefixes whose keys are kept: a long prefix is looked up, loaded, and evicted in parts, with the same keys each time.
_KEPT_PREFIXES = 32


class PrefixKeys:
    """Makes keys; any thread may call.

    Args:
        fingerprint: of everything that the bytes of blocks depend on besides tokens.
        secret: of the hash of namespaces, at most 64 bytes.
        block_bytes: of one block's encoded tokens.
        events: note the names of blocks; None: there are none.
    """

    def __init__(self, fingerprint: bytes, secret: bytes, block_bytes: int, events: TierEvents | None = None) -> None:
        self.block_bytes = block_bytes
        self._events = events
        self._fingerprint = fingerprint
        self._secret = secret
        # By namespace and first block, most recently computed last: the longest prefix of late, and its keys.
        self._kept: OrderedDict[tuple[str, bytes], tuple[bytes, list[BlockKey]]] = OrderedDict()
        self._lock = Lock()

    def group(self, namespace: str) -> bytes:
        """The `BlockKey.namespace` for prefixes of a namespace."""
        return self._digest(namespace_group(namespace))

    def namespace(self, namespace: str) -> bytes:
        """A name for one namespace, which differs from all others of its group."""
        return self._digest(namespace)

    def of(self, namespace: str, tokens: bytes) -> list[BlockKey]:
        """The keys of the whole blocks of a prefix with these encoded tokens."""
        size = self.block_bytes
        tokens = tokens[: len(tokens) // size * size]
        name = (namespace, tokens[:size])
        with self._lock:
            kept_tokens, keys = self._kept.get(name, (b"", []))
        if not kept_tokens.startswith(tokens):
            num_common = len(kept_tokens) // size if tokens.startswith(kept_tokens) else 0
            before = keys[num_common - 1] if num_common else self._digest(namespace)
            more = block_keys(self.group(namespace), tokens[num_common * size :], size, before)
            keys = [*keys[:num_common], *more]
            if self._events is not None:
                self._events.note(namespace, tokens, keys)
            with self._lock:
                self._kept[name] = (tokens, keys)
                self._kept.move_to_end(name)
                if len(self._kept) > _KEPT_PREFIXES:
                    self._kept.popitem(last=False)
        return keys[: len(tokens) // size]

    def partly_filled(self, namespace: str, tokens: bytes, num_whole: int) -> list[BlockKey]:
        """The keys that a partly filled block behind a prefix's whole blocks may have: one for each length, longest first.

        Args:
            namespace: as in `PrefixCache.open`.
            tokens: of the whole blocks, and as many of the partly filled one as it may hold, encoded.
            num_whole: at least one.
        """
        start = num_whole * self.block_bytes
        rest = tokens[start : start + self.block_bytes - TOKEN_BYTES]
        lengths = range(len(rest), 0, -TOKEN_BYTES)
        beginnings = [rest[:length] for length in lengths if is_filled_enough(length, self.block_bytes)]
        if not beginnings:
            return []
        parent, group = self.of(namespace, tokens[:start])[-1], self.group(namespace)
        return [
            BlockKey(group, next_digest(parent.digest, part), part, is_whole=False, parent=parent)
            for part in beginnings
        ]

    def _digest(self, namespace: str) -> bytes:
        return namespace_digest(self._fingerprint, namespace, self._secret)
