"""The steps of a run in words."""

from __future__ import annotations

from collections.abc import Sequence


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


def tokens_in_words(tokens: Sequence[int]) -> str:
    """How many there are, and the first of them."""
    shown = " ".join(map(str, tokens[:12])) + (" ..." if len(tokens) > 12 else "")
    return f"{len(tokens)} tokens [{shown}]" if len(tokens) != 1 else f"1 token [{shown}]"


def ids_in_words(blocks: Sequence[int]) -> str:
    """Block ids, one after the other."""
    return " ".join(map(str, blocks)) or "(none)"


def under(namespace: str) -> str:
    """The namespace of a step, to be put behind it; the empty one is not named."""
    return f" under {namespace!r}" if namespace else ""
