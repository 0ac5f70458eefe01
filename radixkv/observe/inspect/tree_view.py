"""The radix tree of a snapshot drawn in the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from rich.text import Text
from rich.tree import Tree

from radixkv.cache.counted import counted
from radixkv.observe.inspect.snapshot import CacheSnapshot, NodeSummary
from radixkv.observe.inspect.visible_text import visible

# How many characters of a node's text are shown: as Python writes them, and by `one_line`.
_SNIPPET = 48
_LINE = 60


def size_label(node: NodeSummary) -> Text:
    """How many tokens in how many blocks, and the beginning of their text."""
    return _sizes(node).append(repr((node.text or "")[:_SNIPPET]), style="dim")


def usage_label(node: NodeSummary) -> Text:
    """The same with how often the node was used."""
    style = "green" if node.uses > 1 else "dim"
    times = counted(node.uses, "time")
    return _sizes(node).append(f"used {times}  ", style=style).append(one_line(node.text), style="dim")


def draw_tree(
    snapshot: CacheSnapshot, max_children: int = 8, label: Callable[[NodeSummary], Text] = size_label
) -> Tree:
    """One branch per node, the largest first.

    Args:
        max_children: of each node; further ones are only counted.
        label: what stands at a branch.
    """
    children: defaultdict[tuple[str, int | None], list[int]] = defaultdict(list)
    for index, node in enumerate(snapshot.nodes):
        children[node.namespace, node.parent].append(index)
    below = snapshot.blocks_below()
    tree = Tree("radix tree")
    pending: list[tuple[Tree, tuple[str, int | None]]] = []
    for namespace in dict.fromkeys(node.namespace for node in snapshot.nodes):
        branch = tree.add(Text(f"namespace {namespace[:8]}", style="magenta")) if namespace else tree
        pending.append((branch, (namespace, None)))
    while pending:
        branch, key = pending.pop()
        widest = sorted(children[key], key=lambda index: -below[index])
        for index in widest[:max_children]:
            pending.append((branch.add(label(snapshot.nodes[index])), (key[0], index)))
        if len(widest) > max_children:
            branch.add(Text(f"… and {len(widest) - max_children} more", style="dim"))
    return tree


def one_line(text: str | None) -> str:
    """The beginning of a text, as `visible` shows it."""
    shown = visible((text or "")[: _LINE + 1])  # of which each character takes at least one
    return shown if len(shown) <= _LINE else shown[: _LINE - 1] + "…"


def _sizes(node: NodeSummary) -> Text:
    tokens, blocks = counted(node.num_tokens, "token"), counted(node.num_blocks, "block")
    return Text.assemble((f"{tokens:>13} ", "bold"), (f"{blocks:>10}  ", "cyan"))
