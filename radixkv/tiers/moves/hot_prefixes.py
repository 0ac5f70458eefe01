"""The order in which cached blocks go down when there is no time, or no room, for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from radixkv.cache import NodeSnapshot


def hot_prefixes(roots: Mapping[str, NodeSnapshot]) -> Iterator[tuple[str, bytes, int]]:
    """The nodes of a cache, most recently used first, each before the nodes below it.

    Args:
        roots: of each namespace.

    Yields:
        A node's namespace, the encoded tokens of the prefix up to its end, and how many of these bytes are before it.
    """
    parents: dict[int, NodeSnapshot | None] = {}
    nodes: list[tuple[str, NodeSnapshot]] = []
    for namespace, root in roots.items():
        parents[id(root)] = None
        below = [root]
        for node in below:
            parents.update((id(child), node) for child in node.children)
            below.extend(node.children)
        nodes += [(namespace, node) for node in below[1:]]  # the root has no blocks
    # A node was used at least as recently as any below it; the sort is stable, and parents come first.
    for namespace, last in sorted(nodes, key=lambda item: -item[1].last_use):
        path: list[bytes] = []
        step: NodeSnapshot | None = last
        while step is not None:
            path.append(step.tokens.tobytes())
            step = parents[id(step)]
        tokens = b"".join(reversed(path))
        yield namespace, tokens, len(tokens) - len(path[0])
