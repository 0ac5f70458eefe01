"""Processor time of a process: how long something took, whatever else the machine did meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""The unit in which the system counts processor time, in seconds: what takes less may count as 0."""

# Indices, from 0, of the fields of /proc/PID/stat after the command's name (man 5 proc).
_USER, _SYSTEM = 11, 12


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used so far, all its threads together, in seconds.

    What it computes between a question and its answer does not depend on what other processes do, as time by the clock does.
    And a server that makes a client wait without a reason shows it here, because it computes something else meanwhile.

    Args:
        pid: of the process.

    Raises:
        OSError: there is no such process.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) * TICK
