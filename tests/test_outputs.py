"""What requests return."""

from __future__ import annotations

from typing import Any

from support.replica_servers import tiny_llm

from radixkv import CompletionOutput, SamplingParams


def test_outputs_of_a_stream_add_up_to_the_whole_answers(default_tokenizer: Any) -> None:
    """The server's and those of slow readers were added up apart, the server's without the cumulative log-probability."""
    llm = tiny_llm(default_tokenizer, block_size=4)
    params = SamplingParams(n=2, seed=1, max_tokens=12, logprobs=1)
    outputs: dict[int, CompletionOutput] = {}
    for piece in llm.stream("Who are you?", params):
        for part in piece.outputs:
            outputs.setdefault(part.index, CompletionOutput(part.index, "", [], logprobs=[])).extend(part)
    assert list(outputs.values()) == llm.generate("Who are you?", params, use_tqdm=False)[0].outputs
