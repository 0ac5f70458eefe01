"""End to end against transformers' `generate`, on the same weights in the same run.

Both answer greedily to a fixed number of tokens, so they do the same work, and the tokens are compared. `generate` gets
each wave of prompts as one left-padded batch, its fastest use; rounds alternate between the two.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table, in_progress
from radixkv.bench.engine.workloads import Workload, make_workloads
from radixkv.llm import LLM
from radixkv.model.default_model import find_default_model
from radixkv.model.gguf.conversion import ensure_converted
from radixkv.sampling_params import BeamSearchParams, SamplingParams

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds per round, and how many answers are equal token by token."""

    name: str
    generate_s: list[float]
    radixkv_s: list[float]
    equal_answers: str

    @property
    def ratio(self) -> float:
        """Speed-up over `generate`, of medians."""
        return statistics.median(self.generate_s) / statistics.median(self.radixkv_s)


class TransformersBaseline:
    """transformers' `generate` with its own attention and cache."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(self, prompts: Tokens, workload: Workload) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options: dict[str, Any] = {"max_new_tokens": workload.new_tokens, "eos_token_id": None, "pad_token_id": 0}
        if workload.num_samples > 1:
            options |= {"do_sample": True, "num_return_sequences": workload.num_samples, "top_k": 0}
        else:
            options |= {"do_sample": False, "num_beams": workload.beam_width or 1}
        output: Tokens = self._model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
        return output


class Candidate:
    """RadixKV with the same model."""

    def __init__(self) -> None:
        self.llm = LLM(dtype="float32")

    def answer(self, prompts: Tokens, workload: Workload) -> Tokens:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        if workload.beam_width:
            params = BeamSearchParams(workload.beam_width, workload.new_tokens, ignore_eos=True)
            searches = self.llm.beam_search(inputs, params)
            return [s.sequences[0].tokens[len(prompt) :] for s, prompt in zip(searches, prompts, strict=True)]
        outputs = self.llm.generate(
            inputs,
            SamplingParams(
                n=workload.num_samples,
                temperature=0.0 if workload.num_samples == 1 else 1.0,
                max_tokens=workload.new_tokens,
                ignore_eos=True,
            ),
            use_tqdm=False,
        )
        return [sample.token_ids for output in outputs for sample in output.outputs]

    def prepare(self, workload: Workload) -> None:
        """Reset the cache, then cache what the workload expects to be cached."""
        self.llm.reset_prefix_cache()
        if workload.warm:
            run_workload(self.answer, workload)
        elif workload.warm_prefix:
            prefix = workload.waves[0][0][: workload.warm_prefix]
            self.llm.generate({"prompt_token_ids": prefix}, SamplingParams(max_tokens=1), use_tqdm=False)


def run_workload(answer: Callable[[Tokens, Workload], Tokens], workload: Workload) -> Tokens:
    """Answer all waves; returns every answer."""
    answers: Tokens = []
    conversations: Tokens = [[] for _ in workload.waves[0]]
    for wave in workload.waves:
        prompts = (
            [history + new for history, new in zip(conversations, wave, strict=True)] if workload.chained else wave
        )
        new_answers = answer(prompts, workload)
        if workload.chained:
            conversations = [prompt + reply for prompt, reply in zip(prompts, new_answers, strict=True)]
        answers += new_answers
    return answers


def run_e2e(console: Console, rounds: int, only: str | None, json_path: Path | None) -> None:
    """Measure, print a table, write JSON.

    Raises:
        ValueError: ``only`` names no workload.
    """
    folder = ensure_converted(find_default_model(), console.print)
    candidate = Candidate()
    workloads = [w for w in make_workloads(candidate.llm.get_tokenizer()) if only is None or only in w.name]
    if not workloads:
        raise ValueError(f"--only: no workload's name contains {only!r}")
    baseline = TransformersBaseline(folder)
    results = []
    warm_up = Workload("warm-up", [[list(range(100, 164))] * 2], 4)
    run_workload(baseline.answer, warm_up)
    run_workload(candidate.answer, warm_up)
    gc.collect()
    gc.freeze()
    for workload in in_progress(console, workloads, lambda workload: workload.name):
        seconds: dict[str, list[float]] = {"generate": [], "radixkv": []}
        for _ in range(rounds):
            expected, elapsed = _timed(baseline.answer, workload)
            seconds["generate"].append(elapsed)
            candidate.prepare(workload)
            answers, elapsed = _timed(candidate.answer, workload)
            seconds["radixkv"].append(elapsed)
        same = sum(a == b for a, b in zip(expected, answers, strict=True))
        equal = "sampled" if workload.num_samples > 1 else f"{same} of {len(answers)}"
        results.append(Result(workload.name, seconds["generate"], seconds["radixkv"], equal))
    if only is None:
        results.insert(0, _measure_startup(rounds, folder))
    machine = {**describe_machine("torch", "transformers"), "threads": torch.get_num_threads()}
    document = {"machine": machine, "rows": [{**asdict(r), "ratio": r.ratio} for r in results]}
    write_figures(json_path, document)
    console.print(_table(results, rounds))


def _timed(answer: Callable[[Tokens, Workload], Tokens], workload: Workload) -> tuple[Tokens, float]:
    start = time.perf_counter()
    answers = run_workload(answer, workload)
    return answers, time.perf_counter() - start


def _measure_startup(rounds: int, folder: Path) -> Result:
    """Seconds from the start of a new process until the model is ready for a prompt."""
    programs = {
        "generate": (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"T.from_pretrained({str(folder)!r}); M.from_pretrained({str(folder)!r}, dtype='float32')"
        ),
        "radixkv": "from radixkv import LLM; LLM(dtype='float32')",
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - start)
    return Result("ready to serve, from process start", seconds["generate"], seconds["radixkv"], "")


def _table(results: list[Result], rounds: int) -> Table:
    table = figure_table(
        "workload", "generate", "RadixKV", "times faster", "equal answers", title=f"seconds, median of {rounds}"
    )
    for result in results:
        table.add_row(
            result.name,
            f"{statistics.median(result.generate_s):.2f}",
            f"{statistics.median(result.radixkv_s):.2f}",
            f"{result.ratio:.1f}",
            result.equal_answers,
        )
    return table
