"""The engine on a GPU as people run it: bfloat16 and heads of 128 in groups of 4, which take the wide tiles.

64 sequences form a tree of three levels. Their greedy answers are compared with transformers, which computes the same tokens
at once in float32: bfloat16 rounds, so our errors may be those of transformers in bfloat16, and little more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from radixkv import LLM, SamplingParams

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
POOL_BYTES = 2**30
VOCABULARY = 1000
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROOT, NODES, NODE, OWN, NEW = 600, 8, 300, (5, 90), 24
COUNT = 64
# Rounding is random: our largest and our mean error may be this many times theirs.
MARGIN, MEAN_MARGIN = 2.0, 1.5


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        initializer_range=0.03,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def make_prompts() -> list[list[int]]:
    """All share the root, each eight share a node; their own parts differ in length and cross block borders."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    root, nodes = tokens(ROOT), [tokens(NODE) for _ in range(NODES)]
    low, high = OWN
    return [root + nodes[i * NODES // COUNT] + tokens(low + i * (high - low) // COUNT) for i in range(COUNT)]


class Truth(NamedTuple):
    """Transformers' logits for some sequences.

    Attributes:
        exact: of each sequence, ``[tokens, vocabulary]`` in float32, predicting the token after each.
        rounded: the same in bfloat16.
        error: the largest difference between the two.
    """

    exact: list[torch.Tensor]
    rounded: list[torch.Tensor]
    error: float


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def judge(model: Any) -> Judge:
    return Judge(model)


class Judge:
    """Transformers' own attention in float32 and in bfloat16, sequence by sequence."""

    def __init__(self, model: Any) -> None:
        self._models = [copy.deepcopy(model).float().to(DEVICE), copy.deepcopy(model).to(DEVICE)]

    @torch.inference_mode()
    def truth(self, sequences: Sequence[Sequence[int]]) -> Truth:
        inputs = [torch.tensor([tokens], device=DEVICE) for tokens in sequences]
        exact, rounded = ([model(ids).logits[0].float() for ids in inputs] for model in self._models)
        return Truth(exact, rounded, max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True)))

    def check(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Each token's logit may be below the best one by at most the error of two logits."""
        truth = self.truth([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
        assert 0 < truth.error < 1  # the model is decisive enough for the bound to mean something
        for prompt, answer, logits in zip(prompts, answers, truth.exact, strict=True):
            assert len(answer) == NEW
            about = logits[len(prompt) - 1 : len(prompt) - 1 + NEW]
            chosen = about.gather(1, torch.tensor(answer, device=about.device).unsqueeze(1)).squeeze(1)
            assert float((about.amax(1) - chosen).max()) <= 2 * MARGIN * truth.error


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True, "async_scheduling": False, "enable_torch_compile": False},
        {"enforce_eager": False, "async_scheduling": False, "enable_torch_compile": False},
        {"enforce_eager": False, "async_scheduling": True, "enable_torch_compile": False},
        {"enforce_eager": False, "async_scheduling": True, "enable_torch_compile": False, "block_size": 64},
        {},
    ],
    ids=str,
)
def test_greedy_answers_are_as_good_as_transformers(model: Any, judge: Judge, options: dict[str, Any]) -> None:
    options = {"block_size": 16, "kv_cache_memory_bytes": POOL_BYTES, "max_num_seqs": COUNT, **options}
    llm = LLM(copy.deepcopy(model).to(DEVICE), **options)
    prompts = make_prompts()
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    for _ in range(2):  # the second time everything is cached, and decodes at once
        outputs = llm.generate(inputs, params, use_tqdm=False)
        judge.check(prompts, [output.outputs[0].token_ids for output in outputs])
        llm.engine.cache.check()
    assert all(output.num_cached_tokens == len(output.prompt_token_ids) - 1 for output in outputs)


@pytest.mark.parametrize("eager", [True, False])
def test_log_probabilities_are_as_good_as_transformers(model: Any, judge: Judge, eager: bool) -> None:
    """They cover every token of the prompts, computed in chunks over shared prefixes, and of the answers."""
    llm = LLM(
        copy.deepcopy(model).to(DEVICE),
        kv_cache_memory_bytes=POOL_BYTES,
        max_num_seqs=COUNT,
        max_num_batched_tokens=1000,
        enforce_eager=eager,
        enable_torch_compile=False,
    )
    prompts = make_prompts()
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in outputs]
    judge.check(prompts, answers)
    truth = judge.truth([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    ours, theirs = [], []
    for prompt, output, exact, rounded in zip(prompts, outputs, truth.exact, truth.rounded, strict=True):
        answer = output.outputs[0]
        described = [*output.prompt_logprobs[1:], *answer.logprobs]
        tokens = [*prompt[1:], *answer.token_ids]
        given = torch.tensor([entry[token].logprob for entry, token in zip(described, tokens, strict=True)])
        expected = logprobs_of(exact, tokens)
        ours.append((given - expected).abs())
        theirs.append((logprobs_of(rounded, tokens) - expected).abs())
    assert float(torch.cat(ours).mean()) <= MEAN_MARGIN * float(torch.cat(theirs).mean())
    assert float(torch.cat(ours).max()) <= MARGIN * float(torch.cat(theirs).max())


def logprobs_of(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Each token's log-probability by the logits that predict it, on the host."""
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    return logits[: len(tokens)].log_softmax(-1).gather(1, chosen).squeeze(1).cpu()
