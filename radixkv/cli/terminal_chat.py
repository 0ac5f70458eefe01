"""A conversation in the terminal."""

from __future__ import annotations

import sys
import time

from rich.console import Console

from radixkv.cache.counted import counted
from radixkv.chat import Chat


def run_chat(chat: Chat, console: Console) -> None:
    """Read turns from standard input until its end; Ctrl-C stops an answer, or leaves when there is none."""
    interactive = sys.stdin.isatty()
    if interactive:
        console.print("[dim]Ctrl-C stops an answer, Ctrl-D ends the conversation.[/]")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            continue
        start = time.monotonic()
        try:
            for piece in chat.stream(text):
                console.out(piece, end="", highlight=False)
            console.print()
        except KeyboardInterrupt:
            console.print(" [dim](stopped; the turn is left out of the conversation)[/]")
            continue
        except ValueError as error:
            console.out(error, style="red", highlight=False)
            continue
        console.print(f"[dim]{_summary(chat, start)}[/]", highlight=False)


def _summary(chat: Chat, start: float) -> str:
    output = chat.last_output
    assert output is not None
    first, end = output.metrics.first_token_time or start, output.metrics.finished_time or start
    num_prompt = len(output.prompt_token_ids)
    rate = (chat.last_num_tokens - 1) / (end - first) if end > first else 0.0
    return (
        f"{counted(num_prompt, 'prompt token')}, {output.num_cached_tokens} reused; "
        f"first token after {first - start:.2f} s, {rate:.0f} tokens/s"
    )
