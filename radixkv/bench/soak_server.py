"""`radixkv bench soak-server`: hostile clients beside normal ones on a real server, and what the normal ones notice.

Every hostile client repeats attacks at random; see `soak_server_hostile`. Every normal client repeats one question, to which
the answer is known from before: another answer, an error, or a long wait is a failure, and so is a server whose health
check stalls, whose memory grows, or whose cache has broken a rule at the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from radixkv.bench.machine import describe_machine
from radixkv.bench.serve_client import Answer, HttpClient, Messages
from radixkv.bench.server_process import server_process
from radixkv.bench.soak_server_hostile import HostileClient

_QUESTIONS = ("What is a tree?", "Name three colours.", "Why is the sky blue?")
_NUM_HOSTILE = 6
_MAX_TOKENS = 24
# Of the median of the last quarter to that of the second: the first one fills the cache.
_MAX_GROWTH = 1.1
# Few blocks: they are soon written once, and then all their memory is there.
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
        failures: what they, the health check or the server's own checks found.
        waits: seconds to the first token of every normal answer.
        stalls: seconds that every health check took.
        attacks: by name and how they were answered.
        rss: megabytes of the server, once a second.
    """

    answered: int = 0
    failures: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)
    rss: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """The server under attack, with keys for three."""

    url: str
    pid: int
    normal_key: str
    hostile_key: str
    admin_key: str


async def soak(
    target: Target, seconds: float, seed: int, max_wait: float, max_stall: float, patience: float = 30.0
) -> ServerSoak:
    """Attack a server that does nothing else; every client acts at least once.

    Args:
        patience: see `HostileClient`.
        max_wait: seconds that the first token of a normal answer may take.
        max_stall: seconds that a health check may take.
    """
    result = ServerSoak()
    async with (
        HttpClient(target.url, api_key=target.normal_key) as normal,
        _client(target.url, target.hostile_key) as hostile,
    ):
        expected = {question: (await _ask(normal, question)).text for question in _QUESTIONS}
        end = time.perf_counter() + seconds
        rngs = [random.Random(f"{seed}/{number}") for number in range(_NUM_HOSTILE)]
        await asyncio.gather(
            *(_ask_again(normal, question, expected[question], end, max_wait, result) for question in _QUESTIONS),
            *(_attack(HostileClient(hostile, rng, patience), rng, end, result) for rng in rngs),
            _watch(target, end, max_stall, result),
        )
    async with _client(target.url, target.admin_key) as admin:
        response = await admin.post("/admin/check")
        if response.status_code != httpx.codes.OK:
            result.failures.append(f"the cache: {response.text}")
    quarter = len(result.rss) // 4
    if quarter and statistics.median(result.rss[-quarter:]) > _MAX_GROWTH * statistics.median(
        result.rss[quarter : 2 * quarter]
    ):
        result.failures.append(f"memory grows: {[*map(round, result.rss[:: max(1, quarter // 4)])]} MB")
    return result


def run_soak_server(
    console: Console, minutes: float, seed: int, max_wait: float, max_stall: float, json_path: Path | None
) -> bool:
    """Start a server, attack it and report; False: something failed."""
    keys = [secrets.token_urlsafe() for _ in range(3)]
    normal_key, hostile_key, admin_key = keys
    arguments = ["--api-key", normal_key, "--api-key", hostile_key, "--admin-key", admin_key, *_SERVER_OPTIONS]
    with server_process(*arguments) as server:
        target = Target(server.address, server.pid, *keys)
        with console.status(f"attacking {target.url}"):
            result = asyncio.run(soak(target, 60 * minutes, seed, max_wait, max_stall))
    for name, count in sorted(result.attacks.items()):
        console.print(f"{count:7,}  {name}")
    waits, stalls = sorted(result.waits), sorted(result.stalls)
    console.print(
        f"{result.answered:,} normal answers; first token after {statistics.median(waits):.2f} s (median), "
        f"{waits[int(0.99 * len(waits))]:.2f} s (p99), {waits[-1]:.2f} s at most; health check {stalls[-1]:.2f} s at most; "
        f"memory {min(result.rss):.0f} to {max(result.rss):.0f} MB"
    )
    for failure in result.failures:
        console.print(f"[red]{failure}")
    if json_path is not None:
        figures = {**vars(result), "attacks": dict(result.attacks)}
        document = {**describe_machine("torch", "radixkv"), "minutes": minutes, "seed": seed, **figures}
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    return not result.failures


async def _ask_again(
    client: HttpClient, question: str, expected: str, end: float, max_wait: float, result: ServerSoak
) -> None:
    over = False
    while not over:
        answer = await _ask(client, question)
        wait = (answer.arrivals[0] if answer.arrivals else answer.finished) - answer.due
        result.answered += 1
        result.waits.append(wait)
        if answer.error is not None or answer.text != expected:
            result.failures.append(f"{question} {answer.error or answer.text!r}")
        elif wait > max_wait:
            result.failures.append(f"{question} The first token took {wait:.1f} s")
        over = time.perf_counter() >= end


async def _ask(client: HttpClient, question: str) -> Answer:
    messages: Messages = [{"role": "user", "content": question}]
    return await client.answer(messages, _MAX_TOKENS, time.perf_counter())


async def _attack(client: HostileClient, rng: random.Random, end: float, result: ServerSoak) -> None:
    over = False
    while not over:
        name, attack = rng.choice([*client.attacks.items()])
        try:
            outcome = await attack()
        except (httpx.HTTPError, OSError) as error:
            outcome = type(error).__name__
        result.attacks[f"{name}: {outcome}"] += 1
        if outcome == "500":
            result.failures.append(f"{name}: {outcome}")
        over = time.perf_counter() >= end


async def _watch(target: Target, end: float, max_stall: float, result: ServerSoak) -> None:
    async with httpx.AsyncClient(base_url=target.url, timeout=600) as client:
        while True:
            began = time.perf_counter()
            response = await client.get("/health")
            stall = time.perf_counter() - began
            result.stalls.append(stall)
            if response.status_code != httpx.codes.OK or stall > max_stall:
                result.failures.append(f"/health: {response.status_code} after {stall:.2f} s")
            result.rss.append(_resident_megabytes(target.pid))
            if time.perf_counter() > end:
                return
            await asyncio.sleep(1)


def _client(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600, limits=limits)


def _resident_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))
