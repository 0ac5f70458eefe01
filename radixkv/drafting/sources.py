"""The drafters that every engine with drafts has."""

from __future__ import annotations

from abc import abstractmethod

from radixkv.cache import PrefixCache
from radixkv.cache.continuation import following
from radixkv.drafting.document import Document
from radixkv.drafting.drafter import NO_DRAFT, Draft, DraftContext, Drafter
from radixkv.drafting.followers import Followers, NamespaceFollowers
from radixkv.drafting.tree_index import TreeIndex

# A sequence with more blocks of its own, which the tree does not have, is on no path of the tree.
_MAX_OWN_BLOCKS = 2
# How many tokens of an answer to the same prompt are looked at.
_MAX_ANSWER = 1024


class GrammarDrafter(Drafter):
    """What a grammar forces: the keys of an object, the rest of an enumerated string.

    The text is forced, but its tokens not quite: a model may spell it with others. And between forced texts there are small
    choices, such as whether a space follows a colon: there, the guess is what earlier answers of this namespace did; for a
    request that does not both read and write the cache, what its own answer did.

    Args:
        followers: one of the observers of the cache, so that they are cleared with it.
    """

    source = "grammar"

    def __init__(self, followers: NamespaceFollowers) -> None:
        self._followers = followers

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        if context.grammar is None:
            return NO_DRAFT
        own, num_noted = context.notes.get(self) or (Followers(), context.num_prompt_tokens)
        shared = context.read_cache and context.write_cache
        followers = self._followers.of(context.namespace) if shared else own
        sequence = context.token_ids
        followers.note(sequence, num_noted)
        context.notes[self] = own, len(sequence)
        return Draft(context.grammar.likely_tokens(sequence[-1], followers.by_token, max_tokens))


class PrefixDrafter(Drafter):
    """The continuation in the radix tree of exactly this sequence: asked again, regenerated, another sample."""

    source = "prefix"

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        table = context.table
        if table is None or not context.read_cache or len(table.own_block_ids) > _MAX_OWN_BLOCKS:
            return NO_DRAFT
        return Draft(self._cache.continuation(table, context.token_ids, max_tokens))


class _DocumentDrafter(Drafter):
    """Where the last tokens occur in one text for the whole sequence."""

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        document: Document | None = context.notes.get(self)
        if document is None:
            document = self._open(context)
            if document is None:
                return NO_DRAFT
            context.notes[self] = document
        return document.draft(context.token_ids, max_tokens)

    @abstractmethod
    def _open(self, context: DraftContext) -> Document | None:
        """The text; None: there is none yet."""


class AnswerDrafter(_DocumentDrafter):
    """Where the last tokens occur in another answer to the same prompt: regenerated with another seed, another sample.

    `PrefixDrafter` follows that answer up to the first token that differs; after it, the same words recur elsewhere.

    The other answer is looked up behind the prompt, so only while nothing of this one is published. A sequence that is first
    asked about with more than one token, as each of several samples is where steps are launched ahead, gets no drafts.
    """

    source = "answer"

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def _open(self, context: DraftContext) -> Document | None:
        num_generated = len(context.token_ids) - context.num_prompt_tokens
        # Several samples fork with their first tokens.
        if context.table is None or not context.read_cache or num_generated > 1:
            return None
        prompt = context.token_ids[: context.num_prompt_tokens]
        answer = self._cache.continuation(context.table, prompt, _MAX_ANSWER)
        return Document(answer, begins=num_generated == 0) if answer else None


class TreeDrafter(Drafter):
    """What followed the last tokens elsewhere in the tree, in the same namespace."""

    source = "tree"

    def __init__(self, index: TreeIndex) -> None:
        self._index = index

    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        found = self._index.find(context.token_ids, context.namespace) if context.read_cache else None
        if found is None:
            return NO_DRAFT
        return Draft(following(found.node, found.offset, max_tokens), found.length)


class SuffixDrafter(_DocumentDrafter):
    """What followed the last tokens earlier in the request's own prompt or answer."""

    source = "suffix"

    def _open(self, context: DraftContext) -> Document:
        return Document(context.token_ids)


class PredictionDrafter(_DocumentDrafter):
    """The client's prediction, from the position in it that the answer has reached (OpenAI's predicted outputs)."""

    source = "prediction"

    def _open(self, context: DraftContext) -> Document | None:
        return Document(list(context.prediction), begins=True) if context.prediction else None


def drafters(cache: PrefixCache, index: TreeIndex) -> list[Drafter]:
    """One of each, over a cache that they observe from now on, and an index that observes it."""
    followers = NamespaceFollowers()
    cache.add_observer(followers)
    return [
        GrammarDrafter(followers),
        PrefixDrafter(cache),
        PredictionDrafter(),
        AnswerDrafter(cache),
        SuffixDrafter(),
        TreeDrafter(index),
    ]
