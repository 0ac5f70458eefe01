"""A synchronous engine of a tiny model, and that nothing is left in it."""

from __future__ import annotations

from typing import Any

from support.model_zoo import build_supported

from radixkv import LLM


def tiny(**options: Any) -> LLM:
    return LLM(build_supported("llama"), **{"block_size": 4, "num_blocks": 400, **options})


def assert_empty(llm: LLM) -> None:
    """Nothing runs, nothing leaks: what is held is cached, and all of it can be cleared."""
    cache = llm.engine.cache
    cache.check()
    assert not llm.engine.has_unfinished_requests
    assert not llm.engine.scheduler.waiting
    assert not llm.engine.scheduler.running
    assert cache.num_free_blocks + cache.num_evictable_blocks == cache.num_blocks
    assert llm.reset_prefix_cache()
