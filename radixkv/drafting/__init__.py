"""Drafts: guesses of how sequences go on, so that one step can verify several tokens at once.

A draft is never trusted: the model computes its tokens, and each is kept only if it is the one that would have been drawn at
its position. So drafts change how many tokens a step yields, never which.

::

    drafter.py              Drafter: the interface of a source of drafts
    sources.py              those of every engine:
      PrefixDrafter         the continuation in the radix tree of exactly this sequence
      AnswerDrafter         where the last tokens occur in another answer to the same prompt
      TreeDrafter           where the last tokens occur in what the tree holds of the namespace (tree_index.py)
      SuffixDrafter         where they occur in the request's own prompt and answer (document.py)
      PredictionDrafter     where they occur in what the client predicted
      GrammarDrafter        what a grammar forces, and what is usual between (followers.py)
      kgrams.py             runs of tokens, by which these look them up
    acceptance.py, step_times.py, lengths.py: how often drafts prove right, what rows cost, how many are worth that
    sequence_drafts.py      what is known of one sequence

(Speculative decoding: Leviathan et al. 2023; from n-grams of the prompt: Saxena 2023; from what was generated before:
SuffixDecoding, Oliaro et al. 2024.)
"""

from radixkv.drafting.drafter import NO_DRAFT, Draft, DraftContext, Drafter

__all__ = ["NO_DRAFT", "Draft", "DraftContext", "Drafter"]
