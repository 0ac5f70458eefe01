"""Options of tiers that cannot be fulfilled are refused, by their names."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.dict_tier import DictTier
from support.faulty_os import disconnected
from support.tiered_llm import GREEDY, PROMPTS, answers, evict_all, make

from radixkv.engine.clearing import ALL_NAMESPACES, NamespaceSelection
from radixkv.errors import MissingPackageError
from radixkv.llm import LLM
from radixkv.server.run import namespaces_secret
from radixkv.tiers import backoff
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.stats import StoreStats


def test_an_engine_that_cannot_be_made_leaves_the_folder_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And says nothing of the disk, whose threads had no time to end."""
    with pytest.raises(OSError, match="record_trace: expected a file that can be written"):
        make(disk_cache=str(tmp_path / "blocks"), record_trace=str(tmp_path / "none" / "trace"))
    assert not caplog.records
    gc.collect()
    llm = make(disk_cache=str(tmp_path / "blocks"))
    llm.shutdown()


def test_a_folder_that_is_only_read_gets_no_secret_and_one_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    make(disk_cache=str(folder), disk_cache_read_only=True).shutdown()
    assert not (folder / "namespaces.secret").exists()
    (tmp_path / "file").write_text("in the way")
    llm = make(disk_cache=str(tmp_path / "file" / "blocks"))
    assert answers(llm)
    llm.shutdown()


@pytest.mark.usefixtures("loads_are_worth_it")
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("disk_cache", "blocks"),
        ("disk_cache", Path("~/blocks")),
        ("shared_cache", "blocks"),
        ("shared_cache", "~/blocks"),
    ],
)
def test_a_folder_stays_where_it_was_when_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str | Path
) -> None:
    """An empty store was begun elsewhere, and what was cleared there was found again in the first one. ~ was a folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with make(**{name: folder}, cache_write_policy="write-through") as llm:
        monkeypatch.chdir(tmp_path / "elsewhere")
        answers(llm)
        evict_all(llm)
        loaded = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].metrics.loaded_tokens
        assert loaded == {name.removesuffix("_cache"): 40}
        llm.engine.clear(ALL_NAMESPACES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks", "elsewhere"]
    assert not [*(tmp_path / "elsewhere").iterdir()]
    monkeypatch.chdir(tmp_path)
    assert namespaces_secret({name: folder}) == (tmp_path / "blocks" / "namespaces.secret").read_bytes()
    with make(**{name: folder}) as llm:
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.usefixtures("loads_are_worth_it")
@pytest.mark.parametrize("medium", ["disk", "shared"])
def test_what_is_stored_in_a_folder_that_was_emptied_is_found_after_a_restart(tmp_path: Path, medium: str) -> None:
    """It was stored under a secret that was gone with what had been in the folder."""
    options = {f"{medium}_cache": str(tmp_path / "blocks"), "cache_write_policy": "write-through"}
    with make(**options) as llm:
        shutil.rmtree(tmp_path / "blocks")
        answers(llm)
    with make(**options) as llm:
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].metrics.loaded_tokens == {medium: 40}


def test_a_selection_of_namespaces_does_not_mean_all_by_itself() -> None:
    with pytest.raises(TypeError, match="name"):
        NamespaceSelection()  # type: ignore[call-arg]


@pytest.mark.usefixtures("loads_are_worth_it", "look_ups_are_awaited")
def test_with_a_file_of_the_secret_who_reads_may_start_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 1e-9)
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    options = {"disk_cache": tmp_path / "blocks", "cache_secret_file": secret}
    reader = make(**options, disk_cache_read_only=True)
    writer = make(**options, cache_write_policy="write-through")
    expected = answers(writer)
    assert writer.engine.tiers.flush(60.0)
    outputs = reader.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[0].metrics.loaded_tokens == {"disk": 40}
    for llm in (reader, writer):
        llm.shutdown()


def test_a_shared_server_needs_a_secret_that_others_have() -> None:
    with pytest.raises(ValueError, match="cache_secret_file: expected a file where shared_cache is a server"):
        make(shared_cache="redis://localhost:1/0")


@pytest.mark.parametrize(
    ("options", "package", "message"),
    [
        ({"shared_cache": "redis://localhost:1/0"}, "redis", r"shared_cache: redis is not .* 'radixkv\[redis\]'"),
        ({"disk_cache": "blocks"}, "cryptography", r"store_key_file: cryptography .* 'radixkv\[encryption\]'"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "zmq", r"kv_events_endpoint: zmq is not .* 'radixkv\[events\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], package: str, message: str
) -> None:
    monkeypatch.setattr("radixkv.llm.load_model", Mock(side_effect=AssertionError))
    monkeypatch.setenv("RADIXKV_STORE_KEY", "0" * 64)
    monkeypatch.delitem(sys.modules, "radixkv.observe.kv_events", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=message):
        LLM(**options)


def test_a_key_may_come_from_a_pipe(tmp_path: Path) -> None:
    """As from `<(...)` in a shell: what is read from it once is gone."""
    reading, writing = os.pipe()
    os.write(writing, b"ab" * 32)
    os.close(writing)
    llm = make(disk_cache=tmp_path / "blocks", store_key_file=f"/dev/fd/{reading}")
    os.close(reading)
    llm.shutdown()


def test_what_is_no_tier_or_too_small_for_one_is_refused_by_its_option(tmp_path: Path) -> None:
    """Of an object with one method too few, the error did not say which; a class was taken for one of its objects."""
    parts = "medium, stats, contains_prefix, get_many, put_many, clear, flush, close"
    cannot_flush = SimpleNamespace(**dict.fromkeys(parts.replace("flush, ", "").split(", ")))
    for tier, message in (
        (5, f"5, which has no {parts}"),
        (cannot_flush, "namespace.*, which has no flush"),
        (HostTier, "<class 'radixkv.tiers.host_tier.HostTier'>"),
    ):
        with pytest.raises(TypeError, match=f"^tiers: expected objects like radixkv.tiers.tier.Tier, got {message}$"):
            make(tiers=[tier])
    folder = tmp_path / "blocks"
    for options in (
        {"host_cache_size": 9},
        {"disk_cache": folder, "disk_cache_size": 9},
        {"shared_cache": str(folder), "shared_cache_size": 9},
    ):
        with pytest.raises(ValueError, match=rf"^{[*options][-1]}: expected at least the \d+ bytes .* takes, got 9$"):
            make(**options)


def test_counters_are_not_read_before_a_tier_is_used() -> None:
    """A tier was refused whose counters cannot be read yet, though they may be missing at any later time."""

    class NotConnected(DictTier):
        @property
        def stats(self) -> StoreStats:
            raise ConnectionError("not yet")

    make(tiers=[NotConnected()]).shutdown()


@pytest.mark.parametrize("option", ["disk_cache", "shared_cache"])
def test_a_store_with_less_room_than_the_cache_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    for size, warnings in (("4MiB", 0), (8192, 1)):
        with make(**{option: str(tmp_path), f"{option}_size": size}):
            assert caplog.text.count("disk_cache_size or shared_cache_size: there is room for") == warnings
    if option == "disk_cache":
        with make(disk_cache=tmp_path, disk_cache_size=8192, disk_cache_read_only=True):
            assert caplog.text.count("there is room for") == 1  # nothing is written there


@pytest.mark.parametrize("size", ["900000GiB", 1 << 50])
def test_more_host_memory_than_there_is_is_refused_by_its_option(size: str | int) -> None:
    with pytest.raises(
        MemoryError, match=rf"^host_cache_size: expected as much as there is memory for, got '?{size}'?$"
    ):
        make(host_cache_size=size)


@pytest.mark.parametrize("name", ["store_key_file", "cache_secret_file"])
def test_a_file_that_cannot_be_read_is_named_with_its_option(tmp_path: Path, name: str) -> None:
    message = f"^{name}: cannot read {tmp_path}/none: No such file or directory$"
    with pytest.raises(OSError, match=message):
        make(disk_cache=str(tmp_path / "disk"), **{name: str(tmp_path / "none")})


@pytest.mark.parametrize("name", ["disk_cache", "shared_cache"])
def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=f"{name}: expected a folder, got the file {file}"):
        make(**{name: str(file)})


@pytest.mark.parametrize("name", ["disk_cache", "shared_cache"])
def test_a_folder_whose_mount_is_disconnected_does_not_keep_an_engine_from_starting(tmp_path: Path, name: str) -> None:
    with disconnected(tmp_path), make(**{name: str(tmp_path / "blocks")}) as llm:
        assert answers(llm)
