"""vLLM with drafts from n-grams, run as ``python vllm_drafts.py MODEL DTYPE`` in its own environment.

It imports nothing of RadixKV but `engine_process`, the file beside it. It prints a line of JSON when it can serve, then reads
lines of ``[[prompt, number of tokens], ...]``, answers a line's prompts one after the other, and prints the seconds taken.
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import MappingProxyType
from typing import Any

# As in vLLM's own example.
_NGRAM = MappingProxyType(
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
)


def main(model: str, dtype: str) -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that what vLLM prints is not taken for a reply
    from engine_process import VLLM_ENVIRONMENT  # type: ignore[import-not-found]

    os.environ.update(VLLM_ENVIRONMENT)
    import vllm

    llm = vllm.LLM(model, dtype=dtype, speculative_config=dict(_NGRAM), max_num_seqs=4, max_model_len=4096)

    def answer(questions: list[tuple[list[int], int]]) -> float:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        for prompt, num_tokens in questions:
            params: Any = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start

    answer([([*range(100, 108)] * 4, 32)])
    print(json.dumps("ready"), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies)


if __name__ == "__main__":
    main(*sys.argv[1:])
