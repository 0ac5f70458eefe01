"""Measures how long batches take when the next one is launched before the one in flight is done."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.scheduling.batch import Batch


class ComputeTimer:
    """Measures from one landing to the next, for as long as something is being computed::

        launch 1        launch 2   land 1       launch 3   land 2
           |────────── batch 1 ──────|───────── batch 2 ──────|

    A batch launched ahead that completes no sequence is not waited for: it is measured together with the next one that does.

    Args:
        observe: called with the numbers of prompt tokens and of all tokens, and with seconds.
        ahead: whether batches are launched ahead.
    """

    def __init__(self, observe: Callable[[int, int, float], None], clock: Callable[[], float], ahead: bool) -> None:
        self._observe = observe
        self._clock = clock
        self._ahead = ahead
        self._since = 0.0
        # What has landed since then: the last batch, and the tokens of all batches.
        self._carried: Batch | None = None
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def begin_step(self, batch: Batch, in_flight: Batch | None) -> None:
        """A step begins, which launches a batch; the one before it may be in flight."""
        if in_flight is not None or self._continues(batch):
            return
        self._since = self._clock()
        self._carried = None
        self._num_prompt_tokens = self._num_tokens = 0

    def landed(self, batch: Batch) -> None:
        """The tokens of a batch, if it has any, are on the host."""
        if not batch.chunks:
            return
        self._num_prompt_tokens += sum(chunk.num_tokens for chunk in batch.chunks if chunk.num_tokens > 1)
        self._num_tokens += batch.num_tokens
        self._carried = batch
        if not self._ahead or any(chunk.completes for chunk in batch.chunks):
            now = self._clock()
            self._observe(self._num_prompt_tokens, self._num_tokens, now - self._since)
            self._since, self._carried = now, None
            self._num_prompt_tokens = self._num_tokens = 0

    def _continues(self, batch: Batch) -> bool:
        """Whether a prompt of the last batch that was not waited for continues in this one."""
        if self._carried is None:
            return False
        groups = {chunk.group for chunk in self._carried.chunks}
        return any(chunk.group in groups for chunk in batch.chunks)
