"""Time to first token of one request at a time beside other streams: what a path adds, apart from queueing.

Where many requests arrive at once, the last of them waits until all others have been read, forwarded and computed, and its
time to first token is mostly this wait. Here answers begin and end at different times, as those of independent users do, and
one more client requests two tokens again and again.
"""

from __future__ import annotations

import asyncio
import time

from radixkv.bench.serving.client import Client
from radixkv.bench.serving.workload import Conversation, LoadShape, make_conversations


async def first_tokens_beside(client: Client, streams: int, probes: int, seed: int) -> list[float]:
    """Seconds to the first token of each of ``probes`` requests beside others.

    Args:
        client: of the server.
        streams: number of other answers in progress at all times.
        probes: number of requests for two tokens, sent one after the other.
        seed: of the texts; with a new seed, only the chat template is cached.

    Raises:
        ValueError: a request failed.
    """
    shape = LoadShape(streams + 1, turns=probes, prefix_tokens=100, prompt_tokens=30, seed=seed)
    *others, probed = make_conversations(shape)
    first_tokens: list[float] = []

    async def seconds_to_first_token(conversation: Conversation, question: str, max_tokens: int) -> float:
        messages = [{"role": "system", "content": conversation.system}, {"role": "user", "content": question}]
        due = time.perf_counter()
        answer = await client.answer(messages, max_tokens, due)
        if answer.error is not None or not answer.arrivals:
            raise ValueError(f"a request beside streams failed: {answer.error or 'its answer is empty'}")
        return answer.arrivals[0] - due

    async def converse(conversation: Conversation, length_of_first: int) -> None:
        max_tokens = length_of_first  # differs between streams, so that from here on they end at different times
        for question in conversation.questions:
            await seconds_to_first_token(conversation, question, max_tokens)
            max_tokens = shape.answer_tokens

    background = [
        asyncio.create_task(converse(conversation, 1 + shape.answer_tokens * (number + 1) // streams))
        for number, conversation in enumerate(others)
    ]
    try:
        for question in probed.questions:
            first_tokens.append(await seconds_to_first_token(probed, question, 2))
            for task in background:
                if task.done():
                    task.result()
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
    return first_tokens
