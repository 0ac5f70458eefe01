"""A request that replicas answer, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cluster.wire import encode_request
from radixkv.outputs import RequestMetrics
from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams


@dataclass(eq=False)
class SentRequest:
    """A request as the next attempt sends it, and where its progress is noted.

    Attributes:
        times: when it was scheduled, and had its first token; of all attempts, the first counts.
        on_accepted: called when a replica accepts it; None: one has, or this is not needed.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    priority: int
    tenant: str
    times: RequestMetrics
    on_accepted: Callable[[], object] | None

    def body(self) -> bytes:
        """See `encode_request`."""
        return encode_request(self.prompt, self.params, self.priority, self.tenant)

    def note_acceptance(self) -> None:
        """A replica has accepted it."""
        if self.on_accepted is not None:
            self.on_accepted()
            self.on_accepted = None

    def note_scheduling(self) -> None:
        """A replica has begun with it."""
        self.times.scheduled_time = self.times.scheduled_time or time.monotonic()

    def note_token(self) -> None:
        """A token has come, or the first line of a search."""
        times = self.times
        if times.first_token_time is None:
            times.first_token_time = time.monotonic()
            times.scheduled_time = times.scheduled_time or times.first_token_time
