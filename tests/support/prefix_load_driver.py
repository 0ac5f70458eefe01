"""Groups that wait for prefixes from tiers, without a model: loads and the time are as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from radixkv import SamplingParams
from radixkv.cache import BlockTable, PrefixCache
from radixkv.cache.tokens import TOKEN_BYTES, common_tokens
from radixkv.routing import PrefillRate
from radixkv.scheduling.load_claims import Claim
from radixkv.scheduling.prefix_loads import PrefixLoads
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.scheduling.waiting_queue import WaitingQueue
from radixkv.tiers.block_key import block_keys
from radixkv.tiers.moves.load import Load, LookUp
from radixkv.tiers.moves.rates import Rates
from radixkv.tiers.stack import Span

SIZE = 4
# What a tier has: prefixes of sixty blocks and of twenty.
STEM = list(range(1, 60 * SIZE + 1))
SHORT_STEM = list(range(7000, 7000 + 20 * SIZE))


class NothingMoves:
    """Nothing is written to tiers."""

    has_unsent = False

    def note_loaded(self, namespace: str, tokens: bytes, first: int) -> None: ...

    def note_missing(self, table: BlockTable, block: bytes) -> None: ...

    def note_reused(self, table: BlockTable, behind: bytes) -> None: ...


class Loader:
    """Answers look-ups at once; loads hang until `finish`."""

    def __init__(self) -> None:
        self.progress = threading.Event()
        self._begun: list[Load] = []

    def look_up(self, look_up: LookUp) -> None:
        stems = [np.array(stem, np.int32).tobytes() for stem in (STEM, SHORT_STEM)]
        stop = max(common_tokens(look_up.tokens, 0, stem) // SIZE for stem in stems)
        look_up.keys = list(block_keys(b"", look_up.tokens, SIZE * TOKEN_BYTES))
        look_up.spans = [Span(0, look_up.start, stop)] if stop > look_up.start else []
        look_up.done.set()

    def load(self, load: Load) -> None:
        self._begun.append(load)

    def read_first(self) -> None:
        self._begun[0].begin_chunk(self._begun[0].spans[0], 0.0)

    def hang_after_first(self, num_blocks: int) -> None:
        write = self._begin_first(num_blocks, lambda *args: None)
        load = self._begun[0]
        (span,) = load.spans
        load.begin_chunk(Span(0, span.start + num_blocks, span.stop), 0.0)
        write()

    def write_first(self, num_blocks: int, write: Callable[..., None]) -> threading.Thread:
        thread = threading.Thread(target=self._begin_first(num_blocks, write), daemon=True)
        thread.start()
        return thread

    def _begin_first(self, num_blocks: int, write: Callable[..., None]) -> Callable[[], object]:
        """Begin a chunk, and return what writes it."""
        load = self._begun[0]
        rows = cast(Any, type("Rows", (), {"write": staticmethod(write)})())
        (span,) = load.spans
        first = Span(0, span.start, span.start + num_blocks)
        load.begin_chunk(first, 0.0)
        return partial(load.write, rows, first, np.zeros((num_blocks, 1), np.uint8), lambda: 0.001)

    def finish(self) -> None:
        while self._begun:
            self.finish_first()

    def finish_first(self) -> None:
        if self._begun:
            load = self._begun.pop(0)
            if not load.cancelled:
                load.num_loaded = len(load.block_ids)
                load.read.append((0, load.num_loaded, 0.001))
            load.done.set()


class Driver:
    """Takes steps over a pool of a hundred blocks, without a model."""

    def __init__(
        self,
        max_num_seqs: int = 16,
        shares: dict[str, TenantShare] | None = None,
        seconds_per_token: float | None = None,
        max_overtaken: int = 32,
    ) -> None:
        self.now = 0.0
        self.cache = PrefixCache(100, SIZE)
        self.loader = Loader()
        prefill_rate = PrefillRate()
        if seconds_per_token is not None:
            prefill_rate.observe_step(100, 100, 100 * seconds_per_token)
        self.loads = PrefixLoads(
            self.cache,
            self.loader,  # type: ignore[arg-type]
            Rates(1, prefill_rate),
            ["tier"],
            lambda: self.now,
            NothingMoves(),  # type: ignore[arg-type]
        )
        queue = WaitingQueue(self.cache, max_overtaken=max_overtaken)
        self.scheduler = Scheduler(self.cache, 512, max_num_seqs, queue, self.loads)
        self.scheduler.set_tenants(shares or {})

    def add(self, prompt: Sequence[int], max_new: int = 4, tenant: str = "", namespace: str = "") -> SequenceGroup:
        tokens = np.array(prompt, np.int32)
        request = Request(
            "", None, tokens, SamplingParams(), 0, max_new, frozenset(), tenant=tenant, namespace=namespace
        )
        request.sequences = [TokenSequence(request, 0, list(prompt))]
        group = SequenceGroup(request, request.sequences, request.prompt_token_ids)
        self.scheduler.add(group)
        return group

    def step(self) -> int:
        """Returns how many chunks were computed."""
        self.loads.publish_done()
        chunks = self.scheduler.schedule()
        self.cache.drain_copies()
        self.loads.begin(None)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            assert sequence.table is not None
            start = sequence.num_computed - chunk.num_tokens
            self.cache.append(sequence.table, sequence.token_ids[start : sequence.num_computed])
            if chunk.completes:
                sequence.token_ids.append(9000 + len(sequence.token_ids))
                if len(sequence.token_ids) - sequence.request.num_prompt_tokens >= sequence.request.max_new_tokens:
                    self.scheduler.blocks.close(sequence)
                    self.scheduler.remove(chunk.group)
        return len(chunks)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def finish_running(self) -> None:
        while self.scheduler.running:
            self.step()

    def finish_running_and_waiting(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            self.loader.finish()

    def uses_of(self, prompt: list[int]) -> list[int]:
        """How often each node whose tokens begin a prompt was used."""
        root = self.cache.tree_snapshot()[""]
        return [node.uses for node in root.children if node.tokens[0] == prompt[0]]

    def claim_of(self, group: SequenceGroup) -> Claim:
        return self.loads._prefixes[group].claim

    def give_up(self) -> None:
        """Let so much time pass that every load is overdue."""
        self.now = 1e3
        self.step()

    def num_cached(self, group: SequenceGroup) -> int:
        return self.cache.match(group.prefill_token_ids, "") // SIZE


def unlike(first: int, num_blocks: int) -> list[int]:
    return list(range(first, first + num_blocks * SIZE))
