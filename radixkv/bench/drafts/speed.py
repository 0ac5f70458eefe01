"""Tokens a second with drafts and without, on the same work in the same run, in turns; and whether the tokens are the same.

A small model that answers greedily repeats itself, which flatters every drafter. So the share of tokens in repeats is
reported, and there are rows with a repetition penalty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.drafts.equality import Answered, Comparison
from radixkv.bench.drafts.peers import Peer, PromptLookup, Question, VllmNgram
from radixkv.bench.drafts.report import Row, plot, table
from radixkv.bench.drafts.work import Message, Part, Work, make_work
from radixkv.llm import LLM
from radixkv.model.default_model import find_default_model
from radixkv.model.gguf.conversion import ensure_converted
from radixkv.outputs import DraftCounts, RequestOutput
from radixkv.sampling_params import SamplingParams

# A token counts as repeated if it ends a run of this many tokens that occurred earlier in the answer.
_REPEAT = 4
# Peers answer only this many questions of a row, the first ones.
_PEER_QUESTIONS = 8
_NUM_BLOCKS = 1600


@dataclass
class Answers:
    """What one round of a kind of work gave."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    answered: list[Answered] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [sample.token_ids for output, _ in self.answered for sample in output.outputs]

    @property
    def num_tokens(self) -> int:
        """How many tokens all answers have."""
        return sum(map(len, self.tokens))


class Engine:
    """A `Session` on one engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.messages: list[Message] = []
        self.answers = Answers()

    def chat(
        self, conversations: Sequence[Sequence[Message]], params: SamplingParams, **options: Any
    ) -> list[RequestOutput]:
        """Answer conversations side by side."""
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = self.llm.chat(conversations, params, use_tqdm=False, **options)
        self.answers.seconds += time.perf_counter() - start
        self.answers.cpu_seconds += time.process_time() - cpu_start
        self.answers.answered += [(output, params) for output in outputs]
        return outputs

    def begin(self, before: Sequence[Part]) -> None:
        """Start a round: empty the cache, and run ``before`` unmeasured."""
        self.llm.reset_prefix_cache()
        self.messages = []
        for part in before:
            part(self)
        self.answers = Answers()


def run_drafts(
    console: Console,
    *,
    rounds: int,
    only: Sequence[str],
    dtype: str,
    num_tokens: int,
    json_path: Path | None,
    plot_path: Path | None,
    vllm: Path | None = None,
    make_model: Callable[[], Any] | None = None,
    tokenizer: Any = None,
) -> list[Row]:
    """Measure, print a table, write JSON, draw a plot.

    Args:
        console: where to print.
        rounds: of each kind of work; those whose round is short get more.
        only: kinds of work whose name contains one of these; empty: all.
        dtype: of the model.
        num_tokens: maximum length of an answer, where no schema needs more.
        json_path: where to write the figures.
        plot_path: where to draw them.
        vllm: the interpreter of an environment with vLLM, to measure its drafts, too.
        make_model: loads a model, as `LLM` takes it; None: the default model, with which peers are measured, too.
        tokenizer: of that model.

    Raises:
        ValueError: a part of ``only`` names no kind of work.
    """
    works = _chosen(make_work(num_tokens), only)
    options: dict[str, Any] = {"dtype": dtype, "num_blocks": _NUM_BLOCKS, "tokenizer": tokenizer}
    load = make_model or (lambda: None)
    plain = Engine(LLM(load(), **options, speculative_config=None))
    drafting = Engine(LLM(load(), **options, speculative_config={"method": "tree", "num_speculative_tokens": 16}))
    peers: list[Peer] = []
    if make_model is None:
        folder = ensure_converted(find_default_model(), console.print)
        make_model = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # noqa: E731
        if any(work.peers for work in works):
            loaded_dtype = plain.llm.engine.loaded.dtype
            peers = [PromptLookup(folder, loaded_dtype)]
            if vllm is not None:
                peers.append(VllmNgram(vllm, folder, str(loaded_dtype).removeprefix("torch.")))
    comparison = Comparison(make_model, plain.llm.engine.grammars)
    rows = []
    try:
        for work in works:
            console.print(work.name, style="dim")
            rows.append(_measure(work, rounds, plain, drafting, comparison, peers if work.peers else ()))
    finally:
        for peer in peers:
            peer.close()
    machine = {**describe_machine("torch", "transformers"), "threads": torch.get_num_threads()}
    document = {
        "machine": machine,
        "dtype": str(plain.llm.engine.loaded.dtype).removeprefix("torch."),
        "rows": [{**asdict(row), "ratio": row.ratio, "cpu_ratio": row.cpu_ratio} for row in rows],
    }
    write_figures(json_path, document)
    if plot_path is not None:
        plot(rows, plot_path)
    console.print(table(rows))
    for row in rows:
        for difference in row.differences:
            console.print(f"{row.name}: {difference}")
    console.print(f"{sum(len(r.differences) for r in rows)} answers differ in {sum(r.tokens for r in rows):,} tokens")
    return rows


def _chosen(works: Sequence[Work], only: Sequence[str]) -> list[Work]:
    for part in only:
        if not any(part in work.name for work in works):
            raise ValueError(f"--only: {part!r} is in no name of {[work.name for work in works]}")
    return [work for work in works if not only or any(part in work.name for part in only)]


def _measure(
    work: Work, rounds: int, plain: Engine, drafting: Engine, comparison: Comparison, peers: Sequence[Peer]
) -> Row:
    runs = [_round(work, plain, drafting, number) for number in range(rounds * work.rounds)]
    expected = [answer for answers, _ in runs for answer in answers.answered]
    drafted = [answer for _, answers in runs for answer in answers.answered]
    questions = [
        Question(output.prompt_token_ids, len(output.outputs[0].token_ids))
        for output, _ in runs[-1][0].answered[:_PEER_QUESTIONS]
    ]
    num_tokens = sum(question.num_tokens for question in questions)
    return Row(
        work.name,
        work.wanted,
        [answers.num_tokens / answers.seconds for answers, _ in runs],
        [answers.num_tokens / answers.seconds for _, answers in runs],
        [answers.num_tokens / answers.cpu_seconds for answers, _ in runs],
        [answers.num_tokens / answers.cpu_seconds for _, answers in runs],
        {peer.name: num_tokens / peer.seconds(questions) for peer in peers},
        sum(answers.num_tokens for _, answers in runs),
        _repeated_share(runs[-1][1].tokens),
        _drafts(drafted),
        list(comparison.differences(expected, drafted)),
    )


def _round(work: Work, plain: Engine, drafting: Engine, number: int) -> tuple[Answers, Answers]:
    """Run the parts in turns; each engine goes first equally often, over the rounds if each has only one part."""
    engines = plain, drafting
    for engine in engines:
        engine.begin(work.before)
    for index, part in enumerate(work.parts, number):
        for engine in engines if index % 2 else reversed(engines):
            part(engine)
    return plain.answers, drafting.answers


def _repeated_share(answers: Sequence[Sequence[int]]) -> float:
    """Share of the tokens that are inside of repeats."""
    repeated = 0
    for tokens in answers:
        seen = set()
        for end in range(_REPEAT, len(tokens) + 1):
            run = tuple(tokens[end - _REPEAT : end])
            repeated += run in seen
            seen.add(run)
    return repeated / max(1, sum(map(len, answers)))


def _drafts(answered: Sequence[Answered]) -> dict[str, DraftCounts]:
    total: dict[str, DraftCounts] = {}
    for output, _ in answered:
        for source, counts in output.metrics.drafts.items():
            sum_ = total.setdefault(source, DraftCounts())
            sum_.drafted += counts.drafted
            sum_.accepted += counts.accepted
    return total
