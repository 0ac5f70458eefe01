"""Records a trace of requests without any text or token: salted hashes, lengths and times.

The salt is drawn anew for each recording and never stored, so a trace cannot be searched for a known prompt.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from radixkv.observe.trace_format import TRACE_FORMAT, TRACE_VERSION

_log = logging.getLogger(__name__)


class TraceRecorder:
    """Writes one line per request to a file that `radixkv simulate` reads.

    If the file cannot be written later on (a full disk), it warns and records nothing more; requests go on.

    Args:
        path: a new file; a trace that is there already is first renamed to PATH.1, or to the next free number.

    Raises:
        OSError: the file cannot be written, or the one that is there cannot be renamed.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        self._block_size = block_size
        self._salt = secrets.token_bytes(32)
        self._start = time.monotonic()
        self._path = path
        _put_aside(path)
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise OSError(
                f"record_trace: expected a file that can be written, got {str(path)!r}: {error.strerror}"
            ) from error
        self._write({"format": TRACE_FORMAT, "version": TRACE_VERSION, "block_size": block_size})

    def record(
        self,
        namespace: str,
        prompt: Sequence[int] | NDArray[np.int32],
        output: Sequence[int],
        arrival: float | None = None,
        priority: int = 0,
    ) -> None:
        """Record a request that has ended and that arrived at a time by `time.monotonic`; None: now."""
        if self._file.closed:
            return
        size = self._block_size
        tokens = np.concatenate([np.asarray(prompt, dtype=np.int32), np.asarray(output, dtype=np.int32)])
        before = self._salt + namespace.encode()
        names = []
        for stop in range(size, len(tokens) + 1, size):
            # Not the cache's chained hashes: after the first block, those would carry no more than 64 bits of the salt.
            before = xxhash.xxh3_128_digest(before + self._salt + tokens[stop - size : stop].tobytes())
            names.append(int.from_bytes(before[:6], "little"))
        num_prompt_blocks = len(prompt) // size
        optional: dict[str, object] = {"priority": priority} if priority else {}
        fields = {
            "timestamp": round(((time.monotonic() if arrival is None else arrival) - self._start) * 1000),
            "input_length": len(prompt),
            "output_length": len(output),
            "hash_ids": names[:num_prompt_blocks],
            "output_hash_ids": names[num_prompt_blocks:],
            **optional,
        }
        try:
            self._write(fields)
        except OSError as error:
            _log.warning("record_trace: %s cannot be written (%s); nothing more is recorded", self._path, error)
            with suppress(OSError):  # from flushing what is not written yet
                self.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, fields: dict[str, object]) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def _put_aside(path: Path) -> None:
    """Rename a regular file that is not empty; leave anything else, such as a pipe, as it is.

    Raises:
        OSError: it cannot be renamed.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        earlier = _new_file(path)  # taken first: another process may put a trace aside at the same time
        try:
            path.replace(earlier)
        except OSError:
            earlier.unlink()
            raise
    except OSError as error:
        raise OSError(
            f"record_trace: the trace in {str(path)!r} cannot be renamed: {error.strerror}; move it, or name another file"
        ) from error
    _log.info("record_trace: the trace that was in %s is now %s", path, earlier)


def _new_file(path: Path) -> Path:
    """Create an empty file, named by the path and the next free number."""
    number = 1
    while True:
        try:
            numbered = Path(f"{path}.{number}")
            numbered.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return numbered
