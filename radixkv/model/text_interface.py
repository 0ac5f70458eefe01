"""How a model reads and writes text: all of it that needs no weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radixkv.model.chat_templates import RequestTemplates
from radixkv.sampling_defaults import SamplingDefaults
from radixkv.tools.chat_format import ChatFormat


@dataclass(frozen=True)
class TextInterface:
    """What is needed to make prompts for a model, and to read its answers.

    Attributes:
        tokenizer: None where the model has none; prompts and answers are then token ids only.
        name: of the model.
        max_model_len: tokens of a sequence at most, prompt and answer together: no more than the model takes and there is
            room for.
        vocab_size: number of token ids.
        eos_token_ids: tokens that end an answer.
        chat_format: how its answers to conversations are written; None where it has no chat template.
        sampling_defaults: what requests that say nothing else are sampled with, by the names of `SamplingParams`.
        request_templates: how answers are read by the chat templates that requests bring.
    """

    tokenizer: Any
    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    chat_format: ChatFormat | None
    sampling_defaults: SamplingDefaults
    request_templates: RequestTemplates = field(
        default_factory=RequestTemplates, kw_only=True, repr=False, compare=False
    )

    def require_tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            ValueError: there is none.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} has no tokenizer: pass one as the option tokenizer, or only prompts of token ids"
            )
        return self.tokenizer
