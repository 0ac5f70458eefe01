"""One engine in a process of its own, which runs workloads by name on request: ours, or a peer in its own environment.

Run as ``python engine_process.py ENGINE KIND MODEL OPTIONS``, options as JSON. It imports nothing of RadixKV unless that is
the engine, so any environment can run it. It prints a line of JSON when the engine has answered once: the seconds from the
start until it was ``loaded`` and until it had run the first workload, ``ready``, and its ``version``. Then it reads a
workload's name per line, and answers each with a line of JSON: the seconds that it took. vLLM has the same offline API as
RadixKV, down to its arguments; for llama.cpp, `LlamaCpp` gives its server that form.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

# vLLM picks its memory and processes by these.
VLLM_ENVIRONMENT = MappingProxyType(
    {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
)


class Workloads:
    """Rows of a comparison. Prompts are random tokens: of the same lengths, and new in every round.

    Args:
        api: the engine's package: `LLM`, `SamplingParams` and `BeamSearchParams`.
        llm: the engine.

    Attributes:
        MAX_NUM_SEQS: the ``max_num_seqs`` that the engine must have.
        TOKENS: the ids that prompts are made of.
        FIRST: the workload that is run once before anything is measured.
    """

    MAX_NUM_SEQS = 64
    TOKENS = range(100, 40_000)
    FIRST: str

    def __init__(self, api: Any, llm: Any) -> None:
        self._api = api
        self._llm = llm
        self._random = random.Random(0)

    def names(self) -> dict[str, Callable[[], float]]:
        """What can be run; each returns seconds."""
        raise NotImplementedError

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(self.TOKENS, k=count)

    def _seconds(self, prompts: list[list[int]], max_tokens: int, reset: bool = False, **sampling: Any) -> float:
        if reset:
            self._llm.reset_prefix_cache()
        start = time.perf_counter()
        self._generate(prompts, max_tokens, **sampling)
        return time.perf_counter() - start

    def _generate(self, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> list[Any]:
        params = self._api.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **({"temperature": 0.0} | sampling))
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(inputs, params, use_tqdm=False)
        return outputs


class EndToEnd(Workloads):
    """What users wait for, on a real model."""

    FIRST = "one stream, 128 tokens"

    def __init__(self, api: Any, llm: Any) -> None:
        super().__init__(api, llm)
        self._system = self._tokens(1000)

    def names(self) -> dict[str, Callable[[], float]]:
        """What can be run; each returns seconds."""
        rows = {
            "16 chats, one system prompt, cold": self.chats_cold,
            "the same, warm": self.chats_warm,
            "first token of 1,000, cold": lambda: self._seconds([self._tokens(1000)], 1, reset=True),
            "first token, system prompt cached": self.first_token_warm,
            "16 unrelated prompts of 240": lambda: self._seconds([self._tokens(240) for _ in range(16)], 64, reset=True),
            self.FIRST: lambda: self._seconds([self._tokens(8)], 128),
            "6 conversations of 4 turns": self.conversations,
            "n = 8 samples": lambda: self._seconds([self._tokens(1000)], 64, reset=True, n=8, temperature=0.8, top_p=0.95),
        }  # fmt: skip
        return rows | ({"beam 4, 48 tokens": self.beams} if hasattr(self._api, "BeamSearchParams") else {})

    def chats_cold(self) -> float:
        self._system = self._tokens(1000)
        return self._seconds([self._system + self._tokens(20) for _ in range(16)], 64, reset=True)

    def chats_warm(self) -> float:
        self._generate([self._system + self._tokens(20)], 1)
        return self._seconds([self._system + self._tokens(20) for _ in range(16)], 64)

    def first_token_warm(self) -> float:
        self._generate([self._system + self._tokens(20)], 1)
        return self._seconds([self._system + self._tokens(20)], 1)

    def conversations(self) -> float:
        self._llm.reset_prefix_cache()
        start = time.perf_counter()
        histories = [self._tokens(60) for _ in range(6)]
        for _ in range(4):
            outputs = self._generate(histories, 48)
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            histories = [h + a + self._tokens(30) for h, a in zip(histories, answers, strict=True)]
        return time.perf_counter() - start

    def beams(self) -> float:
        self._llm.reset_prefix_cache()
        prompt = {"prompt_token_ids": self._tokens(100)}
        start = time.perf_counter()
        self._llm.beam_search([prompt], self._api.BeamSearchParams(beam_width=4, max_tokens=48, ignore_eos=True))
        return time.perf_counter() - start


class Requests(Workloads):
    """Requests for more than a greedy answer, and requests of other shapes, on a real model."""

    MAX_NUM_SEQS = 128
    FIRST = "16 prompts of 100, greedy"
    PENALTIES: ClassVar[dict[str, Any]] = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    }
    # Longer than any answer, so that every engine generates as many tokens.
    SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "array", "minItems": 100, "items": {
            "type": "object", "additionalProperties": False, "required": ["name", "age"],
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        },
    }  # fmt: skip

    def names(self) -> dict[str, Callable[[], float]]:
        top_p: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
        schema = self._api.StructuredOutputsParams(json=json.dumps(self.SCHEMA))
        lengths = range(50, 1600, 100)
        return {
            self.FIRST: lambda: self._answers(16),
            "the same, top-p": lambda: self._answers(16, **top_p),
            "the same, penalties": lambda: self._answers(16, **self.PENALTIES),
            "the same, 5 log-probabilities": lambda: self._answers(16, logprobs=5),
            "the same, by a JSON schema": lambda: self._answers(16, structured_outputs=schema),
            "64 prompts of 100, greedy": lambda: self._answers(64),
            "64 prompts of 100, top-p": lambda: self._answers(64, **top_p),
            "128 prompts of 100, 8 new": lambda: self._answers(128, max_tokens=8),
            "16 prompts of 50 to 1,550": lambda: self._seconds([self._tokens(length) for length in lengths], 64),
            "512 tokens, their log-probabilities": lambda: self._seconds([self._tokens(512)], 1, prompt_logprobs=5),
            "first token of 4,000, cold": lambda: self._seconds([self._tokens(4000)], 1),
        }

    def _answers(self, count: int, max_tokens: int = 64, **sampling: Any) -> float:
        return self._seconds([self._tokens(100) for _ in range(count)], max_tokens, **sampling)


class Steps(Workloads):
    """What a decoding step takes, where the model takes next to nothing: seconds of one step, the mean of 64."""

    MAX_NUM_SEQS = 256
    TOKENS = range(1, 500)
    FIRST = "1 sequence, greedy"
    SAMPLING: ClassVar[dict[str, dict[str, float]]] = {"greedy": {}, "top-p": {"temperature": 0.8, "top_p": 0.95}}
    _NUM_STEPS = 64

    def names(self) -> dict[str, Callable[[], float]]:
        return {
            f"{count} {'sequences' if count > 1 else 'sequence'}, {how}": partial(self._step, count, **sampling)
            for how, sampling in self.SAMPLING.items()
            for count in (1, 64, 256)
        }

    def _step(self, count: int, **sampling: Any) -> float:
        prompts = [[self._tokens(4) for _ in range(count)] for _ in range(2)]
        begun = self._seconds(prompts[0], 2, **sampling)
        return (self._seconds(prompts[1], 2 + self._NUM_STEPS, **sampling) - begun) / self._NUM_STEPS


class LlamaCpp:
    """llama.cpp's server, in this process, with as much of the others' API as the workloads use.

    Args:
        model: a GGUF file.
        max_num_seqs: as for the others, but 16 at most: llama.cpp reserves memory per sequence, and workloads need no more.
    """

    _NUM_SLOTS = 16

    def __init__(self, model: str, max_num_seqs: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = min(max_num_seqs, self._NUM_SLOTS)
        params.n_ctx = params.n_parallel * 2048
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
        self._server = xllamacpp.Server(params)
        self._threads = ThreadPoolExecutor(params.n_parallel)

    def generate(self, inputs: list[dict[str, list[int]]], params: dict[str, Any], use_tqdm: bool) -> list[Any]:
        def complete(prompt: dict[str, list[int]]) -> Any:
            # Verbose answers include the answer's tokens.
            request = {"prompt": prompt["prompt_token_ids"], "verbose": True, "return_tokens": True, **params}
            answer = self._server.handle_completions(request)
            if len(answer["choices"]) != params.get("n", 1):
                raise RuntimeError(f"llama.cpp: {answer}")
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer.get("__verbose", {}).get("tokens"))])

        return [*self._threads.map(complete, inputs)]

    def reset_prefix_cache(self) -> None:
        """llama.cpp has no such call; what should be cold is a new prompt in any case."""


KINDS: Mapping[str, type[Workloads]] = MappingProxyType({
    "end-to-end": EndToEnd, "requests": Requests, "experts": EndToEnd, "steps": Steps,
})  # fmt: skip


def use_one_core() -> None:
    """Run on one core; called before torch is imported, because it asks how many cores there are."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)})


def main(engine: str, kind: str, model: str, options: str) -> None:
    start = time.perf_counter()
    if kind == "steps":
        use_one_core()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that what the engine prints is not taken for a reply
    if engine == "vllm":
        os.environ.update(VLLM_ENVIRONMENT)
        import vllm as api
        from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

        api.BeamSearchParams, api.StructuredOutputsParams = BeamSearchParams, StructuredOutputsParams
    elif engine == "llama.cpp":
        api = SimpleNamespace(LLM=LlamaCpp, SamplingParams=dict, __version__=version("xllamacpp"))
    else:
        import radixkv as api
    workloads = KINDS[kind]
    llm = api.LLM(model, max_num_seqs=workloads.MAX_NUM_SEQS, **json.loads(options))
    loaded = time.perf_counter() - start
    rows = workloads(api, llm).names()
    rows[workloads.FIRST]()
    started = {"loaded": loaded, "ready": time.perf_counter() - start, "version": api.__version__}
    print(json.dumps(started), file=replies)
    for line in sys.stdin:
        print(json.dumps(rows[line.strip()]()), file=replies)


if __name__ == "__main__":
    main(*sys.argv[1:])
