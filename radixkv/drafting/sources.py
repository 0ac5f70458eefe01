"""The drafters that every engine with drafts has."""

from __future__ import annotations

from radixkv.cache import PrefixCache
from radixkv.drafting.document import Document
from radixkv.drafting.drafter import NO_DRAFT, Draft, DraftContext, Drafter
from radixkv.drafting.tree_index import TreeIndex

# A sequence with more blocks that the tree does not have is on no path of the tree.
_MAX_OWN_BLOCKS = 2


class GrammarDrafter(Drafter):
    """What a grammar forces: the keys of an object, the rest of an enumerated string.

    The text is forced, the tokens are not quite: a model may spell it with others.
    """

    source = "grammar"

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        if context.grammar is None:
            return NO_DRAFT
        return Draft(context.grammar.forced_tokens()[:max_tokens])


class PrefixDrafter(Drafter):
    """The continuation in the radix tree of exactly this sequence: asked again, regenerated, another sample.

    Args:
        cache: whose tree it is.
    """

    source = "prefix"

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        table = context.table
        if table is None or len(table.own_block_ids) > _MAX_OWN_BLOCKS:
            return NO_DRAFT
        return Draft(self._cache.continuation(table, context.token_ids, max_tokens))


class TreeDrafter(Drafter):
    """What followed the last tokens elsewhere in the tree, in the same namespace.

    Args:
        cache: whose tree it is.
        index: of that cache.
    """

    source = "tree"

    def __init__(self, cache: PrefixCache, index: TreeIndex) -> None:
        self._cache = cache
        self._index = index

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        found = self._index.find(context.token_ids, context.namespace)
        if found is None:
            return NO_DRAFT
        return Draft(self._cache.following(found.node, found.offset, max_tokens), found.length)


class SuffixDrafter(Drafter):
    """What followed the last tokens earlier in the request's own prompt or answer."""

    source = "suffix"

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        if context.own is None:
            context.own = Document(context.token_ids, len(context.token_ids) + max_tokens)
        return context.own.draft(context.token_ids, max_tokens)


class PredictionDrafter(Drafter):
    """What the client predicted, from where the answer is in it (OpenAI's predicted outputs)."""

    source = "prediction"

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        if not context.prediction:
            return NO_DRAFT
        if context.predicted is None:
            context.predicted = Document(list(context.prediction), len(context.prediction), begins=True)
        return context.predicted.draft(context.token_ids, max_tokens)


def drafters(cache: PrefixCache, index: TreeIndex) -> list[Drafter]:
    """One of each.

    Args:
        cache: whose tree they draft from.
        index: one of its observers.
    """
    return [GrammarDrafter(), PrefixDrafter(cache), PredictionDrafter(), SuffixDrafter(), TreeDrafter(cache, index)]
