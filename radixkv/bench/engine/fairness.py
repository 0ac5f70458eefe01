"""`radixkv bench fairness`: one greedy and three modest tenants on one engine.

The greedy tenant sends everything at once. The modest ones have a few clients each. In closed loop a client sends a request,
reads the answer, thinks and sends the next one, so a tenant never has more requests in progress than its equal share. In open
loop clients send at random moments (Poisson), whether or not they were answered, so slow answers do not reduce the load, and
a tenant has more than an equal share in progress now and then.

Three runs of the same requests alternate: the modest tenants alone; with the greedy one; and with it but first come, first
served, as if all were one tenant. Clients think for a number of steps, not of seconds, so that a run is the same every time
and on every machine. Waiting times are given in steps, in tokens computed meanwhile, because steps differ in length, and in
seconds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.percentiles import p99
from radixkv.bench.common.tables import figure_table
from radixkv.engine.engine import Engine
from radixkv.llm import LLM
from radixkv.prompts import Prompt
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

ALONE, FAIR, FIRST_COME = "modest alone", "fair shares", "first come, first served"
_GREEDY = "greedy"
_MAX_NUM_SEQS = 16


@dataclass(frozen=True, slots=True)
class FairnessLoad:
    """What the tenants send.

    Attributes:
        modest_tenants: how many there are.
        modest_clients: of each modest tenant.
        modest_requests: of each client, one after the other.
        think_steps: of a client between an answer and its next request, on average.
        greedy_requests: of the greedy tenant, all at the first step.
        stem_tokens: length of the prefix that all prompts of a tenant share.
        own_tokens: maximum length of what follows it in a prompt; the minimum is half of that.
        answer_tokens: maximum length of an answer; the minimum is half of that.
        open_loop: the modest clients do not wait for their answers: they think between two requests.
        seed: of all that is random.
    """

    modest_tenants: int = 3
    modest_clients: int = 3
    modest_requests: int = 16
    think_steps: float = 8.0
    greedy_requests: int = 150
    stem_tokens: int = 160
    own_tokens: int = 64
    answer_tokens: int = 32
    open_loop: bool = False
    seed: int = 0


_LOAD = FairnessLoad()


@dataclass(frozen=True, slots=True)
class _Question:
    """A future request, ``think_steps`` after the client's previous answer, or its previous request in open loop."""

    tenant: str
    think_steps: int
    prompt: list[int]
    answer_tokens: int


class _Wait(NamedTuple):
    """How long a first token took, in three units."""

    steps: int
    tokens: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Sent:
    """A request, and when it was sent.

    Attributes:
        client: that sent it.
        step: at which it was sent.
        num_computed: tokens that the engine had computed by then.
        wait: for its first token; None: it has not come yet.
    """

    request: Request
    client: int
    step: int
    num_computed: int
    wait: _Wait | None = None

    def note_first_token(self, step: int, num_computed: int) -> None:
        """Set the wait, if the first token has come by this step, before which so many tokens were computed."""
        metrics = self.request.metrics
        if self.wait is None and metrics.first_token_time is not None:
            seconds = metrics.first_token_time - metrics.arrival_time
            self.wait = _Wait(step - self.step, num_computed - self.num_computed, seconds)


@dataclass(frozen=True, slots=True)
class FairnessRun:
    """What one run of a load took.

    Attributes:
        steps_to_first_token: of each modest request.
        tokens_to_first_token: the same in tokens that the engine computed, those of others included.
        seconds_to_first_token: the same by the clock.
        greedy_steps_to_first_token: of each request of the greedy tenant.
        num_steps: in all.
        seconds: in all.
        num_tokens: of all prompts and answers.
        hit_rate: share of all prompt tokens that were reused.
        num_preemptions: in all.
    """

    steps_to_first_token: list[int]
    tokens_to_first_token: list[int]
    seconds_to_first_token: list[float]
    greedy_steps_to_first_token: list[int]
    num_steps: int
    seconds: float
    num_tokens: int
    hit_rate: float
    num_preemptions: int


class _Clients:
    """Clients that send their questions one after the other.

    Args:
        questions: of each client, in order.
        open_loop: a client thinks from its last request on, otherwise from its last answer on.
    """

    def __init__(self, questions: Sequence[Sequence[_Question]], open_loop: bool) -> None:
        self._questions = [deque(each) for each in questions]
        self._open_loop = open_loop
        # The step of each client's next request, if that is known.
        self._due: dict[int, int] = {}
        for client in range(len(questions)):
            self._schedule(client, 0)

    @property
    def next_step(self) -> int | None:
        """The first step at which there is a request; None: no client has one before it gets an answer."""
        return min(self._due.values(), default=None)

    def send(self, step: int) -> Iterator[tuple[int, _Question]]:
        """The requests that are due at a step, each with its client."""
        for client in [client for client, due in self._due.items() if due <= step]:
            del self._due[client]
            yield client, self._questions[client].popleft()
            if self._open_loop:
                self._schedule(client, step)

    def answered(self, client: int, step: int) -> None:
        """A client's request was answered before this step."""
        if not self._open_loop:
            self._schedule(client, step)

    def _schedule(self, client: int, step: int) -> None:
        if self._questions[client]:
            self._due[client] = step + self._questions[client][0].think_steps


def run_load(engine: Engine, load: FairnessLoad, kind: str) -> FairnessRun:
    """Run a load on an idle engine with an empty cache, to its end.

    Args:
        kind: `ALONE`, `FAIR` or `FIRST_COME`.
    """
    engine.reset_prefix_cache()
    questions = [
        each for each in _questions(load, engine.loaded.vocab_size) if kind != ALONE or each[0].tenant != _GREEDY
    ]
    clients = _Clients(questions, load.open_loop)
    sent: list[_Sent] = []
    unfinished: list[_Sent] = []
    step, num_computed, num_steps, preemptions = 0, 0, engine.num_steps, engine.scheduler.num_preemptions
    begin = time.perf_counter()
    while unfinished or clients.next_step is not None:
        if not unfinished and clients.next_step is not None:
            step = max(step, clients.next_step)
        for client, question in clients.send(step):
            request = _request(engine, f"{len(sent)}", question, "" if kind == FIRST_COME else question.tenant)
            engine.add(request)
            sent.append(_Sent(request, client, step, num_computed))
            unfinished.append(sent[-1])
        engine.step()
        step += 1
        num_computed += engine.last_batch.num_tokens
        for each in list(unfinished):
            each.note_first_token(step, num_computed)
            if each.request.finished:
                unfinished.remove(each)
                clients.answered(each.client, step)
    requests = [each.request for each in sent]
    greedy, modest = (
        [each.wait for each in sent if each.wait is not None and (each.request.namespace == _GREEDY) == is_greedy]
        for is_greedy in (True, False)
    )
    num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    return FairnessRun(
        steps_to_first_token=[wait.steps for wait in modest],
        tokens_to_first_token=[wait.tokens for wait in modest],
        seconds_to_first_token=[wait.seconds for wait in modest],
        greedy_steps_to_first_token=[wait.steps for wait in greedy],
        num_steps=engine.num_steps - num_steps,
        seconds=time.perf_counter() - begin,
        num_tokens=num_prompt_tokens + sum(len(request.sequences[0].output_token_ids) for request in requests),
        hit_rate=sum(request.num_cached_tokens or 0 for request in requests) / num_prompt_tokens,
        num_preemptions=engine.scheduler.num_preemptions - preemptions,
    )


def compare(runs: Mapping[str, Sequence[FairnessRun]]) -> dict[str, float]:
    """The ratios that matter, from the runs of each kind, one per round.

    99th percentiles are those of all rounds together, since one round has few requests; of other ratios, the rounds' median.
    """

    def p99_ratio(figures: Callable[[FairnessRun], Sequence[float]], over: str, under: str) -> float:
        above, below = (p99([value for run in runs[kind] for value in figures(run)]) for kind in (over, under))
        return above / below

    def ratio(figure: Callable[[FairnessRun], float], over: str, under: str) -> float:
        return statistics.median(figure(a) / figure(b) for a, b in zip(runs[over], runs[under], strict=True))

    return {
        "p99_first_token_steps": p99_ratio(lambda run: run.steps_to_first_token, FAIR, ALONE),
        "p99_first_token_tokens": p99_ratio(lambda run: run.tokens_to_first_token, FAIR, ALONE),
        "p99_first_token_seconds": p99_ratio(lambda run: run.seconds_to_first_token, FAIR, ALONE),
        "p99_first_token_steps_first_come": p99_ratio(lambda run: run.steps_to_first_token, FIRST_COME, ALONE),
        "throughput_per_step": ratio(lambda run: run.num_tokens / run.num_steps, FAIR, FIRST_COME),
        "throughput_per_second": ratio(lambda run: run.num_tokens / run.seconds, FAIR, FIRST_COME),
        "hit_rate": ratio(lambda run: run.hit_rate, FAIR, FIRST_COME),
    }


def run_fairness(
    console: Console,
    model: Any | str | None,
    rounds: int,
    json_path: Path | None,
    plot_path: Path | None,
    load: FairnessLoad = _LOAD,
) -> None:
    """Measure the load as it is and in open loop, print both, and write the files that have a path."""
    engine = LLM(model, max_num_seqs=_MAX_NUM_SEQS).engine
    run_load(engine, FairnessLoad(modest_requests=1, greedy_requests=16), FAIR)  # not counted: the first run is slower
    runs = _rounds(engine, console, load, rounds)
    ratios = compare(runs)
    open_load = replace(load, open_loop=True, think_steps=load.think_steps + 2 * load.answer_tokens)
    open_runs = _rounds(engine, console, open_load, rounds)
    open_ratios = compare(open_runs)
    document = {
        "machine": describe_machine("torch", "transformers"),
        "model": engine.loaded.name,
        "max_num_seqs": _MAX_NUM_SEQS,
        "load": asdict(load),
        "ratios": ratios,
        "runs": _as_dicts(runs),
        "open_loop": {"load": asdict(open_load), "ratios": open_ratios, "runs": _as_dicts(open_runs)},
    }
    write_figures(json_path, document)
    if plot_path is not None:
        plot_fairness(runs, plot_path)
    for title, table, lines in (
        ("closed loop", _table(runs), _verdict(ratios)),
        ("open loop", _table(open_runs), _verdict(open_ratios)),
    ):
        console.print(f"\n{title}", table)
        for line in lines:
            console.print(line)


def _rounds(engine: Engine, console: Console, load: FairnessLoad, rounds: int) -> dict[str, list[FairnessRun]]:
    runs: dict[str, list[FairnessRun]] = {ALONE: [], FAIR: [], FIRST_COME: []}
    for number in range(rounds):
        for kind, results in runs.items():
            results.append(run_load(engine, load, kind))
            console.print(f"round {number + 1}, {kind}: {results[-1].seconds:.1f} s, {results[-1].num_steps:,} steps")
    return runs


def _as_dicts(runs: Mapping[str, Sequence[FairnessRun]]) -> dict[str, list[dict[str, Any]]]:
    return {kind: [asdict(run) for run in results] for kind, results in runs.items()}


def plot_fairness(runs: Mapping[str, Sequence[FairnessRun]], path: Path) -> None:
    """Plot the distributions of the modest tenants' waiting times, of all rounds, in steps and in seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for kind, results in runs.items():
        steps = sorted(float(steps) for run in results for steps in run.steps_to_first_token)
        seconds = sorted(seconds for run in results for seconds in run.seconds_to_first_token)
        for axis, ordered in zip(axes, (steps, seconds), strict=True):
            axis.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", label=kind)
    for axis, unit in zip(axes, ("steps", "seconds"), strict=True):
        axis.set(xscale="log", ylim=(0, 1), xlabel=f"{unit} to the first token", ylabel="share of the modest requests")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Three modest tenants beside a greedy one")
    figure.savefig(path, dpi=110)


def _questions(load: FairnessLoad, vocab_size: int) -> list[list[_Question]]:
    """Each client's questions, in order; the greedy tenant has a client for each of its requests."""
    rng = random.Random(load.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    def up_to(most: int) -> int:
        return rng.randint(max(1, most // 2), most)

    def question(tenant: str, stem: list[int], think_steps: float) -> _Question:
        pause = int(rng.expovariate(1 / think_steps)) if think_steps else 0
        return _Question(tenant, pause, stem + tokens(up_to(load.own_tokens)), up_to(load.answer_tokens))

    stem = tokens(load.stem_tokens)
    clients = [[question(_GREEDY, stem, 0.0)] for _ in range(load.greedy_requests)]
    for number in range(load.modest_tenants):
        stem = tokens(load.stem_tokens)
        for _ in range(load.modest_clients):
            clients.append(
                [question(f"modest {number + 1}", stem, load.think_steps) for _ in range(load.modest_requests)]
            )
    return clients


def _request(engine: Engine, name: str, question: _Question, tenant: str) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=question.answer_tokens, ignore_eos=True)
    # Each tenant's prompts are cached apart from the others' in all runs.
    return engine.request_factory.make(name, Prompt(question.prompt, namespace=question.tenant), params, tenant=tenant)


def _table(runs: Mapping[str, Sequence[FairnessRun]]) -> Table:
    table = figure_table(
        "",
        "median steps",
        "p99 steps",
        "p99 tokens",
        "median ms",
        "p99 ms",
        "tokens/step",
        "tokens/s",
        "reused",
        "preempted",
        title="modest tenants: time to the first token",
    )
    for kind, results in runs.items():
        run = results[0]
        table.add_row(
            kind,
            f"{np.median(run.steps_to_first_token):.1f}",
            f"{p99(run.steps_to_first_token):.1f}",
            f"{p99(run.tokens_to_first_token):,.0f}",
            f"{statistics.median([float(np.median(result.seconds_to_first_token)) for result in results]) * 1e3:,.0f}",
            f"{statistics.median([p99(result.seconds_to_first_token) for result in results]) * 1e3:,.0f}",
            f"{run.num_tokens / run.num_steps:.1f}",
            f"{statistics.median([result.num_tokens / result.seconds for result in results]):,.0f}",
            f"{run.hit_rate:.1%}",
            f"{run.num_preemptions}",
        )
    return table


def _verdict(ratios: Mapping[str, float]) -> list[str]:
    return [
        f"p99 to the first token beside the greedy tenant: {ratios['p99_first_token_steps']:.2f} of that without it in "
        f"steps, {ratios['p99_first_token_tokens']:.2f} in tokens computed meanwhile, "
        f"{ratios['p99_first_token_seconds']:.2f} in seconds (wanted: at most 1.5); first come, first served: "
        f"{ratios['p99_first_token_steps_first_come']:.1f} in steps",
        f"throughput over that of first come, first served: {ratios['throughput_per_step']:.3f} per step, "
        f"{ratios['throughput_per_second']:.3f} per second (wanted: at least 0.95)",
        f"share of reused tokens over that of first come, first served: {ratios['hit_rate']:.3f} (wanted: at least 0.97)",
    ]
