"""Packed weights in files that all processes of a machine map, so that several replicas take memory for them once.

A file is named by the bytes in it, and those are compared before it is used. It is never written to again; deleting it does
not affect processes that have mapped it. Truncating it ends those that read beyond its new end, as with any mapped file.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
import xxhash

from radixkv.model.model_cache import let_others_read, mark_used
from radixkv_cpu import Weight

_log = logging.getLogger(__name__)


def share_weights(weights: Iterable[Weight], folder: Path) -> None:
    """Let packed weights lie in files instead of memory of this process alone. Files that are missing are written.

    Where the folder or the disk refuses, a warning says so, and the weights that are left stay where they are.

    Args:
        weights: of a model, each once.
        folder: of the files; made where it is missing.
    """
    num_bytes = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for weight in weights:
            weight.move(_shared(weight.panels, folder))
            num_bytes += weight.nbytes
    except OSError as error:
        _log.warning("weights cannot be shared by %s (%s): this process has its own", folder, error)
    _log.info("%.1f MB of weights are mapped from %s", num_bytes / 1e6, folder)


def _shared(panels: torch.Tensor, folder: Path) -> torch.Tensor:
    """The same panels, mapped.

    Raises:
        OSError: they cannot be written.
    """
    content = panels.view(torch.uint8).numpy().data
    path = folder / xxhash.xxh3_128_hexdigest(content)
    if path.exists():
        mapped = _mapped(path, panels)
        if mapped is not None:
            mark_used(path)
            return mapped
        _log.warning("%s is damaged: writing it again", path)
        path.unlink(missing_ok=True)
    _write(path, content)
    mapped = _mapped(path, panels)
    if mapped is None:
        raise OSError(f"{path.name} does not hold what was written into it")
    return mapped


def _mapped(path: Path, panels: torch.Tensor) -> torch.Tensor | None:
    """What a file holds, in the form of the panels; None: it holds something else."""
    if path.stat().st_size != panels.nbytes:
        return None
    with path.open("rb") as file:
        # A private mapping: what this process writes by mistake, no other process reads.
        pages = mmap.mmap(file.fileno(), panels.nbytes, access=mmap.ACCESS_COPY)
    mapped = torch.frombuffer(pages, dtype=panels.dtype).view(panels.shape)
    return mapped if torch.equal(mapped.view(torch.uint8), panels.view(torch.uint8)) else None


def _write(path: Path, content: memoryview) -> None:
    """Complete or not at all; where another process was faster, its file stays, which that one has mapped."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        let_others_read(Path(temporary))
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()
