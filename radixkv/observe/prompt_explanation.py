"""`PrefixCache.explain` as text: how much of a prompt is cached, and how to have more of it cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from radixkv.cache import Computed, Explanation, PrefixCache, Reason
from radixkv.cache.arguments import check_unicode
from radixkv.cache.counted import counted

Decode = Callable[[list[int]], str]
DecodeToken = Callable[[int], str]

_CONTEXT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt and the cached one with the longest common prefix, around the first token that differs.

    Attributes:
        position: length of the common prefix, in tokens.
        before: text of the last tokens of the common prefix.
        prompt, cached: texts of the tokens that follow in each, one entry per token.
    """

    position: int
    before: str
    prompt: list[str]
    cached: list[str]


@dataclass(frozen=True, slots=True)
class TierPart:
    """Consecutive tokens of a prompt that a tier below the pool has.

    Attributes:
        seconds: what loading them is expected to take; None: nothing was loaded from there yet.
    """

    medium: str
    start: int
    num_tokens: int
    seconds: float | None

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", loaded in about {1000 * self.seconds:.0f} ms"
        return f"{counted(self.num_tokens, 'token')} from {self.start} on: in the tier {self.medium!r}{time}"


@dataclass(frozen=True, slots=True)
class PromptExplanation:
    """How much of a prompt would be reused now, and why not more; ``str`` gives it as sentences.

    Attributes:
        computed: what is not in the pool; its part ``below`` is loaded instead where that is faster.
        replica: whose cache it is; None: there is one engine.
    """

    num_prompt_tokens: int
    num_reused_tokens: int
    computed: tuple[Computed, ...]
    difference: Difference | None
    below: tuple[TierPart, ...] = ()
    replica: str | None = None

    def __str__(self) -> str:
        where = "" if self.replica is None else f" on replica {self.replica!r}"
        lines = [f"{self.num_reused_tokens} of {self.num_prompt_tokens} prompt tokens are reused{where}"]
        lines += [str(part) for part in self.below]
        lines += [_sentence(part) for part in self.computed]
        difference = self.difference
        if difference is not None and difference.prompt and difference.position == 0:
            lines.append("nothing cached that this prompt may share begins like it")
        elif difference is not None and difference.prompt and difference.cached:
            lines.append(
                f"differs at token {difference.position}: {_marked(difference.prompt)} against "
                f"{_marked(difference.cached)}, after {_quoted(difference.before)}: put what changes after what stays"
            )
        elif difference is not None and difference.prompt:
            lines.append(f"the longest cached prompt ends at token {difference.position}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PromptExplanation:
        """What `as_dict` gave.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        difference = data["difference"]
        return cls(
            data["num_prompt_tokens"],
            data["num_reused_tokens"],
            tuple(Computed(**{**part, "reason": Reason(part["reason"])}) for part in data["computed"]),
            None if difference is None else Difference(**difference),
            tuple(TierPart(**part) for part in data["below"]),
            data["replica"],
        )


def decode_explanation(
    explanation: Explanation, prompt_token_ids: Sequence[int], decode: Decode, decode_token: DecodeToken
) -> PromptExplanation:
    """An explanation with its token ids decoded to texts.

    Args:
        decode: several tokens to their text.
        decode_token: a single token to its text within a text.
    """
    divergence = explanation.divergence
    difference = None
    if divergence is not None:
        start = max(0, divergence.position - _CONTEXT_TOKENS)
        difference = Difference(
            divergence.position,
            decode([int(token) for token in prompt_token_ids[start : divergence.position]]),
            [decode_token(token) for token in divergence.prompt_tokens.tolist()],
            [decode_token(token) for token in divergence.cached_tokens.tolist()],
        )
    return PromptExplanation(
        explanation.num_prompt_tokens, explanation.num_reused_tokens, explanation.computed, difference
    )


def explain_after(
    prompt: str, earlier: Sequence[str], tokenizer: Any, decode_token: DecodeToken, block_size: int
) -> PromptExplanation:
    """How much of a prompt would be reused after ``earlier`` prompts, in a cache without evictions.

    Args:
        decode_token: as of `decode_explanation`.

    Raises:
        ValueError: a text has no tokens, or is not Unicode.
    """
    prompts: list[list[int]] = []
    for name, text in (*(("after", each) for each in earlier), ("prompt", prompt)):
        check_unicode(name, text)
        prompts.append(tokenizer(text)["input_ids"])
        if not prompts[-1]:
            raise ValueError(f"{name}: {text!r} has no tokens; a prompt needs at least one")
    cache = PrefixCache(sum(len(tokens) // block_size + 1 for tokens in prompts), block_size)
    for tokens in prompts[:-1]:
        table = cache.open(tokens)
        cache.reserve(table, len(tokens))
        cache.append(table, tokens[table.num_tokens :])
        cache.close(table)
    return decode_explanation(cache.explain(prompts[-1]), prompts[-1], tokenizer.decode, decode_token)


def _sentence(part: Computed) -> str:
    tokens, times = counted(part.num_tokens, "token"), "once" if part.uses == 1 else f"{part.uses} times"
    match part.reason:
        case Reason.NEW:
            return f"{tokens} from {part.start} on: not seen before, as far as is remembered"
        case Reason.EVICTED:
            return (
                f"{tokens} from {part.start} on: evicted {part.evicted_seconds_ago:.0f} s ago, unused for "
                f"{part.unused_seconds:.0f} s; used {times} before. More memory or a pin would keep them"
            )
        case Reason.OTHER_NAMESPACE:
            return f"{tokens} from {part.start} on: cached, but under another cache salt, which never shares"
        case Reason.READ_OFF:
            return (
                f"{tokens} from {part.start} on: cached, but this request does not read the cache: that is switched off, or "
                "log-probabilities of the prompt are wanted, for which all of it is computed"
            )
        case Reason.INSIDE_BLOCK:
            return (
                f"{tokens} from {part.start} on: cached, but inside a block: recurrent layers can go on only where a block's "
                "tokens end. A smaller block_size would reuse more"
            )
        case Reason.LAST_TOKEN:
            return f"{tokens} from {part.start} on: all is cached; the last token is computed for its logits"


def _marked(tokens: list[str]) -> str:
    return "`" + "|".join(token.replace("\n", "\\n") for token in tokens) + "`"


def _quoted(text: str) -> str:
    return "`" + text.replace("\n", "\\n") + "`"
