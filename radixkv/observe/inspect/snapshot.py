"""A cache's contents as plain data, and as JSON, which ``radixkv inspect`` reads from a file or a server.

Nodes are a flat list, parents first, because a tree may be deeper than a JSON parser's recursion limit. Namespaces are
identified by their hashes: a name may be a secret (a cache salt).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from radixkv.cache import NodeSnapshot, PrefixCache
from radixkv.cache.block_hash import namespace_hash

FORMAT = "radixkv-snapshot"
_TEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node of the tree.

    Attributes:
        parent: its index in the list of nodes; None below a root.
        namespace: the hash of the namespace's name, hexadecimal; empty for the default one.
        depth_tokens: tokens of the prefix before it.
        num_live: live sequences and pins that end in the node or below.
        idle_seconds: since a sequence last started or ended there.
        text: of its first tokens; None where no tokenizer was given.
    """

    parent: int | None
    namespace: str
    depth_tokens: int
    num_tokens: int
    num_blocks: int
    num_live: int
    uses: int
    idle_seconds: float
    text: str | None


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The contents of a cache at one moment.

    Attributes:
        bytes_per_block: of keys and values, all layers; None where there are none, as in a simulation.
        stats: the counters of `CacheStats`, by name.
        nodes: parents before their children.
    """

    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    bytes_per_block: int | None
    stats: dict[str, int]
    nodes: list[NodeSummary]

    @property
    def num_cached_blocks(self) -> int:
        return sum(node.num_blocks for node in self.nodes)

    @property
    def num_unshared_blocks(self) -> int:
        """Blocks that the cached prompts would take if each had its own."""
        return sum(node.num_blocks * leaves for node, leaves in zip(self.nodes, self.leaves_below(), strict=True))

    @property
    def sharing_factor(self) -> float:
        """Blocks without sharing over blocks with it."""
        return self.num_unshared_blocks / max(1, self.num_cached_blocks)

    @property
    def saved_bytes(self) -> int | None:
        """Memory that sharing saves."""
        if self.bytes_per_block is None:
            return None
        return (self.num_unshared_blocks - self.num_cached_blocks) * self.bytes_per_block

    def blocks_below(self) -> list[int]:
        """Blocks of each node and all below it."""
        totals = [node.num_blocks for node in self.nodes]
        for index in reversed(range(len(totals))):
            parent = self.nodes[index].parent
            if parent is not None:
                totals[parent] += totals[index]
        return totals

    def leaves_below(self) -> list[int]:
        """The number of leaves below each node; 1 for a leaf."""
        counts = [0] * len(self.nodes)
        for index in reversed(range(len(counts))):
            counts[index] = max(1, counts[index])
            parent = self.nodes[index].parent
            if parent is not None:
                counts[parent] += counts[index]
        return counts

    def path_text(self, index: int) -> str:
        """The beginning of the prefix that ends with a node, and the beginning of the node itself."""
        node, first = self.nodes[index], index
        while (parent := self.nodes[first].parent) is not None:
            first = parent
        texts = [self.nodes[first].text or "", *([node.text or ""] if first != index else [])]
        return " … ".join(texts)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": 1, **asdict(self)})

    @classmethod
    def from_fields(cls, given: object) -> CacheSnapshot:
        """The snapshot whose fields `to_json` wrote.

        Raises:
            ValueError: they are not those of this format and version.
        """
        try:
            if not isinstance(given, dict):
                raise ValueError("it is not a JSON object")
            fields: dict[str, Any] = dict(given)
            if fields.pop("format") != FORMAT or fields.pop("version") != 1:
                raise ValueError("another format or version")
            nodes = [NodeSummary(**node) for node in fields.pop("nodes")]
            if any(node.parent is not None and not 0 <= node.parent < index for index, node in enumerate(nodes)):
                raise ValueError("a node comes before its parent")
            return cls(nodes=nodes, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, KeyError):
                reason = f"{error} is missing"
            else:
                reason = str(error) if isinstance(error, ValueError) else "it has other fields"
            raise ValueError(f"expected a snapshot of a cache ({FORMAT}, version 1): {reason}") from error


def take_snapshot(
    cache: PrefixCache, decode: Callable[[list[int]], str] | None, bytes_per_block: int | None
) -> CacheSnapshot:
    """A snapshot of a cache.

    Args:
        decode: token ids to text; None: without texts.
        bytes_per_block: of keys and values.
    """
    now = cache.now()
    nodes: list[NodeSummary] = []
    for namespace, root in cache.tree_snapshot().items():
        name = f"{namespace_hash(namespace):016x}" if namespace else ""
        pending: list[tuple[NodeSnapshot, int | None, int]] = [(child, None, 0) for child in root.children]
        while pending:
            node, parent, depth = pending.pop()
            index = len(nodes)
            nodes.append(
                NodeSummary(
                    parent,
                    name,
                    depth,
                    len(node.tokens),
                    len(node.block_ids),
                    node.lock_count,
                    node.uses,
                    round(max(0.0, now - node.last_use), 3),
                    None if decode is None else decode(node.tokens[:_TEXT_TOKENS].tolist()),
                )
            )
            pending.extend((child, index, depth + len(node.tokens)) for child in node.children)
    return CacheSnapshot(
        cache.block_size,
        cache.num_blocks,
        cache.num_free_blocks,
        cache.num_evictable_blocks,
        bytes_per_block,
        asdict(cache.stats),
        nodes,
    )
