"""Beam search against an exhaustive search, and its options."""

from __future__ import annotations

import itertools
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
