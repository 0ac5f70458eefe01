"""Refuses requests, or prepares them for the engine while they hold queue slots."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from radixkv.errors import DrainingError, EngineDeadError, QueueFullError, RequestTooLargeError
from radixkv.model.text_interface import TextInterface
from radixkv.prompts import Prompt, tokenize_bad_words, with_answer_form
from radixkv.sampling.grammar.compiler import GrammarCompiler
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.queue_slots import QueueSlots
from radixkv.scheduling.tenant_share import TenantShare, share_of
from radixkv.serving.fair_thread import FairThread

if TYPE_CHECKING:
    from radixkv.engine.request_factory import RequestFactory
    from radixkv.scheduling.request import Request

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What a request is made of, apart from its id; whatever takes long is done."""

    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    bad_words: list[list[int]]
    priority: int
    tenant: str
    resumed: Request | None = None

    def make(self, factory: RequestFactory, request_id: str) -> Request:
        """The request.

        Raises:
            Exception: what `RequestFactory.make` raises.
        """
        if self.resumed is not None:
            self.resumed.request_id = request_id
            return self.resumed
        return factory.make(
            request_id, self.prompt, self.params, priority=self.priority, tenant=self.tenant, bad_words=self.bad_words
        )


class IntakeEngine(Protocol):
    """What `RequestIntake` needs of the engine, or of engines elsewhere, that will run the requests."""

    @property
    def loaded(self) -> TextInterface: ...

    @property
    def grammars(self) -> GrammarCompiler: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def request_factory(self) -> RequestFactory | None:
        """Makes the requests; None: they are made elsewhere."""


class RequestIntake:
    """Refuses requests that may not come in now, and tokenizes and compiles what the others need, in threads of its own.

    It belongs to one event loop, in whose thread all its methods are called.

    Args:
        engine: that will run the requests.
        max_queue: requests that may be unfinished at a time beside those that run; None: any number.
        max_seqs_per_request: bound of ``n`` and of the beam width.
        tenants: what each tenant may have, by its name.

    Attributes:
        draining: refuse all requests but those that were `coming_in` before.
        death: why the engine has died; None while it is alive.
        slots: of the unfinished requests; a submitted one holds its slot until it is given back.
    """

    def __init__(
        self,
        engine: IntakeEngine,
        max_queue: int | None,
        max_seqs_per_request: int,
        tenants: Mapping[str, TenantShare],
    ) -> None:
        self.draining = False
        self.death: EngineDeadError | None = None
        self._max_seqs_per_request = max_seqs_per_request
        self._engine = engine
        self._max_queue = max_queue
        self.slots = QueueSlots(tenants)
        self._ids = itertools.count()
        # Compiles grammars before their requests are added, so that no step has to wait for that.
        self._grammar_thread = FairThread("radixkv-grammar")
        # A single thread, because tokenizers are not thread-safe. The engine's thread only decodes.
        self._tokenizer_thread = FairThread("radixkv-tokenizer")
        self._shut_down = False
        self._coming_in: set[asyncio.Task[Any] | None] = set()  # the tasks that bring requests
        self._nothing_coming_in = asyncio.Event()
        self._nothing_coming_in.set()
        self._mean_seconds = 1.0

    @property
    def max_unfinished(self) -> int | None:
        """Requests that may be unfinished at a time; None: any number. It changes as engines elsewhere come and go."""
        return None if self._max_queue is None else self._engine.max_num_seqs + self._max_queue

    @contextmanager
    def coming_in(self) -> Iterator[None]:
        """Announces requests: inside, the current task has them tokenized and submits them, even if draining begins.

        Raises:
            DrainingError, EngineDeadError: they may not come in now.
        """
        self._refuse_if_stopped()
        task = asyncio.current_task()
        self._coming_in.add(task)
        self._nothing_coming_in.clear()
        try:
            yield
        finally:
            self._coming_in.remove(task)
            if not self._coming_in:
                self._nothing_coming_in.set()

    @property
    def is_any_coming_in(self) -> bool:
        """Whether requests are inside `coming_in`."""
        return bool(self._coming_in)

    async def finish(self, idle: asyncio.Event, grace_seconds: float) -> bool:
        """Refuse new requests, and wait until nothing is coming in and the engine is ``idle``, or the time is over.

        Returns:
            Whether all that was coming in has come in.
        """
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._nothing_coming_in.wait()
                await idle.wait()
        return not self._coming_in

    async def run_tokenizer(self, function: Callable[[], _T], tenant: str, num_slots: int) -> _T:
        """Run a function in the tokenizer's thread; see `AsyncLLM.run_tokenizer`."""
        with self._slots_for(num_slots, tenant) if num_slots else nullcontext():
            return await self._run_in(self._tokenizer_thread, tenant, function)

    async def prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        priority: int,
        tenant: str,
        *,
        accepted: bool = False,
    ) -> list[PreparedRequest]:
        """Compile the grammars and tokenize the words that the requests need; meanwhile they hold queue slots.

        Raises:
            RequestTooLargeError: more sequences than one request, or this tenant, may have.
            QueueFullError, DrainingError, EngineDeadError: as `refuse_if_full`.
            ValueError: likewise, or a grammar or a word is impossible.
        """
        self._check_num_seqs(params, tenant)
        params_of_each = [with_answer_form(params, prompt.answer_form) for prompt in prompts]
        with self._slots_for(len(prompts), tenant, accepted):
            # Mostly the same object for all prompts.
            for one in {id(each): each for each in params_of_each}.values():
                if one.structured_outputs is not None:
                    compile_grammar = partial(self._engine.grammars.compile, one.structured_outputs)
                    await self._run_in(self._grammar_thread, tenant, compile_grammar)
            bad_words: list[list[int]] = []
            if isinstance(params, SamplingParams) and params.bad_words:
                tokenize = partial(tokenize_bad_words, params.bad_words, self._engine.loaded)
                bad_words = await self._run_in(self._tokenizer_thread, tenant, tokenize)
            prepared = [
                PreparedRequest(prompt, each, bad_words, priority, tenant)
                for prompt, each in zip(prompts, params_of_each, strict=True)
            ]
            return [await self._with_replay(each) for each in prepared]

    def refuse_if_full(self, count: int, tenant: str, *, accepted: bool = False) -> None:
        """Raise unless a tenant may submit ``count`` more requests now.

        Args:
            accepted: another engine had accepted them, so they need no free slots.

        Raises:
            QueueFullError: too many are unfinished.
            DrainingError, EngineDeadError: no requests are taken any more.
            ValueError: so many are refused even to a tenant that has all to itself.
        """
        self._refuse_if_stopped()
        limit = self.max_unfinished
        if accepted or limit is None:
            return
        refusal = self.slots.refusal(tenant, count, limit)
        if refusal is not None:
            most = self.slots.most(tenant, limit)
            if count > most:
                raise ValueError(f"prompts: expected at most {most} in one request, got {count}")
            # Of n requests that run side by side, one finishes about every n-th of their mean duration.
            seconds = math.ceil(self._mean_seconds * count / self._engine.max_num_seqs)
            raise QueueFullError(refusal, retry_after=max(1, min(60, seconds)))

    def request_ids(self, request_id: str | None, count: int, unfinished: Container[str]) -> list[str]:
        """The ids of ``count`` requests: ``request_id``, or ``request_id-0`` and so on where there are several.

        Args:
            request_id: None: a new one.
            unfinished: the ids that are taken.

        Raises:
            ValueError: one of them is taken.
        """
        base = f"request-{next(self._ids)}" if request_id is None else request_id
        ids = [base] if count == 1 else [f"{base}-{index}" for index in range(count)]
        for each_id in ids:
            if each_id in unfinished:
                raise ValueError(f"request_id {each_id!r} belongs to an unfinished request")
        return ids

    def note_duration(self, seconds: float) -> None:
        """Note how long a request took from its arrival to its end."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def shut_down(self) -> None:
        """Refuse what is still coming in, too, and stop the threads; what waits in them is still run."""
        self._shut_down = True
        self._tokenizer_thread.shutdown()
        self._grammar_thread.shutdown()

    async def _with_replay(self, prepared: PreparedRequest) -> PreparedRequest:
        """Replay what was generated elsewhere here: on the engine's thread, a long answer would hold up all streams."""
        factory = self._engine.request_factory
        if not prepared.prompt.resume or factory is None:
            return prepared
        make = partial(prepared.make, factory, "")
        return replace(prepared, resumed=await self._run_in(self._tokenizer_thread, prepared.tenant, make))

    async def _run_in(self, thread: FairThread, tenant: str, function: Callable[[], _T]) -> _T:
        if self._shut_down:
            self._refuse_if_stopped()
        return await asyncio.wrap_future(thread.submit(tenant, function))

    def _check_num_seqs(self, params: SamplingParams | BeamSearchParams, tenant: str) -> None:
        """Refuse more sequences side by side than one request, or this tenant, may ever have."""
        name, count = ("n", params.n) if isinstance(params, SamplingParams) else ("beam_width", params.beam_width)
        if count > self._max_seqs_per_request:
            raise RequestTooLargeError(
                f"{name}: expected at most {self._max_seqs_per_request} sequences in one request "
                f"(max_seqs_per_request), got {count}"
            )
        limit = share_of(tenant, self.slots.tenants).max_num_seqs
        if limit is not None and count > limit:
            raise RequestTooLargeError(f"{name}: expected at most {limit}, the tenant's limit, got {count}")

    def _refuse_if_stopped(self) -> None:
        if self.death is not None:
            raise EngineDeadError(str(self.death)) from self.death
        if self._shut_down or (self.draining and asyncio.current_task() not in self._coming_in):
            raise DrainingError("no new requests are taken: the engine is finishing what it has, or was closed")

    @contextmanager
    def _slots_for(self, count: int, tenant: str, accepted: bool = False) -> Iterator[None]:
        """Hold queue slots while requests are prepared: tokenizing counts like generating."""
        self.refuse_if_full(count, tenant, accepted=accepted)
        self.slots.take(tenant, count)
        try:
            yield
        finally:
            self.slots.give_back(tenant, count)
