"""What is asked of a server: conversations under shared system prompts, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from radixkv.bench.workloads import WORDS


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The conversations of one run.

    Lengths are in common English words, each a token of most vocabularies; what a server counts it reports itself.

    Attributes:
        conversations: how many.
        turns: questions in each; every one is asked with all that was said before.
        prefixes: different system prompts; conversations take them in turn.
        prefix_tokens: length of each; 0: there are none, and nothing is shared but the chat template.
        prompt_tokens: length of a question.
        answer_tokens: tokens of an answer at most.
        seed: another seed, other words. A server that has run a seed before knows its prompts.
    """

    conversations: int = 64
    turns: int = 1
    prefixes: int = 1
    prefix_tokens: int = 500
    prompt_tokens: int = 50
    answer_tokens: int = 64
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return self.conversations * self.turns


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt, if any, and the questions to ask one after the other."""

    system: str
    questions: list[str]


def make_conversations(shape: LoadShape) -> list[Conversation]:
    """The conversations of a run."""
    rng = random.Random(shape.seed)

    def text(num_words: int) -> str:
        return " ".join(rng.choices(WORDS, k=num_words))

    systems = [text(shape.prefix_tokens) for _ in range(shape.prefixes)]
    return [
        Conversation(systems[number % shape.prefixes], [text(shape.prompt_tokens) for _ in range(shape.turns)])
        for number in range(shape.conversations)
    ]
