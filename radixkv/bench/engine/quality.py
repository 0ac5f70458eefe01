"""What narrower types of activations and weights cost in quality, on the default model.

Perplexity is measured on a text that comes with Python, in windows without any context before them. The second figure is how
many tokens of float32's greedy answers are still the likeliest, given the tokens before them: unlike in a comparison of
generated answers, one different token does not change all that follow.
"""

from __future__ import annotations

import gc
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

from rich.console import Console
from rich.table import Table

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.config import Quantization
from radixkv.llm import LLM
from radixkv.model.native import weights_of
from radixkv.outputs import Logprob
from radixkv.sampling_params import SamplingParams
from radixkv_cpu import library

WINDOW = 1024
NUM_WINDOWS = 8
NUM_PROMPTS = 16
ANSWER_TOKENS = 64
# Types of activations and of weights; None: weights of the same type.
SETTINGS: tuple[tuple[str, Quantization | None], ...] = (
    ("float32", None),
    ("bfloat16", None),
    ("float32", "int8"),
    ("bfloat16", "int8"),
    ("float32", "int4"),
    ("bfloat16", "int4"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting.

    Attributes:
        weights_mb: megabytes of all linear layers' weights.
        perplexity: of the text.
        same_tokens: how many of float32's greedy tokens are the likeliest here, too.
        of_tokens: how many greedy tokens there are.
    """

    dtype: str
    quantization: str | None
    weights_mb: float
    perplexity: float
    same_tokens: int
    of_tokens: int


def run_quality(console: Console, json_path: Path | None) -> None:
    """Measure, print a table, and write the figures to ``json_path``."""
    rows: list[Row] = []
    answered: list[list[int]] = []
    for dtype, quantization in SETTINGS:
        with console.status(f"{dtype}, {quantization}"):
            llm = LLM(dtype=dtype, quantization=quantization)
            answered = answered or _greedy(llm)
            rows.append(_measure(llm, dtype, quantization, answered))
            del llm
            gc.collect()
    variant = library()
    machine = {**describe_machine("torch", "transformers"), "variant": variant and variant.variant}
    write_figures(json_path, {"machine": machine, "rows": [asdict(row) for row in rows]})
    console.print(_table(rows))


def _measure(llm: LLM, dtype: str, quantization: Quantization | None, answered: list[list[int]]) -> Row:
    logprobs = [step.logprob for window in windows(llm) for step in _given(llm, window)]
    ranks = [step.rank for tokens in answered for step in _given(llm, tokens)[-ANSWER_TOKENS:]]
    return Row(
        dtype=dtype,
        quantization=quantization,
        weights_mb=round(sum(weight.nbytes for weight in weights_of(llm.engine.loaded.model)) / 1e6, 1),
        perplexity=math.exp(-sum(logprobs) / len(logprobs)),
        same_tokens=sum(rank == 1 for rank in ranks),
        of_tokens=len(ranks),
    )


def windows(llm: LLM) -> list[list[int]]:
    """The text as windows of token ids."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = llm.get_tokenizer()(text[: 8 * WINDOW * NUM_WINDOWS])["input_ids"]
    return [tokens[start : start + WINDOW] for start in range(0, WINDOW * NUM_WINDOWS, WINDOW)]


def _greedy(llm: LLM) -> list[list[int]]:
    """Each prompt with its greedy answer, as token ids."""
    names = sorted(topics.topics)[:NUM_PROMPTS]
    chats: Any = [[{"role": "user", "content": f"What does Python's manual say about {name!r}?"}] for name in names]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True), False)
    return [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]


def _given(llm: LLM, tokens: list[int]) -> list[Logprob]:
    """Log-probability and rank of every token but the first, given all tokens before it."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    steps = output.prompt_logprobs or []
    return [step[token] for step, token in zip(steps, tokens, strict=True) if step is not None]


def _table(rows: list[Row]) -> Table:
    columns = ("activations", "weights", "MB", "perplexity", "", "tokens that stay")
    table = figure_table(*columns, title="what narrower types cost", num_labels=2)
    for row in rows:
        change = row.perplexity / rows[0].perplexity - 1
        table.add_row(
            row.dtype,
            row.quantization or row.dtype,
            f"{row.weights_mb:.0f}",
            f"{row.perplexity:.3f}",
            f"{change:+.2%}",
            f"{row.same_tokens} of {row.of_tokens}",
        )
    return table
