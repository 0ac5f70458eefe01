"""Traces: which blocks each request uses, and when it arrives.

Two formats are read, both JSON lines with ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``: one number per block. Equal numbers stand for the same block only after the same prefix. In both, a line may
carry the request's ``priority``: a whole number, the lowest being the most urgent; 0 where it is missing.

- Mooncake's (Qin et al., FAST 2025): blocks of 512 tokens, the last of which may be partly filled. If the first line is that
  of our own format, the blocks have the size that it names.
- Our own (`TraceRecorder`): the first line names the format and the block size; only full blocks; ``output_hash_ids`` are
  the blocks that were filled while the answer was generated.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.arguments import is_number, is_whole
from radixkv.observe.trace_format import TRACE_FORMAT, TRACE_VERSION
from radixkv.option_words import nearest

_log = logging.getLogger(__name__)

MOONCAKE_BLOCK_SIZE = 512
# Fields of both formats, and the similarity from which another name counts as a misspelt one.
_FIELDS = ("timestamp", "hash_ids", "input_length", "output_length", "output_hash_ids", "priority")
_LIKE_A_FIELD = 0.8
_ROOT = -1  # comes before the first block of a prompt
# Stands for the last token of a prompt, which is always computed, so that all blocks of a trace can be hits.
LAST_TOKEN = np.array([2**31 - 1], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request.

    Attributes:
        time: of arrival, in seconds since the start of the trace.
        prompt: one number per block of the prompt, int32; equal for equal prefixes.
        output: the same for the blocks that the answer filled.
        priority: of the request; the LOWEST number is the most urgent.
        num_output_tokens: of the answer; 0: only its blocks are known.
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
    """Read a trace of either format. An unfinished last line, such as a killed process leaves, is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line has another format, and the message names it; or there are so many tokens for each block that
            these must be of another size.
    """
    block_size, reader = MOONCAKE_BLOCK_SIZE, _RequestReader()
    requests: list[TracedRequest] = []
    # Bytes that are not UTF-8 are reported with their line, where it is parsed.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if number == 1 and isinstance(fields, dict) and "format" in fields:
                    block_size = _block_size(fields)
                else:
                    requests.append(reader.read(fields))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, json.JSONDecodeError) and number > 1 and not line.endswith("\n"):
                    _log.warning("%s, line %d is unfinished, and left out", path, number)
                    break
                raise ValueError(
                    f"{path}, line {number}: expected an object with 'timestamp' and 'hash_ids': {_in_words(error)}"
                ) from error
    if not requests:
        raise ValueError(f"{path}: there is no request in it")
    _check_block_size(path, block_size, reader.num_tokens, reader.num_blocks, len(requests))
    requests.sort(key=lambda request: request.time)
    start = requests[0].time
    return Trace([replace(request, time=request.time - start) for request in requests], block_size)


class _RequestReader:
    """Reads the requests of one trace, each from the fields of its line.

    Attributes:
        num_tokens: of all prompts whose length is given.
        num_blocks: of these prompts.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_blocks = 0
        self._numbers: dict[tuple[int, int], int] = {}
        self._known = set(_FIELDS)

    def read(self, fields: Any) -> TracedRequest:
        """The next request, by the trace's own clock; raises KeyError, TypeError or ValueError if it is malformed."""
        if not isinstance(fields, dict):
            raise ValueError(f"got {fields!r:.80}")
        time = _seconds(fields["timestamp"])
        if not self._known.issuperset(fields):
            _refuse_misspelt(fields, self._known)
        prompt = _chained("hash_ids", fields["hash_ids"], self._numbers, _ROOT)
        before_output = prompt[-1] if prompt else _ROOT
        output = _chained("output_hash_ids", fields.get("output_hash_ids", []), self._numbers, before_output)
        priority, num_output_tokens = _priority(fields), _num_tokens(fields, "output_length")
        if "input_length" in fields:
            self.num_tokens += _num_tokens(fields, "input_length")
            self.num_blocks += len(prompt)
        return TracedRequest(
            time, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32), priority, num_output_tokens
        )


def _num_tokens(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name, 0)
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: expected a number of tokens, got {value!r:.80}")
    return int(value)


def _refuse_misspelt(fields: Mapping[str, Any], known: set[str]) -> None:
    """Refuse a name that resembles a missing field of the format. Other unknown names are allowed, and become known."""
    for name in fields.keys() - known:
        near = nearest(name, _FIELDS, _LIKE_A_FIELD)
        if near is not None and near not in fields:
            raise ValueError(f"{near!r} is missing, and there is {name!r}")
        known.add(name)


def _chained(field: str, names: Any, numbers: dict[tuple[int, int], int], before: int) -> list[int]:
    """A number for each block, new unless the same block came after the same prefix before.

    Args:
        field: where the blocks' names were read, for the message.
        numbers: given so far, by the number of the block before and the block's name.
        before: the number of the block before the first.
    """
    if not isinstance(names, list) or not all(map(is_whole, names)):
        raise ValueError(f"{field}: expected a list of whole numbers, got {names!r:.80}")
    chained = []
    for name in names:
        before = numbers.setdefault((before, name), len(numbers))
        chained.append(before)
    return chained


def _seconds(milliseconds: Any) -> float:
    seconds = float(milliseconds) / 1000
    if not math.isfinite(seconds):
        raise ValueError(f"timestamp: expected milliseconds, got {milliseconds!r}")
    return seconds


def _check_block_size(path: Path, block_size: int, num_tokens: int, num_blocks: int, num_requests: int) -> None:
    """Refuse a trace whose blocks cannot be of this size: each prompt's last block may be missing, or filled in part."""
    fewest, most = (num_blocks - num_requests) * block_size, (num_blocks + num_requests) * block_size
    # Twice as many, or half as many, because lengths of public traces are not exact everywhere.
    if num_blocks and not fewest / 2 <= num_tokens <= most * 2:
        header = json.dumps({"format": TRACE_FORMAT, "version": TRACE_VERSION, "block_size": 16})
        raise ValueError(
            f"{path}: expected blocks of {block_size} tokens, got prompts with {num_tokens / num_blocks:.1f} tokens for "
            f"each of their 'hash_ids'; name another size in the file's first line, such as {header}"
        )


def _in_words(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _priority(fields: dict[str, Any]) -> int:
    priority = fields.get("priority", 0)
    if not is_whole(priority):
        raise ValueError(f"priority: expected a whole number, got {priority!r}")
    return int(priority)


def _block_size(header: dict[str, Any]) -> int:
    if header["format"] != TRACE_FORMAT or header.get("version") != TRACE_VERSION:
        raise ValueError(f"format: expected {TRACE_FORMAT!r}, version {TRACE_VERSION}, got {header!r}")
    size = header["block_size"]
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"block_size: expected a whole number of at least 1, got {size!r}")
    return size
