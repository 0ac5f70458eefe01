"""Streams that survive the replica they are on.

The ingress keeps the tokens that it has delivered. When a replica dies, is drained or breaks off, another one gets the
prompt with those tokens, and goes on with the next (`radixkv.engine.resumption`): the client sees a pause, and then the
text that it would have got from the first.

A request that crashes engines would take down one replica after another. When a replica dies, every request that it had is
suspected. So a replica gets suspected requests one at a time, the next when it has computed a token of the one before; and a
request that two replicas had when they died, without a token in between, is refused.

Only replicas of the same generation continue what one of them has begun (`radixkv.cluster.generations`): others would give
other tokens.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

import httpx

from radixkv.cache.tokens import MAX_TOKEN_ID
from radixkv.cluster.answer_checks import AnswerChecks
from radixkv.cluster.answer_lines import answer_lines, has_died
from radixkv.cluster.attempt import Attempt, MovedError
from radixkv.cluster.connection import check_secret
from radixkv.cluster.losses import Losses, LostError, RefusedError
from radixkv.cluster.received_answer import ReceivedAnswer
from radixkv.cluster.sent_request import SentRequest
from radixkv.cluster.wire import (
    ACCEPTED_HEADER,
    decode_beams,
    decode_delta,
    is_scheduled,
    private_headers,
)
from radixkv.engine.clearing import NamespaceSelection
from radixkv.engine.resume_checks import check_resumable
from radixkv.outputs import BeamSearchOutput, CompletionOutput, RequestMetrics, RequestOutput
from radixkv.prompts import Prompt, with_answer_form
from radixkv.routing import Placement, Router, prompt_hashes
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.request_validation import validate_token_ids

# Pause before a replica that has lost a request gets it again.
_SECONDS_BETWEEN_ATTEMPTS = 0.25

_Params = TypeVar("_Params", SamplingParams, BeamSearchParams)
_Piece = TypeVar("_Piece", RequestOutput, BeamSearchOutput)


def _piece(read: Callable[[Mapping[str, Any]], _Piece], line: Mapping[str, Any], replica: str) -> _Piece:
    """A line as a piece of the answer.

    Raises:
        LostError: it is not a valid piece.
    """
    try:
        return read(line)
    except (ValueError, TypeError, KeyError) as error:
        raise LostError(f"{replica}: it did not send a piece of an answer: {error!r}") from error


def _has_tokens(piece: RequestOutput | BeamSearchOutput) -> bool:
    """Whether it brings tokens with which another replica can go on; a search starts over."""
    return isinstance(piece, RequestOutput) and any(output.token_ids for output in piece.outputs)


class ReplicaStreams:
    """Has replicas answer requests, and moves the requests of a replica that is lost.

    Args:
        router: has the replicas under the same names as ``clients``.
        clients: of each replica's `replica_app`, by name, with the replica's address as its base. The mapping may change at
            any time: a restarted replica gets a new client.
        secret: the replicas'.
        sender: the number by which replicas distinguish its requests from those of other ingresses. By default they do not.
        generations: the generation of each replica, by its name; like ``clients``, it may change. By default there is one.
        rooms: the most tokens of a sequence that each replica has room for, by its name, likewise. By default any number.
        vocab_size: of all replicas: answers have only token ids below it. By default any.
        wait_seconds: how long a request waits for a replica where there is none; see `replica_is_up`.

    Attributes:
        router: see above.

    Raises:
        TypeError, ValueError: the secret is impossible.
    """

    def __init__(
        self,
        router: Router,
        clients: Mapping[str, httpx.AsyncClient],
        secret: str,
        *,
        sender: int = 0,
        generations: Mapping[str, str] = MappingProxyType({}),
        rooms: Mapping[str, float] = MappingProxyType({}),
        vocab_size: int = MAX_TOKEN_ID + 1,
        wait_seconds: float = 0.0,
    ) -> None:
        check_secret(secret)
        self.router = router
        self._clients = clients
        self._generations = generations
        self._rooms = rooms
        self._vocab_size = vocab_size
        self._seeds = random.SystemRandom()
        self._headers = private_headers(secret, sender)
        self._wait_seconds = wait_seconds
        self._attempts: dict[httpx.AsyncClient, set[Attempt]] = {}
        self._trials: dict[httpx.AsyncClient, asyncio.Lock] = {}
        self._arrival = asyncio.Event()
        self._sent: WeakSet[SentRequest] = WeakSet()  # their streams own them

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        times: RequestMetrics | None = None,
        on_accepted: Callable[[], object] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, piece by piece, as `AsyncLLM.generate` does; leaving the iteration early aborts it.

        Args:
            prompt: tokenized.
            params: how to choose tokens; without a seed, one is drawn here, because every replica needs the same.
            request_id: shown in the outputs.
            priority: among the tenant's own requests.
            tenant: on whose behalf.
            times: updated as the request progresses; None: it is timed from this call.
            on_accepted: called once, when a replica has accepted the request.

        Raises:
            TypeError, ValueError: a token id or a parameter is impossible; or the replica refuses the request, as any would;
                or ``prompt.resume`` is given without a seed, or not for every sample.
            StructuredOutputError: as `AsyncLLM.generate`.
            QueueFullError: all replicas have too much to do. Not raised once a replica has accepted the request: if that
                replica is lost, others queue it.
            RequestTooLargeError: it would fit into no replica that is up.
            NoBlocksLeftError: pins left it no room on two replicas, or on the only one.
            RequestCrashesError: two replicas died while they had it, at the same token.
            ReplicasLostError: four replicas lost it without a token in between, or there is no other replica.
        """
        prompt, params = self._validated(prompt, params)
        if prompt.resume:
            check_resumable(params, prompt.resume)  # checked here: a replica always gets a seed and every sample
        if params.seed is None and not params.greedy:
            params = replace(params, seed=self._seeds.getrandbits(63))
        times = times or RequestMetrics(time.monotonic())
        known = RequestOutput(request_id, prompt.text, list(prompt.token_ids), None, [], False, 0, times)
        received = ReceivedAnswer(params.n, prompt.resume, params.max_tokens, times)
        checks = AnswerChecks(known.prompt_token_ids, params, self._vocab_size)
        request = SentRequest(request_id, prompt, params, priority, tenant, times, on_accepted)

        def resume() -> Sequence[CompletionOutput]:
            received.begin_attempt()
            return received.outputs

        def read(line: Mapping[str, Any]) -> RequestOutput:
            return received.add(checks.checked(decode_delta(line, known)))

        async with aclosing(self._pieces(request, resume, read)) as deltas:
            async for delta in deltas:
                if delta.finished:
                    times.finished_time = time.monotonic()
                if delta.finished or delta.has_news:
                    yield delta
                if delta.finished:
                    return

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        times: RequestMetrics | None = None,
        on_accepted: Callable[[], object] | None = None,
    ) -> BeamSearchOutput:
        """The best continuations of a prompt, as `AsyncLLM.beam_search` finds them; a search that is lost starts over.

        Args:
            prompt: tokenized.
            params: of the search.
            request_id: for errors.
            priority: among the tenant's own requests.
            tenant: on whose behalf.
            times: updated as the request progresses; None: it is timed from this call.
            on_accepted: called once, when a replica has accepted the request.

        Raises:
            Exception: what `generate` raises.
        """
        prompt, params = self._validated(prompt, params)
        times = times or RequestMetrics(time.monotonic())
        checks = AnswerChecks(prompt.token_ids, params, self._vocab_size)
        request = SentRequest(request_id, prompt, params, priority, tenant, times, on_accepted)

        def read(line: Mapping[str, Any]) -> BeamSearchOutput:
            if not line["finished"]:
                return BeamSearchOutput([], len(prompt.token_ids), 0, times)  # see `encode_begun`
            return checks.checked_beams(decode_beams(line, times))

        async with aclosing(self._pieces(request, lambda: prompt.resume, read)) as results:
            async for result in results:
                if result.sequences:
                    result.metrics.scheduled_time = times.scheduled_time
                    result.metrics.first_token_time = times.first_token_time
                    result.metrics.finished_time = times.finished_time = time.monotonic()
                    return result
        raise AssertionError("only its result ends a search")

    def replica_is_up(self) -> None:
        """A replica is up: requests that wait for one try again."""
        self._arrival.set()
        self._arrival = asyncio.Event()

    def move(self, client: httpx.AsyncClient) -> None:
        """Continue a replica's streams elsewhere, at once; those that no other replica can continue stay where they are.

        Args:
            client: of the replica, which the router chooses no more.
        """
        elsewhere = {(self._generations.get(name), self._rooms.get(name, math.inf)) for name in self.router.replicas}
        for attempt in self._attempts.get(client, ()):
            attempt.move(elsewhere)

    def abandon(self, client: httpx.AsyncClient) -> None:
        """A replica has died: do not wait for it any longer."""
        for attempt in self._attempts.get(client, ()):
            attempt.abandon()

    def stop_caching(self, selection: NamespaceSelection) -> None:
        """Prompts of these namespaces that run now are not cached by the replicas on which they go on."""
        for sent in self._sent:
            if sent.prompt.namespace in selection:
                sent.prompt = replace(sent.prompt, write_cache=False)

    def num_streams(self, replica: str) -> int:
        """How many streams are on the replica that has this name now."""
        client = self._clients.get(replica)
        return 0 if client is None else self.num_on(client)

    def num_on(self, client: httpx.AsyncClient) -> int:
        """How many streams are on a replica, even if it was removed and another one has its name."""
        return len(self._attempts.get(client, ()))

    def _validated(self, prompt: Prompt, params: _Params) -> tuple[Prompt, _Params]:
        """The prompt with its ids as Python's numbers, and a copy of the parameters for its form of answer.

        Both are validated anew, as an engine does it: ids may be numpy's, and programs assign to fields of parameters.
        """
        token_ids = validate_token_ids(prompt.token_ids, self._vocab_size).tolist()
        return replace(prompt, token_ids=token_ids), with_answer_form(replace(params), prompt.answer_form)

    async def _pieces(
        self,
        request: SentRequest,
        resume: Callable[[], Sequence[CompletionOutput]],
        read: Callable[[Mapping[str, Any]], _Piece],
    ) -> AsyncGenerator[_Piece, None]:
        """Pieces from one replica after another. The generator does not end by itself: its reader closes it after the last.

        Args:
            resume: what was received until now.
            read: makes a piece of a line.
        """
        self._sent.add(request)
        prompt, params = request.prompt, request.params
        hashes = prompt_hashes(prompt.token_ids, prompt.namespace, self.router.block_size)
        losses = Losses(request.request_id)
        num_tokens = len(prompt.token_ids) + (params.max_tokens or 0)
        while True:
            request.prompt = replace(request.prompt, resume=resume())
            known = hashes if request.prompt.reuses_prefixes(params) else []
            placement, client = await self._choose(known, request.prompt, losses)
            generation = self._generations.get(placement.replica)
            attempt = Attempt(placement.replica, generation, num_tokens, begun=losses.has_tokens)
            self._attempts.setdefault(client, set()).add(attempt)
            trial = ExitStack()  # the turn of a suspected request, which ends with its first token here
            try:
                if losses.suspected:
                    turn = self._trials.setdefault(client, asyncio.Lock())
                    await turn.acquire()
                    trial.callback(turn.release)
                headers = {**self._headers, ACCEPTED_HEADER: "1"} if losses.accepted else self._headers
                answer = answer_lines(placement.replica, client, request.body(), headers, attempt.send)
                async with aclosing(answer), aclosing(attempt.read(answer)) as lines:
                    async for line in lines:
                        if line is None:
                            losses.note_acceptance()
                            request.note_acceptance()
                            continue
                        if is_scheduled(line):
                            request.note_scheduling()
                            continue
                        piece = _piece(read, line, placement.replica)
                        has_tokens = _has_tokens(piece)
                        if has_tokens or isinstance(piece, BeamSearchOutput):  # whose first line says that it has begun
                            self.router.prefilled(placement)
                            trial.close()
                            request.note_token()
                        if has_tokens:
                            attempt.begin()
                            losses.progress(generation)
                        yield piece
                if placement.replica in self.router.replicas:  # otherwise it is drained
                    raise LostError(f"{placement.replica}: it ended the request before its end")
            except RefusedError as error:
                losses.note_refusal(placement.replica, client, error)
            except LostError as error:
                losses.note_loss(placement.replica, client, error, died=await has_died(client, error))
            except MovedError:
                pass
            finally:
                trial.close()
                self._end_attempt(client, attempt)
                self.router.finish(placement)

    def _end_attempt(self, client: httpx.AsyncClient, attempt: Attempt) -> None:
        attempts = self._attempts[client]
        attempts.discard(attempt)
        if not attempts:
            del self._attempts[client]
            self._trials.pop(client, None)

    async def _choose(
        self, hashes: Sequence[int], prompt: Prompt, losses: Losses
    ) -> tuple[Placement, httpx.AsyncClient]:
        loop = asyncio.get_running_loop()
        choose = partial(self.router.choose, hashes, prompt.num_tokens, writes=prompt.write_cache)
        while True:
            refused = losses.refused_by(self._clients)
            lost = losses.lost_by(self._clients)
            placement = choose(excluded=refused | lost | losses.of_other_generations(self._generations))
            if placement is None and lost - refused:
                # A replica that lost it is better than none, but not at once: in a moment it may be known to have ended.
                await asyncio.sleep(_SECONDS_BETWEEN_ATTEMPTS)
                excluded = losses.refused_by(self._clients) | losses.of_other_generations(self._generations)
                placement = choose(excluded=excluded)
            if placement is not None:
                return placement, self._clients[placement.replica]
            until = losses.wait_until(loop.time(), self._wait_seconds)
            if refused:
                await asyncio.sleep(min(losses.next_pause(), until - loop.time()))
                losses.forget_refusals()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._arrival.wait()
