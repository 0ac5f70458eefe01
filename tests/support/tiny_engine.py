"""A synchronous engine of a tiny model, its requests, and that nothing is left in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from support.model_zoo import build_supported

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.prompts import Prompt
from radixkv.scheduling.request import Request


def tiny(**options: Any) -> LLM:
    return LLM(build_supported("llama"), **{"block_size": 4, "num_blocks": 600, **options})


def add(
    engine: Engine, name: str, token_ids: Sequence[int], params: SamplingParams | BeamSearchParams, **options: Any
) -> Request:
    """Queue a request."""
    request = engine.request_factory.make(name, Prompt(list(token_ids)), params, **options)
    engine.add(request)
    return request


def finish(engine: Engine) -> None:
    """Answer all requests."""
    while engine.has_unfinished_requests:
        engine.step()


def raising_at(call: int, error: BaseException, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises when it is called for the ``call``-th time."""
    calls = itertools.count(1)

    def function(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*arguments, **options)

    return function


def assert_empty(llm: LLM) -> None:
    """Nothing runs, nothing leaks: what is held is cached, and all of it can be cleared."""
    cache = llm.engine.cache
    cache.check()
    assert not llm.engine.has_unfinished_requests
    assert not llm.engine.scheduler.waiting
    assert not llm.engine.scheduler.running
    assert cache.num_free_blocks + cache.num_evictable_blocks == cache.num_blocks
    assert llm.reset_prefix_cache()
