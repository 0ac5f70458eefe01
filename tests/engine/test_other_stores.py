"""A folder with the stores of several models: one model's engine clears what a tenant has in any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiered_llm import GREEDY, PROMPTS, make

from radixkv import LLM
from radixkv.tiers.disk.maintenance import describe, verify
from radixkv.tiers.disk.store_folder import store_folders

pytestmark = pytest.mark.usefixtures("loads_are_worth_it")


def num_cached(llm: LLM, salt: str) -> int:
    (output,) = llm.generate({**PROMPTS[0], "cache_salt": salt}, GREEDY, use_tqdm=False)
    return output.num_cached_tokens or 0


@pytest.mark.parametrize("key", [None, "ab" * 32])
def test_a_tenant_is_cleared_in_stores_of_other_formats_too(
    key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model served again used to find what a tenant had cleared while another model was served."""
    if key is not None:
        monkeypatch.setenv("RADIXKV_STORE_KEY", key)
    other: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "4MiB", "block_size": 8, "num_blocks": 40}
    with make(**other) as llm:
        for salt in ("ann", "ann/2", "ben"):
            num_cached(llm, salt)
        llm.pin(PROMPTS[0], cache_salt="ann")
    (folder,) = store_folders(tmp_path)
    stored = describe(folder).num_blocks
    monkeypatch.delenv("RADIXKV_STORE_KEY", raising=False)  # the index is not encrypted
    with make(disk_cache=tmp_path, disk_cache_size="4MiB") as llm:
        num_cached(llm, "ann")
        llm.engine.cache.clear("ann")
    left = describe(folder)
    assert left.num_blocks * 3 == stored
    assert left.taken_bytes > left.num_blocks * left.slot_bytes  # nothing moved
    assert verify(folder).right == left.num_blocks
    if key is not None:
        monkeypatch.setenv("RADIXKV_STORE_KEY", key)
    with make(**other) as llm:
        assert llm.engine.pins is not None
        assert llm.engine.pins.listed() == []
        assert [num_cached(llm, salt) for salt in ("ben", "ann", "ann/2")] == [40, 0, 0]


def test_a_store_that_cannot_be_cleared_is_named_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(block_size=2, num_blocks=160, disk_cache=tmp_path).shutdown()
    (newer,) = store_folders(tmp_path)
    header = newer / "format.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "version": 99}))
    options: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "4MiB"}
    with make(block_size=8, num_blocks=40, **options) as running, make(**options) as llm:
        num_cached(running, "ann")
        num_cached(llm, "ann")
        llm.engine.cache.clear("ann")
        llm.engine.cache.clear(None)  # of this format only
        assert running.engine.tiers is not None
        assert running.engine.tiers.flush(60.0)
    warnings = [record.message for record in caplog.records if "could not be cleared there" in record.message]
    assert len(warnings) == 2
    assert sum("its format has version 99" in warning for warning in warnings) == 1
    assert sum("is written by process" in warning for warning in warnings) == 1
    with make(block_size=8, num_blocks=40, **options) as running:
        assert num_cached(running, "ann") == 40
