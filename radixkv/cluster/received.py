"""What the ingress has received of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from radixkv.outputs import CompletionOutput, RequestOutput


class Received:
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
        """Note what is new; returns it as the reader gets it: for the reader, draining a replica ends nothing."""
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
