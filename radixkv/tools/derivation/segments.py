"""Texts of templates as added tokens, tags and what is between them, so that no tag is cut where two texts differ."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence


class Segmenter:
    """Splits texts.

    Args:
        added_tokens: texts that are tokens of their own.
    """

    def __init__(self, added_tokens: Iterable[str]) -> None:
        longest_first = map(re.escape, sorted(added_tokens, key=len, reverse=True))
        self._marker = re.compile("|".join([*longest_first, r"<[^<>]+>", r"\[/?[A-Z_]+\]"]))
        self._segment = re.compile("|".join([self._marker.pattern, r"<[^<>]*", r"\s+", r"."]))

    def split(self, text: str) -> list[str]:
        """The segments of a text."""
        return self._segment.findall(text)

    def is_marker(self, segment: str) -> bool:
        """Whether a segment is an added token or a tag."""
        return self._marker.fullmatch(segment) is not None

    def common_start(self, *texts: str) -> str:
        """With which segments all texts begin."""
        return "".join(_common(list(map(self.split, texts))))

    def common_end(self, *texts: str) -> str:
        """With which segments all texts end."""
        return "".join(reversed(_common([self.split(text)[::-1] for text in texts])))


def _common(lists: Sequence[Sequence[str]]) -> Sequence[str]:
    together = zip(*lists, strict=False)
    return [each[0] for each in itertools.takewhile(lambda segments: len(set(segments)) == 1, together)]
