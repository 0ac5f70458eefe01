"""Where answers with drafts differ from those without, and how close the two candidates were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from radixkv.outputs import RequestOutput
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling.grammar.mask import apply_grammar_bitmask
from radixkv.sampling.host_draw import BLOCK_IDS, tokens_left
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.sampler import SamplingState, changed_logits
from radixkv.sampling.variates import SamplingRow, exponential_variates, rng_states
from radixkv.sampling_params import SamplingParams

# `_cut` looks for a distance between these.
_SMALLEST_CUT, _LARGEST_CUT = 1e-7, 32.0

Answered = tuple[RequestOutput, SamplingParams]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which an answer with drafts differs from that without.

    Attributes:
        index: of the token in the answer.
        without, with_drafts: the tokens; None: the answer had ended.
        gap: the margin by which ``without`` beats ``with_drafts`` if both may be drawn, in natural logarithms and in float32,
            with penalties and the request's own random numbers; 0: a tie. None: one answer had ended.
        cut: how far the winner's logit, divided by the temperature, must move against others for top_p, top_k or min_p to
            remove it, or to keep it if they do remove it: then the other token is drawn, whatever the gap. None: the request
            does not truncate, or one answer had ended.
    """

    index: int
    without: int | None
    with_drafts: int | None
    gap: float | None
    cut: float | None = None

    @property
    def rounding(self) -> float | None:
        """By how much logits must be rounded to make this difference; None: one answer had ended."""
        if self.gap is None:
            return None
        return abs(self.gap) if self.cut is None else min(abs(self.gap), self.cut)


class Comparison:
    """Compares answers.

    Args:
        make_reference: loads the model, as transformers computes it in float32; called only if some answers differ.
        grammars: of that model; None: no answer has a grammar.
    """

    def __init__(self, make_reference: Callable[[], Any], grammars: GrammarCompiler | None = None) -> None:
        self._make_reference = make_reference
        self._grammars = grammars
        self._reference: Any = None

    def differences(self, without: Sequence[Answered], with_drafts: Sequence[Answered]) -> Iterator[Difference]:
        """Yield the first difference of each pair of answers, if there is one.

        Args:
            without: the answers without drafts, with the parameters that they were drawn by.
            with_drafts: those with drafts. A pair whose prompts differ, because they continue an answer that had differed,
                is not compared.
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
        row = SamplingRow(params, params.seed or 0, sample, index)
        logits = self._logits(prompt, params, expected[:index])
        if params.greedy:
            return Difference(index, *pair, float(logits[pair[0]] - logits[pair[1]]))
        gap = _race(logits, row, pair)
        return Difference(index, *pair, gap, _cut(logits, row, pair[gap < 0]) if row.truncates else None)

    @torch.inference_mode()
    def _logits(self, prompt: list[int], params: SamplingParams, before: list[int]) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the next token, as parameters and grammar change them."""
        if self._reference is None:
            self._reference = self._make_reference()
        logits: torch.Tensor = self._reference(input_ids=torch.tensor([[*prompt, *before]])).logits[0, -1].float()
        if params.structured_outputs is not None:
            assert self._grammars is not None
            grammar = self._grammars.compile(params.structured_outputs)
            for token_id in before:
                grammar.advance(token_id)
            apply_grammar_bitmask(logits.unsqueeze(0), {0: grammar})
        state = SamplingState(params, 0, 0, prompt, LogitChanges(params), before)
        return changed_logits(logits.unsqueeze(0), [state], [()])[0]


def _race(logits: torch.Tensor, row: SamplingRow, pair: tuple[int, int]) -> float:
    """The margin by which the first token beats the second, as `radixkv.sampling.exponential` draws."""
    scaled = logits / row.params.temperature
    blocks = [token_id // BLOCK_IDS for token_id in pair]
    if row.truncates or blocks[0] == blocks[1]:
        candidates, scores = torch.tensor(pair), scaled[list(pair)]
    else:
        candidates = -2 - torch.tensor(blocks)
        scores = torch.stack([scaled[block * BLOCK_IDS : (block + 1) * BLOCK_IDS].logsumexp(0) for block in blocks])
    variates = exponential_variates(rng_states([row], torch.device("cpu")), candidates)
    first, second = (scores.double() - variates.double().log()).flatten().tolist()
    return float(first - second)


def _cut(logits: torch.Tensor, row: SamplingRow, token_id: int) -> float:
    """How far a token's scaled logit must move against others to be removed instead of kept, or the other way round.

    It moves alone against all others, or together with the less likely tokens against the likelier ones, whose sum decides
    top_p; the smaller distance counts.
    """
    scaled = logits / row.params.temperature
    row = row._replace(params=replace(row.params, temperature=1.0))
    was_left = bool(tokens_left(scaled, row)[token_id])
    up = torch.zeros(len(scaled), dtype=torch.bool)
    up[token_id] = True
    directions = [each.float() * (-1.0 if was_left else 1.0) for each in (up, up | (scaled < scaled[token_id]))]

    def changes(distance: float) -> bool:
        return any(tokens_left(scaled + distance * each, row)[token_id] != was_left for each in directions)

    low, high = _SMALLEST_CUT, _LARGEST_CUT
    if not changes(high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if changes(middle) else (middle, high)
    return high
