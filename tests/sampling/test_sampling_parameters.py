"""Every sampling parameter beside every other, in batches of different rows, against what they mean in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.chat_templates import text_interface

from radixkv import SamplingParams, StructuredOutputsParams
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.logprobs import SampledToken
from radixkv.sampling.sampler import SamplingState, changed_logits, sample
from radixkv.sampling.variates import SamplingRow, exponential_variates, rng_states

Floats = NDArray[np.float64]
FORBIDDEN = [4, 6, 1000]
BAD_WORDS: list[list[list[int]]] = [[], [[3], [5, 1]], [[2, 5, 11], [7, 5, 40], [5, 3], [2, 5, 11, 7], [900]]]
IN_GRAMMAR = "abcdef"


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(text_interface(""))


def masked(logits: Floats, token_ids: list[int]) -> Floats:
    """Without these tokens, unless nothing would be left."""
    without = logits.copy()
    without[[token for token in token_ids if token < len(logits)]] = -np.inf
    return logits if np.isneginf(without).all() else without


def changed(logits: Floats, state: SamplingState, bad_words: list[list[int]]) -> Floats:
    """The logits that a row is drawn from."""
    params, output, logits = state.params, state.output_token_ids, logits.copy()
    known = range(len(logits))
    if state.grammar is not None:
        allowed = text_interface("").tokenizer.convert_tokens_to_ids(list(IN_GRAMMAR))
        logits[[token for token in known if token not in allowed]] = -np.inf
    if params.allowed_token_ids is not None:
        logits[[token for token in known if token not in params.allowed_token_ids]] = -np.inf
    for token, bias in params.biases.items():
        if token in known:
            logits[token] += bias
    ended = [word[-1] for word in bad_words if [*output, word[-1]][-len(word) :] == word]
    logits = masked(logits, ended)
    if len(output) < params.min_tokens:
        logits = masked(logits, FORBIDDEN)
    for token in {*state.prompt_token_ids, *output} & {*known}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in {*output} & {*known}:
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return logits


def variates(row: SamplingRow, ids: NDArray[np.int64]) -> Floats:
    states = rng_states([row], torch.device("cpu"))
    return exponential_variates(states, torch.from_numpy(ids)[None])[0].double().numpy()


def winners(probs: Floats, row: SamplingRow, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these win the race, or are as good as the one that does."""
    ratios = probs / variates(row, ids)
    won: NDArray[np.bool_] = ratios >= ratios.max() * (1 - 1e-4)
    return won


def check_draw(logits: Floats, row: SamplingRow, token_id: int) -> None:
    """Whether a token may be drawn from logits that are changed already."""
    params, num_tokens = row.params, len(logits)
    if params.greedy:
        assert token_id == logits.argmax()
        return
    weights = np.exp((logits - logits.max()) / params.temperature)
    probs = weights / weights.sum()
    if not row.truncates:
        starts = np.arange(0, num_tokens, 256)
        blocks = winners(np.add.reduceat(probs, starts), row, -2 - np.arange(len(starts)))
        assert blocks[token_id // 256]
        ids = np.arange(token_id // 256 * 256, min(token_id // 256 * 256 + 256, num_tokens))
        assert winners(probs[ids], row, ids)[token_id % 256]
        return
    order = (-logits).argsort(kind="stable")
    ordered = probs[order]
    # Where a bound is this close, rounding decides.
    sure, possible = (ordered >= params.min_p * ordered[0] * (1 + sign * 1e-5) for sign in (1, -1))
    if params.top_k > 0:
        sure[params.top_k :] = possible[params.top_k :] = False
    likelier = np.concatenate([[0.0], ordered.cumsum()[:-1]])
    if params.top_p < 1:
        sure &= likelier < params.top_p * (ordered * sure).sum() - 1e-5
        possible &= likelier < params.top_p * (ordered * possible).sum() + 1e-5
    sure[0] = possible[0] = True
    assert token_id in order[possible]
    ratios = ordered / variates(row, order)
    assert ratios[order == token_id] >= ratios[sure].max() * (1 - 1e-4)


def check_logprobs(logits: Floats, count: int, token: SampledToken) -> None:
    """Log-probabilities are the model's own, from before all changes."""
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    ranks = 1 + (logits[:, None] < logits).sum(1)
    order = (-logits).argsort(kind="stable")[:count].tolist()
    found = [token_id for token_id, _, _ in token.top_logprobs]
    assert found == order + [token.token_id] * (token.token_id not in order)
    assert token.logprob == pytest.approx(logprobs[token.token_id], abs=1e-4)
    for place, (token_id, logprob, rank) in enumerate(token.top_logprobs, start=1):
        assert logprob == pytest.approx(logprobs[token_id], abs=1e-4)
        assert rank == (place if place <= count else ranks[token_id])


@st.composite
def parameters(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    ids = st.integers(0, vocab_size + 2)  # an output head may be narrower than the vocabulary
    allowed = st.lists(ids, max_size=6).map(lambda more: [min(3, vocab_size - 1), *more])
    presence, frequency, repetition = draw(
        st.sampled_from([(0, 0, 1), (1, 0.5, 1), (0, 0, 1.3), (-1, 0.3, 0.8), (2, -2, 1e-3)])
    )
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0, 50.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-30])),
        top_k=draw(st.sampled_from([0, -1, 1, 5, 60, 10**20])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 1.0])),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=draw(st.none() | st.dictionaries(ids, st.sampled_from([4.0, -100.0, 0.5, 1e9]), max_size=4)),
        min_tokens=draw(st.sampled_from([0, 3, 4])),
        max_tokens=None,
        allowed_token_ids=draw(st.none() | st.none() | allowed),
        logprobs=draw(st.sampled_from([None, 0, 1, 5, 300])),
    )


@settings(max_examples=150)
@given(
    data=st.data(),
    seed=st.integers(0, 2**64),
    vocab_size=st.sampled_from([1, 7, 16, 17, 80, 255, 257, 300, 700, 3001]),
    spacing=st.sampled_from([None, 0.5, 4.0]),
    num_rows=st.integers(1, 6),
)
def test_parameters_mean_the_same_in_every_combination(
    data: st.DataObject, seed: int, vocab_size: int, spacing: float | None, num_rows: int
) -> None:
    """Also where logits are equal, or minus infinity, and where each row of a batch asks for something else."""
    chance = np.random.default_rng(seed)
    raw = (chance.standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    if spacing is not None:
        raw = (raw / spacing).round() * np.float32(spacing)
    if data.draw(st.booleans()):
        raw[:, 1:][chance.random((num_rows, vocab_size - 1)) < 0.4] = -np.inf
    states, words = [], []
    for number in range(num_rows):
        params = data.draw(parameters(vocab_size))
        words.append(data.draw(st.sampled_from(BAD_WORDS)))
        options: dict[str, Any] = {"output_token_ids": data.draw(st.sampled_from([[], [2, 2, 5], [7, 5, 2, 5]]))}
        if vocab_size > 255 and params.allowed_token_ids is None and data.draw(st.booleans()):
            options["grammar"] = grammars().compile(StructuredOutputsParams(regex=f"[{IN_GRAMMAR}]{{9}}"))
        changes = LogitChanges(params, FORBIDDEN, words[-1])
        states.append(SamplingState(params, seed + number, number % 2, [0, 1, vocab_size + 1], changes, **options))
    logits = torch.from_numpy(raw)
    tokens = sample(logits, states)
    found = changed_logits(logits, states, [()] * num_rows).double().numpy()
    assert np.array_equal(raw, logits.numpy())
    for i, (state, token) in enumerate(zip(states, tokens, strict=True)):
        expected = changed(raw[i].astype(np.float64), state, words[i])
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-5)
        if not np.isneginf(expected).all():
            check_draw(found[i], state.row(), token.token_id)
        if state.params.logprobs is not None:
            check_logprobs(raw[i].astype(np.float64), min(state.params.logprobs, vocab_size), token)
        assert sample(logits[i : i + 1], [state])[0].token_id == token.token_id
