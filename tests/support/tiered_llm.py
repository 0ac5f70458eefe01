"""An engine over a tiny model with tiers below its pool, and prompts that share most of their tokens."""

from __future__ import annotations

from typing import Any

from support.model_zoo import VOCAB_SIZE, build_shallow

from radixkv import LLM, SamplingParams
from radixkv.cache.tokens import encode

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
STEM = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(42)]
PROMPTS: list[Any] = [{"prompt_token_ids": [*STEM[:40], 5 + tail, 9, 11]} for tail in range(3)]


def make(name: str = "llama", **options: Any) -> LLM:
    sizes = {"block_size": 4, "num_blocks": 80, "max_num_batched_tokens": 16}
    return LLM(build_shallow(name), **{**sizes, **options})


def answers(llm: LLM, prompts: Any = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.engine.cache.check()
    return [output.outputs[0].token_ids for output in outputs]


def evict(llm: LLM, num_blocks: int) -> None:
    """Let the cache give up so many blocks, and the tiers have what they get."""
    cache = llm.engine.cache
    table = cache.open([1], "evicts")
    cache.reserve(table, (cache.num_free_blocks + num_blocks) * cache.block_size)
    cache.abort(table)
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.flush(600)


def evict_all(llm: LLM) -> None:
    """Let the cache give up every block that is not pinned."""
    evict(llm, llm.engine.cache.num_evictable_blocks)


def blocks_below(llm: LLM, token_ids: list[int]) -> list[bool]:
    """Which whole blocks of a prefix the nearest tier has."""
    tiers = llm.engine.tiers
    assert tiers is not None
    nearest = tiers._stack._tiers[0]
    return [nearest.contains_prefix([key]) == 1 for key in tiers._keys.of("", encode(token_ids))]


def free_blocks(llm: LLM) -> int:
    cache = llm.engine.cache
    cache.check()
    return cache.num_free_blocks + cache.num_evictable_blocks
