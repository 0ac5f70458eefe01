"""Bad words, allowed tokens and biases in whole answers; and how often their tensors are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.chat_templates import make_tokenizer
from support.model_zoo import SUPPORTED, build
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv import LLM, SamplingParams
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.sampler import SamplingState, changed_logits
from radixkv.scheduling import request


def answer(llm: LLM, **options: Any) -> str:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, **options})
    return llm.generate("One, two, three,", params, use_tqdm=False)[0].outputs[0].text


def test_bad_words_are_not_generated(default_llm: LLM) -> None:
    plain = answer(default_llm)
    assert plain.startswith(" four, five")
    for word in ("five", "four, five"):
        text = answer(default_llm, bad_words=[word])
        assert word.strip() not in text
        assert text.startswith(" four" if word != "four, five" else " four,")


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    allowed = llm.get_tokenizer()(" red blue", add_special_tokens=False)["input_ids"]
    params = SamplingParams(temperature=1.5, max_tokens=20, n=2, allowed_token_ids=allowed, ignore_eos=True)
    (output,) = llm.generate("My favourite colour is", params, use_tqdm=False)
    for sample in output.outputs:
        assert set(sample.token_ids) <= set(allowed)


def test_tensors_are_made_once_a_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``logit_bias`` and of what ``min_tokens`` forbids used to be made at every step of every sample."""
    made = []

    class Noting(request.LogitChanges):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    sizes: list[int] = []
    make_tensor = torch.tensor

    def noting_tensor(data: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        tensor = make_tensor(data, *arguments, **options)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(request, "LogitChanges", Noting)
    monkeypatch.setattr(torch, "tensor", noting_tensor)
    biases = dict.fromkeys(range(1000), 1.0)
    params = SamplingParams(
        n=3, max_tokens=4, min_tokens=4, ignore_eos=True, logit_bias=biases, stop_token_ids=list(range(900))
    )
    llm.generate("One", params, use_tqdm=False)
    assert len(made) == 1
    assert sizes.count(1000) == 2  # ids and biases
    assert sizes.count(900) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias: expected at most 1,024 entries, got 1,025"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids: expected at most 1,024 entries, got 1,025"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids: expected at most 1,024"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: expected at least 0, got -1"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids: expected a whole number"),
        ({"bad_words": "word"}, "bad_words: expected a list"),
        ({"bad_words": ["x"] * 257}, "bad_words: expected at most 256"),
        ({"bad_words": [" "]}, "bad_words: expected strings of 1 to 200"),
        ({"bad_words": ["x" * 201]}, "bad_words: expected strings of 1 to 200"),
        ({"bad_words": [5]}, "bad_words: expected strings of 1 to 200"),
    ],
)
def test_too_many_and_impossible_ones_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**options)


def test_token_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="allowed_token_ids: 49152 is outside the vocabulary"):
        answer(llm, allowed_token_ids=[49152])


def test_tokens_that_only_the_tokenizer_knows_are_never_generated() -> None:
    """Their logits used to be looked for, and every request of the step failed."""
    tokenizer = make_tokenizer("")
    model = build("llama", {**SUPPORTED["llama"], "vocab_size": 258})
    model.generation_config.eos_token_id = [2, 258]
    llm = LLM(model, tokenizer=tokenizer, num_blocks=10)
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=3, bad_words=["<think>"])
    assert tokenizer.convert_tokens_to_ids("<think>") > 258
    (output,) = llm.generate({"prompt_token_ids": [5, 6]}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) in (3, 4)


def test_tokens_beyond_a_narrower_output_head_change_no_logit() -> None:
    """A prompt's ids beyond the head used to penalize tokens of the next row, and those of parameters failed the step."""
    options = [
        {"repetition_penalty": 2.0, "presence_penalty": 0.5},
        {"allowed_token_ids": [1, 11], "logit_bias": {1: 2.0, 11: 9.0}},
        {"min_tokens": 3},
        {"min_tokens": 3, "allowed_token_ids": [1, 2, 11]},
    ]
    states = []
    for each in options:
        params = SamplingParams(**each)
        changes = LogitChanges(params, forbidden_token_ids=[2, 10], bad_words=[[12], [4, 13]])
        states.append(SamplingState(params, 0, 0, [3, 10, 11], changes, [4]))
    logits = changed_logits(torch.ones(4, 10), states, [()] * 4)
    expected = torch.ones(4, 10)
    expected[0, [3, 4]] = torch.tensor([0.5, 0.0])
    expected[1] = float("-inf")
    expected[1, 1] = 3.0
    expected[2, 2] = float("-inf")
    expected[3] = float("-inf")
    expected[3, 1] = 1.0
    assert torch.equal(logits, expected)


def test_what_needs_logits_beyond_a_narrower_output_head_is_refused() -> None:
    """Token 0 used to be drawn where no allowed token has a logit, and a prompt's log-probabilities failed their step."""
    model = build("llama", SUPPORTED["llama"])
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 100, bias=False)
    llm = LLM(model, tokenizer=make_tokenizer(""), num_blocks=10)
    prompt = {"prompt_token_ids": [5, 120, 99]}
    with pytest.raises(ValueError, match=r"allowed_token_ids: expected one of the 100 tokens .* got \[100, 120\]"):
        llm.generate(prompt, SamplingParams(allowed_token_ids=[100, 120]), use_tqdm=False)
    with pytest.raises(
        ValueError, match=r"prompt_logprobs: the model has .* of 100 tokens, and the prompt has token 120"
    ):
        llm.generate(prompt, SamplingParams(prompt_logprobs=1), use_tqdm=False)
    # The first token of a prompt gets none.
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, allowed_token_ids=[7, 120])
    (output,) = llm.generate({"prompt_token_ids": [120, 99]}, params, use_tqdm=False)
    assert output.outputs[0].token_ids == [7]


def test_the_whole_vocabulary_s_log_probabilities_are_those_that_a_narrower_output_head_computes() -> None:
    """More were looked for than there are: the step failed, and with it all requests."""
    model = build("llama", SUPPORTED["llama"])
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 100, bias=False)
    llm = LLM(model, tokenizer=make_tokenizer(""), num_blocks=10)
    for count in (-1, 150):
        params = SamplingParams(max_tokens=2, logprobs=count, prompt_logprobs=count, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5, 7]}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        for entries in (output.prompt_logprobs[1], *output.outputs[0].logprobs):
            assert entries is not None
            assert sorted(entries) == list(range(100))


class _CountingOps(TorchDispatchMode):
    num_ops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return function(*args, **(kwargs or {}))


def test_a_batch_is_penalized_by_as_many_operations_as_one_row() -> None:
    """Each row took eight, which on a GPU are launches and uploads."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    counted = []
    for num_rows in (1, 2, 40):
        states = [
            SamplingState(params, 0, 0, [1, 2, row], LogitChanges(params), [row, 3, 3]) for row in range(num_rows)
        ]
        with _CountingOps() as counting:
            logits = changed_logits(torch.ones(num_rows, 50), states, [()] * num_rows)
        counted.append(counting.num_ops)
        for row in range(num_rows):
            times = {1: 0, 2: 0, 3: 2}
            times[row] = times.get(row, 0) + 1
            for token, count in times.items():
                expected = 1 / 1.5 - 0.5 * (count > 0) - 0.25 * count
                assert logits[row, token].item() == pytest.approx(expected, abs=1e-6)
            assert logits[row].ne(1).sum() == len(times)
    assert counted[0] == counted[1] == counted[2]
