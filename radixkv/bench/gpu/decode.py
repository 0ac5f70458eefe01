"""Whole decoding steps on a GPU, with random weights in the shape of Llama 3 8B, against what must be read for them.

A step reads every weight once and every distinct key and value once; its floor is their bytes over the bandwidth that this
GPU has just shown in reading. Measured in the same run, on the same weights:

- steps with decoder layers compiled by torch or not, and with linear layers of the same input merged or not;
- transformers' continuous batching with the same prompts, which takes longer than all the rest;
- first tokens of prompts whose keys and values lie in host memory;
- at the end, steps with drafts of which a given share is right.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

from radixkv.bench.common.tables import figure_table
from radixkv.bench.gpu import host_tier
from radixkv.bench.gpu.decode_drafts import OPTIONS, measure_drafts, row_names
from radixkv.bench.gpu.report import GpuReport
from radixkv.llm import LLM
from radixkv.model.graphs.compiled_layers import uncompile_layers
from radixkv.model.replacement.deferred_rotation import restore_rotation
from radixkv.model.replacement.merged_linear import MergedLinear
from radixkv.model.replacement.replace_modules import replace_modules
from radixkv.prompts import Prompt
from radixkv.sampling_params import SamplingParams

BATCH, LENGTH, SHARED, NEW_TOKENS = 64, 4096, 3500, 128
WARM_UP_STEPS, TIMED_STEPS, PROFILED_STEPS = 8, 64, 16
# Gaps between kernels of one graph are no longer than this; between two steps, the GPU waits for the host.
LONG_GAP_US = 5.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
# Aborted once measured; so long that none ends while others are still in prefill.
LONG_GREEDY = SamplingParams(temperature=0.0, max_tokens=1024, ignore_eos=True)
# Options of the engines.
KINDS: Mapping[str, dict[str, bool]] = MappingProxyType(
    {
        "default": {},
        "not compiled": {"enable_torch_compile": False},
        "not merged": {"merge_linears": False},
        "rotated apart": {"fuse_rotary": False},
        "neither": {"enable_torch_compile": False, "merge_linears": False, "fuse_rotary": False},
    }
)
LONG_TOP_P = SamplingParams(temperature=1.0, top_p=0.9, seed=0, max_tokens=1024, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds to construct an engine, and then to compile its kernels and capture its graphs."""

    engine_s: float
    warm_up_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """Decoding one token for each sequence of the batch.

    Attributes:
        median_us: from the end of one step to the end of the next, on the host's clock.
    """

    bytes: int
    floor_us: float
    median_us: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Shares of the time of some profiled steps in which the GPU ran nothing.

    Attributes:
        all: in all.
        between_steps: in gaps of more than `LONG_GAP_US`.
    """

    all: float
    between_steps: float


@dataclass(frozen=True, slots=True)
class Answers:
    """``BATCH`` answers of ``NEW_TOKENS``, from prompts to last tokens."""

    seconds: float
    tokens_per_s: float


def make_model() -> transformers.PreTrainedModel:
    """8 billion random weights in bfloat16, on the GPU."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def make_prompts(shared: int, own: int) -> list[list[int]]:
    """``BATCH`` prompts that begin with the same ``shared`` tokens and have ``own`` more each."""
    rng = np.random.default_rng(shared)
    stem = rng.integers(3, 128000, shared).tolist()
    return [stem + rng.integers(3, 128000, own).tolist() for _ in range(BATCH)]


def warm_up(llm: LLM, shared: int) -> None:
    """Answers that end one after another, so that batches of every size have run."""
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(shared, 16)]
    lengths = [SamplingParams(temperature=0.0, max_tokens=2 + n, ignore_eos=True) for n in range(BATCH)]
    llm.generate(prompts, lengths, use_tqdm=False)


@contextmanager
def decoding(llm: LLM, shared: int, params: SamplingParams) -> Iterator[None]:
    """Prefill all prompts, up to where every step decodes one token of each; at the end, abort them."""
    engine = llm.engine
    llm.reset_prefix_cache()
    try:
        for index, prompt in enumerate(make_prompts(shared, LENGTH - shared)):
            engine.add(engine.request_factory.make(str(index), Prompt(prompt), params))
        while engine.scheduler.waiting or any(group.num_pending > 1 for group in engine.scheduler.running):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        yield
    finally:
        for index in range(BATCH):
            engine.abort(str(index))
        engine.step()  # finishes the batch in flight


def measure_steps(llm: LLM, shared: int, read_bytes_per_s: float) -> Step:
    """Time the steps in which all sequences decode."""
    engine = llm.engine
    torch.cuda.synchronize()
    ends = [time.perf_counter()]
    for _ in range(TIMED_STEPS):
        engine.step()
        ends.append(time.perf_counter())
    seconds = statistics.median(np.diff(ends).tolist())
    model = engine.loaded.model
    embedding = model.get_input_embeddings().weight  # of which a step reads a row for each token
    weights = sum(parameter.nbytes for parameter in model.parameters()) - embedding.nbytes
    tokens = shared + BATCH * (LENGTH - shared + WARM_UP_STEPS + TIMED_STEPS // 2)
    moved = weights + tokens * engine.pool.block_nbytes // engine.pool.block_size
    return Step(moved, moved / read_bytes_per_s * 1e6, seconds * 1e6, BATCH / seconds)


def measure_idle(llm: LLM) -> Idle:
    """Profile some more steps to see how long the GPU is idle.

    Raises:
        RuntimeError: the profile shows nothing that the GPU did.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            llm.engine.step()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    events = profiled.events()
    if not busy_seconds(events):
        raise RuntimeError("torch's profiler saw no kernel: it cannot read this GPU's activity here")
    return Idle(1 - busy_seconds(events) / elapsed, 1 - busy_seconds(events, LONG_GAP_US) / elapsed)


def busy_seconds(events: Iterable[Any], bridged_us: float = 0.0) -> float:
    """Time in which at least one kernel or copy ran; gaps of up to ``bridged_us`` count as busy."""
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type.name == "CUDA"
    )
    busy, reached = 0.0, 0.0
    for start, end in spans:
        if busy and 0.0 < start - reached <= bridged_us:
            busy += start - reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6


def answer_all(llm: LLM, shared: int) -> Answers:
    """All prompts through `LLM.generate`, with nothing cached."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(shared, LENGTH - shared)]
    start = time.perf_counter()
    llm.generate(prompts, GREEDY, use_tqdm=False)
    return _answers(time.perf_counter() - start)


def answer_all_with_transformers(model: Any, shared: int) -> Answers:
    """The same by transformers' continuous batching, from the first request that it admits to the end of the last.

    Its set-up is not counted: it allocates memory and captures graphs in every call, which an engine does once.

    Raises:
        RuntimeError: some answers are missing; transformers logs errors and returns the answers that there are.
    """
    config = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = make_prompts(shared, LENGTH - shared)
    outputs = model.generate_batch(inputs=prompts, generation_config=config).values()
    complete = sum(len(output.generated_tokens) == NEW_TOKENS for output in outputs)
    if complete < BATCH:
        raise RuntimeError(f"transformers gave {complete} complete answers of {BATCH}; its log says why")
    return _answers(max(output.lifespan[1] for output in outputs) - min(output.created_time for output in outputs))


def _answers(seconds: float) -> Answers:
    return Answers(seconds, BATCH * NEW_TOKENS / seconds)


def measure_engine(report: GpuReport, table: Table, model: Any, kind: str, options: dict[str, bool]) -> None:
    """Measure one engine's steps and answers, with nothing and with much shared; a failure of one does not end the other."""
    start = time.perf_counter()
    # Asked for explicitly, so that layers that cannot be compiled are an error: otherwise this would measure another kind.
    given: dict[str, Any] = {"enable_torch_compile": True, "speculative_config": None, **options}
    llm = LLM(model, max_model_len=8192, max_num_seqs=BATCH, **given)
    ready = time.perf_counter()
    for shared in (0, SHARED):
        with report.failing_alone(f"{kind}: warm-up, {shared:,} shared"):
            warm_up(llm, shared)
    report.keep(f"{kind}: start", Start(ready - start, time.perf_counter() - ready))
    for shared in (0, SHARED):
        name = f"{kind}: {BATCH} x {LENGTH:,}, {shared:,} shared"
        measure_decoding(report, table, llm, shared, LONG_GREEDY, name, f"{name}, step", f"{name}, step, GPU idle")
        measure_decoding(report, table, llm, shared, LONG_TOP_P, f"{name}, top-p", f"{name}, top-p step")
        answers = report.measure(f"{name}, answers", partial(answer_all, llm, shared))
        if answers is not None:
            table.add_row(f"{name}, answers", "", "", "", "", f"{answers.tokens_per_s:,.0f}", "")


def measure_decoding(
    report: GpuReport,
    table: Table,
    llm: LLM,
    shared: int,
    params: SamplingParams,
    title: str,
    step_name: str,
    idle_name: str | None = None,
) -> None:
    """Measure the row of a step, and, by some more of them, how long the GPU is idle; an error before is noted as the step's.

    Args:
        title: in the table.
        step_name, idle_name: of the rows; None: idle time is not measured.
    """
    if not any(map(report.wants, filter(None, (step_name, idle_name)))):
        return
    step = idle = None
    with report.failing_alone(step_name), decoding(llm, shared, params):
        step = report.measure(step_name, partial(measure_steps, llm, shared, report.limits.read_bytes_per_s))
        if idle_name is not None:
            idle = report.measure(idle_name, partial(measure_idle, llm))
    if step is not None:
        table.add_row(
            title, f"{step.bytes / 1e9:.1f}", f"{step.floor_us:,.0f}", f"{step.median_us:,.0f}",
            f"{step.floor_us / step.median_us:.2f}", f"{step.tokens_per_s:,.0f}",
            "" if idle is None else f"{idle.between_steps:.1%} of {idle.all:.1%}",
        )  # fmt: skip


def release(model: Any, attention: str) -> None:
    """Restore the model's own attention, and free the memory of the engine that ran it, which it still refers to."""
    vars(model).pop("radixkv_runner", None)
    uncompile_layers(model)
    restore_rotation(model)
    split_linears(model)
    model.set_attn_implementation(attention)
    gc.collect()
    torch.cuda.empty_cache()


def split_linears(model: nn.Module) -> None:
    """Undo `merge_linears`, except that the weights stay where it has put them."""
    plain: dict[nn.Module, nn.Linear] = {}
    for module in model.modules():
        if isinstance(module, MergedLinear):
            has_bias = module.bias is not None
            plain[module] = linear = nn.Linear(module.in_features, module.out_features, has_bias, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
    replace_modules(model, plain)


def run_decode(console: Console, json_path: Path | None, only: str | None = None, resume: bool = False) -> bool:
    """Measure, print a table, and write the rows; a row that fails is noted, and the others are measured all the same.

    Args:
        only: rows whose name contains this.
        resume: keep the rows that are in the file, and measure the others.

    Returns:
        Whether no row failed.

    Raises:
        ValueError: there is no GPU, or no row's name contains ``only``.
    """
    report = GpuReport.begin(console, json_path, only, resume)
    model = make_model()
    attention = model.config._attn_implementation
    table = figure_table(
        "work", "GB", "floor us", "median us", "floor / time", "tokens/s", "GPU idle between steps, in all"
    )
    for kind, options in KINDS.items():
        if any(report.wants(name) for name in _names(kind)):
            measure_and_release(
                report, kind, partial(measure_engine, report, table, model, kind, options), model, attention
            )
    for shared in (0, SHARED):
        name = f"transformers: {BATCH} x {LENGTH:,}, {shared:,} shared, answers"
        answers = report.measure(name, partial(answer_all_with_transformers, model, shared))
        if answers is not None:
            table.add_row(name, "", "", "", "", f"{answers.tokens_per_s:,.0f}", "")
    if any(map(report.wants, host_tier.row_names())):
        measure = partial(host_tier.measure_host_tier, report, table, model)
        measure_and_release(report, "host tier", measure, model, attention)
    drafted = row_names(f"drafts: {BATCH} x {LENGTH:,}, {SHARED:,} shared")
    if any(map(report.wants, drafted)):
        measure_and_release(report, "drafts", partial(measure_drafted_steps, report, model, drafted), model, attention)
    return report.end(table)


def measure_and_release(report: GpuReport, kind: str, measure: Callable[[], None], model: Any, attention: str) -> None:
    """Measure the rows of one engine, and free it. If none of them can be measured, those of the next engine still may."""
    with report.failing_alone(kind):
        measure()
    release(model, attention)


def measure_drafted_steps(report: GpuReport, model: Any, names: dict[str, float | None]) -> None:
    """Measure the rows about drafts, at the end: from then on the model generates nothing but 0."""
    with torch.inference_mode():
        model.get_output_embeddings().weight.zero_()
    llm = LLM(model, max_model_len=8192, max_num_seqs=BATCH, **OPTIONS)
    measure_drafts(report, llm, names, partial(decoding, llm, SHARED, LONG_GREEDY), TIMED_STEPS)


def _names(kind: str) -> list[str]:
    names = [f"{kind}: {BATCH} x {LENGTH:,}, {shared:,} shared" for shared in (0, SHARED)]
    return [f"{name}, {part}" for name in names for part in ("step", "step, GPU idle", "top-p step", "answers")]
