"""`radixkv store`: folders in which a disk tier keeps blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from radixkv.cli.output_paths import given_path

if TYPE_CHECKING:
    from radixkv.tiers.disk.maintenance import StoreInfo

app = typer.Typer(no_args_is_help=True, help="Folders of stored blocks: info, verify, prune, clear.")


def _folder(given: str) -> Path:
    path = given_path(given)
    if not path.is_dir():
        raise typer.BadParameter(f"expected a folder, got {given!r}")
    return path


Folder = Annotated[
    Path, typer.Argument(parser=_folder, metavar="folder", help="the folder given as disk_cache, or one store in it")
]


@app.command()
def info(
    folder: Folder, namespaces: Annotated[bool, typer.Option("--namespaces", help="also list namespaces")] = False
) -> None:
    """List the stores: models, sizes, which process writes. Exits with 1 if a store cannot be read."""
    from radixkv.tiers.disk.maintenance import describe

    failed = False
    for path in _stores(folder):
        print(path)
        try:
            found = describe(path)
        except (OSError, ValueError) as error:
            print(f"  never hit: {_reason(path, error)}")
            failed = True
            continue
        for line in _lines(found, namespaces):
            print(f"  {line}")
    if failed:
        raise typer.Exit(1)


@app.command()
def verify(folder: Folder) -> None:
    """Read all blocks and compare their checksums. Exits with 1 if one is corrupt."""
    from radixkv.tiers.disk.maintenance import verify

    def verified(path: Path) -> tuple[str, int]:
        found = verify(path)
        return f"{found.right} right, {found.corrupt} corrupt, {found.replaced} replaced by others", found.corrupt

    if _do_for_each(folder, verified):
        raise typer.Exit(1)


@app.command()
def prune(
    folder: Folder,
    max_gib: Annotated[float | None, typer.Option(min=0, help="GiB to keep at most, in each store")] = None,
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="remove blocks that were not used for this many days")
    ] = None,
) -> None:
    """Remove the least recently used blocks, and free their space."""
    import math
    import time

    from radixkv.tiers.disk.maintenance import prune

    if max_gib is None and unused_days is None:
        raise typer.BadParameter("expected --max-gib or --unused-days")
    for name, value, unit in (("--max-gib", max_gib, 1 << 30), ("--unused-days", unused_days, 86_400)):
        if value is not None and not math.isfinite(value * unit):
            raise typer.BadParameter(f"{name}: expected a finite number, got {value}")
    max_bytes = None if max_gib is None else int(max_gib * (1 << 30))
    used_since = None if unused_days is None else time.time() - unused_days * 86_400
    _do_for_each(folder, lambda path: _removed(prune(path, max_bytes=max_bytes, used_since=used_since)))


@app.command()
def clear(
    folder: Folder,
    namespace: Annotated[
        str | None, typer.Option(help="remove only this namespace, named as by `info --namespaces`")
    ] = None,
) -> None:
    """Remove everything, or one namespace, and overwrite it or free its space. Exits with 1 if no store has it."""
    from radixkv.tiers.block_key import DIGEST_BYTES
    from radixkv.tiers.disk.maintenance import clear

    try:
        digest = None if namespace is None else bytes.fromhex(namespace)
    except ValueError:
        digest = b""
    if digest is not None and len(digest) != DIGEST_BYTES:
        raise typer.BadParameter(f"--namespace: expected {2 * DIGEST_BYTES} hexadecimal digits, got {namespace!r}")
    num_removed = _do_for_each(folder, lambda path: _removed(clear(path, digest)))
    if namespace is not None and not num_removed:
        print(f"{folder}: there are no blocks of namespace {namespace} here")
        raise typer.Exit(1)


def _do_for_each(folder: Path, action: Callable[[Path], tuple[str, int]]) -> int:
    """Print what is done to each store, or why it cannot be done, which ends the command with status 1.

    Args:
        action: returns what is printed, and a count; the counts are added up.
    """
    from radixkv.errors import StoreInUseError

    total, failed = 0, False
    for path in _stores(folder):
        try:
            done, count = action(path)
        except (OSError, StoreInUseError, ValueError) as error:
            done, count, failed = _reason(path, error), 0, True
        print(f"{path}: {done}")
        total += count
    if failed:
        raise typer.Exit(1)
    return total


def _reason(path: Path, error: Exception) -> str:
    """What an error says about a store, without the store's path before it."""
    return str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ")


def _removed(count: int) -> tuple[str, int]:
    from radixkv.cache.counted import counted

    return f"{counted(count, 'block')} removed", count


def _stores(folder: Path) -> list[Path]:
    from radixkv.tiers.disk.store_folder import store_folders

    paths = list(store_folders(folder))
    if not paths:
        raise ValueError(f"{folder}: there are no stored blocks here")
    return paths


def _lines(info: StoreInfo, namespaces: bool) -> Iterator[str]:
    import datetime

    from radixkv.cache.counted import counted

    block, blocks = info.header.block_format, counted(info.num_blocks, "block")
    yield f"model {block.model or 'unknown'}, fingerprint {block.fingerprint.hex()[:16]}"
    yield f"keys and values in {_precision(block.dtype)}"
    yield f"{blocks} of {counted(block.block_size, 'token')} and {counted(block.block_bytes, 'byte')}"
    used, taken = info.num_blocks * info.slot_bytes / 1e6, info.taken_bytes / 1e6
    space = f"{used:,.0f} MB of {taken:,.0f} MB taken" if taken else "no space taken yet"
    yield f"{counted(len(info.namespaces), 'namespace')}, {space}"
    if info.last_used is not None:
        yield f"last used {datetime.datetime.fromtimestamp(info.last_used).isoformat(' ', 'seconds')}"
    yield "encrypted" if info.header.sealed else "not encrypted"
    yield f"written by {info.owner}" if info.owner else "no process writes to it"
    for namespace, count in sorted(info.namespaces.items(), key=lambda item: -item[1]) if namespaces else ():
        yield f"namespace {namespace.hex()}: {counted(count, 'block')}"


def _precision(dtype: str) -> str:
    """How keys and values are stored, from the name of torch's type."""
    if dtype.startswith("float8"):
        return f"fp8 ({dtype}, quantised with scales)"
    return f"{dtype}, not quantised" if dtype else "an unknown type"
