"""Checks that what a replica sends answers the request: with its samples, in tokens of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.cache.arguments import is_number, is_unicode
from radixkv.outputs import (
    FINISH_REASONS,
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
)
from radixkv.sampling_params import BeamSearchParams, SamplingParams

# Beams are complete when they are sent.
_ENDS_OF_BEAMS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class AnswerChecks:
    """Checks the answer to one request.

    JSON may hold anything, and others rely on it: the server's metrics and limits, and the next replica that goes on with
    the answer.

    Attributes:
        prompt_token_ids: of the request.
        params: of the request.
        vocab_size: token ids are below it.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams | BeamSearchParams
    vocab_size: int

    def checked(self, delta: RequestOutput) -> RequestOutput:
        """A piece of the answer to a request with `SamplingParams`.

        Raises:
            ValueError: it is not a piece of such an answer.
        """
        assert isinstance(self.params, SamplingParams)
        _check_counts(delta.metrics)
        for part in delta.outputs:
            if not self._is_sample(part, self.params):
                raise ValueError(f"expected tokens of samples 0 to {self.params.n - 1}, got {part!r:.100}")
        if len({part.index for part in delta.outputs}) < len(delta.outputs):
            raise ValueError(f"expected each sample once, got {delta.outputs!r:.200}")
        if not self._is_cached_count(delta.num_cached_tokens):
            raise ValueError(f"expected a number of cached tokens, got {delta.num_cached_tokens!r:.100}")
        if delta.prompt_logprobs is not None:
            has_tokens = any(part.token_ids for part in delta.outputs)
            if not self._are_prompt_logprobs(delta.prompt_logprobs, whole=has_tokens):
                raise ValueError(f"expected the prompt's log-probabilities, got {delta.prompt_logprobs!r:.100}")
        return delta

    def checked_beams(self, output: BeamSearchOutput) -> BeamSearchOutput:
        """The answer to a request with `BeamSearchParams`.

        Raises:
            ValueError: it is not such an answer.
        """
        assert isinstance(self.params, BeamSearchParams)
        _check_counts(output.metrics)
        if output.num_prompt_tokens != len(self.prompt_token_ids) or not self._is_cached_count(
            output.num_cached_tokens
        ):
            raise ValueError(f"expected beams of {len(self.prompt_token_ids)} tokens and more, got {output!r:.100}")
        if not 1 <= len(output.sequences) <= self.params.beam_width:
            raise ValueError(f"expected 1 to {self.params.beam_width} beams, got {len(output.sequences)}")
        for beam in output.sequences:
            if not self._is_beam(beam):
                raise ValueError(f"expected beams that go on with the prompt, got {beam!r:.100}")
        return output

    def _is_sample(self, part: CompletionOutput, params: SamplingParams) -> bool:
        total = part.cumulative_logprob
        return (
            type(part.index) is int
            and 0 <= part.index < params.n
            and _is_text(part.text)
            and self._are_tokens(part.token_ids)
            and (is_number(total) or (total is None and params.logprobs is None))
            and (params.logprobs is None or self._are_logprobs(part.token_ids, part.logprobs))
            and part.finish_reason in (None, *FINISH_REASONS)
            and _is_stop_reason(part.stop_reason)
        )

    def _is_beam(self, beam: BeamSearchSequence) -> bool:
        num_prompt_tokens = len(self.prompt_token_ids)
        return (
            self._are_tokens(beam.tokens)
            and beam.tokens[:num_prompt_tokens] == list(self.prompt_token_ids)
            and self._are_logprobs(beam.tokens[num_prompt_tokens:], beam.logprobs)
            and is_number(beam.cum_logprob)
            and beam.finish_reason in _ENDS_OF_BEAMS
            and _is_stop_reason(beam.stop_reason)
        )

    def _are_tokens(self, token_ids: Any) -> bool:
        return isinstance(token_ids, list) and all(map(self._is_token, token_ids))

    def _is_token(self, token_id: Any) -> bool:
        return type(token_id) is int and 0 <= token_id < self.vocab_size

    def _is_cached_count(self, count: Any) -> bool:
        return type(count) is int and 0 <= count <= len(self.prompt_token_ids)

    def _are_prompt_logprobs(self, logprobs: PromptLogprobs, *, whole: bool) -> bool:
        """Whether these are the log-probabilities of the prompt, or, where a replica stops in the middle of it, of a part."""
        num_tokens = len(self.prompt_token_ids)
        return (
            (num_tokens if whole else 1) <= len(logprobs) <= num_tokens
            and logprobs[0] is None
            and self._are_logprobs(self.prompt_token_ids[1 : len(logprobs)], logprobs[1:])
        )

    def _are_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> bool:
        """Whether there are log-probabilities for each of these tokens, its own among them."""
        return (
            logprobs is not None
            and len(logprobs) == len(token_ids)
            and all(
                entries is not None
                and token_id in entries
                and all(self._is_token(each) and _is_logprob(entry) for each, entry in entries.items())
                for token_id, entries in zip(token_ids, logprobs, strict=True)
            )
        )


def _check_counts(metrics: RequestMetrics) -> None:
    """Refuse what a replica cannot have counted for one request.

    Raises:
        ValueError: a count is impossible.
    """
    numbers = [*metrics.loaded_tokens.values()]
    numbers += [number for counts in metrics.drafts.values() for number in (counts.drafted, counts.accepted)]
    if (
        not all(map(_is_text, (*metrics.loaded_tokens, *metrics.drafts)))
        or not all(type(number) is int and number >= 0 for number in numbers)
        or not is_number(metrics.load_seconds)
        or not 0 <= metrics.load_seconds < math.inf
    ):
        raise ValueError(f"expected numbers of loaded and drafted tokens, got {metrics!r:.200}")


def _is_logprob(entry: Logprob) -> bool:
    text = entry.decoded_token
    return is_number(entry.logprob) and type(entry.rank) is int and (text is None or isinstance(text, str))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_unicode(value)


def _is_stop_reason(value: Any) -> bool:
    return value is None or type(value) is int or _is_text(value)
