"""`radixkv bench cache`: what the cache's bookkeeping costs, in microseconds.

Prompts are random tokens, in blocks of 16. The docstring of a row's function says what one call is; nothing else is timed,
such as closing what a call opened.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from radixkv.bench.cache.hash_chain import HashChainCache
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table, in_progress
from radixkv.bench.common.timing import Timing, frozen_garbage, measure, measure_call
from radixkv.cache import BlockPool, BlockTable, PrefixCache

BLOCK_SIZE = 16
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure and, for some rows, the same work by a chain of block hashes (`HashChainCache`)."""

    name: str
    ours: Callable[[int], Timing]
    hash_chain: Callable[[int], Timing] | None = None


def rows() -> list[Row]:
    """All rows, in the order of the table."""
    sizes = {"4k": 4 << 10, "32k": 32 << 10, "128k": 128 << 10}
    return [
        *(
            Row(f"match_hit_{name}", partial(match_hit, size), partial(hash_chain_match, size))
            for name, size in sizes.items()
        ),
        Row("match_hit_32k_list", match_hit_list),
        Row("match_chain64_32k", match_chain),
        Row("admit_hit_32k_list", admit_hit_list),
        *(
            Row(f"insert_cold_{name}", partial(insert_cold, size), partial(hash_chain_insert, size))
            for name, size in sizes.items()
        ),
        Row("evict_1_of_10k", partial(evict_one, 10_000)),
        Row("evict_1_of_100k", partial(evict_one, 100_000)),
        Row("evict_1_of_1m", partial(evict_one, 1_000_000)),
        Row("evict_2048_blocks_of_100k", evict_many),
        Row("decode_step_256", decode_step),
        Row("decode_record_256", decode_record),
        Row("fork_16_of_4k", fork),
        Row("beam_step_4_of_32k", beam_step),
        Row("release_32k", release),
        Row("pool_100k_construct", construct_pool),
    ]


def random_tokens(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.int32)


def compute(cache: PrefixCache, tokens: Tokens) -> BlockTable:
    """Open a sequence and compute all of its prompt."""
    table = cache.open(tokens)
    cache.reserve(table, len(tokens))
    cache.drain_copies()
    cache.append(table, tokens[table.num_tokens :])
    return table


def filled_cache(num_tokens: int, spare_blocks: int = 100) -> tuple[PrefixCache, Tokens]:
    """A cache that holds one prompt."""
    tokens = random_tokens(num_tokens)
    cache = PrefixCache(num_tokens // BLOCK_SIZE + spare_blocks, BLOCK_SIZE)
    cache.close(compute(cache, tokens))
    return cache, tokens


def cache_of_leaves(num_leaves: int, spare_blocks: int = 0) -> PrefixCache:
    """A cache that holds ``num_leaves`` prompts of one block each, which differ in their last token only."""
    cache = PrefixCache(num_leaves + spare_blocks, BLOCK_SIZE)
    prompts = np.full((num_leaves, BLOCK_SIZE), 7, dtype=np.int32)
    prompts[:, -1] = np.random.default_rng(0).permutation(num_leaves)
    for prompt in prompts:
        table = cache.open(prompt, read=False)
        cache.reserve(table, BLOCK_SIZE)
        cache.append(table, prompt)
        cache.close(table)
    return cache


def match_hit(num_tokens: int, rounds: int) -> Timing:
    """`match` of a prompt that is cached whole, as an int32 array."""
    cache, tokens = filled_cache(num_tokens)
    return measure_call(partial(cache.match, tokens), rounds=rounds, calls=20)


def match_hit_list(rounds: int) -> Timing:
    """`match` of 32k cached tokens in a Python list."""
    cache, tokens = filled_cache(32 << 10)
    as_list = tokens.tolist()
    return measure_call(partial(cache.match, as_list), rounds=rounds, calls=5)


def match_chain(rounds: int) -> Timing:
    """`match` along a path split into 64 nodes by other prompts, one of which leaves it every 512 tokens."""
    cache, tokens = filled_cache(32 << 10, spare_blocks=200)
    for length in range(512, len(tokens), 512):
        cache.close(compute(cache, np.concatenate([tokens[:length], random_tokens(16, seed=length)])))
    return measure_call(partial(cache.match, tokens), rounds=rounds, calls=20)


def admit_hit_list(rounds: int) -> Timing:
    """`open` of 32k cached tokens in a list: look them up, lock them, build the block table."""
    cache, tokens = filled_cache(32 << 10)
    as_list = tokens.tolist()
    opened: list[BlockTable] = []

    def close() -> None:
        for table in opened:
            cache.abort(table)
        opened.clear()
        cache.drain_copies()

    return measure(close, lambda _: opened.append(cache.open(as_list)), rounds=rounds)


def insert_cold(num_tokens: int, rounds: int) -> Timing:
    """`append` of a whole prompt into reserved blocks: record and publish it."""
    tokens = random_tokens(num_tokens)

    def reserved() -> tuple[PrefixCache, BlockTable]:
        cache = PrefixCache(num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        table = cache.open(tokens)
        cache.reserve(table, num_tokens)
        return cache, table

    return measure(reserved, lambda state: state[0].append(state[1], tokens), rounds=rounds)


def evict_one(num_leaves: int, rounds: int) -> Timing:
    """`reserve` of one block where none is free: evict one of ``num_leaves`` leaves, and allocate its block."""
    cache = cache_of_leaves(num_leaves)
    table = cache.open([1], write=False)
    calls = 64
    rounds = min(rounds, num_leaves // calls - 2)  # each evicts other leaves, and a first one warms up

    timing = measure_call(lambda: cache.reserve(table, (table.num_blocks + 1) * BLOCK_SIZE), rounds=rounds, calls=calls)
    assert cache.stats.evicted_blocks == (rounds + 1) * calls
    return timing


def evict_many(rounds: int) -> Timing:
    """`reserve` of 2,048 blocks where none is free and every cached block is a leaf of its own."""
    cache = cache_of_leaves(100_000)

    def table() -> BlockTable:
        return cache.open([1], write=False)

    rounds = min(rounds, 40)  # each evicts another 2,048 of the leaves
    return measure(table, lambda table: cache.reserve(table, 2048 * BLOCK_SIZE), rounds=rounds)


def decode_step(rounds: int) -> Timing:
    """`reserve_many` for 256 sequences that each add a token; the mean of a block's worth of steps."""
    cache, tables, lengths = decoding_batch(rounds)
    per_step = [[length + step for length in lengths] for step in range(1, (rounds + 1) * BLOCK_SIZE + 1)]
    totals = iter(per_step)
    return measure_call(lambda: cache.reserve_many(tables, next(totals)), rounds=rounds, calls=BLOCK_SIZE)


def decode_record(rounds: int) -> Timing:
    """`append` for the same sequences, one block at a time as in the engine; the mean of a block's worth of steps."""
    cache, tables, lengths = decoding_batch(rounds)
    block = list(range(BLOCK_SIZE))

    def reserve() -> None:
        for index in range(256):
            lengths[index] += BLOCK_SIZE
        cache.reserve_many(tables, lengths)

    def record(_: None) -> None:
        for table in tables:
            cache.append(table, block)

    return measure(reserve, record, rounds=rounds, calls=BLOCK_SIZE)


def decoding_batch(rounds: int) -> tuple[PrefixCache, list[BlockTable], list[int]]:
    """256 sequences of 500 to 515 tokens, so that at every step 16 of them begin a block."""
    lengths = [500 + number % 16 for number in range(256)]
    cache = PrefixCache(256 * (33 + rounds + 2), BLOCK_SIZE)
    tables = [compute(cache, random_tokens(length, seed)) for seed, length in enumerate(lengths)]
    return cache, tables, lengths


def fork(rounds: int) -> Timing:
    """`fork` 16 ways from a prompt of 4k tokens and a half block."""
    cache = PrefixCache(300, BLOCK_SIZE)
    table = compute(cache, random_tokens((4 << 10) + 8))
    children: list[BlockTable] = []

    def drop() -> None:
        for child in children:
            cache.abort(child)
        children.clear()

    return measure(drop, lambda _: children.extend(cache.fork(table, 16)), rounds=rounds)


def beam_step(rounds: int) -> Timing:
    """One step of four beams over a prompt of 32k tokens: append their tokens, abort one beam, fork another instead, and
    reserve the next token of each."""
    steps = 32
    cache = PrefixCache((32 << 10) // BLOCK_SIZE + 200 * (rounds + 2), BLOCK_SIZE)
    first = compute(cache, random_tokens((32 << 10) + 3))
    beams = [first, *cache.fork(first, 3)]
    cache.reserve_many(beams, [beam.num_tokens + 1 for beam in beams])

    tokens = itertools.cycle(range(steps))

    def advance() -> None:
        token = next(tokens)
        for number, beam in enumerate(beams):
            cache.append(beam, [token + number])
        cache.abort(beams.pop(token % 4))
        beams.extend(cache.fork(beams[token % 3]))
        cache.reserve_many(beams, [beam.num_tokens + 1 for beam in beams])
        cache.drain_copies()

    return measure_call(advance, rounds=rounds, calls=steps)


def release(rounds: int) -> Timing:
    """`close` of a sequence of 32k tokens, which stays cached."""
    cache, tokens = filled_cache(32 << 10)
    return measure(lambda: compute(cache, tokens), cache.close, rounds=rounds)


def construct_pool(rounds: int) -> Timing:
    """A `BlockPool` of 100,000 blocks."""
    return measure_call(lambda: BlockPool(100_000), rounds=rounds)


def hash_chain_match(num_tokens: int, rounds: int) -> Timing:
    tokens = random_tokens(num_tokens)
    cache = HashChainCache(BLOCK_SIZE)
    cache.insert(tokens, list(range(num_tokens // BLOCK_SIZE)))
    return measure_call(partial(cache.match, tokens), rounds=rounds)


def hash_chain_insert(num_tokens: int, rounds: int) -> Timing:
    tokens, blocks = random_tokens(num_tokens), list(range(num_tokens // BLOCK_SIZE))
    return measure(lambda: HashChainCache(BLOCK_SIZE), lambda cache: cache.insert(tokens, blocks), rounds=rounds)


def host_bytes_per_block() -> dict[str, float]:
    """Host memory per cached block: in long prompts, and as leaves of one block each, which take the most."""
    builders: dict[str, tuple[Callable[[], PrefixCache], int]] = {
        "in prompts of 32k tokens": (lambda: filled_cache(32 << 10, spare_blocks=0)[0], 2048),
        "as leaves of one block": (lambda: cache_of_leaves(20_000), 20_000),
    }
    result = {}
    for name, (build, num_blocks) in builders.items():
        tracemalloc.start()
        cache = build()
        result[name] = tracemalloc.get_traced_memory()[0] / num_blocks
        tracemalloc.stop()
        del cache
    return result


def run_cache(console: Console, rounds: int, json_path: Path | None) -> None:
    """Measure every row, print a table, write JSON."""
    columns = ("row", "RadixKV", "lowest", "hash chain", "times faster")
    table = figure_table(*columns, title=f"microseconds per call, median of {rounds} (lowest)")
    figures = []
    for row in in_progress(console, rows(), lambda row: row.name):
        with frozen_garbage():
            ours = row.ours(rounds)
            chain = None if row.hash_chain is None else row.hash_chain(rounds)
        figures.append({"name": row.name, **asdict(ours)})
        compared = ("", "")
        if chain is not None:
            figures[-1] |= {"hash_chain_median_us": chain.median_us, "ratio": chain.median_us / ours.median_us}
            compared = (f"{chain.median_us:,.1f}", f"{chain.median_us / ours.median_us:.0f}")
        table.add_row(row.name, f"{ours.median_us:,.1f}", f"{ours.min_us:,.1f}", *compared)
    memory = host_bytes_per_block()
    document = {
        "machine": describe_machine("numpy", "sortedcontainers"),
        "rows": figures,
        "host_bytes_per_block": memory,
    }
    write_figures(json_path, document)
    console.print(table)
    for name, size in memory.items():
        console.print(f"host memory per cached block {name}: {size:,.0f} bytes")
