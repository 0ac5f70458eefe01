"""Tokens a second with drafts and without, on the same work in the same run, in turns; and whether the tokens are the same.

A small model that answers greedily repeats itself, which flatters every drafter: the share of tokens in repeats is reported,
and there are rows with a repetition penalty.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from radixkv.bench.drafts_work import Message, Work, make_work
from radixkv.bench.machine import describe_machine
from radixkv.llm import LLM
from radixkv.model.default_model import ensure_converted, find_default_model
from radixkv.outputs import DraftCounts, RequestOutput
from radixkv.sampling.variates import SamplingRow, exponential_variates, rng_states
from radixkv.sampling_params import SamplingParams

# A token counts as one of a repeat if it ends a run of so many that the answer has had before.
_REPEAT = 4
_LOOKUP_TOKENS = 10


@dataclass
class Answers:
    """What one run of a kind of work brought."""

    seconds: float = 0.0
    outputs: list[tuple[RequestOutput, SamplingParams]] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        """Of each answer."""
        return [sample.token_ids for output, _ in self.outputs for sample in output.outputs]

    @property
    def tokens_per_second(self) -> float:
        """Of all answers."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def repeated_share(self) -> float:
        """Share of the tokens that are inside of repeats."""
        repeated = 0
        for tokens in self.tokens:
            seen = set()
            for end in range(_REPEAT, len(tokens) + 1):
                run = tuple(tokens[end - _REPEAT : end])
                repeated += run in seen
                seen.add(run)
        return repeated / max(1, sum(map(len, self.tokens)))

    @property
    def drafts(self) -> dict[str, DraftCounts]:
        """Of all answers, by source."""
        total: dict[str, DraftCounts] = {}
        for output, _ in self.outputs:
            for source, counts in output.metrics.drafts.items():
                sum_ = total.setdefault(source, DraftCounts())
                sum_.drafted += counts.drafted
                sum_.accepted += counts.accepted
        return total


class Engine:
    """A `Session` on one engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.answers = Answers()

    def chat(
        self, conversations: Sequence[Sequence[Message]], params: SamplingParams, **options: Any
    ) -> list[RequestOutput]:
        """Answer conversations side by side."""
        start = time.perf_counter()
        outputs = self.llm.chat(conversations, params, use_tqdm=False, **options)
        self.answers.seconds += time.perf_counter() - start
        self.answers.outputs += [(output, params) for output in outputs]
        return outputs

    def run(self, work: Work) -> Answers:
        """The work from an empty cache on."""
        self.llm.reset_prefix_cache()
        if work.before is not None:
            work.before(self)
        self.answers = Answers()
        work.measured(self)
        return self.answers


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which an answer with drafts differs from that without.

    Attributes:
        gap: by how much the token that was drawn without drafts wins, in natural logarithms; None: neither's probability is
            known.
    """

    index: int
    without: int
    with_drafts: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work. Tokens a second of each round."""

    name: str
    wanted: float
    without: list[float]
    with_drafts: list[float]
    prompt_lookup: float | None
    tokens: int
    repeated_share: float
    drafts: dict[str, DraftCounts]
    differences: list[Difference]

    @property
    def ratio(self) -> float:
        """Of medians."""
        return statistics.median(self.with_drafts) / statistics.median(self.without)


def run_drafts(
    console: Console,
    rounds: int,
    only: str | None,
    dtype: str,
    num_tokens: int,
    json_path: Path | None,
    plot_path: Path | None,
    make_model: Callable[[], Any] | None = None,
    tokenizer: Any = None,
) -> None:
    """Measure, print a table, write JSON, draw a plot.

    Args:
        console: where to print.
        rounds: of each kind of work, in turns; the median counts.
        only: kinds of work whose name contains this.
        dtype: of the model.
        num_tokens: of an answer at most.
        json_path: where to write the figures.
        plot_path: where to draw them.
        make_model: loads a model, as `LLM` takes it, for each engine; None: the default model, beside which transformers'
            prompt look-up is measured.
        tokenizer: of that model.

    Raises:
        ValueError: ``only`` names no kind of work.
    """
    every = [work for work in make_work(num_tokens) if only is None or only in work.name]
    if not every:
        raise ValueError(f"--only: no kind of work has a name that contains {only!r}")
    options: dict[str, Any] = {"dtype": dtype, "num_blocks": 1600, "tokenizer": tokenizer}
    models = (None, None) if make_model is None else (make_model(), make_model())
    plain = Engine(LLM(models[0], **options))
    drafting = Engine(LLM(models[1], speculative_config={"method": "tree", "num_speculative_tokens": 16}, **options))
    folder = ensure_converted(find_default_model(), console.print) if make_model is None else None
    rows = []
    for work in every:
        console.print(f"[dim]{work.name}[/dim]")
        runs = [(plain.run(work), drafting.run(work)) for _ in range(rounds)]
        expected, answers = runs[-1]
        lookup = _prompt_lookup(folder, expected) if work.prompt_lookup and folder is not None else None
        rows.append(
            Row(
                work.name,
                work.wanted,
                [each.tokens_per_second for each, _ in runs],
                [each.tokens_per_second for _, each in runs],
                lookup,
                sum(map(len, answers.tokens)),
                answers.repeated_share,
                answers.drafts,
                _differences(plain.llm, expected, answers),
            )
        )
    console.print(_table(rows, rounds))
    for row in rows:
        for difference in row.differences:
            console.print(f"{row.name}: {difference}")
    if json_path is not None:
        machine = {**describe_machine("torch", "transformers"), "threads": torch.get_num_threads()}
        document = {"machine": machine, "dtype": dtype, "rows": [{**asdict(r), "ratio": r.ratio} for r in rows]}
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    if plot_path is not None:
        _plot(rows, plot_path)


def _differences(llm: LLM, expected: Answers, answers: Answers) -> list[Difference]:
    found = []
    for (without, params), (drafted, _) in zip(expected.outputs, answers.outputs, strict=True):
        if without.prompt_token_ids != drafted.prompt_token_ids:
            continue  # a conversation goes on from an answer that had differed
        for a, b in zip(without.outputs, drafted.outputs, strict=True):
            index = next(
                (i for i, pair in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if len({*pair}) > 1), None
            )
            if index is not None:
                prefix = [*without.prompt_token_ids, *a.token_ids[:index]]
                pair = a.token_ids[index], b.token_ids[index]
                found.append(Difference(index, *pair, _gap(llm, prefix, params, a.index, index, pair)))
    return found


def _gap(
    llm: LLM, prefix: list[int], params: SamplingParams, sample: int, index: int, pair: tuple[int, int]
) -> float | None:
    """How close the draw of the first token was to that of the second, without what grammars and penalties change."""
    (output,) = llm.generate(
        {"prompt_token_ids": prefix}, SamplingParams(temperature=0.0, max_tokens=1, logprobs=50), use_tqdm=False
    )
    (logprobs,) = output.outputs[0].logprobs or []
    if not all(token in logprobs for token in pair):
        return None
    first, second = (logprobs[token].logprob for token in pair)
    if params.greedy:
        return first - second
    row = SamplingRow(params, params.seed or 0, sample, index)
    variates = exponential_variates(rng_states([row], torch.device("cpu")), torch.tensor(pair)).tolist()
    return (first - second) / params.temperature - (math.log(variates[0]) - math.log(variates[1]))


@torch.inference_mode()
def _prompt_lookup(folder: Path, expected: Answers) -> float:
    """Tokens a second of transformers' own drafts from the prompt, for the same prompts and numbers of tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    num_tokens, start = 0, time.perf_counter()
    for output, _ in expected.outputs:
        ids = torch.tensor([output.prompt_token_ids])
        length = len(output.outputs[0].token_ids)
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length,
            prompt_lookup_num_tokens=_LOOKUP_TOKENS, pad_token_id=0,
        )  # fmt: skip
        num_tokens += answer.shape[1] - ids.shape[1]
    return num_tokens / (time.perf_counter() - start)


def _table(rows: Sequence[Row], rounds: int) -> Table:
    table = Table(title=f"tokens a second, median of {rounds}")
    columns = (
        "work",
        "without",
        "with drafts",
        "times",
        "wanted",
        "prompt look-up",
        "in repeats",
        "accepted",
        "differ",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "work" else "right")
    for row in rows:
        drafted = sum(counts.drafted for counts in row.drafts.values())
        accepted = sum(counts.accepted for counts in row.drafts.values())
        table.add_row(
            row.name,
            f"{statistics.median(row.without):.1f}",
            f"{statistics.median(row.with_drafts):.1f}",
            f"{row.ratio:.2f}",
            f"{row.wanted:.2f}",
            "" if row.prompt_lookup is None else f"{row.prompt_lookup:.1f}",
            f"{row.repeated_share:.0%}",
            f"{accepted} of {drafted}",
            f"{len(row.differences)} in {row.tokens:,}",
        )
    return table


def _plot(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [row.ratio for row in rows], color="#00897b", label="with drafts")
    axes.plot([row.wanted for row in rows], places, "k|", markersize=14, label="wanted")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks(places, [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times the tokens a second without drafts")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
