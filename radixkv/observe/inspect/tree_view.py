"""The radix tree drawn in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.text import Text
from rich.tree import Tree

from radixkv.cache import NodeSnapshot


def draw_tree(
    snapshot: Mapping[str, NodeSnapshot], decode: Callable[[list[int]], str], snippet: int = 48, max_children: int = 8
) -> Tree:
    """One branch a node: how many tokens in how many blocks, and the beginning of their text.

    Args:
        decode: token ids to text.
        snippet: characters of text shown.
        max_children: further children are only counted.
    """
    tree = Tree("radix tree")
    for namespace, root in snapshot.items():
        branch = tree if namespace == "" else tree.add(Text(f"namespace {namespace!r}", style="magenta"))
        _add_children(branch, root, decode, snippet, max_children)
    return tree


def _add_children(
    branch: Tree, node: NodeSnapshot, decode: Callable[[list[int]], str], snippet: int, max_children: int
) -> None:
    widest = sorted(node.children, key=lambda child: -_num_tokens(child))
    for child in widest[:max_children]:
        label = Text.assemble(
            (f"{len(child.tokens):>5} tokens ", "bold"),
            (f"{len(child.block_ids):>3} blocks  ", "cyan"),
            (repr(decode(child.tokens[: snippet // 2].tolist())[:snippet]), "dim"),
        )
        _add_children(branch.add(label), child, decode, snippet, max_children)
    if len(widest) > max_children:
        branch.add(Text(f"… and {len(widest) - max_children} more", style="dim"))


def _num_tokens(node: NodeSnapshot) -> int:
    return len(node.tokens) + sum(_num_tokens(child) for child in node.children)
