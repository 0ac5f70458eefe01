"""When requests are sent: at a rate, however long answers take, or so many at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence

from radixkv.bench.serve_client import Answer, Answering, Messages
from radixkv.bench.serve_workload import Conversation

OnAnswer = Callable[[Answer], None]


async def send_at_rate(
    client: Answering,
    conversations: Sequence[Conversation],
    max_tokens: int,
    rate: float,
    seed: int,
    on_answer: OnAnswer,
) -> None:
    """Begin ``rate`` conversations a second on average, at random moments (a Poisson process), as many users would.

    Nobody waits for anybody: a server that cannot keep up shows it by its latencies.
    """
    rng = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for conversation in conversations:
            due += rng.expovariate(rate)
            await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(converse(client, conversation, max_tokens, due, on_answer))


async def send_at_once(
    client: Answering,
    conversations: Sequence[Conversation],
    max_tokens: int,
    concurrency: int,
    on_answer: OnAnswer,
) -> None:
    """Have ``concurrency`` conversations going all the time, as long as there are any."""
    waiting: Iterator[Conversation] = iter(conversations)

    async def user() -> None:
        for conversation in waiting:
            await converse(client, conversation, max_tokens, time.perf_counter(), on_answer)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(conversations))):
            tasks.create_task(user())


async def converse(
    client: Answering, conversation: Conversation, max_tokens: int, due: float, on_answer: OnAnswer
) -> None:
    """Ask one question after the other, each with all that was said before. A refusal ends the conversation."""
    messages: Messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        answer = await client.answer(list(messages), max_tokens, due)
        on_answer(answer)
        if answer.error is not None:
            return
        messages.append({"role": "assistant", "content": answer.text})
        due = time.perf_counter()
