"""`radixkv bench soak-server`: hostile clients beside normal ones on a real server, and what the normal ones notice.

Every hostile client repeats attacks at random; see `hostile`. Every normal client repeats one question whose answer is known
beforehand: another answer, an error, or a long wait is a failure. So is an attack that is answered with status 500, and a
server whose health check fails or stalls, whose cache has broken a rule at the end, or of which anything grows that should
not: its memory, its open files, its metrics, or its log.

Durations are counted in the server's processor time, and their bounds in full steps of the same server,
measured before, so they are the same on a slow or a busy machine. A first token may wait for the end of a step, and for one
or two that it shares with others: 1.7 full steps were measured, and 4 are allowed. /health waits for the event loop only:
0.2 full steps were measured, and 1 is allowed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import httpx
from rich.console import Console

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.percentiles import p99
from radixkv.bench.common.process import TICK, num_open_files, processor_seconds, resident_megabytes
from radixkv.bench.serving.client import Answer, HttpClient, Messages, open_http
from radixkv.bench.serving.hostile import HostileClient, outcome_of
from radixkv.bench.serving.pacing import rounds_until
from radixkv.bench.serving.server_process import server_process

_QUESTIONS = ("What is a tree?", "Name three colours.", "Why is the sky blue?")
_NUM_HOSTILE = 6
_MAX_TOKENS = 24
# How many full steps are measured: each of one prompt that fills it, the longest that a newcomer waits on an idle server.
_NUM_FULL_STEPS = 5
# With the chat template around so many words, more tokens than a step takes.
_FULL_STEP_WORDS = 512
# Full steps to the first token of 99 % of the normal answers, and of a health check, at most.
_MAX_WAIT, _MAX_STALL = 4.0, 1.0
# From the second quarter of the run, since the cache fills in the first one, to the last, medians may grow by a tenth, and by
# this much: the connections of a burst, metrics of errors that occur late, and some warnings.
_MAX_GROWTH = 1.1
_SLACK = MappingProxyType({"rss": 0, "open_files": 40, "metrics": 40, "log_bytes": 10_000})
# Few blocks: all are soon written once, and from then on their memory is resident.
_SERVER_OPTIONS = (
    "--num-blocks",
    "600",
    "--dtype",
    "float32",
    "--receive-timeout",
    "10",
    "--send-timeout",
    "10",
    "--access-log",
    "/dev/null",
)


@dataclass
class ServerSoak:
    """What happened.

    Attributes:
        answered: questions of normal clients.
        failures: all that went wrong, in words.
        full_step: time of a prompt that fills a step, with no other request; this, ``waits`` and ``stalls`` are in seconds of
            the server's processor time.
        waits: for the first token of every normal answer.
        stalls: of every health check.
        attacks: counts by name and outcome.
        rss: megabytes of the server, once a second, as what follows.
        open_files: of the server, sockets included.
        metrics: samples at /metrics.
        log_bytes: size of the server's log, without a line for each request.
    """

    answered: int = 0
    failures: list[str] = field(default_factory=list)
    full_step: float = 0.0
    waits: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)
    rss: list[float] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)
    metrics: list[int] = field(default_factory=list)
    log_bytes: list[int] = field(default_factory=list)

    def growth(self) -> Iterator[str]:
        """What has grown by more than it may, in words."""
        for name, slack in _SLACK.items():
            values: Sequence[float] = getattr(self, name)
            quarter = len(values) // 4
            if not quarter:
                continue
            second, last = (statistics.median(part) for part in (values[quarter:][:quarter], values[-quarter:]))
            if last > _MAX_GROWTH * second + slack:
                yield f"{name} grows: {[*map(round, values[:: max(1, quarter // 4)])]}"


@dataclass(frozen=True)
class Target:
    """The server under attack, its log, and three keys to it."""

    url: str
    pid: int
    log: Path
    normal_key: str
    hostile_key: str
    admin_key: str


async def soak(
    target: Target, seconds: float, seed: int, max_wait: float, max_stall: float, patience: float = 30.0
) -> ServerSoak:
    """Attack an otherwise idle server; every client acts at least once.

    Args:
        patience: see `HostileClient`.
        max_wait: full steps that the first token of 99 % of the normal answers may take.
        max_stall: full steps that a health check may take.
    """
    result = ServerSoak()
    clock = partial(processor_seconds, target.pid)
    async with (
        HttpClient(target.url, api_key=target.normal_key, clock=clock) as normal,
        open_http(target.url, target.hostile_key) as hostile,
    ):
        expected = {question: (await _ask(normal, question, clock)).text for question in _QUESTIONS}
        result.full_step = await _full_step(normal, clock, seed)
        end = time.perf_counter() + seconds
        rngs = [random.Random(f"{seed}/{number}") for number in range(_NUM_HOSTILE)]
        await asyncio.gather(
            *(_ask_again(normal, clock, question, expected[question], end, result) for question in _QUESTIONS),
            *(_attack(HostileClient(hostile, rng, patience), rng, end, result) for rng in rngs),
            _watch(target, clock, end, result),
        )
    async with open_http(target.url, target.admin_key) as admin:
        response = await admin.post("/admin/check")
        if response.status_code != httpx.codes.OK:
            result.failures.append(f"the cache: {response.text}")
    for what, longest, bound in (
        ("the first token", p99(result.waits), max_wait),
        ("/health", max(result.stalls), max_stall),
    ):
        if longest > bound * result.full_step:
            result.failures.append(
                f"{what} took {longest:.2f} s of the server's processor time, {longest / result.full_step:.1f} full steps"
            )
    result.failures += result.growth()
    return result


def run_soak_server(console: Console, minutes: float, seed: int, json_path: Path | None) -> bool:
    """Start a server, attack it and report; False: something failed."""
    keys = [secrets.token_urlsafe() for _ in range(3)]
    normal_key, hostile_key, admin_key = keys
    environment = {"RADIXKV_API_KEYS": f"{normal_key} {hostile_key}", "RADIXKV_ADMIN_KEY": admin_key}
    with (
        TemporaryDirectory() as folder,
        server_process(*_SERVER_OPTIONS, environment=environment, log=Path(folder) / "log") as server,
    ):
        target = Target(server.address, server.pid, Path(folder) / "log", *keys)
        with console.status(f"attacking {target.url}"):
            result = asyncio.run(soak(target, 60 * minutes, seed, _MAX_WAIT, _MAX_STALL))
    for name, count in sorted(result.attacks.items()):
        console.print(f"{count:7,}  {name}")
    waits, stalls = result.waits, result.stalls
    console.print(
        f"{result.answered:,} normal answers. In seconds of the server's processor time: a full step {result.full_step:.2f}; "
        f"first token {statistics.median(waits):.2f} (median), {p99(waits):.2f} (p99), {max(waits):.2f} at most; health "
        f"check {max(stalls):.2f} at most. Memory {min(result.rss):.0f} to {max(result.rss):.0f} MB, "
        f"{min(result.open_files)} to {max(result.open_files)} open files, {min(result.metrics)} to {max(result.metrics)} "
        f"metrics, {max(result.log_bytes):,} bytes of log"
    )
    for failure in result.failures:
        console.print(failure, style="red")
    figures = {**vars(result), "attacks": dict(result.attacks)}
    document = {"machine": describe_machine("torch", "radixkv"), "minutes": minutes, "seed": seed, **figures}
    write_figures(json_path, document)
    return not result.failures


async def _full_step(client: HttpClient, clock: Callable[[], float], seed: int) -> float:
    """The median of what the server computes for a prompt that fills a step and is not cached; at least a tick."""
    rng = random.Random(seed)
    took = []
    for _ in range(_NUM_FULL_STEPS):
        words = " ".join(rng.choice(("tree", "sky", "red", "green", "blue", "leaf")) for _ in range(_FULL_STEP_WORDS))
        answer = await client.answer([{"role": "user", "content": words}], 1, clock())
        took.append(answer.finished - answer.due)
    return max(TICK, statistics.median(took))


async def _ask_again(
    client: HttpClient, clock: Callable[[], float], question: str, expected: str, end: float, result: ServerSoak
) -> None:
    for _ in rounds_until(end):
        answer = await _ask(client, question, clock)
        result.answered += 1
        result.waits.append((answer.arrivals[0] if answer.arrivals else answer.finished) - answer.due)
        if answer.error is not None or answer.text != expected:
            result.failures.append(f"{question} {answer.error or answer.text!r}")


async def _ask(client: HttpClient, question: str, clock: Callable[[], float]) -> Answer:
    messages: Messages = [{"role": "user", "content": question}]
    return await client.answer(messages, _MAX_TOKENS, clock())


async def _attack(client: HostileClient, rng: random.Random, end: float, result: ServerSoak) -> None:
    for _ in rounds_until(end):
        name, attack = rng.choice([*client.attacks.items()])
        outcome = await outcome_of(attack)
        result.attacks[f"{name}: {outcome}"] += 1
        if outcome == "500":
            result.failures.append(f"{name}: {outcome}")


async def _watch(target: Target, clock: Callable[[], float], end: float, result: ServerSoak) -> None:
    async with open_http(target.url) as client, open_http(target.url, target.admin_key) as admin:
        for _ in rounds_until(end):
            began = clock()
            response = await client.get("/health")
            result.stalls.append(clock() - began)
            if response.status_code != httpx.codes.OK:
                result.failures.append(f"/health: {response.status_code}")
            metrics = await admin.get("/metrics")
            result.metrics.append(sum(not line.startswith("#") for line in metrics.text.splitlines()))
            result.rss.append(resident_megabytes(target.pid))
            result.open_files.append(num_open_files(target.pid))
            result.log_bytes.append(target.log.stat().st_size)
            await asyncio.sleep(1)
