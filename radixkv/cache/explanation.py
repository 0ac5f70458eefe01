"""Why a prompt is not wholly reused: a reason for every token that has to be computed.

::

    prompt   |------------ cached ------------|-- evicted --|-- other namespace --|---- new ----|
                                              ^ leaves the tree here

About other namespaces, only the fact that the tokens are cached in one is reported: not in which, and nothing else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.evicted import EvictedPrefixes
from radixkv.cache.match import Match
from radixkv.cache.node import Root
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import TOKEN_BYTES, decode

_SHOWN_TOKENS = 16


class Reason(StrEnum):
    """Why tokens of a prompt have to be computed."""

    NEW = "new"  # not requested before, as far as the cache remembers
    EVICTED = "evicted"
    OTHER_NAMESPACE = "other namespace"
    READ_OFF = "reading switched off"
    LAST_TOKEN = "last token"  # the whole prompt is cached, but the last token's logits are needed
    INSIDE_BLOCK = "inside a block"  # cached, but where the prompt leaves the block, no state is (`splits_blocks`)


@dataclass(frozen=True, slots=True)
class Computed:
    """Consecutive tokens of the prompt that have to be computed.

    Attributes:
        evicted_seconds_ago, unused_seconds, uses: of evicted blocks: when they were evicted, how long after their last use,
            and how many sequences, pins and loads from elsewhere had begun with them; None for other reasons.
    """

    reason: Reason
    start: int
    num_tokens: int
    evicted_seconds_ago: float | None = None
    unused_seconds: float | None = None
    uses: int | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the prompt leaves the tree, and the nearest cached prompt of its namespace at that position.

    Attributes:
        position: how many tokens they have in common.
        prompt_tokens, cached_tokens: what follows on both sides, 16 tokens at most, int32. Nothing follows in the cache
            where a cached prompt ends.
    """

    position: int
    prompt_tokens: NDArray[np.int32]
    cached_tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much of a prompt would be reused now, and why not more.

    ``num_reused_tokens`` and the lengths of all ``computed`` add up to the prompt's length.

    Attributes:
        computed: in the order of the prompt.
        divergence: None where the whole prompt is cached, or nothing of its namespace is.
    """

    num_prompt_tokens: int
    num_reused_tokens: int
    computed: tuple[Computed, ...]
    divergence: Divergence | None


def explain(
    tree: RadixTree,
    evicted: EvictedPrefixes | None,
    prompt: bytes,
    namespace: str,
    read: bool,
    look_elsewhere: bool,
    now: float,
) -> Explanation:
    """Look an encoded prompt up, and say what would happen to each of its tokens. Changes nothing."""
    num_tokens = len(prompt) // TOKEN_BYTES
    match = tree.longest_prefix(prompt, namespace)
    cached = 0 if match is None else match.num_tokens
    reusable = tree.match(prompt[:-TOKEN_BYTES], namespace)
    reused = reusable.num_tokens if read and reusable is not None else 0
    computed: list[Computed] = []
    position = reused

    def compute(stop: int, reason: Reason, **details: Any) -> None:
        """The tokens up to ``stop`` that have no reason yet have this one."""
        nonlocal position
        if stop > position:
            computed.append(Computed(reason, position, stop - position, **details))
            position = stop

    whole = tree.match(prompt, namespace)
    is_whole = whole is not None and whole.num_tokens == num_tokens
    compute(cached, Reason.READ_OFF if not read else Reason.LAST_TOKEN if is_whole else Reason.INSIDE_BLOCK)
    if evicted is not None:
        parts = evicted.covering(prompt, namespace, 0 if match is None else match.num_whole_tokens)
        for record, ends in itertools.groupby(parts, key=itemgetter(1)):
            compute(
                max(stop for stop, _ in ends),
                Reason.EVICTED,
                evicted_seconds_ago=now - record.evicted_at,
                unused_seconds=record.evicted_at - record.last_use,
                uses=record.uses,
            )
    if look_elsewhere:
        compute(_most_cached(tree, prompt, namespace, position), Reason.OTHER_NAMESPACE)
    compute(num_tokens, Reason.NEW)
    return Explanation(num_tokens, reused, tuple(computed), _divergence(match, prompt))


def _most_cached(tree: RadixTree, prompt: bytes, namespace: str, known: int) -> int:
    """How many of a prompt's first tokens another namespace has, if more than ``known``; otherwise those."""
    most = known
    for other, root in tree.roots.items():
        # A namespace without the first block has less than a block of the prompt: its nearest child need not be searched for.
        if other == namespace or (most * TOKEN_BYTES >= root.block_bytes and not _has_first_block(root, prompt)):
            continue
        match = tree.match(prompt, other)
        most = most if match is None else max(most, match.num_tokens)
    return most


def _has_first_block(root: Root, prompt: bytes) -> bool:
    return root.children is not None and prompt[: root.block_bytes] in root.children.by_key


def _divergence(match: Match | None, prompt: bytes) -> Divergence | None:
    if match is None or match.num_tokens * TOKEN_BYTES == len(prompt):
        return None
    node = match.node
    if node.parent is None and node.children is None:
        return None  # the namespace's first sequence still runs
    offset = match.num_node_blocks * node.block_bytes + match.num_partial_tokens * TOKEN_BYTES
    if match.num_node_blocks == node.num_blocks and not match.num_partial_tokens and node.children:
        # The next block shares no token with any child: the child used last stands for all.
        node, offset = max(node.children.values(), key=lambda child: child.last_use), 0
    size = _SHOWN_TOKENS * TOKEN_BYTES
    start = match.num_tokens * TOKEN_BYTES
    return Divergence(
        match.num_tokens, decode(prompt[start : start + size]), decode(node.tokens[offset : offset + size])
    )
