"""A snapshot as a picture: depth to the right, blocks downward, colour by use.

::

    +----------------+-----------+---------+
    |                |  turn 1   | turn 2  |
    | system prompt  +-----------+---------+
    |                |  turn 1   |
    +----------------+-----------+

A node's height is that of all below it, or its own where nothing is; its width grows with its tokens.
"""

from __future__ import annotations

import math
from html import escape

from radixkv.observe.inspect.snapshot import CacheSnapshot

_WIDTH, _HEIGHT, _HEADER = 1200.0, 700.0, 30.0
_LEAST_HEIGHT = 14.0  # of a node with text in it
_LETTER = 6.6


def to_svg(snapshot: CacheSnapshot) -> str:
    """The picture, as text."""
    nodes = snapshot.nodes
    leaves = _leaves_below(snapshot)
    widths = [math.sqrt(node.num_tokens) for node in nodes]
    ends: list[float] = []
    for place, node in enumerate(nodes):
        ends.append(widths[place] + (0.0 if node.parent is None else ends[node.parent]))
    x_scale = _WIDTH / max(ends, default=1.0)
    num_rows = sum(leaves[place] for place, node in enumerate(nodes) if node.parent is None)
    row = max(2.0, min(24.0, _HEIGHT / max(1, num_rows)))
    height = _HEADER + row * num_rows
    most_uses = max((node.uses for node in nodes), default=1)
    title = (
        f"{snapshot.num_cached_blocks:,} blocks of {snapshot.block_size} tokens in {len(nodes):,} nodes; "
        f"sharing saves {snapshot.sharing_factor:.2f} times"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'font-family="monospace" font-size="11">',
        f'<text x="4" y="18">{escape(title)}</text>',
    ]
    next_top: dict[int | None, float] = {None: _HEADER}
    for place, node in enumerate(nodes):
        top = next_top[node.parent]
        next_top[node.parent] = top + row * leaves[place]
        next_top[place] = top
        left, width = (ends[place] - widths[place]) * x_scale, widths[place] * x_scale
        heat = math.log2(node.uses) / max(1.0, math.log2(most_uses))
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{row * leaves[place]:.1f}" '
            f'fill="hsl({45 - 40 * heat:.0f},90%,{88 - 30 * heat:.0f}%)" stroke="white" stroke-width="0.5">'
            f"<title>{escape(_caption(snapshot, place))}</title></rect>"
        )
        letters = int(width / _LETTER) - 1
        if row * leaves[place] >= _LEAST_HEIGHT and letters > 3 and node.text:
            shown = escape(node.text.replace("\n", " ")[:letters])
            parts.append(f'<text x="{left + 3:.1f}" y="{top + row * leaves[place] / 2 + 4:.1f}">{shown}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _leaves_below(snapshot: CacheSnapshot) -> list[int]:
    """How many leaves are below each node; 1 for a leaf."""
    counts = [0] * len(snapshot.nodes)
    for place in reversed(range(len(counts))):
        counts[place] = max(1, counts[place])
        parent = snapshot.nodes[place].parent
        if parent is not None:
            counts[parent] += counts[place]
    return counts


def _caption(snapshot: CacheSnapshot, place: int) -> str:
    node = snapshot.nodes[place]
    return (
        f"{node.num_tokens} tokens in {node.num_blocks} blocks, after {node.depth_tokens}; used {node.uses} times, "
        f"idle for {node.idle_seconds:.0f} s: {node.text or ''}"
    )
