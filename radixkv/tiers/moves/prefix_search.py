"""How far tiers have a prefix: its whole blocks up to the first gap, and behind them a partly filled one."""

from __future__ import annotations

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.stack import Span, TierStack


def find_prefix(
    stack: TierStack, prefix_keys: PrefixKeys, namespace: str, tokens: bytes, start: int
) -> tuple[list[BlockKey], list[Span]]:
    """Where the blocks of a prefix from index ``start`` on are. May wait for a server.

    A partly filled block is looked for only behind whole blocks that were found: alone, it would save little.

    Args:
        stack: is asked.
        prefix_keys: makes the keys.
        namespace: of the prefix.
        tokens: of the prefix, encoded.
        start: index of a block.

    Returns:
        The keys of the prefix's blocks, the partly filled one's being the last if it was found; and the spans.
    """
    keys = prefix_keys.of(namespace, tokens)
    spans = stack.find(keys, start)
    if not spans:
        return keys, spans
    *before, last = spans
    # Where nearer tiers have all whole blocks, a server behind them is not asked for the rest.
    num_tiers = len(stack.media) if last.stop < len(keys) else last.tier + 1
    found = stack.find_first(prefix_keys.partly_filled(namespace, tokens, last.stop), num_tiers)
    if found is None:
        return keys, spans
    tier, key = found
    if tier == last.tier:
        spans = [*before, Span(tier, last.start, last.stop + 1)]
    else:
        spans = [*spans, Span(tier, last.stop, last.stop + 1)]
    return [*keys[: last.stop], key], spans
