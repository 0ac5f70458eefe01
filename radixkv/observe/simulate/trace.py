"""Traces: which blocks each request uses, and when it arrives.

Two formats are read, both JSON lines with ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``: one number per block, equal only where the block and the whole prefix before it are equal. In both, a line may
carry ``priority``, the request's: a whole number, the lowest being the most urgent; 0 where it is missing.

- Mooncake's (Qin et al., FAST 2025): blocks of 512 tokens, the last of which may be partly filled.
- Our own (`TraceRecorder`): the first line names the format and the block size; only full blocks; ``output_hash_ids`` are
  the blocks that were filled while the answer was generated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.observe.trace_format import TRACE_FORMAT, TRACE_VERSION

MOONCAKE_BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request.

    Attributes:
        time: of arrival, in seconds since the start of the trace.
        prompt: one number per block of the prompt, int32; equal for equal prefixes.
        output: the same for the blocks that the answer filled.
        priority: of the request; the LOWEST number is the most urgent.
        num_output_tokens: of the answer; 0: not known but by its blocks.
    """

    time: float
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    priority: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time, and the tokens per block."""

    requests: list[TracedRequest]
    block_size: int

    @property
    def num_asked_blocks(self) -> int:
        """Blocks of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks of all prompts and answers: the size of a cache without evictions."""
        ids: set[int] = set()
        for request in self.requests:
            ids.update(request.prompt.tolist(), request.output.tolist())
        return len(ids)


def read_trace(path: Path) -> Trace:
    """Read a trace of either format.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line has another format; the message names it.
    """
    block_size = MOONCAKE_BLOCK_SIZE
    rows: list[tuple[float, list[int], list[int], int, int]] = []
    numbers: dict[int, int] = {}
    # Bytes that are not UTF-8 are reported with their line, where it is parsed.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if number == 1 and isinstance(fields, dict) and "format" in fields:
                    block_size = _block_size(fields)
                    continue
                time, ids = float(fields["timestamp"]) / 1000, fields["hash_ids"]
                prompt, output = (
                    [numbers.setdefault(int(name), len(numbers)) for name in names]
                    for names in (ids, fields.get("output_hash_ids", []))
                )
                priority, num_output_tokens = _priority(fields), int(fields.get("output_length", 0))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected an object with 'timestamp' and 'hash_ids': {_in_words(error)}"
                ) from error
            rows.append((time, prompt, output, priority, num_output_tokens))
    if not rows:
        raise ValueError(f"{path}: there is no request in it")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    requests = [
        TracedRequest(time - start, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32), *rest)
        for time, prompt, output, *rest in rows
    ]
    return Trace(requests, block_size)


def _in_words(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _priority(fields: dict[str, Any]) -> int:
    priority = fields.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority: expected a whole number, got {priority!r}")
    return priority


def _block_size(header: dict[str, Any]) -> int:
    if header["format"] != TRACE_FORMAT or header.get("version") != TRACE_VERSION:
        raise ValueError(f"format: expected {TRACE_FORMAT!r}, version {TRACE_VERSION}, got {header!r}")
    size = header["block_size"]
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"block_size: expected a whole number of at least 1, got {size!r}")
    return size
