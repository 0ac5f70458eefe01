"""A fixed tour on the real model: what sharing prefixes saves, with and without the cache, and equal answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.cache import PrefixCache
from radixkv.chat import Chat
from radixkv.llm import LLM
from radixkv.observe.inspect.tree_view import draw_tree
from radixkv.outputs import RequestOutput
from radixkv.sampling_params import BeamSearchParams, SamplingParams

SYSTEM = (
    "You are the assistant of a small public library. You answer in one or two plain sentences. The library is open "
    "from nine to six on weekdays and from ten to four on Saturdays. Books are lent for four weeks and can be renewed "
    "twice unless somebody waits for them. Films and music are lent for one week. Children under twelve need a parent's "
    "signature. There is a quiet room on the second floor, a workshop with two printers in the basement, and a garden "
    "where readers may eat. Fines are ten cents a day. If you do not know something, say so and name the front desk. "
) * 3
QUESTIONS = (
    "When are you open on Saturday?",
    "How long may I keep a book?",
    "Where can I print something?",
    "My son is eight. Can he get a card?",
    "May I eat my lunch here?",
    "What does it cost to be three days late?",
)
TURNS = ("I would like to read about the sea. What do you suggest?", "Something shorter?", "And for a child of ten?")
ANSWER_TOKENS = 32
NO_CACHE = MappingProxyType({"read": False, "write": False})


@dataclass(frozen=True, slots=True)
class Row:
    """One workload, without and with the cache."""

    name: str
    prompt_tokens: int
    computed_without: int
    computed_with: int
    blocks_without: int
    blocks_with: int
    seconds_without: float
    seconds_with: float
    equal: bool


@dataclass(frozen=True, slots=True)
class AskedAgain:
    """Questions that are asked a second time, one after the other, without drafts and with them.

    Attributes:
        tokens: of the answers.
        accepted: how many of them came from drafts.
    """

    tokens: int
    accepted: int
    seconds_without: float
    seconds_with: float
    equal: bool

    def __str__(self) -> str:
        times = self.seconds_without / self.seconds_with
        return (
            f"asked again, with drafts from the cache: {self.accepted} of {self.tokens} tokens were drafted right, "
            f"{times:.1f} times as fast, {self.seconds_without:.2f} s without"
        )


def run_demo(console: Console, json_path: Path | None) -> bool:
    """Run the tour; returns whether all greedy answers were equal with and without the cache."""
    console.rule("RadixKV")
    start = time.perf_counter()
    with console.status("loading the model"):
        llm = LLM(dtype="float32")  # equal answers are what the tour shows
    console.print(f"{llm.engine.loaded.name} ready in {time.perf_counter() - start:.1f} s, in float32")
    llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    rows = []
    for name, work in (
        ("6 chats, one system prompt", _chats),
        ("a conversation of 3 turns", _conversation),
        ("n = 8 samples", _samples),
        ("3 beam searches, width 4", _beams),
    ):
        with console.status(name):
            rows.append(_compare(llm, name, work))
        console.print(_verdict(name, equal=rows[-1].equal))
    console.print()
    console.print(f"[bold]{QUESTIONS[0]}[/]")
    console.print(Text(llm.chat(_question(QUESTIONS[0]), _greedy(), use_tqdm=False)[0].outputs[0].text))
    console.print()
    console.print(draw_tree(llm.inspect()))
    console.print()
    console.print(_table(rows))
    memory = [memory_example(lengths, reserved) for lengths, reserved in TEXTBOOK_EXAMPLES]
    console.print(_memory_table(memory, llm.engine.pool.block_nbytes))
    with console.status("drafts"):
        again = _ask_again(llm)
    console.print(_verdict(str(again), equal=again.equal))
    document = {
        "machine": describe_machine("torch", "transformers"),
        "rows": [asdict(row) for row in rows],
        "asked_again": asdict(again),
        "memory": memory,
    }
    write_figures(json_path, document)
    return again.equal and all(row.equal for row in rows)


def _verdict(work: str, *, equal: bool) -> str:
    return f"[green]✓[/] {work}: answers equal" if equal else f"[red]✗[/] {work}: answers differ"


def _compare(llm: LLM, name: str, work: Callable[[LLM, bool], Any]) -> Row:
    results: list[Any] = []
    measured: list[tuple[int, int, int, float]] = []
    for cached in (False, True):
        llm.reset_prefix_cache()
        llm.engine.peak_held_blocks = 0
        before, start = llm.engine.cache.stats, time.perf_counter()
        results.append(work(llm, cached))
        seconds, after = time.perf_counter() - start, llm.engine.cache.stats
        queried = after.queried_tokens - before.queried_tokens
        computed = after.computed_tokens - before.computed_tokens
        measured.append((queried, computed, llm.engine.peak_held_blocks, seconds))
    (prompt_tokens, computed_without, blocks_without, seconds_without), (_, computed, blocks, seconds) = measured
    equal = results[0] == results[1]
    return Row(name, prompt_tokens, computed_without, computed, blocks_without, blocks, seconds_without, seconds, equal)


def _ask_again(llm: LLM) -> AskedAgain:
    """Ask questions twice, without drafts and with them. Comes last, because the engine with drafts takes over the model."""

    def second_time(llm: LLM) -> tuple[float, list[RequestOutput]]:
        for _ in range(2):
            start = time.perf_counter()
            outputs = [llm.chat(_question(question), _greedy(), use_tqdm=False)[0] for question in QUESTIONS]
            seconds = time.perf_counter() - start
        return seconds, outputs

    seconds_without, expected = second_time(llm)
    loaded = llm.engine.loaded
    drafting = LLM(loaded.model, tokenizer=loaded.tokenizer, speculative_config={"method": "tree"})
    seconds_with, outputs = second_time(drafting)
    answers = [output.outputs[0].token_ids for output in outputs]
    return AskedAgain(
        sum(map(len, answers)),
        sum(counts.accepted for output in outputs for counts in output.metrics.drafts.values()),
        seconds_without,
        seconds_with,
        equal=answers == [output.outputs[0].token_ids for output in expected],
    )


def _greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)


def _question(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def _chats(llm: LLM, cached: bool) -> list[list[int]]:
    conversations = [_question(question) for question in QUESTIONS]
    outputs = llm.chat(conversations, _greedy(), use_tqdm=False, cache=None if cached else NO_CACHE)
    return [output.outputs[0].token_ids for output in outputs]


def _conversation(llm: LLM, cached: bool) -> list[str]:
    if cached:
        chat = Chat(llm, SYSTEM, _greedy())
        return [chat.send(turn) for turn in TURNS]
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answers.append(llm.chat(messages, _greedy(), use_tqdm=False, cache=NO_CACHE)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def _samples(llm: LLM, cached: bool) -> list[list[int]]:
    """Eight samples as forks of one prompt, or as eight requests that each compute it.

    The temperature is so low that each sample is the greedy answer, so that the two ways can be compared.
    """
    prompt = SYSTEM + "Question: What can you do for me?\nAnswer:"
    if cached:
        params = SamplingParams(n=8, temperature=1e-4, max_tokens=ANSWER_TOKENS)
        return [sample.token_ids for sample in llm.generate(prompt, params, use_tqdm=False)[0].outputs]
    outputs = llm.generate([{"prompt": prompt, "cache": NO_CACHE}] * 8, _greedy(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _beams(llm: LLM, cached: bool) -> list[list[int]]:
    """Beam searches for three questions, one after the other; beams always share blocks, their prompts only if cached."""
    found = []
    for question in QUESTIONS[:3]:
        prompt: dict[str, Any] = {"prompt": f"{SYSTEM}Question: {question}\nAnswer:"}
        if not cached:
            prompt["cache"] = NO_CACHE
        beams = llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=3 * ANSWER_TOKENS // 4))[0].sequences
        found += [beam.tokens for beam in beams]
    return found


def _table(rows: list[Row]) -> Table:
    columns = ("workload", "prompt tokens", "computed", "blocks held", "seconds", "answers")
    table = figure_table(*columns, title="without → with the cache")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.prompt_tokens:,}",
            f"{row.computed_without:,} → {row.computed_with:,}",
            f"{row.blocks_without} → {row.blocks_with}",
            f"{row.seconds_without:.2f} → {row.seconds_with:.2f}",
            "equal" if row.equal else "DIFFER",
        )
    return table


_BLOCK_SIZE = 16
TEXTBOOK_EXAMPLES = (((800, 2300, 3900), 4096), ((600, 900, 1300, 1700), 2048))


def memory_example(lengths: tuple[int, ...], reserved: int) -> dict[str, Any]:
    """Slots that sequences of ``lengths`` tokens waste if each reserves ``reserved`` tokens, and with blocks."""
    cache = PrefixCache(sum(lengths) // _BLOCK_SIZE + len(lengths), _BLOCK_SIZE)
    for number, length in enumerate(lengths):
        table = cache.open([number], read=False, write=False)
        cache.reserve(table, length)
    used, held = sum(lengths), cache.num_held_blocks * _BLOCK_SIZE
    return {
        "lengths": list(lengths),
        "reserved_each": reserved,
        "contiguous_slots": reserved * len(lengths),
        "contiguous_waste": 1 - used / (reserved * len(lengths)),
        "block_slots": held,
        "block_waste": 1 - used / held,
        "held_blocks": cache.num_held_blocks,
    }


def _memory_table(examples: list[dict[str, Any]], block_nbytes: int) -> Table:
    columns = ("requests of", "slots", "wasted", "KV bytes in use")
    table = figure_table(*columns, title=f"memory: contiguous reservation → blocks of {_BLOCK_SIZE} tokens")
    for example in examples:
        table.add_row(
            f"{', '.join(f'{n:,}' for n in example['lengths'])} tokens ({example['reserved_each']:,} reserved each)",
            f"{example['contiguous_slots']:,} → {example['block_slots']:,}",
            f"{example['contiguous_waste']:.1%} → {example['block_waste']:.1%}",
            f"{example['held_blocks'] * block_nbytes / 2**20:,.0f} MiB",
        )
    return table
