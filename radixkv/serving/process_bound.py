"""What belongs to the process that made it."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class ProcessBound:
    """Base of classes whose objects can neither be copied nor be sent to another process.

    Refused before anything of them is: torch sends a tensor by moving it into shared memory, and compiled code would go on
    reading it where it was.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: cannot be copied, or sent to another process; make one in each process that needs one"
        )
