"""Several replicas as one model: prompts are written and tokenized here, without weights, and answered by the replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from radixkv.cluster.counters import stats_of
from radixkv.cluster.description import ReplicaDescription
from radixkv.cluster.replica_calls import all_answers
from radixkv.cluster.replica_explanations import explain_by_replicas
from radixkv.cluster.replica_pins import keep_prefix
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.cluster.replica_text import newest_interface
from radixkv.cluster.wire import encode_selection
from radixkv.config import ModelConfig
from radixkv.engine.clearing import Cleared, NamespaceSelection
from radixkv.engine.stats import SUMMED_GAUGES, BatchSize, EngineStats
from radixkv.errors import DrainingError, EngineDeadError, RequestTooLargeError
from radixkv.model.text_interface import TextInterface
from radixkv.observe.prompt_explanation import PromptExplanation
from radixkv.outputs import RequestMetrics
from radixkv.prompts import Prompt
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.request_validation import validate_prompt, validate_token_ids
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.serving.request_intake import RequestIntake
from radixkv.serving.request_stream import RequestStream

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False, slots=True)
class _Unfinished:
    """A request whose stream is neither read to its end nor closed.

    Attributes:
        accepted: done when a replica has accepted it, or with the error that keeps it from that.
        task: reads its answer into the stream.
    """

    stream: RequestStream
    accepted: asyncio.Future[None]
    task: asyncio.Task[None]


class ClusterLLM:
    """Takes the place of `AsyncLLM` in a server over replicas, and of the engine for `RequestIntake`.

    Args:
        loaded: how the model reads and writes text. An update replaces all of it but the tokenizer, which gets the new
            replicas' chat template.
        replicas: that answer.
        model_config: as for `text_interface`; a ``chat_template`` in it is kept.
        max_queue: how many requests may be unfinished beyond the sequences that run side by side on all replicas; None: any
            number. Each replica has a bound of its own, too.
        max_seqs_per_request: bound of ``n`` and of the beam width; None: half of what the smallest replica runs side by side.
        tenants: what each tenant may have.

    Attributes:
        grammars: compiles the grammars of requests; each replica compiles them again.
    """

    def __init__(
        self,
        loaded: TextInterface,
        replicas: ReplicaSet,
        *,
        model_config: ModelConfig | None = None,
        max_queue: int | None = None,
        max_seqs_per_request: int | None = None,
        tenants: Mapping[str, TenantShare] | None = None,
    ) -> None:
        self._loaded = loaded
        self._loaded_as_of = -1
        self._model_config = model_config or ModelConfig()
        self.replicas = replicas
        self.grammars = GrammarCompiler(loaded)
        self.request_factory = None  # replicas make the requests
        self.on_step: Callable[[EngineStats], None] | None = None  # nothing steps here
        smallest = min(capacity["max_num_seqs"] for capacity in replicas.generations.capacities)
        max_seqs_per_request = max_seqs_per_request or max(1, smallest // 2)
        self._intake = RequestIntake(self, max_queue, max_seqs_per_request, tenants or {})
        self._unfinished: dict[str, _Unfinished] = {}
        self._has_aborted = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def loaded(self) -> TextInterface:
        """How the newest generation reads and writes text, with the length of sequences that fit on every replica."""
        generations = self.replicas.generations
        if self._loaded_as_of != generations.num_changes:
            # Prompts that are written already keep their form of answer.
            self._loaded = newest_interface(generations, self._loaded.tokenizer, self._model_config)
            self._loaded_as_of = generations.num_changes
        return self._loaded

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at a time on all replicas together."""
        return max(1, sum(capacity["max_num_seqs"] for capacity in self.replicas.generations.capacities))

    # -- requests ------------------------------------------------------------------------------------------------

    def coming_in(self) -> AbstractContextManager[None]:
        """As `AsyncLLM.coming_in`."""
        return self._intake.coming_in()

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        times: Sequence[RequestMetrics] | None = None,
    ) -> list[RequestStream]:
        """As `AsyncLLM.submit`: when it returns, replicas have accepted the requests.

        Args:
            prompts: tokenized.
            params: of all of them.
            request_id: of the first.
            priority: among the tenant's own requests.
            tenant: on whose behalf.
            times: as for `AsyncLLM.submit`.

        Raises:
            Exception: what `AsyncLLM.submit` and `ReplicaStreams.generate` raise.
        """
        times = times or [RequestMetrics(time.monotonic()) for _ in prompts]
        await self._intake.prepare(prompts, params, priority, tenant)
        self._intake.refuse_if_full(len(prompts), tenant)
        ids = self._intake.request_ids(request_id, len(prompts), unfinished=self._unfinished)
        loop = asyncio.get_running_loop()
        forget = partial(self._forget, tenant)
        streams = [RequestStream(each_id, forget, each) for each_id, each in zip(ids, times, strict=True)]
        bounded = [self._bounded(params, prompt) for prompt in prompts]  # may raise, so before any slot is taken
        self._intake.slots.take(tenant, len(streams))
        self._idle.clear()
        acceptances = [loop.create_future() for _ in streams]
        for stream, prompt, each, accepted in zip(streams, prompts, bounded, acceptances, strict=True):
            task = asyncio.ensure_future(self._answer(stream, prompt, each, priority, tenant, accepted))
            self._unfinished[stream.request_id] = _Unfinished(stream, accepted, task)
        try:
            await asyncio.gather(*acceptances)
        except BaseException:
            for stream, accepted in zip(streams, acceptances, strict=True):
                stream.close()
                if accepted.done() and not accepted.cancelled():
                    accepted.exception()
            raise
        return streams

    def fail(self, request_id: str, error: Exception) -> None:
        """As `AsyncLLM.fail`."""
        request = self._unfinished.get(request_id)
        if request is not None and not request.stream.ended:
            request.stream.put(error)
            if not request.accepted.done():
                request.accepted.set_exception(error)
            request.task.cancel()

    async def run_tokenizer(
        self, function: Callable[[TextInterface], _T], *, tenant: str = "", num_slots: int = 1
    ) -> _T:
        """As `AsyncLLM.run_tokenizer`.

        Args:
            function: given how the model reads text.
            tenant: on whose behalf.
            num_slots: queue slots that are taken meanwhile.

        Raises:
            Exception: what `AsyncLLM.run_tokenizer` raises.
        """
        return await self._intake.run_tokenizer(partial(function, self.loaded), tenant, num_slots)

    # -- all replicas --------------------------------------------------------------------------------------------

    async def set_tenants(self, tenants: Mapping[str, TenantShare]) -> None:
        """What each tenant may have, here and on every replica."""
        self._intake.slots.tenants = tenants
        await self.replicas.set_tenants(tenants)

    async def clear(self, selection: NamespaceSelection) -> Cleared:
        """Forget what is cached of these namespaces, on all replicas, and on removed ones that finish their streams.

        Returns:
            Sums over the replicas; ``namespaces`` is that of the replica that had most of them.

        Raises:
            ReplicasLostError: some are down, were never reached, or failed; the message names them. The others have cleared
                theirs.
        """
        self.replicas.streams.stop_caching(selection)
        # A replica that leaves writes what it holds into its tiers, which others may share, when it ends.
        answers = await self.replicas.ask_all("POST", "/clear", encode_selection(selection), leaving=True)
        each = [Cleared(**answer.json()) for answer in all_answers(answers).values()]
        sums = Cleared(*map(sum, zip(*each, strict=True)))
        return sums._replace(namespaces=max(one.namespaces for one in each))

    async def explain_prompts(self, prompts: Sequence[Prompt], *, tenant: str = "") -> list[PromptExplanation]:
        """As `AsyncLLM.explain_prompts`, each by the replica that would reuse most of the prompt.

        Args:
            prompts: tokenized.
            tenant: on whose behalf.

        Raises:
            TypeError, ValueError: what `validate_token_ids` raises.
            ReplicasLostError: none answers.
        """
        for prompt in prompts:
            validate_token_ids(prompt.token_ids, self.loaded.vocab_size)
        return await explain_by_replicas(self.replicas, prompts, tenant)

    async def keep(self, tenant: str, namespace: str, token_ids: Sequence[int], ttl: float) -> int:
        """See `keep_prefix`."""
        return await keep_prefix(self.replicas, tenant, namespace, token_ids, ttl)

    @property
    def stats(self) -> EngineStats:
        """Sums: of the state of all replicas that are up, and of what all that ever were up have counted."""
        loads = list(self.replicas.loads.values())
        sums: dict[str, Any] = {name: sum(getattr(load, name) for load in loads) for name in SUMMED_GAUGES}
        if not sums["num_blocks"]:
            sums["num_blocks"] = sums["num_free_blocks"] = 1  # others divide by it, and nothing is in use
        return EngineStats(**sums, **stats_of(self.replicas.counters.totals()), last_batch=BatchSize(0, 0))

    # -- lifecycle -----------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._intake.draining

    @property
    def death(self) -> EngineDeadError | None:
        """None: when a replica dies, others go on with its work."""
        return None

    @property
    def block_size(self) -> int:
        """Tokens per block of every replica's cache."""
        return int(self._newest.identity["block_size"])

    @property
    def seconds_in_step(self) -> float:
        """0: each replica watches its own engine."""
        return 0.0

    @property
    def num_slots_taken(self) -> int:
        """As `AsyncLLM.num_slots_taken`."""
        return self._intake.slots.num_taken

    @property
    def is_drained(self) -> bool:
        """Whether it refuses new requests, and none is unfinished or coming in."""
        return self.draining and not self._unfinished and not self._intake.is_any_coming_in

    async def wait_for_death(self) -> EngineDeadError:
        """Never returns."""
        await asyncio.Event().wait()
        raise AssertionError

    def start_draining(self) -> None:
        """As `AsyncLLM.start_draining`."""
        self._intake.draining = True

    async def shutdown(self, grace_seconds: float = 0.0) -> bool:
        """Refuse new requests, as `AsyncLLM.shutdown` does, give unfinished ones ``grace_seconds``, and abort the rest.

        Returns:
            Whether all requests finished without being aborted, by this call or an earlier one.
        """
        finished = await self._intake.finish(self._idle, grace_seconds)
        self._intake.shut_down()
        cut_short = list(self._unfinished)
        for request_id in cut_short:
            self.fail(request_id, DrainingError("the server is shutting down; the answer is incomplete"))
        self._has_aborted = self._has_aborted or bool(cut_short) or not finished
        return not self._has_aborted

    # -- internals -----------------------------------------------------------------------------------------------

    @property
    def _newest(self) -> ReplicaDescription:
        newest = self.replicas.generations.newest
        assert newest is not None
        return newest

    def _bounded(self, params: SamplingParams | BeamSearchParams, prompt: Prompt) -> SamplingParams | BeamSearchParams:
        """Parameters with as many tokens as fit on the smallest replica, so that an answer ends at the same token on each.

        Raises:
            Exception: what `validate_prompt` raises.
        """
        loaded, model_length = self.loaded, self._newest.identity["model_length"]
        tokens = validate_prompt(prompt.token_ids, loaded.vocab_size, loaded.max_model_len, model_length)
        most = loaded.max_model_len - len(tokens)
        if params.max_tokens is not None and params.max_tokens <= most:
            return params
        if isinstance(params, BeamSearchParams):
            return replace(params, max_tokens=most)
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    async def _answer(
        self,
        stream: RequestStream,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        priority: int,
        tenant: str,
        accepted: asyncio.Future[None],
    ) -> None:
        """Read a request's answer into its stream."""

        def accept() -> None:
            if not accepted.done():
                accepted.set_result(None)

        options: Any = {"priority": priority, "tenant": tenant, "times": stream.times, "on_accepted": accept}
        try:
            while True:
                try:
                    await self._read(stream, prompt, params, options)
                    return
                except RequestTooLargeError:
                    shorter = self._bounded(params, prompt)
                    if accepted.done() or shorter is params:
                        raise
                    params = shorter  # for a smaller replica that came up after they were bounded
        except Exception as error:
            if stream.ended:
                return  # failed from here meanwhile
            if accepted.done():
                stream.put(error)
            else:
                accepted.set_exception(error)

    async def _read(
        self, stream: RequestStream, prompt: Prompt, params: SamplingParams | BeamSearchParams, options: Any
    ) -> None:
        streams = self.replicas.streams
        if isinstance(params, BeamSearchParams):
            result = await streams.beam_search(prompt, params, stream.request_id, **options)
            self._note_duration(result.metrics)
            stream.put(result)
            return
        async for delta in streams.generate(prompt, params, stream.request_id, **options):
            if delta.finished:
                self._note_duration(delta.metrics)
            stream.put(delta)

    def _note_duration(self, metrics: RequestMetrics) -> None:
        assert metrics.finished_time is not None
        self._intake.note_duration(metrics.finished_time - metrics.arrival_time)

    def _forget(self, tenant: str, stream: RequestStream) -> None:
        request = self._unfinished.pop(stream.request_id)
        self._intake.slots.give_back(tenant)
        if not stream.ended:
            request.task.cancel()  # which closes its connection, and so aborts it where it runs
        if not self._unfinished:
            self._idle.set()
