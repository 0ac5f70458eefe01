"""`radixkv bench chaos`: streams while replicas are killed, the ingress is killed, and the ingress' index is lost.

Each request is answered twice: undisturbed, and while a random replica is killed every few seconds and restarted. Every
stream must complete with the same text. When the ingress is killed, its clients get connection errors and send their requests
again; the replicas report to the new ingress what they hold.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from rich.console import Console

from radixkv.bench.cluster.replica_process import cluster
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.words import WORDS
from radixkv.bench.serving.client import stream_events
from radixkv.bench.serving.server_process import BenchProcess

_SCHEMA = MappingProxyType({"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 12})
_KINDS: Sequence[tuple[str, dict[str, Any]]] = (
    ("greedy", {"temperature": 0}),
    ("sampled", {"seed": 11}),
    ("schema", {"seed": 12, "structured_outputs": {"json": dict(_SCHEMA)}}),
    ("stop", {"seed": 13, "stop": ["the", "you"], "min_tokens": 16}),
)


@dataclass(slots=True)
class ChaosReport:
    """What happened.

    Attributes:
        streams: how many were requested.
        equal: how many completed with the text of the undisturbed run.
        different: those that completed with another text.
        failed: why the others did not complete, by stream number.
        kills: how many times a replica was killed.
        ingress_errors: clients that repeated their request because the connection broke while the ingress was down. At any
            other time, a broken connection is a failed stream.
        seconds: duration of the run with kills.
        seconds_until_known: from the end of the ingress until another one was up and knew what the replicas hold.
    """

    streams: int
    equal: int = 0
    different: list[str] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    kills: int = 0
    ingress_errors: int = 0
    seconds: float = 0.0
    seconds_until_known: float = 0.0


class _Chaos:
    def __init__(
        self,
        replicas: dict[str, BenchProcess],
        ingress: BenchProcess,
        seconds_between_kills: float,
        answer_tokens: int,
        seed: int,
    ) -> None:
        self._replicas = replicas
        self._ingress = ingress
        self._seconds = seconds_between_kills
        self._answer_tokens = answer_tokens
        self._random = random.Random(seed)
        self._ingress_is_gone_until = -math.inf
        self.report = ChaosReport(0)

    async def kill_replicas(self) -> None:
        """Kill random replicas until cancelled, and restart each at once; the only one that is up is spared.

        Raises:
            ValueError: a replica did not start again.
        """
        restarting: dict[str, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._seconds)
            for name, task in list(restarting.items()):
                if task.done():
                    del restarting[name]
                    task.result()
            up = [name for name in self._replicas if name not in restarting]
            if len(up) < 2:
                continue
            name = self._random.choice(up)
            self.report.kills += 1
            await asyncio.to_thread(self._replicas[name].kill)
            restarting[name] = asyncio.create_task(self._restart(self._replicas[name]))

    async def kill_ingress(self) -> None:
        """Kill the ingress once, and start another one.

        Raises:
            ValueError: it did not start again.
        """
        self._ingress_is_gone_until = math.inf
        await asyncio.to_thread(self._ingress.kill)
        began = time.monotonic()
        try:
            await self._restart(self._ingress)
        finally:  # even if it did not start: clients would send their requests again for ever
            self._ingress_is_gone_until = time.monotonic()
        self.report.seconds_until_known = self._ingress_is_gone_until - began

    @staticmethod
    async def _restart(process: BenchProcess) -> None:
        process.start()
        await asyncio.to_thread(process.wait_until_up)

    async def answer(self, number: int) -> str:
        """The text of one stream; a client whose connection breaks because the ingress is gone sends its request again."""
        _, options = _KINDS[number % len(_KINDS)]
        words = random.Random(number % 10)  # ten different beginnings
        prompt = " ".join([*words.choices(WORDS, k=120), f"Number {number}:"])
        body = {"prompt": prompt, "max_tokens": self._answer_tokens, "ignore_eos": True, "stream": True, **options}
        is_first = True
        while True:
            began = time.monotonic()
            try:
                return await self._stream(body)
            except httpx.TransportError:
                if began > self._ingress_is_gone_until:
                    raise
                self.report.ingress_errors += is_first
                is_first = False
                await asyncio.sleep(2.0)

    async def _stream(self, body: dict[str, Any]) -> str:
        text = ""
        async with (
            httpx.AsyncClient(base_url=self._ingress.address, timeout=600.0) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"{response.status_code} {(await response.aread()).decode()[:200]}")
            complete = False
            async for event in stream_events(response):
                if "error" in event:
                    raise ValueError(str(event["error"]))
                for choice in event["choices"]:
                    text += choice["text"]
                    complete = choice.get("finish_reason") is not None
            if not complete:
                raise httpx.ReadError("the stream broke off")
        return text

    async def answer_all(self, count: int, concurrency: int) -> list[str | Exception]:
        """The texts of all streams, or why there is none."""
        limit = asyncio.Semaphore(concurrency)

        async def one(number: int) -> str | Exception:
            async with limit:
                try:
                    return await self.answer(number)
                except (httpx.TransportError, ValueError) as error:
                    return error

        return await asyncio.gather(*(one(number) for number in range(count)))


def run_chaos(
    console: Console,
    model: str | None,
    *,
    num_replicas: int,
    streams: int,
    concurrency: int,
    seconds_between_kills: float,
    answer_tokens: int,
    seed: int,
    json_path: Path | None,
) -> bool:
    """Run it, and print what happened.

    Args:
        model: to serve; None: the default one.
        num_replicas: how many.
        streams: requests in all.
        concurrency: streams at a time.
        seconds_between_kills: on average.
        answer_tokens: maximum length of an answer.
        seed: decides which replica is killed when.
        json_path: where to write the figures, too.

    Returns:
        Whether a replica was killed, and every stream completed with the text of the undisturbed run.

    Raises:
        ValueError: a process did not start.
    """
    with cluster(num_replicas, model, "--dtype", "float32") as (replicas, ingress):
        chaos = _Chaos(replicas, ingress, seconds_between_kills, answer_tokens, seed)

        async def main() -> None:
            expected = await chaos.answer_all(streams, concurrency)
            console.print(f"{streams} streams undisturbed")
            began = time.monotonic()
            killing = asyncio.create_task(chaos.kill_replicas())
            ingress_killed = asyncio.create_task(_after(0.5 * seconds_between_kills, chaos.kill_ingress()))
            got = await chaos.answer_all(streams, concurrency)
            await ingress_killed
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing  # raises why it ended before
            chaos.report.seconds = time.monotonic() - began
            _compare(chaos.report, expected, got)

        asyncio.run(main())
    report = chaos.report
    console.print(
        f"{report.equal} of {report.streams} equal, {len(report.different)} different, {len(report.failed)} failed; "
        f"{report.kills} replicas killed in {report.seconds:.0f} s; ingress killed once: {report.ingress_errors} "
        f"connections broke and were retried, the new one was up after {report.seconds_until_known:.1f} s"
    )
    for line in [*report.different, *(f"{number}: {why}" for number, why in report.failed.items())][:10]:
        console.print(line)
    if not report.kills:
        console.print(
            "no replica was killed before the last stream ended: more streams or fewer seconds between kills are needed"
        )
    write_figures(json_path, {"machine": describe_machine("torch", "transformers"), **asdict(report)})
    return report.kills > 0 and report.equal == report.streams


async def _after(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    await asyncio.sleep(seconds)
    await work


def _compare(report: ChaosReport, expected: Sequence[str | Exception], got: Sequence[str | Exception]) -> None:
    report.streams = len(expected)
    for number, (right, text) in enumerate(zip(expected, got, strict=True)):
        if isinstance(text, Exception) or isinstance(right, Exception):
            report.failed[number] = repr(text if isinstance(text, Exception) else right)
        elif text == right:
            report.equal += 1
        else:
            report.different.append(f"{number} {_KINDS[number % len(_KINDS)][0]}: {right!r} became {text!r}")
