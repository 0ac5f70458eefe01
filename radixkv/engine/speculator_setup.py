"""The speculator that a configuration describes, and how many rows its drafts may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from radixkv.cache import PrefixCache
from radixkv.config import ResolvedEngineConfig
from radixkv.drafting.drafter import Drafter
from radixkv.drafting.sources import drafters
from radixkv.drafting.tree_index import TreeIndex
from radixkv.engine.speculation import Speculator
from radixkv.scheduling.sequence_blocks import SequenceBlocks

# Rows that drafts may add to a step, per sequence that it may have; each takes a row of logits.
_MAX_DRAFTS_PER_SEQUENCE = 4


def max_draft_rows(config: ResolvedEngineConfig) -> int:
    """Rows beyond ``max_num_seqs`` that a batch may have because of drafts; 0 where there are none."""
    speculation = config.speculation
    if speculation is None:
        return 0
    of_each = min(_MAX_DRAFTS_PER_SEQUENCE, speculation.num_speculative_tokens)
    return max(min(of_each * config.max_num_seqs, config.max_num_batched_tokens - config.max_num_seqs), 0)


def make_speculator(
    config: ResolvedEngineConfig,
    cache: PrefixCache,
    index: TreeIndex | None,
    blocks: SequenceBlocks,
    vocab_size: int,
    clock: Callable[[], float],
) -> Speculator | None:
    """The speculator over the cache of an engine, and an index that observes it; None: there are no drafts.

    Raises:
        TypeError: a drafter is not a `Drafter`.
        ValueError: a drafter has no name, or that of another one.
    """
    speculation = config.speculation
    if speculation is None or index is None:
        return None
    for drafter in speculation.drafters:
        if not isinstance(drafter, Drafter):
            raise TypeError(f"drafters: expected objects of subclasses of Drafter, got {drafter!r:.80}")
        if not isinstance(getattr(drafter, "source", None), str):
            raise ValueError(f"drafters: expected a drafter with a string as its source, got {drafter!r:.80}")
    all_drafters = [*speculation.drafters, *drafters(cache, index)]
    source, count = Counter(drafter.source for drafter in all_drafters).most_common(1)[0]
    if count > 1:  # what is learned of one would be applied to the other
        raise ValueError(f"drafters: expected each drafter to have a source of its own, got {count} with {source!r}")
    return Speculator(
        all_drafters,
        blocks,
        max_tokens=speculation.num_speculative_tokens,
        max_rows=_MAX_DRAFTS_PER_SEQUENCE * config.max_num_seqs,
        max_batched_tokens=config.max_num_batched_tokens,
        vocab_size=vocab_size,
        clock=clock,
    )
