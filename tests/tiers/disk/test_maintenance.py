"""`radixkv store`: what an operator does with the folder of a disk tier."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, BOB, SLOT, pin_of, put, tier_in
from support.disk_tiers import KEYS as ANN
from support.fifos import not_blocked_by
from support.tier_model import BLOCK_SIZE, FORMAT, get, prefix_keys
from typer.testing import CliRunner, Result

from radixkv.cli.main import app
from radixkv.tiers.disk import maintenance
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.store_folder import store_folders
from radixkv.tiers.disk_tier import DiskTier

Run = Callable[..., Result]


def change_header(root: Path, **fields: object) -> None:
    (header,) = root.glob("*/format.json")
    header.write_text(json.dumps(json.loads(header.read_text()) | fields))


@pytest.fixture
def run(root: Path) -> Run:
    return lambda command, *options: CliRunner().invoke(app, ["store", command, str(root), *options])


def test_info_says_what_is_there(run: Run, root: Path) -> None:
    shown = run("info", "--namespaces").output
    assert "model tiny, fingerprint 61206d6f64656c" in shown
    assert "keys and values in float32, not quantised" in shown
    assert "9 blocks of 4 tokens and 100 bytes" in shown
    assert "2 namespaces, 0 MB of 0 MB taken" in shown
    assert "not encrypted" in shown
    assert "no process writes to it" in shown
    assert f"namespace {ANN[0].namespace.hex()}: 6 blocks" in shown
    tier = tier_in(root)
    assert f"written by process {os.getpid()} on " in run("info").output
    tier.close()
    tier_in(root, key=bytes(32)).close()
    assert sorted(line.strip() for line in run("info").output.splitlines() if "encrypted" in line) == [
        "encrypted",
        "not encrypted",
    ]


def test_info_does_not_say_that_a_store_has_no_room_where_nothing_is_written_yet(run: Run, root: Path) -> None:
    """It said "0 MB of 0 MB taken"."""
    tier_in(root, key=bytes(32)).close()
    assert "0 namespaces, no space taken yet" in run("info").output


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [("float8_e4m3fn", "in fp8 (float8_e4m3fn, quantised with scales)"), ("", "in an unknown type")],
)
def test_info_says_how_keys_and_values_are_stored(run: Run, root: Path, dtype: str, shown: str) -> None:
    change_header(root, dtype=dtype)
    assert f"keys and values {shown}" in run("info").output


def test_info_says_what_is_never_hit(run: Run, root: Path) -> None:
    change_header(root, version=99)
    shown = run("info").output
    assert "never hit: its format has version 99, which this version of RadixKV does not read" in shown
    (header,) = root.glob("*/format.json")
    header.write_text("{}")
    assert "this is not the header of a store" in run("info").output


def test_info_continues_behind_a_store_that_cannot_be_read_and_ends_with_status_1(run: Run, root: Path) -> None:
    """It ended with a traceback at the first, or with status 0."""
    assert run("info").exit_code == 0
    (folder,) = store_folders(root)
    tier_in(root, key=bytes(32)).close()
    header = folder / "format.json"
    header.unlink()
    header.symlink_to("/proc/self/mem")  # not even root can read it
    result = run("info")
    assert result.exit_code == 1
    assert "never hit: [Errno 5] Input/output error" in result.output
    assert "no process writes to it" in result.output


@pytest.mark.parametrize("damage", [{"version": 99}, {"block_bytes": 1}, {"encrypted": True}, None, os.mkfifo])
def test_a_damaged_header_is_written_anew_by_the_process_that_writes_the_store(
    run: Run, root: Path, damage: dict[str, object] | Callable[[Path], None] | None
) -> None:
    """Engines went on using a store that could not be inspected, verified, pruned or cleared."""
    header = next(root.glob("*/format.json"))
    if damage is None:
        header.write_bytes(b"")
    elif isinstance(damage, dict):
        change_header(root, **damage)
    else:
        header.unlink()
        damage(header)
    with not_blocked_by(header):
        run("info")
        tier_in(root).close()
    result = run("verify")
    assert "9 right, 0 corrupt" in result.output
    assert result.exit_code == 0
    assert "model tiny" in run("info").output
    change_header(root, model="another name")
    tier_in(root).close()
    assert "model another name" in run("info").output


def test_a_store_whose_header_is_damaged_can_be_cleared(run: Run, root: Path) -> None:
    """Only an engine of the same model could mend it, and until then its space was taken."""
    (folder,) = store_folders(root)
    (folder / "format.json").write_text("{")
    one = run("clear", "--namespace", ANN[0].namespace.hex())
    assert one.exit_code == 1
    assert "format.json: this is not the header of a store of blocks" in one.output
    assert (folder / "blocks-00000").stat().st_size > 0
    assert run("clear").exit_code == 0
    assert (folder / "blocks-00000").stat().st_size == 0
    assert not [*store_folders(root)]
    tier = tier_in(root)
    put(tier)
    tier.close()
    assert "6 right, 0 corrupt" in run("verify").output


def test_to_clear_a_namespace_that_no_store_has_is_an_error(run: Run, root: Path) -> None:
    """It looked as if something had been cleared."""
    nobody = prefix_keys("nobody", 1)[0].namespace.hex()
    result = run("clear", "--namespace", nobody)
    assert f"{root}: there are no blocks of namespace {nobody} here" in result.output
    assert result.exit_code == 1
    assert "9 blocks" in run("info").output


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["plain", "sealed"])
def test_verify_finds_what_is_not_as_it_was_written(tmp_path: Path, key: bytes | None) -> None:
    tier = tier_in(tmp_path, key)
    tier.put_many(ANN, BLOCKS)
    tier.close()
    verify = ["store", "verify", str(tmp_path)]
    result = CliRunner().invoke(app, verify)
    assert result.exit_code == 0
    assert "6 right, 0 corrupt, 0 replaced" in result.output
    (path,) = tmp_path.glob("*/blocks-00000")
    content = bytearray(path.read_bytes())
    content[2 * SLOT + 60] ^= 1  # a token, or a zero in its place
    content[4 * SLOT - 1] ^= 1
    path.write_bytes(content[: 6 * SLOT - 1])
    result = CliRunner().invoke(app, verify)
    assert result.exit_code == 1
    assert "3 right, 3 corrupt" in result.output


@pytest.mark.parametrize("then", ["written", "cleared", "still corrupt"])
def test_verify_waits_for_what_is_written_just_now(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A healthy store used to be called corrupt while an engine was writing to it."""
    monkeypatch.setattr(maintenance, "_SECONDS_BETWEEN_LOOKS", (0.0, 0.0))
    real = SlotFiles.read
    num_reads = 0

    def read(files: SlotFiles, first: int, buffers: list[memoryview]) -> int:
        nonlocal num_reads
        length = real(files, first, buffers)
        if first == 3:
            num_reads += 1
            if num_reads == 1 or then == "still corrupt":
                buffers[0][-1] ^= 1
            if num_reads == 1 and then == "cleared":
                tier.clear()
                assert tier.flush(600)
        return length

    monkeypatch.setattr(SlotFiles, "read", read)
    tier = tier_in(root)
    result = run("verify")
    tier.close()
    shown = {"written": "9 right, 0 corrupt, 0 replaced", "cleared": "0 corrupt", "still corrupt": "8 right, 1 corrupt"}
    assert shown[then] in result.output
    assert result.exit_code == (then == "still corrupt")


def test_verify_counts_what_cannot_be_read_as_corrupt(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotFiles.read

    def read(files: SlotFiles, first: int, buffers: list[memoryview]) -> int:
        if first == 3:
            raise OSError(5, "unreadable")
        return real(files, first, buffers)

    monkeypatch.setattr(SlotFiles, "read", read)
    assert "8 right, 1 corrupt, 0 replaced" in run("verify").output


def test_prune_keeps_what_was_used_last_and_gives_space_back(run: Run, root: Path) -> None:
    assert "5 blocks removed" in run("prune", "--max-gib", str(4 * SLOT / (1 << 30))).output
    (path,) = root.glob("*/blocks-00000")
    assert path.stat().st_size == 4 * SLOT
    tier = tier_in(root)
    assert np.array_equal(get(tier, ANN), BLOCKS[:4])
    assert tier.contains_prefix(BOB) == 0
    tier.close()
    assert "4 right, 0 corrupt, 0 replaced" in run("verify").output


def test_prune_forgets_what_it_cannot_move(run: Run, root: Path) -> None:
    real = SlotFiles.read

    def read(files: SlotFiles, first: int, buffers: list[memoryview]) -> int:
        if first == 5:
            raise OSError(5, "unreadable")
        return real(files, first, buffers)

    with mock.patch.object(SlotFiles, "read", read):
        assert "6 blocks removed" in run("prune", "--max-gib", str(4 * SLOT / (1 << 30))).output
    tier = tier_in(root)
    assert np.array_equal(get(tier, ANN), BLOCKS[:2])
    tier.close()


def test_prune_forgets_what_was_not_used_for_long(run: Run, root: Path) -> None:
    tier = tier_in(root)
    tier.mark_used(ANN[:5])
    tier.close()
    assert "4 blocks removed" in run("prune", "--unused-days", "365").output
    tier = tier_in(root)
    assert np.array_equal(get(tier, ANN), BLOCKS[:5])
    tier.close()


def test_clear_forgets_one_namespace_or_all(run: Run, root: Path) -> None:
    assert "3 blocks removed" in run("clear", "--namespace", BOB[0].namespace.hex()).output
    tier = tier_in(root)
    assert tier.contains_prefix(BOB) == 0
    assert np.array_equal(get(tier, ANN), BLOCKS)
    tier.close()
    assert "6 blocks removed" in run("clear").output
    (path,) = root.glob("*/blocks-00000")
    assert path.stat().st_size == 0


@pytest.mark.parametrize("left", [None, 4 * SLOT])
def test_clear_forgets_what_has_lost_its_slots(run: Run, root: Path, left: int | None) -> None:
    """The index was cleared, but then the command failed on the missing file, and erased nothing."""
    (path,) = root.glob("*/blocks-00000")
    if left is None:
        path.unlink()
    else:
        os.truncate(path, left)
    result = run("clear", "--namespace", ANN[0].namespace.hex())
    assert "6 blocks removed" in result.output
    assert result.exit_code == 0
    assert path.exists() == (left is not None)
    assert left is None or path.stat().st_size == left


@pytest.mark.parametrize("everything", [True, False])
def test_clear_forgets_what_was_pinned_there(run: Run, root: Path, everything: bool) -> None:
    tier = tier_in(root)
    kept, cleared = pin_of(ANN[0]), pin_of(BOB[0])
    for pin in (kept, cleared):
        tier.pins.add(pin)
    tier.close()
    run("clear", *([] if everything else ["--namespace", cleared.group.hex()]))
    tier = tier_in(root)
    assert tier.pins.waiting() == ([] if everything else [kept])
    tier.close()


@pytest.mark.parametrize("everything", [True, False])
def test_clear_leaves_nothing_of_a_pin_beside_a_process_that_reads(run: Run, root: Path, everything: bool) -> None:
    """Its prompt stayed in the index, whose log is written into it only once no process has it open."""
    tier = tier_in(root)
    tier.pins.add(replace(pin_of(BOB[0]), tokens=b"in words" * BLOCK_SIZE))
    tier.close()
    reader = DiskTier(root, FORMAT, capacity_bytes=64 * SLOT, read_only=True)
    assert reader.contains_prefix(BOB) == 3
    run("clear", *([] if everything else ["--namespace", BOB[0].namespace.hex()]))
    assert reader.contains_prefix(BOB) == 0
    assert not any(b"in words" in path.read_bytes() for path in root.glob("*/index.sqlite*"))
    reader.close()


def test_a_store_in_use_is_left_alone(run: Run, root: Path) -> None:
    tier = tier_in(root)
    for command in (["prune", "--unused-days", "0"], ["clear"]):
        result = run(*command)
        assert "is written by process" in result.output
        assert result.exit_code == 1
    assert np.array_equal(get(tier, ANN), BLOCKS)
    tier.close()


def test_what_is_wrong_with_one_store_does_not_keep_the_others_from_being_looked_after(run: Run, root: Path) -> None:
    """The first store that was in use or damaged used to end the whole command."""
    tier_in(root, key=bytes(32)).close()
    plain, sealed = sorted(store_folders(root), key=lambda folder: "-" in folder.name)
    (plain / "index.sqlite").write_bytes(b"nonsense" * 1000)
    owner = tier_in(root, key=bytes(32))
    put(owner)
    result = run("verify")
    assert f"{plain}: its index cannot be read" in result.output
    assert f"{sealed}: 6 right" in result.output
    assert result.exit_code == 1
    result = run("clear", "--namespace", BOB[0].namespace.hex())
    assert f"{plain}: its index cannot be read" in result.output
    assert f"{sealed}: is written by process" in result.output
    assert result.exit_code == 1
    owner.close()
    result = run("clear")
    assert "0 blocks removed" in result.output
    assert "6 blocks removed" in result.output
    assert result.exit_code == 0
    assert not any(path.stat().st_size for path in root.glob("*/blocks-*"))
    assert "0 blocks of 4 tokens" in run("info").output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["prune"], "expected --max-gib or --unused-days"),
        (["prune", "--max-gib", "inf"], "--max-gib: expected a finite number, got inf"),
        (["prune", "--max-gib", "1e305"], "--max-gib: expected a finite number, got 1e+305"),
        (["prune", "--unused-days", "inf"], "--unused-days: expected a finite number, got inf"),
        (["clear", "--namespace", "ann"], "--namespace: expected 40 hexadecimal digits, got 'ann'"),
        (["clear", "--namespace", "abcd"], "--namespace: expected 40 hexadecimal digits, got 'abcd'"),
    ],
)
def test_bad_options_are_refused(run: Run, command: list[str], message: str) -> None:
    result = run(*command)
    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_without_stores_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["store", "info", str(tmp_path)])
    assert "there are no stored blocks here" in str(result.exception)
