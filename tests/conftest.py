"""What many tests share: the default model, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings

if TYPE_CHECKING:
    from radixkv.llm import LLM

# For mutation testing, where every example is run thousands of times: few, always the same, and never shrunk.
settings.register_profile("mutation", max_examples=20, derandomize=True, database=None, phases=[Phase.generate])


# Files of a minute or more, the longest first. What several workers share out begins with them, so that none is left alone
# with one of them at the end.
LONG_FILES = [
    "server/test_fuzz.py",
    "cli/test_cli.py",
    "testing/test_kit.py",
    "model/test_compiled_layers.py",
    "test_examples.py",
    "model/test_default_model.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    for item in marked:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def default_llm() -> LLM:
    """The real default model. Tests leave its cache as they like, but nothing running."""
    # Only here: tests of the cache do without torch.
    from radixkv.llm import LLM

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
