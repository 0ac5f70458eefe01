"""From logits to tokens and text.

::

    sampler.py              one token per row of a batch's logits
      logit_changes.py      biases, bans; penalties.py: penalties, of all rows at once
      exponential.py        the draw, on the logits' device; host_draw.py: on a CPU; variates.py: its random numbers
      logprobs.py
    grammar/                structured output: what a grammar does not allow next
    json_schema/            schemas in words that the grammars' compiler takes
    beam_search.py          which continuations of a search keep running
    detokenizer.py          text while it grows, and stop strings
"""
