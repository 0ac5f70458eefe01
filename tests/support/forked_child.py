"""What happens in a forked child, which has none of its parent's threads."""

from __future__ import annotations

import os
from collections.abc import Callable


def refusals_in_a_fork(*calls: Callable[[], object]) -> list[str]:
    """The messages of the RuntimeErrors that calls raise in a child, one after the other."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    os.write(writing, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        messages = said.read().splitlines()
    os.waitpid(child, 0)
    return messages
