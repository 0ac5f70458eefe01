"""Derives between which tags a model thinks."""

from __future__ import annotations

from radixkv.tools.derivation.probes import CALLS, TEXT, THOUGHT, NotDerivableError, TemplateProbe
from radixkv.tools.derivation.segments import Segmenter
from radixkv.tools.reasoning import ReasoningTags


def derived_tags(probe: TemplateProbe) -> ReasoningTags | None:
    """The tags between which a template writes the thoughts of an answer; None: it writes none, or not between tags."""
    for text, calls in ((TEXT, ()), ("", CALLS[:1])):
        try:
            before, thought, after = probe.answer(text, calls, THOUGHT).partition(THOUGHT)
            plain, _, _ = probe.answer(TEXT).partition(TEXT)
        except NotDerivableError:
            continue
        if thought:
            segments = Segmenter(token for token in probe.added_tokens if token in before or token in after)
            return _tags(segments, before.rstrip(), after.lstrip(), plain)
    return None


def _tags(segments: Segmenter, before: str, after: str, plain: str) -> ReasoningTags | None:
    """The tags that end ``before`` and begin ``after``.

    Args:
        plain: what stands before the text of an answer without thoughts.
    """
    close = next(iter(segments.split(after)), "")
    if plain.startswith(before) and plain.removeprefix(before).lstrip().startswith(close):
        opening = segments.split(before)[-1:]  # no thought is written as an empty one
    else:
        opening = segments.split(before.removeprefix(segments.common_start(before, plain)).lstrip())
    tags = ReasoningTags("".join(opening), close)
    are_tags = segments.is_marker(close) and segments.is_marker(next(iter(opening), ""))
    around = f"{before}{after}"
    return tags if are_tags and around.count(tags.open) == around.count(close) == 1 else None
