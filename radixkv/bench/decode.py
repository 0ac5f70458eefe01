"""Whole decoding steps on a GPU, with random weights in the shape of Llama 3 8B, against what must be read for them.

A step reads every weight once and every different key and value once; its floor is their bytes over the copy bandwidth
that this GPU has just shown. In the same run, on the same weights: steps with decoder layers as they are and compiled by
torch, and transformers' continuous batching with the same prompts.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from radixkv.bench.gpu_timing import describe_gpu, measure_limits, require_gpu
from radixkv.llm import LLM
from radixkv.sampling_params import SamplingParams

BATCH, LENGTH, SHARED, NEW_TOKENS = 64, 4096, 3500, 128
WARM_UP_STEPS, TIMED_STEPS, PROFILED_STEPS = 8, 64, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Step:
    """Decoding one token for each of the batch.

    Attributes:
        median_us: from the end of one step to the end of the next, on the host's clock.
        gpu_idle: share of that time in which the GPU had nothing to do.
    """

    name: str
    bytes: int
    floor_us: float
    median_us: float
    gpu_idle: float
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


def make_prompts(shared: int) -> list[list[int]]:
    """``BATCH`` prompts of ``LENGTH`` tokens that begin with the same ``shared``."""
    rng = np.random.default_rng(shared)
    stem = rng.integers(3, 128000, shared).tolist()
    return [stem + rng.integers(3, 128000, LENGTH - shared).tolist() for _ in range(BATCH)]


def start_decoding(llm: LLM, name: str, shared: int) -> None:
    """Bring all prompts to where every step decodes one token of each."""
    engine = llm.engine
    llm.reset_prefix_cache()
    for index, prompt in enumerate(make_prompts(shared)):
        engine.add(engine.make_request(f"{name} {index}", prompt, GREEDY))
    while engine.scheduler.waiting or any(group.num_pending > 1 for group in engine.scheduler.running):
        engine.step()
    for _ in range(WARM_UP_STEPS):
        engine.step()


def measure_steps(llm: LLM, name: str, shared: int, bytes_per_s: float) -> Step:
    """Time the steps in which all sequences decode, and see in a profile how much of that the GPU works."""
    engine = llm.engine
    start_decoding(llm, name, shared)
    torch.cuda.synchronize()
    ends = [time.perf_counter()]
    for _ in range(TIMED_STEPS):
        engine.step()
        ends.append(time.perf_counter())
    seconds = statistics.median(np.diff(ends).tolist())
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    while engine.has_unfinished_requests:
        engine.step()
    model = engine.loaded.model
    embedding = model.get_input_embeddings().weight  # of which a step reads a row for each token
    weights = sum(parameter.nbytes for parameter in model.parameters()) - embedding.nbytes
    tokens = shared + BATCH * (LENGTH - shared + WARM_UP_STEPS + TIMED_STEPS // 2)
    moved = weights + tokens * engine.pool.block_nbytes // engine.pool.block_size
    return Step(
        name,
        moved,
        moved / bytes_per_s * 1e6,
        seconds * 1e6,
        1 - busy_seconds(profiled.events()) / elapsed,
        BATCH / seconds,
    )


def busy_seconds(events: Iterable[Any]) -> float:
    """Time in which at least one kernel or copy ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type.name == "CUDA"
    )
    busy, reached = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6


def answer_all(llm: LLM, shared: int) -> float:
    """Our tokens a second from prompts to last tokens."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(shared)]
    start = time.perf_counter()
    llm.generate(prompts, GREEDY, use_tqdm=False)
    return BATCH * NEW_TOKENS / (time.perf_counter() - start)


def answer_all_with_transformers(model: Any, shared: int) -> float:
    """The same of transformers' continuous batching."""
    config = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    model.generate_batch(inputs=make_prompts(shared), generation_config=config)
    return BATCH * NEW_TOKENS / (time.perf_counter() - start)


def measure_engine(model: Any, name: str, compiled: bool, bytes_per_s: float) -> tuple[list[Step], dict[str, float]]:
    """Steps with nothing and with much shared; tokens a second of whole answers to the same, seconds to the start."""
    start = time.perf_counter()
    llm = LLM(model, max_model_len=8192, max_num_seqs=BATCH, enable_torch_compile=compiled)
    figures = {"seconds to the start": time.perf_counter() - start}
    steps = []
    for shared in (0, SHARED):
        steps.append(measure_steps(llm, f"{BATCH} x {LENGTH:,}, {shared:,} shared, {name}", shared, bytes_per_s))
        figures[f"{shared} shared"] = answer_all(llm, shared)
    return steps, figures


def let_go(model: Any) -> None:
    """Give back the memory of the engine that ran the model last, to whose blocks and graphs its layers still lead."""
    for module in model.modules():
        vars(module).pop("radixkv_runner", None)
    gc.collect()
    torch.cuda.empty_cache()


def run_decode(console: Console, json_path: Path | None) -> None:
    """Measure, print a table, and write the rows.

    Raises:
        ValueError: there is no GPU.
    """
    require_gpu()
    limits = measure_limits()
    model = make_model()
    figures: dict[str, dict[str, float]] = {}
    with console.status("transformers' continuous batching"):
        figures["transformers"] = {f"{n} shared": answer_all_with_transformers(model, n) for n in (0, SHARED)}
        torch.cuda.empty_cache()
    steps: list[Step] = []
    for name, compiled in (("as it is", False), ("compiled", True)):
        with console.status(f"the model {name}"):
            own, figures[name] = measure_engine(model, name, compiled, limits.bytes_per_s)
            steps += own
            let_go(model)
    table = Table("step", "GB", "floor us", "median us", "time / floor", "GPU idle", "tokens/s")
    for step in steps:
        table.add_row(
            step.name, f"{step.bytes / 1e9:.1f}", f"{step.floor_us:,.0f}", f"{step.median_us:,.0f}",
            f"{step.median_us / step.floor_us:.2f}", f"{step.gpu_idle:.1%}", f"{step.tokens_per_s:,.0f}",
        )  # fmt: skip
    console.print(table)
    for shared in (f"{n} shared" for n in (0, SHARED)):
        rates = ", ".join(f"{name} {own[shared]:,.0f}" for name, own in figures.items())
        console.print(f"{shared}, tokens/s from prompt to end: {rates}")
    for name in ("as it is", "compiled"):
        console.print(f"{name}: ready after {figures[name]['seconds to the start']:.1f} s")
    if json_path:
        content = {
            "machine": describe_gpu(),
            "limits": asdict(limits),
            "steps": [asdict(step) for step in steps],
            "whole_answers": figures,
        }
        json_path.write_text(json.dumps(content, indent=2) + "\n")
