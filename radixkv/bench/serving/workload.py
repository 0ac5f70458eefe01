"""Synthetic load: conversations with shared system prompts, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from radixkv.bench.common.words import WORDS


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The conversations of one run.

    Lengths are in common English words, one token each in most vocabularies; servers report the exact counts.

    Attributes:
        conversations: number of conversations.
        turns: questions per conversation; each is sent with all messages before it.
        prefixes: number of different system prompts, assigned to conversations round robin.
        prefix_tokens: length of a system prompt; 0: no system prompts, only the chat template is shared.
        prompt_tokens: length of a question.
        answer_tokens: maximum length of an answer.
        seed: of the random words. Prompts of a seed that a server has seen may be in its cache.
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
    """A system prompt, empty for none, and the questions to send one after the other."""

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
