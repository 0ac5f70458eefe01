"""From the chunks of a step to a batch on its way: through the model, and to tokens where the device can choose alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from radixkv.cache import PrefixCache
from radixkv.engine.batch import LaunchedStep
from radixkv.engine.completion import equip_for_sampling, named_logprobs
from radixkv.model.runner import LogitRows, ModelChunk, ModelRunner
from radixkv.sampling.sampler import Sampler
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import Sequence, SequenceGroup
from radixkv.scheduling.scheduler import ScheduledChunk, Scheduler


class Launcher:
    """Launches steps for one engine, whose parts it is given."""

    def __init__(
        self, cache: PrefixCache, scheduler: Scheduler, runner: ModelRunner, sampler: Sampler, tokenizer: Any
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._tokenizer = tokenizer

    def launch(self, chunks: list[ScheduledChunk], previous: LaunchedStep | None) -> LaunchedStep:
        """Compute the chunks, note what that makes known, and have the device choose tokens if it can do so alone."""
        self._runner.copy_blocks(self._cache.drain_copies())
        chosen = None if previous is None or previous.choice is None else previous.choice.token_ids
        places = {} if previous is None else previous.place_of_tokens()
        logits = self._runner.run([self._model_chunk(chunk, places) for chunk in chunks], chosen)
        step = LaunchedStep(chunks, logits, [], [])
        ready: list[tuple[SequenceGroup, Sequence, int]] = []
        row = 0
        host_waits = False
        for chunk in chunks:
            sequence = chunk.sequence
            collects = self._collects_prompt_logprobs(chunk)
            completes = chunk.num_tokens == sequence.num_pending
            num_rows = chunk.num_tokens if collects else int(completes)
            if collects:
                host_waits = True
                self._collect_prompt_logprobs(chunk, logits[row : row + num_rows])
            row += num_rows
            self._scheduler.commit(sequence, chunk.num_tokens)
            if completes:
                ready.append((chunk.group, sequence, row - 1))
        for group, sequence, logits_row in ready:
            if group.request.beams is None:
                step.sampled.append((group, sequence, logits_row))
                step.sampled.extend((s, s.sequences[0], logits_row) for s in self._start_siblings(group))
            elif group.sequences[-1] is sequence:
                step.beams.append((group, [r for g, _, r in ready if g is group]))
        states = [sequence.row for _, sequence, _ in step.sampled if sequence.row is not None]
        if not (host_waits or step.beams or any(state.needs_host for state in states)):
            unknown = [sequence.num_unknown for _, sequence, _ in step.sampled]
            step.choice = self._sampler.choose(step.logits_of_sampled(), states, unknown)
            for _, sequence, _ in step.sampled:
                sequence.expect_token()
        return step

    def _model_chunk(self, chunk: ScheduledChunk, places: Mapping[Sequence, int]) -> ModelChunk:
        sequence = chunk.sequence
        assert sequence.table is not None
        start = sequence.num_computed
        token_ids = np.array(sequence.token_ids[start : start + chunk.num_tokens], dtype=np.int64)
        rows = LogitRows.NONE
        if self._collects_prompt_logprobs(chunk):
            rows = LogitRows.ALL
        elif chunk.num_tokens == sequence.num_pending:
            rows = LogitRows.LAST
        return ModelChunk(token_ids, start, sequence.table, rows, places[sequence] if sequence.num_unknown else None)

    @staticmethod
    def _collects_prompt_logprobs(chunk: ScheduledChunk) -> bool:
        request = chunk.group.request
        wanted = isinstance(request.params, SamplingParams) and request.params.prompt_logprobs is not None
        return wanted and request.metrics.first_token_time is None

    def _start_siblings(self, group: SequenceGroup) -> list[SequenceGroup]:
        """When a prompt with n > 1 is computed, the other samples begin as forks of the first."""
        request = group.request
        params = request.params
        if not isinstance(params, SamplingParams) or len(request.sequences) == params.n:
            return []
        siblings = []
        for index, sequence in enumerate(self._scheduler.fork(request.sequences[0], params.n - 1), start=1):
            sequence.index = index
            equip_for_sampling(sequence, self._tokenizer)
            request.sequences.append(sequence)
            siblings.append(SequenceGroup(request, [sequence], group.prompt))
            self._scheduler.start(siblings[-1])
        return siblings

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
        request.prompt_logprobs.extend(named_logprobs(token, self._tokenizer) for token in tokens)
