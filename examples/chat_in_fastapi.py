"""Conversations inside your own FastAPI application; they share the blocks of all prefixes that they have in common.

Serve it with `uvicorn chat_in_fastapi:app` from this folder; run as a program, it sends some messages to itself.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import Body, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from radixkv import AsyncChat, AsyncLLM, SamplingParams
from radixkv.errors import QueueFullError

llm = AsyncLLM(max_queue=64)
chats: dict[str, AsyncChat] = {}
turns: dict[str, asyncio.Lock] = {}  # a conversation takes one message at a time


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Stop the engine when the application ends."""
    async with llm:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/chats/{name}")
async def say(name: str, text: str = Body(embed=True)) -> StreamingResponse:
    """Send a message to a conversation, which begins with its first one; the answer is streamed.

    Answers to different conversations are computed together. A turn whose client disconnects is aborted and left out.
    Errors of a request, such as a message that is too long, are raised before its first piece, so they can set the status.
    """
    chat = chats.setdefault(
        name, AsyncChat(llm, "You are the assistant of a small library.", SamplingParams(temperature=0, max_tokens=40))
    )
    turn = turns.setdefault(name, asyncio.Lock())

    async def answer() -> AsyncGenerator[str, None]:
        async with turn, aclosing(chat.stream(text)) as pieces:
            async for piece in pieces:
                yield piece

    pieces = answer()
    try:
        first = await anext(pieces, "")
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    except QueueFullError as error:
        raise HTTPException(429, str(error), {"Retry-After": str(error.retry_after)}) from error

    async def body() -> AsyncIterator[str]:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return StreamingResponse(body(), media_type="text/plain")


if __name__ == "__main__":
    with TestClient(app) as client:
        for name, text in [("ann", "May I bring my dog?"), ("bob", "When do you open?"), ("ann", "And my cat?")]:
            print(f"{name}: {text}\n  {client.post(f'/chats/{name}', json={'text': text}).text}")
            output = chats[name].last_output
            print(f"  [{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens reused]")
        refused = client.post("/chats/ann", json={"text": "Why? " * 9000})
        print(refused.status_code, refused.json()["detail"])
