"""What a process has used and holds, by its id; each raises `OSError` where there is no such process."""

from __future__ import annotations

import os
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""The unit in which the system counts processor time, in seconds: what takes less may count as 0."""

# Indices, from 0, of the fields of /proc/PID/stat after the command's name (man 5 proc).
_USER, _SYSTEM = 11, 12


def processor_seconds(pid: int) -> float:
    """Processor time of all threads together, in seconds.

    Unlike time by the clock, it does not depend on what other processes do. A server that makes a client wait without a
    reason shows it here, because it computes something else meanwhile.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[_USER]) + int(fields[_SYSTEM])) * TICK


def resident_megabytes(pid: int) -> float:
    """Memory that is resident now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def num_open_files(pid: int) -> int:
    """Open file descriptors, sockets included."""
    return len(os.listdir(f"/proc/{pid}/fd"))
