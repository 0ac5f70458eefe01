"""Streams that survive the replica they are on.

The ingress keeps the tokens that it has delivered. When a replica dies, is drained or breaks off, another one gets the prompt
with those tokens, and goes on with the next (`radixkv.engine.resumption`): who reads sees a pause, and then the text that he
would have got anyhow.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import httpx

from radixkv.cluster.wire import decode_delta, encode_request, error_of
from radixkv.engine.resumption import check_resumable
from radixkv.errors import ReplicasLostError
from radixkv.outputs import CompletionOutput, RequestMetrics, RequestOutput
from radixkv.prompts import Prompt, with_answer_form
from radixkv.routing import Placement, Router, prompt_hashes
from radixkv.sampling_params import SamplingParams


class _LostError(Exception):
    """The replica broke off; another one may go on."""


class ReplicaStreams:
    """Answers requests by replicas, and moves them when a replica is lost.

    Args:
        router: knows the replicas by the names that ``clients`` have.
        clients: to each replica's `replica_app`, by name; its base address is the replica's. It may change at any time.
        secret: the replicas'.
        max_attempts: replicas that one request is sent to at most.

    Raises:
        ValueError: ``max_attempts`` is below 1.
    """

    def __init__(
        self, router: Router, clients: Mapping[str, httpx.AsyncClient], secret: str, *, max_attempts: int = 4
    ) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts: expected a whole number of at least 1, got {max_attempts!r}")
        self._router = router
        self._clients = clients
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._max_attempts = max_attempts
        self._seeds = random.SystemRandom()

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, *, priority: int = 0, tenant: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, piece by piece, as `AsyncLLM.generate` does; leaving the iteration early aborts it.

        Args:
            prompt: tokenized.
            params: how to choose tokens; without a seed, one is drawn here, because every replica needs the same.
            request_id: that the outputs show.
            priority: among the tenant's own requests.
            tenant: on whose behalf.

        Raises:
            ValueError: the replica refuses the request, as any would; or ``prompt.resume`` is there without a seed, or not of
                each sample.
            StructuredOutputError: as `AsyncLLM.generate`.
            ReplicasLostError: it was lost ``max_attempts`` times, or there is no other replica.
        """
        params = with_answer_form(params, prompt.answer_form)
        if prompt.resume:
            check_resumable(params, prompt.resume)  # here: a replica sees a seed and every sample in any case
        if params.seed is None and not params.greedy:
            params = replace(params, seed=self._seeds.getrandbits(63))
        hashes = prompt_hashes(prompt.token_ids, prompt.namespace, self._router.block_size)
        metrics = RequestMetrics(arrival_time=time.monotonic())
        known = RequestOutput(request_id, prompt.text, list(prompt.token_ids), None, [], False, 0, metrics)
        received = _Received(params.n, prompt.resume)
        excluded: set[str] = set()
        reason: Exception | None = None
        while len(excluded) < self._max_attempts:
            placement = self._router.choose(hashes, len(prompt.token_ids), excluded)
            if placement is None:
                break
            excluded.add(placement.replica)
            sent = replace(prompt, resume=received.outputs)
            try:
                async with aclosing(self._pieces(placement, encode_request(sent, params, priority, tenant))) as pieces:
                    async for line in pieces:
                        delta = received.add(decode_delta(line, known))
                        has_tokens = any(output.token_ids for output in delta.outputs)
                        if has_tokens:
                            self._router.prefilled(placement)
                            metrics.first_token_time = metrics.first_token_time or time.monotonic()
                        if delta.finished:
                            metrics.finished_time = time.monotonic()
                        if delta.finished or has_tokens:
                            yield delta
                        if delta.finished:
                            return
            except _LostError as error:
                reason = error
            finally:
                self._router.finish(placement)
        raise ReplicasLostError(f"request {request_id!r} was lost by {len(excluded)} replicas: {reason}") from reason

    async def _pieces(self, placement: Placement, body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of one replica up to the last, which is finished.

        Raises:
            ValueError: it refuses the request.
            _LostError: there is no such last line.
        """
        client = self._clients.get(placement.replica)
        if client is None:
            raise _LostError(f"{placement.replica}: gone")
        try:
            async with client.stream("POST", "/generate", content=body, headers=self._headers) as response:
                if response.status_code != HTTPStatus.OK:
                    await response.aread()
                    message = f"{placement.replica}: {response.status_code} {response.text:.300}"
                    if response.status_code == HTTPStatus.BAD_REQUEST:
                        raise ValueError(str(response.json()["error"]))
                    raise _LostError(message)
                async with aclosing(_whole_lines(response)) as lines:
                    async for line in lines:
                        piece = json.loads(line)
                        if "error" in piece:
                            lasting = error_of(piece)
                            if lasting is not None:
                                raise lasting
                            raise _LostError(f"{placement.replica}: {piece['error']}")
                        yield piece
                        if piece["finished"]:
                            break  # aborted by the replica, if it was not the end
        except httpx.TransportError as error:
            raise _LostError(f"{placement.replica}: {error!r}") from error
        raise _LostError(f"{placement.replica}: it broke off")


class _Received:
    """What has been received of each sample, so that another replica can go on."""

    def __init__(self, count: int, resumed: Sequence[CompletionOutput]) -> None:
        by_index = {output.index: output for output in resumed}
        samples = (by_index.get(index) or CompletionOutput(index, "", [], 0.0) for index in range(count))
        self._outputs = [replace(output, token_ids=list(output.token_ids)) for output in samples]
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: Any = None

    @property
    def outputs(self) -> list[CompletionOutput]:
        """Nothing, where nothing has been received: then samples share the computation of their prompt."""
        return self._outputs if any(output.token_ids or output.finish_reason for output in self._outputs) else []

    def add(self, delta: RequestOutput) -> RequestOutput:
        """Note what is new; returns it as the reader gets it, to whom a replica that is drained ends nothing."""
        parts = []
        for part in delta.outputs:
            if part.finish_reason == "abort":
                part = replace(part, finish_reason=None, stop_reason=None)
            whole = self._outputs[part.index]
            whole.token_ids += part.token_ids
            whole.cumulative_logprob = part.cumulative_logprob
            whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
            parts.append(part)
        # One that is drained before the first token has computed nothing of the prompt.
        finished = delta.finished and all(output.finish_reason is not None for output in self._outputs)
        if self._num_cached_tokens is None and (finished or any(part.token_ids for part in parts)):
            self._num_cached_tokens, self._prompt_logprobs = delta.num_cached_tokens, delta.prompt_logprobs
        return replace(
            delta,
            outputs=parts,
            finished=finished,
            num_cached_tokens=self._num_cached_tokens or 0,
            prompt_logprobs=self._prompt_logprobs,
        )


async def _whole_lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Lines that end in a line end: what comes after the last one was cut off."""
    rest = b""
    chunks: AsyncIterator[bytes] = response.aiter_bytes()
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
