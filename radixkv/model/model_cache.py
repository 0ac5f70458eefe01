"""The model cache: what is made from models once, in `~/.cache/radixkv` or `$RADIXKV_CACHE`.

::

    NAME-KEY/     a GGUF file as a folder (`radixkv.model.gguf.conversion`); NAME-KEY.xxxxxxxx/: while it is converted
    quantised/    panels of quantised weights (`radixkv.model.native.panel_cache`)
    packed/       packed weights that processes share (`radixkv.model.weights.shared`)

All of it can be made again. What was not used for a long time is removed when a model is loaded: a new version of a model has
another key, so the old one's files would stay for ever.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "radixkv.json"
"""The file in a converted model's folder that lists its files."""
_SECONDS_UNUSED = 90 * 86400
# The last of these ends the name of a file that is being written, or whose writer was killed.
_FILE_NAME = re.compile(r"[0-9a-f]{32}(\.safetensors)?(\.\w{8})?")
# The file in a folder that a conversion is made in, or was when its process was killed.
_TEMPORARY_MARK = "radixkv.temporary"

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The model cache, whether it exists or not."""
    try:
        return Path(os.environ.get("RADIXKV_CACHE") or "~/.cache/radixkv").expanduser()
    except RuntimeError:  # a user without a home: nothing is kept, as nothing can be below a device
        return Path(os.devnull) / "radixkv"


def quantised_folder() -> Path:
    """The folder of quantised weights."""
    return cache_folder() / "quantised"


def packed_folder() -> Path:
    """The folder of packed weights."""
    return cache_folder() / "packed"


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A path beside a folder of the cache, for what becomes that folder, or was it. What is there afterwards is removed."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as temporary:
        (Path(temporary) / _TEMPORARY_MARK).touch()
        yield Path(temporary) / "model"


def let_others_read(path: Path) -> None:
    """Let those read a new file who may look into its folder: what safetensors and `tempfile` write is the owner's alone."""
    path.chmod(path.parent.stat().st_mode & 0o644)


def mark_used(path: Path) -> None:
    """A file or folder of the cache is used now."""
    with suppress(OSError):  # another user's, whose own use counts, or of a cache that can only be read
        os.utime(path)


def remove_unused() -> None:
    """Remove what was not used for 90 days. Processes that have mapped a file keep what they have mapped."""
    latest = time.time() - _SECONDS_UNUSED
    try:
        entries = list(_entries())
    except OSError as error:  # until Python 3.13, of folders that may not be looked into
        _log.info("the model cache cannot be looked at: %s", error)
        return
    for path in entries:
        try:
            if path.stat().st_mtime < latest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                _log.info("%s was not used for 90 days, and is removed", path)
        except OSError as error:
            _log.info("%s was not used for 90 days, and cannot be removed: %s", path, error)


def stored_bytes() -> int:
    """Bytes of what RadixKV has made there, as far as it may be looked at."""
    total = 0
    with suppress(OSError):  # until Python 3.13, of folders that may not be looked into
        for path in _entries():
            with suppress(FileNotFoundError):  # another process has just removed it, or given it its name
                total += sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    return total


def _entries() -> Iterator[Path]:
    """What RadixKV has made: the folder may have been chosen, and hold other files."""
    for mark in (MANIFEST, _TEMPORARY_MARK):
        yield from (path.parent for path in cache_folder().glob(f"*/{mark}"))
    for folder in (quantised_folder(), packed_folder()):
        yield from (path for path in folder.glob("*") if _FILE_NAME.fullmatch(path.name))
