"""When requests are sent: at a rate (open loop), a number at a time (closed loop), or one after another for a while."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence

from radixkv.bench.serving.client import Answer, Client, Messages
from radixkv.bench.serving.workload import Conversation

OnAnswer = Callable[[Answer], None]


async def run_open_loop(
    client: Client,
    conversations: Sequence[Conversation],
    max_tokens: int,
    rate: float,
    seed: int,
    on_answer: OnAnswer,
) -> None:
    """Start ``rate`` conversations per second on average, as a Poisson process, like many independent users.

    No conversation waits for another: a server that cannot keep up has higher latencies.
    """
    rng = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for conversation in conversations:
            due += rng.expovariate(rate)
            await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(converse(client, conversation, max_tokens, due, on_answer))


async def run_closed_loop(
    client: Client,
    conversations: Sequence[Conversation],
    max_tokens: int,
    concurrency: int,
    on_answer: OnAnswer,
) -> None:
    """Keep ``concurrency`` conversations in progress until all are done."""
    pending: Iterator[Conversation] = iter(conversations)

    async def worker() -> None:
        for conversation in pending:
            await converse(client, conversation, max_tokens, time.perf_counter(), on_answer)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(conversations))):
            tasks.create_task(worker())


def rounds_until(end: float) -> Iterator[None]:
    """Rounds of a loop that begin before ``end``, by `time.perf_counter`, and at least one."""
    while True:
        yield
        if time.perf_counter() >= end:
            return


async def converse(
    client: Client, conversation: Conversation, max_tokens: int, due: float, on_answer: OnAnswer
) -> None:
    """Send one question after the other, each with all messages before it. A failed request ends the conversation."""
    messages: Messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        answer = await client.answer(list(messages), max_tokens, due)
        on_answer(answer)
        if answer.error is not None:
            return
        messages.append({"role": "assistant", "content": answer.text})
        due = time.perf_counter()
