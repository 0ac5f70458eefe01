"""What memory below the pool would bring: blocks that are loaded instead of computed, in seconds.

This works as in the engine: what the pool evicts goes down into every tier, each of which keeps what was used last; what a
prompt lacks in the pool is loaded as far as the tiers have it without a gap, the nearest asked first, and only where loading
takes less time than computing. What is loaded from a tier is also put into the tiers nearer than it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from radixkv.cache import EvictionPolicy
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.observe.simulate.bounds import cached_prefix
from radixkv.observe.simulate.replay import Replay
from radixkv.observe.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier.

    Attributes:
        name: in the results.
        num_blocks: how many it has room for.
        block_seconds: time to load a block.
    """

    name: str
    num_blocks: int
    block_seconds: float


@dataclass(slots=True)
class TieredRun:
    """Prompts' blocks by where they came from, with a pool of one size, and what that took.

    Attributes:
        num_pool_blocks: the pool's size.
        pool: blocks that were in the pool.
        loaded: blocks that were loaded, by tier.
        computed: all others.
        seconds_without: to compute what was not in the pool.
        seconds: to load or compute it.
    """

    num_pool_blocks: int
    pool: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    seconds_without: float = 0.0
    seconds: float = 0.0


class _Tier(TreeObserver):
    """Keeps what was used last; observes what the pool evicts."""

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def find(self, blocks: Sequence[int]) -> int:
        """How many leading blocks the tier has."""
        return cached_prefix(blocks, self._blocks)

    def put(self, prefix: Sequence[int]) -> None:
        """Store blocks, or note that they are used again: the last of a prefix is dropped before its first."""
        for block in reversed(prefix):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.spec.num_blocks:
            self._blocks.popitem(last=False)

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        if evicted:
            self.put(np.frombuffer(bytes(node.tokens[start * TOKEN_BYTES :]), dtype=np.int32).tolist())


def parse_tiers(texts: Sequence[str], parse_size: Callable[[str], int]) -> list[TierSpec]:
    """Tiers from texts such as ``host=50%@0.02``: a name, a size, and milliseconds to load a block.

    Args:
        texts: the nearest tier first.
        parse_size: a size in blocks from its text.

    Raises:
        ValueError: a text is malformed, or a name is given twice.
    """
    specs: list[TierSpec] = []
    for text in texts:
        name, equals, rest = text.partition("=")
        size, at, milliseconds = rest.rpartition("@")
        try:
            block_seconds = float(milliseconds) / 1000
        except ValueError:
            block_seconds = -1.0
        if not (name and equals and at and "," not in size and 0 <= block_seconds < float("inf")):
            raise ValueError(f"--tier: expected NAME=SIZE@MILLISECONDS, such as host=50%@0.02, got {text!r}")
        if name in (spec.name for spec in specs):
            raise ValueError(f"--tier: {name!r} is given twice")
        specs.append(TierSpec(name, parse_size(size), block_seconds))
    return specs


def simulate_tiers(
    trace: Trace,
    sizes: Sequence[int],
    make_policy: Callable[[], EvictionPolicy],
    specs: Sequence[TierSpec],
    token_seconds: float,
) -> list[TieredRun]:
    """Replay a trace once for each size of the pool.

    Args:
        trace: whose blocks are those of all tiers.
        sizes: of the pool, in blocks.
        make_policy: of the pool's evictions.
        specs: the nearest tier first.
        token_seconds: to compute a token of a prompt.
    """
    return [_run(trace, size, make_policy(), specs, trace.block_size * token_seconds) for size in sizes]


def _run(trace: Trace, size: int, policy: EvictionPolicy, specs: Sequence[TierSpec], block_seconds: float) -> TieredRun:
    tiers = [_Tier(spec) for spec in specs if spec.block_seconds < block_seconds]
    run = TieredRun(size, loaded={spec.name: 0 for spec in specs})
    replay = Replay(size, policy)
    for tier in tiers:
        replay.cache.add_observer(tier)
    for request in trace.requests:
        prompt = request.prompt.tolist()
        num_pool = num_known = replay.cache.match(request.prompt)
        for index, tier in enumerate(tiers):
            found = tier.find(prompt[num_known:])
            if found:
                # Noted as used now, before the pool evicts other blocks to make room for them, which then come down.
                for nearer in tiers[: index + 1]:
                    nearer.put(prompt[num_known : num_known + found])
                num_known += found
                run.loaded[tier.spec.name] += found
                run.seconds += found * tier.spec.block_seconds
        replay.serve(request)
        run.pool += num_pool
        run.computed += len(prompt) - num_known
        run.seconds += (len(prompt) - num_known) * block_seconds
        run.seconds_without += (len(prompt) - num_pool) * block_seconds
    return run


def draw_tiers(runs: Sequence[TieredRun], policy: str, num_distinct_blocks: int) -> Table:
    """A row for each size of the pool."""
    table = Table(
        title=f"with tiers below a pool under {policy}: where prompts' blocks come from, and seconds for what it lacks"
    )
    table.add_column("pool")
    names = list(runs[0].loaded)
    for column in ("in the pool", *names, "computed", "without tiers, s", "with, s", "saved"):
        table.add_column(column, justify="right")
    for run in runs:
        asked = max(1, run.pool + sum(run.loaded.values()) + run.computed)
        saved = 1 - run.seconds / run.seconds_without if run.seconds_without else 0.0
        shares = (run.pool, *run.loaded.values(), run.computed)
        table.add_row(
            f"{run.num_pool_blocks:,} ({run.num_pool_blocks / num_distinct_blocks:.0%})",
            *(f"{share / asked:.1%}" for share in shares),
            f"{run.seconds_without:,.1f}",
            f"{run.seconds:,.1f}",
            f"{saved:.0%}",
        )
    return table
