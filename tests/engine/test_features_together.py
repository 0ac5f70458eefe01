"""Features that meet: each answer is what the request gets alone from an engine that has none of the features.

A scenario is drawn from its number: an engine, mostly with too few blocks for all that runs, and tiers, drafts, steps
launched ahead and whatever else it draws; then streams that advance in turns, are cut off and resumed, while beams are
searched and the cache is cleared or evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.chat_templates import make_tokenizer
from support.model_zoo import RECURRENT, SUPPORTED, build
from support.tiered_llm import evict_all

from radixkv import LLM, BeamSearchParams, CompletionOutput, SamplingParams, StructuredOutputsParams

TOKENIZER = make_tokenizer("", with_markers=False)
VOCAB_SIZE = len(TOKENIZER)
NAMES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_next")
NUM_SCENARIOS = 18
GRAMMARS = (
    {"regex": "[a-z]{3,9}"},
    {"choice": ["red apple", "red", "blue"]},
    {"json": {"enum": [["a", 1], {"b": None}]}},
)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=4, logprobs=6)


def make(name: str, **options: Any) -> LLM:
    model = build(name, {**SUPPORTED, **RECURRENT}[name] | {"vocab_size": VOCAB_SIZE})
    if name in RECURRENT:
        options = {**options, "async_scheduling": False, "speculative_config": None}
    return LLM(model, tokenizer=TOKENIZER, **options)


@cache
def plain(name: str) -> LLM:
    return make(name, num_blocks=100, enable_prefix_caching=False, async_scheduling=False)


def drawn_options(draw: Random, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        "block_size": draw.choice([1, 2, 3, 4, 16]),
        "max_num_batched_tokens": draw.choice([4, 7, 16, 64]),
        "max_num_seqs": draw.choice([4, 8]),
        "async_scheduling": draw.random() < 0.5,
        "eviction_policy": draw.choice(["lru", "lfu", "segmented-lru", "cost-aware"]),
        "cache_write_policy": draw.choice(["write-through-selective", "write-through", "write-back"]),
    }
    options["num_blocks"] = -(-draw.choice([66, 75]) // options["block_size"])
    if draw.random() < 0.6:
        options["speculative_config"] = {"num_speculative_tokens": draw.choice([1, 4, 16])}
    if draw.random() < 0.5:
        options["host_cache_size"] = "256KiB"
    if draw.random() < 0.5:
        options["disk_cache"] = folder
    if not {"host_cache_size", "disk_cache"} & options.keys():
        del options["cache_write_policy"]
    return options


def drawn_params(draw: Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": draw.choice([4, 24, 32])}
    if draw.random() < 0.5:
        options["temperature"] = 0.0
    else:
        options |= {"seed": draw.randrange(100), "n": draw.choice([1, 1, 2, 3]), "top_p": draw.choice([0.8, 1.0])}
    some = {
        "logprobs": 2,
        "prompt_logprobs": 1,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "min_tokens": 3,
        "stop": [*"aeiou"],
        "stop_token_ids": [*range(40, 60)],
        "logit_bias": {draw.randrange(VOCAB_SIZE): 6.0},
        "structured_outputs": StructuredOutputsParams(**draw.choice(GRAMMARS)),
    }
    return SamplingParams(**options, **{name: value for name, value in some.items() if draw.random() < 0.15})


@dataclass
class Answer:
    """A request, its stream, and its output so far."""

    llm: LLM
    prompt: dict[str, Any]
    params: SamplingParams
    stream: Any = field(init=False)
    samples: dict[int, CompletionOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = self.llm.stream(self.prompt, self.params)

    def advance(self) -> bool:
        """Take the next piece; returns False if there is none."""
        piece = next(self.stream, None)
        for new in () if piece is None else piece.outputs:
            self.samples.setdefault(new.index, CompletionOutput(new.index, "", [], logprobs=[])).extend(new)
        return piece is not None

    def resume(self) -> None:
        """Cut the stream off, and resume it from its output so far."""
        self.stream.close()
        if len(self.samples) == self.params.n:
            self.stream = self.llm.stream({**self.prompt, "resume": list(self.samples.values())}, self.params)
        else:
            self.stream = self.llm.stream(self.prompt, self.params)

    def check(self, name: str) -> None:
        prompt = {"prompt_token_ids": self.prompt["prompt_token_ids"]}
        (expected,) = plain(name).generate(prompt, self.params, use_tqdm=False)
        for whole in expected.outputs:
            part = self.samples[whole.index]
            assert part.token_ids == whole.token_ids
            assert (part.text, part.finish_reason, part.stop_reason) == (
                whole.text, whole.finish_reason, whole.stop_reason,
            )  # fmt: skip
            if whole.logprobs is not None:
                for ours, theirs, token_id in zip(part.logprobs or [], whole.logprobs, whole.token_ids, strict=True):
                    assert ours[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=1e-3)


def search_beams(llm: LLM, name: str, prompt: list[int]) -> None:
    ours, theirs = (
        [(beam.tokens, [list(step) for step in beam.logprobs]) for beam in output.sequences]
        for engine in (llm, plain(name))
        for output in engine.beam_search({"prompt_token_ids": prompt}, BEAMS)
    )
    assert ours == theirs


@pytest.mark.parametrize("number", range(NUM_SCENARIOS))
def test_answers_are_those_of_the_request_alone(number: int, tmp_path: Path) -> None:
    draw = Random(number)
    name = NAMES[number % len(NAMES)]
    options = drawn_options(draw, tmp_path)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([8, 25]))] for _ in range(2)]
    for _ in range(2):  # the second engine finds what the first one left on disk
        with make(name, **options) as llm:
            answers = []
            for _ in range(5):
                tokens = draw.choice(prompts)[:26] + [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([0, 1, 6]))]
                prompts.append(tokens)
                prompt = {"prompt_token_ids": tokens, "prediction": draw.choice(["", "red apple"])}
                answers.append(Answer(llm, prompt, drawn_params(draw)))
            unfinished = list(answers)
            while unfinished:
                answer = draw.choice(unfinished)
                chance = draw.random()
                if chance < 0.04:
                    answer.resume()
                elif chance < 0.06:
                    llm.reset_prefix_cache()
                elif chance < 0.08:
                    search_beams(llm, name, answer.prompt["prompt_token_ids"])
                elif chance < 0.1 and llm.engine.tiers is not None:
                    evict_all(llm)  # so that others load what tiers have
                elif not answer.advance():
                    unfinished.remove(answer)
                llm.engine.cache.check()
            assert not llm.engine.has_unfinished_requests
            for answer in answers:
                answer.check(name)
            cached = llm.engine.cache
            assert cached.num_free_blocks + cached.num_evictable_blocks == cached.num_blocks
