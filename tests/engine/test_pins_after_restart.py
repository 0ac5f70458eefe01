"""Pins that a disk remembers: once their prefix is used, they are in force again, for the same owner and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cache_driver import leave
from support.tiered_llm import PROMPTS, answers, evict_all, make
from support.time_limit import HANGING

from radixkv import LLM
from radixkv.cache import InvalidArgumentError
from radixkv.engine.clearing import NamespaceSelection

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")

TOKENS: list[int] = PROMPTS[0]["prompt_token_ids"]
# The prompt's whole blocks; the block after them is cached only in part.
NUM_WHOLE = 40


@pytest.fixture
def open_llm(tmp_path: Path) -> Any:
    """An engine over the one folder, whose disk has room for all."""
    return lambda **options: make(**{"disk_cache": tmp_path, "disk_cache_size": "4MiB", **options})


def use(llm: LLM, salt: str = "ann") -> int:
    """Ask with the prompt; returns how much of it was cached."""
    (output,) = llm.generate({**PROMPTS[0], "cache_salt": salt}, use_tqdm=False)
    llm.engine.cache.check()
    return output.num_cached_tokens or 0


def test_a_log_says_what_is_not_forgotten_once_the_disk_is_closed(
    open_llm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Clearing and unpinning after `shutdown` seemed to work, and the next start found what was forgotten."""
    llm = open_llm()
    pins = [llm.pin({**PROMPTS[0], "cache_salt": salt}) for salt in ("ann", "ben")]
    llm.unpin(pins[0])
    llm.shutdown()
    assert not caplog.records
    llm.unpin(pins[1])
    llm.reset_prefix_cache()
    assert [record.message for record in caplog.records] == [
        f"the disk is closed: a released pin of {NUM_WHOLE} tokens will be back after a restart",
        "the tiers below the pool are closed: what is cleared now stays in them",
    ]
    with open_llm() as llm:
        assert use(llm, "ben") > 0
        assert len(llm.pins()) == 1


def test_a_pin_of_a_prompt_shorter_than_a_block_is_not_remembered(open_llm: Any) -> None:
    with open_llm() as llm:
        pin = llm.pin({"prompt_token_ids": TOKENS[:1]})
        assert (pin.num_tokens, pin.released) == (0, True)
    with open_llm() as llm:
        assert llm.engine.pins.listed() == []


def test_what_is_no_pin_is_refused_before_it_is_looked_up(open_llm: Any) -> None:
    """It was looked up first, which a list cannot be."""
    with open_llm() as llm, pytest.raises(InvalidArgumentError, match=r"^pin: expected a Pin, got list$"):
        llm.unpin([])


def test_a_pin_is_in_force_after_a_restart_when_its_prompt_is_used(open_llm: Any) -> None:
    with open_llm() as llm:
        assert llm.pin(PROMPTS[0], ttl=3600, cache_salt="ann").num_tokens == NUM_WHOLE
        (name,) = [pin.name for pin in llm.engine.pins.listed()]
    with open_llm() as llm:
        (waiting,) = llm.engine.pins.listed()
        assert (waiting.name, waiting.num_tokens, waiting.active) == (name, NUM_WHOLE, False)
        assert 0 < waiting.expires_in <= 3600
        use(llm, "ben")
        assert llm.pins() == []
        assert use(llm) == NUM_WHOLE + 2  # all but the last token; the whole blocks are pinned
        (pin,) = llm.pins()
        assert (pin.num_tokens, pin.namespace) == (NUM_WHOLE, "ann")
        assert 0 < pin.expires_at - llm.engine.cache.now() <= 3600
        # Pinning the same at each start leaves one pin, and does not add one each time.
        llm.pin(PROMPTS[0], ttl=3600, cache_salt="ann")
        (again,) = llm.pins()
        assert pin.released
        llm.unpin(again)
    with open_llm() as llm:
        assert llm.engine.pins.listed() == []
        use(llm)
        assert llm.pins() == []


def test_what_is_pinned_is_below_before_the_engine_ends(open_llm: Any) -> None:
    killed = open_llm(cache_write_policy="write-back")
    killed.pin(PROMPTS[0], cache_salt="ann")
    assert killed.engine.tiers.flush(60.0)
    killed.engine.tiers.close(HANGING)  # without writing what is cached
    with open_llm() as llm:
        assert use(llm) == NUM_WHOLE
        assert len(llm.pins()) == 1


def test_a_pin_that_waits_can_be_released(open_llm: Any) -> None:
    with open_llm() as llm:
        llm.pin(PROMPTS[0])
    with open_llm() as llm:
        pins = llm.engine.pins
        (waiting,) = pins.listed()
        assert not pins.release_named("another")
        assert pins.release_named(waiting.name)
        assert pins.listed() == []
    with open_llm() as llm:
        assert llm.engine.pins.listed() == []


def test_a_tenants_pins_come_back_within_its_bounds(open_llm: Any) -> None:
    with open_llm() as llm:
        use(llm)
        assert llm.engine.tenant_pins.keep("ann", "ann", TOKENS, 3600.0) > 0
        (kept,) = llm.pins()
        assert llm.engine.pins.listed() == []  # it is a tenant's pin, not an administrator's
    with open_llm() as llm:
        use(llm)
        evict_all(llm)
        (pin,) = llm.pins()
        assert pin.num_tokens == kept.num_tokens
        assert llm.engine.cache.match(TOKENS, "ann") == kept.num_tokens
        # It is the tenant's again and takes all that the tenant may have, so another pin takes its place.
        leave(llm.engine.cache, [3, 3, 3, 3], namespace="ann")
        assert llm.engine.tenant_pins.keep("ann", "ann", [3, 3, 3, 3], 3600.0) == 4
        assert pin.released
        llm.engine.cache.check()


def test_a_tenants_pin_for_which_there_is_no_room_waits_until_there_is(open_llm: Any) -> None:
    """It was forgotten, on the disk too, if others' pins filled the cache when its prefix was used."""
    with open_llm() as llm:
        use(llm)
        assert llm.engine.tenant_pins.keep("ann", "ann", TOKENS, 3600.0) > 0
    with open_llm() as llm:
        others = llm.pin({"prompt_token_ids": [3 + n % 90 for n in range(160)]})
        assert others.num_tokens == 160  # as much as may be pinned
        use(llm)
        assert llm.pins() == [others]
        llm.unpin(others)
        use(llm)
        assert [pin.namespace for pin in llm.pins()] == ["ann"]
        assert llm.engine.pins._stored.waiting() == []


@pytest.mark.parametrize("other", [{"block_size": 8}, {"name": "qwen2"}, {"kv_cache_dtype": "fp8"}])
def test_another_format_has_pins_of_its_own(open_llm: Any, other: dict[str, Any]) -> None:
    with open_llm() as llm:
        llm.pin(PROMPTS[0])
    with open_llm(**other) as llm:
        assert llm.engine.pins.listed() == []
        answers(llm, PROMPTS[:1])
        assert llm.pins() == []


def test_what_is_cleared_is_not_pinned_after_a_restart(open_llm: Any) -> None:
    with open_llm() as llm:
        for salt in ("ann", "ann/x", "ben"):
            llm.pin(PROMPTS[0], cache_salt=salt)
    with open_llm() as llm:
        assert len(llm.engine.pins.listed()) == 3
        llm.engine.cache.clear("ann")
        assert len(llm.engine.pins.listed()) == 1
    with open_llm() as llm:
        for salt in ("ann", "ann/x", "ben"):
            use(llm, salt)
        assert [pin.namespace for pin in llm.pins()] == ["ben"]
        llm.reset_prefix_cache()
    with open_llm() as llm:
        assert llm.engine.pins.listed() == []


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_pin_that_was_not_cleared_itself_outlives_the_clearing_of_another_salt(
    open_llm: Any, is_restored: bool
) -> None:
    """Below the pool, all of a tenant's salts are cleared together, and the pins of all were forgotten for good."""
    with open_llm() as llm:
        for salt in ("ann", "ann/x", "ann/y", "ben"):
            llm.pin(PROMPTS[0], ttl=3600, cache_salt=salt)
        if not is_restored:
            llm.engine.clear(NamespaceSelection("ann/x"))
            killed = llm.engine.tiers
            assert killed.flush(60.0)
            killed.close(HANGING)  # without writing what is cached
    if is_restored:
        with open_llm() as llm:
            for salt in ("ann", "ann/x", "ann/y", "ben"):
                use(llm, salt)
            llm.engine.clear(NamespaceSelection("ann/x"))
    with open_llm() as llm:
        assert [pin.num_tokens for pin in llm.engine.pins.listed()] == [NUM_WHOLE] * 3
        assert all(pin.expires_in is not None for pin in llm.engine.pins.listed())
        assert [use(llm, salt) for salt in ("ann/x", "ann", "ann/y")] == [0, NUM_WHOLE, NUM_WHOLE]
        assert sorted(pin.namespace for pin in llm.pins()) == ["ann", "ann/y"]
        llm.engine.clear(NamespaceSelection("ann"))
    with open_llm() as llm:
        assert len(llm.engine.pins.listed()) == 1  # ben's


def test_a_second_pin_of_one_prefix_leaves_the_first(open_llm: Any) -> None:
    """Only one from before a restart is replaced: in one program, each is released by whoever asked for it."""
    with open_llm() as llm:
        first, second = (llm.pin(PROMPTS[0], cache_salt="ann") for _ in range(2))
        assert set(llm.pins()) == {first, second}
        llm.unpin(second)
        assert llm.pins() == [first]
