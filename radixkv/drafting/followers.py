"""Which tokens followed each token: what a structure repeats between its values, such as quotes, commas and spaces."""

from __future__ import annotations

from collections.abc import Sequence

# How many different followers of a token are kept, and of how many tokens.
_MOST = 4
_MOST_TOKENS = 4096


class Followers:
    """Which tokens followed each token in the answers of one namespace.

    Attributes:
        by_token: for each token, those that followed it, the most recent first.
    """

    def __init__(self) -> None:
        self.by_token: dict[int, list[int]] = {}

    def note(self, sequence: Sequence[int], start: int) -> None:
        """Note which token follows which in a sequence.

        Args:
            sequence: all of its tokens.
            start: the position of the first follower to note; at least 1.
        """
        for position in range(start, len(sequence)):
            token, before = sequence[position], sequence[position - 1]
            # Entered anew, because the token noted longest ago is the first to be forgotten.
            known = self.by_token.pop(before, [])
            if token in known:
                known.remove(token)
            self.by_token[before] = [token, *known[: _MOST - 1]]
        while len(self.by_token) > _MOST_TOKENS:
            del self.by_token[next(iter(self.by_token))]
