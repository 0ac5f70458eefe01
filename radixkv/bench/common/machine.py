"""The environment of a measurement, recorded with its results."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def describe_machine(*packages: str) -> dict[str, Any]:
    """Processor, cores, Python, date, and the versions of ``packages``."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        **{package: _version(package) for package in packages},
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    """None: the package is not installed, or under another name, as Triton in some builds of torch."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
