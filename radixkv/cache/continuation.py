"""How a sequence may go on, according to the radix tree: at each branch, along the child that was used most.

A few children are compared, the first in order: a proposal is made at every decoding step, and a branch may have thousands.
"""

from __future__ import annotations

from radixkv.cache.node import Node
from radixkv.cache.tokens import TOKEN_BYTES, decode

# Children of a node that are compared at most.
_MAX_COMPARED_CHILDREN = 8


def continuation(node: Node, tail: bytes, max_tokens: int) -> list[int]:
    """The tokens that follow ``tail`` below ``node``.

    Args:
        node: where the path of the sequence ends.
        tail: its encoded tokens after that node.
        max_tokens: length of the answer at most.
    """
    offset, block_bytes = 0, node.block_bytes
    while len(tail) - offset >= block_bytes:
        child = None if node.children is None else node.children.by_key.get(tail[offset : offset + block_bytes])
        if child is None:
            return []
        common = min(len(child.tokens), len(tail) - offset)
        if not tail.startswith(child.tokens[:common], offset):
            return []
        node, offset = child, offset + common
        if common < len(child.tokens):
            return following(node, common // TOKEN_BYTES, max_tokens)
    child = _likeliest_child(node, tail[offset:])
    return [] if child is None else following(child, (len(tail) - offset) // TOKEN_BYTES, max_tokens)


def following(node: Node, offset: int, max_tokens: int) -> list[int]:
    """At most ``max_tokens`` tokens: from the ``offset``-th of a node on, and of the likeliest nodes below it."""
    start, max_bytes = offset * TOKEN_BYTES, max_tokens * TOKEN_BYTES
    found = bytes(node.tokens[start : start + max_bytes])
    while len(found) < max_bytes and (child := _likeliest_child(node, b"")) is not None:
        found += child.tokens[: max_bytes - len(found)]
        node = child
    token_ids: list[int] = decode(found).tolist()
    return token_ids


def _likeliest_child(node: Node, beginning: bytes) -> Node | None:
    """The most used of the first children that begin with ``beginning`` and go on; among equals, the one used last."""
    if node.children is None:
        return None
    children = node.children.starting_with(beginning, _MAX_COMPARED_CHILDREN)
    longer = [child for child in children if len(child.tokens) > len(beginning)]
    return max(longer, key=lambda child: (child.uses, child.last_use), default=None)
