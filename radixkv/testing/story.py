"""The steps of a run in words."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from radixkv.cache.counted import counted

# The name, the blocks and the length of a sequence; and all blocks that are free, or cached, with all sequences.
_Sequence = tuple[str, Sequence[int], int]
_State = tuple[Sequence[int], Sequence[int], Sequence[_Sequence]]


class Story:
    """What has happened so far, a line for each step.

    Args:
        keep: all steps; False, for runs of millions: only what was last added.
    """

    def __init__(self, keep: bool) -> None:
        self.steps: list[str] = []
        self.keep = keep

    def begin(self, step: str) -> None:
        """Add a step."""
        if not self.keep:
            self.steps.clear()
        self.steps.append(step)

    def go_on(self, what: str) -> None:
        """Add what came of the last step."""
        if self.keep:
            self.steps[-1] += f": {what}" if ":" not in self.steps[-1] else f"; {what}"
        else:
            self.steps[:] = [what]


def sequence_names() -> Iterator[str]:
    """What sequences are called: A to Z, then A1 to Z1, and so on."""
    for number in itertools.count():
        for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
            yield f"{letter}{number or ''}"


def tokens_in_words(tokens: Sequence[int]) -> str:
    """How many there are, and the first of them."""
    shown = " ".join(map(str, tokens[:12])) + (" ..." if len(tokens) > 12 else "")
    return f"{counted(len(tokens), 'token')} [{shown}]"


def ids_in_words(blocks: Sequence[int]) -> str:
    """Block ids, one after the other."""
    return " ".join(map(str, blocks)) or "(none)"


def changes_in_words(before: _State, after: _State) -> str:
    """How two states differ."""
    old, new = _state_in_words(*before), _state_in_words(*after)
    lost, gained = ([part for part in one if part not in other] for one, other in ((old, new), (new, old)))
    return f"{', '.join(lost)} before, {', '.join(gained)} after"


def _state_in_words(free: Sequence[int], cached: Sequence[int], sequences: Sequence[_Sequence]) -> list[str]:
    each = (f"{name} {counted(size, 'token')} in blocks {ids_in_words(ids)}" for name, ids, size in sequences)
    return [f"free blocks {ids_in_words(free)}", f"cached blocks {ids_in_words(cached)}", *each]


def error_in_words(error: Exception) -> str:
    """An exception of a cache, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is that of the call
    return repr(error) + (f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "")


def under(namespace: str) -> str:
    """The namespace of a step, to be put behind it; the empty one is not named."""
    return f" under {namespace!r}" if namespace else ""
