"""A snapshot in the terminal: figures, the largest and the hottest prefixes, the tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from radixkv.observe.inspect.snapshot import CacheSnapshot

_SNIPPET = 60


def draw(snapshot: CacheSnapshot, max_children: int = 8, max_rows: int = 8) -> RenderableType:
    """All of it; of many children or prefixes the largest."""
    return Group(
        _figures(snapshot),
        "",
        _prefixes(snapshot, "largest prefixes", lambda place: snapshot.nodes[place].num_blocks, max_rows),
        "",
        _prefixes(snapshot, "hottest prefixes", lambda place: snapshot.nodes[place].uses, max_rows),
        "",
        _tree(snapshot, max_children),
    )


def _figures(snapshot: CacheSnapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    stats = snapshot.stats
    queried = stats.get("queried_tokens", 0)
    saved = snapshot.saved_bytes
    rows = {
        "blocks": f"{snapshot.num_blocks:,} of {snapshot.block_size} tokens: {snapshot.num_cached_blocks:,} in the tree, "
        f"{snapshot.num_evictable_blocks:,} evictable, {snapshot.num_free_blocks:,} free",
        "sharing": f"{snapshot.sharing_factor:.2f} times as many blocks without"
        + ("" if saved is None else f"; {saved / 2**20:,.1f} MiB saved"),
        "reused": f"{stats.get('reused_tokens', 0):,} of {queried:,} prompt tokens"
        + (f" ({stats.get('reused_tokens', 0) / queried:.0%})" if queried else ""),
        "evicted": f"{stats.get('evicted_tokens', 0):,} tokens",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    return table


def _prefixes(snapshot: CacheSnapshot, title: str, key: Callable[[int], int], max_rows: int) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for column in ("tokens", "blocks", "uses", "live", "idle s"):
        table.add_column(column, justify="right")
    table.add_column("text")
    for place in sorted(range(len(snapshot.nodes)), key=key, reverse=True)[:max_rows]:
        node = snapshot.nodes[place]
        table.add_row(
            f"{node.depth_tokens + node.num_tokens:,}",
            f"{node.num_blocks:,}",
            f"{node.uses:,}",
            f"{node.num_live:,}",
            f"{node.idle_seconds:,.0f}",
            Text(_one_line(snapshot.path_text(place)), style="dim"),
        )
    return table


def _tree(snapshot: CacheSnapshot, max_children: int) -> Tree:
    children: defaultdict[tuple[str, int | None], list[int]] = defaultdict(list)
    for place, node in enumerate(snapshot.nodes):
        children[node.namespace, node.parent].append(place)
    below = snapshot.blocks_below()
    tree = Tree("radix tree")
    pending: list[tuple[Tree, tuple[str, int | None]]] = []
    for namespace in dict.fromkeys(node.namespace for node in snapshot.nodes):
        branch = tree.add(Text(f"namespace {namespace[:8]}", style="magenta")) if namespace else tree
        pending.append((branch, (namespace, None)))
    while pending:
        branch, key = pending.pop()
        widest = sorted(children[key], key=lambda place: -below[place])
        for place in widest[:max_children]:
            node = snapshot.nodes[place]
            label = Text.assemble(
                (f"{node.num_tokens:>5} tokens ", "bold"),
                (f"{node.num_blocks:>3} blocks  ", "cyan"),
                (f"used {node.uses} times  ", "green" if node.uses > 1 else "dim"),
                (_one_line(node.text or ""), "dim"),
            )
            pending.append((branch.add(label), (key[0], place)))
        if len(widest) > max_children:
            branch.add(Text(f"… and {len(widest) - max_children} more", style="dim"))
    return tree


def _one_line(text: str) -> str:
    shown = text.replace("\n", "\\n")
    return shown if len(shown) <= _SNIPPET else shown[: _SNIPPET - 1] + "…"
