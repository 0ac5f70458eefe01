"""One attempt to answer a request: it can be called away from its replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import TypeVar

from radixkv.cluster.losses import LostError, RefusedError

_Line = TypeVar("_Line")


class MovedError(Exception):
    """The stream is to go elsewhere."""


@dataclass(eq=False, slots=True)
class Attempt:
    """A request on a replica, from which it can be called away.

    Attributes:
        replica: the name.
        generation: the replica's.
        num_tokens: of the prompt and the longest answer together.
        begun: whether the request has tokens.
        sent: whether the replica may have had it.
        accepted: whether the replica has accepted it.
    """

    replica: str
    generation: str | None
    num_tokens: int
    begun: bool
    sent: bool = False
    accepted: bool = False
    _died: bool = False
    _interrupted: bool = False
    # The timeout within which it waits for its next line; None: it does not wait.
    _scope: asyncio.Timeout | None = None

    def send(self) -> None:
        """The replica may have the request from now on."""
        self.sent = True

    def begin(self) -> None:
        """The request has tokens; if it was called away when it had none, it must stay after all."""
        if not self.begun:
            self.begun, self._interrupted = True, False

    def abandon(self) -> None:
        """Leave the replica, which has died."""
        self._died = True
        self._interrupt()

    def move(self, elsewhere: Iterable[tuple[str | None, float]]) -> None:
        """Leave the replica, which is drained, if another one can go on with the request.

        Args:
            elsewhere: for each of the others, its generation and the most tokens of a sequence that it has room for.
        """
        for generation, room in elsewhere:
            if room >= self.num_tokens and (not self.begun or self.generation == generation):
                self._interrupt()
                return

    def _interrupt(self) -> None:
        # A scope that is expiring because of an earlier call cannot be rescheduled.
        if not self._interrupted and self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
        self._interrupted = True

    async def read(self, lines: AsyncGenerator[_Line, None]) -> AsyncGenerator[_Line, None]:
        """The lines of the replica's answer, the first of which is its acceptance, until the request is called away.

        Raises:
            LostError, RefusedError, MovedError: it was.
        """
        while True:
            self.check()
            try:
                async with asyncio.timeout(None) as self._scope:
                    line = await anext(lines)
            except TimeoutError:
                self.check()
                raise
            except StopAsyncIteration:
                return
            finally:
                self._scope = None
            self.accepted = True
            yield line

    def check(self) -> None:
        """Raise if it was interrupted.

        Raises:
            LostError, RefusedError, MovedError: why.
        """
        if self._died:
            # Until it accepts the request it may not have been reached, over a connection to a host that is cut off.
            raise LostError(f"{self.replica}: it died", died=self.accepted) if self.sent else RefusedError(None)
        if self._interrupted:
            raise MovedError
