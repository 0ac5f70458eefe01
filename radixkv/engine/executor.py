"""Executes a batch: through the model, and to sampled tokens where sampling needs nothing of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from radixkv.attention import QueryBatch
from radixkv.cache import BlockTable, PrefixCache
from radixkv.engine.completion import logprobs_with_text, prepare_sampling
from radixkv.model.runner import HOST_TOKEN, ModelInput, ModelRunner
from radixkv.sampling.sampler import InFlightTokens, prompt_logprobs
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch, BeamStep, SampledRow, ScheduledChunk
from radixkv.scheduling.request import SequenceGroup
from radixkv.scheduling.scheduler import Scheduler


class Executor:
    """Executes batches for one engine, whose parts it is given."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler, runner: ModelRunner, tokenizer: Any) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer

    def execute(self, batch: Batch, in_flight: Batch | None) -> None:
        """Compute the batch's chunks and publish full blocks; sample on the device if that needs nothing of the host.

        Args:
            in_flight: the batch before, if its tokens have not been fetched yet.
        """
        self._runner.copy_blocks(self._cache.drain_copies())
        model_input = self._model_input(batch, in_flight)
        device_tokens = None if in_flight is None or in_flight.tokens is None else in_flight.tokens.token_ids
        batch.logits = self._runner.run(model_input, device_tokens)
        host_samples = self._commit(batch, model_input.num_logits.tolist())
        if host_samples or batch.beam_steps:
            return
        states = batch.sampling_states
        if any(state.needs_host for state in states):
            return
        num_placeholders = [row.sequence.num_placeholders for row in batch.sampled]
        batch.tokens = InFlightTokens(batch.sampled_logits(), states, num_placeholders)
        for row in batch.sampled:
            row.sequence.append_placeholder()

    def _model_input(self, batch: Batch, in_flight: Batch | None) -> ModelInput:
        """The batch column by column."""
        token_ids: list[int] = []
        tables: list[BlockTable] = []
        num_context, num_logits, device_indices = [], [], []
        in_flight_indices = {} if in_flight is None else in_flight.token_indices()
        for chunk in batch.chunks:
            sequence, count = chunk.sequence, chunk.num_tokens
            assert sequence.table is not None
            start = sequence.num_computed
            token_ids += sequence.token_ids[start : start + count]
            tables.append(sequence.table)
            num_context.append(start)
            num_logits.append(count if _collects_prompt_logprobs(chunk) else int(count == sequence.num_pending))
            device_indices.append(in_flight_indices[sequence] if sequence.num_placeholders else HOST_TOKEN)
        num_new = np.array([chunk.num_tokens for chunk in batch.chunks], dtype=np.int64)
        return ModelInput(
            token_ids=np.array(token_ids, dtype=np.int64),
            queries=QueryBatch(tables, np.array(num_context, dtype=np.int64), num_new),
            num_logits=np.array(num_logits, dtype=np.int64),
            device_indices=np.array(device_indices, dtype=np.int64),
        )

    def _commit(self, batch: Batch, num_logits: list[int]) -> bool:
        """Note the chunks as computed, and which sequences get a token; returns whether the host must sample them."""
        host_samples = False
        completed: list[tuple[ScheduledChunk, int]] = []
        stop = 0
        for chunk, count in zip(batch.chunks, num_logits, strict=True):
            start, stop = stop, stop + count
            if _collects_prompt_logprobs(chunk):
                host_samples = True
                self._collect_prompt_logprobs(chunk, batch.logits[start:stop])
            completes = chunk.num_tokens == chunk.sequence.num_pending
            self._scheduler.blocks.commit(chunk.sequence, chunk.num_tokens)
            if completes:
                completed.append((chunk, stop - 1))
        for chunk, row in completed:
            group, sequence = chunk.group, chunk.sequence
            if group.request.beam_search is None:
                batch.sampled.append(SampledRow(group, sequence, row))
                batch.sampled += (SampledRow(s, s.sequences[0], row) for s in self._start_siblings(group))
            elif group.sequences[-1] is sequence:
                batch.beam_steps.append(BeamStep(group, [row for c, row in completed if c.group is group]))
        return host_samples

    def _start_siblings(self, group: SequenceGroup) -> list[SequenceGroup]:
        """When a prompt with n > 1 is computed, the other samples start as forks of the first."""
        request = group.request
        params = request.params
        if not isinstance(params, SamplingParams) or len(request.sequences) == params.n:
            return []
        siblings = []
        for index, sequence in enumerate(self._scheduler.blocks.fork(request.sequences[0], params.n - 1), start=1):
            sequence.index = index
            prepare_sampling(sequence, self._tokenizer)
            request.sequences.append(sequence)
            siblings.append(SequenceGroup(request, [sequence], group.prompt))
            self._scheduler.start(siblings[-1])
        return siblings

    def _collect_prompt_logprobs(self, chunk: ScheduledChunk, logits: torch.Tensor) -> None:
        """Row i of a chunk's logits is about the prompt token after the chunk's i-th; the first token has none."""
        request, start = chunk.group.request, chunk.sequence.num_computed
        params = request.params
        assert isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        if start == 0:
            request.prompt_logprobs = [None]
        targets = request.prompt_token_ids[start + 1 : start + 1 + chunk.num_tokens]
        assert request.prompt_logprobs is not None
        tokens = prompt_logprobs(logits[: len(targets)], targets.tolist(), params.prompt_logprobs)
        request.prompt_logprobs.extend(logprobs_with_text(token, self._tokenizer) for token in tokens)


def _collects_prompt_logprobs(chunk: ScheduledChunk) -> bool:
    request = chunk.group.request
    wanted = isinstance(request.params, SamplingParams) and request.params.prompt_logprobs is not None
    return wanted and request.metrics.first_token_time is None
