"""How many rows of logits a step may have for the log-probabilities of prompts.

A prompt needs only its last token's logits, unless the log-probabilities of its tokens are wanted: then a step of 8,192
tokens has as many rows, which take 8 GiB in float32 with a vocabulary of 256,000, and as much again while they are summed. A
GPU filled by keys and values has no such memory, and a step that runs out of it fails all of its requests.
"""

from __future__ import annotations

from radixkv.scheduling.batch import ScheduledChunk

PROMPT_LOGIT_ROWS = 256
"""Most rows in a step on a GPU. This many keep its matrix units busy, so splitting a step hardly takes longer in all."""


def bound_logit_rows(chunks: list[ScheduledChunk], max_rows: int) -> list[ScheduledChunk]:
    """The prompt chunks of a step, cut to ``max_rows`` rows of logits; the rest is computed in the steps that follow."""
    bounded = []
    for chunk in chunks:
        if chunk.group.request.lacks_prompt_logprobs:
            chunk = chunk.first(max_rows)
            max_rows -= chunk.num_tokens
        if chunk.num_tokens:
            bounded.append(chunk)
    return bounded
