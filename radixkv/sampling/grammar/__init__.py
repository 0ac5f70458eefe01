"""Structured output: what a request's grammar does not allow next is never sampled.

::

    compiler.py             grammars of requests, compiled
      specification.py      the constraint of a request; structural_tag.py: free text with constrained parts
      answer_frames.py      what calls of tools and thoughts may be beside it
      lark_parts.py         how much work each part of a grammar is
    state.py                a sequence's state in its grammar
      mask.py               logits of a batch, masked
    tokenizer.py            a model's tokenizer, as llguidance takes it
    budget.py               how much processor time grammars may take from other requests
"""
