"""What belongs to the process that made it."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


def refuse_copies(name: str, protocol: SupportsIndex) -> NoReturn:
    """In place of an object's ``__reduce_ex__``: refuse to copy it or to send it to another process.

    Refused before anything of it is: torch sends a tensor by moving it into shared memory, and native code would go on
    reading it where it was.
    """
    raise TypeError(f"{name}: cannot be copied, or sent to another process; make one in each process that needs one")


class ProcessBound:
    """Base of classes whose objects can neither be copied nor be sent to another process."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copies(type(self).__name__, protocol)
