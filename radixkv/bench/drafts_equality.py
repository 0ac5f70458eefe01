"""Where answers with drafts differ from those without, and how close the two candidates were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.outputs import RequestOutput
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.variates import SamplingRow, exponential_variates, rng_states
from radixkv.sampling_params import SamplingParams

Answered = tuple[RequestOutput, SamplingParams]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which an answer with drafts differs from that without.

    Attributes:
        index: of the token in the answer.
        without, with_drafts: the tokens; None: the answer had ended.
        gap: by how much the first wins over the second, in natural logarithms and in float32, with penalties and the
            request's own random numbers; 0: a draw. None: one had ended.
    """

    index: int
    without: int | None
    with_drafts: int | None
    gap: float | None


class Comparison:
    """Compares answers.

    Args:
        make_reference: loads the model, as transformers computes it in float32; called if anything differs at all.
    """

    def __init__(self, make_reference: Callable[[], Any]) -> None:
        self._make_reference = make_reference
        self._reference: Any = None

    def differences(self, without: Sequence[Answered], with_drafts: Sequence[Answered]) -> Iterator[Difference]:
        """Of each pair of answers the first, if there is one.

        Args:
            without: the answers without drafts, with the parameters that they were drawn by.
            with_drafts: those with drafts. Where prompts differ, because they go on from an answer that had differed,
                nothing is compared.
        """
        for (expected, params), (answer, _) in zip(without, with_drafts, strict=True):
            if expected.prompt_token_ids != answer.prompt_token_ids:
                continue
            for a, b in zip(expected.outputs, answer.outputs, strict=True):
                if a.token_ids != b.token_ids:
                    yield self._first(expected.prompt_token_ids, params, a.index, a.token_ids, b.token_ids)

    def _first(
        self, prompt: list[int], params: SamplingParams, sample: int, expected: list[int], answer: list[int]
    ) -> Difference:
        common = zip(expected, answer, strict=False)
        index = next((i for i, (a, b) in enumerate(common) if a != b), min(len(expected), len(answer)))
        if index in (len(expected), len(answer)):
            first, second = (tokens[index] if index < len(tokens) else None for tokens in (expected, answer))
            return Difference(index, first, second, None)
        pair = expected[index], answer[index]
        return Difference(index, *pair, self._gap(prompt, params, sample, expected[:index], pair))

    @torch.inference_mode()
    def _gap(
        self, prompt: list[int], params: SamplingParams, sample: int, before: list[int], pair: tuple[int, int]
    ) -> float:
        if self._reference is None:
            self._reference = self._make_reference()
        logits = self._reference(input_ids=torch.tensor([[*prompt, *before]])).logits[0, -1].float()
        changes = LogitChanges(params, (), ())
        counts = changes.new_counts(prompt) if changes.penalizes else None
        changes.apply(logits, before, counts, constrained=False)
        first, second = logits[list(pair)].tolist()
        if params.greedy:
            return float(first - second)
        row = SamplingRow(params, params.seed or 0, sample, len(before))
        variates = exponential_variates(rng_states([row], torch.device("cpu")), torch.tensor(pair)).flatten().tolist()
        return float((first - second) / params.temperature - (math.log(variates[0]) - math.log(variates[1])))
