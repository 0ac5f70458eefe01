"""Drafts: guesses of how sequences go on, so that one step can verify several tokens at once.

A draft is never trusted: the model computes its tokens, and each is kept only if it is the one that would have been drawn at
its position. So drafts change how many tokens a step yields, never which.

::

    Drafter                 where drafts come from; see `radixkv.drafting.drafter` to write one
      PrefixDrafter         the continuation in the radix tree of exactly this sequence
      AnswerDrafter         where the last tokens occur in another answer to the same prompt
      TreeDrafter           where the last tokens occur in what the tree holds of the namespace
      SuffixDrafter         where they occur in the request's own prompt and answer
      PredictionDrafter     where they occur in what the client predicted
      GrammarDrafter        what a grammar forces, and what is usual between
    AcceptanceRates, StepTimes, choose_lengths: how many of them are worth their rows

(Speculative decoding: Leviathan et al. 2023; from n-grams of the prompt: Saxena 2023; from what was generated before:
SuffixDecoding, Oliaro et al. 2024.)
"""

from radixkv.drafting.drafter import NO_DRAFT, Draft, DraftContext, Drafter

__all__ = ["NO_DRAFT", "Draft", "DraftContext", "Drafter"]
