"""A snapshot in the terminal: figures, the largest and the hottest prefixes, the tree."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from radixkv.cache.counted import counted
from radixkv.observe.inspect.snapshot import CacheSnapshot
from radixkv.observe.inspect.tree_view import draw_tree, one_line, usage_label

_MAX_PREFIXES = 8


def draw(snapshot: CacheSnapshot, max_children: int = 8) -> RenderableType:
    """All of it, with at most ``max_children`` per node."""
    return Group(
        _figures(snapshot),
        "",
        _prefixes(snapshot, "largest prefixes", lambda index: snapshot.nodes[index].num_blocks),
        "",
        _prefixes(snapshot, "hottest prefixes", lambda index: snapshot.nodes[index].uses),
        "",
        draw_tree(snapshot, max_children, usage_label),
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
        "evicted": counted(stats.get("evicted_tokens", 0), "token"),
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    return table


def _prefixes(snapshot: CacheSnapshot, title: str, key: Callable[[int], int]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for column in ("tokens", "own blocks", "uses", "live", "idle s"):
        table.add_column(column, justify="right")
    table.add_column("text")
    for index in sorted(range(len(snapshot.nodes)), key=key, reverse=True)[:_MAX_PREFIXES]:
        node = snapshot.nodes[index]
        table.add_row(
            f"{node.depth_tokens + node.num_tokens:,}",
            f"{node.num_blocks:,}",
            f"{node.uses:,}",
            f"{node.num_live:,}",
            f"{node.idle_seconds:,.0f}",
            Text(one_line(snapshot.path_text(index)), style="dim"),
        )
    return table
