"""Quantised weights on disk: quantising a model takes seconds, and is done once.

A file is named by what it was made from, so it is never wrong for a model, a file or a processor: the same weights
have the same panels. Several processes may write at once.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from radixkv.model.model_cache import let_others_read, mark_used

# Version of what is in a file: another layout of panels, or another way to quantise, needs another number.
_FORMAT = 2

_log = logging.getLogger(__name__)


class PanelCache:
    """Panels of `QuantisedWeight`, one file for each.

    Args:
        folder: made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_writable = True

    @staticmethod
    def key(weights: Sequence[torch.Tensor], quantization: str, activation: str | None) -> str:
        """Names what panels are made from: the weights' bytes, and how."""
        digest = xxhash.xxh3_128(f"{_FORMAT}:{quantization}:{activation}".encode())
        for weight in weights:
            digest.update(f"{weight.dtype}:{list(weight.shape)}".encode())
            digest.update(_bytes(weight))
        return digest.hexdigest()

    def read(self, key: str) -> torch.Tensor | None:
        """The panels; None if there are none, or if they are damaged, which a warning says."""
        path = self._path(key)
        try:
            # Read, not mapped: what is read by every product should not depend on a file.
            with safe_open(path, framework="pt", backend="pread") as file:
                panels: torch.Tensor = file.get_tensor("panels")
                expected = (file.metadata() or {}).get("checksum")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except (OSError, SafetensorError) as error:
            _log.warning("%s is damaged (%s): quantising again", path, error)
            return None
        if _checksum(panels) != expected:
            _log.warning("%s is damaged (its checksum differs): quantising again", path)
            return None
        mark_used(path)
        return panels

    def write(self, key: str, panels: torch.Tensor) -> None:
        """Keep panels. If they cannot be written, a warning says so once, and no others are."""
        if not self._is_writable:
            return
        path = self._path(key)
        temporary = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=f"{key}.")
            os.close(handle)
            save_file({"panels": panels}, temporary, {"checksum": _checksum(panels)})
            let_others_read(Path(temporary))
            Path(temporary).replace(path)
        except (OSError, SafetensorError) as error:
            _log.warning("quantised weights cannot be kept in %s (%s): they are made again next time", path, error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            self._is_writable = False

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.safetensors"


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().view(torch.uint8).numpy().data


def _checksum(panels: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes(panels))
