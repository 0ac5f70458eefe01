"""What the ingress has received of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from radixkv.outputs import CompletionOutput, DraftCounts, RequestMetrics, RequestOutput


class ReceivedAnswer:
    """What has been received of each sample, so that another replica can go on.

    Args:
        count: of samples.
        resumed: what was known of them before the first replica.
        max_tokens: of a sample; None: any number.
        metrics: where the counts of all replicas are added up.
    """

    def __init__(
        self, count: int, resumed: Sequence[CompletionOutput], max_tokens: int | None, metrics: RequestMetrics
    ) -> None:
        by_index = {output.index: output for output in resumed}
        samples = (by_index.get(index) or CompletionOutput(index, "", [], 0.0) for index in range(count))
        self._outputs = [replace(_unaborted(output), token_ids=list(output.token_ids)) for output in samples]
        self._ended: set[int] = set()  # samples whose end the reader has got
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: Any = None
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._earlier_drafts: dict[str, DraftCounts] = {}  # those of replicas before the present one

    @property
    def outputs(self) -> list[CompletionOutput]:
        """What was received of each sample; empty if nothing was, so that samples share the computation of their prompt."""
        return self._outputs if any(output.token_ids or output.finish_reason for output in self._outputs) else []

    def begin_attempt(self) -> None:
        """Another replica goes on, and counts from zero."""
        self._earlier_drafts = dict(self._metrics.drafts)

    def add(self, delta: RequestOutput) -> RequestOutput:
        """Note what is new; returns it as the reader gets it, to whom a sample that draining cut short has not ended.

        The end of a sample, which each later replica reports again, is returned once.

        Raises:
            ValueError: it continues a sample that has ended, or exceeds ``max_tokens``; nothing is noted then.
        """
        for part in delta.outputs:
            self._check_follows(part)
        parts = []
        for part in delta.outputs:
            part = _unaborted(part)
            whole = self._outputs[part.index]
            if part.index in self._ended:
                continue
            if part.finish_reason is not None:
                self._ended.add(part.index)
            whole.token_ids += part.token_ids
            whole.cumulative_logprob = part.cumulative_logprob
            whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
            parts.append(part)
        # A replica that is drained before the first token has computed nothing of the prompt.
        finished = delta.finished and all(output.finish_reason is not None for output in self._outputs)
        if self._num_cached_tokens is None and (finished or any(part.token_ids for part in parts)):
            self._num_cached_tokens, self._prompt_logprobs = delta.num_cached_tokens, delta.prompt_logprobs
            self._metrics.loaded_tokens = delta.metrics.loaded_tokens
            self._metrics.load_seconds = delta.metrics.load_seconds
        for source, counts in delta.metrics.drafts.items():
            before = self._earlier_drafts.get(source, DraftCounts())
            drafted, accepted = before.drafted + counts.drafted, before.accepted + counts.accepted
            self._metrics.drafts[source] = DraftCounts(drafted, accepted)
        return replace(
            delta,
            metrics=self._metrics,
            outputs=parts,
            finished=finished,
            num_cached_tokens=self._num_cached_tokens or 0,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _check_follows(self, part: CompletionOutput) -> None:
        whole = self._outputs[part.index]
        if whole.finish_reason is not None and (part.token_ids or part.finish_reason != whole.finish_reason):
            raise ValueError(f"expected nothing more of sample {part.index}, which has ended, got {part!r:.100}")
        num_tokens = len(whole.token_ids) + len(part.token_ids)
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            raise ValueError(f"expected at most {self._max_tokens} tokens of sample {part.index}, got {num_tokens}")


def _unaborted(output: CompletionOutput) -> CompletionOutput:
    """The same output, as one that goes on if it was aborted."""
    return replace(output, finish_reason=None) if output.finish_reason == "abort" else output
