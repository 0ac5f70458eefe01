"""What tiers have given up or lost is written to them again, although the engine has written it once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.dict_tier import DictTier
from support.tiered_llm import answers, blocks_below, evict, evict_all, make

from radixkv import LLM
from radixkv.tiers.moves.known_blocks import KnownBlocks

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")

HOT = [3 + i % 40 for i in range(41)]
OTHERS = [[50 + (first + i) % 40 for i in range(61)] for first in range(3)]


def use(llm: LLM, tokens: list[int]) -> None:
    """Answer a prompt, and write what is due."""
    answers(llm, [{"prompt_token_ids": tokens}])
    assert llm.engine.tiers.flush(600)


@pytest.mark.parametrize("name", ["disk_cache", "shared_cache"])
def test_what_a_full_tier_gave_up_is_written_again_when_it_is_evicted(tmp_path: Path, name: str) -> None:
    """It counted as written: for good in a shared folder; on a disk until as many blocks were written as fit without their
    headers, and without rounding up to pages."""
    num_bytes = {"disk_cache": 20 * 4096, "shared_cache": 20 * 1200}[name]
    options = {name: str(tmp_path / "blocks"), f"{name}_size": num_bytes}
    with make(**options, cache_write_policy="write-through") as llm:
        use(llm, HOT)
        assert sum(blocks_below(llm, HOT)) == 10
        for tokens in OTHERS:
            use(llm, tokens)
        assert sum(blocks_below(llm, HOT)) == 0
        assert llm.engine.cache.match(HOT) == len(HOT)
        evict(llm, 10)
        assert sum(blocks_below(llm, HOT)) >= 8


def test_what_a_server_lost_with_other_blocks_is_written_again_when_it_is_used() -> None:
    """After a restart of the server, what was hot in the pool was not written until it was computed again."""
    tier = DictTier()
    llm = make(tiers=[tier], cache_write_policy="write-through")
    use(llm, HOT)
    use(llm, OTHERS[0])
    llm.pin({"prompt_token_ids": HOT})
    evict_all(llm)
    tier.blocks.clear()
    use(llm, HOT)
    assert sum(blocks_below(llm, HOT)) == 0  # nothing shows yet that it is lost
    use(llm, OTHERS[0])
    use(llm, HOT)
    assert sum(blocks_below(llm, HOT)) == 10


def test_what_is_known_of_a_tier_that_keeps_its_blocks_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else everything would be copied out of the pool again."""
    lost: list[int] = []
    monkeypatch.setattr(KnownBlocks, "lost", lambda known, block_hash: lost.extend({block_hash} & {*known._blocks}))
    llm = make(tiers=[DictTier()], cache_write_policy="write-through")
    for _ in range(3):
        for tokens in (HOT, *OTHERS, [*HOT, *OTHERS[0]]):
            use(llm, tokens)
        evict_all(llm)
    assert not lost
