"""How long something took, whatever else the machine did meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds in which processors' time is counted: what takes less may seem to take none."""

# Of what stands in /proc/PID/stat after the command's name (man 5 proc), counted from 0.
_USER, _SYSTEM = 11, 12


def processor_seconds(pid: int) -> float:
    """What a process has computed so far, all its threads together, in seconds of one processor.

    How much it computes between a question and its answer does not depend on what other processes do, as the time by the
    clock does: a server that makes a client wait without a reason is busy with something else.

    Args:
        pid: of the process.

    Raises:
        OSError: there is no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) * TICK
