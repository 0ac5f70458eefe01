"""Bounds responses that are not streamed, and are in memory as a whole, in several forms.

A request of a few megabytes could ask for gigabytes: hundreds of cached prompts, each repeated in a hundred choices, or with
the likeliest tokens at every position.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.server.protocol import GenerationRequest

# Tokens of prompts, once for each choice that repeats them; four bytes of text a token, or as many of its id.
MAX_REPEATED_TOKENS = 1 << 20
# Log-probabilities of all choices together; some 150 bytes each.
MAX_RETURNED_LOGPROBS = 1 << 22


def check_response_size(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams | BeamSearchParams,
    max_model_len: int,
    *,
    num_copies: int = 1,
    repeating: str | None = None,
) -> None:
    """Refuse what would make a response too large.

    Args:
        max_model_len: tokens of a prompt and its answer at most.
        num_copies: of each prompt, and of its log-probabilities, where the response has them.
        repeating: the field that has the response repeat the prompts; None: it does not.

    Raises:
        ValueError: the message names the field.
    """
    if body.stream:
        return
    num_prompt_tokens = num_copies * sum(len(prompt.token_ids) for prompt in prompts)
    if repeating is not None and num_prompt_tokens > MAX_REPEATED_TOKENS:
        raise ValueError(
            f"{repeating}: {num_prompt_tokens:,} tokens of prompts are more than the {MAX_REPEATED_TOKENS:,} that a response "
            "may repeat; send fewer prompts in one request, or stream"
        )
    num_logprobs = 0
    if params.logprobs is not None:
        rooms = [max(1, max_model_len - len(prompt.token_ids)) for prompt in prompts]
        most = sum(room if params.max_tokens is None else min(params.max_tokens, room) for room in rooms)
        num_logprobs += body.num_choices * most * (1 + params.logprobs)
    if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
        num_logprobs += num_prompt_tokens * (1 + params.prompt_logprobs)
    if num_logprobs > MAX_RETURNED_LOGPROBS:
        name = "prompt_logprobs" if params.logprobs is None else "logprobs"
        otherwise = ", or stream" if body.streams_in_parts and body.prompt_logprobs is None else ""
        raise ValueError(
            f"{name}: up to {num_logprobs:,} of them are more than the {MAX_RETURNED_LOGPROBS:,} that a response may have; "
            f"ask for fewer tokens, choices or prompts{otherwise}"
        )
