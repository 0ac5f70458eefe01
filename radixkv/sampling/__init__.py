"""From logits to tokens and text.

::

    sampler.py              one token per row of a batch's logits
      logit_changes.py      biases, bans; penalties.py: penalties, of all rows at once
      grammar_mask.py       what a grammar does not allow next
      exponential.py        the draw, on the logits' device; host_draw.py: on a CPU; variates.py: its random numbers
      logprobs.py
    structured_output.py    grammars of requests; grammar_tokenizer.py, grammar_budget.py
      specification.py      what a request asks for; json_schema.py, structural_tag.py
      answer_frames.py      what calls of tools and thoughts may be beside it
    beam_search.py          which continuations of a search keep running
    detokenizer.py          text while it grows, and stop strings
"""
