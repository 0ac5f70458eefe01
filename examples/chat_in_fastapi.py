"""Conversations inside your own FastAPI application; they share the blocks of all prefixes that they have in common.

Serve it with `uvicorn chat_in_fastapi:app` from this folder; run as a program, it talks to itself.
"""

from collections.abc import Iterator
from threading import Lock

from fastapi import Body, FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from radixkv import LLM, Chat, SamplingParams

app = FastAPI()
llm = LLM()
chats: dict[str, Chat] = {}
turns: dict[str, Lock] = {}  # a conversation takes one message at a time


@app.post("/chats/{name}")
def say(name: str, text: str = Body(embed=True)) -> StreamingResponse:
    """Say something in a conversation, which begins with its first turn; the answer is streamed.

    FastAPI runs this in several threads, which may share an LLM: answers to different conversations are computed together.
    """
    chat = chats.setdefault(
        name, Chat(llm, "You are the assistant of a small library.", SamplingParams(temperature=0, max_tokens=40))
    )
    turn = turns.setdefault(name, Lock())

    def answer() -> Iterator[str]:
        with turn:
            yield from chat.stream(text)

    return StreamingResponse(answer(), media_type="text/plain")


if __name__ == "__main__":
    client = TestClient(app)
    for name, text in [("ann", "May I bring my dog?"), ("bob", "When do you open?"), ("ann", "And my cat?")]:
        print(f"{name}: {text}\n  {client.post(f'/chats/{name}', json={'text': text}).text}")
        output = chats[name].last_output
        print(f"  [{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens reused]")
