"""Beam search against an exhaustive search, and its options."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from radixkv.sampling.beam_search import BeamSearch
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling_params import BeamSearchParams


class DigitTokenizer:
    """Token 1 is the text "1", and so on; notes how many tokens are decoded."""

    num_decoded = 0
    unk_token_id = None

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[None]:
        return [None] * len(tokens)

    def get_vocab(self) -> dict[str, int]:
        return {str(token_id): token_id for token_id in range(10)}

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        return "".join(map(str, token_ids))


def run(search: BeamSearch, model: torch.Tensor) -> BeamSearch:
    """Search over a Markov model: ``model[last token]`` gives the next token's logits; token 0 precedes the first."""
    last = [0]
    while last:
        last = [continuation.token_id for continuation in search.advance(model[last])]
    return search


def test_a_beam_as_wide_as_all_continuations_finds_the_best_of_all() -> None:
    torch.manual_seed(3)
    vocab_size, length = 4, 3
    model = torch.randn(vocab_size, vocab_size)
    logprobs = model.log_softmax(-1)
    params = BeamSearchParams(beam_width=vocab_size**length, max_tokens=length, ignore_eos=True)
    search = run(BeamSearch(params, length, frozenset()), model)
    every = {
        path: sum(float(logprobs[a, b]) for a, b in itertools.pairwise((0, *path)))
        for path in itertools.product(range(vocab_size), repeat=length)
    }
    best = sorted(every, key=lambda path: -every[path])
    found = search.results()
    assert [tuple(beam.token_ids) for beam in found[:10]] == best[:10]
    assert found[0].history[-1].score == pytest.approx(every[best[0]], abs=1e-5)


def plain_search(
    logprobs: list[list[list[float]]], params: BeamSearchParams, length: int, ends: frozenset[int]
) -> list[tuple[tuple[int, ...], float]]:
    """The tokens and penalized scores of a search that sorts all continuations in each step.

    Args:
        logprobs: by step, last token and next token.
    """
    width, penalty = params.beam_width, params.length_penalty
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for step in range(1, length + 1):
        every = [
            ((*path, token), score + logprob)
            for path, score in running
            for token, logprob in enumerate(logprobs[step - 1][path[-1] if path else 0])
            if logprob > -math.inf
        ]
        every.sort(key=lambda beam: -beam[1])
        running = []
        for rank, (path, score) in enumerate(every[: max(2, 1 + len(ends)) * width]):
            if path[-1] not in ends and step < length:
                running.append((path, score))
            elif rank < width:
                finished.append((path, score / step**penalty))
        running = running[:width]
        finished = sorted(finished, key=lambda beam: -beam[1])[:width]
        if not running or (len(finished) == width and running[0][1] / step**penalty <= finished[-1][1]):
            break
    return finished


def test_the_beams_are_those_of_a_search_that_sorts_all_continuations() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        vocab_size, width, length = draw.randint(2, 7), draw.randint(1, 4), draw.randint(1, 8)
        ends = frozenset(range(draw.randint(0, 3)))
        num_logprobs = draw.choice([None, 0, 2, 9])
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=length,
            length_penalty=draw.choice([-1.0, 0.0, 1.0, 4.0]),
            logprobs=num_logprobs,
            temperature=0.5,
        )
        generator = torch.Generator().manual_seed(seed)
        # Of another matrix in each step, no two paths have equal scores.
        model = torch.randn(length, vocab_size, vocab_size, generator=generator)
        model[..., : len(ends)] += draw.choice([0.0, 1.0])
        ruled_out = torch.rand(model.shape, generator=generator) < 0.2
        ruled_out[..., -1] = False
        model[ruled_out] = -math.inf
        search, last = BeamSearch(params, length, ends), [0]
        for logits in model:
            last = [continuation.token_id for continuation in search.advance(logits[last])]
            if not last:
                break
        assert not last
        found = search.results()
        expected = plain_search((model.double() / 0.5).log_softmax(-1).tolist(), params, length, ends)
        assert [tuple(beam.token_ids) for beam in found] == [tokens for tokens, _ in expected], seed
        assert [beam.penalized_score for beam in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        for beam in found:
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] in ends else "length")
            for excluded, before, step in zip(ruled_out, [0, *beam.token_ids], beam.history, strict=False):
                num_possible = int((~excluded[before]).sum())
                assert len(step.top_logprobs) == min(num_logprobs or 0, num_possible)


def test_the_length_penalty_prefers_long_or_short_beams() -> None:
    # Token 1 ends a beam; continuing costs little per token but never ends by itself.
    model = torch.tensor([[-9.0, 0.5, 0.0], [0.0, 0.0, 0.0], [-9.0, 0.5, 0.4]])
    lengths = {}
    for penalty in (0.0, 3.0):
        params = BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=penalty)
        search = run(BeamSearch(params, 6, frozenset({1})), model)
        lengths[penalty] = len(search.results()[0].history)
    assert lengths[0.0] < lengths[3.0]


def test_a_stop_string_ends_a_beam_and_is_named() -> None:
    model = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0], [1.0, 0.0, 2.0]])
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True, stop=["12"])
    text = IncrementalDetokenizer(DigitTokenizer(), stop=["12"])
    search = run(BeamSearch(params, 5, frozenset(), text), model)
    stopped = [beam for beam in search.results() if beam.stop_reason == "12"]
    assert stopped
    for beam in stopped:
        assert beam.token_ids[-2:] == [1, 2]
        assert "12" not in "".join(map(str, beam.token_ids[:-1]))


def test_stop_strings_cost_as_much_at_every_step() -> None:
    """The whole text of every candidate used to be decoded in every step."""
    torch.manual_seed(1)
    tokenizer = DigitTokenizer()
    params = BeamSearchParams(beam_width=2, max_tokens=300, ignore_eos=True, stop=["x"])
    text = IncrementalDetokenizer(tokenizer, stop=["x"])
    run(BeamSearch(params, 300, frozenset(), text), torch.randn(6, 6))
    assert tokenizer.num_decoded < 300 * 4 * 40


def test_logprobs_name_the_best_continuations_and_the_chosen_ones_rank() -> None:
    torch.manual_seed(0)
    model = torch.randn(6, 6)
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True, logprobs=2)
    for beam in run(BeamSearch(params, 4, frozenset()), model).results():
        for last, step in zip([0, *beam.token_ids], beam.history, strict=False):
            row = model[last].log_softmax(-1)
            assert step.logprob == pytest.approx(float(row[step.token_id]), abs=1e-5)
            assert step.rank == int((row > row[step.token_id]).sum()) + 1
            assert [token for token, _, _ in step.top_logprobs] == row.topk(2).indices.tolist()


def test_more_logprobs_are_reported_than_the_search_itself_looks_at() -> None:
    torch.manual_seed(0)
    model = torch.randn(8, 8)
    params = BeamSearchParams(beam_width=1, max_tokens=3, ignore_eos=True, logprobs=6)
    (beam,) = run(BeamSearch(params, 3, frozenset()), model).results()
    for last, step in zip([0, *beam.token_ids], beam.history, strict=False):
        assert [token for token, _, _ in step.top_logprobs] == model[last].topk(6).indices.tolist()
        assert [rank for _, _, rank in step.top_logprobs] == [1, 2, 3, 4, 5, 6]


def test_a_model_that_gives_no_numbers_is_answered() -> None:
    """The search ended without an answer, as no other request does."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    search = run(BeamSearch(params, 3, frozenset()), torch.full((4, 4), math.nan))
    assert [len(beam.token_ids) for beam in search.results()] == [3, 3]
