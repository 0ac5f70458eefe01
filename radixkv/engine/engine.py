"""The engine: takes requests, runs steps, hands back what was generated.

A step is one batch through the model::

    schedule -> copy blocks (copy-on-write) -> model -> record in the cache -> choose tokens -> finish, fork, continue
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.cache import POLICIES, EventLog, PrefixCache
from radixkv.engine.admission import check_fits, check_prompt
from radixkv.engine.beam_search import BeamSearch
from radixkv.engine.completion import append_token, equip_for_sampling, named_logprobs
from radixkv.engine.errors import NoBlocksLeftError
from radixkv.engine.model_loader import LoadedModel
from radixkv.engine.model_runner import LogitRows, ModelChunk, ModelRunner
from radixkv.engine.request import Request, SequenceGroup
from radixkv.engine.request import Sequence as TokenSequence
from radixkv.engine.sampler import Sampler
from radixkv.engine.scheduler import ScheduledChunk, Scheduler
from radixkv.memory import KVPool
from radixkv.memory.kv_pool import block_nbytes
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.simulate.record import TraceRecorder

DEFAULT_KV_CACHE_BYTES = 1 << 30


class Engine:
    """Answers requests, many at a time, sharing the keys and values of common prefixes.

    Args:
        loaded: the model; from now on it belongs to this engine.
        block_size: tokens a block.
        num_blocks: physical blocks. Excludes ``kv_cache_memory_bytes``.
        kv_cache_memory_bytes: bytes for keys and values; by default 1 GiB, and no more than ``max_num_seqs``
            sequences of the model's full length could use.
        max_num_batched_tokens: tokens a step at most; a longer prompt is computed in chunks of this. From 512 on, the
            activations of a step no longer fit the processor's cache: 1,024 took 10 to 20 % longer a token.
        max_num_seqs: sequences that run side by side at most.
        enable_prefix_caching: False: no request reuses another's blocks (samples and beams still share their prompt).
        seed: where the random numbers of requests without a seed of their own begin.
        eviction_policy: what goes first when blocks run out: a name of `radixkv.cache.POLICIES`.
        kv_events_endpoint: publish KV events there, such as ``tcp://*:5557`` (see `radixkv.kv_events`).
        kv_events_replay_endpoint: where subscribers ask for what they missed.
        record_trace: write a line a finished request to this file, without any text (see `TraceRecorder`).

    Raises:
        ValueError: an argument is out of its range.
        UnsupportedModelError: the model's attention cannot run over blocks.
        MemoryError: no room for the blocks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        eviction_policy: str = "lru",
        kv_events_endpoint: str | None = None,
        kv_events_replay_endpoint: str | None = None,
        record_trace: Path | None = None,
    ) -> None:
        if eviction_policy not in POLICIES:
            raise ValueError(f"eviction_policy: expected one of {', '.join(POLICIES)}, got {eviction_policy!r}")
        for name, value in {
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
        }.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if num_blocks is not None and kv_cache_memory_bytes is not None:
            raise ValueError("num_blocks and kv_cache_memory_bytes exclude each other: give one of them")
        self.loaded = loaded
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.enable_prefix_caching = enable_prefix_caching
        self._runner = ModelRunner(loaded)
        shapes = self._runner.layer_shapes
        if num_blocks is None:
            a_block = block_nbytes(shapes, block_size, loaded.dtype)
            if kv_cache_memory_bytes is None:
                useful = max_num_seqs * -(-loaded.max_model_len // block_size)
                num_blocks = max(1, min(DEFAULT_KV_CACHE_BYTES // a_block, useful))
            elif kv_cache_memory_bytes < a_block:
                raise ValueError(
                    f"kv_cache_memory_bytes must hold at least one block of {a_block:,} bytes, "
                    f"got {kv_cache_memory_bytes!r}"
                )
            else:
                num_blocks = kv_cache_memory_bytes // a_block
        self.pool = KVPool(shapes, num_blocks, block_size, loaded.dtype, loaded.device)
        self._runner.use_pool(self.pool)
        events = (
            None if kv_events_endpoint is None else EventLog(medium="CPU" if loaded.device.type == "cpu" else "GPU")
        )
        self.cache = PrefixCache(
            num_blocks, block_size, POLICIES[eviction_policy](), remembered_blocks=4 * num_blocks, events=events
        )
        self._publisher = None
        if kv_events_endpoint is not None:
            # Only here: it needs packages that others do without.
            from radixkv.kv_events import ZmqEventPublisher

            self._publisher = ZmqEventPublisher(kv_events_endpoint, kv_events_replay_endpoint)
        self._recorder = None if record_trace is None else TraceRecorder(record_trace, block_size)
        self.scheduler = Scheduler(self.cache, max_num_batched_tokens, max_num_seqs)
        self._sampler = Sampler()
        self._seeds = random.Random(seed)
        self._requests: dict[str, Request] = {}
        # The most blocks held at once, cached ones included; whoever measures sets it to 0 first.
        self.peak_held_blocks = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        namespace: str = "",
        read_cache: bool = True,
        write_cache: bool = True,
    ) -> Request:
        """Check a request, changing nothing; `add` takes it in.

        Raises:
            ValueError, TypeError: the prompt is empty or longer than the model, or an id is outside the vocabulary.
            RequestTooLargeError: more sequences or blocks than there are.
        """
        if isinstance(params, SamplingParams):
            params.validate_for(self.loaded.vocab_size)
        if params.stop_strings:
            self.loaded.require_tokenizer()
        tokens = check_prompt(prompt_token_ids, self.loaded.vocab_size, self.loaded.max_model_len)
        room = self.loaded.max_model_len - len(tokens)
        if params.max_tokens is None:
            # "As far as it goes" goes no further than the cache; the token generated last takes no slot.
            room = max(1, min(room, self.cache.num_blocks * self.cache.block_size + 1 - len(tokens)))
        own_seed = params.seed if isinstance(params, SamplingParams) else None
        request = Request(
            request_id,
            prompt,
            tokens,
            params,
            seed=self._seeds.getrandbits(63) if own_seed is None else own_seed,
            max_new_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            end_token_ids=frozenset() if params.ignore_eos else self.loaded.eos_token_ids,
            namespace=namespace,
            read_cache=read_cache and self.enable_prefix_caching,
            write_cache=write_cache and self.enable_prefix_caching,
        )
        check_fits(
            request,
            self.cache.num_blocks,
            self.cache.block_size,
            self.max_num_seqs,
            self.max_num_batched_tokens,
        )
        return request

    def add(self, request: Request) -> None:
        """Queue a request that `make_request` made.

        Raises:
            ValueError: an unfinished request has the same id.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} belongs to an unfinished request")
        self._requests[request.request_id] = request
        sequence = TokenSequence(request, 0, request.prompt_token_ids.tolist())
        if isinstance(request.params, BeamSearchParams):
            request.beams = BeamSearch(
                request.params, request.max_new_tokens, request.end_token_ids, self._stop_finder(request.params)
            )
        else:
            equip_for_sampling(sequence, self.loaded.tokenizer)
        request.sequences = [sequence]
        self.scheduler.add(SequenceGroup(request, [sequence]))

    def abort(self, request_id: str) -> bool:
        """Give a request up at once and let go of its blocks; False: there is no such unfinished request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
        self._discard(request)
        return True

    def step(self) -> list[Request]:
        """Run one batch.

        Returns:
            The requests that got tokens or ended.

        Raises:
            Exception: whatever the model raised; the requests of that batch have then failed with it (`Request.failure`),
                their blocks are released, and all others go on with the next step.
        """
        chunks = self.scheduler.schedule()
        if not chunks:
            return self._fail_stuck_request()
        self.peak_held_blocks = max(self.peak_held_blocks, self.cache.num_held_blocks)
        try:
            self.pool.copy_blocks(self.cache.drain_copies())
            logits = self._runner.run([self._model_chunk(chunk) for chunk in chunks])
        except BaseException as error:
            # What the blocks hold now is unknown: nothing of this batch may be published.
            for request in {chunk.group.request.request_id: chunk.group.request for chunk in chunks}.values():
                request.failure = error if isinstance(error, Exception) else RuntimeError(f"interrupted: {error!r}")
                self._discard(request)
            raise
        touched = self._take_results(chunks, logits)
        self._publish_events()
        return touched

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no running request uses; returns the blocks freed."""
        freed = self.cache.clear()
        self._publish_events()
        return freed

    def _publish_events(self) -> None:
        if self._publisher is not None and self.cache.events is not None:
            self._publisher.publish(self.cache.events)

    # -- before the model ----------------------------------------------------------------------------------------

    def _stop_finder(self, params: BeamSearchParams) -> Callable[[list[int]], str | None]:
        def find(token_ids: list[int]) -> str | None:
            text = self.loaded.require_tokenizer().decode(token_ids, skip_special_tokens=True)
            return next((stop for stop in params.stop_strings if stop in text), None)

        return find

    def _model_chunk(self, chunk: ScheduledChunk) -> ModelChunk:
        sequence = chunk.sequence
        assert sequence.table is not None
        start = sequence.num_computed
        token_ids = np.array(sequence.token_ids[start : start + chunk.num_tokens], dtype=np.int64)
        rows = LogitRows.NONE
        if self._collects_prompt_logprobs(chunk):
            rows = LogitRows.ALL
        elif chunk.num_tokens == sequence.num_pending:
            rows = LogitRows.LAST
        return ModelChunk(token_ids, start, sequence.table.block_ids, rows)

    @staticmethod
    def _collects_prompt_logprobs(chunk: ScheduledChunk) -> bool:
        request = chunk.group.request
        wanted = isinstance(request.params, SamplingParams) and request.params.prompt_logprobs is not None
        return wanted and request.metrics.first_token_time is None

    # -- after the model -----------------------------------------------------------------------------------------

    def _take_results(self, chunks: list[ScheduledChunk], logits: torch.Tensor) -> list[Request]:
        """Record what was computed, choose the next tokens, and end or fork sequences."""
        ready: list[tuple[SequenceGroup, TokenSequence, int]] = []
        row = 0
        for chunk in chunks:
            sequence = chunk.sequence
            collects = self._collects_prompt_logprobs(chunk)
            completes = chunk.num_tokens == sequence.num_pending
            num_rows = chunk.num_tokens if collects else int(completes)
            if collects:
                self._collect_prompt_logprobs(chunk, logits[row : row + num_rows])
            row += num_rows
            self.scheduler.commit(sequence, chunk.num_tokens)
            if completes:
                ready.append((chunk.group, sequence, row - 1))

        touched: dict[str, Request] = {}
        sampled: list[tuple[SequenceGroup, TokenSequence, int]] = []
        for group, sequence, logits_row in ready:
            request = group.request
            touched[request.request_id] = request
            if request.beams is None:
                sampled.append((group, sequence, logits_row))
                sampled.extend((sibling, sibling.sequences[0], logits_row) for sibling in self._start_siblings(group))
            elif group.sequences[-1] is sequence:
                rows = [r for g, _, r in ready if g is group]
                self._advance_beams(group, logits[rows])
        if sampled:
            self._sample(sampled, logits)
        for request in touched.values():
            if all(sequence.finish_reason is not None for sequence in request.sequences):
                request.metrics.finished_time = time.monotonic()
                del self._requests[request.request_id]
                if self._recorder is not None:
                    self._recorder.record(
                        request.namespace,
                        request.prompt_token_ids,
                        request.sequences[0].output_token_ids,
                        request.metrics.arrival_time,
                    )
        return list(touched.values())

    def _start_siblings(self, group: SequenceGroup) -> list[SequenceGroup]:
        """When a prompt with n > 1 is computed, the other samples begin as forks of the first."""
        request = group.request
        params = request.params
        if not isinstance(params, SamplingParams) or len(request.sequences) == params.n:
            return []
        siblings = []
        for index, sequence in enumerate(self.scheduler.fork(request.sequences[0], params.n - 1), start=1):
            sequence.index = index
            equip_for_sampling(sequence, self.loaded.tokenizer)
            request.sequences.append(sequence)
            siblings.append(SequenceGroup(request, [sequence]))
            self.scheduler.running[siblings[-1]] = None
        return siblings

    def _sample(self, sampled: list[tuple[SequenceGroup, TokenSequence, int]], logits: torch.Tensor) -> None:
        rows = [row for _, _, row in sampled]
        if rows != list(range(logits.shape[0])):
            logits = logits[rows]
        states = [sequence.row for _, sequence, _ in sampled if sequence.row is not None]
        now = time.monotonic()
        for (group, sequence, _), token in zip(sampled, self._sampler.sample(logits, states), strict=True):
            append_token(sequence, token, self.loaded.tokenizer)
            if sequence.request.metrics.first_token_time is None:
                sequence.request.metrics.first_token_time = now
            if sequence.finish_reason is not None:
                self.scheduler.release(sequence)
                self.scheduler.remove(group)

    def _advance_beams(self, group: SequenceGroup, logits: torch.Tensor) -> None:
        """One beam step, by block tables alone: drop the losers, fork the parents of several, continue the rest."""
        request = group.request
        assert request.beams is not None
        request.metrics.first_token_time = request.metrics.first_token_time or time.monotonic()
        chosen = request.beams.advance(logits)
        heirs = [0] * len(group.sequences)
        for continuation in chosen:
            heirs[continuation.parent] += 1
        lines: list[list[TokenSequence]] = []
        for sequence, count in zip(group.sequences, heirs, strict=True):
            if count:
                lines.append([sequence, *(self.scheduler.fork(sequence, count - 1) if count > 1 else [])])
            else:
                self.scheduler.drop(sequence) if chosen else self.scheduler.release(sequence)
                lines.append([])
        group.sequences = [lines[continuation.parent].pop() for continuation in chosen]
        for sequence, continuation in zip(group.sequences, chosen, strict=True):
            sequence.token_ids.append(continuation.token_id)
        if chosen:
            request.sequences = list(group.sequences)
            return
        self.scheduler.remove(group)
        for sequence in request.sequences:
            sequence.finish_reason = "stop"

    def _collect_prompt_logprobs(self, chunk: ScheduledChunk, logits: torch.Tensor) -> None:
        """Row i of a chunk's logits speaks of the prompt token after the chunk's i-th; the first token has none."""
        request, start = chunk.group.request, chunk.sequence.num_computed
        params = request.params
        assert isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        if start == 0:
            request.prompt_logprobs = [None]
        targets = request.prompt_token_ids[start + 1 : start + 1 + chunk.num_tokens]
        assert request.prompt_logprobs is not None
        tokens = self._sampler.prompt_logprobs(logits[: len(targets)], targets.tolist(), params.prompt_logprobs)
        request.prompt_logprobs.extend(named_logprobs(token, self.loaded.tokenizer) for token in tokens)

    # -- requests that end early ---------------------------------------------------------------------------------

    def _fail_stuck_request(self) -> list[Request]:
        """Nothing can run: if a request waits although nobody runs, its blocks are held where eviction cannot reach."""
        if not self.scheduler.waiting:
            return []
        request = self.scheduler.waiting[0].request
        cache = self.cache
        request.failure = NoBlocksLeftError(
            f"request {request.request_id!r} needs more blocks than can be had: "
            f"{cache.num_free_blocks} free and {cache.num_evictable_blocks} evictable of {cache.num_blocks}"
        )
        self._discard(request)
        return [request]

    def _discard(self, request: Request) -> None:
        """Take a request out of the engine as it is, its unfinished sequences' blocks released."""
        for group in self.scheduler.groups_of(request):
            for sequence in group.sequences:
                self.scheduler.drop(sequence)
            self.scheduler.remove(group)
        request.metrics.finished_time = time.monotonic()
        del self._requests[request.request_id]
