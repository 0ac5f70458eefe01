"""A snapshot as an SVG icicle plot: depth to the right, leaves downward, colour by use.

::

    +----------------+-----------+---------+
    |                |  turn 1   | turn 2  |
    | system prompt  +-----------+---------+
    |                |  turn 1   |
    +----------------+-----------+

A node is as high as all leaves below it; its width is the square root of its tokens; its colour shows its uses.
"""

from __future__ import annotations

import math
from html import escape

from radixkv.cache.counted import counted
from radixkv.observe.inspect.snapshot import CacheSnapshot
from radixkv.observe.inspect.visible_text import visible

_WIDTH, _HEIGHT, _HEADER = 1200.0, 700.0, 30.0
_MIN_TEXT_HEIGHT = 14.0  # of a node whose text is shown
_CHARACTER_WIDTH = 6.6


def to_svg(snapshot: CacheSnapshot) -> str:
    """The plot as an SVG document."""
    nodes = snapshot.nodes
    leaves = snapshot.leaves_below()
    widths = [math.sqrt(node.num_tokens) for node in nodes]
    right_edges: list[float] = []
    for index, node in enumerate(nodes):
        right_edges.append(widths[index] + (0.0 if node.parent is None else right_edges[node.parent]))
    x_scale = _WIDTH / max(right_edges, default=1.0)
    num_rows = sum(leaves[index] for index, node in enumerate(nodes) if node.parent is None)
    row_height = max(2.0, min(24.0, _HEIGHT / max(1, num_rows)))
    height = _HEADER + row_height * num_rows
    max_uses = max((node.uses for node in nodes), default=1)
    title = (
        f"{counted(snapshot.num_cached_blocks, 'block')} of {counted(snapshot.block_size, 'token')} in "
        f"{counted(len(nodes), 'node')}; "
        f"sharing saves {snapshot.sharing_factor:.2f} times"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'font-family="monospace" font-size="11">',
        f'<text x="4" y="18">{escape(title)}</text>',
    ]
    next_top: dict[int | None, float] = {None: _HEADER}
    for index, node in enumerate(nodes):
        top = next_top[node.parent]
        next_top[node.parent] = top + row_height * leaves[index]
        next_top[index] = top
        left, width = (right_edges[index] - widths[index]) * x_scale, widths[index] * x_scale
        heat = math.log2(node.uses) / max(1.0, math.log2(max_uses))
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{row_height * leaves[index]:.1f}" '
            f'fill="hsl({45 - 40 * heat:.0f},90%,{88 - 30 * heat:.0f}%)" stroke="white" stroke-width="0.5">'
            f"<title>{escape(_caption(snapshot, index))}</title></rect>"
        )
        num_characters = int(width / _CHARACTER_WIDTH) - 1
        if row_height * leaves[index] >= _MIN_TEXT_HEIGHT and num_characters > 3 and node.text:
            visible_text = escape(visible(node.text[:num_characters])[:num_characters])
            parts.append(
                f'<text x="{left + 3:.1f}" y="{top + row_height * leaves[index] / 2 + 4:.1f}">{visible_text}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _caption(snapshot: CacheSnapshot, index: int) -> str:
    node = snapshot.nodes[index]
    return (
        f"{counted(node.num_tokens, 'token')} in {counted(node.num_blocks, 'block')}, after {node.depth_tokens}; used "
        f"{counted(node.uses, 'time')}, "
        f"idle for {node.idle_seconds:.0f} s: {visible(node.text or '')}"
    )
