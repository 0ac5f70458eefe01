"""What many tests share: the default model, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from radixkv.llm import LLM


@pytest.fixture(scope="session")
def default_llm() -> LLM:
    """The real default model. Tests leave its cache as they like, but nothing running."""
    return LLM(block_size=16, num_blocks=600)


@pytest.fixture
def llm(default_llm: LLM) -> Iterator[LLM]:
    """The default model with an empty cache; afterwards the cache's rules are verified."""
    default_llm.reset_prefix_cache()
    yield default_llm
    default_llm.engine.cache.check()
    assert default_llm.reset_prefix_cache()


@pytest.fixture(scope="session")
def default_tokenizer(default_llm: LLM) -> Any:
    return default_llm.get_tokenizer()
