"""A request begins: its first sequences, and the state in which they are sampled or searched."""

from __future__ import annotations

from typing import Any

import numpy as np

from radixkv.engine.sampled_token import prepare_sampling
from radixkv.sampling.beam_search import BeamSearch
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling_params import BeamSearchParams
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence


def begin_request(request: Request, tokenizer: Any) -> list[SequenceGroup]:
    """Give a request its first sequences, unless it was resumed and has them.

    All samples of a prompt begin as one sequence, which forks once the prompt is computed. Resumed ones are apart already.

    Returns:
        The groups to be scheduled; none if the request was resumed where nothing is left to generate.
    """
    if request.resumed:
        unfinished = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        return [SequenceGroup(request, [each], np.array(each.token_ids, dtype=np.int32)) for each in unfinished]
    sequence = TokenSequence(request, 0, request.prompt_token_ids.tolist())
    params = request.params
    if isinstance(params, BeamSearchParams):
        stop = params.stop_strings
        finder = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, stop=stop) if stop else None
        request.beam_search = BeamSearch(params, request.max_new_tokens, request.end_token_ids, finder, request.grammar)
    else:
        prepare_sampling(sequence, tokenizer)
    request.sequences = [sequence]
    return [SequenceGroup(request, [sequence], request.prompt_token_ids)]
