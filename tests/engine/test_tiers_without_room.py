"""What tiers keep where there is no room, or no time, for everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dict_tier import DictTier
from support.tiered_llm import GREEDY, PROMPTS, STEM, answers, blocks_below, make
from support.time_limit import HANGING

from radixkv import SamplingParams

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")


def test_shutdown_writes_what_was_used_last_first() -> None:
    tier = DictTier()
    llm = make(tiers=[tier])
    answers(llm, PROMPTS[:1])
    answers(llm, [{"prompt_token_ids": STEM[::-1]}])
    tiers = llm.engine.tiers
    left = iter([1.0, 0.0])
    tiers.write_hot(lambda: next(left))
    tiers.close(HANGING)
    first = make(tiers=[tier]).generate([PROMPTS[0], {"prompt_token_ids": STEM[::-1]}], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in first] == [0, 40]


@pytest.mark.parametrize("store", ["disk", "shared"])
def test_a_full_store_gives_up_the_last_blocks_of_a_long_prefix_first(tmp_path: Path, store: str) -> None:
    """Those of one write were ordered, but not the writes: of a hundred blocks, the first thirty made room."""
    first, second = [3 + 7 * i % 80 for i in range(401)], [5 + 11 * i % 80 for i in range(121)]
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": 110 * 4096}
    if store == "shared":
        options = {"shared_cache": str(tmp_path), "shared_cache_size": 110 * 1200}
    sizes = {"num_blocks": 300, "max_num_batched_tokens": 512}
    with make(**options, **sizes, cache_write_policy="write-through") as llm:
        for prompt in (first, second):
            llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), use_tqdm=False)
            assert llm.engine.tiers.flush(600)
        there = blocks_below(llm, first)
        assert 70 <= sum(there) < 100
        assert there == sorted(there, reverse=True)


@pytest.mark.parametrize("policy", ["write-back", "write-through"])
@pytest.mark.parametrize("store", ["disk", "shared"])
def test_a_shutdown_leaves_the_most_recently_used_in_a_store_with_less_room(
    tmp_path: Path, store: str, policy: str
) -> None:
    """They were written first, and made room for all others."""
    prompts = [[*range(3 + 9 * i, 12 + 9 * i), *range(3, 35)] for i in range(6)]  # ten blocks each
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": 21 * 4096}
    if store == "shared":
        options = {"shared_cache": str(tmp_path), "shared_cache_size": 21 * 1200}
    with make(**options, cache_write_policy=policy) as llm:
        for prompt in prompts:
            llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), use_tqdm=False)
    with make(**options, cache_write_policy=policy) as llm:
        found = [sum(blocks_below(llm, prompt)) for prompt in prompts]
        assert found[-2:] == [10, 10]
        assert sum(found) <= 21
