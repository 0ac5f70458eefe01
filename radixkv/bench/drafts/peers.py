"""Other engines' drafts, taken from the prompt, with greedy answers: transformers' prompt look-up, and vLLM's n-grams.

Answers have as many tokens as RadixKV's without drafts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import transformers

from radixkv.bench.peers import vllm_drafts
from radixkv.bench.peers.line_process import LineProcess

# As in transformers' documentation.
_LOOKUP_TOKENS = 10


class Question(NamedTuple):
    """A prompt, and how many tokens its answer has."""

    prompt_token_ids: list[int]
    num_tokens: int


class Peer(Protocol):
    """An engine with drafts of its own.

    Attributes:
        name: of the engine and its drafts.
    """

    name: str

    def seconds(self, questions: Sequence[Question]) -> float:
        """How long it takes to answer them, one after the other."""

    def close(self) -> None:
        """Free what it holds."""


class PromptLookup:
    """transformers' ``generate`` with ``prompt_lookup_num_tokens`` (Saxena 2023).

    Args:
        folder: of the model.
        dtype: to compute in.
    """

    name = "transformers prompt_lookup"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def seconds(self, questions: Sequence[Question]) -> float:
        start = time.perf_counter()
        for prompt, num_tokens in questions:
            ids = torch.tensor([prompt])
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=num_tokens,
                max_new_tokens=num_tokens, prompt_lookup_num_tokens=_LOOKUP_TOKENS, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - start

    def close(self) -> None:
        self._model = None


class VllmNgram:
    """vLLM with ``{"method": "ngram"}``, in a process and an environment of its own.

    Args:
        python: its interpreter.
        folder: of the model.
        dtype: to compute in.
    """

    name = "vLLM ngram"

    def __init__(self, python: Path, folder: Path, dtype: str) -> None:
        self._process = LineProcess("vllm", [str(python), vllm_drafts.__file__, str(folder), dtype])
        self._process.reply()

    def seconds(self, questions: Sequence[Question]) -> float:
        return float(self._process.ask(json.dumps(questions)))

    def close(self) -> None:
        self._process.close()
