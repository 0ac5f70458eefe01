"""`radixkv bench attacks`: what each way of attacking a server costs its other users.

One hostile client repeats one attack of `hostile`, then the next one. Meanwhile a normal client with another key asks the
same question again and again, and /health is requested: the longest waits count. Given the folder of another version, the
same is done to its server.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.bench.serving.client import HttpClient, open_http
from radixkv.bench.serving.hostile import HostileClient, outcome_of
from radixkv.bench.serving.pacing import rounds_until
from radixkv.bench.serving.server_process import server_process

THIS, OTHER = "this version", "the other version"
_NOBODY = "nobody attacks"
_QUESTION = ({"role": "user", "content": "Why is the sky blue?"},)
_MAX_TOKENS = 24
_HEALTH_INTERVAL = 0.05
_SERVER_OPTIONS = ("--num-blocks", "600", "--max-num-seqs", "8", "--dtype", "float32")


@dataclass
class AttackCost:
    """What others noticed of an attack; each time is the longest one, in seconds.

    Attributes:
        attack: its name.
        outcomes: how it was answered, and how often.
        first_token: of a normal answer.
        gap: between two pieces of a normal answer.
        health: of a health check.
        failed: normal answers that were refused or broken off.
    """

    attack: str
    outcomes: dict[str, int] = field(default_factory=dict)
    first_token: float = 0.0
    gap: float = 0.0
    health: float = 0.0
    failed: int = 0


async def measure_attacks(
    url: str, normal_key: str, hostile_key: str, seconds: float, seed: int = 0
) -> list[AttackCost]:
    """Attack an otherwise idle server in every way, after a round without any attack; returns what each has cost.

    Args:
        seconds: for each attack; at least one attack, one normal answer and one health check are completed.
    """
    costs = []
    async with (
        HttpClient(url, api_key=normal_key) as normal,
        open_http(url) as anyone,
        open_http(url, hostile_key) as hostile,
    ):
        client = HostileClient(hostile, random.Random(seed), seconds)
        for name, attack in [(_NOBODY, None), *client.attacks.items()]:
            await normal.answer([*_QUESTION], _MAX_TOKENS, 0.0)  # waits for what is left of the attack before
            cost = AttackCost(name)
            end = time.perf_counter() + seconds
            attackers = [] if attack is None else [_attack(attack, end, cost)]
            await asyncio.gather(*attackers, _ask(normal, end, cost), _check_health(anyone, end, cost))
            costs.append(cost)
    return costs


def run_attacks(console: Console, seconds: float, seed: int, checkout: Path | None, json_path: Path | None) -> None:
    """Start a server, attack it, and report.

    Args:
        checkout: folder of another version, whose server is attacked, too.
    """
    costs: dict[str, list[AttackCost]] = {}
    sources = {THIS: None, **({} if checkout is None else {OTHER: checkout})}
    for version, source in sources.items():
        normal, hostile = (secrets.token_urlsafe() for _ in range(2))
        environment = {"RADIXKV_API_KEYS": f"{normal} {hostile}"}
        if source is not None:
            environment["PYTHONPATH"] = f"{source.resolve() / 'kernels'}"
        with (
            server_process(*_SERVER_OPTIONS, environment=environment, folder=source) as server,
            console.status(f"attacking {version}"),
        ):
            costs[version] = asyncio.run(measure_attacks(server.address, normal, hostile, seconds, seed))
        console.print(_table(version, costs[version]))
    rows = {version: [asdict(cost) for cost in each] for version, each in costs.items()}
    document = {"machine": describe_machine("torch", "radixkv"), "seconds": seconds, "seed": seed, "costs": rows}
    write_figures(json_path, document)


async def _attack(attack: Callable[[], Awaitable[str]], end: float, cost: AttackCost) -> None:
    for _ in rounds_until(end):
        outcome = await outcome_of(attack)
        cost.outcomes[outcome] = cost.outcomes.get(outcome, 0) + 1


async def _ask(client: HttpClient, end: float, cost: AttackCost) -> None:
    for _ in rounds_until(end):
        began = time.perf_counter()
        answer = await client.answer([*_QUESTION], _MAX_TOKENS, began)
        if answer.error is None:
            first = answer.arrivals[0] if answer.arrivals else answer.finished
            cost.first_token = max(cost.first_token, first - began)
            gaps = [later - earlier for earlier, later in itertools.pairwise(answer.arrivals)]
            cost.gap = max([cost.gap, *gaps])
        else:
            cost.failed += 1


async def _check_health(client: httpx.AsyncClient, end: float, cost: AttackCost) -> None:
    for _ in rounds_until(end):
        began = time.perf_counter()
        await client.get("/health")
        cost.health = max(cost.health, time.perf_counter() - began)
        await asyncio.sleep(_HEALTH_INTERVAL)


def _table(version: str, costs: list[AttackCost]) -> Table:
    columns = ("attack", "answered", "first token", "token gap", "/health", "failed")
    table = figure_table(*columns, title=f"{version}: the longest that others wait, in seconds", num_labels=2)
    for cost in costs:
        outcomes = ", ".join(f"{outcome} x {count}" for outcome, count in sorted(cost.outcomes.items()))
        times = (f"{seconds:.2f}" for seconds in (cost.first_token, cost.gap, cost.health))
        table.add_row(cost.attack, outcomes, *times, f"{cost.failed}")
    return table
