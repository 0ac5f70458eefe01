"""Converts GGUF files to folders that load fast.

transformers reads a GGUF file by unpacking every weight, which takes half a minute for a small model, and makes a tokenizer
of it in seconds. So it is converted once, in the model cache, and loaded from there afterwards: with its weights in their own
blocks, or as floats.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from radixkv.errors import ModelLoadError, one_line
from radixkv.model.default_model import packaged_digest
from radixkv.model.model_cache import MANIFEST, cache_folder, let_others_read, mark_used, temporary_folder
from radixkv.model.without_torch import call_with_torch

BLOCKS_FILE = "blocks.safetensors"
"""The file in a converted GGUF file's folder that has its tensors, blocks as they are."""
# Float32 weights take at most this many times a quantised file's bytes (2-bit weights), with some margin.
_MAX_EXPANSION = 18
# In its own blocks, it takes what it takes, and a tokenizer.
_BLOCKS_EXPANSION = 1.5
# Counts up when a file becomes another folder: those that were made before are not used any more.
_CONVERTER = 4

ProgressCallback = Callable[[str], None]


class NotInBlocksError(Exception):
    """The weights of a GGUF file are not those of a model's parameters one by one."""


class UnreadableGgufError(Exception):
    """A GGUF file says that its model computes something that the model made of it would not; the message says what."""


def converted_folder(gguf: Path, in_blocks: bool = False) -> Path:
    """The folder of a GGUF file's converted form, whether it exists or not.

    It depends on the default model's contents, so that all environments that it is installed in share one; of another file,
    which would have to be read to the end, on path, size and time of change.
    """
    key = packaged_digest(gguf)
    if key is None:
        stat = gguf.stat()
        key = xxhash.xxh3_64_hexdigest(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return cache_folder() / f"{gguf.stem}-{key}-{_CONVERTER}{'-blocks' if in_blocks else ''}"


def ensure_converted(gguf: Path, progress: ProgressCallback, in_blocks: bool = False) -> Path:
    """The folder of a GGUF file's converted form; converts the file if it is missing or damaged.

    Safe to interrupt, and to run in several processes at once: the folder is renamed into place when complete.

    Args:
        gguf: the file.
        progress: called with a message before a slow operation.
        in_blocks: with weights in their own blocks. Where they cannot be, a message says why, and they become floats.

    Raises:
        ModelLoadError: the file cannot be read, or the result cannot be written, as where the disk has too little space.
    """
    if in_blocks:
        try:
            return _ensure(
                gguf, converted_folder(gguf, in_blocks=True), progress, _convert_in_blocks, _BLOCKS_EXPANSION
            )
        except NotInBlocksError as error:
            progress(f"{gguf.name} cannot be kept in its own blocks ({error}): its weights become floats")
    return _ensure(gguf, converted_folder(gguf), progress, _convert, _MAX_EXPANSION)


def _ensure(
    gguf: Path, target: Path, progress: ProgressCallback, convert: Callable[[Path, Path], None], expansion: float
) -> Path:
    needed = gguf.stat().st_size * expansion
    try:
        if target.exists():
            damage = find_damage(target)
            if damage is None:
                mark_used(target)
                return target
            progress(f"the cached model is damaged ({damage}): converting it again")
            _remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise ModelLoadError(
                f"converting {gguf.name} can take {needed / 2**30:.1f} GiB in {target.parent}, which has "
                f"{free / 2**30:.1f} GiB left: make room, or set RADIXKV_CACHE to another disk"
            )
        progress(f"converting {gguf.name} to safetensors, once (half a minute at most for a small model)")
        with temporary_folder(target) as temporary:
            _convert_into(temporary, gguf, convert)
            try:
                temporary.rename(target)
            except OSError:
                if find_damage(target) is not None:  # otherwise another process has finished first
                    raise
    except OSError as error:
        raise ModelLoadError(f"the model cache {target.parent} cannot be used: {error}; set RADIXKV_CACHE") from error
    return target


def _remove(damaged: Path) -> None:
    """Away first: of several processes one removes it, and none what another has made in its place."""
    with temporary_folder(damaged) as temporary, suppress(FileNotFoundError):  # another process has it
        damaged.rename(temporary)
        if find_damage(temporary) is None:  # another process has made it again since
            with suppress(OSError):  # and yet another one, in its place
                temporary.rename(damaged)


def _convert_into(folder: Path, gguf: Path, convert: Callable[[Path, Path], None]) -> None:
    """Make a folder of a file.

    Raises:
        NotInBlocksError: as ``convert`` raises it.
        ModelLoadError: it cannot be made; the message says why.
    """
    try:
        call_with_torch(convert, gguf, folder)
        _write_manifest(folder)
    except (NotInBlocksError, ModelLoadError):
        raise
    except UnreadableGgufError as error:
        raise ModelLoadError(
            f"{gguf} would not compute here what it is meant to: {error}; possible instead is the same model in "
            "transformers' format, as a folder or a hub id"
        ) from error
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"{gguf} could not be converted in {cache_folder()}: {error}; where its disk is full, make room, or set "
            "RADIXKV_CACHE to another one"
        ) from error
    except Exception as error:  # of any class: of what a damaged file says, gguf and transformers check little
        reason = one_line(str(error))
        raise ModelLoadError(f"{gguf} could not be converted ({type(error).__name__}: {reason})") from error


def find_damage(folder: Path) -> str | None:
    """What is wrong with a converted model; None: nothing. Checks all sizes, and the contents of all but the weights."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, (size, digest) in files.items():
            path = folder / name
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if digest and xxhash.xxh3_64_hexdigest(path.read_bytes()) != digest:
                return f"the contents of {name} have changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest or a file cannot be read: {error}"
    return None


def _convert_in_blocks(gguf: Path, folder: Path) -> None:
    from radixkv.model.gguf.folder import write_folder

    write_folder(gguf, folder)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    from radixkv.model.gguf.model import describe
    from radixkv.model.weights.transformers_model import load_whole

    config = describe(gguf).config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    model: Any = load_whole(gguf.parent, torch.float32, config, gguf_file=gguf.name)
    # The weights are no longer quantised; transformers refuses to save a model with these two set.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        let_others_read(path)
        small = path.suffix != ".safetensors"
        files[path.name] = (path.stat().st_size, xxhash.xxh3_64_hexdigest(path.read_bytes()) if small else "")
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
