"""Executes a batch: runs the model and, where sampling needs nothing from the host, samples the tokens on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from radixkv.attention import QueryBatch
from radixkv.cache import PrefixCache
from radixkv.engine.sampled_token import TokenDecoder, logprobs_with_text, prepare_sampling
from radixkv.model.model_input import HOST_TOKEN, ModelInput
from radixkv.model.runner import ModelRunner
from radixkv.sampling.logprobs import with_logprobs
from radixkv.sampling.sampler import InFlightTokens
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch, BeamStep, SampledRow, ScheduledChunk
from radixkv.scheduling.request import SequenceGroup
from radixkv.scheduling.scheduler import Scheduler


class Executor:
    """Executes batches with the parts of one engine."""

    def __init__(
        self, cache: PrefixCache, scheduler: Scheduler, runner: ModelRunner, tokenizer: Any, decode: TokenDecoder
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._decode = decode

    def execute(self, batch: Batch, in_flight: Batch | None) -> None:
        """Compute the batch's chunks and publish full blocks; sample on the device if that needs nothing from the host.

        Args:
            in_flight: the previous batch, if its tokens have not been fetched yet.
        """
        self._runner.copy_blocks(self._cache.drain_copies())
        lacking_logprobs = [i for i, chunk in enumerate(batch.chunks) if chunk.group.request.lacks_prompt_logprobs]
        model_input = self._model_input(batch, in_flight, lacking_logprobs)
        device_tokens = None if in_flight is None or in_flight.tokens is None else in_flight.tokens.token_ids
        batch.logits = self._runner.run(model_input, device_tokens)
        stops = model_input.num_logits.cumsum().tolist()
        for i in lacking_logprobs:
            chunk, stop = batch.chunks[i], stops[i]
            self._collect_prompt_logprobs(chunk, batch.logits[stop - chunk.num_tokens : stop])
        self._scheduler.blocks.commit(batch.chunks)
        self._assign_rows(batch, stops)
        if not (lacking_logprobs or batch.drafts or batch.beam_steps):
            self._sample_on_device(batch)

    def _model_input(self, batch: Batch, in_flight: Batch | None, lacking_logprobs: list[int]) -> ModelInput:
        """The batch column by column, in a few passes over its chunks that each do little more than one look-up per chunk.

        Args:
            lacking_logprobs: indices of the chunks for which the logits of every row are wanted.
        """
        chunks = batch.chunks
        sequences = [chunk.sequence for chunk in chunks]
        tables = [sequence.table for sequence in sequences if sequence.table is not None]
        starts = [sequence.num_computed for sequence in sequences]
        counts = [chunk.num_tokens for chunk in chunks]
        token_ids: list[int] = []
        num_decoding = [int(chunk.completes) for chunk in chunks]
        for i, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
            token_ids += sequence.token_ids[start : start + count]
            if batch.drafts and sequence in batch.drafts:
                drafts = batch.drafts[sequence]
                token_ids += drafts
                num_decoding[i] += len(drafts)
                counts[i] += len(drafts)
        num_logits = np.array(num_decoding, dtype=np.int64)
        for i in lacking_logprobs:
            num_logits[i] = counts[i]
        device_indices = np.full(len(chunks), HOST_TOKEN, dtype=np.int64)
        if in_flight is not None:
            indices = in_flight.token_indices()
            for i, sequence in enumerate(sequences):
                if sequence.num_placeholders:
                    device_indices[i] = indices[sequence]
        return ModelInput(
            token_ids=np.array(token_ids, dtype=np.int64),
            queries=QueryBatch(
                tables,
                np.array(starts, dtype=np.int64),
                np.array(counts, dtype=np.int64),
                num_decoding=np.array(num_decoding, dtype=np.int64),
            ),
            num_logits=num_logits,
            device_indices=device_indices,
        )

    def _assign_rows(self, batch: Batch, stops: list[int]) -> None:
        """Note which sequences get a token, and from which rows of the logits; samples of a new prompt fork here.

        Args:
            stops: for each chunk, one past its last row of logits.
        """
        beams: dict[SequenceGroup, list[int]] = {}
        for (group, sequence, _, completes), stop in zip(batch.chunks, stops, strict=True):
            if not completes:
                continue
            request = group.request
            if request.beam_search is not None:
                beams.setdefault(group, []).append(stop - 1)
                continue
            batch.sampled.append(SampledRow(group, sequence, stop - 1 - len(batch.drafts.get(sequence, ()))))
            if len(request.sequences) < request.num_seqs:
                batch.sampled += (SampledRow(s, s.sequences[0], stop - 1) for s in self._start_siblings(group))
        batch.beam_steps = [BeamStep(group, rows) for group, rows in beams.items()]

    @staticmethod
    def _sample_on_device(batch: Batch) -> None:
        """Sample the batch's tokens without waiting for them, unless one of its sequences needs the host for that."""
        states = batch.sampling_states
        if any(state.needs_host for state in states):
            return
        num_placeholders = [row.sequence.num_placeholders for row in batch.sampled]
        batch.tokens = InFlightTokens(batch.sampled_logits(), states, num_placeholders)

    def _start_siblings(self, group: SequenceGroup) -> list[SequenceGroup]:
        """When a prompt with n > 1 is computed, the other samples start as forks of the first."""
        request = group.request
        siblings = []
        forks = self._scheduler.blocks.fork(request.sequences[0], request.num_seqs - 1)
        for index, sequence in enumerate(forks, start=1):
            sequence.index = index
            try:
                prepare_sampling(sequence, self._tokenizer)
            except BaseException:
                for fork in forks[index - 1 :]:  # they are not in `request.sequences` yet
                    self._scheduler.blocks.abort(fork)
                raise
            request.sequences.append(sequence)
            siblings.append(SequenceGroup(request, [sequence], group.prefill_token_ids))
            self._scheduler.start(siblings[-1])
        return siblings

    def _collect_prompt_logprobs(self, chunk: ScheduledChunk, logits: torch.Tensor) -> None:
        """Row i of a chunk's logits predicts the prompt token after the chunk's i-th; the first token has no prediction."""
        request, start = chunk.group.request, chunk.sequence.num_computed
        params = request.params
        assert isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        if start == 0:
            request.prompt_logprobs = [None]
        targets = request.prompt_token_ids[start + 1 : start + 1 + chunk.num_tokens].tolist()
        assert request.prompt_logprobs is not None
        tokens = with_logprobs(logits[: len(targets)], targets, [params.prompt_logprobs] * len(targets))
        request.prompt_logprobs.extend(logprobs_with_text(token, self._decode) for token in tokens)
