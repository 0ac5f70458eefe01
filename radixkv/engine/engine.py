"""The engine: accepts requests and runs them step by step.

A step carries one `Batch` through three parts::

    schedule                    execute                              process
    Scheduler                   Executor                             OutputProcessor
    which tokens, whose blocks  copy-on-write, model, publish full   append tokens; sequences
                                blocks, sample on the device         continue, fork or end
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import radixkv.model.frameworks  # noqa: F401 (before all that imports torch)
from radixkv.config import EngineConfig, ResolvedEngineConfig
from radixkv.engine.begin_request import begin_request
from radixkv.engine.clearing import ALL_NAMESPACES, Cleared, NamespaceSelection, clear
from radixkv.engine.compute_timer import ComputeTimer
from radixkv.engine.executor import Executor
from radixkv.engine.named_pins import NamedPins
from radixkv.engine.open_cache import open_cache
from radixkv.engine.output_processor import OutputProcessor
from radixkv.engine.pool_setup import set_up_pool, with_length_in_pool
from radixkv.engine.recurrent_options import for_recurrent_layers
from radixkv.engine.request_factory import RequestFactory
from radixkv.engine.speculator_setup import make_speculator
from radixkv.engine.stats import BatchSize
from radixkv.engine.tenant_pins import TenantPins
from radixkv.engine.trace_recorder import TraceRecorder
from radixkv.engine.unfinished_requests import UnfinishedRequests
from radixkv.model.kv_quantisation import resolve_kv_cache_dtype
from radixkv.model.loader import LoadedModel
from radixkv.model.native import weights_of
from radixkv.model.runner import ModelRunner
from radixkv.model.weights.large_pages import use_large_pages
from radixkv.outputs import DraftCounts
from radixkv.prompts import Prompt
from radixkv.routing import PrefillRate
from radixkv.sampling.detokenizer import token_decoder
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.logit_rows import PROMPT_LOGIT_ROWS
from radixkv.scheduling.request import Request
from radixkv.scheduling.request_validation import Capacity
from radixkv.scheduling.scheduler import Scheduler
from radixkv.threads import as_exception, run_outside_workers

# How long closing may take to write what is queued for the tiers.
_QUEUE_SECONDS = 5.0


class _BatchError(Exception):
    """A batch has failed, and with it those of its requests that were unfinished."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__()
        self.requests = requests


class Engine:
    """Answers requests, many at a time, sharing the keys and values of common prefixes.

    Args:
        loaded: the model; from now on it belongs to this engine.
        config: how to cache, schedule and compute.

    Attributes:
        loaded: the model, whose ``max_model_len`` is no more than the pool has room for.
        cache: of the pool's blocks, and ``tiers`` below it; None: there are none.
        pool: the memory behind the blocks.
        request_factory: makes the requests that `add` takes; ``grammars`` compiles what they are constrained by.
        scheduler: what waits and what runs.
        pins: those of the cache, and ``tenant_pins`` those that tenants asked for.
        capacity: the most that a request may ask for.
        decode_token: the text of a single token, for log-probabilities.
        thread: the only one that may use the engine; None: any thread may, one at a time.
        num_steps: batches so far, the latest of the size ``last_batch``.
        peak_held_blocks: the most blocks held at once, cached ones included; reset it to 0 before measuring.

    Raises:
        ValueError: the model, its device or the memory does not allow what ``config`` asks for, or an address for events
            cannot be bound.
        TypeError: a drafter is not a `Drafter`.
        OSError: a folder or a file that ``config`` names cannot be written, or another process has it.
        UnsupportedModelError: the model's attention cannot run over blocks.
        MemoryError: no room for the blocks.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        given, config = config, config.for_device(loaded.device.type)
        element_type = resolve_kv_cache_dtype(config.kv_cache_dtype, loaded)
        self.enable_prefix_caching = config.enable_prefix_caching
        self._runner = ModelRunner(loaded, config.enable_torch_compile, must_compile=given.enable_torch_compile is True)
        if self._runner.recurrent_layers:
            config = for_recurrent_layers(given, config)
        self.pool = set_up_pool(self._runner, loaded, config, element_type)
        self.loaded = loaded = with_length_in_pool(loaded, self.pool)
        self._runner.capture_graphs()
        self.prefill_rate = PrefillRate()
        self._open_cache = open_cache(config, loaded, self.pool, self.prefill_rate)
        # However the engine ends, queued blocks are written, and folders and addresses are released; a medium that hangs
        # does not keep the process alive.
        weakref.finalize(self, run_outside_workers, partial(self._open_cache.close, _QUEUE_SECONDS))
        try:
            self._set_up(loaded, config)
        except BaseException:  # its handler may keep the engine alive, and with it everything that is open
            self._open_cache.close(_QUEUE_SECONDS)
            raise

    def _set_up(self, loaded: LoadedModel, config: ResolvedEngineConfig) -> None:
        """Set up everything that works on the open cache."""
        block_size, clock = self.pool.block_size, time.perf_counter
        self.cache, self.tiers = self._open_cache.cache, self._open_cache.tiers
        self._compute_timer = ComputeTimer(self.prefill_rate.observe_step, clock, bool(config.async_scheduling))
        self.pins = NamedPins(self.cache, self.tiers)
        self.tenant_pins = TenantPins(self.pins)
        self.scheduler = Scheduler(
            self.cache,
            config.max_num_batched_tokens,
            config.max_num_seqs,
            loads=None if self.tiers is None else self.tiers.loads,
            max_prompt_logit_rows=PROMPT_LOGIT_ROWS if loaded.device.type == "cuda" else None,
        )
        recorder = None if config.record_trace is None else TraceRecorder(Path(config.record_trace), block_size)
        self._requests = UnfinishedRequests(self.cache, self.scheduler, recorder)
        self.grammars = GrammarCompiler(loaded, num_logits=self._runner.num_logits)
        self.capacity = Capacity(
            self.pool.num_blocks,
            block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self._runner.num_logits,
        )
        self.request_factory = RequestFactory(loaded, config, self.capacity, self.grammars)
        self.decode_token = token_decoder(loaded.tokenizer)
        self._executor = Executor(self.cache, self.scheduler, self._runner, loaded.tokenizer, self.decode_token)
        self._output_processor = OutputProcessor(self.scheduler, self.decode_token, clock)
        self._speculator = make_speculator(
            config, self.cache, self._open_cache.index, self.scheduler.blocks, loaded.vocab_size, clock
        )
        self._seeds = random.Random(config.seed)
        self.async_scheduling = config.async_scheduling
        self.thread: threading.Thread | None = None
        self._made_by = os.getpid()
        self._in_flight: Batch | None = None
        self.peak_held_blocks = 0
        self.num_steps = 0
        self.last_batch = BatchSize(0, 0)
        # Last: while this works in the background, the system hands out new memory later.
        use_large_pages(weights_of(loaded.model))

    @property
    def max_num_seqs(self) -> int:
        """How many sequences may run side by side."""
        return self.capacity.max_num_seqs

    @property
    def draft_counts(self) -> Mapping[str, DraftCounts]:
        """Drafted and accepted tokens by source, since the engine was made."""
        return {} if self._speculator is None else self._speculator.counts

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self._requests)

    @property
    def has_unfinished_requests(self) -> bool:
        return len(self._requests) > 0

    def check_process(self) -> None:
        """Raise unless this process made the engine.

        Raises:
            RuntimeError: another process made it; a fork has none of its threads.
        """
        if os.getpid() != self._made_by:
            raise RuntimeError(
                f"this engine was made by process {self._made_by}: a fork has none of its threads, and cannot compute; make "
                'one in each process, with the start method "spawn" of multiprocessing'
            )

    def add(self, *requests: Request) -> None:
        """Queue requests that `request_factory` made, and draw seeds for those without one.

        Raises:
            ValueError: an unfinished request has the id of one of them.
            Exception: what a tokenizer or a grammar raises.
                Then none of the requests is queued, and later ones are answered as if these had never been made.
        """
        self._requests.check_ids(requests)
        before = self._seeds.getstate()
        try:
            for request in requests:
                if request.seed is None:
                    request.seed = self._seeds.getrandbits(63)
            begun = [begin_request(request, self.loaded.tokenizer) for request in requests]
        except BaseException:
            self._seeds.setstate(before)
            raise
        for request, groups in zip(requests, begun, strict=True):
            self._requests.add(request, groups)

    def check_pin(self, prompt: Prompt, ttl: float | None) -> None:
        """Raise, before its uncached part is computed, what pinning a prompt would raise.

        Raises:
            TypeError, ValueError: the prompt or ``ttl`` is impossible, or nothing of the prompt is cached.
            PinQuotaExceeded: more would be pinned than may be.
        """
        if not self.enable_prefix_caching:
            raise ValueError("pin: nothing is cached with enable_prefix_caching=False")
        if not prompt.write_cache:
            raise ValueError("cache: expected 'write' to be True for a prompt to pin, got False")
        tokens = self.request_factory.validate_prompt(prompt.token_ids)
        self.cache.check_pin(tokens, prompt.namespace, ttl)

    def unfinished_request(self, request_id: str) -> Request | None:
        """The request with this id, if it is waiting or running."""
        return self._requests.get(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request early and release its blocks; False: there is no such unfinished request. Not during a step."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._requests.abort(request)
        self._drop_stale_batch()
        return True

    def step(self) -> list[Request]:
        """Run one batch: schedule, execute, process.

        With asynchronous scheduling, the next batch is executed before the one in flight is processed (see `Batch`).

        If the model or sampling raises, the requests of that batch fail with it (`Request.failure`) and their blocks are
        released. All others continue with the next step, those of the batch in flight included.

        Returns:
            The requests that got tokens, ended or failed; with asynchronous scheduling, those of the previous batch.

        Raises:
            Exception: scheduling or something else raised it without a request at fault, and none has failed; or a batch
                has failed and left the cache damaged, or the GPU unusable.
            KeyboardInterrupt, SystemExit: the requests of the batch that it interrupted have failed with it.
        """
        touched: list[Request] = []
        try:
            self._step(touched)
        except _BatchError as failed:
            self.cache.check()
            self._runner.check_device()
            touched += failed.requests
        finally:
            self._drop_stale_batch()
        touched += self._requests.finish_ended_elsewhere()
        self._open_cache.publish_events()
        return list(dict.fromkeys(touched))

    def _step(self, touched: list[Request]) -> None:
        """Run one batch, and add the requests that it concerned to ``touched``."""
        in_flight = self._in_flight
        # If one of these raises, the batch in flight is processed by the next step.
        batch = self._schedule(in_flight)
        with self._failing_only(batch):
            stays_in_flight = self._execute(batch, in_flight)
        self._in_flight = batch if stays_in_flight else None
        with self._failing_only(in_flight, None if stays_in_flight else batch):
            if in_flight is not None:  # while the new batch is computed
                touched += self._process(in_flight)
            if self._speculator is not None:
                self._speculator.landed(in_flight, following=batch)
        if not stays_in_flight:
            with self._failing_only(batch):
                touched += self._process(batch)
                if self._speculator is not None:
                    self._speculator.learn(batch)
        if not batch.chunks and in_flight is None and (self.tiers is None or not self.tiers.wait()):
            touched += self._requests.fail_first_without_room()

    def _drop_stale_batch(self) -> None:
        """Drop a batch in flight of which nothing will be used: its logits take memory for as long as it is held."""
        if self._in_flight is not None and self._in_flight.is_stale:
            self._in_flight = None

    def _schedule(self, in_flight: Batch | None) -> Batch:
        """The next batch; empty if nothing can run before the batch in flight is processed, or at all."""
        self._output_processor.begin_step()
        if self.tiers is not None:
            self.tiers.loads.publish_done()
        # Drafters see no tokens that are in flight.
        if in_flight is not None and self._speculator is not None and self._speculator.wants_tokens(in_flight):
            return Batch([])
        batch = Batch(self.scheduler.schedule())
        if batch.chunks:
            self.peak_held_blocks = max(self.peak_held_blocks, self.cache.num_held_blocks)
            self.num_steps += 1
        return batch

    def _execute(self, batch: Batch, in_flight: Batch | None) -> bool:
        """Compute a batch; True: its tokens stay on the device until the next batch is executed."""
        self._compute_timer.begin_step(batch, in_flight)
        if self.tiers is not None:
            self.tiers.before_pool_writes(self._runner.copy_blocks)
        if batch.chunks:
            if self._speculator is not None:
                self._speculator.draft(batch)
            self.last_batch = BatchSize(len(batch.chunks), batch.num_tokens)
            self._executor.execute(batch, in_flight)
        stays_in_flight = self.async_scheduling and batch.tokens is not None
        if stays_in_flight:
            batch.append_placeholders()
        return stays_in_flight

    def _process(self, batch: Batch) -> list[Request]:
        """Append a batch's tokens, and remove the requests that it ended."""
        processed = self._output_processor.process(batch)
        self._compute_timer.landed(batch)
        for request in dict.fromkeys(processed.changed):
            if request.failure is not None:
                self._requests.discard(request)
            elif all(sequence.finish_reason is not None for sequence in request.sequences):
                self._requests.finish(request)
                self.pins.restore(request, self.tenant_pins.keep)
        return processed.touched

    @contextmanager
    def _failing_only(self, *batches: Batch | None) -> Iterator[None]:
        """If the code inside raises, fail the batches' requests, and no others.

        Raises:
            _BatchError: it raised, and some have failed.
            BaseException: what it raised, if it concerns no unfinished request, or ends the process.
        """
        try:
            yield
        except BaseException as error:  # panics of Rust code are no `Exception`, and crashes like any other
            requests = [request for batch in batches if batch is not None for request in batch.requests]
            # What the blocks contain now is unknown: nothing more of these batches may be published.
            num_failed = self._requests.fail(requests, as_exception(error))
            if not num_failed or isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise _BatchError(requests) from error

    def write_behind(self) -> bool:
        """Between steps, and with no request left: `KVTiers.send_some`."""
        return self.tiers is not None and self.tiers.send_some()

    def shutdown(self, seconds_left: Callable[[], float]) -> None:
        """Write what is cached into the tiers, most recently used first, and close them and the publisher.

        The engine can still compute afterwards, without tiers.

        Args:
            seconds_left: for writing what is cached. What is queued already has a few seconds at least.
        """
        if self.tiers is not None:
            self.tiers.write_hot(seconds_left)
        self.close(seconds_left())

    def close(self, grace_seconds: float = 0.0) -> None:
        """Close the tiers and the publisher; of what is cached, only what is queued for the tiers is written.

        Args:
            grace_seconds: for writing that; a few seconds at least.
        """
        self._open_cache.close(max(_QUEUE_SECONDS, grace_seconds))

    def clear(self, selection: NamespaceSelection) -> Cleared:
        """Forget what is cached for the selected namespaces, in tiers too, except what running requests use."""
        if self.tiers is not None:
            self.tiers.loads.end_unwanted()  # their blocks would count as held
        with nullcontext() if self.tiers is None else self.tiers.clearing_groups_once():
            cleared = clear(self.cache, selection)
        self._requests.note_cleared(selection)
        if selection.name is not None:
            self.pins.store_again(selection.name)
        self._open_cache.publish_events()
        return cleared

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no running request uses, in tiers too; True: the pool holds nothing any more."""
        self.clear(ALL_NAMESPACES)
        return self.cache.num_held_blocks == 0
