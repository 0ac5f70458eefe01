"""How long a replica takes, modelled by three rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Rates of one replica. The defaults are those of SmolLM2-135M-Instruct on two cores (`radixkv bench e2e`).

    A step takes ``step + prefill * prompt tokens + decode * decoding sequences`` seconds, and has ``chunk`` tokens at most.

    Attributes:
        prefill: seconds for each token of a prompt.
        decode: seconds for each decoding sequence, in each step.
        step: seconds for each step.
        chunk: tokens of prompts in a step.
    """

    prefill: float = 0.75e-3
    decode: float = 2e-3
    step: float = 25e-3
    chunk: int = 512

    def prefill_seconds(self, num_tokens: int, num_decoding: int) -> float:
        """Seconds to compute so many tokens of a prompt beside so many decoding sequences."""
        steps = -(-num_tokens // self.chunk)
        return num_tokens * self.prefill + steps * (self.step + num_decoding * self.decode)

    def step_seconds(self, num_prompt_tokens: int, num_decoding: int) -> float:
        """Seconds for a step, in which each decoding sequence gets a token, beside a prompt of so many tokens."""
        return self.step + min(num_prompt_tokens, self.chunk) * self.prefill + num_decoding * self.decode

    def work(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Seconds of a replica that a request takes, if each of its steps is shared with fifteen others."""
        return num_prompt_tokens * self.prefill + num_output_tokens * (self.decode + self.step / 16)
